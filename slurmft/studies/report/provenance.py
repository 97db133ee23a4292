"""Where measurements come from: what must stand under a table that others are to trust."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from slurmft.runs.scan import MeasuredRun
from slurmft.studies.report.measures import Row, label

_MOST = 3
"""Values of a kind that are listed; the rest is counted."""
_LONGEST = 160

_VERSIONS = ("slurmft", "torch", "transformers", "accelerate", "datasets")


def origins(rows: Sequence[Row]) -> list[str]:
    """Lines on commands, versions, places and dates of the rows' runs."""
    runs = [run for row in rows for run in row.runs]
    if not runs:
        return []
    lines = [
        f"runs: {len(runs)}, {sum(run.is_finished for run in runs)} finished; {_dates(runs)}",
        f"commands: {_listed(_commands(runs))}",
        f"code: slurmft {_listed(_values(runs, lambda r: r.code))}",
        f"versions: {_versions(runs)}",
        f"hosts: {_listed(_hosts(runs))}",
        f"devices: {_listed(_values(runs, _device))}",
    ]
    return [line for line in lines if not line.endswith(": ")]


def changes(rows: Sequence[Row], fields: Sequence[str]) -> list[str]:
    """What did not stay the same from run to run, and where: such rows are not comparable."""
    asked: dict[str, Callable[[MeasuredRun], str]] = {
        "code": lambda run: run.code,
        "devices": _device,
    }
    packages = {p for row in rows for run in row.runs for p in _packages(run)}
    for name in ("python", *sorted(packages)):
        asked[name] = _version_of(name)
    lines = []
    for what, ask in asked.items():
        found: dict[str, list[str]] = {}
        for row in rows:
            for value in _values(row.runs, ask):
                found.setdefault(value, []).append(label(row, fields))
        if len(found) > 1:
            kept = max(found, key=lambda v: len(found[v]))
            parts = [f"{v} in {_listed(found[v], '; ')}" for v in found if v != kept]
            lines.append(f"CHANGED between runs: {what}: {kept} in most, {', '.join(parts)}")
    return lines


def _version_of(package: str) -> Callable[[MeasuredRun], str]:
    if package == "python":
        return lambda run: str(run.environment.get("python", ""))
    return lambda run: str(_packages(run).get(package, ""))


def _packages(run: MeasuredRun) -> dict[str, Any]:
    found = run.environment.get("versions")
    return found if isinstance(found, dict) else {}


def _values(runs: Sequence[MeasuredRun], ask: Callable[[MeasuredRun], str]) -> list[str]:
    """What the runs say, each once; those that say nothing are left out."""
    return [value for value in dict.fromkeys(map(ask, runs)) if value]


def _listed(values: Sequence[str], separator: str = ", ") -> str:
    """The first of some values, and how many there are besides."""
    more = len(values) - _MOST
    return separator.join(values[:_MOST]) + (f" and {more} more" if more > 0 else "")


def _commands(runs: Sequence[MeasuredRun]) -> list[str]:
    found = _values(runs, lambda run: str(run.config.get("submission", {}).get("command", "")))
    return [c if len(c) <= _LONGEST else c[: _LONGEST - 3] + "..." for c in found]


def _versions(runs: Sequence[MeasuredRun]) -> str:
    names = ("python", *_VERSIONS)
    told = [(name, _values(runs, _version_of(name))) for name in names]
    return ", ".join(f"{name} {' and '.join(found)}" for name, found in told if found)


def _hosts(runs: Sequence[MeasuredRun]) -> list[str]:
    """All hosts, each once."""
    found: dict[str, None] = {}
    for run in runs:
        try:
            found |= dict.fromkeys(run.hosts)
        except (KeyError, TypeError, AttributeError):  # not as slurmft writes it
            found["unknown"] = None
    return list(found)


def _device(run: MeasuredRun) -> str:
    try:
        return ", ".join(dict.fromkeys(str(r["device"]) for r in run.environment.get("ranks", [])))
    except (KeyError, TypeError, AttributeError):
        return "unknown"


def _dates(runs: Sequence[MeasuredRun]) -> str:
    """When the first was submitted and the last one changed its state."""
    submitted = [str(t) for r in runs if (t := r.config.get("submission", {}).get("time"))]
    ended = [t for r in runs if (t := _moment(r.state.get("time"))) is not None]
    first = min(submitted, default="")[:16].replace("T", " ")
    last = f"{max(ended):%Y-%m-%d %H:%M}" if ended else ""
    return " to ".join(filter(None, (first, last))) + " UTC"


def _moment(seconds: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (TypeError, ValueError, OverflowError, OSError):  # not as slurmft writes it
        return None
