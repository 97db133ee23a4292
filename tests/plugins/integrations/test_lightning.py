"""Lightning's Trainer in a job: it stops, resumes, and leaves the signals and the queue to us."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurmft.core.errors import Exit
from slurmft.runs.rundir import RunDir
from tests.plugins.integrations.scripts import Script, events, make_run

pytestmark = pytest.mark.extra("integrations")

SCRIPT = """
import json, os, signal, sys, time
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

out, fits = sys.argv[1], int(sys.argv[2])
ranks = int(os.environ.get("WORLD_SIZE", "1"))
seed_everything(1)

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def loss(self, x):
        return (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
    def training_step(self, x, index):
        time.sleep(0.05 * (ranks - 1))
        loss = self.loss(x)
        with open(f"{out}/losses-{fit}-{self.global_rank}.jsonl", "a") as file:
            file.write(json.dumps([self.global_step + 1, float(loss)]) + "\\n")
        return loss
    def validation_step(self, x, index):
        self.log("val_loss", self.loss(x), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)

class Signal(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if f"{fit}:{trainer.global_step + 1}" == os.environ.get("AT"):
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
            while getattr(signal, os.environ["SIGNAL"]) in signal.sigpending():
                time.sleep(0.01)  # a thread takes it
            time.sleep(0.2)

class Loader(torch.utils.data.DataLoader):
    skip = seen = 0
    def __iter__(self):
        skip, self.skip = self.skip, 0
        for self.seen, batch in enumerate(super().__iter__(), 1):
            if self.seen > skip:
                yield batch
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.skip = state["seen"]

data = torch.rand(80, 4, generator=torch.Generator().manual_seed(2))
for fit in range(1, fits + 1):
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, default_root_dir=out, logger=False, log_every_n_steps=1,
        enable_progress_bar=False, enable_checkpointing=False, callbacks=[Signal()],
    )
    trainer.fit(Line(), Loader(data, batch_size=4), Loader(data[:8], batch_size=4))
"""
"""It knows nothing of slurmft, nor of the job's processes. Its data loader can be resumed; an epoch
has 20 steps, or 10 for two ranks."""

RUNNER = ("-m", "slurmft.plugins.integrations", "lightning")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def start(
    run: RunDir,
    script: Path,
    out: Path,
    at: str = "",
    ranks: int = 1,
    **environment: str,
) -> Script:
    """An attempt, which gets a signal within a step: "fit:step"."""
    out.mkdir(exist_ok=True)
    environment = {"AT": at, "SIGNAL": "SIGUSR2"} | environment
    return Script(
        run, *RUNNER, str(script), str(out), "1", ranks=ranks, env=environment
    )


def losses(out: Path, fit: int = 1, rank: int = 0) -> list[list[float]]:
    lines = (out / f"losses-{fit}-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("ranks", "at"), [(1, 20), (2, 4)])
def test_interrupted_fit_equals_an_undisturbed_one(
    script: Path, tmp_path: Path, ranks: int, at: int
) -> None:
    """And an evaluation at an epoch's end comes before the stop."""
    whole, run = make_run(tmp_path), make_run(tmp_path)
    assert start(whole, script, tmp_path / "whole", ranks=ranks).end() == Exit.OK
    part = start(run, script, tmp_path / "parts", f"1:{at}", ranks=ranks)
    assert part.end() == Exit.OK
    assert part.has_stopped
    assert not run.result.exists()
    stopped_at = events(run, "stopping")[0]["step"]
    assert run.checkpoint_names()[-1] == f"step-{stopped_at:08d}"
    last = start(run, script, tmp_path / "parts", ranks=ranks)
    assert last.end() == Exit.OK
    assert not last.has_stopped
    for rank in range(ranks):
        assert losses(tmp_path / "parts", rank=rank) == losses(
            tmp_path / "whole", rank=rank
        )
    assert [n for n, _ in losses(tmp_path / "parts")] == list(range(1, 60 // ranks + 1))
    assert [record["step"] for record in events(run, "step")] == list(
        range(1, 60 // ranks + 1)
    )
    assert [e["metrics"] for e in events(run, "epoch")] == [
        e["metrics"] for e in events(whole, "epoch")
    ]
    results = [json.loads(each.result.read_text()) for each in (run, whole)]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert (
        results[0]["metrics"]["val_loss"]
        == events(run, "epoch")[-1]["metrics"]["val_loss"]
    )
    assert results[0]["world_size"] == ranks


def test_epochs_of_one_batch_stop_and_resume(script: Path, tmp_path: Path) -> None:
    """The end of an epoch is the only place to stop there."""
    script.write_text(SCRIPT.replace("Loader(data, batch_size=4)", "Loader(data, 80)"))
    whole, run = make_run(tmp_path), make_run(tmp_path)
    assert start(whole, script, tmp_path / "whole").end() == Exit.OK
    part = start(run, script, tmp_path / "parts", "1:2")
    assert part.end() == Exit.OK
    assert part.has_stopped
    assert run.checkpoint_names() == ["step-00000002"]
    last = start(run, script, tmp_path / "parts")
    assert last.end() == Exit.OK
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [e["metrics"] for e in events(run, "epoch")] == [
        e["metrics"] for e in events(whole, "epoch")
    ]
    assert json.loads(run.result.read_text())["metrics"]


def test_fit_of_so_many_steps_stops_within_an_epoch(
    script: Path, tmp_path: Path
) -> None:
    """Lightning resumes one from the end of an epoch with a batch too many."""
    text = SCRIPT.replace("max_epochs=3", "max_epochs=-1, max_steps=30")
    script.write_text(text.replace(", Loader(data[:8], batch_size=4)", ""))
    whole, run = make_run(tmp_path), make_run(tmp_path)
    assert start(whole, script, tmp_path / "whole").end() == Exit.OK
    assert start(run, script, tmp_path / "parts", "1:20").end() == Exit.OK
    assert run.checkpoint_names() == ["step-00000021"]
    assert start(run, script, tmp_path / "parts").end() == Exit.OK
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_stop_in_the_last_step_leaves_the_result(
    script: Path, tmp_path: Path
) -> None:
    script.write_text(SCRIPT.replace("Loader(data, batch_size=4)", "Loader(data, 80)"))
    run = make_run(tmp_path)
    part = start(run, script, tmp_path / "parts", "1:3")
    assert part.end() == Exit.OK
    assert not part.has_stopped
    assert json.loads(run.result.read_text())["metrics"]["val_loss"] > 0


def test_manual_optimization_by_several_optimizers(
    script: Path, tmp_path: Path
) -> None:
    """Its module returns what it likes, and each optimizer counts its steps."""
    manual = """        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(x))
            optimizer.step()
        return {"generator": loss}
"""
    text = SCRIPT.replace("        return loss\n", manual)
    text = text.replace(
        "        return torch.optim.Adam(self.parameters(), 0.01)\n",
        "        self.automatic_optimization = False\n"
        "        one = torch.optim.Adam(self.parameters(), 0.01)\n"
        "        return [one, torch.optim.SGD(self.parameters(), 0.01)], []\n",
    )
    script.write_text(text)
    run = make_run(tmp_path)
    assert start(run, script, tmp_path / "out").end() == Exit.OK
    steps = events(run, "step")
    assert steps[-1]["step"] == 120
    assert "total" not in steps[-1]
    assert json.loads(run.result.read_text())["metrics"]["val_loss"] > 0


def test_lightning_takes_no_signal_and_requeues_nothing(
    script: Path, tmp_path: Path
) -> None:
    """In a job of Slurm it would call scontrol at SIGUSR1, which is the watchdog's here."""
    called = tmp_path / "called"
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >> '{called}'\n")
    scontrol.chmod(0o755)
    slurm = {
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "run",
        "SLURM_PROCID": "0",
    }
    slurm |= {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "localhost"}
    slurm |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SIGNAL": "SIGUSR1"}
    run = make_run(tmp_path)
    attempt = start(run, script, tmp_path / "out", at="1:5", ranks=1, **slurm)
    assert attempt.end() == Exit.OK
    assert not called.exists()
    # where it was, for the watchdog
    assert "train.py" in (attempt.node / "stacks-0").read_text()
    assert not list((tmp_path / "out").glob("hpc_ckpt*"))
    assert len(losses(tmp_path / "out")) == 60


def test_trainer_without_the_jobs_processes_is_refused(
    script: Path, tmp_path: Path
) -> None:
    """Of a script that gives none, it has those of the job; here, each would train alone."""
    script.write_text(SCRIPT.replace("max_epochs=3,", "max_epochs=3, devices=1,"))
    run = make_run(tmp_path, max_restarts=0)
    assert start(run, script, tmp_path / "out", ranks=2).end() != Exit.OK
    failure = run.all_failures()[0]
    assert (
        "the job has 2 processes, and the Trainer of Lightning has 1" in failure.message
    )
    assert failure.hint == (
        "give Trainer devices=2 and num_nodes=1, as the job has, or neither"
    )
    assert failure.traceback is None
