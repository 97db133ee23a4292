"""Runs that are interrupted end as if they had not been: on simulated nodes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slurmft.core.files import write_json
from slurmft.core.run_records import Saved, Stopping
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.train.loop.checkpoint import FORM
from tests.conftest import Done, Following, records, slurmft
from tests.support import until
from tests.support.models import write_emotion, write_model, write_raising
from tests.support.small_disk import SmallDisk
from tests.train.test_trainer import assert_gone, emotion, processes_of

pytestmark = pytest.mark.processes

# Dropout stays on: the random generators must come back, too.
EXACT = (
    "--cluster",
    "local",
    "--precision",
    "fp32",
    "--log-every",
    "1",
    "--learning-rate",
    "1e-3",
)
EPOCHS = 3
"""So 153 steps on two ranks: about 40 are over when the last of three stops has come."""


def arguments(data: Path, model: Path, runs: Path, nodes: int = 2) -> tuple[str, ...]:
    sizes = ("--nodes", str(nodes), "--batch-size", "2", "--epochs", str(EPOCHS))
    return (
        *EXACT,
        *sizes,
        "--runs-dir",
        str(runs),
        *emotion(data, model),
        "--eval-batch-size",
        "2",
        *("--optimizer", "muon"),  # has AdamW's state, too
    )


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Done:
    runs = tmp_path_factory.mktemp("undisturbed")
    done = slurmft(
        "submit", "--follow", *arguments(tiny_data, tiny_model, runs), imported=True
    )
    assert done.code == 0, done.err
    return done


def rank_pids(run: RunDir) -> list[int]:
    """Processes of a run's ranks by their number: in no order of ranks or nodes."""
    return pids(run, "slurmft.train.rank", without="slurmft.node.torchrun")


def pids(run: RunDir, words: str, without: str = "\n") -> list[int]:
    """Processes of a run with these words in their command lines, by their number."""
    found = processes_of(run)
    return sorted(
        pid for pid, line in found.items() if words in line and without not in line
    )


@contextlib.contextmanager
def held(pids: Sequence[int]) -> Iterator[None]:
    """Processes are stopped meanwhile: their run does not come to its end before it is harmed."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def losses(run: RunDir) -> list[float]:
    """The loss of every step; of a step that was done twice, the second."""
    return list({r["step"]: r["loss"] for r in records(run, "step")}.values())


def assert_same(run: RunDir, expected: RunDir) -> None:
    """Losses, metrics and weights are those of another run, to the last bit."""
    assert losses(run) == losses(expected)
    metrics = [
        {r["epoch"]: r["metrics"] for r in records(each, "epoch")}
        for each in (run, expected)
    ]
    assert metrics[0].keys() == metrics[1].keys()
    # The loss sums by batches, which are others after a stop within an evaluation.
    for epoch, values in metrics[0].items():
        assert values == pytest.approx(metrics[1][epoch], rel=1e-6)
    weights = [load_file(each.model / "model.safetensors") for each in (run, expected)]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        assert np.array_equal(weights[0][name], weights[1][name]), name


def steps_twice(run: RunDir) -> int:
    """Steps that were lost, and done again."""
    steps = [r["step"] for r in records(run, "step")]
    return len(steps) - len(set(steps))


def states(run: RunDir) -> list[str]:
    return [state.state for state in run.history()]


def one_rank(run: RunDir) -> int:
    return rank_pids(run)[1]


def one_torchrun(run: RunDir) -> int:
    return pids(run, "slurmft.node.torchrun")[1]


def one_node(run: RunDir) -> int:
    return pids(run, "slurmft.node.task")[1]


def test_signals_to_any_process(
    undisturbed: Done, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """Any stop signal, to any one process: all ranks stop at one step, and none is lost."""
    job = Following(*arguments(tiny_data, tiny_model, tmp_path), imported=True)
    hits: list[tuple[Callable[[RunDir], int], signal.Signals]] = [
        (one_rank, signal.SIGUSR2),
        (one_torchrun, signal.SIGTERM),
        (one_node, signal.SIGINT),
    ]
    job.at_step(10)
    for number, (find, sent) in enumerate(hits, 1):
        os.kill(find(job.run), sent)
        await_resumes(job.run, number)
    code, text = job.end()
    assert code == 0, text
    assert text.count("stopping after step") == 3
    assert "SIGUSR2 on rank" in text
    assert steps_twice(job.run) == 0
    assert_same(job.run, undisturbed.run)
    assert states(job.run)[-1] == "finished"
    assert states(job.run).count("requeued") == 3
    result = json.loads(job.run.result.read_text())
    expected = undisturbed.result
    for name in ("train_samples", "evaluate_samples", "steps", "loss"):
        assert result[name] == expected[name]
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert result["attempts"] == 4
    assert_gone(job.run)


@pytest.mark.extra("faults")
def test_where_the_time_of_a_killed_run_went(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """A rank is killed, and torchrun starts the ranks again; then a stop leads to a requeue."""
    flags = arguments(tiny_data, tiny_model, tmp_path)
    every = ("--checkpoint-every-steps", "10", "--evaluate-every", "steps:30")
    job = Following(*flags, *every, imported=True)
    job.at_step(25)
    os.kill(one_rank(job.run), signal.SIGKILL)
    await_resumes(job.run, 1)
    os.kill(one_rank(job.run), signal.SIGUSR2)
    code, text = job.end()
    assert code == 0, text
    assert steps_twice(job.run) > 0
    # What a stop has saved is known without the folder of checkpoints, too.
    (stopping,) = RecordReader(job.run.records).read(Stopping)
    saved = RecordReader(job.run.records).read(Saved)
    assert stopping.step in [each.step for each in saved]
    facts = json.loads(slurmft("status", str(job.run.path), "--json").out)
    (failure,) = facts["failures"]
    assert "was killed by SIGKILL" in failure["message"]
    use = facts["time_use"]
    keys = [key for key in use["attempts"][0] if key.endswith("_s")]
    first, second = use["attempts"]
    for each in (use, first, second):
        for key in ("steps_s", "start_s", "saves_s"):
            assert each[key] > 0, (key, each)
        assert each["hangs_s"] == each["program_s"] == 0
    assert (first["lost_s"] > 0, second["lost_s"]) == (True, 0)
    history = job.run.history()
    total_s = history[-1].time - history[0].time
    assert sum(use[key] for key in keys) == pytest.approx(total_s)
    assert use["total_s"] == pytest.approx(total_s)
    assert use["ettr"] == pytest.approx(use["steps_s"] / total_s)
    # The clock of the phases, which counts what was not lost, has the same evaluations but for the
    # one that the stop may have cut.
    result = json.loads(job.run.result.read_text())
    assert use["evaluations_s"] == pytest.approx(
        sum(result["phases_s"].values()) - result["phases_s"]["train"], abs=1.0
    )
    page = slurmft("status", str(job.run.path)).out
    assert f"ETTR {100 * use['ettr']:.1f} % of" in page
    assert "where the time went" in page


PARTS = {
    "reporter": ["counts", "ran_s", "ran_before_s", "began_at", "phases_s"],
    "position": [
        *("step", "epoch", "batch", "phase", "evaluated"),
        *("metrics", "by_class", "test"),
        *("best", "since_best", "missing_since_best"),
    ],
    "learner": ["optimizer", "frozen", "scheduler", "scaler"],
    "evaluator": ["samples", "loss"],
    "generators": ["ranks"],
}
"""What the states of the trainer's parts hold in the form of checkpoints of that number."""
GENERATORS = ["python", "numpy", "torch"]
COUNTS = [
    "samples",
    "tokens",
    "padded_tokens",
    "flops",
    "evaluated",
    "loss",
    "startup_s",
]


def test_form_of_checkpoints(undisturbed: Done) -> None:
    """Whoever changes it raises `checkpoint.FORM`: else another version would read it wrongly."""
    checkpoints = undisturbed.run.checkpoints
    (name,) = undisturbed.run.checkpoint_names()
    state = json.loads((checkpoints / name / "state.json").read_text())
    parts = state["parts"]
    assert state["form"] == FORM == 4
    assert {part: list(values) for part, values in parts.items()} == PARTS
    assert all(list(rank) == GENERATORS for rank in parts["generators"]["ranks"])
    assert list(parts["reporter"]["counts"]) == COUNTS
    tensors = sorted(file.stem for file in (checkpoints / name).glob("*.safetensors"))
    assert tensors == ["model", "optimizer", "predicted"]


def test_resume_on_fewer_nodes(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """The global batch and the order of the samples stay; what changed is said."""
    flags = (
        *arguments(tiny_data, tiny_model, tmp_path, 3),
        "--dropout",
        "0",
        "--no-requeue",
    )
    # Muon works in bf16, where sums of other ranks differ more
    flags += ("--optimizer", "adamw")
    whole = slurmft("submit", "--follow", *flags, imported=True)
    assert whole.code == 0, whole.err
    job = Following(*flags, imported=True)
    job.at_step(10)
    os.kill(one_rank(job.run), signal.SIGUSR2)
    code, text = job.end()
    assert code == 75
    assert "not requeued (--no-requeue)" in text
    assert f"slurmft resume {job.run.path}" in text
    assert_gone(job.run)

    done = slurmft(
        "resume", str(job.run.path), "--nodes", "2", "--follow", imported=True
    )
    assert done.code == 0, done.err
    assert "world_size 3 -> 2" in done.out
    assert "global batch stays 6: 2 micro-step(s) on 2 process(es)" in done.out
    assert losses(job.run) == pytest.approx(losses(whole.run), abs=1e-4)
    for name in ("train_samples", "steps", "global_batch_size"):
        assert done.result[name] == whole.result[name]
    assert done.result["world_size"] == 2
    again = slurmft("resume", str(job.run.path))
    assert again.code == 2
    assert "has finished" in again.err


def await_resumes(run: RunDir, count: int) -> None:
    """Waits until a run has resumed so often. On the screen it is up to two seconds later."""
    until(lambda: len(records(run, "resume")) == count, run.history, every_s=0.02)


def await_evaluation(run: RunDir, total: int) -> None:
    """Waits until a rank evaluates that many samples."""
    reader = RecordReader(run.records)
    until(
        lambda: any(
            record["total"] == total for record in reader.read_values("evaluate")
        ),
        every_s=0.01,
    )


@pytest.mark.extra("training")
def test_stop_in_evaluations(tmp_path: Path, tiny_model: Path) -> None:
    """In that of an epoch, and in that of the test split: what was predicted before is kept, and
    every sample is predicted once."""
    # So many that a stop, sent at the first record of an evaluation, comes before its end.
    data = write_emotion(tmp_path / "data", train=24, validation=1600)
    rows = (data / "validation.jsonl").read_text().splitlines(keepends=True)
    (data / "test.jsonl").write_text("".join(rows[:1000]))
    flags = (
        "--nodes",
        "2",
        "--batch-size",
        "8",
        "--epochs",
        "1",
        "--eval-batch-size",
        "1",
    )
    source = ("--runs-dir", str(tmp_path / "runs"), *emotion(data, tiny_model))
    job = Following(*EXACT, *flags, *source, imported=True)
    job.at_step(2)
    # Samples of a rank: of the validation data, of the test split.
    for number, total in enumerate((800, 500), 1):
        await_evaluation(job.run, total)
        os.kill(one_rank(job.run), signal.SIGTERM)
        await_resumes(job.run, number)
    code, text = job.end()
    assert code == 0, text
    assert "(from step-00000002-e" in text
    assert "(from step-00000002-t" in text
    assert steps_twice(job.run) == 0
    # Each resume divides among its two ranks what was left.
    totals = {record["total"] for record in records(job.run, "evaluate")}
    for resume, samples in zip(records(job.run, "resume"), (1600, 1000), strict=True):
        predicted = int(resume["checkpoint"][-8:])
        assert math.ceil((samples - predicted) / 2) in totals - {800, 500}
    result = json.loads(job.run.result.read_text())
    assert result["evaluate_samples"] == 2600
    whole = slurmft("submit", "--follow", *EXACT, *flags, *source, imported=True)
    assert whole.result["metrics"] == pytest.approx(result["metrics"], rel=1e-6)


def test_exception_that_comes_back_ends_the_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One restart, and no more: at the same step the same would happen for ever."""
    task = write_raising(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    flags = ("--nodes", "2", "--batch-size", "4", "--max-restarts", "5")
    task_flags = ("--task", task, "--data", "data", "--model", str(tiny_model))
    source = ("--cluster", "local", "--runs-dir", str(tmp_path / "runs"), *task_flags)
    done = slurmft("submit", "--follow", *EXACT, *flags, *source, imported=True)
    assert done.code == 1
    assert done.err.count("Traceback") == 1
    raised = [f for f in done.run.all_failures() if f.traceback and not f.secondary]
    assert len(raised) == 2
    assert_gone(done.run)


def test_cancelled_run_can_go_on(
    undisturbed: Done, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    job = Following(*arguments(tiny_data, tiny_model, tmp_path), imported=True)
    job.at_step(10)
    with held(rank_pids(job.run)):
        assert slurmft("cancel", str(job.run.path)).code == 0
    assert job.end()[0] == 5
    done = slurmft("resume", str(job.run.path), "--follow", imported=True)
    assert done.code == 0, done.err
    assert_same(job.run, undisturbed.run)


def test_attempt_that_was_superseded_ends(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """As on a node that Slurm gave up, and that lives: it must not write into the run any more."""
    flags = ("--epochs", "300", "--no-requeue")
    job = Following(*arguments(tiny_data, tiny_model, tmp_path), *flags, imported=True)
    job.until("step 20/")
    write_json(job.run.attempt, json.loads(job.run.attempt.read_text()) | {"number": 9})
    assert job.end()[0] == 1
    assert_gone(job.run)
    logs = [path.read_text() for path in job.run.logs.glob("task-*.log")]
    # who sees it first ends the others
    assert any("a later attempt" in text for text in logs)


@pytest.mark.extra("training")
def test_early_stopping_keeps_the_best_model(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """Also after a resume in between: a rate so high that the weights only get worse."""
    flags = (*emotion(tiny_data, tiny_model), "--precision", "fp32", "--epochs", "30")
    flags += ("--batch-size", "8", "--learning-rate", "0.05", "--early-stopping", "3")
    job = Following(
        "--cluster", "local", *flags, "--runs-dir", str(tmp_path), imported=True
    )
    until(lambda: job.run.records.exists() and records(job.run, "epoch"), every_s=0.02)
    with held(rank_pids(job.run)):
        assert slurmft("cancel", str(job.run.path)).code == 0
    code, text = job.end()
    assert code == 5, text
    done = slurmft("resume", "--follow", str(job.run.path), imported=True)
    assert done.code == 0, done.err
    epochs = records(job.run, "epoch")
    values = [r["metrics"]["accuracy"] for r in epochs]
    best = max(range(len(values)), key=lambda i: (values[i], -i))
    assert len(values) == best + 1 + 3
    result = json.loads(job.run.result.read_text())
    assert result["metrics"] == epochs[best]["metrics"]
    names = [p.name for p in job.run.checkpoints.iterdir()]
    assert len(names) == 1
    saved, kept = (
        load_file(p)
        for p in (
            job.run.model / "model.safetensors",
            job.run.checkpoints / names[0] / "model.safetensors",
        )
    )
    assert all(np.array_equal(saved[name], kept[name]) for name in saved)


@pytest.mark.extra("training")
def test_full_disk_at_the_model(tmp_path: Path, tiny_data: Path) -> None:
    """The training is done, and the model does not fit: it is tried again until the job is to stop;
    the next attempts only save it. With room, none of its steps is done again."""
    # far larger than what is trained of it
    model = write_model(tmp_path / "model", words=16384)
    flags = (*EXACT, *emotion(tiny_data, model), "--nodes", "2", "--batch-size", "8")
    limits = ("--epochs", "1", "--checkpoint-every-steps", "5", "--max-requeues", "0")
    with SmallDisk(tmp_path / "small disk", 8) as disk:
        (disk / "ballast").write_bytes(bytes(6 * 2**20))
        others = disk / "an older run" / "checkpoints" / "step-00000010"
        others.mkdir(parents=True)
        (disk / "ballast").rename(others / "model.safetensors")
        job = Following("--runs-dir", str(disk), *flags, *limits, imported=True)
        told = job.until("warning: no room for the model: it needs 2.")
        for words in (
            "tmpfs at ",
            f"{others.parent} (6.0 MiB)",
            "slurmft clean --runs-dir",
        ):
            assert words in told
        # the others gave way
        assert job.run.checkpoint_names() == ["step-00000013-evaluated"]
        os.kill(one_node(job.run), signal.SIGUSR2)
        job.until("resumes after step 13")
        job.until("warning: no room for the model")
        os.kill(one_node(job.run), signal.SIGUSR2)
        code, text = job.end()
        assert code == 1
        assert "no room for the model" in text
        last = job.run.history()[-1]
        assert states(job.run)[-1] == "failed"
        assert last.reason.endswith(
            "no new checkpoint in this attempt (--max-requeues)"
        )
        (others / "model.safetensors").unlink()
        done = slurmft("resume", "--follow", str(job.run.path), imported=True)
        assert done.code == 0, done.err
        assert steps_twice(job.run) == 0
        assert {r["step"] for r in records(job.run, "resume")} == {13}
        saved = load_file(job.run.model / "model.safetensors")
        # all words are there
        assert max(len(weight) for weight in saved.values()) > 16384
        assert json.loads(job.run.result.read_text())["steps"] == 13
        assert not list(job.run.path.glob(".model*"))
