"""What --grad-comm gains where the network is slow: two nodes of one core each, in network
namespaces of this machine, joined by a link that tc slows down. As root.

    python results/communication.py speed DATA_DIR       # emotion: DATA_DIR/train.jsonl, validation
    python results/communication.py poor DATA_DIR        # the same on a far slower link
    python results/communication.py poorest DATA_DIR     # on one that hardly is a network
    python results/communication.py variants DATA_DIR    # what each part of it gains
    python results/communication.py accuracy DATA_DIR [SEEDS [CASES]]    # trainings, the network as
        it is; CASES: some of them

speed: the link is slowed until plain DDP (fp32, its defaults) has an efficiency of 0.65 to 0.70.
All cases are in one process group, blocks of steps in turn, on the same samples. Efficiency is the
throughput of two nodes over twice that of one, which computes while the other rests and trains the
same weights; over_plain_node: of one node that trains the whole table of words.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from provenance import RESULTS, encoder, save

sys.path.insert(0, str(RESULTS.parent))

BATCH, BLOCK, WARM_UP = 64, 16, 12
FIRST_MBIT_S = 2200.0
NODES = {"n-a": "10.78.0.1", "n-b": "10.78.0.2"}
DEVICE = "veth0"

SPEED = (
    "one", "one, whole table", "both", "ddp", "fp32", "bf16", "powersgd", "local:16", "local:32",
    "local:64",
)  # fmt: skip
"""Besides values of --grad-comm: one node, computing alone; both at once, without a word between
them; plain DDP. It trains the whole table of words, and is compared with one node that does so."""
FEWER = tuple(case for case in SPEED if case not in ("both", "local:32", "local:64"))
VARIANTS = (
    "one", "one, whole table", "ddp", "fp32", "fp32, whole table", "fp32, rows off",
    "fp32, 25 MiB buckets", "fp32, 1 MiB buckets", "fp32, no bucket views",
    "fp32, buffers broadcast", "fp32, static graph", "bf16",
    "bf16, rows off", "local:8", "local:16",
)  # fmt: skip
PARTS = {
    "speed": (SPEED, (0.65, 0.70), 4),
    "poor": (SPEED, (0.25, 0.35), 4),
    "poorest": (FEWER, (0.06, 0.12), 2),
    "variants": (VARIANTS, (0.65, 0.70), 6),
}
"""What is compared, the efficiency of plain DDP for which the link is slowed, and rounds: in one of
four local:64 has a meeting."""
ACCURACY = ("fp32", "local:32", "local:16", "local:64", "bf16", "powersgd")
FIRST_SEED = 42


# --- the network ----------------------------------------------------------------------------------


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two namespaces, joined by a pair of virtual devices."""
    try:
        for name in NODES:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        a, b = NODES
        pair = ["link", "add", DEVICE, "netns", a, "type", "veth", "peer", "name", DEVICE]
        ip(*pair, "netns", b)
        for name, address in NODES.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
        yield
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def slow_down(mbit_s: float) -> None:
    """Limits what the node that this process is on sends."""
    limit = ["tbf", "rate", f"{mbit_s:.0f}mbit", "burst", "256kb", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", DEVICE, "root", *limit], check=True)


# --- one measurement ------------------------------------------------------------------------------


def measure(part: str, data: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks end, too
    with tempfile.TemporaryDirectory() as folder, network():
        output = Path(folder) / "measured.json"
        port = str(random.randrange(20_000, 29_000))
        ranks = []
        for rank, name in enumerate(NODES):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": next(iter(NODES.values())), "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE,
            }  # fmt: skip
            command = ["nsenter", f"--net=/run/netns/{name}", "taskset", "--cpu-list", str(rank)]
            command += [sys.executable, __file__, "rank", part, str(data), folder, str(output)]
            ranks.append(subprocess.Popen(command, env=environment))
        try:
            codes = [rank.wait(3600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        found = json.loads(output.read_text())
    save(f"communication_{part}", found)


class Case:
    """One rank's training, with one way to communicate."""

    def __init__(self, name: str, data: Path, folder: Path) -> None:
        import slurmft.train.trainer
        from slurmft.job import process_group
        from slurmft.train.grad_comm import Communication

        self.name = name
        mode, _, self.variant = name.partition(", ")
        mode = {"one": "local:1000000", "both": "local:1000000", "ddp": "fp32"}.get(mode, mode)
        case = self

        class Changed(Communication):
            def prepare(self, accelerator: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
                if name == "ddp":
                    accelerator.ddp_handler = None
                    return accelerator.prepare(model, optimizer)  # type: ignore[no-any-return]
                return super().prepare(accelerator, model, optimizer)

            def _ignored(self, model: Any) -> list[str]:
                names = super()._ignored(model)
                return names if case.variant != "buffers broadcast" else names[:1]

            def _ddp_options(self) -> Any:
                options = super()._ddp_options()
                changes = {
                    "25 MiB buckets": ("bucket_cap_mb", 24),  # 25 has a small first one
                    "1 MiB buckets": ("bucket_cap_mb", 1),
                    "no bucket views": ("gradient_as_bucket_view", False),
                    "static graph": ("static_graph", True),
                }
                if case.variant in changes:
                    setattr(options, *changes[case.variant])
                return options

        from slurmft.train import sparse_embeddings, vocab_trim

        before = sparse_embeddings._TABLE_BYTES, vocab_trim._SAVED_BYTES
        if self.variant == "rows off":
            sparse_embeddings._TABLE_BYTES = 2**40
        if name == "ddp" or self.variant == "whole table":
            vocab_trim._SAVED_BYTES = 2**40
        slurmft.train.trainer.Communication = Changed  # type: ignore[misc]
        world = process_group.init("gloo") if not hasattr(Case, "world") else Case.world
        Case.world, process_group.init = world, lambda backend: world
        self.training = make_training(world, mode, data, folder)
        self.chosen: dict[str, Any] = {}
        sparse_embeddings._TABLE_BYTES, vocab_trim._SAVED_BYTES = before
        self.batches: Any = iter(())
        self.epoch = 0

    world: Any

    def steps(self, count: int) -> None:
        training = self.training
        for _ in range(count):
            training._step(self._samples())
            training.position.step += 1
            training.communication.end_step(training.position.step, self.chosen.update)

    def _samples(self) -> Any:
        found = next(self.batches, None)
        if found is None or len(found) < self.training.plan.global_batch_size:
            self.batches = self.training._global_batches(self.epoch, 0)
            self.epoch += 1
            found = next(self.batches)
        return found

    def block(self, count: int) -> float:
        """Seconds of so many steps; of one node, the mean of the two, one after the other."""
        is_one = self.name.partition(", ")[0] == "one"
        turns = range(self.world.size) if is_one else [self.world.rank]
        seconds = 0.0
        for turn in turns:
            self.world.sum([0.0])  # all begin together
            began = time.perf_counter()
            if turn == self.world.rank:
                self.steps(count)
                seconds = time.perf_counter() - began
        return float(sum(self.world.all_values(seconds))) / self.world.size


def make_training(world: Any, mode: str, data: Path, folder: Path) -> Any:
    from slurmft.core.config import JobConfig, RunConfig
    from slurmft.node.heartbeat import Heart
    from slurmft.node.signals import StopRequest
    from slurmft.runs.rundir import RunDir
    from slurmft.train.config import TrainConfig
    from slurmft.train.trainer import Training

    train = TrainConfig.resolve(
        task="emotion", data=str(data), model=str(encoder()), batch_size=BATCH, precision="bf16",
        checkpoint_every="0", epochs=100, grad_comm=mode,
    )  # fmt: skip
    config = RunConfig(program=train.program(), job=JobConfig(runs_dir=str(folder)))
    run = RunDir.open(world.share_object(RunDir.create(config).path if world.is_main else None))
    if world.is_main and (folder / "tokens").exists():
        shutil.copytree(folder / "tokens", run.tokens)
    training = Training(run, StopRequest(), Heart(folder / f"beat-{world.rank}"))
    if world.is_main:
        shutil.copytree(run.tokens, folder / "tokens", dirs_exist_ok=True)
    training.model.train()
    return training


def rank(part: str, data: Path, folder: Path, output: Path) -> None:
    names, wanted, rounds = PARTS[part]
    slow_down(FIRST_MBIT_S)
    cases = {name: Case(name, data, folder) for name in names}
    for case in cases.values():
        case.steps(WARM_UP)
    mbit_s, tries = settle(cases, wanted)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[:: -1 if number % 2 else 1]:
            times[name].append(cases[name].block(BLOCK) / BLOCK)
        if Case.world.is_main:
            print(number, {name: round(t[-1], 4) for name, t in times.items()}, flush=True)
    if Case.world.is_main:
        found = summary(times) | {
            "link_mbit_s": mbit_s, "tries": tries, "batch_size": BATCH, "steps_in_a_block": BLOCK,
            "auto": cases["auto"].chosen if "auto" in cases else None, "step_s": times,
        }  # fmt: skip
        output.write_text(json.dumps(found))
        print(json.dumps({k: v for k, v in found.items() if k != "step_s"}, indent=1))
    Case.world.sum([0.0])
    os._exit(0)


def settle(
    cases: dict[str, Case], wanted: tuple[float, float]
) -> tuple[float, list[tuple[float, float]]]:
    """Slows the link until plain DDP is as inefficient as wanted; Mbit/s, and what was tried."""
    mbit_s, tries = FIRST_MBIT_S, []
    for _ in range(8):
        slow_down(mbit_s)
        cases["ddp"].block(2)
        one, ddp = (cases[name].block(BLOCK) for name in ("one, whole table", "ddp"))
        efficiency = one / ddp
        tries.append((mbit_s, efficiency))
        if Case.world.is_main:
            print(f"{mbit_s:.0f} Mbit/s: efficiency {efficiency:.3f} of plain DDP", flush=True)
        if wanted[0] <= efficiency <= wanted[1]:
            break
        middle = sum(wanted) / 2
        mbit_s *= max(0.3, (1 / efficiency - 1) / (1 / middle - 1))  # what waits, is sent
    return mbit_s, tries


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Efficiencies: medians of those of the rounds, but of all together for local:K, which sends in
    some of its blocks only."""

    def over(one: str) -> dict[str, list[float]]:
        return {
            name: [o / t for o, t in zip(times[one], own, strict=True)]
            for name, own in times.items()
        }

    whole = over("one, whole table")

    def middle(pairs: dict[str, list[float]], one: str) -> dict[str, float]:
        return {
            name: sum(times[one]) / sum(times[name])
            if name.startswith("local")
            else statistics.median(all_of)
            for name, all_of in pairs.items()
        }

    pairs = over("one") | {name: whole[name] for name in times if name == "ddp" or "whole" in name}
    return {
        "over_plain_node": middle(whole, "one, whole table"),
        "efficiency": middle(pairs, "one"),
        "lowest": {name: min(all_of) for name, all_of in pairs.items()},
        "highest": {name: max(all_of) for name, all_of in pairs.items()},
        "median_step_s": {name: statistics.median(own) for name, own in times.items()},
    }


# --- accuracy -------------------------------------------------------------------------------------


def accuracy(data: Path, seeds: int, names: Sequence[str]) -> None:
    """Two epochs on two simulated nodes, with every way to communicate; it goes on where it was
    stopped."""
    file = RESULTS / "communication_accuracy.json"
    before = json.loads(file.read_text()) if file.exists() else {"accuracy": {}, "gradients": {}}
    found: dict[str, list[float]] = {name: before["accuracy"].get(name, []) for name in ACCURACY}
    used: dict[str, Any] = before["gradients"]
    for number in range(seeds):
        for name in names:
            if len(found[name]) > number:
                continue
            result = train(data, name, FIRST_SEED + number)
            found[name].append(result["metrics"]["accuracy"])
            used[name] = result["gradients"]
            print(FIRST_SEED + number, name, found[name][-1], flush=True)
            save("communication_accuracy", {
                "epochs": 2, "batch_size": BATCH, "first_seed": FIRST_SEED, "accuracy": found,
                "points_from_fp32": points_from(found["fp32"], found), "gradients": used,
            })  # fmt: skip


def points_from(base: list[float], found: dict[str, list[float]]) -> dict[str, float]:
    """Differences of means over the seeds that both have."""
    return {
        name: 100 * statistics.mean(own - other for own, other in zip(values, base, strict=False))
        for name, values in found.items()
        if values
    }


def train(data: Path, mode: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "slurmft", "submit", "--follow", "--cluster", "local",
            "--nodes", "2", "--task", "emotion", "--data", str(data), "--model", str(encoder()),
            "--batch-size", str(BATCH), "--epochs", "2", "--precision", "bf16", "--seed", str(seed),
            "--batching", "packed", "--grad-comm", mode, "--runs-dir", folder,
            "--checkpoint-every", "0",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        (result,) = Path(folder).glob("*/result.json")
        values: dict[str, Any] = json.loads(result.read_text())
        return values


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(sys.argv[2], *map(Path, sys.argv[3:]))
    elif sys.argv[1] == "accuracy":
        seeds = int(sys.argv[3]) if len(sys.argv) > 3 else 1
        accuracy(Path(sys.argv[2]).absolute(), seeds, sys.argv[4:] or ACCURACY)
    else:
        measure(sys.argv[1], Path(sys.argv[2]).absolute())
