"""Where do the seconds go from SIGKILL of a rank to the next step? By phase, on simulated nodes.

    python results/benchmarks/rank_recovery.py [--nodes 4] [--kills 5]     # five minutes

One run of a 22M-parameter encoder on N simulated nodes of one process each suffers the kills one
after the other. A phase ends when the last rank has come to its end. The bare restart, for
comparison, is a process that loads the same model and makes one step.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import REPOSITORY, encoder, parser, save

from tests.conftest import Following, records
from tests.support import until
from tests.support.models import write_emotion
from tests.train.test_resume import rank_pids

PHASES = {
    "seen": "the agent of the killed rank has noticed",
    "stopped": "no rank of before is left",
    "started": "the agents have met, and ranks are forked, with their imports",
    "met": "the process group of the ranks stands",
    "data": "checkpoint found, tokens mapped",
    "model": "model, optimizer and DDP are made",
    "checkpoint": "the checkpoint is loaded",
    "step": "the first step is done",
}
"""Phase -> what has happened at its end."""

STAMPS = "RECOVERY_STAMPS"
"""Variable with the folder into which ranks write when they came to the end of a phase."""
STAMP = f'''
import os, sys, time
sys.path.append({str(REPOSITORY)!r})
from slurmft.core.after_import import AfterImport

PLACES = {{
    "slurmft.job.process_group": ("met", "", "init"),
    "slurmft.train.loop.setup": ("data", "Setup", "prepare"),
    "slurmft.train.loop.learner": ("model", "Learner", "__init__"),
    "slurmft.train.loop.checkpointing": ("checkpoint", "Checkpointing", "restore"),
}}

def stamp(phase):
    with open(os.path.join(os.environ["{STAMPS}"], f"{{phase}}-{{os.getpid()}}"), "w") as file:
        file.write(str(time.time()))

def stamped(owner, name, phase, once=False):
    function = getattr(owner, name)
    def call(*arguments, **named):
        result = function(*arguments, **named)
        stamp(phase)
        if once:
            setattr(owner, name, function)
        return result
    setattr(owner, name, call)

def patch(module):
    phase, owner, name = PLACES[module.__name__]
    stamped(getattr(module, owner) if owner else module, name, phase)
    if owner == "Learner":
        stamped(module.Learner, "step", "step", once=True)

if os.environ.get("{STAMPS}"):
    AfterImport(tuple(PLACES), patch)
'''
BARE = """
import sys, torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters())
model(input_ids=torch.ones(4, 16, dtype=torch.long)).logits.sum().backward()
optimizer.step()
"""
_SEEN = re.compile(r"^(\S+) .*failed \(exitcode: -9\)", re.MULTILINE)
_HEAD = re.compile(r"^(\S+) rank \d+ on ", re.MULTILINE)


def unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def lines(
    job: Following, names: str, form: re.Pattern[str], since: float
) -> list[float]:
    """Times of the lines of logs that have a form."""
    found = []
    for log in job.run.logs.glob(names):
        found += [unix(text) for text in form.findall(log.read_text(errors="replace"))]
    return [when for when in found if when > since]


def kill(job: Following, stamps: Path, ranks: int) -> dict[str, float]:
    """Kills a rank; returns the seconds from the kill to the end of each phase."""
    before = rank_pids(job.run)
    assert len(before) == ranks, before
    for stamp in stamps.iterdir():
        stamp.unlink()
    killed_at = time.time()
    os.kill(before[-1], signal.SIGKILL)
    until(
        lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in before),
        every_s=0.01,
    )
    stopped_at = time.time()
    until(lambda: len(list(stamps.glob("step-*"))) == ranks, every_s=0.05)
    ends = {
        "seen": min(lines(job, "node-*.log", _SEEN, killed_at)),
        "stopped": stopped_at,
        "started": max(lines(job, "rank-*.log", _HEAD, killed_at)),
    }
    for phase in list(PHASES)[3:]:
        ends[phase] = max(float(file.read_text()) for file in stamps.glob(f"{phase}-*"))
    return {phase: end - killed_at for phase, end in ends.items()}


def durations(ends: dict[str, float]) -> dict[str, float]:
    """Seconds of each phase; two may overlap, as ranks end while their agents already meet."""
    found = {}
    last = 0.0
    for phase in PHASES:
        found[phase] = max(0.0, ends[phase] - last)
        last = max(last, ends[phase])
    return found


def bare_s() -> float:
    """Seconds of a process that imports, loads the model and makes a step, without any other."""
    began = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BARE, str(encoder())]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return time.monotonic() - began


def measure(nodes: int, kills: int, folder: Path) -> list[dict[str, float]]:
    stamps = folder / "stamps"
    stamps.mkdir()
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(STAMP)
    data = write_emotion(folder / "data", train=2000, validation=64)
    flags = ["--cluster", "local", "--nodes", str(nodes), "--nproc-per-node", "1"]
    flags += ["--task", "emotion", "--data", str(data), "--model", str(encoder())]
    flags += [
        "--batch-size",
        "4",
        "--precision",
        "fp32",
        "--log-every",
        "1",
        "--epochs",
        "50",
    ]
    flags += ["--checkpoint-every-steps", "10", "--max-restarts", str(kills + 1)]
    flags += ["--eval-batch-size", "64", "--runs-dir", str(folder / "runs")]
    environment = {STAMPS: str(stamps), "PYTHONPATH": str(hook), "OMP_NUM_THREADS": "1"}
    job = Following(*flags, env=environment)
    rows = []
    try:
        for number in range(kills):
            last = max((r["step"] for r in records(job.run, "step")), default=0)
            # A checkpoint lies before it.
            job.at_step(max(last, 10) + 12)
            rows.append(kill(job, stamps, nodes))
            print(
                number + 1,
                {name: round(s, 2) for name, s in durations(rows[-1]).items()},
                flush=True,
            )
    finally:
        job.process.terminate()
        cancel = [sys.executable, "-m", "slurmft", "cancel", str(job.run.path)]
        subprocess.run(cancel, check=False, capture_output=True, cwd=REPOSITORY)
        until(lambda: job.run.get_state().has_ended)
    return rows


def main(nodes: int, kills: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        rows = measure(nodes, kills, Path(name))
    bare = [bare_s() for _ in range(3)]
    phases: dict[str, Any] = {}
    for phase, meaning in PHASES.items():
        seconds = [durations(row)[phase] for row in rows]
        phases[phase] = {
            "end": meaning,
            "median_s": round(statistics.median(seconds), 2),
            "least_s": round(min(seconds), 2),
        }
    totals = [row["step"] for row in rows]
    values = {
        "nodes": nodes,
        "kills": kills,
        "load": os.getloadavg()[0],
        "phases": phases,
        "total_median_s": round(statistics.median(totals), 2),
        "total_least_s": round(min(totals), 2),
        "bare_median_s": round(statistics.median(bare), 2),
    }
    print(json.dumps(values, indent=1))
    save("rank_recovery", values)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--nodes", type=int, default=4)
    arguments.add_argument("--kills", type=int, default=5)
    chosen = arguments.parse_args()
    main(chosen.nodes, chosen.kills)
