"""The live screen of `slurmft watch`: progress, speed, loss, time left and the slowest ranks."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from slurmft.core.decode import matches
from slurmft.core.run_records import Speed
from slurmft.core.terminal import plain
from slurmft.core.text import duration, number
from slurmft.runs.records import add_point
from slurmft.show.progress import Record, describe, metrics_words
from slurmft.show.status_words import COLOURS

_EVENTS_SHOWN = 4
_EVEN = 0.05
"""Ranks that differ by less in their own work are called even."""
LEVELS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


class Rank(NamedTuple):
    """What is known of one rank."""

    own_ms: float
    """Its forward passes in one step, in which it waits for nobody."""
    rank: int
    host: str
    memory_mib: int


def draw(points: Sequence[tuple[float, float]], width: int, levels: str) -> str:
    """A curve as one line of at most so many characters."""
    values, count = [value for _, value in points], len(points)
    width = min(width, count)
    if not width:
        return ""
    ends = [i * count // width for i in range(width + 1)]
    cells = [statistics.fmean(values[begin:end]) for begin, end in itertools.pairwise(ends)]
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
    footer: str = ""
    start: Record = field(default_factory=dict)
    step: Record = field(default_factory=dict)
    """The last record of a step that has speed and time left."""
    epoch: Record = field(default_factory=dict)
    evaluate: Record = field(default_factory=dict)
    """Progress of the evaluation under way."""
    ranks: list[Rank] = field(default_factory=list)
    """The slowest first."""
    events: list[str] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)

    def take(self, record: Record) -> None:
        """Takes up a record."""
        event = record.get("event")
        if event == "start":
            self.start = record
        elif event == "step":
            if record.get("loss") is not None:
                add_point(self.losses, record["step"], record["loss"])
            if matches(record, Speed):
                self.step, self.evaluate = record, {}
        elif event == "ranks":
            rows = enumerate(zip(record["own_ms"], record["memory_mib"], strict=False))
            hosts = dict(enumerate(self.hosts))
            ranks = (Rank(own, rank, hosts.get(rank, "?"), mib) for rank, (own, mib) in rows)
            self.ranks = sorted(ranks, key=lambda r: -r.own_ms)
        elif event == "evaluate":
            self.evaluate = record
        elif event == "epoch":
            self.epoch, self.evaluate = record, {}
        if text := describe(record):
            clock = time.strftime("%H:%M:%S", time.localtime(record.get("time", 0)))
            self.events = [*self.events, f"{clock} {text.splitlines()[0]}"][-_EVENTS_SHOWN:]

    # --- what is made of it -----------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words = (word.strip(":;,()") for word in self.state.split())
        colour = next((COLOURS[word] for word in words if word in COLOURS), "")
        head = [_line(self.name, "bold"), _line(self.state, colour)]
        if r := self.start:
            ranks = f"{r['world_size']} rank(s) on {r['nodes']} node(s)"
            size = f"batch {r['global_batch_size']}, {r['parameters'] / 1e6:.1f}M weights"
            head.append(_line(f"{r['task']}: {ranks}, {r['precision']}, {r['backend']}, {size}"))
        training = self._training(options)
        tail = [_line(text, "dim") for text in (*self.events, self.footer) if text]
        room = (options.height or options.max_height) - len([*head, *tail]) - training.row_count - 2
        yield from (*head, Text(), training, Text(), *self._rank_lines(room), *tail)

    def _training(self, options: ConsoleOptions) -> Table:
        table, at = Table.grid("", "", padding=(0, 1)), self.step
        table.columns[0].style = "bold"
        if not at:
            table.add_row(_line("no step done yet", "dim"))
            return table
        done, total = at["step"], at["total_steps"]
        epoch = f", epoch {at['epoch']:.2f}" if "epoch" in at else ""
        words = _line(f"{done / total:4.0%}  step {done}/{total}{epoch}")
        bar = Table.grid(Column(width=max(8, min(30, options.max_width - 48))), "", padding=(0, 1))
        bar.add_row(_bar(done, total), words)
        ends = time.strftime("%H:%M", time.localtime(at["time"] + at["left_s"]))
        speed = f"{at['samples_per_s']:,.0f} samples/s"
        if world_size := self.start.get("world_size"):
            speed += f", {at['samples_per_s'] / world_size:,.0f} per rank"
        table.add_row("train", bar)
        table.add_row("left", _line(f"{duration(at['left_s'])} of training, until {ends}"))
        table.add_row("speed", _line(speed))
        if points := self.losses:
            loss = f"{number(at.get('loss', points[-1][1]))}  "
            width = max(1, min(60, options.max_width - len("metrics  ") - len(loss)))
            curve = draw(points, width, ASCII_LEVELS if options.ascii_only else LEVELS)
            table.add_row("loss", _line(loss).append(curve, "green"))
        if self.evaluate:
            part = f"{self.evaluate['done']}/{self.evaluate['total']} samples of the first rank"
            table.add_row("evaluate", _line(part))
        if self.epoch:
            after = f" after epoch {self.epoch['epoch']:g}" if "epoch" in self.epoch else ""
            table.add_row("metrics", _line(metrics_words(self.epoch["metrics"]) + after))
        return table

    def _rank_lines(self, room: int) -> Iterator[RenderableType]:
        """The ranks that compute longest, as far as there is room, and whether one of them is slow:
        its time is compared with the median."""
        shown = self.ranks[: room - 4]
        if not shown or room < 5:
            return
        median = statistics.median(r.own_ms for r in self.ranks)
        slow = len(self.ranks) > 1 and 0 < median * (1 + _EVEN) < shown[0].own_ms
        host = Column("host", max_width=24, no_wrap=True)
        bar = Column("forward, ms a step", max_width=40)
        right = [Column(name, justify="right") for name in ("rank", "", "peak MiB")]
        table = Table(right[0], host, bar, *right[1:], box=None, pad_edge=False)
        for r in shown:
            colour = "yellow" if slow and r is shown[0] else "green"
            cells = _bar(r.own_ms, shown[0].own_ms or 1, colour), f"{r.own_ms:.1f}"
            table.add_row(str(r.rank), _line(r.host), *cells, f"{r.memory_mib:,}")
        yield table
        if len(shown) < len(self.ranks):
            yield _line(f"and {len(self.ranks) - len(shown):,} more, which take less time", "dim")
        if slow:
            first, more = shown[0], shown[0].own_ms / median - 1
            words = f"slowest: rank {first.rank} on {first.host}, {more:.0%} longer than the median"
            yield _line(words, "yellow")
        elif len(self.ranks) > 1:
            yield _line("all ranks are even", "dim")
        yield Text()


def _bar(done: float, total: float, colour: str = "green") -> ProgressBar:
    return ProgressBar(total, done, complete_style=colour, finished_style=colour)


def _line(text: str, style: str = "") -> Text:
    """A line that is no wider than the screen, and has no commands to it."""
    return Text(" ".join(plain(text).splitlines()), style, no_wrap=True, overflow="crop")
