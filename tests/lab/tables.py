"""The tables of docs/file-locks.md, from what the labs found."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support import CHECKOUT

FOLDER = CHECKOUT / "results" / "measured" / "file_systems"
"""NAME.json is what the lab NAME found."""
PAGE = CHECKOUT / "docs" / "file-locks.md"
_PLACE = re.compile(r"(<!-- labs -->\n).*?(<!-- end of labs -->\n)", re.DOTALL)

_NOT_SHOWN = "not shown"

Found = dict[str, Any]
Cell = Callable[[Found], str]


def load(path: Path) -> Found:
    """What was found before; empty: nothing."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def page(text: str, folder: Path = FOLDER) -> str:
    """The page with the tables of all labs."""
    found = [load(path) for path in sorted(folder.glob("*.json"), key=_stem)]
    tables = "\n".join(
        f"\n{_table(found, columns)}" for columns in (_LOCKS, _FILES, _FAULTS)
    )
    return _PLACE.sub(lambda place: f"{place[1]}{tables}\n{place[2]}", text)


def _stem(path: Path) -> str:
    return path.stem


def _table(found: Sequence[Found], columns: dict[str, Cell]) -> str:
    rows = [["file system", *columns], ["---"] * (1 + len(columns))]
    for one in found:
        name = f"{one['file_system_name']} {one['version']}, {one['options']}"
        cells = [_cell(column, one) for column in columns.values()]
        if set(cells) != {_NOT_SHOWN}:
            rows.append([name, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(column: Cell, one: Found) -> str:
    try:
        return column(one)
    except KeyError:  # that check was not made
        return _NOT_SHOWN


# --- locks ----------------------------------------------------------------------------------------


def _lock(kind: str) -> Cell:
    def told(one: Found) -> str:
        held = one["locks"]["holds"][kind]
        if held.get("error"):
            return str(held["error"])
        if not held["between_nodes"]:
            return "**one node only**" if held["on_node"] else "**excludes nobody**"
        return "holds; **stays after a kill**" if None in _ends(held) else "holds"

    return told


def _ends(held: Found) -> list[float | None]:
    return [held["exit_s"], held["kill_s"]]


def _choice(one: Found) -> str:
    return str(one["locks"]["choice"])


def _trap(kind: str) -> Cell:
    def told(one: Found) -> str:
        found = one["traps"]
        if kind not in found["kinds"]:
            return "no lock holds"
        right = found["evaluate"][kind] == found["right"]
        hub = found["hub"][kind]
        words = ["right" if right else "**wrong**", f"{hub['fetched']}"]
        words += ["**damaged**"] if hub["problems"] else []
        return ", ".join(words)

    return told


_LOCKS: dict[str, Cell] = {
    "flock": _lock("flock"),
    "lockf": _lock("lockf"),
    "OFD": _lock("ofd"),
    "the probe's choice": _choice,
    "metric, downloads: with flock": _trap("flock"),
    "with the shim": _trap("measured"),
    "not measured before": _trap("unmeasured"),
    "date": lambda one: str(one["date"]),
}

# --- files ----------------------------------------------------------------------------------------


def _replaced(one: Found) -> str:
    seen = one["renames"]["plain"]
    bad = [f"**{what}**" for what in ("torn", "older") if seen[what]]
    bad += [f"**{name}**" for name in seen["errors"]]
    return ", ".join(bad) or "old or new"


def _gap(one: Found) -> str:
    return _time(one["renames"]["plain"]["gap_s"])


def _first(one: Found) -> str:
    found = one["exclusive"].items()
    wrong = [kind for kind, f in found if f.get("error") or f["both"] or f["none"]]
    return f"**not by {', '.join(wrong)}**" if wrong else "yes"


def _visible(what: str) -> Cell:
    def told(one: Found) -> str:
        seen = one["visibility"][what]
        return seen if isinstance(seen, str) else spread(seen)

    return told


_FILES: dict[str, Cell] = {
    "a reader of a file that is replaced sees": _replaced,
    "longest time without it": _gap,
    "one node alone creates a name": _first,
    "a small file is written in": _visible("write"),
    "seen after: new file": _visible("new"),
    "awaited as slurmft does": _visible("looked for"),
    "in a listing": _visible("listed"),
    "replaced": _visible("changed"),
    "appended": _visible("appended"),
}

# --- faults ---------------------------------------------------------------------------------------


def _checkpoint(check: str, step: int, writer: str = "writer") -> Cell:
    """Whether a checkpoint whose writing was disturbed is there, and what its writer was told."""

    def told(one: Found) -> str:
        found = one[check]
        if "not shown" in found:
            return _NOT_SHOWN
        seen = found["seen"]
        there = "not seen" if _is_gone(seen) else seen.get(f"step-{step:08d}", "absent")
        error, seconds = found[writer]["error"], found[writer]["seconds"]
        left = ", **parts left**" if found.get("leftovers") else ""
        outcome = error.split(":")[0] if error else "no error"
        return f"{there}, {outcome} after {seconds:.0f} s{left}"

    return told


def _is_gone(seen: Any) -> bool:
    """Whether the other node did not answer any more: a cluster of OCFS2 resets nodes."""
    return isinstance(seen, str)


def _lost_lock(one: Found) -> str:
    found = one["cut"]
    if _is_gone(found["seen"]):
        return "**the other node is reset**"
    freed = found["other"] == "got"
    return f"after {found['freed_after_s']} s" if freed else "**not within 400 s**"


def _lost_holder(one: Found) -> str:
    found = one["cut"]
    if found["other"] != "got":
        return "still holds it"
    unaware = found["holder"] == "written"
    return (
        "**believes it holds it**"
        if unaware
        else f"told: {found['holder'].split(':')[0]}"
    )


def _again(one: Found) -> str:
    said = str(one["cut"]["again"])
    return "yes" if said == "written" else f"**no, {said.split(':')[0]}**"


def _run(one: Found) -> str:
    found = one["run"]
    end = "finished" if found["finished"] else f"**exit code {found['exit']}**"
    return f"{end}, {found['steps_lost']} steps lost"


_FAULTS: dict[str, Cell] = {
    "run, server down for 5 s": _run,
    "checkpoint, server down for 5 s": _checkpoint("restart", 2),
    "checkpoint, quota full": _checkpoint("quota", 2, "full"),
    "checkpoint, network cut": _checkpoint("cut", 1),
    "others get the lock of a node without network": _lost_lock,
    "its holder, when the network is back": _lost_holder,
    "the node can write again": _again,
}


def spread(seconds: Iterable[float]) -> str:
    """Median and largest: 3 ms (12 ms)."""
    values = list(seconds)
    return f"{_time(statistics.median(values))} ({_time(max(values))})"


def _time(seconds: float) -> str:
    return (
        f"{max(1.0, 1000 * seconds):.0f} ms" if seconds < 0.95 else f"{seconds:.1f} s"
    )
