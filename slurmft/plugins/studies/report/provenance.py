"""Provenance of measurements: commands, code, versions, hosts, dates, and changes between runs."""

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
    """Returns lines on commands, versions, hosts and dates of the rows' runs."""
    runs = [run for row in rows for run in row.runs]
    if not runs:
        return []
    commands = _values(runs, lambda run: str(run.config["submission"].get("command", "")))
    versions = []
    for name in ("python", *_VERSIONS):
        values = _values(runs, _version_of(name))
        if values:
            versions.append(f"{name} {' and '.join(values)}")
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
    """Yields what changed between runs, and in which rows: those cannot be compared with others."""
    runs = [run for row in rows for run in row.runs]
    for fact, reader in readers(runs).items():
        rows_with: dict[str, list[str]] = {}
        for row in rows:
            for value in _values(row.runs, reader):
                rows_with.setdefault(value, []).append(label(row, fields))
        if len(rows_with) <= 1:
            continue
        usual = max(rows_with, key=lambda value: len(rows_with[value]))
        exceptions = [
            f"{value} in {some(labels, _MOST, '; ')}"
            for value, labels in rows_with.items()
            if value != usual
        ]
        yield f"CHANGED between runs: {fact}: {usual} in most, {', '.join(exceptions)}"


def readers(runs: Sequence[MeasuredRun]) -> dict[str, Reader]:
    """Returns name -> reader, for all that these runs recorded of where they ran."""
    packages = sorted({p for run in runs for p in run.environment.versions})
    return {
        "code": lambda run: run.code,
        "devices": _device,
        **{name: _version_of(name) for name in ("python", *packages)},
    }


def of_ranks(key: str) -> Reader:
    """Returns a reader of the distinct values of a run's ranks."""
    return lambda run: ", ".join(
        dict.fromkeys(_of_rank(rank, key) for rank in run.environment.ranks)
    )


def _of_rank(rank: Rank, key: str) -> str:
    value = getattr(rank, key)
    return "unknown" if value is None else str(value)


_device = of_ranks("device")


def _version_of(package: str) -> Reader:
    """Returns a reader of the version of a package, or of Python."""
    return lambda run: str(
        run.environment.versions.get(package, run.environment.python if package == "python" else "")
    )


def _values(runs: Sequence[MeasuredRun], reader: Reader) -> list[str]:
    """Returns the distinct values of the runs, without empty ones."""
    return [value for value in dict.fromkeys(map(reader, runs)) if value]


def _dates(runs: Sequence[MeasuredRun]) -> str:
    """Returns the dates of the first submission and of the last change of state."""
    first = min(filter(None, (r.config["submission"].get("time") for r in runs)), default="")
    dates = [first[:16].replace("T", " ")]
    with contextlib.suppress(ValueError, OverflowError, OSError):  # not as slurmft writes it
        last = datetime.fromtimestamp(max(run.state.time for run in runs), UTC)
        dates.append(f"{last:%Y-%m-%d %H:%M}")
    return " to ".join(filter(None, dates)) + " UTC"
