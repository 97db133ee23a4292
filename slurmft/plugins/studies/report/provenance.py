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
"""Characters of a command that are shown."""

Reader = Callable[[MeasuredRun], str]
"""Reads one fact of a run; "": it has none."""

_VERSIONS = ("slurmft", "torch", "transformers", "accelerate", "datasets")
"""Packages that are listed; of the others a report says only that their version changed."""


def origins(rows: Sequence[Row]) -> list[str]:
    """Returns lines on commands, versions, hosts and dates of the rows' runs."""
    runs = _runs_of(rows)
    if not runs:
        return []
    commands = _values(runs, _command)
    short_commands = [shown(command, _LONGEST) for command in commands]
    versions = []
    for name in ("python", *_VERSIONS):
        values = _values(runs, _version_of(name))
        if values:
            joined = " and ".join(values)
            versions.append(f"{name} {joined}")
    hosts: dict[str, None] = {}
    for run in runs:
        hosts |= dict.fromkeys(run.hosts)
    codes = _values(runs, _code)
    devices = _values(runs, _device)
    finished_count = sum(run.is_finished for run in runs)
    dates = _dates(runs)
    all_versions = ", ".join(versions)
    lines = [
        f"runs: {len(runs)}, {finished_count} finished; {dates}",
        f"commands: {some(short_commands, _MOST)}",
        f"code: slurmft {some(codes, _MOST)}",
        f"versions: {all_versions}",
        f"hosts: {some(list(hosts), _MOST)}",
        f"devices: {some(devices, _MOST)}",
    ]
    # Runs that ended before their ranks met have no versions, hosts or devices.
    return [line for line in lines if not line.endswith(": ")]


def _runs_of(rows: Sequence[Row]) -> list[MeasuredRun]:
    runs: list[MeasuredRun] = []
    for row in rows:
        runs += row.runs
    return runs


def _command(run: MeasuredRun) -> str:
    return run.submission.command


def _code(run: MeasuredRun) -> str:
    return run.code


def changes(rows: Sequence[Row], fields: Sequence[str]) -> Iterator[str]:
    """Yields what changed between runs, and in which rows: those cannot be compared with others."""
    for fact, reader in readers(_runs_of(rows)).items():
        rows_with: dict[str, list[str]] = {}
        for row in rows:
            # A row whose repeats differ in it stands at each of their values.
            for value in _values(row.runs, reader):
                labels = rows_with.setdefault(value, [])
                labels.append(label(row, fields))
        if len(rows_with) <= 1:
            continue
        counts = {value: len(labels) for value, labels in rows_with.items()}
        # What most rows have is taken for the usual value: a report names the few others.
        usual = max(counts, key=counts.__getitem__)
        exceptions = []
        for value, labels in rows_with.items():
            if value != usual:
                places = some(labels, _MOST, "; ")  # a label has commas itself
                exceptions.append(f"{value} in {places}")
        all_exceptions = ", ".join(exceptions)
        yield f"CHANGED between runs: {fact}: {usual} in most, {all_exceptions}"


def readers(runs: Sequence[MeasuredRun]) -> dict[str, Reader]:
    """Returns name -> reader, for all that these runs recorded of where they ran."""
    packages: set[str] = set()
    for run in runs:
        packages.update(run.environment.versions)
    readers_of: dict[str, Reader] = {"code": _code, "devices": _device}
    # Sorted: a set has no order, and the same runs are to give the same report.
    for name in ("python", *sorted(packages)):
        readers_of[name] = _version_of(name)
    return readers_of


def of_ranks(key: str) -> Reader:
    """Returns a reader of the distinct values of a run's ranks."""

    def read(run: MeasuredRun) -> str:
        values: dict[str, None] = {}  # in the order of the ranks: a set has none
        for rank in run.environment.ranks:
            values[_of_rank(rank, key)] = None
        return ", ".join(values)

    return read


def _of_rank(rank: Rank, key: str) -> str:
    value = getattr(rank, key)
    if value is None:
        return "unknown"
    return str(value)


_device = of_ranks("device")


def _version_of(package: str) -> Reader:
    """Returns a reader of the version of a package, or of Python."""

    def read(run: MeasuredRun) -> str:
        environment = run.environment
        # Python is no package: a run records its version apart from theirs.
        version = environment.versions.get(package)
        if package == "python":
            version = environment.python
        # A run that ended before its ranks met has none: it changed nothing.
        return version or ""

    return read


def _values(runs: Sequence[MeasuredRun], reader: Reader) -> list[str]:
    """Returns the distinct values of the runs, without empty ones."""
    values: dict[str, None] = {}
    for run in runs:
        values[reader(run)] = None
    return [value for value in values if value]


def _dates(runs: Sequence[MeasuredRun]) -> str:
    """Returns the dates of the first submission and of the last change of state."""
    submitted = [run.submission.time for run in runs]
    # Texts in ISO 8601, in UTC: the smallest is the first. To the minute.
    first = min(filter(None, submitted), default="")
    dates = [first[:16].replace("T", " ")]
    last_s = max(run.state.time for run in runs)
    # The clock of a node may be absurd, or the file edited: no date is better than no report.
    with contextlib.suppress(ValueError, OverflowError, OSError):
        last = datetime.fromtimestamp(last_s, UTC)
        dates.append(f"{last:%Y-%m-%d %H:%M}")
    known_dates = [date for date in dates if date]
    return " to ".join(known_dates) + " UTC"
