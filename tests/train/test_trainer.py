"""Training on simulated nodes: the numbers, the files, the failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmft.runs import log_times
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.loop.environment import import_times
from slurmft.train.loop.setup import choose_precision
from tests.conftest import HOSTILE, Done, Following, records, slurmft
from tests.support import PATIENCE_S, until
from tests.support.models import LABELS, write_emotion, write_model, write_raising

pytestmark = pytest.mark.processes

EXACT = ("--precision", "fp32", "--dropout", "0", "--log-every", "5")


def train(tmp_path: Path, *arguments: str, imported: bool = True) -> Done:
    return slurmft(
        *(
            "submit",
            "--cluster",
            "local",
            "--follow",
            "--runs-dir",
            str(tmp_path),
            *arguments,
        ),
        imported=imported,
    )


def emotion(data: Path, model: Path) -> tuple[str, ...]:
    return ("--task", "emotion", "--data", str(data), "--model", str(model))


@pytest.fixture(scope="module")
def four_ranks(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Done:
    """Two epochs on four simulated nodes: 203 samples in batches of 64 leave 11 for the last."""
    done = train(
        tmp_path_factory.mktemp("four") / HOSTILE,
        *(*emotion(tiny_data, tiny_model), *EXACT),
        *(
            "--nodes",
            "4",
            "--batch-size",
            "16",
            "--epochs",
            "2",
            "--eval-batch-size",
            "16",
        ),
        *("--learning-rate", "0.01"),
    )
    assert done.code == 0, done.err
    return done


LIMITED = (
    *("--nproc-per-node", "2", "--batch-size", "16"),
    *("--gradient-accumulation-steps", "4", "--max-global-batch-size", "64"),
)
LIMITED_WORDS = "global batch 64 (not 128: --max-global-batch-size), 8 steps"
# Nine parts of 7 and 8 samples.
UNEVEN = (
    *("--nproc-per-node", "3", "--batch-size", "10"),
    *("--global-batch-size", "64"),
)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (LIMITED, LIMITED_WORDS),
        pytest.param(
            UNEVEN, "global batch 64, 8 steps", marks=pytest.mark.extra("training")
        ),
    ],
    ids=["limited", "uneven"],
)
def test_losses_do_not_depend_on_the_number_of_ranks(
    four_ranks: Done,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
    sizes: tuple[str, ...],
    words: str,
) -> None:
    """Also not where the last batch leaves ranks with unequal shares, nor with micro-steps."""
    one = train(
        tmp_path,
        *(*emotion(tiny_data, tiny_model), *EXACT),
        *(
            "--nodes",
            "1",
            "--epochs",
            "2",
            "--learning-rate",
            "0.01",
        ),
        *sizes,
    )
    assert one.code == 0, one.err
    assert words in one.out
    steps, expected = records(four_ranks.run, "step"), records(one.run, "step")
    assert len(steps) == 8
    for step, other in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert step["learning_rate"] == other["learning_rate"]
    assert four_ranks.result["metrics"] == pytest.approx(
        one.result["metrics"], rel=1e-4
    )


def test_gradients_of_an_fp32_run_are_sent_as_they_are(four_ranks: Done) -> None:
    assert four_ranks.result["gradients"]["used"] == "fp32"


def padding(done: Done) -> float:
    """Padded tokens for each real one."""
    padded, real = (
        done.result[f"train_{kind}_per_s"] for kind in ("padded_tokens", "tokens")
    )
    return float(padded / real - 1)


def test_packing_does_not_change_losses(
    four_ranks: Done, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    padded = train(
        tmp_path,
        *(*emotion(tiny_data, tiny_model), *EXACT, "--batching", "dynamic"),
        *("--batch-size", "64", "--epochs", "2", "--learning-rate", "0.01"),
    )
    assert padded.code == 0, padded.err
    for step, own in zip(
        records(padded.run, "step"), records(four_ranks.run, "step"), strict=True
    ):
        assert step["loss"] == pytest.approx(own["loss"], abs=1e-5)
    assert padded.result["metrics"] == pytest.approx(
        four_ranks.result["metrics"], rel=1e-4
    )
    assert padding(padded) > 0
    assert padding(four_ranks) == 0


@pytest.mark.extra("training")
def test_batches_of_similar_lengths(
    four_ranks: Done, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    grouped = train(
        tmp_path,
        *(*emotion(tiny_data, tiny_model), *EXACT, "--batching", "grouped"),
        *("--batch-size", "64", "--epochs", "1", "--activation-checkpointing"),
    )
    assert grouped.code == 0, grouped.err
    assert grouped.result["train_samples"] == 203
    assert padding(grouped) == 0
    first, own = (
        records(done.run, "step")[0]["loss"] for done in (grouped, four_ranks)
    )
    assert first != pytest.approx(own, abs=1e-5)  # that of other samples


def test_learning_rate_counts_optimizer_steps(four_ranks: Done) -> None:
    rates = [r["learning_rate"] for r in records(four_ranks.run, "step")]
    # 8 steps, of them a tenth (1) of warm-up, then down to 0 in a line
    assert rates == pytest.approx([0.0] + [0.01 * (8 - s) / 7 for s in range(1, 8)])


def test_result(four_ranks: Done) -> None:
    result = four_ranks.result
    assert result["world_size"] == result["nodes"] == 4
    assert (result["steps"], result["global_batch_size"]) == (8, 64)
    assert (result["train_samples"], result["evaluate_samples"]) == (2 * 203, 2 * 67)
    assert set(result["phases_s"]) == {"train", "evaluate", "metric", "broadcast"}
    assert all(seconds > 0 for seconds in result["phases_s"].values())
    padded, real = result["train_padded_tokens_per_s"], result["train_tokens_per_s"]
    # what 4 computes is padded
    packs = int(version("transformers").partition(".")[0]) >= 5
    assert 0 < real == padded if packs else 0 < real < padded
    assert len(result["peak_memory_bytes"]) == 4
    assert 0 < result["startup_s"] < result["wall_s"] - sum(result["phases_s"].values())
    assert four_ranks.out.count("accuracy") >= 3  # after each epoch, and in the table


def test_classes_of_the_result(four_ranks: Done) -> None:
    """They add up to the accuracy; the screen shows them, and what is taken for what."""
    classes = four_ranks.result["classes"]
    assert list(classes) == LABELS
    right = sum(row["predicted_as"].get(name, 0) for name, row in classes.items())
    assert right / 67 == pytest.approx(four_ranks.result["metrics"]["accuracy"])
    assert sum(row["support"] for row in classes.values()) == 67
    joy = f"joy       {classes['joy']['precision']:.4f}     {classes['joy']['recall']:.4f}  "
    assert joy in four_ranks.out
    report = slurmft("report", str(four_ranks.run.path)).out
    assert f"Classes, {four_ranks.run.path.name}" in report
    assert "What texts of a class were predicted as" in report


@pytest.mark.extra("training")
def test_class_weights(tmp_path: Path, tiny_data: Path, tiny_model: Path) -> None:
    """Losses are equal on any number of ranks, and those of a weighted mean."""
    runs = [
        train(
            tmp_path, *emotion(tiny_data, tiny_model), *EXACT, "--class-weights", "balanced",
            *("--nodes", nodes, "--batch-size", size, "--epochs", "1", "--log-every", "1"),
            *("--learning-rate", "0.01"),
        )
        for nodes, size in (("3", "16"), ("1", "48"))
    ]  # fmt: skip
    one, other = ([r["loss"] for r in records(done.run, "step")] for done in runs)
    assert one == pytest.approx(other, abs=1e-5)


def test_imports_of_the_nodes(four_ranks: Done) -> None:
    ranks = json.loads(four_ranks.run.environment.read_text())["ranks"]
    # forked with all imports done: a few milliseconds
    found = four_ranks.result["imports_s"]
    assert found["max"] == round(max(rank["imports_s"] for rank in ranks), 2)
    assert (
        0
        <= found["min"]
        <= found["median"]
        <= found["max"]
        < four_ranks.result["startup_s"]
    )
    assert f"{found['max']:.1f} s a node" in four_ranks.out


def test_a_node_imports_as_long_as_its_slowest_rank() -> None:
    ranks = [
        {"node": node, "host": f"n{node}", "imports_s": seconds}
        for node, seconds in (("0", 2.0), ("0", 9.0), ("1", 3.0), ("2", 4.0))
    ]
    found = import_times(ranks)
    assert found == {"min": 3.0, "median": 4.0, "max": 9.0, "slowest": "n0"}
    ranks[1]["imports_s"] = None
    assert import_times(ranks) is None


def test_ranks_import_only_what_they_need(four_ranks: Done) -> None:
    """Of an emotion run: no rank needs datasets or evaluate, nor scikit-learn for an accuracy."""
    code = (
        "import sys; import slurmft.train.loop.trainer; from slurmft.train import tasks; "
        "from slurmft.train.loop import evaluator; "
        "from slurmft.runs.rundir import RunDir; from slurmft.train.config import TrainConfig; "
        "task = tasks.get(TrainConfig.of(RunDir.open(sys.argv[1]).load_config().program)); "
        "evaluator.preload(task.metric_names); task.prepare(); "
        "print([m for m in ('datasets', 'evaluate', 'sklearn', 'pandas') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(four_ranks.run.path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.strip() == "[]"


def test_ranks_record_their_own_work(four_ranks: Done) -> None:
    """At the first chance, and then seldom: a short run has one such record or two."""
    found = records(four_ranks.run, "ranks")
    assert 1 <= len(found) < len(records(four_ranks.run, "step"))
    first = next(r for r in records(four_ranks.run, "step") if "samples_per_s" in r)
    step_ms = 1000 * 64 / first["samples_per_s"]
    assert found[0]["step"] == first["step"] == 4  # the end of an epoch
    assert len(found[0]["own_ms"]) == len(found[0]["memory_mib"]) == 4
    assert all(0 < own < step_ms for own in found[0]["own_ms"])
    assert all(50 < mib < 20_000 for mib in found[0]["memory_mib"])


def test_metric_is_that_of_the_saved_model(four_ranks: Done, tiny_data: Path) -> None:
    """On 67 samples over 4 ranks: no sample lost, none counted twice."""
    from transformers import pipeline

    rows = [
        json.loads(line)
        for line in (tiny_data / "validation.jsonl").read_text().splitlines()
    ]
    classify = pipeline("text-classification", model=str(four_ranks.run.model))
    found = [answer["label"] for answer in classify([row["text"] for row in rows])]
    right = sum(
        LABELS[row["label"]] == label for row, label in zip(rows, found, strict=True)
    )
    assert four_ranks.result["metrics"]["accuracy"] == right / 67


def test_every_rank_logs_the_same_metric(four_ranks: Done) -> None:
    told = [
        [
            log_times.split(line)[1]
            for line in four_ranks.run.rank_log(rank).read_text().splitlines()
            if " done:" in line
        ]
        for rank in range(4)
    ]
    assert len(told[0]) == 2
    assert all(lines == told[0] for lines in told)


def test_run_directory(four_ranks: Done) -> None:
    run = four_ranks.run
    assert run.load_config().submission.command.startswith("slurmft submit")
    environment = json.loads(run.environment.read_text())
    assert environment["versions"]["torch"]
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1, 2, 3]
    assert [s.state for s in run.get_state().history] == [
        "submitted",
        "running",
        "finished",
    ]
    assert not [p.name for p in run.path.iterdir() if p.name.startswith(".")]
    assert "Traceback" not in "".join(p.read_text() for p in run.logs.glob("*.log"))


def test_synthetic_model_comes_with_its_tokenizer(tmp_path: Path) -> None:
    done = train(tmp_path, "--max-steps", "2", "--batch-size", "8")
    assert done.code == 0, done.err
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(done.run.model)
    assert tokenizer("w5 w17 nosuchword")["input_ids"] == [2, 5, 17, 1, 3]


def test_rank_that_raises(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text that the task refuses: the rank that gets it raises, alone."""
    task = write_raising(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    source = ("--task", task, "--data", "data", "--model", str(tiny_model))
    sizes = ("--nodes", "2", "--batch-size", "4")
    done = train(tmp_path / "runs", *source, *sizes, *EXACT)
    assert done.code == 1
    assert done.err.count("Traceback") == 1
    last = done.err.splitlines()[-2]
    assert last.startswith("error: ValueError: a text of 42 tokens is longer")
    assert last.endswith(f" on {os.uname().nodename})")
    assert done.run.get_state().state == "failed"
    assert not done.run.result.exists()
    assert_gone(done.run)


def test_data_error_is_told_once(tmp_path: Path, tiny_model: Path) -> None:
    data = write_emotion(tmp_path / "data", train=20, validation=8)
    with open(data / "validation.jsonl", "a") as file:
        file.write('{"text": "x", "label": 6}\n')
    done = train(tmp_path, *emotion(data, tiny_model), "--nodes", "2")
    assert done.code == 2
    assert "row 9 has the label 6" in done.err
    assert "Traceback" not in done.err


def test_logits_that_are_no_numbers(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """A loss may be finite, and the step after it take the weights to infinity."""
    done = train(
        tmp_path, *emotion(tiny_data, tiny_model), *EXACT, "--nodes", "2", "--max-steps", "2",
        "--learning-rate", "1000", "--weight-decay", "1000",
        "--max-grad-norm", "0", "--warmup-steps", "0",
    )  # fmt: skip
    assert done.code == 1
    assert "the model's logits are NaN for 67 of 67 validation samples" in done.err
    assert "--learning-rate" in done.err
    roots = [f for f in done.run.all_failures() if not f.secondary]
    assert [f.where.split(" on ")[0] for f in roots] == ["rank 0"]


@pytest.mark.extra("training")
def test_early_stopping(tmp_path: Path, tiny_data: Path, tiny_model: Path) -> None:
    """With a rate of next to nothing no evaluation is better than the first."""
    done = train(
        tmp_path, *emotion(tiny_data, tiny_model), *EXACT, "--nodes", "2", "--epochs", "9",
        "--learning-rate", "1e-30", "--early-stopping", "2",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "2 evaluation(s) without a better accuracy" in done.out
    assert len(records(done.run, "epoch")) == 3
    steps = records(done.run, "step")[-1]
    assert done.result["steps"] == steps["step"] < steps["total_steps"]


@pytest.mark.extra("training")
def test_fewer_validation_samples_than_processes(tmp_path: Path) -> None:
    data = write_emotion(tmp_path / "data", train=20, validation=3)
    flags = (*emotion(data, write_model(tmp_path / "model")), *EXACT, "--epochs", "2")
    found = []
    for processes in (1, 4):
        sizes = (
            "--nproc-per-node",
            str(processes),
            "--batch-size",
            str(8 // processes),
        )
        run = train(tmp_path, *flags, "--nodes", "1", *sizes)
        assert run.code == 0, run.err
        found.append([record["metrics"] for record in records(run.run, "epoch")])
    for one, four in zip(*found, strict=True):
        assert one == pytest.approx(four, rel=1e-4)


def test_missing_hub_gives_one_clear_line(tmp_path: Path, tiny_data: Path) -> None:
    done = slurmft(
        *("submit", "--cluster", "local", "--follow", "--runs-dir", str(tmp_path)),
        *("--task", "emotion", "--data", str(tiny_data), "--model", "no-such/model"),
        env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)},
    )
    assert done.code == 2
    assert "--model 'no-such/model' was not found locally or on the hub" in done.err
    assert "Traceback" not in done.err


def test_hub_id_in_the_cache_needs_no_hub(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """An offline node takes the cached model at once."""
    cache = tmp_path / "cache" / "models--tiny--bert"
    snapshot = cache / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_model, snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    done = slurmft(
        *(
            "submit",
            "--cluster",
            "local",
            "--follow",
            "--runs-dir",
            str(tmp_path / "runs"),
        ),
        *("--task", "emotion", "--data", str(tiny_data), "--model", "tiny/bert"),
        *("--max-steps", "1"),
        env={
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
        },
    )
    assert done.code == 0, done.err


def test_setup_that_fails(tmp_path: Path) -> None:
    done = train(
        tmp_path, "--setup", "echo no module cuda/99 >&2; false", imported=False
    )
    assert done.code == 1
    assert "no module cuda/99" in done.err


def test_setup_lines_are_bash(tmp_path: Path) -> None:
    """What they set reaches the processes of the job."""
    done = slurmft(
        *("run", "--cluster", "local", "--follow", "--runs-dir", str(tmp_path)),
        *(
            "--setup",
            "source /dev/null  # a comment",
            "--setup",
            "export OMP_NUM_THREADS=1",
        ),
        *("--", "sh", "-c", "echo threads: $OMP_NUM_THREADS"),
    )
    assert done.code == 0, done.err
    assert "threads: 1" in done.out


def test_cancelled_at_once(tmp_path: Path) -> None:
    done = slurmft("submit", "--cluster", "local", "--runs-dir", str(tmp_path))
    assert slurmft("cancel", str(done.run.path)).code == 0
    assert slurmft("follow", str(done.run.path)).code == 5
    assert_gone(done.run)


@pytest.mark.parametrize(
    ("asked", "said", "cure"),
    [
        ("--precision fp16", "--precision fp16 needs GPUs", "bf16"),
        ("--tf32", "--tf32 needs GPUs", "bf16"),
    ],
)
def test_what_needs_a_gpu(asked: str, said: str, cure: str, tmp_path: Path) -> None:
    done = slurmft(
        *("submit", "--cluster", "local", "--follow", "--runs-dir", str(tmp_path)),
        *asked.split(),
        env={"CUDA_VISIBLE_DEVICES": ""},
        imported=True,
    )
    assert done.code == 2
    assert said in done.err
    assert cure in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_switched_on(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    world: Any = SimpleNamespace(device=torch.device("cuda", 0))
    config = TrainConfig.resolve(task="synthetic", precision="fp32", tf32=tf32)
    assert choose_precision(config, world) == "fp32"
    assert asked == (["high"] if tf32 else [])


LONG = (
    "--cluster",
    "local",
    "--epochs",
    "500",
    "--nodes",
    "2",
    "--batch-size",
    "8",
    "--log-every",
    "1",
)


def processes_of(run: RunDir) -> dict[int, str]:
    """The processes whose command line names a run, without the follower: pid -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (
                    (folder / "cmdline")
                    .read_bytes()
                    .decode(errors="replace")
                    .replace("\0", " ")
                )
            except OSError:
                continue
            if str(run.path) in line and " submit " not in line:
                found[int(folder.name)] = line
    return found


def assert_gone(run: RunDir) -> None:
    """No process of the run is left soon after its end."""
    until(lambda: not processes_of(run), lambda: processes_of(run))


def test_killed_rank(tmp_path: Path) -> None:
    flags = ("--max-restarts", "0", "--max-requeues", "0")
    job = Following("--runs-dir", str(tmp_path), *LONG, *flags, imported=True)
    job.until("step 2/")
    rank = next(
        pid
        for pid, line in processes_of(job.run).items()
        if "-m slurmft.train.rank" in line and "slurmft.node.torchrun" not in line
    )
    os.kill(rank, signal.SIGKILL)
    code, text = job.end()
    assert code == 1
    assert "was killed by SIGKILL" in text
    assert "Traceback" not in text
    assert_gone(job.run)


def test_cancelled_while_following(tmp_path: Path) -> None:
    job = Following("--runs-dir", str(tmp_path), *LONG, imported=True)
    job.until("step 2/")
    assert slurmft("cancel", str(job.run.path)).code == 0
    code, text = job.end()
    assert code == 5
    assert "was cancelled" in text
    assert job.run.get_state().state == "cancelled"
    assert_gone(job.run)
    assert "already ended (cancelled)" in slurmft("cancel", str(job.run.path)).out


def test_job_goes_on_after_signals_and_leaves_no_orphans_when_it_is_killed(
    tmp_path: Path,
) -> None:
    """A signal to the group of whoever follows, as terminals, `timeout` and managers send it; then
    SIGKILL to the process that stands in for srun: nobody could clean up by hand."""
    job = Following("--runs-dir", str(tmp_path), *LONG)
    job.until("step 2/")
    os.killpg(job.process.pid, signal.SIGTERM)
    code, text = job.end()
    assert code == 128 + signal.SIGTERM
    assert "no longer following (SIGTERM); job" in text
    assert f"cancel {job.run.path}" in text
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        following = subprocess.Popen(
            [sys.executable, "-u", "-m", "slurmft", "follow", str(job.run.path)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert following.stdout is not None
        following.stdout.readline()
        os.killpg(following.pid, signal.SIGPIPE)  # Python's processes do not die of it
        os.killpg(following.pid, number)
        text, _ = following.communicate(timeout=PATIENCE_S)
        assert following.returncode == 128 + number
        assert "no longer following" in text
    before = len(records(job.run, "step"))
    until(lambda: len(records(job.run, "step")) > before)
    pid: dict[str, Any] = json.loads((job.run.submitit / "pid.json").read_text())
    os.kill(pid["pid"], signal.SIGKILL)
    followed = slurmft("follow", str(job.run.path))
    assert followed.code == 1
    # One rank may see the end of another one, and record it, before it is killed itself.
    failures = job.run.all_failures()
    assert all(failure.secondary for failure in failures)
    reasons = [failure.message for failure in failures]
    reason = next(iter(reasons), "ended without recording why")
    assert reason in followed.out + followed.err
    assert_gone(job.run)


def test_test_split(tmp_path: Path, tiny_data: Path, tiny_model: Path) -> None:
    """It is evaluated once at the end, on the saved model: here it is the validation data."""
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    shutil.copy(data / "validation.jsonl", data / "test.jsonl")
    done = train(
        tmp_path, *emotion(data, tiny_model), *EXACT, "--nodes", "2", "--epochs", "2"
    )
    assert done.code == 0, done.err
    metrics = done.result["metrics"]
    assert list(metrics) == ["accuracy", "loss", "test_accuracy", "test_loss"]
    assert metrics["test_accuracy"] == metrics["accuracy"]
    assert metrics["test_loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    assert done.result["evaluate_samples"] == 3 * 67
    assert done.result["test_samples"] == 67
    assert f"test_accuracy  {metrics['accuracy']:.4f}" in done.out
    assert "test.jsonl: 67 rows, 6 classes" in done.out
    assert "| test_accuracy |" in (done.run.model / "README.md").read_text()
    card = (done.run.model / "README.md").read_text()
    assert "split: test" in card
    (data / "test.jsonl").write_text('{"text": "joy"}\n')
    done = train(tmp_path, *emotion(data, tiny_model), *EXACT, "--epochs", "1")
    assert "warning: the test split is not evaluated" in done.err
    assert list(done.result["metrics"]) == ["accuracy", "loss"]
