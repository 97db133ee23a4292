"""Measured runs as rows of the scaling model."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurmft.core.errors import UsageError
from slurmft.plugins.studies.cells import COST_FIELDS
from slurmft.plugins.studies.scaling.model import Row, Workload
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
    """Name -> series, of all finished runs; the name has what differs between them."""
    finished = [run for run in runs if run.is_finished]
    if not finished:
        states = ", ".join(sorted({run.state.state for run in runs}))
        raise UsageError(
            f"none of {len(runs)} run(s) has finished: {states}",
            "wait for one (slurmft follow RUN), or resume it: slurmft resume RUN",
        )
    notes: list[str] = []
    rows: list[tuple[MeasuredRun, Row]] = []
    for run in finished:
        try:
            rows.append((run, row_of(run)))
        except UsageError as error:
            notes.append(f"left out: {error.message}")
    if not rows:
        raise UsageError(f"none of {len(finished)} finished run(s) can be used: {notes[0][10:]}")
    if left := len(runs) - len(finished):
        notes.append(f"{left} run(s) that have not finished are left out")
    # What a run used, where its configuration may say auto.
    used = [{n: (run.result or {}).get(n) or run.value(n) for n in COST_FIELDS} for run, _ in rows]
    named = [n for n in COST_FIELDS if n == "task" or len({repr(u[n]) for u in used}) > 1]
    groups: dict[str, list[tuple[MeasuredRun, Row]]] = {}
    for each, identity in zip(rows, used, strict=True):
        groups.setdefault(" ".join(str(identity[n]) for n in named), []).append(each)
    return {name: _series(name, group, tuple(notes)) for name, group in groups.items()}


def _was_restarted(run: MeasuredRun) -> bool:
    attempts = (run.result or {}).get("attempts")
    return isinstance(attempts, int) and attempts > 1


def _series(
    name: str, measured: Sequence[tuple[MeasuredRun, Row]], notes: tuple[str, ...]
) -> Series:
    restarted = [run.name for run, _ in measured if _was_restarted(run)]
    if restarted:
        notes += (f"restarted, so start-up and rest are not used: {', '.join(restarted)}",)
    if any(row.nodes > len(run.hosts) > 0 for run, row in measured):
        notes += ("nodes were simulated on one host: real nodes will differ",)
    rows = tuple(row for _, row in measured)
    return Series(name, rows, max(row.devices // row.nodes for row in rows), notes)


def row_of(run: MeasuredRun) -> Row:
    """A finished run."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        row = _row(run)
        counts, times = (row.devices, row.nodes, row.work.train_samples), row.seconds.values()
        if min(counts) >= 1 and "train" in row.seconds and all(map(math.isfinite, times)):
            return row
    raise UsageError(
        f"the result of {str(run.path)!r} lacks times, samples or devices, or they are invalid"
    )


def _row(run: MeasuredRun) -> Row:
    result = run.result
    assert result is not None
    devices = result["world_size"]
    epochs = len({r.get("epoch") for r in run.records("epoch")})
    epochs = epochs or run.value("epochs") or 1
    per_step = devices * (run.value("batch_size") or 1)
    micro_steps = max(1, round(result["global_batch_size"] / per_step))
    tokens, samples = (result.get(f"train_{unit}_per_s") for unit in ("tokens", "samples"))
    work = Workload(
        tokens_per_sample=tokens / samples if tokens and samples else None,
        train_samples=round(result["train_samples"] / epochs),
        batch_size=max(1, round(result["global_batch_size"] / (devices * micro_steps))),
        epochs=epochs,
        micro_steps=micro_steps,
        evaluate_samples=round(result["evaluate_samples"] / epochs),
    )
    seconds = dict(result["phases_s"])
    if result.get("attempts", 1) == 1:
        rest = result["wall_s"] - result["startup_s"] - sum(seconds.values())
        seconds |= {"startup": result["startup_s"], "rest": rest}
    seconds = {name: s for name, s in seconds.items() if name in _RESOLUTION_S and s > 0}
    return Row(
        label=run.name,
        work=work,
        devices=devices,
        nodes=result["nodes"],
        seconds=seconds,
        resolution_s=_RESOLUTION_S,
    )
