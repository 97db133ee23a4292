"""Commands that are run with a time limit."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slurmft.core import process
from tests.support import CHECKOUT, until

pytestmark = pytest.mark.processes

LEAVE_NOTHING = {"slurmft/cluster/slurm/commands.py"}
"""Runs Slurm's own commands, whose output ends when they do."""


def test_what_a_command_leaves_running_is_not_waited_for() -> None:
    began = time.monotonic()
    done = process.run(["bash", "-c", "sleep 60 & cat; echo bad >&2; exit 3"], 30, "in")
    assert time.monotonic() - began < 30
    assert (done.returncode, done.stdout, done.stderr) == (3, "in", "bad\n")


def test_output_needs_no_room_in_a_temporary_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may have filled it."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    done = process.run(["sh", "-c", "cat; echo b >&2"], 30, "a")
    assert (done.stdout, done.stderr) == ("a", "b\n")


def test_a_time_limit_ends_a_command_with_what_it_has_started() -> None:
    command = ["bash", "-c", "exec -a left-by-a-command sleep 900 & sleep 900"]
    with pytest.raises(subprocess.TimeoutExpired):
        process.run(command, 0.5)
    assert process.output(command, 0.5) is None

    def are_gone() -> bool:
        names = [
            process.info["cmdline"] for process in psutil.process_iter(["cmdline"])
        ]
        return not any(name and name[0] == "left-by-a-command" for name in names)

    # a busy kernel takes a moment to end what was killed
    until(are_gone)


def test_the_end_of_what_a_child_prints_to_stderr() -> None:
    """It prints more than a pipe holds, and leaves a process that keeps the pipe open."""
    command = ["bash", "-c", "printf '%300000s\n' bad >&2; sleep 60 & exit 3"]
    with process.start(
        command, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        stderr = process.StderrEnd(child)
        child.wait()
        until(lambda: stderr.read(0.01).endswith(b" bad\n"))
        assert len(stderr.read(0.01)) == 2**16
        os.killpg(child.pid, signal.SIGKILL)
        stderr.read(30)


@pytest.mark.parametrize("name", [b"a) R 1", b"\xff", b"\xc3", b"a\rb"])
def test_a_process_may_have_a_name_of_any_bytes(name: bytes) -> None:
    """Whoever's it is: those of all users are looked at."""
    own_name = Path("/proc/self/comm")
    before = own_name.read_bytes()
    own_name.write_bytes(name)
    try:
        fields = process.stat(os.getpid())
        state = process.kernel_text(os.getpid(), "status")
        process._children()
    finally:
        own_name.write_bytes(before)
    assert fields is not None
    assert fields[1] == str(os.getppid())
    assert state is not None
    assert state.split("\n")[1].startswith("Umask:")


@pytest.mark.parametrize("command", [["no-such-command"], ["false"]])
def test_no_output(command: list[str]) -> None:
    assert process.output(command, 30) is None


def calls_of_subprocess() -> Iterator[tuple[str, set[str | None]]]:
    """The modules of slurmft that start processes by themselves, and the keywords of each call."""
    for path in (CHECKOUT / "slurmft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func).startswith("subprocess."):
                keywords = {keyword.arg for keyword in node.keywords}
                yield str(path.relative_to(CHECKOUT)), keywords


def test_nobody_else_sets_a_time_limit() -> None:
    """That of `subprocess.run` does not hold where something keeps the output open."""
    found = {module for module, keys in calls_of_subprocess() if "timeout" in keys}
    assert found == LEAVE_NOTHING


def test_what_a_command_prints_may_be_any_bytes() -> None:
    """Such as the names of other users' jobs, or of files."""
    done = process.run(["printf", r"a\377b"], 30)
    assert done.stdout == "a\udcffb"
    decoding = {"text", "universal_newlines", "encoding"}
    for module, keywords in calls_of_subprocess():
        assert not decoding & keywords or "errors" in keywords, module


def test_no_process_of_a_test_reaches_a_slurm_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever environment a test gives it: Slurm's commands read an empty configuration."""
    monkeypatch.delenv("SLURM_CONF")
    for env in (None, {}, {"PATH": "/usr/bin:/bin"}):
        done = subprocess.run(
            ["/bin/sh", "-c", "echo $SLURM_CONF; squeue"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "/dev/null\n"
        assert done.returncode != 0


def test_no_output_goes_to_a_temporary_folder() -> None:
    """Others may have filled it: what a child prints is kept in memory, or read from a pipe."""
    for path in (CHECKOUT / "slurmft").rglob("*.py"):
        if path.name not in ("process.py", "filesystem.py"):
            assert "TemporaryFile(" not in path.read_text(), path
