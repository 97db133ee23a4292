"""The look at --metric before a job waits in a queue: scripts, arguments, what they take.

`evaluate` imports torch. So metrics are tried in a process of their own, and only where there are
any.
"""

import functools
import json
import warnings
from collections.abc import Sequence

from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.hub import is_hub_offline, is_local
from slurmft.train import metric_spec
from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login.caches import environment_of_caches
from slurmft.train.metric_process import Description, MetricProcess, Trial
from slurmft.train.metric_spec import MetricSpec
from slurmft.train.own_task import facts

_TRIAL_S = 300.0
"""How long the trial may take: the imports take seconds, a metric that loads a model more."""


def check(train: TrainConfig, file_locks: str | None = None) -> None:
    """Tries the metrics that are on this machine on a few samples; the nodes load the others.

    Args:
        file_locks: how the job locks the cache of scripts; None: as the site file says.

    Raises:
        UsageError: one of them does not take the predictions of the task, lacks an argument, fails,
            or returns no number.
    """
    on_this_machine = []
    for spec in metric_spec.parsed(train.named_metrics):
        if _is_here(spec, train.own_metrics):
            on_this_machine.append(spec.text)
    if not on_this_machine:
        return
    kind = facts(train.task).predictions
    classes = _classes(train)
    needs_classes = kind in ("classes", "flags", "tags")
    request = {
        "call": "examine",
        "seed": None,
        "task": train.task,
        "kind": kind,
        "classes": classes,
        # Without the classes a metric is only loaded: made-up classes would prove nothing.
        "computes": classes is not None or not needs_classes,
    }
    contents = [_content(text) for text in on_this_machine]
    # As texts and tuples, which can be keys of a cache.
    metrics = tuple(on_this_machine)
    numbers = _examined(json.dumps(request), metrics, tuple(contents), file_locks)
    names = {}
    for text in on_this_machine:
        names[text] = MetricSpec.parse(text).value_names(numbers[text]).values()
    metric_spec.check_distinct(names)
    deciding = train.metric[0]
    if numbers.get(deciding):
        MetricSpec.parse(deciding).deciding(numbers[deciding])


def _is_here(spec: MetricSpec, own_metrics: Sequence[str]) -> bool:
    """Returns whether the script of a metric is on this machine; with a warning, where it is not.

    Args:
        own_metrics: names of the task's own metrics, for messages.

    Raises:
        UsageError: it is not, and may not be fetched.
    """
    if spec.is_local or metric_spec.is_cached(spec, metric_spec.modules_folder()):
        return True
    absent = f"--metric {spec.text!r} is not in the cache of scripts"
    cure = (
        f"slurmft fetch --metric {spec.name}; the task's own metrics are "
        f"{', '.join(own_metrics)}"
    )
    if spec.name in own_metrics:
        absent = (
            f"--metric {spec.text!r}: the task's own {spec.name} takes no arguments (but better=), "
            "and that of evaluate is not in the cache of scripts"
        )
        cure = f"--metric {spec.name}; or, for that of evaluate: slurmft fetch --metric {spec.name}"
    if is_hub_offline():
        problem = f"{absent}, and the hub is not asked (offline)"
        raise UsageError(problem, cure)
    warnings.warn(
        f"{absent} yet: nodes without internet need it: {cure}",
        SlurmftWarning,
        stacklevel=4,
    )
    return False


def _classes(train: TrainConfig) -> tuple[str, ...] | None:
    """Returns the names of the classes; None where they are not known before the job."""
    labels = facts(train.task).labels
    if labels is not None:
        return labels
    if train.data is None or not is_local(train.data):
        return None
    # There are none where a large file was not read to its end, either.
    return tuple(inputs.classes(train)) or None


def _content(text: str) -> str:
    """Returns the script of a metric of the user's own; "" for one of the hub."""
    spec = metric_spec.MetricSpec.parse(text)
    if not spec.is_local:
        return ""
    return metric_spec.script(spec).read_text(encoding="utf-8", errors="replace")


# The cells of a study have the same metrics; `contents` makes it forget a script that has changed.
@functools.cache
def _examined(
    request: str,
    metrics: tuple[str, ...],
    contents: tuple[str, ...],
    file_locks: str | None = None,
) -> dict[str, list[str]]:
    """Returns the names of the numbers that metrics return for a few samples; none where they are
    not computed. Raises as `MetricProcess.ask`."""
    # As a job without internet would try them, and without a wait for the hub.
    with _process(offline=True, file_locks=file_locks) as metric_process:
        numbers = {}
        for text in metrics:
            of_metric = json.loads(request) | {"metric": text}
            numbers[text] = metric_process.ask(of_metric, Trial, _TRIAL_S).numbers
    return numbers


def fetch(metrics: Sequence[str], offline: bool) -> list[str]:
    """Loads metrics, of the hub whatever the cache has; `offline`: of the cache alone.

    Returns:
        What each metric takes, in words.

    Raises:
        MetricError: one of them cannot be loaded.
    """
    lines = []
    with _process(offline) as metric_process:
        for text in metrics:
            request = {"call": "fetch", "seed": None, "refresh": not offline}
            of_metric = request | {"metric": text}
            answer = metric_process.ask(of_metric, Description, _TRIAL_S)
            lines.append(f"{text}: {answer.takes}")
    return lines


def _process(offline: bool, file_locks: str | None = None) -> MetricProcess:
    """Returns the process that metrics are tried in; `offline`: it asks the hub for nothing."""
    environment = environment_of_caches(file_locks)
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return MetricProcess(environment)
