"""Git is started by one module, and executes nothing that a repository names."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmft.core import git, process
from slurmft.core.errors import UsageError

pytestmark = pytest.mark.processes


def run_git(top: Path, *arguments: str, keep: bool = False) -> str:
    author = (
        "-c",
        "user.name=Ada",
        "-c",
        "user.email=ada@x",
        "-c",
        "protocol.file.allow=always",
    )
    command = ["git", *author, *arguments]
    done = subprocess.run(command, cwd=top, capture_output=True, check=True, timeout=60)
    printed = os.fsdecode(done.stdout)
    return printed if keep else printed.strip()


def repository(top: Path) -> Path:
    top.mkdir()
    (top / "train.py").write_text("print(1)\n")
    run_git(top, "init", "-q")
    run_git(top, "add", ".")
    run_git(top, "commit", "-qm", "one")
    return top


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return repository(tmp_path / "tree")


def test_head(tree: Path, tmp_path: Path) -> None:
    commit = run_git(tree, "rev-parse", "HEAD")
    assert git.head(tree) == git.Commit(commit, dirty=False)
    (tree / "new.py").touch()
    assert git.head(tree) == git.Commit(commit, dirty=False)
    (tree / "train.py").write_text("print(2)\n")
    assert git.head(tree) == git.Commit(commit, dirty=True)
    (tmp_path / "plain").mkdir()
    assert git.head(tmp_path / "plain") is None


def test_no_git(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git.head(tree) is None
    with pytest.raises(UsageError, match="git cannot be run"):
        git.diff(tree)


def test_variables_do_not_lead_elsewhere(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_EXTERNAL_DIFF"):
        monkeypatch.setenv(name, "/nowhere")
    (tree / "train.py").write_text("print(2)\n")
    assert git.files(tree) == ["train.py"]
    assert git.status(tree) == [" M train.py"]
    assert "+print(2)" in git.diff(tree)


@pytest.mark.parametrize(
    "change",
    [
        "echo more >>train.py",
        "git add -A; echo more >>train.py; git add train.py",
        "rm train.py",
        "git mv train.py moved.py",
        "chmod +x train.py",
        "git config core.fileMode false; chmod +x train.py",
        "echo new >'new file'; echo new >'a\\nb'",
        "mkdir sub; echo new >sub/file; echo ignored >.gitignore; echo x >ignored",
        "echo '*.skip' >>.git/info/exclude; echo x >a.skip",
        "git config core.autocrlf input; printf 'print(1)\\r\\n' >train.py",
        "echo '*.py text eol=lf' >.gitattributes; printf 'print(1)\\r\\n' >train.py",
        "ln -s train.py link; git add link; rm train.py",
        "git update-index --split-index; echo more >>train.py",
        "git sparse-checkout set --cone other; echo x >y",
        "git checkout -q --orphan empty",
        "git worktree add -q ../other; mv .git ../first.git; mv ../other/.git .;"
        "sed -i s,/tree/.git/,/first.git/, .git; echo more >>train.py",
        "git clone -q --shared . ../clone; mv .git ../first.git; mv ../clone/.git .git;"
        "echo $PWD/../first.git/objects >.git/objects/info/alternates; echo more >>train.py",
    ],
)
def test_what_has_changed_is_what_git_itself_says(tree: Path, change: str) -> None:
    subprocess.run(["bash", "-ec", change], cwd=tree, check=True, capture_output=True)
    for options in (["-uno"], ["-uall"]):
        plain = ("status", "-z", "--porcelain", "--no-renames", *options)
        expected = run_git(tree, *plain, keep=True).split("\0")[:-1]
        assert git.status(tree, *options) == expected
    if "orphan" not in change:
        plain = ("--no-color", "--submodule=short")
        assert git.diff(tree) == run_git(tree, "diff", *plain, "HEAD", keep=True)


def test_submodules_that_have_changed(tree: Path, tmp_path: Path) -> None:
    library = repository(tmp_path / "library")
    for name in ("changed", "committed", "untracked", "same"):
        run_git(tree, "submodule", "--quiet", "add", str(library), name)
    run_git(tree, "commit", "-qm", "two")
    (tree / "changed" / "train.py").write_text("print(2)\n")
    (tree / "committed" / "train.py").write_text("print(2)\n")
    run_git(tree / "committed", "commit", "-qam", "two")
    (tree / "untracked" / "new").touch()
    changed = {" M changed", " M committed"}
    assert set(git.status(tree, "-uno")) == changed
    assert set(git.status(tree, "-uall")) == changed | {" M untracked"}
    text = git.diff(tree)
    assert text.count("+Subproject commit") == 1
    assert "+++ b/changed/train.py" in text


def add_submodule(tree: Path, name: str) -> None:
    """Adds an entry of a submodule, with the commit of the repository there, if there is one."""
    place = tree
    if (tree / name / ".git").is_dir():
        place = tree / name
    commit = run_git(place, "rev-parse", "HEAD")
    entry = f"160000,{commit},{name}"
    run_git(tree, "update-index", "--add", "--cacheinfo", entry)


@pytest.mark.parametrize("name", ["sub", "folder/sub"])
def test_a_link_is_no_submodule(tree: Path, name: str) -> None:
    """It may lead to the work tree that holds it, and so on."""
    add_submodule(tree, name)
    run_git(tree, "commit", "-qm", "two")
    (tree / "real").mkdir()
    if name == "sub":
        (tree / "sub").symlink_to(".")
    else:
        (tree / "real" / "sub").symlink_to("..")
        (tree / "folder").symlink_to("real")
    plain = ("status", "-z", "--porcelain", "-uno", "--ignore-submodules=dirty")
    changes = run_git(tree, *plain, keep=True)
    assert git.status(tree, "-uno") == changes.split("\0")[:-1]
    assert "Subproject" in git.diff(tree)


def test_a_submodule_whose_work_tree_is_around_it(tree: Path) -> None:
    sub = repository(tree / "sub")
    add_submodule(tree, "sub")
    run_git(tree, "commit", "-qm", "two")
    add_submodule(sub, "sub")
    run_git(sub, "config", "core.worktree", str(tree))
    for ask in (git.status, git.diff):
        with pytest.raises(UsageError, match=r"submodule '.*sub' is '.*tree'"):
            ask(tree)


def test_submodules_have_a_depth(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tree / "sub")
    add_submodule(tree, "sub")
    assert git.status(tree, "-uno") == ["A  sub"]
    monkeypatch.setattr(git, "_MOST_DEPTH", 0)
    with pytest.raises(UsageError, match=r"more than 0 submodules .*sub'"):
        git.diff(tree)


def test_git_is_not_looked_for_in_the_repository(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "git").write_text("#!/bin/sh\ntouch started\n")
    (tree / "git").chmod(0o755)
    monkeypatch.chdir(tree)
    for first in ("", ".", "../tree"):
        monkeypatch.setenv("PATH", f"{first}:{os.defpath}")
        assert git.head(tree) is not None
        monkeypatch.setenv("PATH", first)
        assert git.head(tree) is None
    assert not (tree / "started").exists()


@pytest.mark.parametrize(
    "name",
    [".gitattributes", ".gitignore", ".git/HEAD", ".git/config", ".git/info/exclude"],
)
def test_a_fifo_is_refused(tree: Path, name: str) -> None:
    (tree / name).unlink(missing_ok=True)
    os.mkfifo(tree / name)
    (tree / "below").mkdir()
    for folder in (tree, tree / "below"):
        with pytest.raises(UsageError, match="which is no regular") as caught:
            git.output(folder, "ls-files")
        assert repr(str(tree / name)) in str(caught.value)
        assert caught.value.hint == "or: --snapshot folder"


@pytest.mark.parametrize("how", ["plain", "worktree", "submodule", "alternate", "link"])
@pytest.mark.parametrize(
    "name",
    [
        "packed-refs",
        "refs/heads/x",
        "commondir",
        "objects/info/alternates",
        "objects/info/commit-graph",
        "objects/pack/pack-0.idx",
        "logs/HEAD",
    ],
)
def test_a_fifo_anywhere_in_a_repository_is_refused(
    tree: Path, tmp_path: Path, name: str, how: str
) -> None:
    """Also in one that another file names."""
    place = tree
    folder = tree / ".git"
    match how:
        case "worktree":
            place = tmp_path / "second"
            run_git(tree, "worktree", "add", "-q", str(place))
            if name in ("commondir", "logs/HEAD"):
                folder /= "worktrees/second"
        case "submodule":
            library = repository(tmp_path / "library")
            run_git(tree, "submodule", "--quiet", "add", str(library), "lib")
            folder /= "modules/lib"
        case "alternate":
            place = tmp_path / "clone"
            run_git(tree, "clone", "-q", "--shared", ".", str(place))
            if not name.startswith("objects"):
                folder = place / ".git"
        case "link":
            (tree / ".git").rename(tmp_path / "git")
            (tree / ".git").symlink_to(tmp_path / "git")
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    for ask in (git.files, git.head, git.diff, git.status):
        with pytest.raises(UsageError, match="which is no regular file") as caught:
            ask(place)
        assert Path(caught.value.message.split("'")[1]).resolve() == file.resolve()


def test_what_else_a_repository_may_hold_is_no_obstacle(tree: Path) -> None:
    (tree / ".git" / "annex").mkdir()
    os.mkfifo(tree / ".git" / "annex" / "x")
    (tree / ".git" / "nowhere").symlink_to("/nowhere")
    (tree / ".git" / "around").symlink_to(".")
    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.bind(str(tree / ".git" / "fsmonitor--daemon.ipc"))
    assert git.files(tree) == ["train.py"]


def test_a_repository_of_very_many_files_is_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link may lead to any folder."""
    monkeypatch.setattr(git, "_MOST_ENTRIES", 20)
    with pytest.raises(UsageError, match="holds more than 20 files"):
        git.files(tree)


def test_output_has_a_bound(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "train.py").write_text("print(2)\n" * 1000)
    whole = git.diff(tree)
    monkeypatch.setattr(git, "_MOST_DIFF_BYTES", 1000)
    assert git.diff(tree) == whole[:1000] + git.CUT
    monkeypatch.setattr(git, "_MOST_OUTPUT_BYTES", 5)
    with pytest.raises(UsageError, match=r"git ls-files in .* prints more than 0 MiB"):
        git.files(tree)


def test_large_files_are_compared_without_their_lines(tree: Path) -> None:
    large = tree / "large"
    with open(large, "w") as file:
        file.truncate(2**25)
    run_git(tree, "add", ".")
    assert len(git.diff(tree)) < 1000


def test_every_command_has_a_time_limit(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the FIFO is not among the files that are looked at before."""
    (tree / "below").mkdir()
    os.mkfifo(tree / "below" / ".gitignore")
    with pytest.raises(
        UsageError, match=r"git status in '.*tree' took longer"
    ) as caught:
        git.status(tree, "-uall", timeout_s=0.5)
    assert caught.value.hint == "or: --snapshot folder"
    limits = []
    read = process.read_bounded

    def note_limit(child: Any, most_bytes: int, timeout_s: float) -> Any:
        limits.append(timeout_s)
        return read(child, most_bytes, timeout_s)

    monkeypatch.setattr(process, "read_bounded", note_limit)
    git.files(tree)
    git.status(tree, "-uno")
    git.diff(tree)
    assert set(limits) == {60.0}


@pytest.mark.parametrize(
    "name",
    [
        "index",
        "sharedindex.0",
        "info/attributes",
        "info/exclude",
        "info/sparse-checkout",
    ],
)
@pytest.mark.parametrize("kind", ["hole", "data"])
def test_files_that_are_copied_have_a_bound(
    tree: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    file = tree / ".git" / name
    file.parent.mkdir(exist_ok=True)
    size = 2**32
    if kind == "data":
        monkeypatch.setattr(git, "_MOST_BYTES", 2**12)
        monkeypatch.setattr(git, "_MOST_INDEX_BYTES", 2**12)
        size = 2**13
        file.write_bytes(b"#" * size)
    with open(file, "ab") as end:
        end.truncate(size)
    with pytest.raises(UsageError) as caught:
        git.status(tree, "-uno")
    assert repr(str(file)) in str(caught.value)
    assert caught.value.hint == "or: --snapshot folder"


FILTERS = ("x", "a.b", "a=b", "A b", "", "p", "]x", "#")
"""Names of filters; in an option of git's command line, "=" would end the name."""
PROGRAMS = (
    "core.fsmonitor", "core.pager", "core.editor", "core.askPass", "core.sshCommand",
    "core.gitProxy", "core.alternateRefsCommand", "pager.status", "pager.diff", "pager.ls-files",
    "diff.external", "diff.x.command", "diff.x.textconv", "interactive.diffFilter",
    "credential.helper", "gpg.program", "gpg.ssh.program", "sequence.editor",
    "submodule.lib.update", "uploadpack.packObjectsHook", "remote.origin.uploadpack",
    "remote.origin.proxy", "merge.x.driver", "trailer.x.command", "browser.x.cmd", "man.x.cmd",
    *(f"alias.{name}" for name in ("status", "diff", "ls-files", "rev-parse", "config")),
    *(f"filter.{name}.{kind}" for name in FILTERS for kind in ("clean", "smudge")),
    "filter.p.process",
)  # fmt: skip
"""Keys of a repository's configuration that name a program."""


def set_trap(place: Path, trap: Path, how: str) -> None:
    """Has the configuration of a repository name a program by all keys, and its files use it."""
    folder = Path(run_git(place, "rev-parse", "--absolute-git-dir"))
    file = folder / "config"
    match how:
        case "included":
            file = folder / "elsewhere"
            run_git(place, "config", "include.path", "elsewhere")
        case "conditional":
            file = folder / "elsewhere"
            run_git(place, "config", f"includeIf.gitdir:{folder}.path", "elsewhere")
        case "worktree":
            run_git(place, "config", "extensions.worktreeConfig", "true")
            file = folder / "config.worktree"
    for key in PROGRAMS:
        value = str(trap)
        if key.startswith(("alias", "submodule")):
            value = f"!{trap}"
        run_git(place, "config", "--file", str(file), key, value)
    for name in FILTERS:
        run_git(place, "config", "--file", str(file), f"filter.{name}.required", "true")
    for key, value in (
        ("remote.origin.url", f"ext::{trap}"),
        ("remote.origin.promisor", "true"),
        ("core.attributesFile", str(folder / "more-attributes")),
    ):
        run_git(place, "config", "--file", str(file), key, value)
    lines = ["train.py diff=x"]
    for number, name in enumerate(FILTERS):
        lines.append(f"f{number} filter={name} diff=x merge=x")
        # Of the size that the index has: git has to read it.
        (place / f"f{number}").write_text("2\n")
    (place / ".gitattributes").write_text("\n".join(lines))
    (folder / "info" / "attributes").write_text("train.py filter=x\n")
    (place / "train.py").write_text("print(2)\n")
    for hook in (
        "post-index-change",
        "pre-commit",
        "fsmonitor-watchman",
        "post-checkout",
    ):
        (folder / "hooks").mkdir(exist_ok=True)
        shutil.copy(trap, folder / "hooks" / hook)


@pytest.mark.parametrize("how", ["plain", "included", "conditional", "worktree"])
@pytest.mark.parametrize("where", ["tree", "submodule"])
def test_nothing_of_a_repository_is_executed(
    tree: Path, tmp_path: Path, where: str, how: str
) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f'#!/bin/sh\necho "$0 $*" >>{tmp_path}/started\ncat\n')
    trap.chmod(0o755)
    library = tmp_path / "library"
    if where == "submodule":
        repository(library)
    place = tree
    for repo in filter(Path.exists, (library, tree)):
        for number, _ in enumerate(FILTERS):
            (repo / f"f{number}").write_text("1\n")
        run_git(repo, "add", ".")
        run_git(repo, "commit", "-qm", "files")
    if where == "submodule":
        run_git(tree, "submodule", "--quiet", "add", str(library), "lib")
        run_git(tree, "commit", "-qm", "two")
        place = tree / "lib"
    set_trap(place, trap, how)
    # A trap that does not snap proves nothing.
    subprocess.run(["git", "status"], cwd=place, capture_output=True, check=False)
    assert str(trap) in (tmp_path / "started").read_text()
    (tmp_path / "started").unlink()
    assert git.head(tree) is not None
    assert git.status(tree, "-uall")
    assert git.files(tree)
    assert git.tracks(tree, Path("train.py"))
    assert git.diff(tree)
    assert not (tmp_path / "started").exists()


def test_objects_that_are_absent_are_not_fetched(tree: Path, tmp_path: Path) -> None:
    """A partial clone would have git start a transport."""
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    trap.chmod(0o755)
    blob = run_git(tree, "rev-parse", "HEAD:train.py")
    (tree / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for key, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", str(tmp_path)),
        ("remote.origin.uploadpack", str(trap)),
        ("remote.origin.promisor", "true"),
    ):
        run_git(tree, "config", key, value)
    (tree / "train.py").write_text("print(2)\n")
    assert git.status(tree) == [" M train.py"]
    with pytest.raises(UsageError):
        git.diff(tree)
    assert not (tmp_path / "started").exists()


def test_a_folder_that_looks_like_a_repository_is_none(
    tree: Path, tmp_path: Path
) -> None:
    """A bare repository may be committed into a tree, with a configuration."""
    bare = tree / "data"
    run_git(tree, "clone", "-q", "--bare", ".", "data")
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    trap.chmod(0o755)
    run_git(bare, "config", "core.fsmonitor", str(trap))
    run_git(bare, "config", "core.bare", "false")
    run_git(bare, "config", "core.worktree", str(tree))
    assert git.head(bare) is None
    assert not (tmp_path / "started").exists()


def test_a_filter_that_is_added_meanwhile_does_nothing(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every look at the configuration."""
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\ncat\n")
    trap.chmod(0o755)
    (tree / ".gitattributes").write_text("train.py filter=x diff=x\n")
    (tree / "train.py").write_text("print(2)\n")
    output = git.output

    def and_then_change(folder: Path, *arguments: str, **rest: Any) -> str:
        if arguments[0] in ("status", "diff"):
            for key in ("filter.x.clean", "core.fsmonitor", "diff.x.textconv"):
                run_git(tree, "config", key, str(trap))
        return output(folder, *arguments, **rest)

    monkeypatch.setattr(git, "output", and_then_change)
    assert git.status(tree, "-uno") == [" M train.py"]
    assert "+print(2)" in git.diff(tree)
    assert not (tmp_path / "started").exists()
