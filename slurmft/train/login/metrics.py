"""The look at --metric before a job waits in a queue: scripts, arguments, what they take.

`evaluate` imports torch. So metrics are tried in a process of their own, and only where there are
any.
"""

import functools
import json
import subprocess
import warnings
from collections.abc import Sequence
from typing import Any

from slurmft.core import interpreter, process
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.hub import is_hub_offline, is_local
from slurmft.train import metric_spec
from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login.caches import environment_of_caches
from slurmft.train.metric_spec import MetricSpec
from slurmft.train.own_task import facts

_TRIAL_S = 300.0
"""How long the trial may take: the imports take seconds, a metric that loads a model more."""


def check(train: TrainConfig) -> None:
    """Tries the metrics that are on this machine on a few samples; the nodes load the others.

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
        "metrics": on_this_machine,
        "deciding": train.metric[0],
        "task": train.task,
        "kind": kind,
        "classes": classes,
        # Without the classes a metric is only loaded: made-up classes would prove nothing.
        "computes": classes is not None or not needs_classes,
    }
    contents = [_content(text) for text in on_this_machine]
    # As a text and a tuple, which can be keys of a cache.
    report = _kept_trial(json.dumps(request), tuple(contents))
    if "message" in report:
        raise UsageError(report["message"], report["hint"])


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
def _kept_trial(request: str, contents: tuple[str, ...]) -> dict[str, Any]:
    # As a job without internet would try them, and without a wait for the hub.
    return trial(json.loads(request), offline=True)


def trial(request: dict[str, Any], offline: bool) -> dict[str, Any]:
    """Loads metrics in a process of their own, and tries them on a few samples.

    Args:
        request: see `slurmft.train.metric_trial`.
        offline: ask the hub for nothing.

    Returns:
        `message` and `hint` of what is wrong; or `lines`, what each metric takes.
    """
    environment = environment_of_caches()
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    command = interpreter.module("slurmft.train.metric_trial", json.dumps(request))
    what = f"--metric {', '.join(request['metrics'])}"
    try:
        done = process.run(command, _TRIAL_S, env=environment)
    except subprocess.TimeoutExpired:
        problem = f"{what} took more than {_TRIAL_S:.0f} s for a few samples"
        return {"message": problem, "hint": "choose another metric"}
    report = _last_object(done.stdout)
    if report is None:
        # The last line of a traceback names the error.
        last_words = done.stderr.strip().rpartition("\n")[2]
        problem = f"{what} cannot be tried: {last_words or 'its process ended'}"
        return {"message": problem, "hint": "correct its script, or leave it out"}
    return report


def _last_object(output: str) -> dict[str, Any] | None:
    """Returns the object of JSON in the last line of an output, before which scripts may have
    printed anything; None: a script has ended the process."""
    last_line = output.rstrip().rpartition("\n")[2]
    try:
        value = json.loads(last_line)
    except ValueError:
        return None
    if isinstance(value, dict):
        return value
    return None
