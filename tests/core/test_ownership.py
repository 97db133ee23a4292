"""Whose a file is, in file systems of others, too."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from slurmft.core import bash, filesystem, mounts, ownership
from tests.support import lockfs

PACKAGE = Path(bash.__file__).parent.parent
MOUNTS = """\
22 27 0:20 / /proc rw - proc proc rw
40 27 0:39 / /home/eve/a\rb\x0c\x85\x1e\u2028\udcff rw,nosuid - fuse.sshfs x:/ rw,user_id=1003
41 27 0:40 / /home/eve/a\\040-\\040b rw,nosuid master:1 - fuse.sshfs x:/ rw,user_id=1002
42 27 0:41 / /sys/fs/fuse/connections rw - fusectl user_id=3 rw
43 27 0:42 / /mnt rw - fuse a\\040b rw,user_id=0,group_id=0,allow_other
45 27 0:43 / /host rw - virtiofs host rw
44 27 8:1 / / rw - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("device", "server"),
    [
        ((0, 39), 1003),
        ((0, 40), 1002),
        ((0, 42), 0),
        ((0, 20), None),
        ((0, 41), None),
        ((0, 43), None),
    ],
)
def test_who_has_mounted_a_file_system(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: tuple[int, int],
    server: int | None,
) -> None:
    """Also where a user has given odd names to the places of theirs."""
    table = tmp_path / "mountinfo"
    table.write_bytes(MOUNTS.encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(mounts, "_TABLE", table)
    assert len(mounts.lines()) == 7
    assert ownership.server_of(mounts.lines(), os.makedev(*device)) == server
    with pytest.raises(KeyError):
        ownership.server_of(mounts.lines(), os.makedev(0, 99))
    assert filesystem.of("/home/eve").mount == "/"


@pytest.mark.processes
def test_what_another_user_has_mounted_is_theirs(tmp_path: Path) -> None:
    """Whatever owner it shows; also where it is no longer mounted."""
    reason = lockfs.missing()
    if reason:
        pytest.skip(reason)
    with lockfs.TwoNodes(tmp_path / "shown", user=21002) as shown:
        node = shown.nodes[0]
        (node / "file").touch()
        (node / "link").symlink_to("/etc/passwd")
        for name, follows, user in (
            ("file", True, 21002),
            ("link", False, 21002),
            ("link", True, 0),
        ):
            status = ownership.status(node / name, follow_symlinks=follows)
            assert status.st_uid == user
        assert ownership.status(shown.back / "file").st_uid == 0
        is_trusted = f"{bash.functions(ownership.BASH)}; slurmft_mount_is_trusted ."
        for folder, code in ((node, 1), (shown.back, 0)):
            done = subprocess.run(["bash", "-c", is_trusted], cwd=folder, timeout=30)
            assert done.returncode == code
        with open(node / "file") as file:
            subprocess.run(["umount", "--lazy", node], check=True, timeout=30)
            assert ownership.status(file.fileno()).st_uid == 65534


@pytest.mark.processes
@pytest.mark.parametrize(
    ("device", "is_trusted"),
    [
        ((0, 39), False),
        ((0, 42), True),
        ((0, 43), True),
        ((0, 99), False),
        ((8, 39), True),
    ],
)
def test_bash_asks_the_same_of_file_systems_in_user_space(
    tmp_path: Path, device: tuple[int, int], is_trusted: bool
) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(MOUNTS.encode("utf-8", "surrogateescape"))
    number = os.makedev(*device)
    script = f"""
        {bash.functions(ownership.BASH).replace("/proc/self/mountinfo", str(table))}
        stat() {{ if [ "$1" = -fc ]; then echo 65735546; else echo {number}; fi; }}
        slurmft_mount_is_trusted .
    """
    done = subprocess.run(["bash", "-c", script], timeout=30)
    assert (done.returncode == 0) == is_trusted


@pytest.mark.processes
def test_functions_of_bash_pass_on_one_line() -> None:
    folders = ("core", "plugins/remote")
    files = [file for name in folders for file in (PACKAGE / name).glob("*.bash")]
    assert len(files) == 2
    for file in files:
        line = bash.functions(file)
        assert "\n" not in line
        names = re.findall(r"^(\w+)\(\)", file.read_text(), re.MULTILINE)
        command = f"{line}; declare -F {' '.join(names)}"
        defined = subprocess.check_output(["bash", "-c", command], text=True)
        assert defined.split() == names
