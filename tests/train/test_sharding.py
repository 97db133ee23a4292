"""Sharded runs (`--shard`) compute what others compute, and come back as they do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slurmft.core.errors import UsageError
from slurmft.job.checkpoints import verify
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import Done, Following, records, slurmft
from tests.support import until
from tests.support.faults import furthest_step
from tests.support.models import write_copies, write_seq2seq_model
from tests.support.small_disk import SmallDisk, fill
from tests.train.test_resume import assert_same, held, losses, rank_pids, steps_twice
from tests.train.test_trainer import assert_gone, emotion

# 203 samples leave 11 for the last step of an epoch, and three ranks 3 batches of an evaluation's
# 67 samples, one 2. Gradients are clipped: their norm is above 1.
FLAGS = (
    *(
        "--cluster",
        "local",
        "--precision",
        "fp32",
        "--dropout",
        "0",
        "--log-every",
        "1",
    ),
    *(
        "--batch-size",
        "4",
        "--gradient-accumulation-steps",
        "2",
        "--eval-batch-size",
        "8",
    ),
    *("--epochs", "8", "--max-steps", "16", "--learning-rate", "1e-2"),
)
TWO_BY_TWO = ("--nodes", "2", "--nproc-per-node", "2")


class Trains:
    """Submits runs on the tiny data and model."""

    def __init__(self, runs: Path, data: Path, model: Path) -> None:
        self.flags = (*FLAGS, *emotion(data, model), "--runs-dir", str(runs))

    def __call__(self, *flags: str) -> Done:
        done = slurmft("submit", "--follow", *self.flags, *flags, imported=True)
        assert done.code == 0, done.err
        return done

    def following(self, *flags: str) -> Following:
        return Following(*self.flags, *flags, imported=True)


@pytest.fixture(scope="module")
def train(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Trains:
    return Trains(tmp_path_factory.mktemp("runs"), tiny_data, tiny_model)


@pytest.fixture(scope="module")
def unsharded(train: Trains) -> Done:
    return train(*TWO_BY_TWO)


@pytest.fixture(scope="module")
def sharded(train: Trains) -> Done:
    return train(*TWO_BY_TWO, "--shard", "full")


def warnings(run: RunDir) -> list[str]:
    return [record["text"] for record in records(run, "warning")]


def logits(done: Done) -> torch.Tensor:
    """Of the saved model."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(done.run.model)
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(40).view(4, 10)).logits
    return found


def test_losses_are_those_of_ddp(unsharded: Done, sharded: Done) -> None:
    """With micro-steps, clipping, a last batch that leaves unequal shares, uneven evaluations."""
    assert len(losses(sharded.run)) == 16
    assert losses(sharded.run) == pytest.approx(losses(unsharded.run), abs=1e-5)
    metrics = [
        [r["metrics"] for r in records(d.run, "epoch")] for d in (sharded, unsharded)
    ]
    for one, other in zip(*metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert sharded.result["evaluate_samples"] == unsharded.result["evaluate_samples"]
    assert not warnings(sharded.run)


def test_saved_model_is_whole(unsharded: Done, sharded: Done) -> None:
    """As transformers saves it, and loads it."""
    names = [
        {path.name for path in done.run.model.iterdir()}
        for done in (unsharded, sharded)
    ]
    assert names[0] == names[1]
    configs = [
        (done.run.model / "config.json").read_text() for done in (unsharded, sharded)
    ]
    assert configs[0] == configs[1]
    assert torch.allclose(logits(sharded), logits(unsharded), atol=1e-3)
    assert "the saved model is not compared" in sharded.run.rank_log(0).read_text()
    # what it was collected in is gone
    assert not [*sharded.run.checkpoints.glob(".*")]


@pytest.mark.extra("training")
def test_hybrid(unsharded: Done, train: Trains) -> None:
    """Shares within a node, the same on all nodes; layers are computed again."""
    done = train(*TWO_BY_TWO, "--shard", "node", "--activation-checkpointing")
    assert losses(done.run) == pytest.approx(losses(unsharded.run), abs=1e-5)
    assert torch.allclose(logits(done), logits(unsharded), atol=1e-3)


@pytest.mark.extra("training")
@pytest.mark.processes
def test_resume_on_fewer_ranks(unsharded: Done, train: Trains) -> None:
    job = train.following(*TWO_BY_TWO, "--shard", "full", "--no-requeue")
    job.at_step(3)
    os.kill(rank_pids(job.run)[1], signal.SIGUSR2)
    assert job.end()[0] == 75
    newest = job.run.checkpoints / job.run.checkpoint_names()[-1]
    verify(newest)
    files = sorted(path.name for path in newest.rglob("*") if path.is_file())
    assert [name.partition("-model")[0] for name in files] == [
        *("manifest.json", "predicted.safetensors"),
        *(f"shard-0000{rank}" for rank in range(1, 5)),
        "state.json",
    ]
    done = slurmft(
        "resume", str(job.run.path), "--nodes", "1", "--follow", imported=True
    )
    assert done.code == 0, done.err
    assert "world_size 4 -> 2" in done.out
    assert steps_twice(job.run) == 0
    assert losses(job.run) == pytest.approx(losses(unsharded.run), abs=1e-5)


@pytest.mark.extra("training")
def test_adapters(train: Trains) -> None:
    """Of LoRA: frozen weights are shared, too, and not in checkpoints."""
    flags = ("--nodes", "2", "--lora", "4", "--max-steps", "8")
    whole, done = train(*flags), train(*flags, "--shard", "full")
    assert losses(done.run) == pytest.approx(losses(whole.run), abs=1e-5)
    saved = [
        load_file(each.run.model / "adapter_model.safetensors")
        for each in (whole, done)
    ]
    assert saved[0].keys() == saved[1].keys()
    assert all(
        torch.allclose(saved[0][name], saved[1][name], atol=1e-4) for name in saved[0]
    )
    newest = done.run.checkpoints / done.run.checkpoint_names()[-1]
    kept = {name for file in newest.glob("sharded/*") for name in load_file(file)}
    assert any(".lora_A." in name for name in kept)
    assert not any("word_embeddings" in name for name in kept)


@pytest.mark.extra("training")
def test_generation(train: Trains, tmp_path: Path) -> None:
    """Ranks generate texts of different lengths, and different numbers of them."""
    data = write_copies(tmp_path / "data", train=48, validation=9)
    model = write_seq2seq_model(tmp_path / "model")
    flags = (
        "--task",
        "seq2seq",
        "--data",
        str(data),
        "--model",
        str(model),
        "--nodes",
        "2",
    )
    sizes = ("--max-steps", "4", "--eval-batch-size", "4", "--max-target-length", "8")
    whole, done = train(*flags, *sizes), train(*flags, *sizes, "--shard", "full")
    assert losses(done.run) == pytest.approx(losses(whole.run), abs=1e-5)
    assert done.result["metrics"] == pytest.approx(whole.result["metrics"])


def half_written(run: RunDir) -> list[Path]:
    return list(run.checkpoints.glob(".step-*/sharded"))


@pytest.mark.extra("training")
def test_kill_while_all_ranks_write(sharded: Done, train: Trains) -> None:
    """What is half written is never seen; the run resumes from what is whole, exactly."""
    job = train.following(
        *TWO_BY_TWO, "--shard", "full", "--checkpoint-every-steps", "1"
    )
    job.at_step(3)
    pids = rank_pids(job.run)

    def killed_in_a_save() -> bool:
        if not half_written(job.run):
            return False
        with held(pids):
            if not half_written(job.run):
                return False
            for name in job.run.checkpoint_names():
                verify(job.run.checkpoints / name)
            os.kill(pids[2], signal.SIGKILL)
        return True

    until(killed_in_a_save, every_s=0.0005)
    code, text = job.end()
    assert code == 0, text
    assert not [*job.run.checkpoints.glob(".*")]
    assert_same(job.run, sharded.run)
    assert_gone(job.run)


@pytest.mark.extra("training")
@pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to mount a small file system"
)
def test_full_disk(train: Trains, tmp_path: Path) -> None:
    """A rank that cannot write is a warning on all; the run goes on, and to its end."""
    with SmallDisk(tmp_path / "small", 6) as disk:
        flags = (
            "--checkpoint-every-steps",
            "2",
            "--max-steps",
            "30",
            "--runs-dir",
            str(disk),
        )
        job = train.following("--nodes", "2", "--shard", "full", *flags)
        job.at_step(8)
        ballast = fill(disk)
        # two checkpoints are due; it cannot tell yet
        goal = min(furthest_step(job.run) + 4, 30)
        until(lambda: furthest_step(job.run) >= goal, every_s=0.02)
        ballast.unlink()
        code, text = job.end()
        assert code == 0, text
        assert "warning: no checkpoint of step" in text
        assert "no room for it: it needs " in text
        assert steps_twice(job.run) == 0
        assert (job.run.model / "model.safetensors").exists()


@pytest.mark.extra("training")
def test_best_model_comes_back(train: Trains) -> None:
    """A learning rate at which later epochs are worse."""
    flags = ("--max-steps", "20", "--warmup-steps", "0")
    done = train("--nodes", "2", *flags, "--shard", "full", "--learning-rate", "0.3")
    found = [record["metrics"]["accuracy"] for record in records(done.run, "epoch")]
    assert found[-1] <= max(found)
    assert done.result["metrics"]["accuracy"] == max(found)
    assert not warnings(done.run)


@pytest.mark.processes
def test_one_process_has_nothing_to_share(train: Trains) -> None:
    done = train(
        "--nodes", "1", "--shard", "full", "--max-steps", "2", "--precision", "bf16"
    )
    assert warnings(done.run) == ["--shard full: one process has nothing to share"]
    assert (done.run.model / "model.safetensors").exists()


@pytest.mark.extra("training")
def test_checkpoint_of_another_sharding(train: Trains) -> None:
    job = train.following(
        "--nodes", "2", "--no-requeue", "--max-steps", "1000", "--epochs", "99"
    )
    job.at_step(2)
    os.kill(rank_pids(job.run)[1], signal.SIGUSR2)
    assert job.end()[0] == 75
    config = json.loads(job.run.config.read_text())
    config["program"]["settings"]["shard"] = "full"
    job.run.config.write_text(json.dumps(config))
    done = slurmft("resume", str(job.run.path), "--follow", imported=True)
    assert done.code == 2
    assert "was written with --shard none, and this run has full" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"grad_comm": "local:8"},
            "--shard full cannot be used with --grad-comm local:8",
        ),
        ({"optimizer": "muon"}, "--shard full cannot be used with --optimizer muon"),
        ({"precision": "fp16"}, "--shard full cannot be used with --precision fp16"),
        ({"lora": 4, "merge": True}, "--shard full cannot be used with --merge\n"),
        (
            {"shard": "none", "cpu_offload": True},
            "--cpu-offload needs --shard full",
        ),
    ],
)
def test_what_excludes_each_other(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match="^" + said):
        TrainConfig.resolve(**{"shard": "full"} | options)


@pytest.mark.processes
def test_cpus_have_nothing_to_offload(train: Trains) -> None:
    done = slurmft(
        "submit", "--follow", *train.flags, "--nodes", "2", "--shard", "full", "--cpu-offload",
        imported=True,
    )  # fmt: skip
    assert done.code == 2
    assert "--cpu-offload is for GPUs, and this run computes on CPUs" in done.err
    assert "Traceback" not in done.err
