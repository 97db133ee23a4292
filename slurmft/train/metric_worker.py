"""Loads and computes metrics of `evaluate`: `python -m slurmft.train.metric_worker DESCRIPTOR`.

The script of a metric may do anything to the process that it runs in. So that is this one, at
submission and in a job; `slurmft.train.metric_process` starts it. Each line that comes from the
socket is a request, and is answered by a line, both in JSON. See `Worker` for the requests; the
answer to one that fails has message and hint.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
from typing import Any

from slurmft.core.errors import Exit, SlurmftError, UsageError, run_main
from slurmft.core.hub import NotOnHubError
from slurmft.node import signals
from slurmft.train import metric_spec
from slurmft.train.tasks.evaluate_metrics import (
    EvaluateMetric,
    MetricInputs,
    examples,
    reason,
)

_LEAST_DESCRIPTOR = 64
"""Scripts may close the first ones, or take them for their own."""


class Worker:
    """The metrics of a process, by their values of --metric."""

    def __init__(self) -> None:
        self._metrics: dict[str, EvaluateMetric] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request.

        Args:
            request: with the arguments of the method of the name `call`.

        Raises:
            SlurmftError: the metric cannot be used, or has no value.
        """
        arguments = dict(request)
        call = getattr(self, arguments.pop("call"))
        answer: dict[str, Any] = call(**arguments)
        return answer

    def fetch(self, metric: str, seed: int | None, refresh: bool) -> dict[str, Any]:
        """Loads a metric; refresh: of the hub, whatever the cache has."""
        try:
            loaded = self._load(metric, seed, refresh)
        except NotOnHubError as error:
            raise error.while_fetching() from error
        return {"takes": loaded.describe()}

    def examine(
        self,
        metric: str,
        seed: int | None,
        task: str,
        kind: str,
        classes: list[str] | None,
        computes: bool,
    ) -> dict[str, Any]:
        """Tries a metric on a few samples, see `examples`; without `computes`, whether it takes
        them."""
        loaded = self._load(metric, seed)
        forms = examples(kind, classes)
        form = loaded.form(forms, task)
        numbers: list[str] = []
        if computes:
            numbers = list(loaded.compute(forms[form]))
        return {"form": form, "numbers": numbers}

    def compute(
        self,
        metric: str,
        seed: int | None,
        predictions: list[Any],
        references: list[Any],
    ) -> dict[str, Any]:
        """Computes a metric. A process that was started again has yet to load it."""
        loaded = self._load(metric, seed)
        return {"numbers": loaded.compute(MetricInputs(predictions, references))}

    def _load(
        self, metric: str, seed: int | None, refresh: bool = False
    ) -> EvaluateMetric:
        if metric not in self._metrics:
            spec = metric_spec.MetricSpec.parse(metric)
            self._metrics[metric] = EvaluateMetric.load(spec, seed, refresh)
        return self._metrics[metric]


def main(argv: list[str]) -> int:
    # In a job the stop signals are blocked here as in the rank, which alone decides to stop.
    signals.let_children_be_terminated()
    descriptor = fcntl.fcntl(int(argv[0]), fcntl.F_DUPFD_CLOEXEC, _LEAST_DESCRIPTOR)
    os.close(int(argv[0]))
    worker = Worker()
    process_id = os.getpid()
    with (
        socket.socket(fileno=descriptor) as channel,
        channel.makefile("rwb") as stream,
    ):
        for line in stream:
            request = json.loads(line)
            answer = _answer(worker, request)
            # A process that the script has forked may get here, too.
            if os.getpid() != process_id:
                os._exit(Exit.FAILED)
            for output in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    output.flush()
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()
    return Exit.OK


def _answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return worker.answer(request)
    except SlurmftError as error:
        return {"message": error.message, "hint": error.hint}
    # Whatever a script raises: the exceptions of time limits are not of Exception, either.
    except BaseException as error:
        failure = UsageError(
            f"--metric {request['metric']!r} failed: {reason(error)}",
            "correct its script, or leave it out",
        )
        return {"message": failure.message, "hint": failure.hint}


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
