"""Asks ranks for their collectives.

Of most programs the first rank alone prints. Others are asked when their silence has become long,
and by that alone: a rank that is asked stops for some milliseconds.
"""

import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmft.core import removal
from slurmft.core.decode import read
from slurmft.core.run_files import Calls
from slurmft.node import flight_recorder, heartbeat

_POLL_S = 0.1
_ANSWER_S = 5.0
"""How long a rank may take to answer. One that does not is judged by its silence."""
_AGAIN_S = 60.0
"""From one question to the next, where a rank is in the same collective."""


def ask(folder: Path, rank: int) -> Path | None:
    """Asks a rank for its collectives; returns the file that it will write. None: no process of it
    is there that may answer."""
    answer = Path(flight_recorder.answer_file(str(folder), rank))
    _forget(answer)
    if flight_recorder.ask(str(folder), rank):
        return answer
    return None


def forget(folder: Path) -> None:
    """Removes what the ranks of a node have told."""
    for rank in heartbeat.ranks(folder):
        _forget(Path(flight_recorder.answer_file(str(folder), rank)))


def _forget(answer: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        removal.remove(answer, removal.exactly(answer.name))


def has_lost_peer(folder: Path, rank: int) -> bool:
    """Returns whether a rank has told, without being asked, that it has lost another one: its
    program ends."""
    calls = read(Path(flight_recorder.answer_file(str(folder), rank)), Calls)
    return calls is not None and calls.lost_peer


def await_answers(answers: Iterable[Path], wait_s: float) -> None:
    """Waits until ranks have answered. A process that does not give up the GIL never does."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and not all(map(Path.exists, answers)):
        time.sleep(_POLL_S)


@dataclass(slots=True)
class Sign:
    """What a silent rank has told."""

    asked_at: float = -math.inf
    """On CLOCK_MONOTONIC, as all times here."""
    answer: Path | None = None
    """The file with the answer that is awaited."""
    called_at: float = -math.inf
    """When the rank has begun its last call: a collective, a send or a receive."""
    waits_since: float = math.inf
    """When the rank has begun the oldest collective that has not ended; inf: all have."""


class SilentRanks:
    """Asks the ranks of a node for their collectives; nothing here waits for an answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        """With the heartbeats."""
        self._signs: dict[int, Sign] = {}

    def sign(self, rank: int, limit_s: float) -> Sign:
        """Returns what is known of a rank; asks it where its last call is older than `limit_s`."""
        sign = self._signs.setdefault(rank, Sign())
        now = time.monotonic()
        if sign.answer is not None:
            _take_answer(sign, sign.answer)
            return sign
        # One that was at work when it was asked has had its time since.
        was_late = sign.asked_at - sign.called_at > limit_s
        pause_s = 0.0
        if was_late:
            pause_s = _AGAIN_S
        is_due = now - sign.called_at > limit_s and now - sign.asked_at > pause_s
        if is_due:
            sign.answer = ask(self._folder, rank)
            # One without a process group may have it soon.
            if sign.answer is not None:
                sign.asked_at = now
        return sign


def _take_answer(sign: Sign, answer: Path) -> None:
    now = time.monotonic()
    if not answer.exists():
        if now - sign.asked_at > _ANSWER_S:
            sign.answer = None
        return
    sign.answer = None
    calls = read(answer, Calls)
    # A rank that has lost others does not know which of its calls have ended.
    if calls is None or calls.lost_peer:
        return
    if calls.idle_s is not None:
        sign.called_at = now - calls.idle_s
    waits = [call.seconds for call in calls.calls if call.waits]
    sign.waits_since = math.inf
    if waits:
        sign.waits_since = now - max(waits)
