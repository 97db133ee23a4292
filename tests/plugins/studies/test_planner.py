"""`slurmft plan`: the scaling model, and what the command makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmft.core.errors import UsageError
from slurmft.core.files import write_json
from slurmft.plugins.studies.commands import plan
from slurmft.plugins.studies.scaling import model, planner
from slurmft.plugins.studies.scaling.model import TOTAL, Fit, Row, Workload
from slurmft.plugins.studies.scaling.planner import recommend
from slurmft.plugins.studies.scaling.series import row_of
from slurmft.runs.scan import MeasuredRun
from tests.support import CHECKOUT
from tests.support.made_runs import write_run
from tests.support.published_series import phase_s, published_series

PUBLISHED = CHECKOUT / "results" / "published"
EMOTION = PUBLISHED / "mn4_emotion.json"
BENCHMARK = PUBLISHED / "mn4_benchmark.json"
WORK = Workload(train_samples=64_000, batch_size=32, epochs=2, evaluate_samples=8_000)


def held_out_errors(series: Any) -> list[float]:
    """Predicted over measured, less 1, of rows with more than four devices."""
    fit = model.fit([r for r in series.rows if r.devices <= 4])
    errors = []
    for row in series.rows:
        phase, measured = next(iter(row.seconds.items()))
        if row.devices > 4:
            predicted = phase_s(fit.predict(row.devices, row.nodes, row.work), phase)
            errors.append(predicted.median / measured - 1)
    return errors


# --- the model ------------------------------------------------------------------------------------


def test_published_times_are_predicted_from_one_node() -> None:
    """Of 8 and 16 GPUs, with batches of 256 and of 128, from 1, 2 and 4 GPUs with 256."""
    errors = held_out_errors(published_series(EMOTION)["emotion"])
    assert len(errors) == 4
    assert max(map(abs, errors)) < 0.1


@pytest.mark.parametrize("name", ["fp32-64", "fp32-256", "fp16-64", "fp16-256"])
def test_published_training_throughput_is_predicted_from_one_node(name: str) -> None:
    errors = held_out_errors(published_series(BENCHMARK)[f"train-{name}"])
    assert len(errors) == 2
    assert max(map(abs, errors)) < 0.1


TYPICAL = {
    "startup": (2.0, 0.2),
    "train": (5e-3, 12e-3, 2.5e-4, 1e-4),
    "evaluate": (2e-3, 8e-5, 2e-5),
    "metric": (5e-7, 1e-7, 3e-8),
    "broadcast": (6e-5, 1.5e-5, 4e-6),
    "rest": (0.5,),
}
"""Costs of the terms of each phase, in seconds."""


def simulated(devices: int, costs: Mapping[str, Sequence[float]]) -> Row:
    """A row that the model itself makes, without noise."""
    source = Row(label="", work=WORK, devices=1, nodes=1, seconds={})
    draws = {phase: np.array([values]) for phase, values in costs.items()}
    prediction = Fit((source,), draws, np.ones(1)).predict(devices, devices)
    seconds = {phase: float(times[0]) for phase, times in prediction.phases_s.items()}
    return Row(label="", work=WORK, devices=devices, nodes=devices, seconds=seconds)


def test_intervals_hold_what_the_model_itself_makes() -> None:
    """Costs from their defaults' ranges; most runs on 16 devices lie in their 90 % interval."""
    generator = np.random.default_rng(1)
    inside = 0
    for _ in range(20):
        moves = generator.uniform(0, 2, 3)
        train = (5e-3, 12e-3 * moves[0], 5e-3 * 0.05 * moves[1], 5e-3 * 0.02 * moves[2])
        costs = TYPICAL | {"train": train}
        fit = model.fit([simulated(n, costs) for n in (1, 2, 4)])
        measured = simulated(16, costs).seconds["train"]
        predicted = phase_s(fit.predict(16, 16), "train")
        inside += predicted.low <= measured <= predicted.high
    assert inside >= 17


@pytest.mark.parametrize("devices", [1, 4])
def test_one_run_is_met_and_what_it_does_not_show_is_wide(devices: int) -> None:
    row = simulated(
        devices, TYPICAL | {"train": (0.2, 12e-3, 0.01, 4e-3), "startup": (40.0, 4.0)}
    )
    fit = model.fit([row])
    for phase, seconds in row.seconds.items():
        assert phase_s(fit.predict(devices, devices), phase).median == pytest.approx(
            seconds, 0.1
        )
    same = fit.predict(devices, devices).total_s
    far = fit.predict(64, 64).total_s
    assert far.high / far.low > 1.2 * same.high / same.low


def test_a_fit_is_the_same_each_time_and_more_rows_say_more() -> None:
    rows = [simulated(n, TYPICAL) for n in (1, 2, 4, 8)]
    first, again = (model.fit(rows).predict(16, 16).total_s for _ in range(2))
    assert first == again
    one = model.fit(rows[:1]).predict(16, 16).total_s
    assert one.high / one.low > first.high / first.low
    assert first.low < first.median < first.high


def test_predictions_answer_what_if() -> None:
    fit = model.fit([simulated(n, TYPICAL) for n in (1, 2, 4)])
    base = fit.predict(8, 8).total_s.median
    assert fit.predict(8, 8, replace(WORK, epochs=4)).total_s.median > 1.5 * base
    # more steps
    assert fit.predict(8, 8, replace(WORK, batch_size=4)).total_s.median > base
    kept = replace(WORK, kept_global_batch=32)
    assert kept.steps(8) == 4000
    assert [kept.micro_steps_of_step(devices) for devices in (1, 8)] == [1, 1]
    # Of a run with --global-batch-size.
    accumulated = replace(kept, kept_global_batch=100, accumulates=True)
    assert [accumulated.micro_steps_of_step(n) for n in (1, 2, 4)] == [4, 2, 1]


def test_what_no_run_shows_is_named() -> None:
    rows = [replace(simulated(n, TYPICAL), nodes=1) for n in (1, 2)]
    fit = model.fit(rows)
    assert fit.unknowns(WORK, nodes=1) == []
    assert any("the network" in fact for fact in fit.unknowns(WORK, nodes=2))
    (fact,) = fit.unknowns(replace(WORK, batch_size=64), nodes=1)
    assert "all runs had a batch size of 32" in fact
    assert (
        model.fit([simulated(n, TYPICAL) for n in (1, 2)]).unknowns(WORK, nodes=8) == []
    )


def test_costs_are_never_negative() -> None:
    """Times that fall faster than the devices rise: no cost explains them."""
    rows = [
        replace(simulated(n, TYPICAL), seconds={"train": 100 / n**1.3})
        for n in (1, 2, 4)
    ]
    prediction = model.fit(rows).predict(64, 64)
    assert prediction.total_s.low > 0
    assert all(seconds >= 0 for seconds in prediction.parts_s.values())


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    row = Row(label="", work=WORK, devices=1, nodes=1, seconds={TOTAL: seconds})
    with pytest.raises(ValueError, match="above 0"):
        model.fit([row])


# --- rows -----------------------------------------------------------------------------------------


def test_a_run_is_a_row(tmp_path: Path) -> None:
    write_run(tmp_path / "r", nodes=2, nproc_per_node=2, batch_size=8, epochs=1)
    row = row_of(MeasuredRun.read(tmp_path / "r"))
    assert (row.devices, row.nodes) == (4, 2)
    assert (row.work.train_samples, row.work.steps(4)) == (20 * 32, 20)
    assert row.seconds["startup"] == 5.0
    assert row.seconds["rest"] == pytest.approx(7 - 5 - 1.021)


def test_size_that_a_run_has_found(tmp_path: Path) -> None:
    """--batch-size auto: of 60 samples a step memory has held 8 at a time."""
    sizes: dict[str, Any] = {"batch_size": "auto", "global_batch_size": 60}
    write_run(
        tmp_path / "r", nodes=2, nproc_per_node=1, **sizes, result={"batch_size": 8}
    )
    work = row_of(MeasuredRun.read(tmp_path / "r")).work
    assert (work.batch_size, work.micro_steps) == (8, 4)
    assert [work.global_batch_size(devices) for devices in (1, 8)] == [60, 60]
    assert work.micro_steps_of_step(4) == 2


def test_a_restarted_run_counts_without_its_start_up(tmp_path: Path) -> None:
    write_run(tmp_path / "r", result={"attempts": 2})
    assert (
        not {"startup", "rest"}
        & row_of(MeasuredRun.read(tmp_path / "r")).seconds.keys()
    )


# --- the command ----------------------------------------------------------------------------------


def study(folder: Path, nodes: Sequence[int] = (1, 2, 4), **fields: Any) -> str:
    """Runs of one epoch of 20 steps of the smallest, on numbers of nodes."""
    for count in nodes:
        step_s = 0.1 + 0.01 * (count - 1)
        write_run(folder / f"n{count}", nodes=count, step_s=step_s, epochs=1, **fields)
    return str(folder)


def test_plan_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([study(tmp_path), "--nodes", "1-4,8"]) == 0
    out = capsys.readouterr().out
    assert "3 run(s) on 1, 2, 4 devices; 1 device(s) a node" in out
    eight = next(line for line in out.splitlines() if line.startswith("8 "))
    assert eight.endswith("extrapolated")
    for text in (
        "bottleneck on",
        "recommended: ",
        "accuracy: on ",
        "0.7",
        "samples/s  tokens/s",
    ):
        assert text in out


def test_runs_that_cannot_be_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = study(tmp_path / "runs", (1, 2))
    odd: list[dict[str, Any]] = [
        {"world_size": None}, {"world_size": 0}, {"world_size": float("inf")},
        {"nodes": None}, {"train_samples": 0}, {"phases_s": None},
        {"phases_s": {"train": 0.0}}, {"phases_s": {"train": 1e300}},
        {"wall_s": 10**400}, {"wall_s": float("inf")}, {"attempts": None, "global_batch_size": "x"},
    ]  # fmt: skip
    for i, result in enumerate(odd):
        write_run(tmp_path / "runs" / f"odd{i}", result=result, nodes=4, epochs=1)
    edited = write_run(tmp_path / "runs" / "edited", nodes=4, epochs=1)
    config = json.loads(edited.config.read_text())
    config["program"]["settings"]["global_batch_size"] = "x"
    write_json(edited.config, config)
    write_run(tmp_path / "runs" / "bare", result={"metrics": None}, nodes=4, epochs=1)
    assert plan.main([source, "--nodes", "1,2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["label"] for row in found["rows"]} == {"n1", "n2", "bare"}
    told = [note for note in found["notes"] if note.startswith("left out: ")]
    assert len(told) == len(odd) + 1
    with pytest.raises(
        UsageError, match=r"none of 1 finished run\(s\) can be used: the result of"
    ):
        plan.main([str(tmp_path / "runs" / "odd0")])


def test_plan_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        plan.main(
            [study(tmp_path), "--deadline", "1h", "--json", "--global-batch", "32"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"]["nodes"] == 1
    assert "probability >99%" in found["recommended"]["why"]
    assert [c["nodes"] for c in found["counts"]] == [1, 2, 4, 8, 16]
    for count in found["counts"]:
        assert sum(count["shares"].values()) == pytest.approx(1)
        assert (
            count["time_s"]["low"] < count["time_s"]["median"] < count["time_s"]["high"]
        )
        assert count["global_batch_size"] == 32
    assert not any(warning.startswith("accuracy") for warning in found["warnings"])


@pytest.fixture(scope="module")
def emotion_fit() -> Fit:
    series = published_series(EMOTION)["emotion"]
    return model.fit(series.rows)


def test_recommendations(emotion_fit: Fit) -> None:
    """Published: 16.55 s on one node, 9.45 on two, 5.83 on four."""
    options = planner.predict(emotion_fit, [1, 2, 4, 8], emotion_fit.rows[0].work, 4)
    assert [recommend(options, s)[0].nodes for s in (60, 12, 7)] == [1, 2, 4]
    chosen, why = recommend(options, None)
    assert chosen.efficiency.median >= 0.7
    assert "efficiency of 0.7" in why
    chosen, why = recommend(options, options[1].time_s.median)
    assert "not sure" in why or chosen.nodes > 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--deadline", "1s"], "is not met by any of these: the fastest"),
        (["--deadline", "3w"], "'3w' is not a duration"),
        (["--epochs", "0"], "not a whole number of 1 or more"),
        (["--nodes", "0"], "is not a list of counts"),
        (["--nodes", "4-1"], "is not a list of counts"),
        (["--nodes", "1,,2"], "is not a list of counts"),
        (["--nodes", "few"], "is not a list of counts"),
        (["--nodes", "300", "--devices-per-node", "4"], "300 nodes have 1,200 devices"),
        (["--series", "emotoin"], "unknown --series 'emotoin'"),
    ],
)
def test_requests_that_cannot_be_right(
    flags: list[str], message: str, tmp_path: Path
) -> None:
    source = study(tmp_path, (1, 2))
    with pytest.raises(UsageError) as caught:
        plan.main([source, *flags])
    assert message in caught.value.message
    assert caught.value.hint
    assert "\n" not in f"{caught.value.message}{caught.value.hint}"


def test_names_of_series_have_no_settings_that_are_not_set(tmp_path: Path) -> None:
    """What the error says can be typed behind --series."""
    for base in ("one", "other"):
        for nodes in (1, 2):
            write_run(tmp_path / f"{base}{nodes}", nodes=nodes, model=base)
    write_run(tmp_path / "a", nodes=1)
    config = write_run(tmp_path / "b", nodes=1).config
    text = config.read_text()
    # Options of a task of one's own, whose class is not asked for here.
    config.write_text(
        text.replace('"task_option": []', '"task_option": ["a=1", "b=2"]')
    )
    with pytest.raises(UsageError, match="4 kinds of runs") as caught:
        plan.main([str(tmp_path)])
    assert "None" not in str(caught.value.hint)
    assert "task_option=a=1; b=2" in str(caught.value.hint)
    _, _, names = str(caught.value.hint).partition(": ")
    assert "'synthetic model=one'" in names
    assert plan.main([str(tmp_path), "--series", "synthetic model=one"]) == 0


def test_sources_that_say_too_little(tmp_path: Path) -> None:
    write_run(tmp_path / "one" / "a", nodes=2)
    write_run(tmp_path / "same" / "a", nodes=2)
    write_run(tmp_path / "same" / "b", nodes=2, seed=7)
    write_run(tmp_path / "failed" / "a", state="failed")
    write_run(tmp_path / "kinds" / "a")
    write_run(tmp_path / "kinds" / "b", nodes=2, model="other")
    for source, message in (
        ("one", "one run on 2 device(s)"),
        ("same", "2 runs, all on 2 device(s)"),
        ("failed", "none of 1 run(s) has finished: failed"),
        ("kinds", "2 kinds of runs"),
        ("none", "is not a folder"),
    ):
        with pytest.raises(UsageError) as caught:
            plan.main([str(tmp_path / source)])
        assert message in caught.value.message
