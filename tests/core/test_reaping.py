"""However a run of tests ends, nothing that it has started goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import CHECKOUT, until

pytestmark = pytest.mark.processes

INNER = """
import os, signal, subprocess, sys
import pytest
from tests.support import prepared

pytestmark = pytest.mark.processes

@pytest.fixture(scope="module")
def forked():
    submit = ["submit", "--cluster", "local", "--task", "synthetic", "--epochs", "1000000"]
    command = [*prepared.command("slurmft"), *submit, "--runs-dir", FOLDER]
    subprocess.run(command, check=True)

@pytest.fixture(scope="module")
def executed():
    server = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"]
    subprocess.Popen([*server, "--directory", FOLDER])

def test(forked, executed):
    END
"""


def commands_with(word: str) -> list[list[str]]:
    """Returns the command lines that hold a word."""
    lines = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(word in each for each in line or ())]


def run_tests(folder: Path, inner: str) -> int:
    """Runs a file of tests with the fixtures of all tests; waits until nothing of it is left."""
    runs = str(folder / "runs")
    file = folder / "test_inner.py"
    file.write_text(inner.replace("FOLDER", repr(runs)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.conftest", str(file)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=False)
    until(lambda: not commands_with(runs), lambda: commands_with(runs))
    return done.returncode


def test_what_fixtures_of_modules_start(tmp_path: Path) -> None:
    inner = INNER.replace("END", "os.kill(os.getpid(), signal.SIGINT)")
    assert run_tests(tmp_path, inner) == pytest.ExitCode.INTERRUPTED


def test_what_killed_tests_have_forked(tmp_path: Path) -> None:
    """What they have executed is beyond help, and bears their mark."""
    inner = INNER.replace(", executed", "")
    inner = inner.replace("END", "os.kill(os.getpid(), signal.SIGKILL)")
    assert run_tests(tmp_path, inner) == -signal.SIGKILL
