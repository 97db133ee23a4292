"""What slurmft deletes, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from slurmft.core import removal
from slurmft.job import checkpoints
from slurmft.runs.rundir import CHECKPOINT, RunDir

FORM = re.compile(r"step-\d+")


def tree(folder: Path) -> Path:
    """A folder with folders, files and links in it."""
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").touch()
    (folder / "a" / "out").symlink_to(folder.parent / "kept")
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file that links lead to."""
    file = tmp_path / "kept" / "file"
    file.parent.mkdir()
    file.touch()
    return file


@pytest.mark.parametrize("at_once", [False, True])
def test_a_folder_goes_with_all_in_it_but_not_what_links_lead_to(
    tmp_path: Path, kept: Path, at_once: bool
) -> None:
    removal.remove(tree(tmp_path / "step-1"), FORM, at_once)
    assert os.listdir(tmp_path) == ["kept"]
    assert kept.exists()


def test_a_link_goes_itself(tmp_path: Path, kept: Path) -> None:
    (tmp_path / "step-1").symlink_to(kept.parent)
    removal.remove(tmp_path / "step-1", FORM)
    assert kept.exists()
    assert not os.path.lexists(tmp_path / "step-1")


def test_names_of_other_forms_stay(tmp_path: Path) -> None:
    for name in (".git", ".step-1", "step-", "step-1", "step-2", "steps"):
        tree(tmp_path / name)
    with pytest.raises(PermissionError, match="slurmft makes nothing of this name"):
        removal.remove(tmp_path / ".git", FORM)
    assert removal.sweep(tmp_path, FORM) == []
    assert sorted(os.listdir(tmp_path)) == [".git", ".step-1", "step-", "steps"]


def test_whatever_is_in_a_folder_goes(tmp_path: Path) -> None:
    """Names with line breaks and escapes, or that are no UTF-8; FIFOs; files that cannot be
    read; deep folders, up to a limit."""
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name in (b"a\nb", b"\x1b]0;x\x07", b"\xff\xfe", b"-rf", b" ", b"*"):
        path = os.fsencode(folder) + b"/" + name
        os.mkdir(path)
        os.mkfifo(path + b"/pipe")
    (folder / "closed").touch(mode=0o000)
    deep = folder.joinpath(*"d" * 150)
    deep.mkdir(parents=True)
    removal.remove(folder, FORM)
    assert not list(tmp_path.iterdir())
    folder.joinpath(*"d" * 300).mkdir(parents=True)
    (stays,) = removal.sweep(tmp_path, FORM)
    assert "nested too deep" in stays
    os.mkfifo(tmp_path / "step-2")
    removal.remove(tmp_path / "step-2", FORM)


@pytest.mark.parametrize("call", ["stat", "rename", "open", "listdir", "rmdir"])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_link_that_is_put_in_its_place_meanwhile_is_not_followed(
    tmp_path: Path,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    at_once: bool,
) -> None:
    """Before every call of the system that names it."""
    original, rename = getattr(os, call), os.rename
    swapped = tmp_path / "swapped"
    swapped.mkdir()

    def swap(*arguments: Any, **rest: Any) -> Any:
        for entry in os.scandir(tmp_path):
            if "step-1" in entry.name and not entry.is_symlink():
                rename(entry.path, swapped / str(len(list(os.scandir(swapped)))))
                os.symlink(kept.parent, entry.path)
        return original(*arguments, **rest)

    tree(tmp_path / "step-1")
    inode = (tmp_path / "step-1").lstat().st_ino
    with monkeypatch.context() as patched:
        patched.setattr(os, call, swap)
        with contextlib.suppress(OSError):
            removal.remove(tmp_path / "step-1", FORM, at_once, inode)
    assert list(swapped.iterdir())
    assert kept.exists()


def test_what_is_absent(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        removal.remove(tmp_path / "step-1", FORM)
    assert removal.sweep(tmp_path / "absent", FORM) == []
    removal.discard(tmp_path / "step-1", FORM)


def test_links_on_the_way(tmp_path: Path) -> None:
    """Links of this user's lead on, absolute and relative ones; a circle of them ends."""
    tree(tmp_path / "disk" / "checkpoints" / "step-1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("../link/checkpoints")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    removal.remove(tmp_path / "run" / "checkpoints" / "step-1", FORM)
    assert not list((tmp_path / "disk" / "checkpoints").iterdir())
    (tmp_path / "circle").symlink_to("circle")
    (stays,) = removal.sweep(tmp_path / "circle", FORM)
    assert "symbolic links" in stays


def test_what_was_replaced_stays(tmp_path: Path) -> None:
    tree(tmp_path / "step-1")
    inode = (tmp_path / "step-1").lstat().st_ino
    (tmp_path / "step-1").rename(tmp_path / "before")
    tree(tmp_path / "step-1")
    with pytest.raises(PermissionError, match="replaced meanwhile"):
        removal.remove(tmp_path / "step-1", FORM, inode=inode)
    assert sorted(os.listdir(tmp_path)) == ["before", "step-1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users")
@pytest.mark.parametrize("number", range(3))
def test_a_link_of_another_user_leads_nowhere(tmp_path: Path, number: int) -> None:
    """Not at any place of the way."""
    disk = tmp_path / "disk" / "runs" / "run"
    tree(disk / "checkpoints" / "step-1")
    parts = ("runs", "run", "checkpoints")
    way = tmp_path.joinpath("way", *parts[:number])
    way.mkdir(parents=True)
    link = way / parts[number]
    link.symlink_to(tmp_path.joinpath("disk", *parts[: number + 1]))
    os.chown(link, 4242, 4242, follow_symlinks=False)
    folder = tmp_path.joinpath("way", *parts)
    assert (folder / "step-1").exists()
    (stays,) = removal.sweep(folder, FORM)
    assert f"{link.name!r} on the way belongs to another user (uid 4242)" in stays
    with pytest.raises(PermissionError):
        removal.remove(folder / "step-1", FORM)
    assert (disk / "checkpoints" / "step-1" / "a" / "b" / "file").exists()
    os.chown(link, 0, 0, follow_symlinks=False)
    assert removal.sweep(folder, FORM) == []
    assert not (disk / "checkpoints" / "step-1").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users")
@pytest.mark.parametrize(("mode", "is_followed"), [(0o755, True), (0o775, False)])
def test_links_of_the_only_user_who_can_write_there(
    tmp_path: Path, mode: int, is_followed: bool
) -> None:
    """As those of a site's account for projects."""
    tree(tmp_path / "disk" / "step-1")
    projects = tmp_path / "projects"
    projects.mkdir()
    (projects / "ours").symlink_to(tmp_path / "disk")
    for path in (projects, projects / "ours"):
        os.chown(path, 4242, 4242, follow_symlinks=False)
    projects.chmod(mode)
    assert (removal.sweep(projects / "ours", FORM) == []) == is_followed
    assert (tmp_path / "disk" / "step-1").exists() != is_followed


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users")
def test_what_another_user_owns_stays(tmp_path: Path) -> None:
    tree(tmp_path / "step-1")
    os.chown(tmp_path / "step-1", 4242, 4242)
    (stays,) = removal.sweep(tmp_path, FORM)
    assert "belongs to another user (uid 4242)" in stays
    assert (tmp_path / "step-1" / "a" / "b" / "file").exists()


def test_checkpoints_that_are_a_link_keep_what_slurmft_has_not_made(
    tmp_path: Path,
) -> None:
    """A user's own link to a larger disk."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    disk = tmp_path / "disk"
    names = (
        ".git", ".bashrc.d", "bad-habits", "step-by-step", ".step-00000001.slurmft-12-ab0f",
        "step-00000001", "step-00000002", "bad-step-00000001-17",
    )  # fmt: skip
    for name in names:
        tree(disk / name)
    run.checkpoints.symlink_to(disk)
    assert checkpoints.remove_leftovers(run) == []
    checkpoints.prune(run, keep=1, best=None)
    assert checkpoints.remove_leftovers(run, bad=True) == []
    kept = {".git", ".bashrc.d", "bad-habits", "step-by-step", "step-00000002"}
    assert set(os.listdir(disk)) == kept
    assert CHECKPOINT.fullmatch("step-00000002-e00000512")
