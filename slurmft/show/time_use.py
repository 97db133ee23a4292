"""Where the time of runs went, as a line or a table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.core.text import ScreenColumn, duration, on_screen, shown_with_end

LABELS = {
    "steps_s": "ETTR",
    "queue_s": "queue",
    "start_s": "start",
    "lost_s": "lost",
    "saves_s": "saves",
    "evaluations_s": "eval",
    "waits_s": "waits",
    "hangs_s": "hangs",
    "program_s": "program",
}
"""Part -> head of its column. The steps that count are the ETTR."""
_TENTHS = 1000
"""Of a percent, in all."""


def shares(use: Mapping[str, Any]) -> dict[str, float]:
    """Returns the parts in percent, with one decimal: they add up to 100. No time has no parts."""
    total_s = sum(use[key] for key in LABELS)
    if not total_s:
        return {}
    exact = {key: _TENTHS * use[key] / total_s for key in LABELS}
    tenths = {key: math.floor(value) for key, value in exact.items()}
    # What was rounded off goes to the parts that lost most by it.
    by_rest = sorted(exact, key=lambda key: tenths[key] - exact[key])
    for key in by_rest[: _TENTHS - sum(tenths.values())]:
        tenths[key] += 1
    return {key: value / 10 for key, value in tenths.items()}


def ettr(percents: Mapping[str, float]) -> str:
    """Returns the ETTR of shares: "83.2"; "≥ 16.7" beside a program that does not tell its steps;
    "" where it is unknown, as of such a program alone."""
    if not percents:
        return ""
    text = f"{percents['steps_s']:.1f}"
    if not percents["program_s"]:
        return text
    if not percents["steps_s"]:
        return ""
    return f"≥ {text}"


def words(use: Mapping[str, Any]) -> str:
    """ "ETTR 83.2 % of 2:05:00 h; queue 10.1 %, start 6.7 %"; "" where no time has passed."""
    percents = shares(use)
    if not percents:
        return ""
    parts = []
    for key, percent in percents.items():
        if percent and key != "steps_s":
            parts.append(f"{LABELS[key]} {percent:.1f} %")
    head = duration(use["total_s"])
    share = ettr(percents)
    # It may be unknown before the program has run.
    is_known = use["ettr"] is not None or use["steps_s"]
    if share and is_known:
        head = f"ETTR {share} % of {head}"
    if not parts:
        return head
    return f"{head}; {', '.join(parts)}"


def table(
    name: str, names: Sequence[str], uses: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Returns a line for each run or attempt, as the terminal has room for it.

    Args:
        name: head of the first column.
    """
    all_shares = [shares(use) for use in uses]
    times = [duration(sum(use[key] for key in LABELS)) for use in uses]
    columns = [
        # Of a run's name, the end tells it from others.
        ScreenColumn(name, names, 0, 26, shown_with_end),
        ScreenColumn("time", times),
    ]
    for rank, (key, label) in enumerate(LABELS.items()):
        cells = []
        for use, percents in zip(uses, all_shares, strict=True):
            cell = _cell(key, percents)
            # A prediction has no ETTR; an attempt does not say whether its run is one.
            if key == "steps_s" and not use[key] and use.get("ettr", 0.0) is None:
                cell = "unknown"
            cells.append(cell)
        columns.append(ScreenColumn(label, cells, rank))
    return on_screen(columns)


def _cell(key: str, percents: Mapping[str, float]) -> str:
    if not percents:
        return "-"
    text = f"{percents[key]:.1f}"
    if key == "steps_s":
        text = ettr(percents)
        if not text:
            return "unknown"
    # Of a column without any value nothing is shown.
    elif not percents[key]:
        return "-"
    return f"{text} %"
