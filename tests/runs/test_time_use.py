"""Where the time of runs went, by histories as runs record them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.run_files import FINAL_STATES, Failure, Transition
from slurmft.core.run_records import Record, record_of
from slurmft.job.job import Job
from slurmft.runs.records import RecordReader
from slurmft.runs.time_use import AttemptParts, Part, Past, attempts_of
from tests.support.made_runs import write_run

T0 = 1_000_000.0


def states(*changes: tuple[float, str]) -> list[Transition]:
    """Transitions at times after T0; each "running" is the next attempt."""
    history: list[Transition] = []
    attempt = 0
    for time, state in changes:
        number = None
        if state == "running":
            attempt += 1
            number = attempt
        history.append(Transition(state=state, time=T0 + time, attempt=number))
    return history


def rec(time: float, event: str, **values: Any) -> Record:
    record = record_of({"event": event, "time": T0 + time} | values)
    assert record is not None
    return record


def met(time: float, attempt: int = 1) -> Record:
    return rec(time, "met", attempt=attempt)


def start(time: float) -> Record:
    return rec(time, "start", total_steps=100)


def resume(time: float, step: int) -> Record:
    return rec(time, "resume", step=step, checkpoint=f"step-{step:08d}")


def steps(first: float, last: float, numbers: tuple[int, int]) -> list[Record]:
    """The first and the last record of some steps, as they are read sparsely."""
    return [
        rec(first, "step", step=numbers[0]),
        rec(last, "step", step=numbers[1]),
    ]


def phase(time: float, name: str) -> Record:
    return rec(time, "phase", phase=name)


def saved(time: float, step: int) -> Record:
    return rec(time, "checkpoint", step=step)


def evaluated(time: float) -> Record:
    return rec(time, "epoch", metrics={})


def parts(**seconds: float) -> dict[str, float]:
    return {str(part): seconds.get(part, 0.0) for part in Part}


def of(past: Past) -> list[dict[str, float]]:
    found = attempts_of(past)
    return [
        {str(part): round(value, 6) for part, value in each.seconds.items()}
        for each in found
    ]


def total(attempts: Sequence[AttemptParts]) -> float:
    return sum(sum(each.seconds.values()) for each in attempts)


FINISHED = Past(
    history=states((0, "submitted"), (100, "running"), (500, "finished")),
    records=[
        met(110), start(130), *steps(140, 230, (1, 10)),
        phase(230, "save"), saved(233, 10),
        *steps(240, 330, (11, 20)),
        phase(330, "evaluate"), evaluated(370), phase(371, "save"), saved(373, 20),
        *steps(380, 480, (21, 30)),
        rec(480, "ranks", step=30, own_ms=[100.0, 100.0, 300.0, 100.0], memory_mib=[1.0]),
        phase(485, "evaluate"), evaluated(490), phase(490, "save"),
    ],
)  # fmt: skip


def test_a_run_that_has_finished() -> None:
    # Steps: 130 to 485, without the saves and the evaluation. Of each step an average rank has
    # waited 300 - 150 ms for the slowest.
    waits = 30 * 0.15
    assert of(FINISHED) == [
        parts(
            queue=100, start=30, saves=3 + 2 + 10, evaluations=40 + 5,
            steps=100 + 97 + 1 + 112 - waits, waits=waits,
        )
    ]  # fmt: skip


def test_steps_that_were_done_again_are_lost() -> None:
    """Three requeues: the first attempt stops and saves, a rank of the second dies, the third dies
    before a new checkpoint."""
    past = Past(
        history=states(
            (0, "submitted"), (10, "running"), (100, "stopping"), (110, "requeued"),
            (150, "running"), (300, "requeued"), (310, "running"), (400, "requeued"),
            (420, "running"), (600, "finished"),
        ),
        records=[
            met(20), start(20), *steps(30, 100, (1, 80)),
            rec(100, "stopping", step=80, reason="SIGTERM"),
            met(160, 2), start(165), resume(170, 80), *steps(180, 210, (81, 120)),
            phase(210, "save"), saved(212, 120), *steps(220, 290, (121, 200)),
            met(320, 3), start(325), resume(330, 120), *steps(340, 380, (121, 160)),
            met(430, 4), start(430), resume(440, 120), *steps(450, 590, (121, 300)),
            phase(590, "save"),
        ],
        failures=[Failure("rank 1 on n2", "killed", attempt=2, time=T0 + 295)],
    )  # fmt: skip
    assert of(past) == [
        parts(queue=10, start=10, steps=80, saves=10),
        # From step 120 on, saved at 212, all was lost; 5 s pass from the failure to the requeue.
        parts(queue=40, start=20 + 5, steps=40, saves=2, lost=83),
        parts(queue=10, start=20 + 20, lost=50),
        parts(queue=20, start=20, steps=150, saves=10),
    ]
    assert total(attempts_of(past)) == 600


def test_an_attempt_on_the_same_nodes_waits_in_no_queue() -> None:
    """What lies between the attempts is the start of the second."""
    history = states((0, "submitted"), (10, "running"), (40, "requeued"))
    history[-1] = replace(history[-1], in_allocation=True)
    last = replace(history[1], time=T0 + 45, attempt=2)
    records = [met(20), start(30), met(50, attempt=2)]
    past = Past(history=[*history, last], records=records, now=T0 + 60)
    first, second = attempts_of(past)
    assert (first.seconds[Part.QUEUE], second.seconds[Part.QUEUE]) == (10, 0)
    assert second.seconds[Part.START] == 20


def test_where_no_checkpoint_says_it_the_time_of_a_step_is_interpolated() -> None:
    past = Past(
        history=states((0, "submitted"), (0, "running"), (200, "finished")),
        records=[
            met(0), rec(10, "step", step=1), rec(100, "step", step=91),
            met(120), rec(130, "step", step=32), rec(200, "step", step=100),
        ],
        is_training=False,
    )  # fmt: skip
    # A program of its own, whose ranks were started again, goes on from step 31: at 40.
    assert of(past) == [parts(start=10 + 30, steps=30 + 70, lost=60)]


def test_ranks_that_start_again_within_an_attempt() -> None:
    past = Past(
        history=states((0, "submitted"), (0, "running"), (200, "finished")),
        records=[
            met(5), start(10), *steps(20, 60, (1, 60)),
            met(80), start(90), *steps(95, 195, (1, 100)), phase(195, "save"),
        ],
        failures=[Failure("rank 0 on n1", "killed", time=T0 + 65)],
    )  # fmt: skip
    assert of(past) == [parts(start=10 + 25, lost=55, steps=105, saves=5)]


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_run_that_waits(is_queued: bool) -> None:
    past = Past(
        history=states((0, "submitted")),
        records=[],
        now=T0 + 50,
        is_queued=is_queued,
    )
    assert of(past) == [parts(queue=50)]
    again = states((0, "submitted"), (5, "requeued"), (9, "running"), (20, "requeued"))
    assert of(replace(past, history=again)) == [
        parts(queue=9, start=11),
        parts(queue=30),
    ]


def test_a_run_that_trains_has_not_lost_its_last_steps() -> None:
    past = Past(
        history=states((0, "submitted"), (10, "running")),
        records=[met(15), start(20), *steps(30, 60, (1, 30))],
        now=T0 + 70,
    )
    assert of(past) == [parts(queue=10, start=10, steps=50)]
    evaluates = replace(past, records=[*past.records, phase(60, "evaluate")])
    assert of(evaluates) == [parts(queue=10, start=10, steps=40, evaluations=10)]
    # Its node has died, and Slurm has queued the job again: since when, nobody has recorded.
    queued = replace(past, is_queued=True, kept_step=0)
    assert of(queued) == [parts(queue=10, start=10, lost=40), parts(queue=10)]
    vanished = replace(past, now=None, kept_step=15)
    assert of(vanished)[0]["lost"] == pytest.approx(60 - 30 - 30 * 14 / 29)


def test_the_end_of_a_run_without_a_result() -> None:
    records = [
        met(10), start(20), *steps(21, 60, (1, 40)), phase(60, "save"), saved(61, 40),
        *steps(62, 80, (41, 60)), rec(80, "stopping", step=60, reason="SIGTERM"),
    ]  # fmt: skip
    cancelled = Past(
        history=states((0, "submitted"), (10, "running"), (90, "cancelled")),
        records=records,
        kept_step=60,
    )
    assert of(cancelled) == [parts(queue=10, start=10, steps=59, saves=11)]
    failed = replace(
        cancelled,
        history=states((0, "submitted"), (10, "running"), (90, "failed")),
        records=records[:-1],
        kept_step=40,
    )
    assert of(failed) == [parts(queue=10, start=20, steps=40, saves=1, lost=19)]
    before_start = states((0, "submitted"), (7, "cancelled"))
    assert of(Past(history=before_start, records=[])) == [parts(queue=7)]


def test_between_an_end_and_a_resume_no_time_counts() -> None:
    past = Past(
        history=states(
            (0, "submitted"), (10, "running"), (50, "failed"),
            (10_000, "submitted"), (10_005, "running"), (10_100, "finished"),
        ),
        records=[
            met(10), start(20), *steps(21, 50, (1, 30)), saved(50, 30),
            met(10_010, 2), start(10_010), resume(10_015, 30),
            *steps(10_020, 10_100, (31, 90)),
        ],
    )  # fmt: skip
    assert of(past) == [
        parts(queue=10, start=10, steps=30),
        parts(queue=5, start=10, steps=85),
    ]


def test_a_hang() -> None:
    past = Past(
        history=states(
            (0, "submitted"), (10, "running"), (200, "requeued"), (230, "running"),
            (400, "finished"),
        ),
        records=[
            met(15), start(20), *steps(30, 90, (1, 70)), phase(90, "save"), saved(91, 70),
            *steps(92, 100, (71, 80)),
            met(240, 2), start(240), resume(240, 70), *steps(250, 400, (71, 230)),
        ],
        failures=[
            Failure("node n1", "rank 0 hangs", hang_s=80, attempt=1, time=T0 + 182,
                    secondary=True),
            Failure("node n2", "rank 3 hangs", hang_s=78, attempt=1, time=T0 + 180),
        ],
    )  # fmt: skip
    assert of(past) == [
        parts(queue=10, start=10 + 18, steps=70, saves=1, lost=11, hangs=80),
        parts(queue=30, start=10, steps=160),
    ]


def test_a_program_that_tells_nothing() -> None:
    past = Past(
        history=states((0, "submitted"), (10, "running"), (50, "finished")),
        records=[rec(11, "warning", text="no")],
        is_training=False,
    )
    assert of(past) == [parts(queue=10, program=40)]


def test_a_program_that_says_that_it_may_save() -> None:
    """Integrations do, after each evaluation: a save is what leaves a checkpoint."""
    records = [
        met(0), rec(10, "step", step=1), phase(20, "evaluate"), evaluated(25),
        phase(25, "save"), phase(40, "train"), phase(50, "save"), saved(55, 9),
    ]  # fmt: skip
    past = Past(
        history=states((0, "submitted"), (0, "running"), (60, "finished")),
        records=records,
        is_training=False,
    )
    assert of(past) == [parts(start=10, evaluations=5, saves=5, steps=40)]


def test_a_program_loads_its_checkpoint_before_its_first_step() -> None:
    """The integrations record a resume before the Trainer loads; also for a second training."""
    first = [met(0), resume(5, 10), rec(40, "step", step=11), rec(50, "step", step=20)]
    past = Past(
        history=states((0, "submitted"), (0, "running"), (100, "finished")),
        records=first,
        is_training=False,
    )
    assert of(past) == [parts(start=40, steps=60)]
    second = [resume(60, 30), rec(90, "step", step=31)]
    assert of(replace(past, records=first + second)) == [parts(start=70, steps=30)]
    # Where that life failed, the one before it had lost what it did after step 10.
    again = [
        met(0),
        rec(10, "step", step=10),
        rec(30, "step", step=30),
        met(35),
        resume(40, 10),
    ]
    assert of(replace(past, records=again)) == [parts(start=10 + 70, lost=20)]


@pytest.mark.parametrize("is_training", [False, True])
def test_a_stop_is_a_save_until_the_job_is_over(is_training: bool) -> None:
    """Whatever is recorded after it: the ranks that come next start anew."""
    records = [
        met(0), start(10), *steps(11, 30, (1, 20)), rec(30, "stopping", step=20, reason="x"),
        phase(31, "evaluate"), evaluated(33), phase(34, "save"), saved(40, 20), phase(41, "train"),
    ]  # fmt: skip
    past = Past(
        history=states((0, "submitted"), (0, "running"), (60, "requeued"), (70, "running"),
                       (100, "finished")),
        records=[*records, met(75, 2), start(80), resume(80, 20), *steps(81, 100, (21, 40))],
        is_training=is_training,
    )  # fmt: skip
    assert of(past) == [
        parts(start=10, steps=20, saves=30),
        parts(queue=10, start=10, steps=20),
    ]


def test_writer_and_reader_agree_on_what_ends_a_phase(tmp_path: Path) -> None:
    """Whatever a program calls, in whichever order: what its calls say is what the reader takes."""
    generator = random.Random(3)
    for number in range(40):
        run = write_run(tmp_path / str(number), state="running")
        run.records.write_text("")
        job = Job(run)
        job.step(1, loss=1.0)
        phases = []
        events: list[str] = []
        for n in range(2, 12):
            call = generator.choice(["step", "evaluate", "save", "epoch", "checkpoint"])
            match call:
                case "step":
                    job.step(n, loss=1.0)
                case "epoch":
                    job.evaluated(acc=0.5)
                case "checkpoint":
                    job.record("checkpoint", checkpoint="x", step=n)
                case _:
                    job.alive(call)
            events.append(call)
            phases.append(job._phase)
            rows = list(RecordReader(run.records).read_sparsely())
            # A second is between two records; the last one is followed by a long time.
            rows = [replace(row, time=T0 + index) for index, row in enumerate(rows)]
            end = 1_000
            past = Past(
                history=states((0, "submitted"), (0, "running"), (end, "finished")),
                records=rows,
            )
            (found,) = of(past)
            part = {"train": "steps", "evaluate": "evaluations", "save": "saves"}[
                phases[-1]
            ]
            assert found[part] >= end - 20, (events, phases, found)


def test_a_number_has_one_row() -> None:
    cancelled = states((0, "submitted"), (10, "cancelled"), (50, "submitted"),
                       (60, "running"), (80, "failed"))  # fmt: skip
    (only,) = attempts_of(Past(history=cancelled, records=[]))
    assert only.number == 1
    assert only.seconds[Part.QUEUE] == 10 + 10
    assert only.seconds[Part.START] == 20
    # It is not known how long it has waited for its next start.
    requeued = states((0, "submitted"), (5, "running"), (20, "requeued"))
    rows = attempts_of(Past(history=requeued, records=[]))
    assert [row.number for row in rows] == [1]


# --- clocks ---------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back() -> None:
    """The second node's clock is 100 s behind: no part is negative, and the steps of the second
    attempt are its own."""
    past = Past(
        history=[
            *states((0, "submitted"), (10, "running"), (100, "requeued")),
            Transition(state="running", time=T0 + 20, attempt=2),
            Transition(state="finished", time=T0 + 300),
        ],
        records=[
            met(10), start(20), *steps(30, 90, (1, 70)), saved(95, 70),
            met(30, 2), start(30), resume(31, 70), *steps(40, 280, (71, 300)),
            phase(290, "save"),
        ],
    )  # fmt: skip
    first, second = of(past)
    assert first == parts(queue=10, start=10 + 5, steps=75)
    assert second == parts(steps=190, saves=10)


def test_a_clock_that_was_ahead_for_a_while() -> None:
    records = list(FINISHED.records)
    records[3] = replace(records[3], time=T0 + 90_000)
    found = attempts_of(replace(FINISHED, records=records))
    assert total(found) == 500
    assert min(found[0].seconds.values()) >= 0


_NEXT = {
    "submitted": ("running", "requeued", "failed"),
    "running": ("running", "stopping", "requeued", "failed", "finished"),
    "stopping": ("requeued", "cancelled", "running"),
    "requeued": ("running", "failed"),
    "failed": ("submitted", "running"),
    "cancelled": ("submitted",),
}
"""What may follow a state; twice "running": a node has died without a word."""


def test_parts_of_any_history_add_up() -> None:
    """Histories, records and clocks at random: the parts are all of the time but for that between
    an end and a resume."""
    generator = random.Random(7)
    for _ in range(1_000):
        changes = [(0.0, "submitted")]
        for _ in range(generator.randrange(9)):
            before, state = changes[-1]
            if state not in _NEXT:
                break
            time = before + generator.uniform(-20, 100)
            changes.append((time, generator.choice(_NEXT[state])))
        past = Past(
            history=[_perhaps_in_allocation(generator, s) for s in states(*changes)],
            records=[_any_record(generator) for _ in range(generator.randrange(40))],
            failures=[
                Failure("x", "y", hang_s=generator.uniform(0, 99), time=T0 + 99)
                for _ in range(generator.randrange(3))
            ],
            now=T0 + 1_000,
            is_queued=generator.random() < 0.2,
            is_training=generator.random() < 0.7,
            kept_step=generator.choice([None, 0, 20]),
        )
        attempts = attempts_of(past)
        assert len({each.number for each in attempts}) == len(attempts), past
        for each in attempts:
            assert min(each.seconds.values()) >= -1e-6, past
        assert total(attempts) == pytest.approx(_time_that_counts(past)), past


def _perhaps_in_allocation(generator: random.Random, state: Transition) -> Transition:
    stays = state.state == "requeued" and generator.random() < 0.5
    return replace(state, in_allocation=stays)


def _any_record(generator: random.Random) -> Record:
    time = generator.uniform(-50, 500)
    step = generator.randrange(50)
    kinds = [
        met(time, generator.randrange(4)), start(time), resume(time, step),
        saved(time, step), evaluated(time), rec(time, "step", step=step),
        phase(time, generator.choice(["train", "evaluate", "save", "odd"])),
        rec(time, "stopping", step=step, reason=""),
        rec(time, "ranks", step=step, own_ms=[1.0, 9e4], memory_mib=[]),
    ]  # fmt: skip
    return generator.choice(kinds)


def _time_that_counts(past: Past) -> float:
    assert past.now is not None
    counted = 0.0
    latest = T0
    state = "submitted"
    for transition in past.history[1:]:
        time = max(latest, transition.time)
        if transition.state != "submitted":
            counted += time - latest
        latest = time
        state = transition.state
    if state not in FINAL_STATES:
        counted += past.now - latest
    return counted
