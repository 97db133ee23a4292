"""Where the time of a run went: parts that add up to all of it, from what it has recorded.

Each part of the time belongs to one attempt. Clocks of hosts differ, and may be set back: a time
before the one that was recorded last counts as that one, so no part is negative or counts twice.
"""

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from slurmft.core.run_files import FINAL_STATES, Failure, Transition
from slurmft.core.run_records import (
    Epoch,
    Met,
    PhaseBegun,
    Ranks,
    Record,
    Resume,
    Saved,
    Start,
    Step,
    Stopping,
    phase_after,
)


class Part(StrEnum):
    """A part of the time of a run: `TimeParts` says what each of them is."""

    STEPS = "steps"
    QUEUE = "queue"
    START = "start"
    LOST = "lost"
    SAVES = "saves"
    EVALUATIONS = "evaluations"
    WAITS = "waits"
    HANGS = "hangs"
    PROGRAM = "program"


_OF_PHASE = {
    "train": Part.STEPS,
    "evaluate": Part.EVALUATIONS,
    "save": Part.SAVES,
}
_PHASE_OF = {part: phase for phase, part in _OF_PHASE.items()}
_CAN_BE_LOST = (Part.STEPS, Part.EVALUATIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What a run has recorded."""

    history: Sequence[Transition]
    records: Iterable[Record]
    failures: Sequence[Failure] = ()
    now: float | None = None
    """The time, of a run that waits or runs; None: its last record ends it."""
    is_queued: bool = False
    """Its job waits for a start, whatever the run has recorded last."""
    is_training: bool = True
    """It trains; another program tells its steps or does not."""
    kept_step: int | None = None
    """The step of the checkpoint that it would go on from; None: no step is lost since its last
    start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptParts:
    """Seconds of the parts of one attempt, with the queue before it."""

    number: int
    seconds: dict[Part, float]
    """Of all parts."""


def attempts_of(past: Past) -> list[AttemptParts]:
    """Returns where the time went, by attempt. All parts together are the time from the submission
    to the end, but for the time between an end and a new submission."""
    if not past.history:
        return []
    signs = _signs(past)
    attempts = _attempts(past, signs)
    _divide(attempts, signs, past)
    lives = [life for attempt in attempts for life in attempt.lives]
    _mark_lost(lives, past.kept_step)
    return _by_number([attempt.parts() for attempt in attempts])


def _by_number(attempts: Sequence[AttemptParts]) -> list[AttemptParts]:
    """Returns one row of each number: a job may be cancelled in the queue before an attempt."""
    rows: dict[int, AttemptParts] = {}
    for attempt in attempts:
        row = rows.setdefault(attempt.number, attempt)
        if row is not attempt:
            for part, part_s in attempt.seconds.items():
                row.seconds[part] += part_s
    # An attempt that is to start has none while nobody knows how long it has waited.
    return [row for row in rows.values() if any(row.seconds.values())]


class _Sign(NamedTuple):
    """A record or a failure, at a time that is not before the sign before it."""

    time: float
    what: Record | Failure


class _Segment(NamedTuple):
    begin: float
    end: float
    part: Part


@dataclass(slots=True)
class _Life:
    """The ranks of an attempt, from one meeting to their end."""

    attempt: "_Attempt"
    end: float = math.inf
    trains_since: float | None = None
    stops: bool = False
    """The ranks have agreed to save and to end."""
    first_step: float = math.inf
    """The step after which it began; infinite: unknown."""
    marks: list[tuple[int, float]] = field(default_factory=list)
    """Steps, and when they were done; both ascending."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Times, and the seconds that an average rank has waited since the one before."""
    waits_until_step: float = math.inf

    def begin_after(self, step: int) -> None:
        self.first_step = step
        self.waits_until_step = step

    def add_mark(self, step: int, time: float) -> None:
        if not self.marks or step >= self.marks[-1][0]:
            self.marks.append((step, time))

    def time_of(self, step: float) -> float | None:
        """Returns when a step was done; None: after what the life has recorded."""
        if not self.marks:
            return self.trains_since
        index = bisect.bisect_right(self.marks, step, key=lambda mark: mark[0])
        if index == 0:
            return self.trains_since
        before, began = self.marks[index - 1]
        if index == len(self.marks):
            if before < step:
                return None
            return began
        after, ended = self.marks[index]
        # Steps between two marks took equally long.
        return began + (ended - began) * (step - before) / (after - before)


@dataclass(slots=True)
class _Attempt:
    number: int
    queued: float
    """When the queue before it began."""
    begin: float
    end: float = math.inf
    ended_as: str = ""
    """The state that followed; "" where the run has recorded none."""
    segments: list[_Segment] = field(default_factory=list)
    lives: list[_Life] = field(default_factory=list)

    def paint(
        self, begin: float, end: float, part: Part, over: Sequence[Part] = tuple(Part)
    ) -> None:
        """Gives a time to a part, as far as it belongs to other parts."""
        segments = []
        for segment in self.segments:
            first = max(begin, segment.begin)
            last = min(end, segment.end)
            if first >= last or segment.part not in over:
                segments.append(segment)
                continue
            segments.append(segment._replace(end=first))
            segments.append(_Segment(first, last, part))
            segments.append(segment._replace(begin=last))
        self.segments = segments

    def parts(self) -> AttemptParts:
        seconds = dict.fromkeys(Part, 0.0)
        seconds[Part.QUEUE] = self.begin - self.queued
        for segment in self.segments:
            seconds[segment.part] += segment.end - segment.begin
        waited_s = 0.0
        for life in self.lives:
            waited_s += sum(wait_s for _, wait_s in life.waits)
        waited_s = min(waited_s, seconds[Part.STEPS])
        seconds[Part.STEPS] -= waited_s
        seconds[Part.WAITS] = waited_s
        return AttemptParts(number=self.number, seconds=seconds)


# --- what was when --------------------------------------------------------------------------------


def _signs(past: Past) -> list[_Sign]:
    """Returns the records and failures in their order."""
    begins: dict[int | None, float] = {}
    for transition, time in _ascending(past.history):
        begins[transition.attempt] = time
    # The earliest one last, as `pop` takes them.
    failures = sorted(past.failures, key=attrgetter("time"), reverse=True)
    latest = past.history[0].time
    end = math.inf
    if past.now is not None:
        end = past.now
    signs: list[_Sign] = []

    def add(what: Record | Failure, time: float) -> None:
        nonlocal latest
        latest = max(latest, min(time, end))
        signs.append(_Sign(latest, what))

    for record in past.records:
        while failures and failures[-1].time <= record.time:
            failure = failures.pop()
            add(failure, failure.time)
        # The first of an attempt: the clocks of the hosts of two attempts may differ.
        if isinstance(record, Met) and record.attempt in begins:
            begin = begins.pop(record.attempt)
            if latest > begin:
                signs = [sign._replace(time=min(sign.time, begin)) for sign in signs]
            latest = begin
        add(record, record.time)
    for failure in reversed(failures):
        add(failure, failure.time)
    return signs


def _ascending(history: Sequence[Transition]) -> Iterable[tuple[Transition, float]]:
    latest = -math.inf
    for transition in history:
        latest = max(latest, transition.time)
        yield transition, latest


def _attempts(past: Past, signs: Sequence[_Sign]) -> list[_Attempt]:
    """Returns the attempts with the queues before them; a queue without a start is one, too."""
    attempts: list[_Attempt] = []
    running: _Attempt | None = None
    queued: float | None = None
    time = past.history[0].time
    stays = False
    for transition, time in _ascending(past.history):
        state = transition.state
        starts_again = state in ("running", "submitted")
        # It ended without a word, as its node did: nobody knows when its job was queued again.
        if starts_again and running is not None:
            _end(running, _last_sign(signs, running, before=time))
            if state == "running":
                queued = running.end
            running = None
        if state == "running":
            number = transition.attempt or _next_number(attempts)
            # A job that had failed before it started may start all the same.
            if queued is None and attempts:
                queued = attempts[-1].end
            if queued is None:
                queued = time
            # In the allocation of the attempt before, nothing waited.
            begin = queued if stays else time
            running = _Attempt(number, queued, begin)
            attempts.append(running)
            queued = None
        elif state != "stopping":
            if running is not None:
                _end(running, time, state)
                running = None
            elif state in FINAL_STATES and queued is not None:
                attempts.append(_waiting(attempts, queued, time))
            if state in FINAL_STATES:
                queued = None
            elif queued is None:
                queued = time
        stays = transition.in_allocation
    if running is not None:
        if past.now is not None and not past.is_queued:
            _end(running, past.now, "running")
            return attempts
        _end(running, _last_sign(signs, running, before=math.inf))
        # Slurm has queued the job again by itself.
        if past.is_queued:
            queued = running.end
    if queued is not None:
        now = past.now
        if now is None:
            now = time
        attempts.append(_waiting(attempts, queued, max(queued, now)))
    return attempts


def _end(attempt: _Attempt, time: float, ended_as: str = "") -> None:
    attempt.end = max(attempt.begin, time)
    attempt.ended_as = ended_as


def _waiting(attempts: Sequence[_Attempt], queued: float, time: float) -> _Attempt:
    """Returns an attempt that has not started."""
    return _Attempt(_next_number(attempts), queued, time, end=time)


def _next_number(attempts: Sequence[_Attempt]) -> int:
    if not attempts:
        return 1
    return attempts[-1].number + 1


def _last_sign(signs: Sequence[_Sign], attempt: _Attempt, before: float) -> float:
    index = bisect.bisect_left(signs, before, key=attrgetter("time"))
    if index == 0:
        return attempt.begin
    return max(attempt.begin, signs[index - 1].time)


# --- what the ranks did ---------------------------------------------------------------------------


def _divide(attempts: Sequence[_Attempt], signs: Sequence[_Sign], past: Past) -> None:
    """Divides the time of the attempts into segments and lives."""
    tells_steps = past.is_training or any(
        isinstance(sign.what, (Start, Step)) for sign in signs
    )
    begins = [attempt.begin for attempt in attempts]
    for index, attempt in enumerate(attempts):
        first = bisect.bisect_left(signs, begins[index], key=attrgetter("time"))
        last = len(signs)
        if index + 1 < len(attempts):
            last = bisect.bisect_left(signs, begins[index + 1], key=attrgetter("time"))
        first_part = Part.PROGRAM
        if tells_steps:
            first_part = Part.START
        division = _Division(attempt, first_part)
        for sign in signs[first:last]:
            division.take(min(sign.time, attempt.end), sign.what)
        division.close()


class _Division:
    """Divides an attempt, by one sign after the other."""

    def __init__(self, attempt: _Attempt, first_part: Part) -> None:
        """
        Args:
            first_part: what the ranks do before they train.
        """
        self._attempt = attempt
        self._first_part = first_part
        self._part = first_part
        self._since = attempt.begin
        self._last_time = attempt.begin
        """Of the last sign."""
        self._hangs: list[tuple[float, float]] = []
        self._begin_life()

    def take(self, time: float, what: Record | Failure) -> None:
        life = self._life
        match what:
            case Met():
                # Since the ranks before have given their last sign, they start.
                self._enter(self._first_part, self._last_time)
                life.end = self._last_time
                self._begin_life()
            case Start():
                self._train(time)
            case Resume(step=step):
                self._resume(step, time)
            case Step(step=step, steps=steps):
                began = self._train(time)
                if math.isinf(life.first_step):
                    life.begin_after(max(0, step - steps))
                if not life.marks:
                    life.add_mark(int(life.first_step), began)
                life.add_mark(step, time)
            case Saved(step=step, event=event):
                life.add_mark(step, time)
                self._end_phase(event, time)
            case Stopping(step=step):
                life.add_mark(step, time)
                if life.trains_since is not None:
                    self._enter(Part.SAVES, time)
                    life.stops = True
            case Epoch(event=event):
                self._end_phase(event, time)
            case PhaseBegun(phase=phase) if life.trains_since is not None:
                self._begin_phase(phase, time)
            case Ranks():
                self._count_waits(what, time)
            case Failure(hang_s=hang_s) if hang_s is not None:
                self._hangs.append((time - hang_s, time))
        self._last_time = time

    def close(self) -> None:
        """Ends the attempt."""
        attempt = self._attempt
        is_over = attempt.ended_as not in ("finished", "running")
        # What follows the last sign of ranks that were training is no step.
        if is_over and self._part in _CAN_BE_LOST:
            self._enter(Part.START, self._last_time)
        self._life.end = attempt.end
        if is_over:
            self._life.end = self._last_time
        self._enter(self._part, attempt.end)
        for begin, end in self._hangs:
            attempt.paint(begin, end, Part.HANGS)

    def _begin_life(self) -> None:
        self._life = _Life(self._attempt)
        self._attempt.lives.append(self._life)

    def _enter(self, part: Part, time: float) -> None:
        time = max(self._since, time)
        self._attempt.segments.append(_Segment(self._since, time, self._part))
        self._since = time
        self._part = part

    def _train(self, time: float) -> float:
        """Begins the steps, unless they have begun; returns since when the life trains."""
        life = self._life
        if self._part is self._first_part:
            self._enter(Part.STEPS, time)
        if life.trains_since is None:
            life.trains_since = time
        return life.trains_since

    def _resume(self, step: int, time: float) -> None:
        life = self._life
        if not life.marks:
            life.begin_after(step)
        # A program has yet to load its checkpoint, which may be that of its next training.
        if life.marks or life.trains_since is None:
            if not life.stops:
                self._enter(self._first_part, time)
            return
        # Since the start, the trainer has restored its state.
        if self._part is Part.STEPS:
            self._part = self._first_part
        life.trains_since = time
        self._enter(Part.STEPS, time)
        life.add_mark(step, time)

    def _begin_phase(self, phase: str, time: float) -> None:
        if self._life.stops:
            return
        # Programs say that they may save: without a checkpoint they did not.
        if phase == "train" and self._part is Part.SAVES:
            self._part = Part.STEPS
        self._enter(_OF_PHASE.get(phase, self._part), time)

    def _end_phase(self, event: str, time: float) -> None:
        """Ends the phase that an event ends, as its writer knows."""
        phase = _PHASE_OF.get(self._part)
        if phase is None or self._life.stops:
            return
        next_phase = phase_after(phase, event)
        if next_phase != phase:
            self._enter(_OF_PHASE[next_phase], time)

    def _count_waits(self, ranks: Ranks, time: float) -> None:
        life = self._life
        steps = ranks.step - life.waits_until_step
        if steps > 0 and ranks.own_ms:
            waited_ms = max(ranks.own_ms) - statistics.fmean(ranks.own_ms)
            life.waits.append((time, steps * waited_ms / 1000))
            life.waits_until_step = ranks.step


def _mark_lost(lives: Sequence[_Life], kept_step: int | None) -> None:
    """Marks what was done after the step that a later life went on from."""
    kept = math.inf
    if kept_step is not None:
        kept = kept_step
    for life in reversed(lives):
        time = None
        if not math.isinf(kept):
            time = life.time_of(kept)
        if time is not None:
            life.attempt.paint(time, life.end, Part.LOST, over=_CAN_BE_LOST)
            life.waits = [wait for wait in life.waits if wait[0] <= time]
        kept = min(kept, life.first_step)
