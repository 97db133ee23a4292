"""Steps of a training as a GPU would see them, without one; what `test_device.py` runs.

The device is torch's "meta", which has no numbers: whatever would wait for a GPU's is an error
there, or is seen by `Device`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from slurmft.core.errors import SlurmftError
from slurmft.train.loop import learner, timers, trainer
from slurmft.train.loop.checkpoint import Saver
from slurmft.train.loop.memory_limits import MemoryLimits
from slurmft.train.loop.out_of_memory import answered
from slurmft.train.loop.position import Position
from slurmft.train.loop.setup import Setup
from slurmft.train.loop.timers import CpuEvent
from slurmft.train.parallel.optim import make_optimizer
from tests.support import CHECKOUT
from tests.support.models import write_emotion, write_model

sys.path.append(str(CHECKOUT / "results/benchmarks"))
from harness import Steps, make_run

META = torch.device("meta")


class Device(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Notes what a GPU does of what it is told."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.waits: list[str] = []
        """Calls that return when the device has done all that it was given."""
        self.sent = 0
        """Copies to it."""
        self.received = 0
        """Copies from it for which nobody waits."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        is_here = bool(tensors) and tensors[0].device == META
        if (
            name in ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")
            and is_here
        ):
            self.waits.append(name)
            return 1 if name != "nonzero" else func(*args, **kwargs)
        if name == "copy_" and tensors[1].device == META and not is_here:
            self.received += 1
            if not (args[2:] or [kwargs.get("non_blocking")])[0]:
                self.waits.append("copy from the device")
            return args[0].zero_()
        if name == "_to_copy" and kwargs.get("device") is not None:
            if is_here and kwargs["device"] != META:
                self.waits.append("copy from the device")
                return torch.zeros(
                    args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype
                )
            if not is_here and kwargs["device"] == META:
                self.sent += 1
                if not kwargs.get("non_blocking"):
                    self.waits.append("copy to the device")
        return func(*args, **kwargs)


class Event(CpuEvent):
    """Of a device, which may still be at work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def record(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return False


def without_pinning(make: Any) -> Any:
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


@contextlib.contextmanager
def gpu() -> Iterator[Device]:
    """What torch cannot do here for want of a driver."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "zeros"):
            patch.setattr(torch, name, without_pinning(getattr(torch, name)))
        adam = sys.modules["torch.optim.adam"]
        patch.setattr(adam, "_device_dtype_check_for_fused", lambda *_, **__: None)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch, "is_autocast_enabled", lambda *_: False)
        module = SimpleNamespace(
            is_available=lambda: False,
            Event=Event,
            synchronize=lambda: None,
            max_memory_allocated=lambda device: 0,
        )
        patch.setattr(torch, "get_device_module", lambda device: module)
        patch.setattr(dist, "all_reduce", lambda tensor, *_, **__: None)
        yield Device()


def new_run(folder: Path, **train: Any) -> Path:
    if not (folder / "data").exists():
        write_emotion(folder / "data", train=203, validation=67)
        write_model(folder / "model")
    options: dict[str, Any] = {
        "task": "emotion",
        "data": str(folder / "data"),
        "model": str(folder / "model"),
    }
    options |= {"batch_size": 32, "max_steps": 60, "precision": "fp32"}
    return make_run(folder / "runs", **options | train)


def make(folder: Path, **train: Any) -> Steps:
    return Steps(new_run(folder, **train))


def to_meta(steps: Steps) -> None:
    """Moves a training that has just been built."""
    steps.world = dataclasses.replace(steps.world, device=META)
    steps.setup = dataclasses.replace(steps.setup, world=steps.world)

    def make_on_meta(model: Any, plan: Any, **how: Any) -> Any:
        return make_optimizer(model.to(META), plan, **how)

    def accelerator(_: Any) -> Any:
        here = Accelerator(cpu=True)
        here.state.device = META
        return here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "make_optimizer", make_on_meta)
        patch.setattr(learner, "make_accelerator", accelerator)
        steps.trainer = trainer.Trainer.build(steps.setup)
    steps.learner = steps.trainer.learner
    steps.learner.model.train()
    steps.learner._has_checked_count = True


def report(steps: Steps, number: int, samples: Any) -> Any:
    """Makes a step, and has it noted."""
    batches = steps.learner.micro_batches(samples)
    step = steps.learner.step(samples, batches)
    steps.trainer.reporter.step(number, step, len(samples), batches)
    return step


def check_no_waits(folder: Path) -> None:
    """Of 28 steps and their records, with clipping and the check of norms; one copy a batch."""
    for batching in ("packed", "dynamic"):
        with gpu() as device:
            steps = make(folder, batching=batching, dropout=0.1)
            to_meta(steps)
            reporter = steps.trainer.reporter
            reporter.begin_window()
            with device:
                for number in range(1, 29):
                    assert report(steps, number, steps.samples()).norm.device == META
            assert len(reporter._full) == 1  # of two windows, one is read
            assert device.received == 2
            if batching == "packed":
                assert device.waits == []
            else:
                assert device.sent == 28 + 2  # and of a window what a rank knows
                # transformers looks whether there is padding.
                assert device.waits in ([], 28 * ["_local_scalar_dense"])


def check_evaluation_waits_once(folder: Path) -> None:
    with gpu() as device:
        steps = make(folder, eval_batch_size=8)
        to_meta(steps)
        evaluator = steps.trainer.evaluator
        samples = torch.arange(67).numpy()
        with device:
            evaluator.predict_part(steps.setup.data, samples, 67, lambda: None)
        assert device.waits == ["copy from the device"]


def check_packages_are_not_looked_for(folder: Path) -> None:
    steps = make(folder)
    steps.step()
    looked_for: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", looked_for.append)
        for _ in range(3):
            steps.step()
    assert looked_for == []


def check_overflow(folder: Path) -> None:
    """fp16: a step that overflows moves nothing; nobody waits for the device to say so."""
    for norm in (0.0, 1.0):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps = make(folder, max_grad_norm=norm, learning_rate=0.1, warmup_steps=0)
            training = steps.learner
            training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            training._has_checked_count = True  # of the first batch alone
            weight = training.loaded.model.classifier.weight
            factors = iter([torch.inf, 1.0, torch.nan, 1.0, 1.0])
            weight.register_hook(lambda gradient, by=factors: gradient * next(by))
            rates, moved, scales = [], [], []
            for _ in range(5):
                before = weight.detach().clone()
                samples = steps.samples()
                with Scalars() as read:  # type: ignore[no-untyped-call]
                    step = steps.whole_step(samples)
                assert read.count == 0
                assert step.norm is None  # to overflow is no error
                rates.append(step.learning_rate)
                moved.append(not torch.equal(weight, before))
                scales.append(training.scaler.get_scale())
        assert moved == [False, True, False, True, True]
        assert scales == [512.0, 512.0, 256.0, 256.0, 256.0]
        total = steps.setup.plan.total_steps
        assert rates == pytest.approx(
            [0.1 * (total - step) / total for step in range(5)]
        )
        assert training.skipped_steps == 2


class Scalars(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Counts what reads a floating-point number, as a scaler's is."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        reads = func is torch.ops.aten._local_scalar_dense.default
        self.count += reads and args[0].is_floating_point()
        return func(*args, **kwargs or {})


def check_gradients_that_are_not_finite(folder: Path) -> None:
    """They reach no checkpoint, though the loss was finite."""
    cases = (
        (1.0, "the gradients' norm is nan at step 2"),
        (0.0, "weights are not finite after"),
    )
    for norm, message in cases:
        steps = make(folder, max_grad_norm=norm)
        checkpointing = steps.trainer.checkpointing
        steps.trainer.reporter.begin_window()
        weight = steps.learner.loaded.model.classifier.weight
        factors = iter([1.0, torch.nan])
        weight.register_hook(lambda gradient, by=factors: gradient * next(by))
        for number in (1, 2):
            assert report(steps, number, steps.samples()).loss.isfinite()
            steps.trainer.position.step = number
        with pytest.raises(SlurmftError, match=message) as error:
            checkpointing.save()
        assert "lower --learning-rate" in (error.value.hint or "")
        checkpointing.wait()
        assert not list(steps.setup.run_dir.checkpoints.glob("step-*"))


def check_windows_are_read_late(folder: Path) -> None:
    """Steps are recorded a window later, and all of them before a checkpoint."""
    steps = make(folder, log_every=2)
    recorded: list[int] = []
    steps.setup.job.record = lambda event, *rows, **_: recorded.extend(  # type: ignore[method-assign]
        row["step"] for row in rows if event == "step"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timers.CpuEvent, "query", lambda event: False)
        steps.trainer.reporter.begin_window()
        for number in range(1, 8):
            report(steps, number, steps.samples())
            assert recorded == list(range(1, 2 * (number // 2) - 1))
        steps.trainer.checkpointing.save()
    assert recorded == list(range(1, 8))


def check_memory(folder: Path) -> None:
    """A device that is full: what for, and what the next start does; but for batch norms."""
    steps = make(folder, batch_size=32)

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB."
        )

    steps.setup.task.loss = fails  # type: ignore[assignment, method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "prepare", lambda *_: steps.setup)
        with pytest.raises(SlurmftError) as error:
            trainer.run(steps.setup.job)
    samples = next(trainer.global_batches(steps.setup, 0))
    batch = steps.learner.micro_batches(samples)[0].batch
    assert error.value.message.startswith(
        f"CUDA out of memory in step 1, on a batch of 32 samples and {batch.tokens} tokens, with "
    )
    assert error.value.message.endswith(" GiB used. Tried to allocate 2.00 GiB")
    assert error.value.hint == (
        "the ranks start again with 16 samples at a time: nothing to do"
    )
    assert error.value.retry
    assert MemoryLimits.read(steps.setup.run_dir) == MemoryLimits(train_samples=16)
    steps.learner.loaded.model.norm = torch.nn.BatchNorm1d(2)
    refused = answered(
        torch.OutOfMemoryError("CUDA out of memory."),
        steps.setup,
        steps.learner.loaded,
        Position(),
        evaluated_samples=1,
    )
    assert not refused.retry
    assert refused.hint == (
        "use --batch-size 16 --gradient-accumulation-steps 2 (the model's batch norms see other "
        "batches then), or --activation-checkpointing, or --shard full on several GPUs"
    )


def check_slow_save(run: Path) -> None:
    """All ranks wait for a slow write where that may take long: not within the next step."""
    steps = Steps(run)
    checkpointing = steps.trainer.checkpointing
    write = Saver._write

    def slowly(*args: Any) -> None:
        time.sleep(2)
        write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "_write", slowly)
        steps.step()
        checkpointing.save()
        steps.world.share_object(None)  # both ranks begin together
        steps.step()
        began = time.monotonic()
        checkpointing.save()
        assert time.monotonic() - began > 0.7, "the next step would wait in nccl"
        checkpointing.wait()


if __name__ == "__main__":
    place, *names = sys.argv[1:]
    for name in names:
        globals()[name](Path(place))
    print("done\n", end="", flush=True)
    os._exit(0)
