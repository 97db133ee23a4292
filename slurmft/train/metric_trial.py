"""Tries metrics of `evaluate` on a few samples: `python -m slurmft.train.metric_trial JSON`.

A process of its own: `evaluate` imports torch, and the script of a metric may do anything. The
request has the keys

    metrics   values of --metric
    deciding  the one that decides about the best checkpoint, if it is among them
    refresh   whether the hub is asked for what the cache has
    task, kind, classes  of the samples, see `evaluate_metrics.examples`; without kind: none, as
              where scripts are fetched
    computes  whether the metrics are computed

and the last line that is printed is the report, as JSON: message and hint of what is wrong, or
lines on what the metrics take.
"""

import json
import sys
from typing import Any

from slurmft.core.errors import Exit, SlurmftError, UsageError, run_main
from slurmft.core.hub import NotOnHubError
from slurmft.train import metric_spec
from slurmft.train.tasks.evaluate_metrics import EvaluateMetric, examples


def main(argv: list[str]) -> int:
    request = json.loads(argv[0])
    report: dict[str, Any] = {}
    try:
        lines = [_try(text, request) for text in request["metrics"]]
        report["lines"] = lines
    except NotOnHubError as error:
        absence: UsageError = error
        if "kind" not in request:
            absence = error.while_fetching()
        report = {"message": absence.message, "hint": absence.hint}
    except SlurmftError as error:
        report = {"message": error.message, "hint": error.hint}
    print(f"\n{json.dumps(report)}", flush=True)
    return Exit.OK


def _try(text: str, request: dict[str, Any]) -> str:
    """Tries a metric; returns what it takes, in words."""
    spec = metric_spec.MetricSpec.parse(text)
    metric = EvaluateMetric.load(spec, refresh=request.get("refresh", False))
    line = f"{text}: {metric.describe()}"
    if "kind" not in request:
        return line
    forms = examples(request["kind"], request["classes"])
    form = metric.form(forms, request["task"])
    if request["computes"]:
        numbers = metric.compute(forms[form])
        if text == request["deciding"]:
            spec.deciding(list(numbers))
    return line


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
