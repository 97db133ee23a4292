"""Metrics that --metric names, beside those of the task: computed on the main rank alone."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slurmft.core.errors import UsageError
from slurmft.train import metric_spec
from slurmft.train.data.token_data import TokenData
from slurmft.train.loop.kept_process import kept_process
from slurmft.train.loop.setup import Setup
from slurmft.train.tasks.evaluate_metrics import (
    EvaluateMetric,
    MetricError,
    MetricInputs,
    examples,
)


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

    metric: EvaluateMetric
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
        task = setup.task
        self.best_by: str | None = None
        """What the best checkpoint has, in words, as "lowest mse"; None: --metric does not decide.
        """
        self.deciding = Deciding(task.metric_names[0], task.lower_is_better)
        if setup.config.named_metrics:
            # What a script does must not change the training.
            with kept_process(setup.world.device):
                # On the main rank alone, which computes the metrics: the import of evaluate takes
                # seconds.
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
        # It takes seconds, and the other ranks wait.
        setup.job.alive("evaluate")
        forms = examples(task.facts.predictions, self._classes())
        deciding = None
        for spec in metric_spec.parsed(setup.config.named_metrics):
            metric = EvaluateMetric.load(spec, seed=setup.config.seed)
            form = metric.form(forms, setup.config.task)
            numbers = list(metric.compute(forms[form]))
            loaded = _Loaded(metric, form, spec.value_names(numbers))
            self._loaded.append(loaded)
            if spec.text == setup.config.metric[0]:
                value = spec.deciding(numbers)
                deciding = Deciding(
                    name=self._result_name(loaded, value, task.metric_suffixes[0]),
                    lower_is_better=spec.is_lower_better(value),
                )
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

    def _result_name(self, loaded: _Loaded, value: str, suffix: str) -> str:
        """Returns the name of a number among the metrics of an evaluation."""
        spec = loaded.metric.spec
        names = loaded.names
        # A number that the trial did not have: a metric may return others for other samples.
        if value not in names:
            names = spec.value_names([*names, value])
        name = names[value] + suffix
        # Where an evaluation has one of this name itself, the result has both.
        if name in (*self._setup.task.metric_names, metric_spec.LOSS):
            return f"evaluate_{name}"
        return name

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
        with kept_process(setup.world.device):
            inputs = setup.task.metric_inputs(predictions, data)
            for loaded in self._loaded:
                for suffix, forms in inputs.items():
                    values |= self._compute(loaded, forms, suffix)
        return values

    def in_order(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of an evaluation, the deciding one first: it is the primary one."""
        name = self.deciding.name
        if name not in metrics:
            return metrics
        return {name: metrics[name]} | metrics

    def _compute(
        self, loaded: _Loaded, forms: list[MetricInputs], suffix: str
    ) -> dict[str, float]:
        """Returns the numbers of one metric for a validation split, by their names in results."""
        spec = loaded.metric.spec
        # All that the trial had: evaluations must not differ in which metrics they have.
        numbers = dict.fromkeys(loaded.names, math.nan)
        try:
            # A task of the user's own may give fewer forms than its kind of predictions has.
            if loaded.form >= len(forms):
                raise MetricError(
                    f"--metric {spec.text!r}: --task {self._setup.config.task} has no predictions "
                    "for it",
                    "write metric_inputs() of the task",
                )
            numbers |= loaded.metric.compute(forms[loaded.form])
        except MetricError as error:
            self._warn(error.message)
        else:
            missing = [name for name, value in numbers.items() if math.isnan(value)]
            if missing:
                self._warn(
                    f"--metric {spec.text!r} gives no finite number for {', '.join(missing)}"
                )
        return {
            self._result_name(loaded, name, suffix): value
            for name, value in numbers.items()
        }

    def _warn(self, text: str) -> None:
        self._setup.job.warn(
            f"{text}; this evaluation has no value of it, and is not compared for the best by it"
        )
