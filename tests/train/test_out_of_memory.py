"""Memory that is too small: the run goes on with fewer samples at a time, and to the same losses.

The device of a training is made up: a task of the user's own raises torch's error for batches of
more rows. What the kernel refuses to an evaluation, and how it ends a process, is real.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slurmft.core.errors import SlurmftError
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.login import fitting_sizes
from slurmft.train.loop import batch_size_search, memory_limits, setup
from slurmft.train.loop.memory_limits import MemoryLimits
from slurmft.train.loop.out_of_memory import of_host_too
from slurmft.train.loop.step_plan import Plan
from tests.conftest import Done, records, slurmft
from tests.support.control_group import limited
from tests.support.models import write_reviews
from tests.support.small_memory import SMALL_MEMORY, write_model_without_dropout
from tests.train.test_own_task import EXAMPLE

pytestmark = pytest.mark.processes


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the task `small_PID:Small`, its data, and a model without dropout."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / f"small_{os.getpid()}.py").write_text(EXAMPLE + SMALL_MEMORY)
    write_reviews(folder / "data", train=96, validation=21)
    write_model_without_dropout(folder / "model")
    monkeypatch.chdir(folder)
    return folder


def train(*flags: str, enter: Sequence[str] = ()) -> Done:
    sizes = ("--nodes", "2", "--batch-size", "8", "--eval-batch-size", "8")
    return slurmft(
        *("submit", "--cluster", "local", "--follow", "--runs-dir", "runs", *sizes),
        *("--task", f"small_{os.getpid()}:Small", "--data", "data", "--model", "model"),
        *("--precision", "fp32", "--epochs", "2", "--log-every", "1"),
        *("--checkpoint-every-steps", "2", "--learning-rate", "1e-3", *flags),
        env={"PYTHONPATH": os.getcwd()},
        enter=enter,
    )


def losses(done: Done) -> list[float]:
    last = {record["step"]: record["loss"] for record in records(done.run, "step")}
    return [last[step] for step in sorted(last)]


def warnings(done: Done) -> list[str]:
    return [record["text"] for record in records(done.run, "warning")]


def options(**values: int) -> list[str]:
    return [f"--task-option={name}={value}" for name, value in values.items()]


def test_training_goes_on_with_fewer_samples(project: Path) -> None:
    """Twice, by half; the ranks start again within the job."""
    expected = train()
    assert expected.code == 0, expected.err
    done = train(*options(train_rows=3, after=3))
    assert done.code == 0, done.err
    assert losses(done) == pytest.approx(losses(expected), rel=1e-5)
    assert done.result["metrics"] == pytest.approx(expected.result["metrics"], rel=1e-4)
    assert done.run.attempt_number() == 1
    assert MemoryLimits.read(done.run).train_samples == 2
    assert warnings(done)[-1] == (
        "memory was too small for --batch-size 8: 2 samples at a time and 4 micro-steps make the "
        "same global batch of 16"
    )
    assert not warnings(expected)
    # The next submission is told.
    (note,) = fitting_sizes.notes(done.run.load_config())
    assert note.endswith("held 2 samples at a time of --batch-size 8")


@pytest.mark.extra("training")
def test_evaluation_goes_on_with_fewer_samples(project: Path) -> None:
    """At once, on each rank by itself; no rank starts again."""
    expected = train("--max-steps", "2")
    done = train("--max-steps", "2", *options(evaluate_rows=3))
    assert done.code == 0, done.err
    assert done.result["metrics"] == pytest.approx(expected.result["metrics"], rel=1e-5)
    assert not done.run.all_failures()
    assert MemoryLimits.read(done.run).evaluate_samples == 2
    assert warnings(done) == [
        "memory was too small for an evaluation of 8 samples at a time: it goes on with "
        f"{samples}"
        for samples in (4, 2)
    ]


@pytest.mark.extra("training")
def test_the_final_save_is_tried_by_new_processes(project: Path) -> None:
    """No batch is at fault: none is made smaller."""
    done = train("--max-steps", "2", *options(saves=1))
    assert done.code == 0, done.err
    (failure,) = (each for each in done.run.all_failures() if not each.secondary)
    assert failure.message == "CUDA out of memory, while the model was saved"
    assert MemoryLimits.read(done.run) == MemoryLimits()
    assert done.run.attempt_number() == 1


def test_error_of_the_host() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"for 4194304\.0 GiB more"),
        of_host_too(),
    ):
        torch.empty(2**50)
    with pytest.raises(torch.OutOfMemoryError, match="limit on it"), of_host_too():
        raise MemoryError
    with pytest.raises(RuntimeError, match="another"), of_host_too():
        raise RuntimeError("another")


@pytest.mark.extra("training")
def test_one_sample_that_does_not_fit(project: Path) -> None:
    """It ends the run, and says what needs less memory."""
    # The first batch is on the CPU: it shows which weights the loss uses.
    done = train("--batch-size", "2", *options(train_rows=0, after=1))
    assert done.code == 1
    assert "CUDA out of memory in step 1, on a batch of 1 sample and" in done.err
    assert "hint: use --activation-checkpointing, or --shard full" in done.err


@pytest.mark.extra("faults")
def test_kernel_that_ends_a_rank(project: Path) -> None:
    """The next start of the ranks takes half, as if they had been asked."""
    flags = ("--nodes", "1", "--nproc-per-node", "1", "--max-steps", "4")
    expected = train(*flags)
    with limited(5 * 2**30) as enter:
        # Eight rows take 8 GiB, and four take 4, beside the programs: two fit for sure.
        done = train(*flags, *options(row_mib=1024), enter=enter)
    assert done.code == 0, done.err
    assert losses(done) == pytest.approx(losses(expected), rel=1e-5)
    assert MemoryLimits.read(done.run).train_samples in (1, 2, 4)
    assert any("too small for --batch-size 8" in text for text in warnings(done))


@pytest.mark.extra("training")
def test_evaluation_of_shares(project: Path) -> None:
    """No rank can go another way alone: all start again, with half."""
    flags = ("--shard", "full", "--max-steps", "2")
    expected = train(*flags)
    done = train(*flags, *options(evaluate_rows=5))
    assert done.code == 0, done.err
    assert done.result["metrics"] == pytest.approx(expected.result["metrics"], rel=1e-5)
    assert MemoryLimits.read(done.run).evaluate_samples == 4
    assert done.run.attempt_number() == 1
    assert any("too small for --eval-batch-size 8" in text for text in warnings(done))


# --- --batch-size auto ----------------------------------------------------------------------------

AUTO = ("--batch-size", "auto", "--global-batch-size", "16", "--dropout", "0.1")


def check_same(done: Done, expected: Done) -> None:
    """To the last bit: losses, weights and metrics."""
    assert done.code == expected.code == 0, done.err
    assert losses(done) == losses(expected)
    files = [run.model / "model.safetensors" for run in (done.run, expected.run)]
    first, second = [file.read_bytes() for file in files]
    assert first == second
    assert done.result["metrics"] == expected.result["metrics"]


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--shard", "full"), marks=pytest.mark.extra("training")),
    ],
    ids=["ddp", "shard"],
)
def test_size_that_is_tried_out_leaves_no_trace(
    project: Path, flags: tuple[str, ...]
) -> None:
    """Of eight samples memory holds three: two are taken."""
    small = options(train_rows=3, after=1)
    done = train(*flags, *AUTO, "--max-steps", "4", *small)
    sizes = ("--batch-size", "2", "--global-batch-size", "16", "--dropout", "0.1")
    expected = train(*flags, *sizes, "--max-steps", "4")
    check_same(done, expected)
    assert done.result["batch_size"] == 2
    assert "global batch 16 (--batch-size auto: 2 at a time)" in done.out
    assert MemoryLimits.read(done.run).train_samples == 2
    # Of shares no rank goes on alone: all have started again.
    assert bool(done.run.all_failures()) == bool(flags)
    assert not warnings(done)


@pytest.mark.extra("training")
def test_global_batch_of_auto_is_that_of_the_recipe(project: Path) -> None:
    flags = (*AUTO[:2], "--nodes", "1", "--batching", "dynamic")
    done = train(*flags, "--max-steps", "2", *options(train_rows=5, after=1))
    assert done.code == 0, done.err
    assert done.result["batch_size"] == 4
    assert done.result["global_batch_size"] == 32


@pytest.mark.extra("training")
def test_auto_where_one_sample_does_not_fit(project: Path) -> None:
    done = train(*AUTO, *options(train_rows=0, after=1))
    assert done.code == 1
    assert "memory does not hold one sample, the longest, of " in done.err
    assert "hint: use shorter samples (--max-length " in done.err
    cures = (
        "or --lora 16, or --precision bf16, or --activation-checkpointing, or --shard"
    )
    assert cures in done.err
    assert done.run.attempt_number() == 1


LIMITED_SPACE = ["sh", "-c", 'ulimit -v 12582912 && exec "$@"', "sh"]


@pytest.mark.extra("faults")
@pytest.mark.parametrize("how", ["group", "space"])
def test_auto_ends_below_the_limit_of_a_host(project: Path, how: str) -> None:
    """Nothing is killed, and no allocation fails."""
    one_rank = ("--nodes", "1", "--nproc-per-node", "1")
    # The size of an evaluation is not tried out.
    flags = (*AUTO, *one_rank, "--max-steps", "2", "--eval-batch-size", "1")
    row = options(row_mib=768)
    if how == "space":
        done = train(*flags, *row, enter=LIMITED_SPACE)
    else:
        with limited(6 * 2**30) as enter:
            done = train(*flags, *row, enter=enter)
    assert done.code == 0, done.err
    assert done.result["batch_size"] in (2, 4)
    assert len(records(done.run, "start")) == 1


class Device:
    """A device of a made-up memory, on one rank of several."""

    def __init__(self, run: RunDir, holds: int, others_hold: int, most: int) -> None:
        self.holds = holds
        self.others_hold = others_hold
        self.tried: list[int] = []
        self.new_moments_bytes = 0
        self.computes_together = False
        lengths = np.array([5, 9, 7] * most)
        self.setup = SimpleNamespace(
            world=self,
            job=SimpleNamespace(alive=lambda _: None, config=None),
            plan=SimpleNamespace(step_samples=2 * most),
            data=SimpleNamespace(train=None, row_lengths=lambda _: lengths),
            config=SimpleNamespace(
                usual_batch_size=8, lora=8, activation_checkpointing=True, shard="full"
            ),
            precision="bf16",
            run_dir=run,
        )
        self.size = 2
        self.device = torch.device("meta")

    def on_main(self, work: Any) -> Any:
        return work()

    def all_values(self, value: float) -> list[float]:
        return [value, float(self.tried[-1] <= self.others_hold)]

    def try_out(self, rows: np.ndarray) -> None:
        self.tried.append(len(rows))
        if len(rows) > self.holds:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("holds", "others_hold", "remembered", "tried", "found"),
    [
        (99, 99, None, [1, 1, 8, 16, 30], 30),
        (99, 20, None, [1, 1, 8, 16, 30], 16),
        (3, 99, None, [1, 1, 8, 4, 2], 2),
        (1, 99, None, [1, 1, 8, 4, 2], 1),
        (99, 99, 64, [1, 1, 30], 30),
        (99, 12, 12, [1, 1, 12, 24], 12),
    ],
)
def test_sizes_that_a_device_is_tried_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holds: int,
    others_hold: int,
    remembered: int | None,
    tried: list[int],
    found: int,
) -> None:
    """From the size that an earlier run had, or the recipe's; all ranks take the same."""
    monkeypatch.setattr(fitting_sizes, "remembered", lambda _: remembered)
    emptied = SimpleNamespace(empty_cache=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda _: emptied)
    device = Device(RunDir(tmp_path), holds, others_hold, most=30)
    search = batch_size_search._Search(device.setup, device)  # type: ignore[arg-type]
    assert search._rows[:30].tolist() == list(range(1, 90, 3))  # the longest
    assert search.largest() == found
    assert device.tried == tried


def test_ranks_that_compute_together_start_again_with_what_has_fitted(
    tmp_path: Path,
) -> None:
    """They double from one: whichever fails, the last that has fitted is near. Where one sample
    fails they do not wait for each other."""
    run = RunDir(tmp_path)
    device = Device(run, holds=11, others_hold=99, most=30)
    device.computes_together = True
    search = batch_size_search._Search(device.setup, device)  # type: ignore[arg-type]
    with pytest.raises(SlurmftError, match="does not hold 16 samples") as caught:
        search.largest()
    assert caught.value.retry
    assert device.tried == [1, 1, 2, 4, 8, 16]
    assert memory_limits.MemoryLimits.read(run).train_samples == 8
    device.holds = 0
    search = batch_size_search._Search(device.setup, device)  # type: ignore[arg-type]
    with pytest.raises(SlurmftError, match="memory does not hold one sample"):
        search.largest()


@pytest.mark.parametrize(
    ("limits", "train_samples", "evaluate_samples"),
    [
        ({}, None, None),
        ({"tried_samples": 8}, 4, None),
        ({"train_samples": 6}, 16, 32),
    ],
)
def test_memory_that_runs_out_while_sizes_are_tried(
    limits: dict[str, int], train_samples: int | None, evaluate_samples: int | None
) -> None:
    """What was tried is halved; before that, nothing is known, and the search begins again."""
    config = SimpleNamespace(eval_batch_size=64)
    plan = SimpleNamespace(is_auto=True, largest_part=32, config=config)
    fewer = setup._halved(memory_limits.MemoryLimits(**limits), plan)  # type: ignore[arg-type]
    assert fewer.train_samples == train_samples
    assert fewer.evaluate_samples == evaluate_samples


@pytest.mark.parametrize("peak", ["VmHWM:\t  900000 kB\n", ""])
def test_a_host_that_does_not_say_what_a_process_took(
    peak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sandboxes leave out the peak: no size beyond the first is taken for free."""
    status = tmp_path / "status"
    status.write_text(f"VmSize:\t 1000 kB\nVmRSS:\t  800000 kB\n{peak}")
    monkeypatch.setattr(batch_size_search, "_STATUS", status)
    memory = batch_size_search._HostMemory(0)
    assert memory.may_hold(1)
    memory.note(1)
    assert memory.may_hold(2) is bool(peak)


def test_auto_refuses_batch_norms() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    plan = SimpleNamespace(is_auto=True)
    with pytest.raises(SlurmftError, match="--batch-size auto cannot be used with"):
        memory_limits.check_batch_norms(plan, model)  # type: ignore[arg-type]


def test_batch_norms_need_the_batches_of_all_nodes() -> None:
    """Three of four nodes make up a step of 32 by 6 batches rather than 4; two, by 4 as well."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    config = TrainConfig.resolve(batch_size=8)
    sizes = {"precision": "fp32", "train_samples": 64, "validation_samples": 4}
    plan = Plan(config=config, world_size=2, absent_ranks=2, **sizes)  # type: ignore[arg-type]
    memory_limits.check_batch_norms(plan, model)
    plan = replace(plan, world_size=3, absent_ranks=1)
    memory_limits.check_batch_norms(plan, torch.nn.Linear(2, 2))
    with pytest.raises(SlurmftError, match="6 batches rather than 4 make up"):
        memory_limits.check_batch_norms(plan, model)
    plan = replace(plan, world_size=1, resumed_batch_size=32, resumed_parts=2)
    with pytest.raises(SlurmftError, match="4 batches rather than 2 make up"):
        memory_limits.check_batch_norms(plan, model)
