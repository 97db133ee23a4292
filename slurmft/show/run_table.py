"""The table of `slurmft list`: a line for every run."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from slurmft.core.config import STAMP
from slurmft.core.text import ScreenColumn, brief, duration, on_screen, screen_width
from slurmft.show.progress import metrics_words
from slurmft.show.status_words import UNSUCCESSFUL, note

_WIDE_SCREEN = 80


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Returns a line for every run; of the columns, those that the terminal has room for."""
    users = [str(run["user"] or "-") for run in runs]
    # A column without any value is left out: one's own name in each line tells nothing.
    if len(set(users)) == 1:
        users = ["-"] * len(runs)
    least_result_width = 15 if screen_width() >= _WIDE_SCREEN else 20
    columns = [
        ScreenColumn("run", _short_names([run["name"] for run in runs]), 0, 26),
        ScreenColumn("user", users, 4),
        ScreenColumn("job", [str(run["job"] or "-") for run in runs], 5),
        ScreenColumn("state", [run["state"] for run in runs]),
        ScreenColumn("data", [_last_part(run["data"] or run["task"]) for run in runs], 1, 12),
        ScreenColumn("model", [_last_part(run["model"]) for run in runs], 2, 8),
        ScreenColumn("steps", [_steps(run) for run in runs], 3),
        ScreenColumn("samples/s", [_speed(run) for run in runs], 7),
        ScreenColumn("left", [_time_left(run) for run in runs], 6),
        ScreenColumn("result", [_result(run) for run in runs], 0, least_result_width),
    ]
    return "\n".join(on_screen(columns))


def _short_names(names: Sequence[str]) -> list[str]:
    """Leaves out the random part of names that are told apart by their time."""
    candidates = []
    for name in names:
        # A folder that was renamed may have no time, and then no random part.
        short = name.rpartition("-")[0] if STAMP.search(name) else name
        candidates.append(short)
    counts = Counter(candidates)
    short_names = []
    for short, name in zip(candidates, names, strict=True):
        short_names.append(short if counts[short] == 1 else name)
    return short_names


def _last_part(source: str | None) -> str:
    return (source or "-").rstrip("/").rpartition("/")[2]


def _steps(run: dict[str, Any]) -> str:
    if not run["steps_total"]:
        return "-"
    return f"{run['steps_done']}/{run['steps_total']}"


def _speed(run: dict[str, Any]) -> str:
    samples_per_s = run["samples_per_s"]
    if samples_per_s is None:
        return "-"
    return f"{samples_per_s:,.0f}"


def _time_left(run: dict[str, Any]) -> str:
    if not run["left_s"]:
        return "-"
    return duration(run["left_s"])


def _result(run: dict[str, Any]) -> str:
    """Returns what a run has reached; of one that failed, why comes first."""
    parts = [metrics_words(run["metrics"]), brief(note(run))]
    # The cell may be cut at its end.
    if run["state"] in UNSUCCESSFUL:
        parts.reverse()
    text = "; ".join(part for part in parts if part)
    return text or "-"
