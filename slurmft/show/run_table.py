"""The table of `slurmft list`: a line for every run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.core.config import STAMP
from slurmft.core.text import (
    ScreenColumn,
    brief,
    duration,
    on_screen,
    screen_width,
    shown_parts,
    shown_with_end,
)
from slurmft.show.progress import metrics_words
from slurmft.show.status_words import UNSUCCESSFUL, note

_WIDE_SCREEN = 80
_MOST_RESULT_WIDTH = 26
"""Characters for which other columns are left out, as "spearman_cosine 0.8123" needs."""


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for every run; of the columns, those that the terminal has room for."""
    names = _short_names([run["name"] for run in runs])
    users = [str(run["user"] or "-") for run in runs]
    # A column without any value is left out: one's own name in each line tells nothing.
    if len(set(users)) == 1:
        users = ["-"] * len(runs)
    # "-" is what the table takes for no value: see `on_screen`.
    jobs = [str(run["job"] or "-") for run in runs]
    states = [run["state"] for run in runs]
    # Data that is generated has no name: the task says what it is.
    sources = [run["data"] or run["task"] for run in runs]
    data = [_last_part(source) for source in sources]
    models = [_last_part(run["model"]) for run in runs]
    steps = [_steps(run) for run in runs]
    speeds = [_speed(run) for run in runs]
    times_left = [_time_left(run) for run in runs]
    results = [_result(run) for run in runs]
    least_result_width = _least_result_width(runs)
    # Ranks: what tells runs apart and how they end stays; the columns of the highest go first.
    columns = [
        ScreenColumn("run", names, 0, 26, shown_with_end),
        ScreenColumn("user", users, 4),
        ScreenColumn("job", jobs, 5),
        ScreenColumn("state", states),
        ScreenColumn("data", data, 1, 12),
        ScreenColumn("model", models, 2, 8),
        ScreenColumn("steps", steps, 3),
        ScreenColumn("samples/s", speeds, 7),
        ScreenColumn("left", times_left, 6),
        ScreenColumn("result", results, 0, least_result_width, shown_parts),
    ]
    return "\n".join(on_screen(columns))


def _least_result_width(runs: Sequence[Mapping[str, Any]]) -> int:
    """Returns the room that results need: the first metric, which decides, is whole."""
    # A narrow terminal has fewer columns, and so more room for the result.
    least = 20
    if screen_width() >= _WIDE_SCREEN:
        least = 15
    for run in runs:
        first, *_ = metrics_words(run["metrics"]).split("  ")
        least = max(least, len(first))
    return min(least, _MOST_RESULT_WIDTH)


def _short_names(names: Sequence[str]) -> list[str]:
    """Leaves out the random part of names that are told apart by their time."""
    candidates = []
    for name in names:
        candidate = name
        # A folder that was renamed may have no time, and then no random part.
        if STAMP.search(name):
            candidate, _, _ = name.rpartition("-")
        candidates.append(candidate)
    counts = Counter(candidates)
    short_names = []
    for candidate, name in zip(candidates, names, strict=True):
        # Runs that a script submits in one second differ in the random part alone.
        if counts[candidate] > 1:
            candidate = name
        short_names.append(candidate)
    return short_names


def _last_part(source: str | None) -> str:
    """Returns the name of a model or of data without its owner on the hub, or its folders."""
    path = source or "-"
    _, _, name = path.rstrip("/").rpartition("/")
    return name


def _steps(run: Mapping[str, Any]) -> str:
    total = run["steps_total"]
    if not total:
        return "-"
    return f"{run['steps_done']}/{total}"


def _speed(run: Mapping[str, Any]) -> str:
    samples_per_s = run["samples_per_s"]
    if samples_per_s is None:
        return "-"
    return f"{samples_per_s:,.0f}"


def _time_left(run: Mapping[str, Any]) -> str:
    left_s = run["left_s"]
    # Of a run that has finished it is 0, which its state says already.
    if not left_s:
        return "-"
    return duration(left_s)


def _result(run: Mapping[str, Any]) -> str:
    """Returns what a run has reached; of one that failed, why comes first."""
    metrics = metrics_words(run["metrics"])
    reason = brief(note(run))
    parts = [metrics, reason]
    # The cell may be cut at its end.
    if run["state"] in UNSUCCESSFUL:
        parts.reverse()
    text = "; ".join(part for part in parts if part)
    return text or "-"
