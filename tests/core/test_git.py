"""Git is started by one module, and executes nothing that a repository names."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import slurmft
from slurmft.core import git
from slurmft.core.errors import UsageError

pytestmark = pytest.mark.processes


def run_git(top: Path, *arguments: str) -> str:
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
    return os.fsdecode(done.stdout).strip()


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


def test_no_other_module_starts_git() -> None:
    top = Path(slurmft.__file__).parent
    for path in top.rglob("*.py"):
        commands = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.List, ast.Tuple)) and _begins_with_git(node.elts)
        ]
        assert not commands or path == top / "core" / "git.py", path


def _begins_with_git(words: list[ast.expr]) -> bool:
    first = words[0] if words else None
    return isinstance(first, ast.Constant) and first.value == "git"


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


@pytest.mark.parametrize("where", ["tree", "submodule"])
def test_nothing_of_a_repository_is_executed(
    tree: Path, tmp_path: Path, where: str
) -> None:
    place = tree
    if where == "submodule":
        library = repository(tmp_path / "library")
        run_git(tree, "submodule", "--quiet", "add", str(library), "lib")
        run_git(tree, "commit", "-qm", "two")
        place = tree / "lib"
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\ncat\n")
    trap.chmod(0o755)
    keys = (
        "core.fsmonitor",
        "core.pager",
        "diff.external",
        "diff.x.command",
        "diff.x.textconv",
    )
    filters = ("filter.a.b.clean", "filter.a.b.smudge", "filter.p.process")
    for key in (*keys, *filters):
        run_git(place, "config", key, str(trap))
    run_git(place, "config", "filter.a.b.required", "true")
    (place / ".gitattributes").write_text("train.py diff=x filter=a.b\n*.p filter=p\n")
    # of the same size: git has to read it
    (place / "train.py").write_text("print(2)\n")
    folder = Path(run_git(place, "rev-parse", "--absolute-git-dir"), "hooks")
    folder.mkdir(exist_ok=True)
    for hook in ("post-index-change", "pre-commit"):
        shutil.copy(trap, folder / hook)
    (tmp_path / "started").unlink(missing_ok=True)
    assert git.head(tree) is not None
    assert git.status(tree, "-uall")
    assert git.files(tree)
    assert git.diff(tree)
    assert not (tmp_path / "started").exists()
