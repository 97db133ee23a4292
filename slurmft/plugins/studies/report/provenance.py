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
    commands = [
        shown(command, _LONGEST) for command in _values(runs, lambda run: run.submission.command)
    ]
    versions = []
    for name in ("python", *_VERSIONS):
        values = _values(runs, _version_of(name))
        if values:
            versions.append(f"{name} {' and '.join(values)}")
    hosts = list(dict.fromkeys(host for run in runs for host in run.hosts))
    finished_count = sum(run.is_finished for run in runs)
    lines = [
        f"runs: {len(runs)}, {finished_count} finished; {_dates(runs)}",
        f"commands: {some(commands, _MOST)}",
        f"code: slurmft {some(_values(runs, lambda run: run.code), _MOST)}",
        f"versions: {', '.join(versions)}",
        f"hosts: {some(hosts, _MOST)}",
        f"devices: {some(_values(runs, _device), _MOST)}",
    ]
    return [line for line in lines if not line.endswith(": ")]  # of these nothing is known


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
        exceptions = []
        for value, labels in rows_with.items():
            if value != usual:
                exceptions.append(f"{value} in {some(labels, _MOST, '; ')}")
        yield f"CHANGED between runs: {fact}: {usual} in most, {', '.join(exceptions)}"


def readers(runs: Sequence[MeasuredRun]) -> dict[str, Reader]:
    """Returns name -> reader, for all that these runs recorded of where they ran."""
    packages = {package for run in runs for package in run.environment.versions}
    readers_of: dict[str, Reader] = {"code": lambda run: run.code, "devices": _device}
    for name in ("python", *sorted(packages)):
        readers_of[name] = _version_of(name)
    return readers_of


def of_ranks(key: str) -> Reader:
    """Returns a reader of the distinct values of a run's ranks."""

    def read(run: MeasuredRun) -> str:
        values = [_of_rank(rank, key) for rank in run.environment.ranks]
        return ", ".join(dict.fromkeys(values))

    return read


def _of_rank(rank: Rank, key: str) -> str:
    value = getattr(rank, key)
    return "unknown" if value is None else str(value)


_device = of_ranks("device")


def _version_of(package: str) -> Reader:
    """Returns a reader of the version of a package, or of Python."""

    def read(run: MeasuredRun) -> str:
        environment = run.environment
        # Python is no package: a run records its version apart from theirs.
        default = environment.python if package == "python" else ""
        return str(environment.versions.get(package, default))

    return read


def _values(runs: Sequence[MeasuredRun], reader: Reader) -> list[str]:
    """Returns the distinct values of the runs, without empty ones."""
    values = dict.fromkeys(reader(run) for run in runs)
    return [value for value in values if value]


def _dates(runs: Sequence[MeasuredRun]) -> str:
    """Returns the dates of the first submission and of the last change of state."""
    submitted = [run.submission.time for run in runs]
    # Texts in ISO 8601, in UTC: the smallest is the first. To the minute.
    first = min(filter(None, submitted), default="")
    dates = [first[:16].replace("T", " ")]
    # The clock of a node may be absurd, or the file edited: no date is better than no report.
    with contextlib.suppress(ValueError, OverflowError, OSError):
        last = datetime.fromtimestamp(max(run.state.time for run in runs), UTC)
        dates.append(f"{last:%Y-%m-%d %H:%M}")
    return " to ".join(filter(None, dates)) + " UTC"
