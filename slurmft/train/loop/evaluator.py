"""Evaluations: every sample of a split is predicted once, on one rank; the main one computes.

What is predicted of a batch is the head's: a task's, whose predictions have metrics, or that of
`slurmft predict`, whose predictions are rows of a file.
"""

import base64
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from slurmft.job.process_group import World
from slurmft.train.data.stream import prepared
from slurmft.train.data.tables import Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.engine.evaluating import evaluating
from slurmft.train.loop import memory_limits
from slurmft.train.loop.incomputable import in_precision
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.memory_limits import MemoryLimits
from slurmft.train.loop.named_metrics import NamedMetrics
from slurmft.train.loop.out_of_memory import of_host_too
from slurmft.train.loop.setup import Setup
from slurmft.train.loop.state import State, Tensors
from slurmft.train.loop.timers import PhaseClock
from slurmft.train.metric_spec import LOSS
from slurmft.train.tasks import Evaluated
from slurmft.train.tasks.metrics import SCORES

_RECORD_EVERY_S = 1.0

Boundary = Callable[[], None]
"""Called between two batches, where all ranks can stop, or save."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions of a part of a split."""

    samples: np.ndarray
    """int64, (n,): indices into the split, without repetition."""
    values: Any
    """int64 or float64, (n, ...): an array; or a tensor, where nobody has waited for the device."""

    @classmethod
    def union(cls, parts: Sequence["Predicted"]) -> "Predicted":
        """Returns all parts, sorted by sample; what several have is taken once."""
        # Empty parts of a resumed training know neither type nor shape of what is to come.
        filled = [part for part in parts if len(part.samples)]
        if not filled:
            nothing = np.empty(0, dtype=np.int64)
            return cls(nothing, nothing)
        samples = np.concatenate([part.samples for part in filled])
        arrays = [torch.as_tensor(part.values).cpu().numpy() for part in filled]
        values = np.concatenate(arrays)
        # It sorts, and says of each sample where it comes first.
        samples, first = np.unique(samples, return_index=True)
        return cls(samples, values[first])

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> "Predicted":
        return cls(tensors["samples"].numpy(), tensors["values"].numpy())

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> "Predicted":
        """Returns the part that `as_json` has described."""
        arrays = []
        for dtype, shape, text in (facts["samples"], facts["values"]):
            numbers = np.frombuffer(base64.b64decode(text), dtype=dtype)
            arrays.append(numbers.reshape(shape))
        return cls(*arrays)

    def as_json(self) -> dict[str, Any]:
        """Returns both arrays as JSON can hold them: type, shape, and bytes as text."""
        facts = {}
        for name, tensor in self.tensors().items():
            array = tensor.cpu().numpy()
            text = base64.b64encode(array.tobytes()).decode()
            facts[name] = [array.dtype.str, list(array.shape), text]
        return facts

    def tensors(self) -> Tensors:
        samples = torch.from_numpy(self.samples)
        values = torch.as_tensor(self.values)
        return {"samples": samples, "values": values}


class Head(Protocol):
    """The part of an evaluation that depends on what is predicted: a task is one."""

    prediction_shape: tuple[int, ...]
    """The shape of one prediction: () where it is one value."""
    prediction_dtype: Any

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        """Returns what the model takes, from what the table has for it."""

    def evaluate(self, model: Any, batch: Batch, data: TokenData) -> Evaluated:
        """Returns the predictions of a batch, on the device, and its loss, if it has one."""


@dataclass(slots=True)
class LossSum:
    """The loss of the evaluation under way: sums over this rank's batches.

    They stay on the device until `numbers` asks for them.
    """

    total: Any = 0.0
    terms: Any = 0.0

    def add(self, evaluated: Evaluated) -> None:
        """Adds the loss of a batch."""
        total = evaluated.loss
        # In double, as the terms of a whole split are summed.
        if isinstance(total, torch.Tensor):
            total = total.detach().double()
        self.total = self.total + total
        self.terms = self.terms + evaluated.terms

    def numbers(self) -> list[float]:
        """Returns both sums, for which it waits."""
        return [float(self.total), float(self.terms)]


class Evaluator:
    """Predicts the samples of a split, divided among all ranks. All ranks make the same calls."""

    def __init__(
        self,
        setup: Setup,
        loaded: LoadedModel,
        head: Head,
        clock: PhaseClock,
        evaluates_together: bool = False,
        note_progress: Callable[[int, int], None] | None = None,
        named_metrics: NamedMetrics | None = None,
    ) -> None:
        """
        Args:
            evaluates_together: a rank without samples computes, too (see `Strategy`).
            note_progress: called with the number of samples that this rank has predicted, and with
                that of all it has to; None: the run's records get them.
            named_metrics: the metrics of --metric.
        """
        self._setup = setup
        self._world = setup.world
        self._loaded = loaded
        self._head = head
        self._clock = clock
        self._evaluates_together = evaluates_together
        self._note_progress = note_progress or self._record_progress
        self._named_metrics = named_metrics
        self.most_samples = setup.eval_batch_size
        """The most samples that this rank predicts at a time: memory may hold fewer."""
        self._recorded_at = 0.0
        self._predicted: list[Predicted] = []
        """Of the evaluation under way: from before a resume, then of every batch of this rank."""
        self._loss = LossSum()
        """Of the same samples; what is from before a resume is the main rank's."""

    def state(self) -> State:
        own_part = Predicted.union(self._predicted)
        # After a resume every rank has what was predicted before: the union takes it once.
        parts = self._world.gather_objects(own_part.as_json())
        whole = Predicted.union([Predicted.from_json(part) for part in parts])
        values = {
            "samples": len(whole.samples),
            "loss": self._world.sum(self._loss.numbers()),
        }
        return State(values, {"predicted": whole.tensors()})

    def load(self, state: State) -> None:
        self._predicted = [Predicted.from_tensors(state.tensors["predicted"])]
        self._loss = LossSum()
        if self._world.is_main:
            self._loss = LossSum(*state.values["loss"])

    @property
    def done(self) -> int:
        """Samples that this rank knows to be predicted in the evaluation under way."""
        return sum(len(part.samples) for part in self._predicted)

    def measure(
        self,
        data: TokenData,
        boundary: Boundary,
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Returns the metrics of a split with its loss, equal on every rank, and its classes (see
        `Task.by_class`).

        The loss is the mean over all terms of the split, as that of a training step is.
        """
        task = self._setup.task
        if self._world.is_main:
            preload(task.metric_names)
        values = self.predictions(data, boundary)
        loss, terms = self._world.sum(self._loss.numbers())
        # The next evaluation begins with nothing.
        self._loss = LossSum()

        # One rank computes, and all get the values, or the error: so all decide alike.
        def compute() -> tuple[dict[str, float], dict[str, Any]]:
            assert values is not None  # on the main rank, which alone computes
            self._clock.enter("metric")
            # First: it raises an error for NaN, of which metrics would make classes and texts.
            metrics = task.compute(values, data)
            if self._named_metrics:
                metrics = self._named_metrics.compute(values, data) | metrics
            split_loss = task.split_loss(
                values, data, self._setup.plan.global_batch_size
            )
            if terms:
                split_loss = loss / terms
            # A task of the user's own may compute one itself.
            if split_loss is not None:
                metrics.setdefault(LOSS, split_loss)
            if self._named_metrics:
                metrics = self._named_metrics.in_order(metrics)
            by_class = task.by_class(values, data)
            self._clock.enter("broadcast")
            return metrics, by_class

        self._clock.enter("broadcast")
        metrics, by_class = self._world.on_main(compute)
        self._clock.enter(None)
        return metrics, by_class

    def end(self) -> None:
        """Ends what evaluations have started."""
        if self._named_metrics:
            self._named_metrics.end()

    def predictions(self, data: TokenData, boundary: Boundary) -> np.ndarray | None:
        """Returns the predictions of a split, in its order, on the main rank; None elsewhere. A
        resumed run goes on with the samples that are left.

        Raises:
            Stopped: at a boundary.
        """
        self._clock.enter("evaluate")
        # each evaluation begins with a record, however short it is
        self._recorded_at = 0.0
        before = Predicted.union(self._predicted)
        samples = np.arange(len(data.validation))
        left = np.setdiff1d(samples, before.samples)
        # The same on every rank, whatever the number of ranks was before a resume.
        parts = np.array_split(left, self._world.size)
        sizes = [len(part) for part in parts]
        part = self.predict_part(data, parts[self._world.rank], max(sizes), boundary)
        gathered = gather(self._world, part, sizes)
        self._clock.enter(None)
        # The next evaluation begins with nothing.
        self._predicted = []
        if gathered is None:
            return None
        after = Predicted(left, gathered)
        whole = Predicted.union([before, after])
        return np.asarray(whole.values)

    def predict_part(
        self,
        data: TokenData,
        part: np.ndarray,
        most: int,
        boundary: Boundary,
    ) -> np.ndarray:
        """Returns the predictions of this rank's samples, in their order. They are made in the
        order of their lengths: similar lengths need little padding.

        Every sample is predicted once, on one rank, however the split divides: there is nothing to
        trim, as there is after gather_for_metrics on padded batches.

        Args:
            part: its samples.
            most: how many the rank with the most has.
        """
        table = data.validation
        job = self._setup.job
        lengths = table.lengths(part)
        # Stable: the same order in every attempt.
        by_length = np.argsort(lengths, kind="stable")
        predictions: list[torch.Tensor] = []
        done = 0
        # Steps of another kind follow, which may take longer than those of a training.
        job.alive("evaluate")
        job.begin_phase()

        with evaluating(self._loaded.model):
            for indices, batch in self._batches(table, part[by_length], most):
                job.begin_step()
                for samples, evaluated in self._evaluated(data, indices, batch):
                    predictions.append(evaluated.predictions)
                    self._predicted.append(Predicted(samples, evaluated.predictions))
                    self._loss.add(evaluated)
                done += len(indices)
                self._note_progress(done, len(part))
                job.alive("evaluate")
                boundary()
        places = np.argsort(by_length)  # the inverse of that permutation
        return self._joined(predictions)[places]

    def _batches(
        self,
        table: TokenTable,
        part: np.ndarray,
        most: int,
    ) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yields the samples of a part in their order, some at a time, and their batch.

        There are as many batches on every rank as the one with the most samples has, so that all
        meet at each boundary; the last ones may be empty.
        """
        # Where memory holds fewer on this rank, the others still meet it as often.
        size = self._setup.eval_batch_size
        batches = (part[start : start + size] for start in range(0, most, size))
        make = partial(self._batch, table)
        yield from prepared(batches, make, self._world.device)

    def _batch(self, table: TokenTable, samples: np.ndarray) -> Batch:
        if not len(samples):
            # any sample: its prediction is not kept
            samples = np.zeros(1, np.int64)
        padded = self._loaded.batch(table, samples)
        return self._head.batch(padded, table)

    def _evaluated(
        self, data: TokenData, samples: np.ndarray, batch: Batch
    ) -> Iterator[tuple[np.ndarray, Evaluated]]:
        """Yields the samples of a batch with their evaluation; in parts, where memory is too small
        for all of them.

        Raises:
            torch.OutOfMemoryError: it is too small for one; or all ranks compute together, so that
                none of them can go another way alone.
        """
        if self._evaluates_together:
            evaluated = self._evaluate(data, batch)
            if len(samples):
                yield samples, evaluated
            return
        waiting = [(samples, batch)] if len(samples) else []
        while waiting:
            part, batch = waiting.pop(0)
            if len(part) <= self.most_samples:
                try:
                    with of_host_too():
                        evaluated = self._evaluate(data, batch)
                except torch.OutOfMemoryError:
                    if len(part) == 1:
                        self.most_samples = 1
                        raise
                    self._note_limit(len(part) // 2)
                else:
                    yield part, evaluated
                    continue
            pieces = np.array_split(part, math.ceil(len(part) / self.most_samples))
            table = data.validation
            waiting = [*((each, self._batch(table, each)) for each in pieces), *waiting]

    def _note_limit(self, samples: int) -> None:
        """Notes that memory holds fewer samples at a time, and gives back what it held."""
        self.most_samples = samples
        limits = MemoryLimits(evaluate_samples=samples)
        memory_limits.note(self._setup.run_dir, limits)
        self._setup.job.warn(
            f"memory was too small for an evaluation of {self._setup.eval_batch_size} samples at a "
            f"time: it goes on with {samples}"
        )
        device = self._world.device
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()

    def _joined(self, predictions: list[torch.Tensor]) -> np.ndarray:
        """Returns the predictions of all batches, one after another."""
        # A rank without samples has the type and the shape, too: the ranks gather.
        shape = (0, *self._head.prediction_shape)
        arrays = [np.empty(shape, self._head.prediction_dtype)]
        if predictions:
            # one copy, and one wait, for all batches
            on_device = torch.cat(predictions)
            arrays.append(on_device.cpu().numpy())
        return np.concatenate(arrays)

    # not inference_mode: weights that are gathered then could not train
    @torch.no_grad()
    def _evaluate(self, data: TokenData, batch: Batch) -> Evaluated:
        model = self._loaded.model
        # Accelerate's wrapper lets it compute in bf16 or fp16.
        if self._setup.task.evaluates_in_fp32:
            model = getattr(model, "_original_forward", model)
        sent = self._loaded.sent(batch, data.validation)
        with in_precision(self._setup.precision, self._loaded.model):
            return self._head.evaluate(model, sent, data)

    def _record_progress(self, done: int, total: int) -> None:
        """Records now and then how far this rank is; the main rank's stands for all."""
        now = time.perf_counter()
        if now - self._recorded_at >= _RECORD_EVERY_S:
            self._recorded_at = now
            self._setup.job.record("evaluate", done=done, total=total)


def preload(names: Sequence[str]) -> None:
    """Imports what computing these metrics needs (up to 1.5 s), outside of any clock."""
    for name in names:
        if name in SCORES:
            importlib.import_module(SCORES[name].module)


def gather(world: World, array: np.ndarray, sizes: Sequence[int]) -> np.ndarray | None:
    """Returns all ranks' arrays of (sizes[rank], ...), one after another, on the main rank; None
    elsewhere. By tensors: objects take ten times as long where ranks are many."""
    part = torch.from_numpy(array)
    # `dist.gather` takes tensors of one shape alone, and none that are empty.
    most = max(1, *sizes)
    sent = part.new_zeros(most, *part.shape[1:])
    sent[: len(part)] = part
    received = None
    if world.is_main:
        received = [torch.empty_like(sent) for _ in sizes]
    dist.gather(sent, received, dst=0, group=world.control)
    if received is None:
        return None
    parts = [part[:size] for part, size in zip(received, sizes, strict=True)]
    return np.concatenate(parts)
