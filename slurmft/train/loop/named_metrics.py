"""Metrics that --metric names, beside those of the task: computed for the main rank alone, in a
process of its own."""

import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from slurmft.core.errors import UsageError
from slurmft.core.job_variables import without_ranks
from slurmft.core.text import some
from slurmft.train import metric_spec
from slurmft.train.data.token_data import TokenData
from slurmft.train.loop.setup import Setup
from slurmft.train.metric_process import (
    MetricError,
    MetricProcess,
    Numbers,
    Trial,
)
from slurmft.train.metric_spec import MetricSpec
from slurmft.train.tasks.evaluate_metrics import MetricInputs

T = TypeVar("T")

_SHARE_OF_HANG = 0.8
"""Metrics may take this share of the time after which ranks without a heartbeat count as hung: a
metric that hangs then has no value, and the run goes on."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """The metric that decides which checkpoint is the best."""

    name: str
    """Its name among the metrics of an evaluation."""
    lower_is_better: bool

    def has_value(self, metrics: dict[str, float]) -> bool:
        """Returns whether an evaluation can be compared with others."""
        return math.isfinite(metrics.get(self.name, math.nan))

    @property
    def words(self) -> str:
        """What the best checkpoint has: "lowest mse"."""
        order = "highest"
        if self.lower_is_better:
            order = "lowest"
        return f"{order} {self.name}"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A metric that has passed its trial."""

    spec: MetricSpec
    form: int
    """Number of the form of predictions that it takes."""
    names: dict[str, str]
    """The number that it returns -> its name in results."""


class NamedMetrics:
    """The metrics of --metric; none where it is not given. All ranks make the same calls.

    A metric that fails on a few samples ends the run before it trains; one that fails later has no
    value in that evaluation, and training goes on.
    """

    def __init__(self, setup: Setup) -> None:
        """Raises UsageError where a metric cannot be used; on every rank."""
        self._setup = setup
        self._loaded: list[_Loaded] = []
        # Its output is in the log of the main rank.
        self._process = MetricProcess(without_ranks(os.environ), keeps_output=True)
        task = setup.task
        self.best_by: str | None = None
        """What the best checkpoint has, in words, as "lowest mse"; None: --metric does not decide.
        """
        self.deciding = Deciding(task.metric_names[0], task.lower_is_better)
        if setup.config.named_metrics:
            facts = setup.world.on_main(self._load)
            if facts is not None:
                self.deciding = Deciding(**facts)
        own_metrics = [self._own(text) for text in setup.config.metric]
        if own_metrics and own_metrics[0] is not None:
            self.deciding = own_metrics[0]
        if setup.config.metric:
            self.best_by = self.deciding.words

    def _load(self) -> dict[str, Any] | None:
        """Loads and tries all metrics; returns the `Deciding` one, as JSON has it, None where it is
        one of the task. On the main rank."""
        setup = self._setup
        task = setup.task
        deadline = self._begin()
        deciding = None
        for spec in metric_spec.parsed(setup.config.named_metrics):
            request = {
                "call": "examine",
                "task": setup.config.task,
                "kind": task.facts.predictions,
                "classes": self._classes(),
                "computes": True,
            }
            trial = self._ask(spec, request, Trial, deadline)
            numbers = trial.numbers
            loaded = _Loaded(spec, trial.form, spec.value_names(numbers))
            self._loaded.append(loaded)
            if spec.text == setup.config.metric[0]:
                value = spec.deciding(numbers)
                suffix = task.metric_suffixes[0]
                deciding = Deciding(
                    name=self._result_names(loaded, [value], suffix)[value],
                    lower_is_better=spec.is_lower_better(value),
                )
        names = {each.spec.text: each.names.values() for each in self._loaded}
        metric_spec.check_distinct(names)
        if deciding is None:
            return None
        return asdict(deciding)

    def _own(self, text: str) -> Deciding | None:
        """Returns the metric of the task that a value of --metric names; None where it names one of
        `evaluate`.

        Raises:
            UsageError: with this data the task has other metrics.
        """
        task = self._setup.task
        spec = metric_spec.own_metric(text, self._setup.config.own_metrics)
        if spec is None:
            return None
        names = (*task.metric_names, metric_spec.LOSS)
        if spec.name not in names:
            raise UsageError(
                f"--metric {text!r}: with this data --task {task.config.task} has no such metric",
                f"it has {', '.join(names)}",
            )
        is_lower_better = spec.is_lower_better(spec.name)
        if spec.name == metric_spec.LOSS:
            is_lower_better = spec.better != "higher"
        if spec.better is None and spec.name == task.metric_names[0]:
            is_lower_better = task.lower_is_better
        return Deciding(spec.name, is_lower_better)

    def _classes(self) -> list[str] | None:
        """Returns the names of the classes of the data; their numbers where they have no names."""
        data = self._setup.data
        labels = data.validation.labels
        if data.labels or labels.dtype.kind != "i" or not labels.size:
            return data.labels or None
        return [str(number) for number in range(int(labels.max()) + 1)]

    def _result_names(
        self, loaded: _Loaded, values: Iterable[str], suffix: str
    ) -> dict[str, str]:
        """Returns the names of numbers among the metrics of an evaluation."""
        # A metric may return more for other samples than in its trial. All together: two of them
        # may have one name otherwise.
        all_values = list(dict.fromkeys([*loaded.names, *values]))
        names = loaded.spec.value_names(all_values) | loaded.names
        reserved = (*self._setup.task.metric_names, metric_spec.LOSS)
        results = {}
        for value in values:
            name = names[value] + suffix
            # Where an evaluation has one of this name itself, the result has both.
            if name in reserved:
                name = f"evaluate_{name}"
            results[value] = name
        return results

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns the values of all metrics; none on other ranks than the main one. Where a metric
        has no value it is NaN, with a warning."""
        if not self._loaded:
            return {}
        setup = self._setup
        values: dict[str, float] = {}
        if self.deciding.name != metric_spec.LOSS:
            # Where no metric gives it a value: an evaluation without one is not compared. The
            # caller has the value of a metric of the task itself.
            values[self.deciding.name] = math.nan
        inputs = setup.task.metric_inputs(predictions, data)
        deadline = self._begin()
        for loaded in self._loaded:
            for suffix, forms in inputs.items():
                values |= self._compute(loaded, forms, suffix, deadline)
        return values

    def end(self) -> None:
        """Ends the process of the metrics."""
        self._process.end()

    def _begin(self) -> float | None:
        """Sends a heartbeat; returns when the metrics have to be done, None: at any time."""
        job = self._setup.job
        job.alive("evaluate")
        hang_timeout_s = job.config.job.hang_timeout_s
        if not hang_timeout_s:
            return None
        return time.monotonic() + _SHARE_OF_HANG * hang_timeout_s

    def _ask(
        self,
        spec: MetricSpec,
        request: dict[str, Any],
        kind: type[T],
        deadline: float | None,
    ) -> T:
        """Sends a request about a metric to the process. Raises as `MetricProcess.ask`."""
        timeout_s = None
        if deadline is not None:
            timeout_s = max(1.0, deadline - time.monotonic())
        of_metric = {"metric": spec.text, "seed": self._setup.config.seed}
        return self._process.ask(request | of_metric, kind, timeout_s)

    def in_order(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of an evaluation, the deciding one first: it is the primary one."""
        name = self.deciding.name
        if name not in metrics:
            return metrics
        return {name: metrics[name]} | metrics

    def _compute(
        self,
        loaded: _Loaded,
        forms: list[MetricInputs],
        suffix: str,
        deadline: float | None,
    ) -> dict[str, float]:
        """Returns the numbers of one metric for a validation split, by their names in results."""
        spec = loaded.spec
        # All that the trial had: evaluations must not differ in which metrics they have.
        numbers = dict.fromkeys(loaded.names, math.nan)
        is_told = False
        try:
            # A task of the user's own may give fewer forms than its kind of predictions has.
            if loaded.form >= len(forms):
                raise MetricError(
                    f"--metric {spec.text!r}: --task {self._setup.config.task} has no predictions "
                    "for it",
                    "write metric_inputs() of the task",
                )
            inputs = forms[loaded.form]
            request = {
                "call": "compute",
                "predictions": inputs.predictions,
                "references": inputs.references,
            }
            numbers |= self._ask(spec, request, Numbers, deadline).numbers
        except MetricError as error:
            self._warn(error.message)
            is_told = True
        names = self._result_names(loaded, numbers, suffix)
        missing = [names[value] for value in numbers if math.isnan(numbers[value])]
        if missing and not is_told:
            self._warn(
                f"--metric {spec.text!r} gives no finite number for {some(missing)}"
            )
        return {names[value]: number for value, number in numbers.items()}

    def _warn(self, text: str) -> None:
        self._setup.job.warn(
            f"{text}; this evaluation has no value of it, and is not compared for the best by it"
        )
