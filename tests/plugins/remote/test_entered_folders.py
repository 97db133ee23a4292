"""Which folders on a cluster the commands of --on send code into, start in, and fetch from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurmft.core.trusted import MARK
from slurmft.plugins.remote import connection
from tests.core.test_attacks import let_write
from tests.support.users import User

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users"),
]

EVE = User("eve", 21002, Path("/"))


def bash(script: str, folder: Path) -> str:
    """What a script prints in a folder, its errors, too."""
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder where a group can rename."""
    folder = tmp_path / "shared by all"
    folder.mkdir()
    folder.chmod(0o2775)
    return folder


def test_code_is_sent_into_a_folder_that_slurmft_has_made(shared: Path) -> None:
    let_write(shared, EVE, "default")
    place = shared / "a" / "it's code"
    enter = f"{{ {connection.entering_own(str(place))}; }} && pwd"
    for _ in range(2):
        assert bash(enter, shared) == f"{place}\n"
        assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "instead", ["open", "closed", "other mark", "empty", "link", "theirs"]
)
def test_code_is_sent_into_no_folder_that_others_have_put_there(
    shared: Path, instead: str
) -> None:
    place = shared / "code"
    enter = f"{{ {connection.entering_own(str(place))}; }} && pwd"
    other = shared / "thesis"
    other.mkdir(mode=0o700)
    if instead == "open":
        other.chmod(0o2775)
        (other / MARK).write_text(f"{other.stat().st_ino}\n")
    elif instead == "other mark":
        (other / MARK).write_text(f"{shared.stat().st_ino}\n")
    elif instead == "theirs":
        os.chown(other, EVE.uid, EVE.uid)
        (other / MARK).write_text(f"{other.stat().st_ino}\n")
    elif instead == "closed":
        (other / "train.py").touch()
    if instead == "link":
        place.symlink_to(other)
    else:
        other.rename(place)
    before = sorted(place.iterdir())
    said = bash(enter, shared)
    assert said.startswith(f"error: {place} is another user's, or a link, or others")
    assert sorted(place.iterdir()) == before


def test_a_folder_where_nobody_else_can_rename_is_closed(tmp_path: Path) -> None:
    place = tmp_path / "code"
    place.mkdir()
    place.chmod(0o775)
    enter = f"{{ {connection.entering_own(str(place))}; }} && pwd"
    assert bash(enter, tmp_path) == f"{place}\n"
    assert place.stat().st_mode & 0o777 == 0o700
    assert not list(place.iterdir())


def test_a_run_is_fetched_from_the_folder_that_was_asked_of(tmp_path: Path) -> None:
    """Of other users' folders, one may have the same inode on another disk."""
    inode = tmp_path.stat().st_ino
    assert bash(connection.entered(inode), tmp_path) == ""
    assert "another folder has the name" in bash(connection.entered(1), tmp_path)
    os.chown(tmp_path, EVE.uid, EVE.uid)
    assert "another folder has the name" in bash(connection.entered(inode), tmp_path)
    assert "another user by now" in bash(connection.entered_own(), tmp_path)
