"""The live screen of `slurmft watch`: progress, speed, loss, time left and the slowest ranks."""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from slurmft.core.run_records import (
    Epoch,
    Evaluate,
    Ranks,
    Record,
    Speed,
    Start,
    Step,
    TrainingStart,
)
from slurmft.core.terminal import plain
from slurmft.core.text import clock, duration, number
from slurmft.runs.records import add_point
from slurmft.show.progress import describe, metrics_words
from slurmft.show.status_words import COLOURS

_EVENTS_SHOWN = 4
_EVEN = 0.05
"""Ranks that differ by less in their own work are called even."""
LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*%#"


class Rank(NamedTuple):
    """The own work of one rank."""

    own_ms: float
    """Its forward passes in one step, in which it waits for nobody."""
    rank: int
    host: str
    memory_mib: float


def draw(points: Sequence[tuple[float, float]], width: int, levels: str) -> str:
    """Returns a curve as one line of at most `width` characters: each is the mean of its part."""
    values = [value for _, value in points]
    width = min(width, len(values))
    if not width:
        return ""
    # Each part has a value at least: there are no more parts than values.
    ends = [part * len(values) // width for part in range(width + 1)]
    means = []
    for begin, end in itertools.pairwise(ends):
        part_mean = statistics.fmean(values[begin:end])
        means.append(part_mean)
    low = min(means)
    spread = max(means) - low
    scale = 0.0
    if spread > 0:  # else a level line, at the bottom
        scale = (len(levels) - 1) / spread
    curve = ""
    for mean in means:
        height = round((mean - low) * scale)
        curve += levels[height]
    return curve


@dataclass
class RunView:
    """The screen of a run, by its records and the scheduler."""

    name: str
    hosts: list[str] = field(default_factory=list)
    """By rank."""
    state: str = ""
    """Of the job, in words."""
    footer: str = ""
    start: Start | None = None
    step: Speed | None = None
    """The last step that has speed and time left."""
    epoch: Epoch | None = None
    evaluate: Evaluate | None = None
    """Progress of the evaluation under way."""
    ranks: list[Rank] = field(default_factory=list)
    """The slowest first."""
    events: list[str] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)

    def take(self, record: Record) -> None:
        """Takes up a record."""
        match record:
            case Start():
                self.start = record
            case Step():
                # A loss of NaN has no place on the curve.
                if record.loss is not None and math.isfinite(record.loss):
                    add_point(self.losses, record.step, record.loss)
                if isinstance(record, Speed):
                    self.step = record
                    # Training goes on: the evaluation is over, or was cut off by a restart.
                    self.evaluate = None
            case Ranks():
                self.ranks = self._ranks_of(record)
            case Evaluate():
                self.evaluate = record
            case Epoch():
                self.epoch = record
                self.evaluate = None
        text = describe(record)
        if text:
            # The first line alone: a warning may be of twenty, and the screen is small.
            first_line = text.splitlines()[0]
            self.events.append(f"{clock(record.time, '%H:%M:%S')} {first_line}")
            del self.events[:-_EVENTS_SHOWN]

    def _ranks_of(self, record: Ranks) -> list[Rank]:
        ranks = []
        # Not strict: a line of records may be of another version, or a user's own.
        values = zip(record.own_ms, record.memory_mib, strict=False)
        for rank, (own_ms, memory_mib) in enumerate(values):
            host = "?"
            if rank < len(self.hosts):
                host = self.hosts[rank]
            ranks.append(Rank(own_ms, rank, host, memory_mib))
        return sorted(ranks, key=lambda rank: -rank.own_ms)

    # --- the screen -------------------------------------------------------------------------------

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        state_colour = _colour(self.state)
        head = [
            _line(self.name, "bold"),
            _line(self.state, state_colour),
        ]
        if isinstance(self.start, TrainingStart):
            settings = _start_words(self.start)
            head.append(_line(settings))
        training = self._training(options)
        tail = []
        for text in (*self.events, self.footer):
            if text:
                tail.append(_line(text, "dim"))
        # The ranks get what is left: rich would cut the end, which has the newest events.
        height = options.height or options.max_height
        empty_lines = 2
        used_rows = len(head) + training.row_count + len(tail) + empty_lines
        rows_left = height - used_rows
        yield from head
        yield Text()
        yield training
        yield Text()
        yield from self._rank_lines(rows_left)
        yield from tail

    def _training(self, options: ConsoleOptions) -> Table:
        table = Table.grid("", "", padding=(0, 1))
        table.columns[0].style = "bold"
        step = self.step
        if step is None:
            table.add_row(_line("no step done yet", "dim"))
            return table
        table.add_row("train", _progress(step, options))
        # From the time of the record: until the next one, the end stays where it is.
        ends_at = clock(step.time + step.left_s, "%H:%M")
        left_words = duration(step.left_s)
        left = f"{left_words} of training, until {ends_at}"
        table.add_row("left", _line(left))
        speed = f"{step.samples_per_s:,.0f} samples/s"
        if isinstance(self.start, TrainingStart):
            speed_of_rank = step.samples_per_s / self.start.world_size
            speed += f", {speed_of_rank:,.0f} per rank"
        table.add_row("speed", _line(speed))
        if self.losses:
            table.add_row("loss", self._loss(step, options))
        if self.evaluate:
            done = self.evaluate.done
            total = self.evaluate.total
            part = f"{done}/{total} samples of the first rank"
            table.add_row("evaluate", _line(part))
        if self.epoch:
            metrics = metrics_words(self.epoch.metrics)
            epoch = self.epoch.epoch
            # 0 stands for a program that does not count them.
            if epoch:
                metrics += f" after epoch {epoch:g}"
            table.add_row("metrics", _line(metrics))
        return table

    def _loss(self, step: Speed, options: ConsoleOptions) -> Text:
        loss = step.loss
        if loss is None:  # a step of the user's own program may lack it
            _, loss = self.losses[-1]
        last = f"{number(loss)}  "
        # "metrics" is the longest name of a row.
        room = options.max_width - len("metrics  ") - len(last)
        width = max(1, min(60, room))
        levels = LEVELS
        # The encoding of the terminal has no blocks.
        if options.ascii_only:
            levels = ASCII_LEVELS
        curve = draw(self.losses, width, levels)
        return _line(last).append(curve, "green")

    def _rank_lines(self, rows_left: int) -> Iterator[RenderableType]:
        """Yields the ranks that compute longest, as far as there is room, and whether one of them
        is slow: its time is compared with the median."""
        # The table has a head; below it come up to two lines of words and an empty one.
        slowest = self.ranks[: rows_left - 4]
        if not slowest or rows_left < 5:
            return
        first = slowest[0]
        times_ms = [rank.own_ms for rank in self.ranks]
        median_ms = statistics.median(times_ms)
        # A median of 0 is no yardstick: every time would be longer than it by any share.
        tolerated_ms = median_ms * (1 + _EVEN)
        has_others = len(self.ranks) > 1
        is_uneven = has_others and 0 < tolerated_ms < first.own_ms
        yield _rank_table(slowest, is_uneven)
        hidden = len(self.ranks) - len(slowest)
        if hidden:
            yield _line(f"and {hidden:,} more, which take less time", "dim")
        if is_uneven:
            more = first.own_ms / median_ms - 1
            who = f"rank {first.rank} on {first.host}"
            yield _line(f"slowest: {who}, {more:.0%} longer than the median", "yellow")
        elif has_others:
            yield _line("all ranks are even", "dim")
        yield Text()


def _progress(step: Speed, options: ConsoleOptions) -> Table:
    part = step.step / step.total_steps
    text = f"{part:4.0%}  step {step.step}/{step.total_steps}"
    if step.epoch is not None:
        text += f", epoch {step.epoch:.2f}"
    # The rest of the line is for the name of the row and the text beside the bar.
    room = options.max_width - 48
    width = max(8, min(30, room))
    grid = Table.grid(Column(width=width), "", padding=(0, 1))
    bar = _bar(step.step, step.total_steps)
    grid.add_row(bar, _line(text))
    return grid


def _rank_table(ranks: Sequence[Rank], is_uneven: bool) -> Table:
    """Returns a table of ranks, the slowest first, with bars in proportion to its time."""
    table = Table(
        Column("rank", justify="right"),
        Column("host", max_width=24, no_wrap=True),
        Column("forward, ms a step", max_width=40),
        Column("", justify="right"),
        Column("peak MiB", justify="right"),
        box=None,
        pad_edge=False,
    )
    longest_ms = ranks[0].own_ms or 1  # a bar of 0 would divide by it
    for index, rank in enumerate(ranks):
        colour = "green"
        if is_uneven and index == 0:
            colour = "yellow"
        table.add_row(
            str(rank.rank),
            _line(rank.host),
            _bar(rank.own_ms, longest_ms, colour),
            f"{rank.own_ms:.1f}",
            f"{rank.memory_mib:,.0f}",
        )
    return table


def _colour(state: str) -> str:
    """Returns the colour of a line by the first word that has one."""
    for word in state.split():
        # Reasons stand behind a state: "requeued: ...", "pending (Resources)".
        colour = COLOURS.get(word.strip(":;,()"))
        if colour:
            return colour
    return ""


def _start_words(start: TrainingStart) -> str:
    millions = start.parameters / 1e6
    settings = [
        f"{start.world_size} rank(s) on {start.nodes} node(s)",
        start.precision,
        start.backend,
        f"batch {start.global_batch_size}",
        f"{millions:.1f}M weights",
    ]
    return f"{start.task}: {', '.join(settings)}"


def _bar(done: float, total: float, colour: str = "green") -> ProgressBar:
    # Both: rich has a colour of its own for a bar that is full.
    return ProgressBar(total, done, complete_style=colour, finished_style=colour)


def _line(text: str, style: str = "") -> Text:
    """Returns a line that is no wider than the screen, and has no commands to it."""
    # Text, not str: rich would take [brackets] in the name of a run for its markup.
    line = " ".join(plain(text).splitlines())
    return Text(line, style, no_wrap=True, overflow="crop")
