"""What slurmft prints for shells says the same to a real one, whatever names and paths hold."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slurmft.cli.hints import next_commands
from slurmft.cluster import dry_run, submit, wait
from slurmft.cluster.slurm import job_array
from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.core import interpreter
from slurmft.core.config import JobConfig, RunConfig
from slurmft.plugins.kubernetes import manifests
from slurmft.plugins.studies.commands import study
from slurmft.runs.rundir import RunDir
from slurmft.show import status_words
from slurmft.train.config import TrainConfig
from tests.conftest import HOSTILE

pytestmark = pytest.mark.processes

STUBS = ("python", "slurmft", "srun", "bash", "tail", "mpiexec", "kubectl", "docker")
STUB = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\0\\n'; } >>"$CALLS"
"""
ANYTHING = "a $`'\"\\;&|(){}[]<>*?!#~=^é\t"
# No option takes a blank text.
lines = st.text(ANYTHING + "%", min_size=1, max_size=20).filter(str.strip)
texts = st.text(ANYTHING + "%\n", min_size=1, max_size=20)
runs_dirs = st.text(ANYTHING.replace("\\", ""), min_size=1, max_size=20)
quick = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)


class Shell:
    """A real bash, whose commands note what they are called with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        for name in STUBS:
            (folder / name).write_text(STUB)
            (folder / name).chmod(0o755)

    def run(self, text: str, **variables: str) -> list[list[str]]:
        """What was called, with its arguments."""
        self.calls.write_text("")
        env = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "CALLS": str(self.calls),
        } | variables
        done = subprocess.run(
            ["/bin/bash", "-c", text], cwd=self.folder, env=env, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.stderr == "", text
        whole = self.calls.read_text(encoding="utf-8").split("\0\0\n")
        # no redirection
        assert sorted(os.listdir(self.folder)) == sorted([*STUBS, "calls"]), text
        return [call.split("\0") for call in whole[:-1]]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setattr(interpreter, "PYTHON", "python")
    monkeypatch.setattr(sys, "orig_argv", ["slurmft"])
    folder = tmp_path / "bin"
    folder.mkdir()
    return Shell(folder)


@quick
@given(name=texts)
@example(name="$(touch x)\n`id`'\"")
def test_next_commands(shell: Shell, name: str) -> None:
    run = RunDir(Path("/runs") / name)
    path = str(run.path)
    calls = shell.run(next_commands(run.path).removeprefix("Next:\n"))
    python = ["slurmft"]
    # As `slurmft status` has them: nothing resumes a run whose job has not ended.
    usual = status_words.next_commands("running", "train")
    assert calls == [[*python, command, path] for command in usual]
    hint = wait._resume(run).partition(": ")[2]
    assert shell.run(hint)[0] == ["slurmft", "resume", path]


@quick
@given(name=texts, argument=texts)
def test_next_commands_of_studies(shell: Shell, name: str, argument: str) -> None:
    folder = Path("/studies") / name
    todo: Any = SimpleNamespace(folder=folder, argv=["--text-column", argument])
    now: Any = SimpleNamespace(count=lambda state: 1, repeats=[1, 2])
    calls = shell.run(study.next_commands(todo, now).removeprefix("Next:\n"))
    python = ["slurmft", "study"]
    assert calls[0] == [*python, "status", str(folder)]
    assert calls[1] == [*python, "cancel", str(folder)]
    assert calls[2] == [*python, "run", "--text-column", argument]
    assert str(folder) in calls[3]


@quick
@given(argument=texts)
def test_noted_command(shell: Shell, argument: str) -> None:
    noted = submit.provenance("submit", ["--comment", argument]).command
    assert shell.run(noted) == [["slurmft", "submit", "--comment", argument]]


def config_of(runs_dir: str, **job: Any) -> RunConfig:
    return RunConfig(
        program=TrainConfig.resolve().program(), job=JobConfig(runs_dir=runs_dir, **job)
    )


@quick
@given(runs_dir=runs_dirs, name=lines)
@example(runs_dir=HOSTILE, name="$(touch x)")
def test_job_script(shell: Shell, runs_dir: str, name: str) -> None:
    """Of a job, and of an array of such; the directives are comments to the shell."""
    config = config_of(f"/{runs_dir}", job_name=name, comment=name)
    run = RunDir(Path(config.job.runs_dir) / "a-1")
    path = str(run.path)
    begin, srun, end = shell.run(inside_text(config, run))
    assert [begin[:3], begin[4:]] == [["python", "-P", "-c"], ["begin", path]]
    assert srun[srun.index("--output") + 1] == f"{path}/submitit/%j_%t_log.out"
    assert srun[-6:] == ["python", "-P", "-u", "-m", "slurmft.node.task", path]
    assert [end[:4], end[4:]] == [begin[:4], ["end", path, "0"]]
    options = job_array.array_options(config, 2, 1, [], Path(path))
    others = [RunDir(shell.folder.parent / str(number)) for number in range(2)]
    script = job_array.script_text(options, dict.fromkeys([*others, run], ""))
    # the folder that it would open
    script = script.replace('exec 4<"$folder"/. || exit', 'tail "$folder"; exit')
    (called,) = shell.run(script, SLURM_ARRAY_TASK_ID="2")
    assert called == ["tail", f"{path}/submitit"]


@quick
@given(folder=lines)
def test_commands_for_kubernetes(shell: Shell, folder: str) -> None:
    cluster = Namespace(
        kind="pytorchjob", name="a", namespace="b", image="c", secret="hub",
        output=Path("/x") / folder,
    )  # fmt: skip
    commands = manifests.commands(cluster)
    calls = shell.run("\n".join(commands), HF_TOKEN="hf_very secret")
    assert calls[0][:3] == ["docker", "build", "--tag"]
    assert f"{Path('/x') / folder}/Dockerfile" in calls[0]
    applied = [
        "kubectl",
        "--namespace",
        "b",
        "apply",
        "--filename",
        f"{Path('/x') / folder}/a.yaml",
    ]
    assert applied in calls
    assert "secret" in calls[2]
    assert "hf_very" not in str(calls)


@quick
@given(name=st.text("$(){}`idHOME.:", min_size=1, max_size=12))
@example(name="$(id)")
def test_only_our_own_variables_are_variables(name: str) -> None:
    """The torchrun command of a dry run: paths stay as they are."""
    config = config_of(f"/r{name}")
    text = dry_run.node_command(
        config, RunDir(Path(config.job.runs_dir) / "a"), "slurm"
    )[1]
    echo = "printf '%s\\0' " + text
    env = {"HEAD": "n1", "PORT": "7", "NPROC": "2", "SLURM_JOB_ID": "9"}
    done = subprocess.run(
        ["/bin/bash", "-c", echo], env=env, capture_output=True, check=True
    )
    words = done.stdout.decode().split("\0")
    assert f"/r{name}/a" in words
    assert words[words.index("--rdzv-id") + 1] == "9.1"
    assert words[words.index("--rdzv-endpoint") + 1] == "n1:7"
    assert words[words.index("--nproc-per-node") + 1] == "2"
