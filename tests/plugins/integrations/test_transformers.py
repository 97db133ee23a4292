"""transformers' Trainer in a job: it stops, resumes exactly, and takes whole checkpoints only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from slurmft.core.errors import Exit
from slurmft.runs.rundir import RUN_DIR, RunDir
from tests.conftest import slurmft
from tests.plugins.integrations.scripts import Script, events, make_run
from tests.support import PATIENCE_S

pytestmark = pytest.mark.extra("integrations")

SCRIPT = """
import json, os, signal, sys, time
import torch
from transformers import (
    AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed,
)

model, out, settings = sys.argv[1:]
settings = json.loads(settings)
trainings = settings.pop("trainings", 1)
torch.set_num_threads(1)  # a node's profile sets another number

class Texts(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = torch.randint(5, 50, (count, 12), generator=torch.Generator().manual_seed(2))
    def __len__(self):
        return len(self.ids)
    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i, 0] % 3}

steps = 0
class Signal(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        global steps
        steps += 1
        time.sleep(0.05 * (args.world_size - 1))  # ranks agree every half a second
        if f"{training}:{state.global_step + 1}" == os.environ.get("AT"):
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
            while getattr(signal, os.environ["SIGNAL"]) in signal.sigpending():
                time.sleep(0.01)  # a thread takes it
            time.sleep(0.2)

def metrics(prediction):
    if os.environ.get("FAILS"):
        raise ValueError("no such metric")
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

arguments = dict(
    output_dir=out, per_device_train_batch_size=4, num_train_epochs=3, logging_steps=1,
    learning_rate=1e-3, use_cpu=True, report_to=[], disable_tqdm=True, eval_strategy="epoch",
    save_strategy="no", metric_for_best_model="accuracy",
)
for training in range(1, trainings + 1):
    set_seed(training)
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=3),
        args=TrainingArguments(**arguments | settings), callbacks=[Signal()],
        train_dataset=Texts(80), eval_dataset=Texts(12), compute_metrics=metrics,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        with open(f"{out}/history-{training}.json", "w") as file:
            json.dump(trainer.state.log_history, file)
if trainer.is_world_process_zero():
    print("steps in this process:", steps)
    trainer.save_model(out + "/final")
"""
"""It knows nothing of slurmft. An epoch has 20 steps for one rank, and 10 for two."""

RUNNER = ("-m", "slurmft.plugins.integrations", "transformers")
OWN_SCHEDULE = {
    "save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 6,
    "save_total_limit": 1, "load_best_model_at_end": True, "num_train_epochs": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train it.py"
    path.write_text(SCRIPT)
    return path


Undisturbed = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def undisturbed(
    script: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    """What the script logs without slurmft; each is run once."""
    known: dict[str, Path] = {}

    def run(
        settings: dict[str, Any] | None = None, ranks: int = 1, training: int = 1
    ) -> Any:
        text = json.dumps(settings or {})
        if (key := f"{ranks} {text}") not in known:
            known[key] = tmp_path_factory.mktemp("undisturbed")
            torchrun = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={ranks}",
            ]
            command = [*(torchrun if ranks > 1 else ()), str(script), str(tiny_model)]
            environment = {k: v for k, v in os.environ.items() if k != RUN_DIR}
            subprocess.run(
                [sys.executable, *command, str(known[key]), text],
                env=environment | {"OMP_NUM_THREADS": "1"}, check=True, timeout=PATIENCE_S,
            )  # fmt: skip
        return history(known[key], training)

    return run


def history(out: Path, training: int = 1) -> list[dict[str, Any]]:
    """What Trainer logged of steps and evaluations, without times."""
    found = json.loads((out / f"history-{training}.json").read_text())
    keys = (
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "eval_loss",
        "eval_accuracy",
    )
    rows = [{k: row[k] for k in keys if k in row} for row in found]
    return [row for row in rows if "loss" in row or "eval_loss" in row]


@pytest.fixture
def start(script: Path, tiny_model: Path, tmp_path: Path) -> Callable[..., Script]:
    def start(
        run: RunDir, at: str = "", signal: str = "SIGUSR2", ranks: int = 1, fails: str = "",
        **settings: Any,
    ) -> Script:  # fmt: skip
        """Starts an attempt, which gets a signal within a step, "training:step"."""
        command = (
            *RUNNER,
            str(script),
            str(tiny_model),
            str(tmp_path),
            json.dumps(settings),
        )
        environment = {"AT": at, "SIGNAL": signal, "FAILS": fails}
        return Script(run, *command, ranks=ranks, env=environment)

    return start


Start = Callable[..., Script]


def stop(start: Start, run: RunDir, at: str, **more: Any) -> None:
    attempt = start(run, at, **more)
    assert attempt.end() == Exit.OK
    assert attempt.has_stopped
    assert not run.result.exists()


def finish(start: Start, run: RunDir, **more: Any) -> dict[str, Any]:
    attempt = start(run, **more)
    assert attempt.end() == Exit.OK
    assert not attempt.has_stopped
    result: dict[str, Any] = json.loads(run.result.read_text())
    return result


def test_interrupted_run_equals_an_undisturbed_one(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Dropout's masks, too; and the evaluation at the end of an epoch is not left out."""
    run = make_run(tmp_path)
    for step in (7, 20, 34):
        stop(start, run, f"1:{step}")
    result = finish(start, run)
    found = history(tmp_path)
    assert found == undisturbed()
    assert len({row["loss"] for row in found if "loss" in row}) == 60

    stops = [event["step"] for event in events(run, "stopping")]
    assert stops == [event["step"] for event in events(run, "resume")]
    assert [after - step for after, step in zip(stops, (7, 20, 34), strict=True)] == [
        0,
        0,
        0,
    ]
    assert [record["step"] for record in events(run, "step")] == list(range(1, 61))
    assert "samples_per_s" in events(run, "step")[-1]
    epochs = events(run, "epoch")
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    assert result["primary_metric"] == "accuracy"
    assert result["metrics"].items() >= epochs[-1]["metrics"].items()
    assert epochs[-1]["metrics"]["loss"] == found[-1]["eval_loss"]
    losses = [row["loss"] for row in undisturbed() if "loss" in row]
    assert result["metrics"]["train_loss"] == pytest.approx(mean(losses), abs=1e-6)


def test_train_loss_of_a_run_that_was_resumed_at_its_end(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Trainer reports 0 for it."""
    run = make_run(tmp_path)
    stop(start, run, "1:60")
    result = finish(start, run)
    losses = [row["loss"] for row in undisturbed() if "loss" in row]
    assert result["metrics"]["train_loss"] == pytest.approx(mean(losses), abs=1e-6)


def test_two_ranks_stop_after_the_same_step(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    stop(start, run, "1:5", ranks=2)
    result = finish(start, run, ranks=2)
    assert history(tmp_path) == undisturbed(ranks=2)
    assert result["world_size"] == 2


def test_trainer_that_does_not_see_the_other_ranks_is_refused(
    start: Start, tmp_path: Path
) -> None:
    run = make_run(tmp_path, max_restarts=0)
    assert start(run, ranks=2, use_cpu=False).end() != Exit.OK
    failure = run.all_failures()[0]
    assert (
        "the job has 2 processes, and the Trainer of transformers has 1"
        in failure.message
    )


def test_killed_run_resumes_from_the_newest_whole_checkpoint(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """What died half-written is not taken; and where Trainer saves nothing, two are kept."""
    run = make_run(tmp_path, checkpoint_every_steps=4)
    assert start(run, "1:14", "SIGKILL").end() < 0
    saved = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert saved == ["checkpoint-12", "checkpoint-8"]
    state = tmp_path / "checkpoint-12" / "trainer_state.json"
    os.truncate(state, state.stat().st_size // 2)
    (tmp_path / "checkpoint-13").mkdir()  # died half-written
    finish(start, run)
    (resume,) = events(run, "resume")
    assert (resume["step"], Path(resume["checkpoint"]).name) == (8, "checkpoint-8")
    (warning,) = (
        e["text"] for e in events(run, "warning") if "checkpoint" in e["text"]
    )
    assert "checkpoint-12 is not whole" in warning
    assert history(tmp_path) == undisturbed()
    assert run.checkpoint_names()[-1] == "step-00000060"


def test_checkpoint_whose_weights_lack_their_end(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Its node went down: what was written last may be on the disk, and what was before it not."""
    run = make_run(tmp_path, checkpoint_every_steps=4)
    assert start(run, "1:14", "SIGKILL").end() < 0
    weights = tmp_path / "checkpoint-12" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    finish(start, run)
    (resume,) = events(run, "resume")
    assert resume["step"] == 8
    texts = [event["text"] for event in events(run, "warning")]
    assert any("checkpoint-12 is not whole" in text for text in texts), texts
    assert history(tmp_path) == undisturbed()


def test_checkpoints_that_another_run_has_written_again_are_not_taken(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Two runs have one output_dir: the first would continue the training of the second."""
    run = make_run(tmp_path / "first", checkpoint_every_steps=4)
    other = make_run(tmp_path / "other", checkpoint_every_steps=4)
    for each, rate in ((run, 1e-3), (other, 1e-2)):
        assert start(each, "1:14", "SIGKILL", learning_rate=rate).end() < 0
    finish(start, run)
    texts = [event["text"] for event in events(run, "warning")]
    for name in ("checkpoint-8", "checkpoint-12"):
        problem = f"{name} was written again, by another run with the same output_dir"
        assert any(problem in text for text in texts), texts
    assert events(run, "resume") == []
    assert history(tmp_path) == undisturbed()


def test_scripts_own_schedule_is_kept(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """With the best model loaded and others removed at the end of a training, which a stop is not;
    and a stop where an evaluation is due."""
    run = make_run(tmp_path)
    for step in (8, 12):
        stop(start, run, f"1:{step}", **OWN_SCHEDULE)
    finish(start, run, **OWN_SCHEDULE)
    assert history(tmp_path) == undisturbed(OWN_SCHEDULE)


def test_several_trainings_in_one_script(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Each resumes from its own checkpoints, even where all write into one folder."""
    settings = {"trainings": 2, "num_train_epochs": 1, "save_strategy": "epoch"}
    run = make_run(tmp_path)
    stop(start, run, "2:5", **settings)
    finish(start, run, **settings)
    for training in (1, 2):
        assert history(tmp_path, training) == undisturbed(settings, training=training)
    assert "steps in this process: 15" in run.rank_log(0).read_text()
    assert [record["step"] for record in events(run, "step")] == list(range(1, 41))


def test_job_of_slurmft_run_requeues_and_finishes(
    script: Path, tiny_model: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Its process is a child of ours, which is torchrun's."""
    job = ("--cluster", "local", "--nodes", "1", "--nproc-per-node", "1", "--follow")
    own = ("--runs-dir", str(tmp_path / "runs"), "--", *RUNNER, str(script))
    environment = {"AT": "1:7", "SIGNAL": "SIGUSR2", "FAILS": ""}
    done = slurmft(
        "run", *job, *own, str(tiny_model), str(tmp_path), "{}", env=environment
    )
    assert done.code == Exit.OK, done.out + done.err
    states = [state.state for state in done.run.history()]
    assert states == ["submitted", "running", "requeued", "running", "finished"]
    assert history(tmp_path) == undisturbed()
    assert done.result["primary_metric"] == "accuracy"


def test_failure_is_recorded_with_its_step(start: Start, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert start(run, fails="yes").end() == Exit.FAILED
    (failure,) = run.all_failures()
    assert (failure.message, failure.step) == ("ValueError: no such metric", 20)
    log = run.rank_log(0).read_text()
    assert "ValueError: no such metric" in log
    assert "runpy" not in log
    assert not run.result.exists()
