"""The copy of a program's code: what it has and shares, what is refused, who could write it."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

from slurmft.core import git as git_command
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, SlurmftWarning, UsageError
from slurmft.core.files import UnfitFileError
from slurmft.core.run_files import Submission
from slurmft.programs import snapshot
from slurmft.runs import frozen_code
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import HOSTILE
from tests.support.made_runs import write_run
from tests.support.small_disk import fill
from tests.support.users import User, two_users

pytestmark = pytest.mark.processes

ODD = (HOSTILE, "two\nlines", "\udcff\udcfe bytes", " -z", "a\tb")
"""Names of files that git quotes, or shells split."""


def git(top: Path, *arguments: str) -> str:
    who = (
        "-c",
        "user.name=Ada",
        "-c",
        "user.email=ada@x",
        "-c",
        "protocol.file.allow=always",
    )
    command = ["git", *who, *arguments]
    done = subprocess.run(command, cwd=top, capture_output=True, check=True, timeout=60)
    return os.fsdecode(done.stdout).strip()


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git work tree with a commit, in the current folder."""
    top = tmp_path / "it's a project"
    write(top / "train.py", "print(1)\n")
    write(top / "pkg" / "a.py", "a = 1\n")
    write(top / "run me.sh").chmod(0o755)
    write(top / ".gitignore", "*.log\nignored/\n")
    git(top, "init", "-q", "-b", "main")
    git(top, "add", ".")
    git(top, "commit", "-qm", "one")
    monkeypatch.chdir(top)
    return top


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def new_run(runs: Path, mode: int = 0o700) -> RunDir:
    run = RunDir(runs / f"run-20260101-000000-{len(list(runs.glob('run-*'))):03}")
    run.path.mkdir(parents=True)
    run.path.chmod(mode)
    return run


@dataclass
class Snapshot:
    found: snapshot.Source
    run: RunDir

    def __post_init__(self) -> None:
        self.facts, self.copy = snapshot.take(self.found, self.run), self.run.code

    def of(self, path: Path) -> Path:
        return snapshot.copy_of(path, self.found.root, self.run)


def take(program: Path, runs: Path, mode: str = "auto") -> Snapshot:
    return Snapshot(snapshot.source(program, mode, runs_dir=runs), new_run(runs))


def content(folder: Path) -> dict[str, str]:
    """The files of a folder: their contents; of links, where they lead."""
    return {
        os.path.relpath(path, folder): f"-> {os.readlink(path)}" if path.is_symlink()
        else path.read_text()
        for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    }  # fmt: skip


def refused(
    program: Path, mode: str = "auto", limit_mb: int = snapshot.LIMIT_MB
) -> str:
    with pytest.raises(UsageError) as caught:
        snapshot.source(program, mode, limit_mb=limit_mb)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return str(caught.value)


# --- what is copied -------------------------------------------------------------------------------


def test_work_tree_as_it_is(tree: Path, runs: Path) -> None:
    write(tree / "train.py", "print(2)\n")
    write(tree / "staged.py")
    git(tree, "add", "staged.py")
    write(tree / "new" / "b.py")
    (tree / "pkg" / "a.py").unlink()
    for left_out in ("x.log", "ignored/x"):
        write(tree / left_out)
    found = snapshot.source(tree / "train.py")
    commit = git(tree, "rev-parse", "HEAD")[:9]
    words = f"git work tree {tree} at {commit}, 4 files changed, 5 files"
    assert found.describe() == f"{words}, 27 bytes"
    made = take(tree / "train.py", runs)
    assert content(made.copy) == {
        "train.py": "print(2)\n", "staged.py": "x", "new/b.py": "x", "run me.sh": "x",
        ".gitignore": "*.log\nignored/\n",
    }  # fmt: skip
    assert made.of(Path("train.py")) == made.copy / "train.py"
    assert made.of(tree) == made.of(Path.cwd()) == made.copy
    assert made.of(tree / "x.log") == tree / "x.log"
    assert made.of(runs) == runs
    diff = (made.copy.parent / "code.diff").read_text()
    assert "-print(1)\n+print(2)\n" in diff
    assert diff.count("diff --git") == 3  # and no untracked file
    facts = {
        k: getattr(made.facts, k) for k in ("mode", "root", "files", "bytes", "changed")
    }
    assert facts == {
        "mode": "git", "root": str(tree), "files": 5, "bytes": 27, "changed": 4,
    }  # fmt: skip
    assert made.facts.commit == git(tree, "rev-parse", "HEAD")


def test_what_is_named_is_copied_though_ignored(tree: Path, runs: Path) -> None:
    program = write(tree / "ignored" / "try.py")
    made = take(program, runs)
    assert made.of(program) == made.copy / "ignored" / "try.py"


def test_clean_tree_has_no_diff(tree: Path, runs: Path) -> None:
    os.utime(tree / "train.py", (1, 1))  # not changed
    made = take(tree / "train.py", runs)
    assert made.facts.changed == 0
    assert not (made.copy.parent / "code.diff").exists()


def test_changes_that_are_too_many_or_cannot_be_had_are_told(
    tree: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree / "train.py", "print(2)\n" * 100)
    monkeypatch.setattr(git_command, "_MOST_DIFF_BYTES", 100)
    with pytest.warns(SlurmftWarning, match=r"code\.diff is cut"):
        made = take(tree / "train.py", runs)
    assert made.run.code_diff.read_text()[100:] == git_command.CUT

    def refuse(folder: Path) -> str:
        raise UsageError("git diff took longer")

    monkeypatch.setattr(git_command, "diff", refuse)
    with pytest.warns(
        SlurmftWarning, match=r"code\.diff is not written: git diff took"
    ):
        made = take(tree / "train.py", runs)
    assert made.facts.commit


def test_tree_without_a_commit(tree: Path, runs: Path) -> None:
    shutil.rmtree(tree / ".git")
    git(tree, "init", "-q")
    git(tree, "add", "train.py")
    found = snapshot.source(tree / "train.py")
    assert f"{tree} at no commit, 4 files changed" in found.describe()
    assert take(tree / "train.py", runs).facts.commit is None


def test_linked_work_tree_and_subfolder(tree: Path, runs: Path, tmp_path: Path) -> None:
    git(tree, "worktree", "add", "-q", str(tmp_path / "second"))
    program = tmp_path / "second" / "pkg" / "a.py"
    assert snapshot.source(program, "git").root == tmp_path / "second"
    assert snapshot.source(tree / "pkg" / "a.py").root == tree


def test_conflict_is_copied_as_it_is(tree: Path, runs: Path) -> None:
    git(tree, "checkout", "-qb", "other")
    for branch, text in (("other", "2"), ("main", "3")):
        git(tree, "checkout", "-q", branch)
        write(tree / "train.py", text)
        git(tree, "commit", "-qam", text)
    with pytest.raises(subprocess.CalledProcessError):
        git(tree, "merge", "other")
    made = take(tree / "train.py", runs)
    assert made.of(tree / "train.py").read_text() == (tree / "train.py").read_text()
    assert made.facts.changed == 1


def test_submodules(tree: Path, runs: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    write(library / "lib.py", "one\n")
    git(library, "init", "-q")
    git(library, "add", ".")
    git(library, "commit", "-qm", "one")
    git(tree, "submodule", "--quiet", "add", str(library), "deps/lib")
    git(tree, "commit", "-qm", "two")
    write(tree / "deps" / "lib" / "lib.py", "two\n")
    made = take(tree / "train.py", runs)
    assert (made.copy / "deps/lib/lib.py").read_text() == "two\n"
    assert (made.facts.changed, made.facts.commit) == (
        1,
        git(tree, "rev-parse", "HEAD"),
    )
    git(tree, "submodule", "--quiet", "deinit", "--force", "deps/lib")
    with pytest.raises(
        UsageError, match=r"the submodule 'deps/lib' of .* is not there"
    ) as error:
        take(tree / "train.py", runs)
    assert "submodule update --init" in str(error.value.hint)


def test_folder(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "plain"
    program = write(top / "train.py")
    write(top / "pkg" / "a.py")
    for left_out in (".hidden", ".cache/x", "pkg/__pycache__/a.pyc", "b.pyc", "venv/pyvenv.cfg",
                     "env/conda-meta/history", "runs/x"):  # fmt: skip
        write(top / left_out)
    os.mkfifo(top / "pipe")
    write_run(top / "old" / "emotion-1")
    write(top / "model" / "config.json", '{"hidden_size": 8}')  # no run's
    monkeypatch.chdir(top)
    found = snapshot.source(program, runs_dir=top / "runs")
    assert found.describe() == f"folder {top}, 3 files, 20 bytes"
    made = Snapshot(found, new_run(runs))
    assert sorted(content(made.copy)) == ["model/config.json", "pkg/a.py", "train.py"]
    assert made.facts.commit is None
    assert (
        snapshot.source(Path("."), runs_dir=top / "runs").files.keys()
        == found.files.keys()
    )


def test_runs_in_a_work_tree_are_not_copied(tree: Path) -> None:
    runs = tree / "runs"
    write_run(tree / "elsewhere" / "emotion-1")
    write(tree / "venv" / "pyvenv.cfg")
    first, second = take(tree / "train.py", runs), take(tree / "train.py", runs)
    assert first.facts == second.facts
    assert first.facts.files == 4


def test_what_is_installed_is_not_copied(
    tree: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree / "env" / "pyvenv.cfg")
    elsewhere = write(tmp_path / "tools" / "simulate")
    hidden = write(tmp_path / "here" / ".local" / "bin" / "tool")
    monkeypatch.chdir(tmp_path / "here")
    installed = write(tree / "env" / "bin" / "accelerate")
    # as pyenv's, whose own files are in git
    built = write(tree / "ignored" / "bin" / "python3")
    for program in (Path("/bin/sh"), installed, built, elsewhere, hidden):
        found = snapshot.source(program)
        assert (found.mode, found.files) == ("none", {}), program
    # one's own, wherever one stands
    assert snapshot.source(tree / "train.py").mode == "git"
    assert snapshot.source(elsewhere, "folder").mode == "folder"
    assert (
        snapshot.source(tree / "train.py", "none").describe().startswith("not copied")
    )


def test_names_and_links(tree: Path, runs: Path, tmp_path: Path) -> None:
    for name in ODD:
        write(tree / "odd" / name, name.encode("utf-8", "replace").decode())
    outside = write(tmp_path / "data.csv")
    for name, goal in (
        ("to-file", "train.py"), ("pkg/up", "../train.py"), ("whole", str(tree / "pkg" / "a.py")),
        ("to-folder", "pkg"), ("out", "../data.csv"), ("gone", "nowhere"), ("root", "."),
        ("to-ignored", "ignored"),
    ):  # fmt: skip
        (tree / name).symlink_to(goal)
    write(tree / "ignored" / "x")
    made = take(tree / "train.py", runs)
    assert {p.name for p in (made.copy / "odd").iterdir()} == set(ODD)
    links = {k: v for k, v in content(made.copy).items() if v.startswith("-> ")}
    assert links == {
        "to-file": "-> train.py", "pkg/up": "-> ../train.py", "whole": "-> pkg/a.py",
        "to-folder": "-> pkg", "out": f"-> {outside}", "gone": f"-> {tree / 'nowhere'}",
        "root": "-> .", "to-ignored": f"-> {tree / 'ignored'}",
    }  # fmt: skip
    folder = take(tree / "train.py", runs, "folder")
    assert {p.name for p in (folder.copy / "odd").iterdir()} == set(ODD)


# --- what a stranger's repository, or somebody who can write into it, would have copied -----------


def write_index(top: Path, *names: str) -> None:
    """Writes an index of these names. Git itself would refuse some of them."""
    blob = hashlib.sha1(b"blob 0\0").digest()
    content = struct.pack(">4sLL", b"DIRC", 2, len(names))
    for name in sorted(names):
        path = os.fsencode(name)
        entry = struct.pack(">6L", *[0] * 6) + struct.pack(">4L", 0o100644, 0, 0, 0)
        entry += blob + struct.pack(">H", len(path)) + path
        content += entry + bytes(8 - len(entry) % 8)
    (top / ".git" / "index").write_bytes(content + hashlib.sha1(content).digest())


@pytest.mark.parametrize(
    "name",
    [
        "lnk/../../../../victim",
        "/etc/passwd",
        "../out",
        "a//b",
        "./a",
        ".GIT/config",
        "..",
    ],
)
def test_names_that_lead_out_are_refused(tree: Path, tmp_path: Path, name: str) -> None:
    write(tmp_path / "victim", "theirs")
    (tree / "a" / "b" / "c").mkdir(parents=True)
    (tree / "lnk").symlink_to("a/b/c")
    write_index(tree, "train.py", name)
    why = refused(tree / "train.py")
    assert f"git lists {name!r} in {str(tree)!r}" in why
    assert "--snapshot folder" in why


def test_what_lies_behind_a_link_is_named(
    tree: Path, runs: Path, tmp_path: Path
) -> None:
    """Git takes it for deleted."""
    secret = write(tmp_path / "home" / "id_rsa", "secret")
    (tree / "lnk").symlink_to(secret.parent)
    (tree / "inside").symlink_to("pkg")
    write_index(tree, "train.py", "inside/a.py", "lnk/id_rsa", "pkg/a.py")
    with pytest.warns(SlurmftWarning) as warned:
        made = take(tree / "train.py", runs)
    first = str(tree / "inside" / "a.py")
    text = f"not copied, as a link is on the way: {first!r}, and 1 more"
    assert [str(each.message) for each in warned] == [text]
    assert made.facts.files == 6
    assert content(made.copy)["lnk"] == f"-> {secret.parent}"
    assert "secret" not in (made.copy.parent / "code.diff").read_text()


def exchange(tree: Path, kind: str) -> None:
    """Puts something else in the place of a file, or of its folder."""
    file = tree / "pkg" / "a.py"
    elsewhere = write(tree.parent / "elsewhere" / "a.py", "a = 2\n").parent
    place = file
    if "folder" in kind or "root" in kind:
        place = file.parent
    if "root" in kind:
        place = tree
    place.rename(tree.parent / "before")
    match kind:
        case "FIFO":
            os.mkfifo(file)
        case "link":
            file.symlink_to(elsewhere / "a.py")
        case "folder of a link":
            place.symlink_to(elsewhere)
        case "root of a link":
            write(elsewhere / "pkg" / "a.py", "a = 2\n")
            place.symlink_to(elsewhere)
        case "terabytes":
            file.touch()
            os.truncate(file, 3 * 2**40)
        case "device":
            file.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("FIFO", ": not a regular file"),
        ("link", ": it is a link"),
        ("device", ": it is a link"),
        ("folder of a link", ": a link is on the way"),
        ("root of a link", ": a link is on the way"),
        ("terabytes", ": it has grown meanwhile"),
    ],
)
def test_what_is_exchanged_after_it_was_listed_is_not_copied(
    tree: Path, runs: Path, kind: str, reason: str
) -> None:
    found = snapshot.source(tree / "train.py", runs_dir=runs)
    run = new_run(runs)
    exchange(tree, kind)
    with pytest.raises(UsageError) as caught:
        snapshot.take(found, run)
    assert str(caught.value).startswith("cannot copy the code: ")
    assert caught.value.message.endswith(reason)
    assert list(run.path.iterdir()) == []


def test_a_log_that_grows_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied as long as it was when it was opened, unless it has grown by too much."""
    monkeypatch.setattr(snapshot, "_GROWTH_BYTES", 2)
    path = write(tmp_path / "log", "12345")
    for counted in (3, 5, 9):
        with open(path, "rb") as original, open(tmp_path / "copy", "w+b") as copy:
            digest = snapshot._copy_file(original, copy, counted, path)
        assert (tmp_path / "copy").read_text() == "12345"
        assert digest == hashlib.sha256(b"12345").hexdigest()
    with open(path, "rb") as original, open(tmp_path / "copy", "w+b") as copy:
        with pytest.raises(UnfitFileError, match="grown meanwhile"):
            snapshot._copy_file(original, copy, 2, path)
        assert copy.tell() == 0


def test_no_more_is_read_than_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file that grows without end."""
    path = write(tmp_path / "log", "12345")

    class Grows(io.FileIO):
        def read(self, size: int = -1) -> bytes:  # type: ignore[override]
            with open(path, "a") as log:
                log.write("6789")
            return super().read(size) or b""

    with Grows(path) as original, open(tmp_path / "copy", "w+b") as copy:
        snapshot._copy_file(original, copy, 5, path)
    assert (tmp_path / "copy").read_text() == "12345"


# --- what refuses it ------------------------------------------------------------------------------


def test_bad_requests(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "unknown --snapshot 'gti'\nhint: did you mean git?" in refused(tree, "gti")
    plain = write(tmp_path / "plain" / "x.py")
    assert f"no git work tree holds '{plain}'\nhint: --snapshot folder" in refused(
        plain, "git"
    )
    shutil.rmtree(tree / ".git" / "refs")
    assert refused(tree / "train.py").startswith("git ls-files in ")
    monkeypatch.setenv("PATH", "")
    assert "no git work tree" in refused(tree / "train.py", "git")
    assert snapshot.source(tree / "train.py").mode == "folder"


def test_too_large(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("data", 3), ("weights", 2), ("small", 1), ("pkg", 0)):
        (tree / name).mkdir(exist_ok=True)
        (tree / name / "x").write_bytes(bytes(size * 2**20))
    for mode in ("git", "folder"):
        why = refused(tree / "train.py", mode, limit_mb=5)
        assert (
            "data (3.0 MiB), weights (2.0 MiB), small (1.0 MiB); the limit is 5 MiB"
            in why
        )
        for word in (".gitignore", "--snapshot none", "--snapshot-limit-mb N"):
            assert word in why
    assert snapshot.source(tree / "train.py", limit_mb=7).mode == "git"
    for number in range(201):
        write(tmp_path / "many" / str(number))
    assert "and 200 files" in refused(tmp_path / "many", "folder", limit_mb=1)


def test_home_and_root_are_not_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("walked"))
    monkeypatch.setattr(git_command, "output", lambda *words: pytest.fail("asked git"))
    (tmp_path / ".git").mkdir()  # dotfiles: the home
    for folder in (Path("/"), tmp_path):
        monkeypatch.chdir(folder)
        assert "too large" in refused(folder, "folder")
        assert "too large" in refused(folder)
    assert "too large" in refused(tmp_path, "git")


def test_nothing_of_a_repository_is_started(
    tree: Path, runs: Path, tmp_path: Path
) -> None:
    trap = write(tmp_path / "trap", f"#!/bin/sh\ntouch {tmp_path}/started\n")
    trap.chmod(0o755)
    for key in (
        "core.fsmonitor",
        "diff.external",
        "diff.x.command",
        "diff.x.textconv",
        "core.pager",
    ):
        git(tree, "config", key, str(trap))
    write(tree / ".gitattributes", "* diff=x\n")
    for hook in ("post-index-change", "pre-commit"):
        shutil.copy(trap, tree / ".git" / "hooks" / hook)
    index = (tree / ".git" / "index").stat().st_mtime_ns
    write(tree / "train.py", "changed\n")
    made = take(tree / "train.py", runs)
    assert "+changed" in (made.copy.parent / "code.diff").read_text()
    assert not (tmp_path / "started").exists()
    assert (tree / ".git" / "index").stat().st_mtime_ns == index


# --- each run has files of its own ----------------------------------------------------------------


def test_runs_share_no_file(tree: Path, runs: Path) -> None:
    first = take(tree / "train.py", runs)
    write(tree / "train.py", "print(2)\n")
    second = take(tree / "train.py", runs)
    assert (second.copy / "pkg/a.py").stat().st_nlink == 1
    assert (first.copy / "pkg/a.py").read_text() == (
        second.copy / "pkg/a.py"
    ).read_text()
    assert (first.copy / "train.py").read_text() == "print(1)\n"
    assert first.facts.sha256 != second.facts.sha256
    git(tree, "checkout", "train.py")
    third = take(tree / "train.py", runs)
    assert third.facts.sha256 == first.facts.sha256
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in third.copy.iterdir()}
    assert (modes["train.py"], modes["run me.sh"]) == (0o444, 0o555)


def test_files_are_cloned_where_that_works(
    tree: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = take(tree / "train.py", runs)

    def clone(target: BinaryIO, request: int, source: int) -> int:
        assert request == 0x40049409
        return os.sendfile(target.fileno(), source, 0, 2**20) and target.seek(0)

    monkeypatch.setattr(fcntl, "ioctl", clone)
    cloned = take(tree / "train.py", runs)
    assert content(cloned.copy) == content(written.copy)
    assert cloned.facts.sha256 == written.facts.sha256


def test_two_at_once(tree: Path, runs: Path) -> None:
    found = snapshot.source(tree / "train.py")
    made = [new_run(runs) for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        snapshots = list(pool.map(lambda run: Snapshot(found, run), made))
    assert all(content(one.copy) == content(snapshots[0].copy) for one in snapshots)
    assert len(content(snapshots[0].copy)) == 4


# --- compared before each start -------------------------------------------------------------------


def test_copy_is_compared_with_its_sums(tree: Path, runs: Path) -> None:
    """Links, names of any bytes, and what the program writes beside its code."""
    for name in ODD:
        write(tree / name)
    (tree / "link").symlink_to("pkg/a.py")
    (tree / "nowhere").symlink_to("/nowhere")
    taken = take(tree / "train.py", runs, "folder")
    config = RunConfig(
        program=TrainConfig.resolve().program(),
        job=JobConfig(),
        submission=Submission(snapshot=taken.facts),
    )
    frozen_code.check(taken.run, config)
    write(taken.copy / "pkg" / "results.csv").chmod(0o666)
    write(taken.copy / "outputs" / "x").parent.chmod(0o777)
    frozen_code.check(taken.run, config)
    for goal in ("train.py", None):
        (taken.copy / "link").unlink()
        if goal:
            (taken.copy / "link").symlink_to(goal)
        with pytest.raises(frozen_code.ChangedCodeError, match=r"was changed .*/link'"):
            frozen_code.check(taken.run, config)
    shutil.rmtree(taken.copy / "pkg")
    with pytest.raises(frozen_code.ChangedCodeError, match="has lost a folder"):
        frozen_code.check(taken.run, config)
    shutil.rmtree(taken.copy)
    with pytest.raises(frozen_code.ChangedCodeError, match="has lost a file"):
        frozen_code.check(taken.run, config)


# --- nothing half-made ----------------------------------------------------------------------------


def test_full_disk(tree: Path, small_disk: Path) -> None:
    for number in range(20):
        (tree / str(number)).write_bytes(os.urandom(2**16))
    write(tree / "train.py", "print(2)\n")
    run = new_run(small_disk)
    with pytest.raises(SlurmftError, match=r"no room for the code: it needs 1\.3 MiB"):
        snapshot.take(snapshot.source(tree / "train.py"), run)
    assert list(run.path.iterdir()) == []
    fill(small_disk)


def test_file_that_goes_meanwhile(tree: Path, runs: Path) -> None:
    found, run = snapshot.source(tree / "train.py"), new_run(runs)
    (tree / "pkg" / "a.py").unlink()
    with pytest.raises(
        UsageError, match=r"cannot copy the code: .*/pkg/a\.py.: No such file"
    ):
        snapshot.take(found, run)
    assert list(run.path.iterdir()) == []


# --- another user ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def users() -> Iterator[tuple[User, User]]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two other users")
    with two_users() as made:
        yield made


_TAKE = """
import os
from pathlib import Path
from slurmft.core import git as git_command
from slurmft.core.errors import SlurmftError
from slurmft.programs import snapshot
from slurmft.runs.rundir import RunDir
run = RunDir(Path({runs!r}, f"run-20260101-000000-{{os.getpid()}}"))
run.path.mkdir(mode=0o700)
try:
    found = snapshot.source(Path({program!r}), {mode!r})
    snapshot.take(found, run)
    copy = snapshot.copy_of(Path({program!r}), found.root, run)
    print(copy.read_text(), run.code.joinpath("x.py").stat().st_nlink)
except SlurmftError as error:
    print(error, error.hint, sep="\\nhint: ")
"""


def taken_by(user: User, program: Path, runs: Path, mode: str = "auto") -> str:
    values = {"runs": str(runs), "program": str(program), "mode": mode}
    return user.python(
        f"import os; os.chdir({str(program.parent)!r})" + _TAKE.format(**values)
    )


def test_work_tree_of_another_user(users: tuple[User, User]) -> None:
    ada, eve = users
    program = eve.write(eve.home / "theirs" / "x.py", "theirs")
    git(program.parent, "init", "-q")
    eve.own(program.parent)
    ada.own(write(ada.home / "r" / "x").parent)
    for mode in ("auto", "git"):
        told = taken_by(ada, program, ada.home / "r", mode)
        assert f"git ls-files in '{program.parent}': detected dubious ownership" in told
        assert "\nhint: or: --snapshot folder; or clone the repository" in told
        assert "safe.directory" not in told
    assert taken_by(ada, program, ada.home / "r", "folder") == "theirs 1\n"
    code = "from pathlib import Path; from slurmft.programs import snapshot\n"
    code += f"print(snapshot.source(Path({str(program)!r})).mode)"
    # from her home: a tool that somebody else keeps
    assert ada.python(code) == "none\n"


def test_file_closed_to_this_user(users: tuple[User, User]) -> None:
    ada, eve = users
    program = ada.write(ada.home / "closed" / "x.py", "mine")
    eve.own(write(program.parent / "secret").parent)
    (program.parent / "secret").chmod(0)
    (program.parent).chmod(0o755)
    runs = ada.own(write(ada.home / "rr" / "x").parent)
    told = taken_by(ada, program, runs)
    assert "cannot copy the code: '" in told
    assert "/secret': Permission denied" in told


def test_closed_run_of_another_user_is_passed_over(users: tuple[User, User]) -> None:
    """In a folder that both have their runs in, and of a program of the same name."""
    ada, eve = users
    runs = ada.place / "shared runs"
    runs.mkdir()
    runs.chmod(0o1777)
    theirs = runs / "run-20250101-000000-abc"
    eve.own(write(theirs / "code" / "x.py", "theirs").parent)
    eve.own(theirs)
    theirs.chmod(0o700)
    program = ada.write(ada.home / "p" / "x.py", "mine")
    assert taken_by(ada, program, runs) == "mine 1\n"
