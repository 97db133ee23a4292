"""What the commands find: the checkout's files, programs on the PATH, runs, a study."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmft.core import shipped
from slurmft.core.files import write_json
from slurmft.plugins.studies import spec
from slurmft.plugins.studies.runner import configurations, with_flags
from slurmft.train.config import TrainConfig
from tests.docs import pages
from tests.docs.rules import filled, study_name
from tests.support import CHECKOUT
from tests.support.made_runs import write_run
from tests.support.metric_scripts import cache_script, write_script
from tests.support.models import (
    write_chats,
    write_decoder,
    write_documents,
    write_reviews,
    write_splits,
)

PUSHED = "emotion-20261120-093012-a1b2"
"""The run that is pushed to the hub."""
JOB = "8123"
"""Its job, as the output of `slurmft list` has it."""

SITE = """\
max_steps = 2
batch_size = 4
eval_batch_size = 64
precision = "fp32"
cpus_per_task = 1
log_every = 1
"""
"""Makes the trainings of commands as small as they get."""

SCRIPT = """\
import sys
import filelock
unix = sys.modules[filelock.UnixFileLock.__module__]
assert type(unix.fcntl).__module__ == "slurmft.locks", unix.fcntl
"""
"""Somebody's train.py: it has the shim."""
OWN_TASK = '"""reviews.py'
"""How the page of own tasks begins its example; test_own_task trains it."""

_PROGRAMS = {
    "slurmft": 'exec "$PYTHON" -m slurmft "$@"',
    "python": 'exec "$PYTHON" "$@"',
    "python3": 'exec "$PYTHON" "$@"',
    "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"',
    "module": "exit 0",
    # What dry runs look for, and never start.
    "mpirun": 'echo "mpirun (Open MPI) 4.1.4"; [ "$*" = --version ]',
    "uv": "exit 0",
    "dry/apptainer": 'echo "a dry run calls $0 $*" >&2; exit 9',
    "dry/sbatch": 'echo "a dry run calls $0 $*" >&2; exit 9',
}
_SYSTEM = ("bash", "sh", "env", "cat", "head", "mkdir", "git", "uname", "hostname")
"""Programs that commands and slurmft call; Slurm's are not among them."""


@dataclass(frozen=True, slots=True)
class World:
    """A folder in which commands are typed, as on somebody's cluster."""

    folder: Path
    env: dict[str, str]
    run: str = "last"
    """What RUN means."""

    def command(self, text: str) -> list[str]:
        """For bash, as it stands there, with names from here for its examples."""
        names = {
            "RUN_A": "runs/fp32",
            "RUN_B": "runs/bf16",
            "RUN": self.run,
            "NAME": "batch",
        }
        names["PROGRAM"] = "train.py"
        of_hub = "sentence-transformers/all-MiniLM-L6-v2"
        names[of_hub] = "/gpfs/models/distilbert-base-uncased"
        return [
            "bash",
            "-c",
            filled(text, names | {"DIR": "gpfs", "/gpfs/": f"{self.folder}/gpfs/"}),
        ]


def make(folder: Path, model: Path, data: Path) -> World:
    """A folder with programs and files, without runs.

    Args:
        folder: where; made.
        model: a folder that stands for the models.
        data: one that stands for the data sets.
    """
    for name in ("sbatch", "results", "patches", "constraints.txt", "README.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(CHECKOUT / name)
    for place in ("gpfs/data/emotion", "gpfs/emotion"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(data)
    tickets = folder / "gpfs/data/tickets"
    tickets.mkdir()
    for split in ("train", "validation"):
        (tickets / f"{split}.csv").write_text(pages.block_that_begins("text,label"))
    write_reviews(folder / "gpfs/data/reviews", train=20, validation=10)
    (folder / "reviews.py").write_text(pages.block_that_begins(OWN_TASK, "python"))
    (folder / "gpfs/models").mkdir()
    (folder / "gpfs/models/distilbert-base-uncased").symlink_to(model)
    for name in ("SmolLM2-135M", "SmolLM2-135M-Instruct"):
        write_decoder(folder / "gpfs/models" / name)
    write_documents(folder / "gpfs/data/papers", train=20, validation=5)
    write_chats(folder / "gpfs/data/chats", train=20, validation=5)
    shipped.copy(folder / "examples")
    prompts = [{"prompt": "joy", "completion": " love"}] * 20
    write_splits(
        folder / "gpfs/data/prompts", {"train": prompts, "validation": prompts}
    )
    for place in ("gpfs/proj42/hf", "gpfs/images"):
        (folder / place).mkdir(parents=True)
    for place in (".zfunc", ".local/share/bash-completion/completions"):
        (folder / "home" / place).mkdir(parents=True)
    (folder / "gpfs/images/torch.sif").touch()
    (folder / "hosts").write_text(
        "".join(f"127.0.0.{i} slots=2\n" for i in range(1, 5))
    )
    write_script(folder / "my_metrics", "within_one")
    cache_script(folder / "home/.cache/huggingface", "f1")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "fsdp.yaml").write_text("distributed_type: FSDP\n")
    for name in ("uv.lock", "pyproject.toml"):
        (folder / name).touch()
    (folder / "site.toml").write_text(SITE)
    for block in pages.blocks("toml"):
        if (study := study_name(block)) is not None:
            (folder / f"{study}.toml").write_text(block)
    write_programs(folder)
    env = {"HOME": str(folder / "home"), "SLURMFT_SITE": str(folder / "site.toml")}
    env |= {"PYTHONPATH": str(CHECKOUT), "PYTHON": sys.executable}
    return World(folder, env | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"})


def write_programs(folder: Path) -> None:
    """`slurmft`, `python` and what else is typed, in bin; .venv/bin is the same."""
    for name, line in _PROGRAMS.items():
        file = folder / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
    (folder / ".venv").mkdir()
    (folder / ".venv/bin").symlink_to(folder / "bin")


def without_slurm(world: World) -> World:
    """The same, where the PATH has nothing of Slurm."""
    only = world.folder / "bin-system"
    only.mkdir()
    for name in _SYSTEM:
        if (found := shutil.which(name)) is not None:
            (only / name).symlink_to(found)
    path = f"{world.folder / 'bin'}:{only}"
    return dataclasses.replace(world, env=world.env | {"PATH": path}, run=PUSHED[:-2])


def with_runs_dir(world: World, name: str) -> World:
    """The same, with a folder of runs of its own."""
    site = world.folder / f"{name}.toml"
    site.write_text(f'{SITE}runs_dir = "{world.folder}/{name}-runs"\n')
    return dataclasses.replace(
        world, env=world.env | {"SLURMFT_SITE": str(site)}, run="last"
    )


def write_runs(world: World, model: Path) -> None:
    """The runs that are named: finished, on four nodes; and those of a plan."""
    names = {"fp32": {"precision": "fp32"}, "bf16": {"precision": "bf16"}}
    named: dict[str, dict[str, Any]] = {
        **names,
        PUSHED: {"task": "emotion", "model": str(model)},
    }
    for number, (name, values) in enumerate(named.items()):
        path, step_s = world.folder / "runs" / name, 0.1 - number / 100
        run = write_run(
            path, step_s=step_s, epochs=1, nodes=4, nproc_per_node=1, **values
        )
        write_json(
            run.job, {"cluster": "slurm", "id": str(int(JOB) - len(named) + 1 + number)}
        )
        shutil.copytree(model, run.model)
    for nodes in (1, 2, 4):
        write_run(
            world.folder / "emotion-runs" / str(nodes), nodes=nodes, step_s=0.4 / nodes
        )


def write_study(world: World, toml: str) -> None:
    """Runs of the study, submitted to --partition gpu; the last one is missing."""
    study = with_flags(spec.read_study(str(world.folder / toml)), {"partition": "gpu"})
    folder = world.folder / "studies" / study.name
    cells = {spec.key_of(cell): cell for cell in study.cells}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world.folder)
        patch.setenv("SLURMFT_SITE", str(world.folder / "site.toml"))
        configs = configurations(study, folder)
    for (key, repeat), config in list(configs.items())[:-1]:
        number = study.cells.index(cells[key]) + 1
        job = dataclasses.asdict(config.job) | {"cluster": "slurm"}
        mine = {"name": study.name, "cell": cells[key], "repeat": repeat}
        name = f"emotion-20261121-10{repeat:02}{number:02}-c{number}-r{repeat}-ab12"
        step_s = (0.4 / config.job.nodes + 0.01) * (1 + repeat / 100)
        values = (
            dataclasses.asdict(TrainConfig.of(config.program))
            | job
            | {"step_s": step_s}
        )
        write_run(folder / "runs" / name, submission={"study": mine}, **values)
    shutil.copy(world.folder / toml, folder / "study.toml")
