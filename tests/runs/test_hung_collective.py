"""What is said of the collective in which ranks hung, by the files that they left."""

from pathlib import Path
from typing import Any

import pytest

from slurmft.core.files import write_json
from slurmft.core.run_files import ENDED, Call, CallGroup, Calls, Failure, RankCalls
from slurmft.runs import hung_collective
from slurmft.runs.rundir import RunDir
from tests.support.made_runs import write_run

BYTES = 23 * 2**20


def call(number: int, operation: str = "all_reduce", **fields: Any) -> Call:
    values: dict[str, Any] = {
        "group": "gloo:0",
        "bytes": BYTES,
        "waits": False,
        "seconds": 90.0,
    }
    return Call(number=number, operation=operation, **(values | fields))


def of_rank(rank: int, *calls: Call, ranks: int = 4, **fields: Any) -> RankCalls:
    groups: dict[str, CallGroup] = {}
    for each in calls:
        groups[each.group] = CallGroup(last=each.number, ranks=list(range(ranks)))
    recorded = Calls(
        world_size=ranks,
        lost_peer=bool(fields.pop("lost_peer", False)),
        is_full=bool(fields.pop("is_full", False)),
        where=str(fields.pop("where", "backward")),
        groups=groups,
        calls=list(calls),
    )
    values: dict[str, Any] = {
        "host": f"n{rank // 2 + 1}",
        "attempt": 1,
        "process": "S",
        "step": 309,
        "phase": "train",
        "calls": recorded,
    }
    return RankCalls(rank=rank, **(values | fields))


def waiting(
    rank: int, number: int = 1204, seconds: float = 61, **fields: Any
) -> RankCalls:
    wait = call(number, waits=True, seconds=seconds)
    return of_rank(rank, call(number - 1), wait, **fields)


def text(tmp_path: Path, *ranks: RankCalls) -> str:
    failure = hung_collective.hang(RunDir(tmp_path), ranks)
    if failure is None:
        return ""
    assert failure.retry
    assert not failure.secondary
    assert failure.message.startswith("the job hangs: ")
    return failure.message.removeprefix("the job hangs: ")


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    late = of_rank(3, call(1203), where="data.py:7")
    ranks = (waiting(0, seconds=70), waiting(1), waiting(2), late)
    failure = hung_collective.hang(RunDir(tmp_path), ranks)
    assert failure is not None
    assert failure.message == (
        "the job hangs: rank 3 on n2 has not come to all-reduce 1,204 of 23.0 MiB "
        "(backward, step 310); "
        "3 ranks have waited 1:01 min; rank 3 is at data.py:7"
    )
    assert failure.where == "node n2"
    assert failure.hint is not None
    assert "stacks-rank-003.txt" in failure.hint


def test_several_do_not_come(tmp_path: Path) -> None:
    ranks = (waiting(0), *(of_rank(rank, call(1203), where="") for rank in (1, 2, 3)))
    assert text(tmp_path, *ranks).startswith(
        "ranks 1, 2, 3 on n1, n2 have not come to all-reduce 1,204"
    )


def test_where_each_of_several_is(tmp_path: Path) -> None:
    """One may wait for the other, in what is no collective."""
    places = {1: "a.py:5", 2: "b.py:6", 3: "a.py:5"}
    late = [of_rank(rank, call(1203), where=place) for rank, place in places.items()]
    assert text(tmp_path, waiting(0), *late).endswith(
        "; ranks 1, 3 are at a.py:5; rank 2 is at b.py:6"
    )


def test_the_first_call_of_a_group(tmp_path: Path) -> None:
    """A rank that has not called anything in a group has not come to its first call; but where
    older calls are not recorded any more, nobody knows."""
    other: dict[str, Any] = {"group": "gloo:1"}
    waits = [
        of_rank(rank, call(5), call(1, waits=True, **other), ranks=2) for rank in (0,)
    ]
    assert "rank 1 on n1 has not come to all-reduce 1 of" in text(
        tmp_path, *waits, of_rank(1, call(5), ranks=2)
    )
    said = text(tmp_path, *waits, of_rank(1, call(5), ranks=2, is_full=True))
    assert "no rank is known to be missing" in said


def test_a_stopped_rank_is_not_said_to_be_absent(tmp_path: Path) -> None:
    """It may have come before it was stopped."""
    stopped = of_rank(1, process="T", calls=None)
    said = text(tmp_path, waiting(0), stopped, waiting(2), waiting(3))
    assert said == (
        "3 ranks have waited 1:01 min in all-reduce 1,204 of 23.0 MiB (backward, step 310); "
        "rank 1 on n1 is stopped"
    )
    gone = of_rank(1, process="R", calls=None)
    assert text(tmp_path, waiting(0), gone, waiting(2), waiting(3)).endswith(
        "rank 1 on n1 does not answer"
    )
    # A busy machine keeps others from an answer: the one that is stopped is to be looked at.
    both = (waiting(0), gone, waiting(2), of_rank(3, process="T", calls=None))
    failure = hung_collective.hang(RunDir(tmp_path), both)
    assert failure is not None
    assert failure.message.endswith(
        "; rank 3 on n2 is stopped, rank 1 on n1 does not answer"
    )
    assert failure.where == "node n2"
    assert str(failure.hint).endswith("stacks-rank-003.txt")
    # The first node to be done kills its ranks: those of others lose them, and were there before.
    lost = of_rank(1, call(1203), call(1204, waits=True), lost_peer=True)
    stopped = of_rank(3, process="T", calls=None)
    assert text(tmp_path, waiting(0), lost, waiting(2), stopped).endswith(
        "(backward, step 310); rank 3 on n2 is stopped"
    )
    # A node that left no file.
    assert text(tmp_path, waiting(0), waiting(2), waiting(3)).endswith(
        "rank 1 does not answer"
    )


def test_all_have_come(tmp_path: Path) -> None:
    said = text(tmp_path, *map(waiting, range(4)))
    assert said.startswith("4 ranks have waited 1:01 min in all-reduce 1,204")
    assert said.endswith("no rank is known to be missing")


def test_a_rank_that_was_asked_at_another_time_is_not_named(tmp_path: Path) -> None:
    """It would have had to come to the call before, which has ended on the others."""
    old = of_rank(3, call(900))
    said = text(tmp_path, waiting(0), waiting(1), waiting(2), old)
    assert "has not come" not in said


def test_the_one_that_waits_nowhere_is_named(tmp_path: Path) -> None:
    """Rank 1 waits for rank 3 in a group of two, and so holds up the others."""
    pair: dict[str, Any] = {"group": "gloo:7"}
    first = of_rank(0, call(4), call(5, waits=True), where="")
    third = of_rank(2, call(4), call(5, waits=True), where="")
    held_up = of_rank(1, call(4), call(9, waits=True, **pair), where="")
    culprit = of_rank(3, call(4), call(8, **pair), where="")
    for each in (held_up, culprit):
        assert each.calls is not None
        each.calls.groups["gloo:7"] = CallGroup(
            last=each.calls.groups["gloo:7"].last, ranks=[1, 3]
        )
    assert text(tmp_path, first, held_up, third, culprit).startswith(
        "rank 3 on n2 has not come to all-reduce 9"
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"operation": "broadcast", "bytes": 12}, "broadcast 1,204 of 12 bytes"),
        ({"bytes": 2**20}, "all-reduce 1,204 of 1.0 MiB"),
    ],
)
def test_calls_that_do_not_fit_together(
    other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    wrong = of_rank(2, call(1203), call(1204, waits=True, **other), where="b.py:3")
    said = text(tmp_path, waiting(0), waiting(1), wrong, waiting(3))
    assert said == (
        f"rank 2 on n2 called {words} (b.py:3, step 310); ranks 0, 1, 3 on n1, n2 called "
        "all-reduce 1,204 of 23.0 MiB (backward, step 310): all ranks must make the same calls"
    )


def test_sizes_may_differ_where_the_operation_allows_it(tmp_path: Path) -> None:
    ranks = [
        of_rank(rank, call(3, "all_to_all", bytes=100 + rank, waits=True))
        for rank in range(4)
    ]
    assert "must make the same calls" not in text(tmp_path, *ranks)


def test_ranks_that_wait_for_something_else(tmp_path: Path) -> None:
    """As for a key of the store, or for a message."""
    at_key = [of_rank(rank, call(7), where="store.py:5") for rank in (0, 1, 2)]
    late = of_rank(3, call(7), where="data.py:7")
    failure = hung_collective.hang(RunDir(tmp_path), [*at_key, late])
    assert failure is not None
    assert failure.where == "node n2"
    assert failure.message == (
        "the job hangs: no rank waits in a collective; ranks 0, 1, 2 are at store.py:5; "
        "rank 3 is at data.py:7"
    )
    stopped = of_rank(3, process="T", calls=None)
    assert text(tmp_path, *at_key, stopped).endswith("; rank 3 on n2 is stopped")


def test_nobody_waits(tmp_path: Path) -> None:
    """Also of ranks that have lost others: torch calls all of their calls ended."""
    assert text(tmp_path, *(of_rank(rank, call(7)) for rank in range(4))) == ""
    assert text(tmp_path, *(waiting(rank, lost_peer=True) for rank in range(4))) == ""
    assert text(tmp_path, *(of_rank(rank, calls=None) for rank in range(4))) == ""
    assert text(tmp_path) == ""


def test_a_description_and_a_thread_of_the_backward_pass(tmp_path: Path) -> None:
    late = of_rank(1, call(3), ranks=2, where="")
    wait = of_rank(0, call(4, waits=True, is_backward=True), ranks=2, where="a.py:5")
    assert wait.calls is not None
    wait.calls.groups["gloo:0"] = CallGroup(last=4, ranks=[0, 1], description="mesh_dp")
    assert "(mesh_dp, a.py:5, backward, step 310)" in text(tmp_path, wait, late)


def record_of(run: RunDir, failure: Failure, *ranks: RankCalls) -> list[Failure]:
    for each in ranks:
        write_json(run.rank_calls(each.rank), each)
    run.add(failure)
    hung_collective.record(run, 1)
    return run.failures_of(1)


def test_it_is_the_failure_of_the_attempt(tmp_path: Path) -> None:
    """Where a watchdog only knows that its ranks wait."""
    run = write_run(tmp_path / "run")
    hang = Failure("node n1", "rank 0 hangs", secondary=True, hang_s=61, attempt=1)
    before = of_rank(3, call(1204), attempt=0)
    write_json(run.rank_calls(7), before)
    late = of_rank(3, call(1203))
    first, *_ = record_of(run, hang, waiting(0), waiting(1), waiting(2), late)
    assert first.message.startswith("the job hangs: rank 3 on n2 has not come")


def test_a_failure_that_is_no_hang_stays_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    error = Failure("rank 1 on n1", "ValueError", attempt=1)
    assert len(record_of(run, error, waiting(0), of_rank(1, call(1203)))) == 1


def test_a_lost_peer_that_left_no_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lost = Failure(
        "rank 0 on n1", "connection reset", secondary=True, meetings=0, attempt=1
    )
    ranks = [of_rank(rank, call(1204), lost_peer=True) for rank in (0, 1, 3)]
    record_of(run, lost, *ranks, of_rank(2, calls=None, process="gone"))
    words = run.records.read_text()
    assert (
        "rank 2 on n2 has left no record of collectives; the last call of ranks 0, 1, 3 was "
        "all-reduce 1,204 of 23.0 MiB (step 310)"
    ) in words


def test_damaged_files_say_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.rank_calls(0).parent.mkdir(exist_ok=True)
    run.rank_calls(0).write_text('{"rank": "x"}')
    run.rank_calls(1).write_text("{")
    write_json(run.rank_calls(2), of_rank(2, call(7)))
    written = run.rank_calls(2).read_text()
    many = written.replace('"world_size": 4', '"world_size": 10000000000')
    run.rank_calls(2).write_text(many)
    assert run.all_rank_calls(1) == []


def test_calls_that_do_not_fit_together_when_a_rank_failed(tmp_path: Path) -> None:
    """gloo aborts a program that gets more than it waits for; the others wait on."""
    run = write_run(tmp_path / "run")
    killed = Failure("rank 2 on n2", "the program was killed by SIGABRT", attempt=1)
    wrong = of_rank(3, call(1203), call(1204, waits=True, bytes=4))
    others = [of_rank(rank, call(1204), lost_peer=True) for rank in (0, 1)]
    record_of(run, killed, *others, of_rank(2, calls=None), wrong)
    words = run.records.read_text()
    assert "rank 3 on n2 called all-reduce 1,204 of 4 bytes" in words
    assert len(run.failures_of(1)) == 1


def test_what_a_rank_told_before_it_lost_another_is_no_record_of_that(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "run")
    lost = Failure(
        "rank 0 on n1", "connection reset", secondary=True, meetings=0, attempt=1
    )
    ranks = [of_rank(rank, call(1204), lost_peer=True) for rank in (0, 1, 3)]
    record_of(run, lost, *ranks, of_rank(2, call(900), process="gone"))
    assert "rank 2 on n2 has left no record" in run.records.read_text()


def test_a_rank_that_has_ended_before_the_others(tmp_path: Path) -> None:
    """As one with fewer batches: it needs no error to leave others alone."""
    run = write_run(tmp_path / "run")
    lost = Failure(
        "rank 0 on n1", "connection reset", secondary=True, meetings=0, attempt=1
    )
    ended = of_rank(3, calls=None, process=ENDED)
    killed = of_rank(1, calls=None, process="gone")
    ranks = [of_rank(rank, call(1204), lost_peer=True) for rank in (0, 2)]
    record_of(run, lost, *ranks, killed, ended)
    words = run.records.read_text()
    assert (
        "rank 3 on n2 has ended, without an error, before the others; the last call of "
        "ranks 0, 2 was all-reduce 1,204"
    ) in words
    assert text(tmp_path, waiting(0), waiting(1), waiting(2), ended).endswith(
        "; rank 3 on n2 has ended, without an error"
    )
