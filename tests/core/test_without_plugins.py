"""The kernel runs without any plug-in: each can be dropped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import CHECKOUT

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with slurmft, but without its plug-ins and its trainer."""
    top = tmp_path_factory.mktemp("kernel")
    left_out = shutil.ignore_patterns("__pycache__", "plugins", "train", "shipped")
    shutil.copytree(CHECKOUT / "slurmft", top / "slurmft", ignore=left_out)
    entry_points = top / "slurmft" / "entry_points.txt"
    lines = entry_points.read_text().splitlines()
    gone = ("= slurmft.plugins.", "= slurmft.train.")
    kept = [line for line in lines if not any(target in line for target in gone)]
    entry_points.write_text("\n".join(kept))
    (top / "hello.py").write_text("print('hello')\n")
    return top


def call(kernel: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(kernel)}
    command = [sys.executable, "-m", "slurmft", *words]
    return subprocess.run(
        command,
        cwd=kernel,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_commands_of_the_kernel(kernel: Path) -> None:
    done = call(kernel, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\njobs:\n" in done.stdout
    assert "plug-ins" not in done.stdout
    assert "training:" not in done.stdout
    done = call(kernel, "report")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)
    done = call(kernel, "list", "--on", "there")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)


def test_run_of_a_program(kernel: Path) -> None:
    done = call(kernel, "run", "--cluster", "local", "--follow", "--", "hello.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "hello" in done.stdout
    done = call(kernel, "status", "last")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Next:" in done.stdout
    done = call(
        kernel, "run", "--dry-run", "--integrate", "transformers", "--", "hello.py"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown --integrate 'transformers'\n")
    done = call(kernel, "run", "--dry-run", "--stage-env", "--", "hello.py")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown flag '--stage-env'\n")
