"""Measured runs as rows of the scaling model."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from slurmft.core.decode import matches
from slurmft.core.errors import UsageError
from slurmft.core.run_records import Epoch
from slurmft.plugins.studies.cells import COST_FIELDS
from slurmft.plugins.studies.scaling.model import Row, Workload
from slurmft.plugins.studies.table import setting_text
from slurmft.runs import scan
from slurmft.runs.scan import MeasuredRun

_RESOLUTION_S = {
    "startup": 0.5,
    "train": 0.02,
    "evaluate": 0.02,
    "metric": 2e-3,
    "broadcast": 2e-4,
    "rest": 0.5,
}
"""How much phases of equal runs differ, however short: file systems, thread wake-ups."""

_Count: TypeAlias = Annotated[int, range(1, 2**63)]
_LONGEST_S = 1e10
"""Three centuries."""


@dataclass(frozen=True, slots=True)
class Series:
    """Rows of one workload on one kind of device: what one fit takes."""

    name: str
    rows: tuple[Row, ...]
    devices_per_node: int
    notes: tuple[str, ...] = ()
    """What a reader should know of the rows."""

    @property
    def device_counts(self) -> list[int]:
        """All that were measured, ascending."""
        return sorted({row.devices for row in self.rows})


def series_of(runs: Sequence[MeasuredRun]) -> dict[str, Series]:
    """Groups finished runs of the same work and device.

    Returns:
        Name -> series; the name has the settings that differ between the series.

    Raises:
        UsageError: no run has finished, or none has a result that can be used.
    """
    finished = [run for run in runs if run.is_finished]
    if not finished:
        states = sorted({run.state.state for run in runs})
        all_states = ", ".join(states)
        raise UsageError(
            f"none of {len(runs)} run(s) has finished: {all_states}",
            scan.what_now(runs),
        )
    notes: list[str] = []
    problems: list[str] = []
    measured: list[tuple[MeasuredRun, Row]] = []
    for run in finished:
        try:
            row = row_of(run)
        except UsageError as error:
            problems.append(error.message)
            notes.append(f"left out: {error.message}")
        else:
            measured.append((run, row))
    if not measured:
        count = f"none of {len(finished)} finished run(s)"
        raise UsageError(f"{count} can be used: {problems[0]}")
    unfinished_count = len(runs) - len(finished)
    if unfinished_count:
        notes.append(f"{unfinished_count} run(s) that have not finished are left out")
    groups = _by_settings(measured)
    series: dict[str, Series] = {}
    for name, group in groups.items():
        series[name] = _series(name, group, tuple(notes))
    return series


def _by_settings(
    measured: Sequence[tuple[MeasuredRun, Row]],
) -> dict[str, list[tuple[MeasuredRun, Row]]]:
    """Groups runs whose costs are alike: name of the group -> its runs with their rows."""
    settings = [_cost_settings(run) for run, _ in measured]
    names = _fields_of_names(settings)
    groups: dict[str, list[tuple[MeasuredRun, Row]]] = {}
    for run_with_row, values in zip(measured, settings, strict=True):
        texts = []
        for field in names:
            # With the field: a value alone may be one of another field in another series.
            if values[field] not in (None, [], ()) and field != "task":
                texts.append(f"{field}={setting_text(values[field])}")
        members = groups.setdefault(" ".join([str(values["task"]), *texts]), [])
        members.append(run_with_row)
    return groups


def _cost_settings(run: MeasuredRun) -> dict[str, Any]:
    """Returns the settings of a run on which its costs depend."""
    result = run.result or {}
    # The result has what the run used, where its configuration may say auto.
    return {name: result.get(name) or run.value(name) for name in COST_FIELDS}


def _fields_of_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the fields that names of series show: the task, and what is not the same in all."""
    fields = []
    for name in COST_FIELDS:
        texts = {repr(values[name]) for values in settings}
        if name == "task" or len(texts) > 1:
            fields.append(name)
    return fields


def _was_restarted(run: MeasuredRun) -> bool:
    result = run.result or {}
    attempts = result.get("attempts")
    return isinstance(attempts, int) and attempts > 1


def _series(
    name: str,
    measured: Sequence[tuple[MeasuredRun, Row]],
    notes: tuple[str, ...],
) -> Series:
    restarted = [run.name for run, _ in measured if _was_restarted(run)]
    if restarted:
        names = ", ".join(restarted)
        notes += (f"restarted, so start-up and rest are not used: {names}",)
    for run, _ in measured:
        held = run.held_in_words()
        if held:
            notes += (f"memory of {run.name} held {held}",)
    # Without hosts on record, nothing is known of the nodes.
    simulated = []
    for run, row in measured:
        if row.nodes > len(run.hosts) > 0:
            simulated.append(run)
    if simulated:
        notes += ("nodes were simulated on one host: real nodes will differ",)
    rows = [row for _, row in measured]
    # The largest: runs on a part of a node may be among the rows, and a plan takes whole nodes.
    devices_per_node = max(row.devices // row.nodes for row in rows)
    return Series(name, tuple(rows), devices_per_node, notes)


def row_of(run: MeasuredRun) -> Row:
    """Returns a finished run as a row of the model.

    Raises:
        UsageError: its result lacks what the model needs, or has values that cannot be.
    """
    # A result may be of another version, or of a program of the user's own: any value in it may be
    # missing or of another type.
    with contextlib.suppress(
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ):
        row = _row(run)
        counts = [row.devices, row.nodes, row.work.train_samples]
        if row.work.kept_global_batch is not None:
            counts.append(row.work.kept_global_batch)
        # NaN and infinity are no JSON, and yet Python reads them.
        has_counts = matches(counts, list[_Count])
        are_possible = all(seconds < _LONGEST_S for seconds in row.seconds.values())
        if has_counts and are_possible and "train" in row.seconds:
            return row
    raise UsageError(
        f"the result of {str(run.path)!r} lacks times, samples or devices, or they are invalid"
    )


def _row(run: MeasuredRun) -> Row:
    result = run.result
    assert result is not None
    return Row(
        label=run.name,
        work=_workload(run, result),
        devices=result["world_size"],
        nodes=result["nodes"],
        seconds=_phase_times(result, run.test_samples),
        resolution_s=_RESOLUTION_S,
    )


def _workload(run: MeasuredRun, result: Mapping[str, Any]) -> Workload:
    devices = result["world_size"]
    # A set: after a restart from an older checkpoint, an evaluation may be recorded twice.
    evaluated_at = {record.epoch for record in run.records(Epoch)}
    # Without such records, there was one after each of the epochs that were asked for.
    evaluations = len(evaluated_at) or run.number("epochs") or 1
    # A run may have ended before all the epochs that were asked for, and within one.
    epochs = math.ceil(max(evaluated_at, default=0)) or evaluations
    global_batch_size = result["global_batch_size"]
    kept_global_batch = run.number("global_batch_size")
    # That of --batch-size auto is in the result.
    batch_size = result.get("batch_size") or run.number("batch_size") or 1
    samples_per_micro_step = devices * batch_size
    # Rounded up, as in the training: a global batch that was limited need be no multiple.
    micro_steps = max(1, math.ceil(global_batch_size / samples_per_micro_step))
    # Micro-steps make up a global batch that was asked for, on any number of devices.
    if kept_global_batch is None:
        batch_size = max(1, round(global_batch_size / (devices * micro_steps)))
    in_evaluations = result["evaluate_samples"] - run.test_samples
    return Workload(
        tokens_per_sample=_tokens_per_sample(result),
        train_samples=round(result["train_samples"] / epochs),
        batch_size=batch_size,
        epochs=epochs,
        micro_steps=micro_steps,
        kept_global_batch=kept_global_batch,
        accumulates=kept_global_batch is not None,
        evaluate_samples=round(in_evaluations / evaluations),
        evaluations_per_epoch=evaluations / epochs,
    )


def _tokens_per_sample(result: Mapping[str, Any]) -> float | None:
    tokens_per_s = result.get("train_tokens_per_s")
    samples_per_s = result.get("train_samples_per_s")
    if not tokens_per_s or not samples_per_s:
        return None
    # Both rates are of the same seconds, which cancel out.
    return float(tokens_per_s / samples_per_s)


def _phase_times(result: Mapping[str, Any], test_samples: int) -> dict[str, float]:
    """Returns the phases that the model has, with their seconds."""
    seconds = dict(result["phases_s"])
    # The model's evaluations are those of the validation data: the test split, which is evaluated
    # once in a run, has its share of the seconds, and goes to the rest.
    test_s = 0.0
    if test_samples:
        test_s = seconds["evaluate"] * test_samples / result["evaluate_samples"]
        seconds["evaluate"] -= test_s
    # A restarted run has started up several times: start-up and rest are not those of one run.
    if result.get("attempts", 1) == 1:
        startup_s = result["startup_s"]
        phases_s = sum(result["phases_s"].values())
        seconds["startup"] = startup_s
        # Saving, and what lies between phases: no clock of its own measures it.
        seconds["rest"] = result["wall_s"] - startup_s - phases_s + test_s
    known_s = {}
    for name, s in seconds.items():
        if name in _RESOLUTION_S:
            known_s[name] = s
    # A phase of 0 seconds has no relative error, which the fit divides by. The rest is a difference
    # of clocks, which may even be below 0.
    return {name: s for name, s in known_s.items() if s > 0}
