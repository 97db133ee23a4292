"""The commands of the login node: fast to start, free of torch, and clear about mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HOSTILE, assert_two_lines, slurmft

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy", "submitit", "pyarrow")


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        (["--help"], "SystemExit(0)"),
        (["--dry-run"], "0"),
        (["--dry-run", "--cluster=slurm"], "0"),
        (["--nods"], "UsageError(\"unknown flag '--nods'\")"),
    ],
)
def test_no_heavy_imports(arguments: list[str], ending: str, fake_sbatch: dict[str, str]) -> None:
    code = (
        "import sys\n"
        "from slurmft.cli.submit import main\n"
        "try: ending = repr(int(main(sys.argv[1:])))\n"
        "except BaseException as error: ending = repr(error)\n"
        "print(ending)\n"
        f"print('HEAVY', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=fake_sbatch,
        check=True,
    )
    assert done.stdout.splitlines()[-2:] == [ending, "HEAVY []"]


MPIRUN = ("--cluster", "mpirun", "--nproc-per-node", "1", "--hostfile", "{folder}/hosts")


@pytest.fixture
def fake_sbatch(tmp_path: Path) -> dict[str, str]:
    """An environment with an sbatch that must not be called."""
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 77\n")
    tool.chmod(0o755)
    return os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--ndoes", "4"], "did you mean --nodes?"),
        (["--nodes", "0"], "--nodes 0 must be at least 1"),
        (["--nodes", "four"], "argument --nodes: invalid int value: 'four'"),
        (["--node", "4"], "did you mean --nodes?"),
        (["--task", "emotions"], "did you mean emotion?"),
        (["4"], "unexpected argument '4'"),
        (["--task", "emotion", "--data", "/no/such/place"], "no such folder"),
        (["--task", "emotion", "--model", "/"], "holds no config.json"),
        (["--cluster", "slurm"], "sbatch is not on the PATH"),
        (["--runs-dir", "/proc/none"], "cannot write the run directory"),
        (["--comment", "two\nlines"], "holds a line break"),
    ],
)
def test_mistakes_end_in_two_lines(arguments: list[str], hint: str, tmp_path: Path) -> None:
    done = slurmft("submit", *arguments, env={"PATH": f"{tmp_path}"})
    assert done.code in (2, 3)
    assert hint in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 2
    assert done.out == ""


@pytest.mark.parametrize(
    ("hosts", "arguments", "fact"),
    [
        ("", ["submit", "--task", "mrcp"], "unknown --task 'mrcp'"),
        ("# n1\n", ["submit", *MPIRUN], "names no host"),
        (None, ["submit", *MPIRUN], "cannot be read: No such file"),
        (
            "",
            ["doctor", "node", "--here", "--nproc-per-node", "4000"],
            "--nproc-per-node 4000, but",
        ),
        ("", ["doctor", "node", "--here", "--profile", "gpu"], "looked at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_mistakes_name_fact_and_cure(
    hosts: str | None, arguments: list[str], fact: str, tmp_path: Path
) -> None:
    if hosts is not None:
        (tmp_path / "hosts").write_text(hosts)
    filled = [a.format(folder=tmp_path) for a in arguments]
    assert_two_lines(slurmft(*filled, env={"CUDA_VISIBLE_DEVICES": ""}), fact)


def test_commands() -> None:
    assert slurmft().code == 2
    assert "submit" in slurmft("--help").out
    assert "did you mean submit?" in slurmft("submt").err
    assert "is not a run directory" in slurmft("follow", "/").err
    assert slurmft("--version").out.startswith("slurmft 0.")


def test_dry_run_shows_everything_and_does_nothing(
    tmp_path: Path, fake_sbatch: dict[str, str]
) -> None:
    runs = tmp_path / HOSTILE
    done = slurmft(
        *("submit", "--dry-run", "--nodes", "3", "--runs-dir", str(runs)),
        *("--partition", "gpu", "--gpus-per-node", "4", "--cpus-per-task", "8", "--exclusive"),
        *("--setup", "module load cuda", "--sbatch", "nice=100", "--comment", "it's"),
        env=fake_sbatch,
    )
    assert done.code == 0
    for text in (
        '"batch_size": 32',
        "#SBATCH --nodes=3",
        "#SBATCH --partition=gpu",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --exclusive\n",
        "#SBATCH --nice=100",
        "module load cuda\n",
        "-m slurmft.node.torchrun --nnodes 3",
        "nothing was submitted",
    ):
        assert text in done.out
    assert not runs.exists()
