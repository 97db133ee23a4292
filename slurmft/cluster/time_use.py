"""Where the time of runs went, and which share of it were steps that count (ETTR)."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from slurmft.cluster.fact_types import AttemptTime, TimeUse
from slurmft.cluster.job_state import Phase
from slurmft.cluster.status import RunStatus
from slurmft.core.run_records import Record, Resume, Saved
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.runs.time_use import AttemptParts, Part, Past, attempts_of

_QUEUED = (Phase.PENDING, Phase.REQUEUED)


def of_status(status: RunStatus) -> TimeUse:
    """Returns where the time of a run went: until now where its job waits or runs, until its last
    record where that is over or nobody can be asked."""
    now = None
    if status.is_alive and status.is_sure:
        now = time.time()
    is_running = status.outcome == "running"
    return _of(status.run, now, is_running, status.state in _QUEUED)


def of_records(run: MeasuredRun) -> TimeUse:
    """Returns where the time of a run went, until its last record: no scheduler is asked."""
    is_running = run.state.state in ("running", "stopping")
    return _of(run, None, is_running, is_queued=False)


def _of(
    run: MeasuredRun, now: float | None, is_running: bool, is_queued: bool
) -> TimeUse:
    files = RunDir(run.path)
    is_training = not run.is_own_program and not run.is_prediction
    records = list(RecordReader(files.records).read_sparsely())
    kept_step = None
    # Steps of a run that trains on are not lost yet.
    if not run.is_finished and not is_running:
        kept_step = _kept_step(files, records, is_training)
    past = Past(
        history=run.state.history,
        records=records,
        failures=files.all_failures(),
        now=now,
        is_queued=is_queued,
        is_training=is_training,
        kept_step=kept_step,
    )
    attempts = attempts_of(past)
    if not run.is_prediction:
        return _time_use(attempts)
    for attempt in attempts:
        _count_as_program(attempt.seconds)
    use = _time_use(attempts)
    # Also of one that has not begun to predict.
    use["ettr"] = None
    return use


def _count_as_program(seconds: dict[Part, float]) -> None:
    """Gives the time in which a prediction predicts to its program: it has neither steps that could
    be lost nor evaluations between them, and so no ETTR."""
    for part in (Part.STEPS, Part.EVALUATIONS):
        seconds[Part.PROGRAM] += seconds[part]
        seconds[part] = 0.0


def _kept_step(
    files: RunDir, records: Sequence[Record], is_training: bool
) -> int | None:
    """Returns the step that a run goes on from; None: it is not known."""
    names = []
    with contextlib.suppress(OSError):
        names = files.checkpoint_names()
    if names:
        _, step, *_ = names[-1].split("-")  # step-00000120
        return int(step)
    # `slurmft pull` leaves the folder where the run was: the records say what is in it.
    if not os.path.isdir(files.checkpoints):
        for record in reversed(records):
            if isinstance(record, (Saved, Resume)):
                return record.step
    # Another program may have checkpoints elsewhere.
    if is_training:
        return 0
    return None


def _time_use(attempts: Sequence[AttemptParts]) -> TimeUse:
    rows = []
    for each in attempts:
        row = _with_keys(each.seconds) | {"attempt": each.number}
        rows.append(cast(AttemptTime, row))
    return in_all(rows, rows)


def in_all(
    parts: Sequence[Mapping[str, Any]], attempts: Sequence[AttemptTime] = ()
) -> TimeUse:
    """Returns the sum of the parts of attempts, or of runs."""
    sums = {}
    for part in Part:
        sums[part] = sum(each[key_of(part)] for each in parts)
    total_s = sum(sums.values())
    ettr = None
    # Of a program that does not tell its steps, some of its time may be steps.
    if total_s and not sums[Part.PROGRAM]:
        ettr = sums[Part.STEPS] / total_s
    use = _with_keys(sums) | {
        "total_s": total_s,
        "ettr": ettr,
        "attempts": list(attempts),
    }
    return cast(TimeUse, use)


def key_of(part: Part) -> str:
    """Returns the key of the seconds of a part."""
    return f"{part}_s"


def _with_keys(seconds: Mapping[Part, float]) -> dict[str, Any]:
    return {key_of(part): value for part, value in seconds.items()}
