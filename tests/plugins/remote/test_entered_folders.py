"""Which folders on a cluster the commands of --on send code into, start in, and fetch from."""

from __future__ import annotations

import os
import shlex
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


@pytest.mark.parametrize("whose", ["ours", "theirs", "their folder's"])
@pytest.mark.parametrize("sticky", [0, 0o1000])
def test_code_is_sent_nowhere_by_a_link_of_others_on_the_way(
    tmp_path: Path, shared: Path, whose: str, sticky: int
) -> None:
    """What it leads to is a folder in which nobody can rename, and of the same name."""
    shared.chmod(0o2775 | sticky)
    home = tmp_path / "home"
    thesis = home / "code"
    thesis.mkdir(parents=True)
    thesis.chmod(0o755)
    holder = shared
    if whose == "their folder's":
        holder = shared / "eve"
        holder.mkdir()
        os.chown(holder, EVE.uid, EVE.uid)
    link = holder / "link"
    link.symlink_to(home)
    if whose != "ours":
        os.chown(link, EVE.uid, EVE.uid, follow_symlinks=False)
    enter = f"{connection.entering_own(str(link / 'code'))} && pwd"
    # A link of one's own stays where it is in a sticky folder alone.
    if whose == "ours" and sticky:
        assert bash(enter, tmp_path) == f"{thesis}\n"
        return
    assert "or others may have put it there" in bash(enter, tmp_path)
    assert thesis.stat().st_mode & 0o777 == 0o755
    if whose == "theirs":
        bash(connection.entering_own(str(link / "new" / "code")), tmp_path)
        assert not (home / "new").exists()


def test_a_link_that_takes_the_place_of_an_examined_folder_leads_nowhere(
    tmp_path: Path, shared: Path
) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    thesis.chmod(0o755)
    place = shared / "code"
    place.mkdir(mode=0o700)
    swap = f"ln -s {shlex.quote(str(thesis))} {shlex.quote(str(place))}"
    enter = connection.entering_own(str(place))
    # As cd begins, the name of what was looked at is a link.
    swapped = f'cd() {{ rmdir -- {shlex.quote(str(place))}; {swap}; builtin cd "$@"; }}'
    assert "or others may have put it there" in bash(f"{swapped}; {enter}", tmp_path)
    assert thesis.stat().st_mode & 0o777 == 0o755
    assert not list(thesis.iterdir())


def test_line_ends_of_a_name_count_on_the_way(tmp_path: Path) -> None:
    """Where they are dropped, another folder is looked at."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a\n").mkdir()
    (tmp_path / "a\n").chmod(0o777)
    place = tmp_path / "a\n" / "code"
    place.mkdir(mode=0o700)
    enter = connection.entering_own(str(place))
    assert "or others may have put it there" in bash(enter, tmp_path)


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
    place = str(tmp_path)
    assert bash(connection.entering(place, inode), tmp_path) == ""
    assert "another folder has the name" in bash(
        connection.entering(place, 1), tmp_path
    )
    os.chown(tmp_path, EVE.uid, EVE.uid)
    assert "another folder has" in bash(connection.entering(place, inode), tmp_path)
    assert bash(connection.entering(place, None), tmp_path) == ""
    gone = str(tmp_path / "it's gone")
    assert "cannot enter" in bash(connection.entering(gone, None), tmp_path)
