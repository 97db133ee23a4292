"""`slurmft completion`: TAB in a real bash and a real zsh."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from slurmft.core import plugins
from slurmft.train.commands.submit import parser
from slurmft.train.task_facts import TASKS
from tests.conftest import slurmft
from tests.support import PATIENCE_S
from tests.support.made_runs import write_run

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, as a file."""
    top = tmp_path_factory.mktemp("completion")
    files = {"bash": top / "slurmft.bash", "zsh": top / "_slurmft"}
    for shell, file in files.items():
        done = slurmft("completion", shell)
        assert done.code == 0, done.err
        file.write_text(done.out)
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs."""
    top = tmp_path_factory.mktemp("folder")
    for name in ("emotion-1", "emotion-2", "squad-1"):
        write_run(top / "runs" / name)
    (top / "runs" / "emotion-none").mkdir()
    return top


def complete(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash would offer for the last word; it can run no program meanwhile."""
    code = (
        f"source '{script}'; PATH=; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1))\n"
        '_shtab_slurmft 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "--norc", "-c", code, "bash", "slurmft", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_commands_and_flags(scripts: dict[str, Path], folder: Path) -> None:
    bash = scripts["bash"]
    assert complete(bash, folder, "") == set(plugins.entries(plugins.COMMANDS))
    assert complete(bash, folder, "doctor", "") == {"node", "locks"}
    assert complete(bash, folder, "doctor", "--qui") == {"--quick"}
    assert complete(bash, folder, "study", "status", "--j") == {"--json"}
    offered = complete(bash, folder, "submit", "--")
    known = {flag for action in parser()._actions for flag in action.option_strings}
    assert offered == known - {"-h"}


def test_values(scripts: dict[str, Path], folder: Path) -> None:
    bash = scripts["bash"]
    assert complete(bash, folder, "submit", "--task", "") == set(TASKS)
    assert complete(bash, folder, "render", "kubernetes", "--precision", "b") == {
        "bf16"
    }
    assert complete(bash, folder, "submit", "--runs-dir", "r") == {"runs"}
    assert complete(bash, folder, "completion", "") == {"bash", "zsh"}


def test_runs(scripts: dict[str, Path], folder: Path) -> None:
    bash = scripts["bash"]
    assert complete(bash, folder, "logs", "") >= {
        "last",
        "emotion-1",
        "emotion-2",
        "squad-1",
    }
    for command in ("logs", "watch", "follow", "cancel", "resume"):
        assert complete(bash, folder, command, "emo") == {"emotion-1", "emotion-2"}
    assert complete(bash, folder, "watch", "la") == {"last"}
    assert complete(bash, folder, "watch", "--runs-dir", "x", "squ") == {"squad-1"}


def typed(
    command: list[str], setup: str, keys: str, expected: str, folder: Path
) -> None:
    """Types into an interactive shell, until it shows what TAB completes."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update({"TERM": "xterm", "PS1": "> "})
        os.execvp(command[0], command)
    try:
        _until(fd, b"> ")
        os.write(fd, f"{setup}; echo re''ady\n".encode())
        _until(fd, b"ready\r\n")
        os.write(fd, keys.encode())
        _until(fd, expected.encode())
    finally:
        os.close(fd)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _until(fd: int, text: bytes) -> None:
    seen, deadline = b"", time.monotonic() + PATIENCE_S
    while text not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([fd], [], [], 1)[0]:
            seen += os.read(fd, 4096)


HOSTILE = "emotion-2026$(id>pwned)"
"""The name of a folder of somebody else's."""


@pytest.mark.parametrize("line", ["status emotion-2", "submit --runs-dir emotion-2"])
def test_names_that_need_quotes_are_not_offered(
    scripts: dict[str, Path], tmp_path: Path, line: str
) -> None:
    (tmp_path / HOSTILE).mkdir()
    (tmp_path / "emotion-3").mkdir()
    words = line.split()
    assert HOSTILE not in complete(scripts["bash"], tmp_path, *words)
    keys = f"slurmft {line}\t emotion-3\t"
    bash = ["bash", "--norc", "--noprofile", "-i"]
    setup = f"source '{scripts['bash']}'; slurmft() {{ echo $# arguments: \"$@\"; }}"
    expected = f"{len(words) + 1} arguments: {line} emotion-3"
    typed(bash, setup, f"{keys}\n", expected, tmp_path)
    if shutil.which("zsh") is not None:
        folder = scripts["zsh"].parent
        setup = (
            f"fpath=('{folder}' $fpath); autoload -Uz compinit; compinit -u -D; "
            'slurmft() { echo $# arguments: "$@"; }'
        )
        typed(["zsh", "-f", "-i"], setup, f"{keys}\n", expected, tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [("slurmft logs --fol\t", "--follow"), ("slurmft watch squ\t", "squad-1")],
)
def test_tab(scripts: dict[str, Path], folder: Path, keys: str, expected: str) -> None:
    bash = ["bash", "--norc", "--noprofile", "-i"]
    typed(bash, f"source '{scripts['bash']}'", keys, expected, folder)
    if shutil.which("zsh") is None:
        pytest.skip("no zsh: only bash was tried")
    setup = f"fpath=('{scripts['zsh'].parent}' $fpath); autoload -Uz compinit; compinit -u -D"
    typed(["zsh", "-f", "-i"], setup, keys, expected, folder)
