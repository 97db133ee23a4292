"""Whole runs on a GPU, by the command line: backend, exact resume, faults, what is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.conftest import Done, Following, records, slurmft
from tests.train.test_resume import losses, rank_pids
from tests.train.test_trainer import emotion

TASK = """
import torch

from slurmft.train.tasks import TaskFacts
from slurmft.train.tasks.synthetic import PRESETS, Task


class Failing(Task):
    facts = TaskFacts(splits=(), defaults={"model": None})
    preset = PRESETS["quick"]
    steps = 0

    def loss(self, output, batch):
        self.steps += 1
        if self.steps == 5:
            WHAT
        return super().loss(output, batch)
"""
"""A task of one's own that does something in its fifth step."""

EXACT = (
    "--batch-size",
    "8",
    "--learning-rate",
    "1e-3",
    "--epochs",
    "4",
    "--nodes",
    "1",
)


def submit(*flags: str, timeout_s: float = 240) -> Done:
    return slurmft("submit", "--follow", *flags, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def flags(
    local: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory, tiny_data: Path,
    tiny_model: Path,
) -> tuple[str, ...]:  # fmt: skip
    runs = tmp_path_factory.mktemp("gpu runs")
    return (*local, *emotion(tiny_data, tiny_model), *EXACT, "--runs-dir", str(runs))


@pytest.fixture(scope="module")
def undisturbed(flags: tuple[str, ...], device: torch.device) -> Done:
    done = submit(*flags, "--precision", "bf16")
    assert done.code == 0, done.err
    return done


def test_a_run_uses_the_gpu(undisturbed: Done) -> None:
    assert undisturbed.result["backend"] == "nccl"
    assert undisturbed.result["precision"] == "bf16"


def test_a_run_learns(flags: tuple[str, ...]) -> None:
    done = submit(*flags, "--precision", "bf16", "--learning-rate", "1e-2")
    assert done.code == 0, done.err
    found = losses(done.run)
    assert sum(found[-10:]) < 0.9 * sum(found[:10])


@pytest.mark.parametrize(
    ("own", "allowed"),
    [
        (("--precision", "fp32"), 1e-4),
        (("--precision", "fp32", "--tf32"), 3e-3),
        (("--precision", "bf16"), 3e-2),
        (("--precision", "fp16"), 3e-3),
    ],
    ids=["fp32", "tf32", "bf16", "fp16"],
)
def test_losses_are_those_of_the_cpu(
    own: tuple[str, ...], allowed: float, flags: tuple[str, ...]
) -> None:
    """In fp32 there; without dropout, whose random numbers differ."""
    more = ("--dropout", "0", "--max-steps", "10")
    on_cpu = (*more, "--profile", "cpu", "--backend", "gloo", "--precision", "fp32")
    runs = [submit(*flags, *these) for these in ((*more, *own), on_cpu)]
    for done in runs:
        assert done.code == 0, done.err
    ours, theirs = (losses(done.run) for done in runs)
    assert len(ours) == 10
    assert ours == pytest.approx(theirs, rel=allowed)


def test_stopped_run_ends_as_if_it_had_not_been(
    undisturbed: Done, flags: tuple[str, ...]
) -> None:
    """SIGTERM while nccl is in use; dropout is on. Reductions on the device round differently from
    time to time: so losses may differ a little."""
    job = Following(*flags, "--precision", "bf16")
    job.at_step(20)
    assert slurmft("cancel", str(job.run.path)).code == 0
    job.end(90)
    saved = job.run.checkpoint_names()
    assert saved
    done = slurmft("resume", "--follow", str(job.run.path), timeout_s=240)
    assert done.code == 0, done.err
    assert len(records(job.run, "step")) == len(records(undisturbed.run, "step"))
    assert losses(job.run) == pytest.approx(losses(undisturbed.run), rel=2e-2)


def test_killed_rank_is_recovered(undisturbed: Done, flags: tuple[str, ...]) -> None:
    job = Following(*flags, "--precision", "bf16", "--checkpoint-every-steps", "10")
    job.at_step(30)
    os.kill(rank_pids(job.run)[0], signal.SIGKILL)
    code, text = job.end(240)
    assert code == 0, text
    assert losses(job.run) == pytest.approx(losses(undisturbed.run), rel=2e-2)


def failing(folder: Path, what: str, local: tuple[str, ...], *flags: str) -> Done:
    """A run of a task that does something in its fifth step."""
    name = f"failing_{folder.name}"
    (folder / f"{name}.py").write_text(TASK.replace("WHAT", what))
    # slurmft's own packages may be there.
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return slurmft(
        "submit", "--follow", *local, "--task", f"{name}:Failing", "--max-restarts", "0",
        *("--runs-dir", str(folder / "runs"), "--max-steps", "100", *flags), timeout_s=240,
        env={"PYTHONPATH": paths},
    )  # fmt: skip


def test_hung_kernel_is_found(tmp_path: Path, local: tuple[str, ...]) -> None:
    hangs = "torch.cuda._sleep(10**15)"
    done = failing(
        tmp_path, hangs, local, "--hang-timeout-s", "15", "--max-requeues", "0"
    )
    assert done.code != 0
    assert "hangs" in done.err + done.out


def test_device_memory_that_does_not_suffice(
    tmp_path: Path, local: tuple[str, ...]
) -> None:
    done = failing(
        tmp_path, "torch.empty(2**45, device=batch.targets['labels'].device)", local
    )
    assert done.code != 0
    assert "out of memory" in done.err + done.out
    assert "--batch-size" in done.err + done.out


def test_gradients_that_are_not_finite_are_no_checkpoint(
    tmp_path: Path, local: tuple[str, ...]
) -> None:
    """The loss is finite, its gradient is not."""
    bad = "return (output.logits * 0).abs().sqrt().sum(), len(batch.indices)"
    flags = (
        "--precision",
        "bf16",
        "--checkpoint-every-steps",
        "1",
        "--batch-size",
        "16",
    )
    done = failing(tmp_path, bad, local, *flags)
    assert done.code != 0
    assert "the gradients' norm is nan at step 5" in done.err
    assert all(int(name.split("-")[1]) < 5 for name in done.run.checkpoint_names())


def test_fp16_skips_a_step_that_overflows(
    tmp_path: Path, local: tuple[str, ...]
) -> None:
    grows = "return tuple(x * y for x, y in zip(super().loss(output, batch), (1e8, 1)))"
    done = failing(tmp_path, grows, local, "--precision", "fp16", "--batch-size", "16")
    assert done.code == 0, done.err
    assert done.result["skipped_steps"] >= 1
    assert done.result["steps"] == 100
    found = [r["loss"] for r in records(done.run, "step")]
    assert found[4] > 1e6 > max(found[5:])
    logs = [path.read_text() for path in done.run.logs.rglob("*") if path.is_file()]
    assert logs
    assert not any("lr_scheduler.step()" in text for text in logs)


def test_more_processes_than_devices(flags: tuple[str, ...]) -> None:
    count = torch.cuda.device_count() + 1
    at = flags.index("--nproc-per-node")
    done = submit(*flags[:at], "--nproc-per-node", str(count), *flags[at + 2 :])
    assert done.code != 0
    assert f"--nproc-per-node {count}" in done.err + done.out


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_losses_do_not_depend_on_the_number_of_devices(flags: tuple[str, ...]) -> None:
    at = flags.index("--nproc-per-node")
    more = ("--dropout", "0", "--precision", "fp32", "--max-steps", "10")
    one = submit(*flags, *more, "--gradient-accumulation-steps", "2")
    two = submit(*flags[:at], "--nproc-per-node", "2", *flags[at + 2 :], *more)
    assert losses(two.run) == pytest.approx(losses(one.run), rel=1e-4)
