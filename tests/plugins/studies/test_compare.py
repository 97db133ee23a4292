"""`slurmft report --compare`: what differs, and whether it is noise."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from slurmft.core.errors import UsageError
from slurmft.plugins.studies.commands import report
from slurmft.plugins.studies.report import comparison
from slurmft.plugins.studies.report.comparison import verdict_of_speed
from slurmft.plugins.studies.scaling.series import row_of
from slurmft.plugins.studies.stats import (
    difference_of_shares,
    ratio_of_repeats,
    ratio_of_windows,
)
from slurmft.runs.scan import MeasuredRun
from tests.support.made_runs import write_run

SEEDS = 3000


# --- the procedure --------------------------------------------------------------------------------


def times(
    generator: np.random.Generator, count: int, rho: float, noise: float = 0.05
) -> Any:
    """Seconds that vary by `noise`, each sharing `rho` of its deviation with the one before."""
    values = generator.standard_normal(count)
    for i in range(1, count):
        values[i] = rho * values[i - 1] + (1 - rho**2) ** 0.5 * values[i]
    return np.exp(noise * values)


def by_windows(generator: np.random.Generator, rho: float, slower: float) -> Any:
    steps = np.full(40, 10.0)
    sides = [np.array([steps, times(generator, 40, rho) * f]) for f in (slower, 1.0)]
    return ratio_of_windows(sides[0], sides[1])


def by_repeats(generator: np.random.Generator, count: float, slower: float) -> Any:
    sides = [times(generator, int(count), 0, 0.02) * f for f in (slower, 1.0)]
    return ratio_of_repeats(sides[0], sides[1])


@pytest.mark.extra("studies")
@pytest.mark.parametrize(
    ("found_by", "setting"),
    [(by_windows, 0.0), (by_windows, 0.4), (by_repeats, 3), (by_repeats, 5)],
)
def test_false_alarms_are_rare_and_differences_of_ten_percent_found(
    found_by: Callable[..., Any], setting: float
) -> None:
    share = {}
    for slower in (1.0, 1.1):
        found = [
            found_by(np.random.default_rng(s), setting, slower) for s in range(SEEDS)
        ]
        told = [f for f in found if f is not None]
        assert len(told) > 0.95 * SEEDS
        share[slower] = sum(not low <= 1 <= high for _, low, high in told) / len(told)
    assert share[1.0] <= 0.07
    assert share[1.1] >= 0.9


def test_too_few_steps_are_no_answer() -> None:
    generator = np.random.default_rng(0)
    few = np.array([np.full(9, 10.0), times(generator, 9, 0)])
    assert ratio_of_windows(few, few) is None
    drift = np.array([np.full(12, 10.0), np.exp(np.linspace(0, 1, 12))])
    assert ratio_of_windows(drift, drift) is None


def test_words_for_an_interval() -> None:
    assert (
        verdict_of_speed(1.32, 1.25, 1.4) == "B is 1.32 x faster (95 %: 1.25 to 1.40)"
    )
    assert verdict_of_speed(0.8, 0.75, 0.9) == "B is 1.25 x slower (95 %: 1.11 to 1.33)"
    assert (
        verdict_of_speed(1.01, 0.98, 1.03)
        == "no difference beyond noise (0.98 to 1.03)"
    )


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.8), (0.5, 0.5), (0.7, 0.95)])
def test_intervals_of_shares_hold_the_difference(p: float, q: float) -> None:
    """Over all numbers of right answers, of 20 and of 30."""
    inside = 0.0
    for x, y in itertools.product(range(21), range(31)):
        low, high = difference_of_shares(x / 20, 20, y / 30, 30)
        inside += binom.pmf(x, 20, p) * binom.pmf(y, 30, q) * (low <= q - p <= high)
    assert 0.94 < inside < 0.98


# --- runs -----------------------------------------------------------------------------------------


def log_steps(
    path: Path, rates: list[float], redone: list[float] | None = None
) -> None:
    """Records of a run: ten steps a window; `redone` are the last ones again, after a crash."""
    lines: list[dict[str, Any]] = [{"event": "start"}]
    first = 0
    for part in (rates, redone or []):
        for rate in part:
            lines += [
                {"event": "step", "step": first + i, "loss": 1.0} for i in range(1, 11)
            ]
            first += 10
            lines[-1]["samples_per_s"] = rate
        first -= 10 * len(redone or [])
        lines.append({"event": "start"})
    lines.append({"event": "epoch", "epoch": 1, "metrics": {}})
    (path / "records.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


def test_steps_done_again_count_once(tmp_path: Path) -> None:
    write_run(tmp_path / "r")
    log_steps(tmp_path / "r", [100.0] * 8 + [1.0, 1.0], redone=[50.0, 50.0])
    steps, sample_s = comparison.windows(MeasuredRun.read(tmp_path / "r"))
    assert (1 / sample_s).tolist() == pytest.approx([100.0] * 7 + [50.0] * 2)
    assert steps.tolist() == [10.0] * 9


def compared(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    assert report.main([*map(str, argv), "--compare"]) == 0
    return capsys.readouterr().out


def test_single_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = {"time": "2026-11-21T12:00:00+00:00"}
    write_run(tmp_path / "a", epochs=1)
    write_run(tmp_path / "b", epochs=1, precision="bf16", submission=later,
              versions={"torch": "2.14.0"}, result={"metrics": {"accuracy": 0.95}})  # fmt: skip
    generator = np.random.default_rng(0)
    for name, rate in (("a", 100), ("b", 130)):
        log_steps(tmp_path / name, (rate * times(generator, 30, 0)).tolist())
    out = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert "precision  " in out.replace("precision used", "")
    assert "2.13.0  ->  2.14.0" in out
    assert "training: B is 1.3" in out
    assert "x faster (95 %: 1.2" in out
    assert "t-interval over steps" in out
    assert "B is higher by 0.0500" in out
    assert "binomial intervals, for 1,000 and 1,000 validation samples" in out
    assert "evaluation: cannot tell" in out
    assert "all of A ran before B" in out
    assert "the first 10% of the steps are left out as warm-up" in out


def test_too_short_runs_and_other_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", epochs=1)
    write_run(tmp_path / "b", epochs=1, batch_size=64, result={"attempts": 2})
    out = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert "training: cannot tell: too few steps (3 and 3 windows" in out
    assert "not the same work: global batch 32 in A, 64 in B" in out
    assert "restarted: b (2 starts) in B" in out


def test_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        for hour, (side, rate) in enumerate((("a", 100.0), ("b", 100.5))):
            result = {
                "train_samples_per_s": rate + i,
                "metrics": {"accuracy": 0.9 + 0.001 * i},
            }
            submission = {"time": f"2026-11-21T1{i}:{hour}0:00+00:00"}
            write_run(
                tmp_path / side / f"{i}", seed=i, result=result, submission=submission
            )
    out = compared(capsys, tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(out)
    verdicts = {f["what"]: f["verdict"] for f in found["findings"]}
    assert set(verdicts) == {"training", "evaluation", "accuracy"}
    assert all(v.startswith("no difference beyond noise") for v in verdicts.values())
    assert found["differences"] == []
    assert found["notes"] == ["the runs of A and B were interleaved"]


def test_single_runs_of_one_submission_are_not_interleaved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study submits all its runs in one second; they run one after the other."""
    for side in ("a", "b"):
        write_run(tmp_path / side, submission={"time": "2026-11-21T10:00:00+00:00"})
    out = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert "not interleaved: all of A ran before B" in " ".join(out.split())


def test_requests_that_cannot_be_right(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    write_run(tmp_path / "failed" / "r", state="failed")
    write_run(tmp_path / "mixed" / "a")
    write_run(tmp_path / "mixed" / "b", nodes=2)
    for other, message in (
        ("failed", "holds no finished run"),
        ("mixed", "are not repeats: they differ in nodes"),
        ("good", "is in A and in B"),
        ("none", "is not a folder"),
    ):
        with pytest.raises(UsageError) as caught:
            report.main([str(tmp_path / "good"), str(tmp_path / other), "--compare"])
        assert message in caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phases_s": {"train": None}}, "phases_s"),
        ({"metrics": None}, "metrics"),
        ({"train_samples_per_s": 0.0}, "train_samples_per_s"),
        ({"attempts": None, "global_batch_size": "8"}, "global_batch_size, attempts"),
    ],
)
def test_results_that_cannot_be_compared(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "a" / "elsewhere" / "odd")  # of the same name, but good
    write_run(tmp_path / "a" / "odd", seed=7, result=changes)
    write_run(tmp_path / "b")
    told = f"A: left out: the result of odd has no usable {words}"
    assert told in compared(capsys, tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match=f"holds no run to compare: .* {words}"):
        report.main([str(tmp_path / "a" / "odd"), str(tmp_path / "b"), "--compare"])


def test_values_that_are_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    odd = write_run(
        tmp_path / "b", result={"metrics": {"accuracy": "high", "f1": None}}
    )
    lines = [
        {"event": "step"},
        {"event": "step", "step": 2, "samples_per_s": -1},
        {"event": "epoch"},
    ]
    odd.records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = json.loads(compared(capsys, tmp_path / "a", tmp_path / "b", "--json"))
    verdicts = {f["what"]: f["verdict"] for f in found["findings"]}
    assert verdicts["accuracy"] == "cannot tell: it is not a number in some run"
    assert "(3 and 0 windows" in verdicts["training"]


def test_an_accuracy_that_is_no_share_and_gradients_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    write_run(
        tmp_path / "b", result={"metrics": {"accuracy": 84.0}, "gradients": "none"}
    )
    comparison = json.loads(compared(capsys, tmp_path / "a", tmp_path / "b", "--json"))
    verdicts = {f["what"]: f["verdict"] for f in comparison["findings"]}
    assert verdicts["accuracy"].startswith("cannot tell")


def test_a_link_is_the_same_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError, match="is in A and in B"):
        report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--compare"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compare"], "--compare needs two runs"),
        (["--json"], "--json prints a comparison"),
    ],
)
def test_flags_that_need_each_other(
    flags: list[str], message: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "a")
    with pytest.raises(UsageError, match=message):
        report.main([str(tmp_path / "a"), *flags])


def test_a_report_of_two_cells_says_whether_they_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        for precision, rate in (("fp32", 100.0), ("bf16", 140.0)):
            result = {"train_samples_per_s": rate + seed}
            folder = tmp_path / f"{precision}-{seed}"
            write_run(folder, seed=seed, precision=precision, result=result)
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "A difference, or noise?" in out
    assert "A is precision bf16; B is precision fp32" in out
    assert "training: B is 1.4" in out
    write_run(tmp_path / "third", precision="fp16")
    assert report.main([str(tmp_path)]) == 0
    assert "or noise?" not in capsys.readouterr().out


def test_a_test_split_is_counted_apart(tmp_path: Path) -> None:
    """Two evaluations of 60 samples and a test split of 40: both metrics have the interval of
    their own number of samples."""
    accuracies = {"a": 20 / 60, "b": 22 / 60}
    for name, accuracy in accuracies.items():
        metrics = {"accuracy": accuracy, "test_accuracy": accuracy}
        result = {"metrics": metrics, "evaluate_samples": 160, "test_samples": 40}
        write_run(tmp_path / name, epochs=2, result=result)
    findings = comparison.compare(tmp_path / "a", tmp_path / "b").findings
    by_name = {finding.what: finding for finding in findings}
    for name, samples in (("accuracy", 60), ("test_accuracy", 40)):
        expected = difference_of_shares(20 / 60, samples, 22 / 60, samples)
        assert (by_name[name].low, by_name[name].high) == expected
        assert f"for {samples} and {samples} " in by_name[name].method


def test_seconds_of_a_test_split_are_no_evaluation(tmp_path: Path) -> None:
    """The planner's evaluations are those of the validation data."""
    plain, tested = tmp_path / "plain", tmp_path / "tested"
    write_run(plain, epochs=2, result={"evaluate_samples": 120})
    row = row_of(MeasuredRun.read(plain))
    seconds = row.seconds["evaluate"]
    write_run(tested, epochs=2, result={"evaluate_samples": 160, "test_samples": 40})
    with_test = row_of(MeasuredRun.read(tested))
    assert with_test.work.evaluate_samples == row.work.evaluate_samples == 60
    assert with_test.seconds["evaluate"] == pytest.approx(seconds * 120 / 160)
    assert sum(with_test.seconds.values()) == pytest.approx(sum(row.seconds.values()))


@pytest.mark.parametrize("flags", [(), ("--output",), ("--compare",)])
def test_a_prediction_measures_no_training(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Its model's run is named; among trainings it is left out."""
    folder = tmp_path / "predicted"
    run = write_run(folder)
    config = json.loads(run.config.read_text())
    config["program"]["kind"] = "predict"
    config["program"]["settings"]["model"] = str(tmp_path / "trained" / "model")
    run.config.write_text(json.dumps(config))
    arguments = [str(folder)]
    if "--compare" in flags:
        write_run(tmp_path / "trained")
        arguments.append(str(tmp_path / "trained"))
    arguments += flags
    if "--output" in flags:
        arguments.append(str(tmp_path / "report"))
    with pytest.raises(UsageError, match=r"no training, but 1 prediction") as raised:
        report.main(arguments)
    assert str(tmp_path / "trained") in str(raised.value.hint)
    write_run(tmp_path / "runs" / "trained")
    folder.rename(tmp_path / "runs" / "predicted")
    assert report.main([str(tmp_path / "runs")]) == 0
