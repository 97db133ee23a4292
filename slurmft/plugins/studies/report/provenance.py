"""Provenance of measurements: commands, code, versions, hosts, dates, and what changed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from slurmft.core.run_files import Rank
from slurmft.core.text import shown, some
from slurmft.plugins.studies.report.measures import Row, label
from slurmft.runs.scan import MeasuredRun

_MOST = 3
"""Values of a kind that are listed; the others are counted."""
_LONGEST = 160

Reader = Callable[[MeasuredRun], str]
"""Reads one fact of a run; "": it has none."""

_VERSIONS = ("slurmft", "torch", "transformers", "accelerate", "datasets")


def origins(rows: Sequence[Row]) -> list[str]:
    """Lines on commands, versions, places and dates of the rows' runs."""
    runs = [run for row in rows for run in row.runs]
    if not runs:
        return []
    commands = _values(runs, lambda run: str(run.config["submission"].get("command", "")))
    known = {name: _values(runs, _version_of(name)) for name in ("python", *_VERSIONS)}
    versions = (f"{name} {' and '.join(values)}" for name, values in known.items() if values)
    hosts = list(dict.fromkeys(host for run in runs for host in run.hosts))
    lines = [
        f"runs: {len(runs)}, {sum(run.is_finished for run in runs)} finished; {_dates(runs)}",
        f"commands: {some([shown(command, _LONGEST) for command in commands], _MOST)}",
        f"code: slurmft {some(_values(runs, lambda run: run.code), _MOST)}",
        f"versions: {', '.join(versions)}",
        f"hosts: {some(hosts, _MOST)}",
        f"devices: {some(_values(runs, _device), _MOST)}",
    ]
    return [line for line in lines if not line.endswith(": ")]


def changes(rows: Sequence[Row], fields: Sequence[str]) -> Iterator[str]:
    """What changed between runs, and in which rows: those are not comparable with the others."""
    for what, reader in readers([run for row in rows for run in row.runs]).items():
        found: dict[str, list[str]] = {}
        for row in rows:
            for value in _values(row.runs, reader):
                found.setdefault(value, []).append(label(row, fields))
        if len(found) > 1:
            kept = max(found, key=lambda v: len(found[v]))
            parts = [f"{v} in {some(found[v], _MOST, '; ')}" for v in found if v != kept]
            yield f"CHANGED between runs: {what}: {kept} in most, {', '.join(parts)}"


def readers(runs: Sequence[MeasuredRun]) -> dict[str, Reader]:
    """What these runs recorded of where they ran: name -> what reads it from a run."""
    packages = sorted({p for run in runs for p in run.environment.versions})
    return {
        "code": lambda run: run.code,
        "devices": _device,
        **{name: _version_of(name) for name in ("python", *packages)},
    }


def of_ranks(key: str) -> Reader:
    """The distinct values of a run's ranks."""
    return lambda run: ", ".join(
        dict.fromkeys(_of_rank(rank, key) for rank in run.environment.ranks)
    )


def _of_rank(rank: Rank, key: str) -> str:
    value = getattr(rank, key)
    return "unknown" if value is None else str(value)


_device = of_ranks("device")


def _version_of(package: str) -> Reader:
    """Of a package, or of Python."""
    return lambda run: str(
        run.environment.versions.get(package, run.environment.python if package == "python" else "")
    )


def _values(runs: Sequence[MeasuredRun], reader: Reader) -> list[str]:
    """The distinct values of the runs, without empty ones."""
    return [value for value in dict.fromkeys(map(reader, runs)) if value]


def _dates(runs: Sequence[MeasuredRun]) -> str:
    """From the first submission to the last change of state."""
    first = min(filter(None, (r.config["submission"].get("time") for r in runs)), default="")
    dates = [first[:16].replace("T", " ")]
    with contextlib.suppress(ValueError, OverflowError, OSError):  # not as slurmft writes it
        last = datetime.fromtimestamp(max(run.state.time for run in runs), UTC)
        dates.append(f"{last:%Y-%m-%d %H:%M}")
    return " to ".join(filter(None, dates)) + " UTC"
