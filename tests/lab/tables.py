"""The tables of docs/file-locks.md, from what the labs found."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support import CHECKOUT

FOLDER = CHECKOUT / "results" / "measured" / "file_systems"
"""NAME.json is what the lab NAME found."""

Found = dict[str, Any]
Column = tuple[str, Callable[[Found], str]]


def load(path: Path) -> Found:
    """What was found before; empty: nothing."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def load_all(folder: Path = FOLDER) -> list[Found]:
    return [load(path) for path in sorted(folder.glob("*.json"))]


def tables(found: Sequence[Found]) -> list[str]:
    """Both tables in Markdown, one row for each lab."""
    return [_table(found, _LOCKS), _table(found, _FILES)]


def _table(found: Sequence[Found], columns: Sequence[Column]) -> str:
    rows = [[title for title, _ in columns], ["---"] * len(columns)]
    rows += [[_cell(column, one) for _, column in columns] for one in found]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(column: Callable[[Found], str], one: Found) -> str:
    try:
        return column(one)
    except KeyError:  # that check was not made
        return "not shown"


# --- locks ----------------------------------------------------------------------------------------


def _name(one: Found) -> str:
    return f"{one['file_system_name']} {one['version']}; {one['options']}; {one['date']}"


def _lock(kind: str) -> Callable[[Found], str]:
    def told(one: Found) -> str:
        held = one["locks"]["holds"][kind]
        if held.get("error"):
            return str(held["error"])
        if not held["between_nodes"]:
            return "**node-local**" if held["on_node"] else "**excludes nobody**"
        stays = held["exit_s"] is None or held["kill_s"] is None
        return "holds; **stays after a kill**" if stays else "holds"

    return told


def _choice(one: Found) -> str:
    return str(one["locks"]["choice"])


def _trap(kind: str) -> Callable[[Found], str]:
    def told(one: Found) -> str:
        found = one["traps"]
        if kind not in found["kinds"]:
            return "no lock holds"
        metric, hub = found["evaluate"][kind], found["hub"][kind]
        right = "right" if metric == found["right"] else "**wrong or an error**"
        fetched = {1: "fetched once"}.get(hub["fetched"], f"**fetched {hub['fetched']} times**")
        return f"{right}; {fetched}{'; **' + hub['problems'][0] + '**' if hub['problems'] else ''}"

    return told


def _network(one: Found) -> str:
    found = one["cut"]
    if "freed_after_s" not in found or found["other"] != "got":
        freed = "kept for more than 400 s"
    else:
        freed = f"goes to others after {found['freed_after_s']} s"
    return f"{freed}; its holder then: {found['holder']}"


_LOCKS: list[Column] = [
    ("file system; options; date", _name),
    ("flock", _lock("flock")),
    ("lockf", _lock("lockf")),
    ("OFD", _lock("ofd")),
    ("choice", _choice),
    ("evaluate; hub, with flock", _trap("flock")),
    ("the same with the shim", _trap("measured")),
    ("a lock whose node loses its network", _network),
]

# --- files ----------------------------------------------------------------------------------------


def _replaced(one: Found) -> str:
    seen = one["renames"]["plain"]
    bad = [f"**{seen[what]} times {what}**" for what in ("torn", "older") if seen[what]]
    if seen["errors"]:
        bad.append(f"**{', '.join(seen['errors'])}** for {_time(seen['gap_s'])}")
    return ", ".join(bad) or "old or new"


def _first(one: Found) -> str:
    found = one["exclusive"].items()
    wrong = [kind for kind, f in found if f.get("error") or f["both"] or f["none"]]
    return f"**not: {', '.join(wrong)}**" if wrong else "one"


def _visible(what: str) -> Callable[[Found], str]:
    def told(one: Found) -> str:
        seen = one["visibility"][what]
        return seen if isinstance(seen, str) else spread(seen)

    return told


def _checkpoints(seen: dict[str, str], step: int) -> str:
    return seen.get(f"step-{step:08d}", "absent")


def _restart(one: Found) -> str:
    found = one["restart"]
    writer = found["writer"]
    said = writer["error"] or f"goes on, {writer['seconds']:.0f} s"
    return f"{_checkpoints(found['seen'], 2)} ({said})"


def _quota(one: Found) -> str:
    found = one["quota"]
    if "not shown" in found:
        return "not shown"
    left = f", **{len(found['leftovers'])} left**" if found["leftovers"] else ""
    return f"{_checkpoints(found['seen'], 2)} ({found['full']['error']}){left}"


def _cut(one: Found) -> str:
    found = one["cut"]
    said = found["writer"]["error"] or f"goes on, {found['writer']['seconds']:.0f} s"
    return f"{_checkpoints(found['seen'], 1)} ({said})"


_FILES: list[Column] = [
    ("file system", lambda one: f"{one['file_system_name']} {one['version']}"),
    ("replaced file, while read", _replaced),
    ("first to create", _first),
    ("new file seen after", _visible("new")),
    ("in a listing", _visible("listed")),
    ("changed file", _visible("changed")),
    ("appended line", _visible("appended")),
    ("checkpoint, server down for 5 s", _restart),
    ("checkpoint, quota full", _quota),
    ("checkpoint, network lost", _cut),
]


def spread(seconds: Iterable[float]) -> str:
    """Median and largest: 3 ms, at most 12 ms."""
    values = list(seconds)
    return f"{_time(statistics.median(values))}, at most {_time(max(values))}"


def _time(seconds: float) -> str:
    return f"{max(1.0, 1000 * seconds):.0f} ms" if seconds < 0.95 else f"{seconds:.1f} s"
