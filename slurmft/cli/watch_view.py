"""A run at a glance, drawn from its records: as one screen of text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmft.core.files import Shape, fits
from slurmft.core.terminal import plain
from slurmft.core.text import duration, number
from slurmft.runs import shapes
from slurmft.runs.progress import Record, describe
from slurmft.runs.records import Curve

_EVENTS_SHOWN = 4
_SPEED: Shape = {
    "total_steps": shapes.SOME, "loss": float, "samples_per_s": float, "left_s": float,
    "time": float,
}  # fmt: skip
"""What a step's record has that ends a window of the speed."""
_EVEN = 0.05
"""Ranks that differ by less in their own work are called even."""

Line = list[tuple[str, str]]
"""Texts with their styles: "", bold, dim, good, bad, notice."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What bars and curves are drawn with."""

    full: str
    empty: str
    levels: str


UNICODE = Glyphs("█", "░", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", ".", "_.-=+*%#")


@dataclass(frozen=True, slots=True)
class Rank:
    """What is known of one rank."""

    rank: int
    host: str
    own_ms: float
    """Its forward passes in one step, in which it waits for nobody."""
    memory_mib: int


def draw(points: Sequence[tuple[float, float]], width: int, levels: str) -> str:
    """A curve as one line of at most so many characters."""
    values, count = [value for _, value in points], len(points)
    width = min(width, count)
    if not width:
        return ""
    cells = [
        statistics.fmean(values[i * count // width : (i + 1) * count // width])
        for i in range(width)
    ]
    low, high = min(cells), max(cells)
    scale = (len(levels) - 1) / (high - low) if high > low else 0
    return "".join(levels[round((cell - low) * scale)] for cell in cells)


@dataclass
class RunView:
    """All that a screen shows of a run, as its records and the scheduler tell it."""

    name: str
    hosts: list[str] = field(default_factory=list)
    """By rank."""
    state: str = ""
    """Of the job, in words."""
    start: Record = field(default_factory=dict)
    step: Record = field(default_factory=dict)
    """The last record of a step that has speed and time left."""
    epoch: Record = field(default_factory=dict)
    evaluate: Record = field(default_factory=dict)
    """Progress of the evaluation under way."""
    ranks: list[Rank] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    losses: Curve = field(default_factory=Curve)

    def take(self, record: Record) -> None:
        """Takes up a record."""
        event = record.get("event")
        if event == "start":
            self.start = record
        elif event == "step":
            self._take_step(record)
        elif event == "ranks":
            rows = zip(record["own_ms"], record["memory_mib"], strict=False)
            self.ranks = [Rank(i, self._host(i), own, mib) for i, (own, mib) in enumerate(rows)]
        elif event == "evaluate":
            self.evaluate = record
        elif event == "epoch":
            self.epoch, self.evaluate = record, {}
        if text := describe(record):
            clock = time.strftime("%H:%M:%S", time.localtime(record.get("time", 0)))
            self.events = [*self.events, f"{clock} {text.splitlines()[0]}"][-_EVENTS_SHOWN:]

    def _take_step(self, record: Record) -> None:
        if record.get("loss") is not None:
            self.losses.add(record["step"], record["loss"])
        if fits(record, _SPEED):
            self.step, self.evaluate = record, {}

    def _host(self, rank: int) -> str:
        return self.hosts[rank] if rank < len(self.hosts) else "?"

    # --- what is made of it -----------------------------------------------------------------------

    @property
    def slowest(self) -> tuple[Rank, float] | None:
        """The rank that computes longest, and by what part longer than the median; None: there
        is nothing to compare."""
        median = statistics.median([r.own_ms for r in self.ranks] or [0.0])
        if len(self.ranks) < 2 or median <= 0:
            return None
        rank = max(self.ranks, key=lambda r: r.own_ms)
        return rank, rank.own_ms / median - 1

    def screen(self, width: int, height: int, glyphs: Glyphs, footer: str) -> list[Line]:
        """The lines of a screen: as many as its height at most, none wider than it."""
        lines = [*self._head(width), *self._training(width, glyphs)]
        tail: list[Line] = [[(text, "dim")] for text in self.events]
        tail += [[(footer, "dim")]] if footer else []
        room = height - len(lines) - len(tail) - 1
        lines += self._rank_table(width, room, glyphs)
        return [cut(line, width) for line in [*lines, *tail][:height]]

    def _head(self, width: int) -> list[Line]:
        lines: list[Line] = [[(self.name, "bold")], [(self.state, _style(self.state))]]
        if r := self.start:
            ranks = f"{r['world_size']} rank(s) on {r['nodes']} node(s)"
            size = f"batch {r['global_batch_size']}, {r['parameters'] / 1e6:.1f}M weights"
            text = f"{r['task']}: {ranks}, {r['precision']}, {r['backend']}, {size}"
            lines.append([(text, "")])
        return [*lines, []]

    def _training(self, width: int, glyphs: Glyphs) -> list[Line]:
        at = self.step
        if not at:
            return [[("no step done yet", "dim")], []]
        share = at["step"] / at["total_steps"]
        ends = time.strftime("%H:%M", time.localtime(at["time"] + at["left_s"]))
        speed = f"{at['samples_per_s']:,.0f} samples/s"
        if world_size := self.start.get("world_size"):
            speed += f", {at['samples_per_s'] / world_size:,.0f} per rank"
        text = f"{share:4.0%}  step {at['step']}/{at['total_steps']}, epoch {at['epoch']:.2f}"
        room = max(8, min(40, width - 10 - len(text)))
        loss = f"{number(at['loss'])}  "
        curve = draw(self.losses.points(), max(1, min(60, width - 8 - len(loss))), glyphs.levels)
        lines: list[Line] = [
            [("train   ", "bold"), (bar(share, room, glyphs), "good"), (f" {text}", "")],
            [("left    ", "bold"), (f"{duration(at['left_s'])} of training, until {ends}", "")],
            [("speed   ", "bold"), (speed, "")],
            [
                ("loss    ", "bold"),
                (loss, ""),
                (curve, "good"),
            ],
        ]
        if self.evaluate:
            part = f"{self.evaluate['done']}/{self.evaluate['total']} samples of the first rank"
            lines.append([("evaluate", "bold"), (f" {part}", "")])
        if self.epoch:
            found = "  ".join(f"{k} {number(v)}" for k, v in self.epoch["metrics"].items())
            lines.append(
                [("metrics ", "bold"), (f"{found} after epoch {self.epoch['epoch']:g}", "")]
            )
        return [*lines, []]

    def _rank_table(self, width: int, room: int, glyphs: Glyphs) -> list[Line]:
        """Every rank, or where there is no room for all the slowest ones."""
        if not self.ranks or room < 4:
            return []
        shown, rest = self.ranks, ""
        if len(shown) > room - 3:
            by_time = sorted(self.ranks, key=lambda r: -r.own_ms)
            shown, others = by_time[: room - 4], by_time[room - 4 :]
            rest = f"and {len(others)} more, from {others[-1].own_ms:.1f} to {others[0].own_ms:.1f}"
        longest = max(r.own_ms for r in self.ranks) or 1.0
        hosts = min(24, max(4, *(len(r.host) for r in shown)))
        bars = max(4, min(40, width - 30 - hosts))
        head = f"rank  {'host':<{hosts}}  {'forward, ms a step':<{bars + 9}} peak MiB"
        lines: list[Line] = [[(head, "bold")]]
        slowest = self.slowest
        for r in shown:
            is_slow = slowest is not None and slowest[1] > _EVEN and r.rank == slowest[0].rank
            filled = bar(r.own_ms / longest, bars, glyphs)
            text = f"{r.rank:>4}  {r.host[:hosts]:<{hosts}}  "
            numbers = f"{r.own_ms:>9.1f} {r.memory_mib:>8,}"
            lines.append([(text, ""), (filled, "notice" if is_slow else "good"), (numbers, "")])
        if rest:
            lines.append([(f"      {rest} ms", "dim")])
        return [*lines, *self._verdict(), []]

    def _verdict(self) -> list[Line]:
        if not (found := self.slowest):
            return []
        rank, more = found
        if more <= _EVEN:
            return [[("all ranks are even", "dim")]]
        text = f"slowest: rank {rank.rank} on {rank.host}, {more:.0%} longer than the median"
        return [[(text, "notice")]]


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    filled = round(max(0.0, min(1.0, share)) * width)
    return glyphs.full * filled + glyphs.empty * (width - filled)


def cut(line: Line, width: int) -> Line:
    """A line that is no wider than the screen, and has no commands to it."""
    found: Line = []
    for text, style in ((" ".join(plain(text).splitlines()), style) for text, style in line):
        found.append((text[:width], style))
        width -= len(text[:width])
    return found


def _style(state: str) -> str:
    """The style of the first word that has one."""
    words = (word.strip(":;,()") for word in state.split())
    return next((_STYLES[word] for word in words if word in _STYLES), "")


_STYLES = {
    "running": "good", "completed": "good", "finished": "good", "failed": "bad", "cancelled": "bad",
    "pending": "notice", "requeued": "notice", "stopping": "notice", "timeout": "bad",
}  # fmt: skip
