"""Trainings that were interrupted, and the same ones undisturbed: two processes, with dropout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from harness import call

from comparisons.interruptions import INTERRUPTED, interrupt
from comparisons.models import are_equal
from comparisons.table import Row, check, largest

RANK = "slurmft.train.rank"
EVERY = 40
"""Steps between interruptions; there are 300 in all."""
VARIETIES = {
    "DDP": (),
    "`--shard full`": ("--shard", "full"),
    "Muon, accumulated gradients": (
        *("--optimizer", "muon", "--gradient-accumulation-steps", "2"),
        *("--batch-size", "1"),
    ),
}


@check("resumes", 0)
def resumes(folder: Path) -> Iterator[Row]:
    from tests.support.models import write_emotion, write_model

    data = write_emotion(folder / "data", train=200, validation=40)
    source = ("--data", str(data), "--model", str(write_model(folder / "model")))
    for number, (name, flags) in enumerate(VARIETIES.items()):
        place = folder / str(number)
        whole = trained(place / "undisturbed", *source, *flags)
        run = submitted(place / "interrupted", *source, *flags)
        interrupt(run, RANK, partial(last_step, run), EVERY)
        reference = "the run that nothing interrupted"
        difference = largest(losses(run), losses(whole))
        yield Row(f"{name}, {INTERRUPTED}: losses", reference, difference)
        check = f"{name}, the same: how many saved weights differ in a bit"
        yield Row(check, reference, different_weights(run, whole))


def submitted(runs: Path, *flags: str) -> Path:
    """Submits a run of 300 steps, and does not wait for it."""
    call(
        *(sys.executable, "-m", "slurmft", "submit", "--cluster", "local", "--nodes", "2"),
        *("--runs-dir", str(runs), "--task", "emotion", "--precision", "fp32"),
        *("--batch-size", "2", "--epochs", "6", "--log-every", "1", "--learning-rate", "1e-3"),
        *("--checkpoint-every-steps", "10", "--max-requeues", "9", "--max-restarts", "9"),
        *flags,
        timeout_s=300,
    )  # fmt: skip
    (config,) = runs.glob("*/config.json")
    return config.parent


def trained(runs: Path, *flags: str) -> Path:
    run = submitted(runs, *flags)
    call(sys.executable, "-m", "slurmft", "follow", str(run), timeout_s=600)
    return run


def steps(run: Path) -> list[tuple[int, float]]:
    """Returns steps and losses in the order in which they were made."""
    from slurmft.runs.records import RecordReader
    from slurmft.runs.rundir import RunDir

    reader = RecordReader(RunDir.open(str(run)).records)
    return [(each["step"], each["loss"]) for each in reader.read_values("step")]


def last_step(run: Path) -> int:
    return max((step for step, _ in steps(run)), default=0)


def losses(run: Path) -> list[float]:
    """Returns the loss of each step; of one that was made twice, the second."""
    return [loss for _, loss in sorted(dict(steps(run)).items())]


def different_weights(run: Path, other: Path) -> int:
    from safetensors.torch import load_file

    weights, expected = (
        load_file(each / "model/model.safetensors") for each in (run, other)
    )
    assert weights.keys() == expected.keys()
    return sum(not are_equal(weights[name], expected[name]) for name in weights)
