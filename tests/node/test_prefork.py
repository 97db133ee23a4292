"""Ranks that are forked from torchrun's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.core import process
from slurmft.node import prefork
from slurmft.runs.log_times import split
from tests.support import PATIENCE_S, until

pytestmark = pytest.mark.processes

RANK = """
import os, sys, time
from pathlib import Path
from slurmft.node import signals
from slurmft.node.prefork import Template

def work():
    line = Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").replace(b"\\0", b" ").decode()
    print(os.environ.get("A"), os.environ.get("HOME"), os.getsid(0) == os.getpid(), line)
    sys.stdout.flush()
    {do}

{begin}
template = Template(work, "python -m a b")
{then}
"""


def run(do: str, then: str, begin: str = "") -> str:
    """What a process prints that forks a rank."""
    code = RANK.format(do=do, begin=begin, then=then)
    command = [sys.executable, "-c", code, "long enough for a title"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout


START = "rank = template.start({'A': 'x\\ny'})\n"


def test_a_rank_has_its_environment_a_session_and_a_title() -> None:
    printed = run("os._exit(0)", START + "print(rank.wait(100), rank.poll())")
    assert printed == "x\ny None True python -m a b\n0 0\n"


@pytest.mark.parametrize(
    ("do", "code"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -9),
        ("raise ValueError", 1),
        ("pass", 1),
    ],
)
def test_exit_codes_are_those_of_popen(do: str, code: int) -> None:
    assert run(do, START + "print(rank.wait(100))").splitlines()[-1] == str(code)


def test_a_rank_is_torchruns_own_child() -> None:
    """By its parent it knows who sends it a signal."""
    then = START + "print(rank.wait(100), os.getpid())"
    parent, code, pid = run(
        "print(os.getppid(), flush=True); os._exit(0)", then
    ).split()[-3:]
    assert (parent, code) == (pid, "0")


def test_a_template_that_was_killed_starts_nothing() -> None:
    then = (
        "os.kill(template.pid, 9)\ntry:\n    template.start({})\n"
        "except OSError:\n    print('ended')"
    )
    assert run("", then) == "ended\n"


def test_a_stop_signal_to_the_template_reaches_torchrun() -> None:
    then = (
        "import signal, subprocess\n"
        "subprocess.run(['kill', str(template.pid)], check=True)\n"
        "print(signal.sigwaitinfo(signals.STOP).si_pid == template.pid)"
    )
    assert run("", then, begin="signals.block()") == "True\n"


def test_waiting_has_a_limit() -> None:
    then = START + (
        "import subprocess\ntry:\n    rank.wait(0.1)\n"
        "except subprocess.TimeoutExpired:\n    print(rank.poll())"
    )
    assert run("time.sleep(60)", then).splitlines()[-1] == "None"


@pytest.mark.parametrize(
    "then",
    ["pid = template.pid\n", START + "pid = rank.pid\n"],
    ids=["template", "rank"],
)
def test_all_end_with_torchrun(then: str) -> None:
    then += "time.sleep(0.3)\nprint('pid', pid, file=sys.stderr, flush=True)\n"
    then += "os.kill(os.getpid(), 9)"
    command = [
        sys.executable,
        "-c",
        RANK.format(do="time.sleep(60)", begin="", then=then),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == -signal.SIGKILL
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("pid "))
    pid = int(line.split()[1])
    until(lambda: (process.stat(pid) or "Z")[0] == "Z", every_s=0.02)


def test_a_process_that_has_a_gpu_open_does_not_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not prefork.uses_device()
    monkeypatch.setattr(prefork, "_DEVICES", (str(tmp_path),))
    with open(tmp_path / "nvidia0", "w"):
        assert prefork.uses_device()


PROGRAM = """
import os, sys
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: others print, too
    sys.stdout.flush()
say("imported by", os.environ.get("RANK"))
def prepare():
    say("prepared by", os.environ.get("RANK"))
    {prepare}
def main(argument):
    import torch
    say("main", os.environ["RANK"], argument, torch.get_num_threads())
    os._exit({code} if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
if __name__ == "__main__":
    main(sys.argv[1])
"""


def torchrun(
    folder: Path, prepare: str = "", code: int = 0, **variables: str
) -> list[str]:
    """What two ranks of a program print, whose module is in `slurmft.`, in some order."""
    package = folder / "slurmft"
    package.mkdir()
    source = Path(prefork.__file__).parents[1]
    for path in source.iterdir():
        (package / path.name).symlink_to(path)
    (package / "a_program.py").write_text(PROGRAM.format(prepare=prepare, code=code))
    command = [sys.executable, "-m", "slurmft.node.torchrun", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "--module"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""} | variables
    done = subprocess.run(
        [*command, "slurmft.a_program", "hello"], cwd=folder, text=True, check=True,
        timeout=PATIENCE_S, stdout=subprocess.PIPE, env=os.environ | variables,
    )  # fmt: skip
    return sorted(split(line)[1] for line in done.stdout.splitlines())


def test_torchrun_imports_once_for_its_ranks(tmp_path: Path) -> None:
    assert torchrun(tmp_path) == [
        "imported by None", "main 0 hello 1", "main 1 hello 1", "prepared by None",
    ]  # fmt: skip


NEW = ["imported by 0", "imported by 1", "main 0 hello 1", "main 1 hello 1"]


def test_restarted_ranks_need_no_imports(tmp_path: Path) -> None:
    ranks = ["main 0 hello 1", "main 1 hello 1"] * 2
    assert torchrun(tmp_path, code=3) == [
        "imported by None", *sorted(ranks), "prepared by None",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prepare", "variables"),
    [("raise ImportError('x')", {}), ("", {"OMP_PROC_BIND": "true"})],
)
def test_ranks_are_new_where_forked_ones_could_not_be_like_them(
    prepare: str, variables: dict[str, str], tmp_path: Path
) -> None:
    printed = torchrun(tmp_path, prepare, 0, **variables)
    assert [line for line in printed if not line.endswith("None")] == NEW
