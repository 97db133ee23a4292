"""The collective in which the ranks of an attempt hung, by what each of them has told of its calls.

Nothing is said that torch's recorders do not show: of a rank that has not answered it is only said
that it has not.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmft.core.errors import SlurmftError
from slurmft.core.run_files import ENDED, Call, Calls, Failure, RankCalls
from slurmft.core.text import counted, duration, in_bytes, shown, some
from slurmft.runs.records import RecordReader, warn
from slurmft.runs.rundir import RunDir

_NAMES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "_all_gather_base": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "all_to_all": "all-to-all",
}
"""torch's names of operations -> the usual ones, where these differ."""
_EQUAL_SIZES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
"""Operations that need as many bytes on every rank."""
_STOPPED = ("T", "t")
_MISMATCH = "Received data size doesn't match expected size"
"""gloo's words where calls do not fit together."""
_NO_ANSWER = ""
"""The place of ranks that do not answer."""
_WIDTH = 80
"""The longest text that is taken from a file of a rank."""


def record(run: RunDir, attempt: int) -> None:
    """Records the collective in which an attempt hung, as a failure of it. Where ranks only lost
    others and nobody knows why, a warning says which of them left no record; where one failed, and
    calls did not fit together, which did not."""
    root = run.root_failure(attempt)
    if root is None:
        return
    if root.hang_s is not None:
        failure = hang(run, run.all_rank_calls(attempt))
        if failure is not None:
            run.add(failure)
        return
    ranks = run.all_rank_calls(attempt)
    text = ""
    mismatch = _CallsOfRanks(ranks).mismatch(_is_mismatch(run, attempt))
    if mismatch is not None:
        _, text = mismatch
    elif root.secondary:
        text = loss_of_peer(ranks)
    if text:
        _warn_once(run, text)


def tell_mismatch(run: RunDir, attempt: int) -> None:
    """Warns of calls that did not fit together, where ranks of an attempt start again in place."""
    if not _is_mismatch(run, attempt):
        return
    ranks = run.all_rank_calls(attempt)
    mismatch = _CallsOfRanks(ranks).mismatch(is_certain=True)
    if mismatch is not None:
        _, text = mismatch
        _warn_once(run, text)


def _warn_once(run: RunDir, text: str) -> None:
    """Records a warning that may have been told when the ranks started again in place."""
    told = RecordReader(run.records).read_values("warning")
    if text not in [each.get("text") for each in told]:
        warn(run.records, text)


def _is_mismatch(run: RunDir, attempt: int) -> bool:
    """Returns whether gloo has ended a rank of an attempt because calls did not fit together."""
    failures = run.failures_of(attempt)
    return any(_MISMATCH in failure.message for failure in failures)


def hang(run: RunDir, ranks: Sequence[RankCalls]) -> Failure | None:
    """Returns the failure that the calls of ranks that hung show; None: they show none."""
    found = explain(ranks) or _different_places(ranks)
    if found is None:
        return None
    where = f"node {found.hosts}"
    hint = f"where the threads are: {run.stacks(found.culprits[0])}"
    error = SlurmftError(f"the job hangs: {found.text}", hint)
    step = max(each.step for each in ranks)
    attempt = ranks[0].attempt
    return Failure.of(where, error, step=step, attempt=attempt, retry=True)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why ranks wait for each other."""

    culprits: list[int]
    """The ranks to look at."""
    hosts: str
    text: str
    key: str
    """The same for the same collective, however long ranks have waited."""


def explain(ranks: Sequence[RankCalls]) -> Explanation | None:
    """Returns what the calls of ranks show; None: that none of them waits."""
    calls = _CallsOfRanks(ranks)
    waits = calls.waits()
    if not waits:
        return None
    first = waits[0]
    culprits, text = calls.mismatch() or calls.described(first)
    key = f"{first.group} {first.number}"
    return Explanation(culprits, calls.hosts(culprits), text, key)


def _different_places(ranks: Sequence[RankCalls]) -> Explanation | None:
    """Returns where ranks are that wait in no collective, but perhaps for a message or a key of the
    store; None: all are at one place, or nobody knows where."""
    calls = _CallsOfRanks(ranks)
    if not calls.known:
        return None
    groups = calls.by_place()
    if len(groups) < 2:
        return None
    # One that is elsewhere than the others is the one to look at.
    culprits = min(groups.values(), key=len)
    text = f"no rank waits in a collective{calls.places(groups)}"
    return Explanation(culprits, calls.hosts(culprits), text, text)


def loss_of_peer(ranks: Sequence[RankCalls]) -> str:
    """Returns which ranks left no record when others lost a peer; "" where that is not clear."""
    calls = _CallsOfRanks(ranks)
    last: dict[int, Call] = {}
    members: set[int] = set()
    for each in ranks:
        # Others are those of an earlier moment, in which ranks only looked hung.
        if each.calls is not None and each.calls.lost_peer and each.calls.calls:
            last[each.rank] = each.calls.calls[-1]
            members = set(range(each.calls.world_size))
    missing = sorted(members - last.keys())
    same = {(call.group, call.number) for call in last.values()}
    if not missing or len(same) != 1:
        return ""
    rank, call = next(iter(last.items()))
    ended = [each.rank for each in ranks if each.process == ENDED]
    if ended:
        verb = _verb(ended, "has", "have")
        text = f"{calls.names(ended)} {verb} ended, without an error, before the others"
    else:
        verb = _verb(missing, "has", "have")
        text = f"{calls.names(missing)} {verb} left no record of collectives"
    return (
        f"{text}; the last call of {_ranks(sorted(last))} was {calls.call(rank, call)}"
    )


@dataclass(frozen=True, slots=True)
class _Wait:
    """A collective that some ranks wait in."""

    group: str
    number: int
    calls: dict[int, Call]
    """By rank, of the ranks that wait."""
    absent: list[int]
    """Ranks that have come to the call before it, and not to this one."""
    silent: list[int]
    """Ranks of the group of which nothing is known."""


class _CallsOfRanks:
    def __init__(self, ranks: Iterable[RankCalls]) -> None:
        self._ranks = {each.rank: each for each in ranks}
        self.known: dict[int, Calls] = {}
        """By rank, of those that have answered."""
        self._calls: dict[str, dict[int, dict[int, Call]]] = {}
        """Group -> number -> rank -> call."""
        self._all_calls: dict[str, dict[int, dict[int, Call]]] = {}
        """Those of ranks that have lost another one, too."""
        for each in self._ranks.values():
            if each.calls is None:
                continue
            _sort(each.rank, each.calls, self._all_calls)
            # Of a rank that has lost another one, torch does not know which calls have ended.
            if not each.calls.lost_peer:
                self.known[each.rank] = each.calls
                _sort(each.rank, each.calls, self._calls)

    def waits(self) -> list[_Wait]:
        """Returns the first call of each group in which ranks wait. The one that explains most
        comes first: for whose end only ranks are missing that wait nowhere themselves."""
        found = []
        waiting: set[int] = set()
        for group, numbers in self._calls.items():
            for number, calls in sorted(numbers.items()):
                stuck = {rank: call for rank, call in calls.items() if call.waits}
                if stuck:
                    waiting |= stuck.keys()
                    found.append(self._wait(group, number, stuck))
                    break

        def rank_of(wait: _Wait) -> tuple[bool, bool, int, int]:
            is_explained = bool(wait.absent) and not waiting & set(wait.absent)
            sizes = [call.bytes for call in wait.calls.values()]
            return is_explained, bool(wait.silent), len(wait.calls), max(sizes)

        return sorted(found, key=rank_of, reverse=True)

    def _wait(self, group: str, number: int, calls: dict[int, Call]) -> _Wait:
        members: set[int] = set()
        for rank in calls:
            members |= set(self.known[rank].groups[group].ranks)
        absent = []
        silent = []
        for rank in sorted(members - calls.keys()):
            # It has come, and lost another one since, which was killed because it hung.
            if rank in self._all_calls[group][number]:
                continue
            known = self.known.get(rank)
            if known is None:
                silent.append(rank)
                continue
            last = known.groups.get(group)
            # A rank that is further behind has been asked at another time.
            if last is not None and last.last == number - 1:
                absent.append(rank)
            is_first = last is None and number == 1 and not known.is_full
            if is_first:
                absent.append(rank)
        return _Wait(group, number, calls, absent, silent)

    def mismatch(self, is_certain: bool = False) -> tuple[list[int], str] | None:
        """Returns the ranks that have called something else than most, and what; None: the calls
        that are known fit together.

        Args:
            is_certain: some do not, wherever it may be: those that have failed no longer wait.
        """
        for numbers in self._all_calls.values():
            is_stuck = is_certain or any(
                call.waits for calls in numbers.values() for call in calls.values()
            )
            for _, calls in sorted(numbers.items()):
                kinds: dict[tuple[str, int], list[int]] = defaultdict(list)
                for rank, call in sorted(calls.items()):
                    kinds[_kind(call)].append(rank)
                if is_stuck and len(kinds) > 1:
                    groups = sorted(kinds.values(), key=len)
                    parts = []
                    for ranks in groups:
                        described = self.call(ranks[0], calls[ranks[0]])
                        parts.append(f"{self.names(ranks)} called {described}")
                    text = f"{some(parts, 3, '; ')}: all ranks must make the same calls"
                    return groups[0], text
        return None

    def described(self, wait: _Wait) -> tuple[list[int], str]:
        """Returns the ranks that others wait for, or else those that wait; and what is known."""
        first = min(wait.calls)
        call = self.call(first, wait.calls[first])
        seconds = min(each.seconds for each in wait.calls.values())
        verb = _verb(list(wait.calls), "has", "have")
        waited = f"{counted(len(wait.calls), 'rank')} {verb} waited {duration(seconds)}"
        if wait.absent:
            verb = _verb(wait.absent, "has", "have")
            text = f"{self.names(wait.absent)} {verb} not come to {call}; {waited}"
            return wait.absent, text + self.places(self.by_place(wait.absent))
        if wait.silent:
            text = f"{waited} in {call}; {self._silence(wait.silent)}"
            # A busy machine may keep others from an answer.
            return self._in_state(wait.silent, *_STOPPED) or wait.silent, text
        return sorted(wait.calls), f"{waited} in {call}; no rank is known to be missing"

    def by_place(self, ranks: Iterable[int] | None = None) -> dict[str, list[int]]:
        """Returns where ranks are, in words -> the ranks."""
        if ranks is None:
            ranks = sorted(self._ranks)
        ranks_at: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            known = self.known.get(rank)
            if known is None:
                ranks_at[_NO_ANSWER].append(rank)
            elif known.where:
                ranks_at[shown(known.where, _WIDTH)].append(rank)
        return ranks_at

    def places(self, ranks_at: dict[str, list[int]]) -> str:
        """Returns where ranks are, to be added to a text."""
        places = []
        for place, ranks in ranks_at.items():
            if place == _NO_ANSWER:
                places.append(self._silence(ranks))
                continue
            verb = _verb(ranks, "is", "are")
            places.append(f"{_ranks(ranks)} {verb} at {place}")
        if not places:
            return ""
        return f"; {some(places, 3, '; ')}"

    def _silence(self, ranks: list[int]) -> str:
        """Returns in words why ranks do not answer; that of those that are stopped comes first."""
        stopped = self._in_state(ranks, *_STOPPED)
        ended = self._in_state(ranks, ENDED)
        others = [rank for rank in ranks if rank not in (*stopped, *ended)]
        parts = []
        if stopped:
            verb = _verb(stopped, "is", "are")
            parts.append(f"{self.names(stopped)} {verb} stopped")
        if ended:
            verb = _verb(ended, "has", "have")
            parts.append(f"{self.names(ended)} {verb} ended, without an error")
        if others:
            verb = _verb(others, "does", "do")
            parts.append(f"{self.names(others)} {verb} not answer")
        return ", ".join(parts)

    def _in_state(self, ranks: list[int], *states: str) -> list[int]:
        """Returns those of the ranks whose process is in one of these states."""
        found = []
        for rank in ranks:
            if rank in self._ranks and self._ranks[rank].process in states:
                found.append(rank)
        return found

    def call(self, rank: int, call: Call) -> str:
        """Returns a call in words: all-reduce 1,204 of 22.0 MiB (backward, step 310)"""
        text = f"{_name(call)} {call.number:,}"
        if call.bytes:
            text += f" of {in_bytes(call.bytes)}"
        details = []
        calls = self._ranks[rank].calls
        if calls is not None and call.group in calls.groups:
            details.append(calls.groups[call.group].description)
        # The program goes on after a call that has ended.
        if calls is not None and call.waits:
            details.append(calls.where)
        if call.is_backward and "backward" not in details:
            details.append("backward")
        details.append(_step(self._ranks[rank]))
        in_brackets = [shown(each, _WIDTH) for each in details if each]
        if in_brackets:
            text += f" ({', '.join(in_brackets)})"
        return text

    def names(self, ranks: Sequence[int]) -> str:
        """Returns ranks and their hosts: rank 3 on n2"""
        hosts = self.hosts(ranks)
        if not hosts:
            return _ranks(ranks)
        return f"{_ranks(ranks)} on {hosts}"

    def hosts(self, ranks: Sequence[int]) -> str:
        """Returns the hosts of ranks; "" where none of them is known."""
        hosts = []
        for rank in ranks:
            if rank in self._ranks:
                hosts.append(shown(self._ranks[rank].host, _WIDTH))
        return some(list(dict.fromkeys(hosts)))


def _sort(rank: int, calls: Calls, into: dict[str, dict[int, dict[int, Call]]]) -> None:
    """Puts the calls of a rank in their places by group and number."""
    for call in calls.calls:
        numbers = into.setdefault(call.group, defaultdict(dict))
        numbers[call.number][rank] = call


def _step(rank: RankCalls) -> str:
    """Returns the step in which a rank is, in words; "" of a program that does not tell steps."""
    if rank.phase == "train":
        return f"step {rank.step + 1:,}"
    if rank.step:
        return f"{rank.phase}, after step {rank.step:,}"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    noun = _verb(ranks, "rank", "ranks")
    return f"{noun} {some([str(rank) for rank in ranks])}"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    if len(ranks) == 1:
        return one
    return several


def _name(call: Call) -> str:
    name = _NAMES.get(call.operation, call.operation)
    return shown(name, _WIDTH)


def _kind(call: Call) -> tuple[str, int]:
    """Returns in what the calls of all ranks must be equal."""
    name = _name(call)
    if name in _EQUAL_SIZES:
        return name, call.bytes
    return name, 0
