"""How efficient are two nodes by --grad-comm where the network is slow? Two nodes of one core each,
in network namespaces of this machine, joined by a link that tc slows down. As root.

    python results/benchmarks/gradient_communication.py fast DATA_DIR       # emotion: train.jsonl,
    python results/benchmarks/gradient_communication.py slow DATA_DIR       # validation.jsonl
    python results/benchmarks/gradient_communication.py slowest DATA_DIR
    python results/benchmarks/gradient_communication.py accuracy DATA_DIR [--seeds N] [--modes ...]

The link is slowed until plain DDP (fp32, its defaults) has an efficiency of 0.65 to 0.70 (fast),
0.25 to 0.35 (slow) or 0.06 to 0.12 (slowest). All cases are in one process group, blocks of steps
in turn, on the same samples. Efficiency is the throughput of two nodes over twice that of one,
which computes while the other rests and trains the same weights; over_plain_node: of one node that
trains the whole embedding table. accuracy: whole trainings on two simulated nodes, the network as
it is.
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

from harness import Steps, encoder, load, make_run, parser, result, save, submit

BATCH, BLOCK, WARM_UP = 64, 16, 12
FIRST_MBIT_S = 2200.0
NODES = {"n-a": "10.78.0.1", "n-b": "10.78.0.2"}
DEVICE = "veth0"

CASES = (
    "one", "one, whole table", "both", "ddp", "fp32", "bf16", "local:16", "local:32", "local:64",
)  # fmt: skip
"""Besides values of --grad-comm: one node, computing alone; both at once, without communication;
plain DDP, which trains the whole embedding table, and is compared with one node that does so."""
FEWER = tuple(case for case in CASES if case not in ("both", "local:32", "local:64"))
LINKS = {
    "fast": (CASES, (0.65, 0.70), 4),
    "slow": (CASES, (0.25, 0.35), 4),
    "slowest": (FEWER, (0.06, 0.12), 2),
}
"""Link -> what is compared, the efficiency of plain DDP for which the link is slowed, and rounds:
in one of four local:64 averages."""
MODES = ("fp32", "local:32", "local:16", "local:64", "bf16")
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
        pair = [
            "link",
            "add",
            DEVICE,
            "netns",
            a,
            "type",
            "veth",
            "peer",
            "name",
            DEVICE,
        ]
        ip(*pair, "netns", b)
        for name, address in NODES.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
        yield
    finally:
        for name in NODES:
            subprocess.run(
                ["ip", "netns", "del", name], check=False, capture_output=True
            )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def slow_down(mbit_s: float) -> None:
    """Limits what the node that this process is on sends."""
    limit = ["tbf", "rate", f"{mbit_s:.0f}mbit", "burst", "256kb", "latency", "50ms"]
    subprocess.run(
        ["tc", "qdisc", "replace", "dev", DEVICE, "root", *limit], check=True
    )


# --- one measurement ------------------------------------------------------------------------------


def measure(link: str, data: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks end, too
    with tempfile.TemporaryDirectory() as folder, network():
        output = Path(folder) / "measured.json"
        port = str(random.randrange(20_000, 29_000))
        ranks = []
        for number, name in enumerate(NODES):
            environment = os.environ | {
                "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": next(iter(NODES.values())), "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE,
            }  # fmt: skip
            command = [
                "nsenter",
                f"--net=/run/netns/{name}",
                "taskset",
                "--cpu-list",
                str(number),
            ]
            command += [
                sys.executable,
                __file__,
                "rank",
                link,
                str(data),
                folder,
                str(output),
            ]
            ranks.append(subprocess.Popen(command, env=environment))
        try:
            codes = [process.wait(3600) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        found = json.loads(output.read_text())
    save(f"gradient_communication_{link}", found)


class Case(Steps):
    """One rank's training, with one way to communicate; all of a rank share its process group."""

    def __init__(self, name: str, data: Path, folder: Path, main_rank: bool) -> None:
        self.name = name
        mode, _, variant = name.partition(", ")
        mode = {"one": "local:1000000", "both": "local:1000000", "ddp": "fp32"}.get(
            mode, mode
        )
        with changed(
            is_plain=name == "ddp", whole_table=name == "ddp" or variant != ""
        ):
            super().__init__(self._run(mode, data, folder, main_rank))

    def _run(self, mode: str, data: Path, folder: Path, main_rank: bool) -> Path:
        """The run directory, which the main rank makes, with the tokens of the first case."""
        path = folder / self.name.replace(", ", "-")
        if main_rank:
            made = make_run(
                path, task="emotion", data=str(data), model=str(encoder()), batch_size=BATCH,
                precision="bf16", epochs=100, grad_comm=mode,
            )  # fmt: skip
            if (folder / "tokens").exists():
                shutil.copytree(folder / "tokens", made / "tokens")
            (path / "made").symlink_to(made)
        while not (path / "made").exists():
            time.sleep(0.05)
        return (path / "made").resolve()

    def step(self) -> Any:
        loss = super().step()
        self.trainer.strategy.end_step(self.trainer.position.step)
        return loss

    def block(self, count: int) -> float:
        """Seconds of so many steps; of one node, the mean of the two, one after the other."""
        is_one = self.name.partition(", ")[0] == "one"
        turns = range(self.world.size) if is_one else [self.world.rank]
        seconds = 0.0
        for turn in turns:
            self.world.sum([0.0])  # all begin together
            began = time.perf_counter()
            if turn == self.world.rank:
                for _ in range(count):
                    self.step()
                seconds = time.perf_counter() - began
        return float(sum(self.world.all_values(seconds))) / self.world.size


@contextlib.contextmanager
def changed(is_plain: bool, whole_table: bool) -> Iterator[None]:
    """Trainings that are made in it: by plain DDP, with the whole embedding table."""
    from slurmft.train.engine import vocab_trim
    from slurmft.train.parallel.replicated import Ddp

    def plain(self: Any, accelerator: Any, model: Any, optimizer: Any) -> Any:
        accelerator.ddp_handler = None
        return accelerator.prepare_model(model)

    before = Ddp.wrap, vocab_trim._LEAST_SAVED_BYTES
    if is_plain:
        Ddp.wrap = plain  # type: ignore[method-assign]
    if whole_table:
        vocab_trim._LEAST_SAVED_BYTES = 2**40
    yield
    Ddp.wrap, vocab_trim._LEAST_SAVED_BYTES = before  # type: ignore[method-assign]


def rank(link: str, data: Path, folder: Path, output: Path) -> None:
    names, wanted, rounds = LINKS[link]
    slow_down(FIRST_MBIT_S)
    cases = make_cases(names, data, folder)
    world = cases["ddp"].world
    for case in cases.values():
        for _ in range(WARM_UP):
            case.step()
    mbit_s, tries = settle(cases, wanted)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[:: -1 if number % 2 else 1]:
            times[name].append(cases[name].block(BLOCK) / BLOCK)
        if world.is_main:
            print(
                number, {name: round(t[-1], 4) for name, t in times.items()}, flush=True
            )
    if world.is_main:
        found = summary(times) | {
            "link_mbit_s": mbit_s, "tries": tries, "batch_size": BATCH, "steps_in_a_block": BLOCK,
            "step_s": times,
        }  # fmt: skip
        output.write_text(json.dumps(found))
        print(json.dumps({k: v for k, v in found.items() if k != "step_s"}, indent=1))
    world.sum([0.0])
    os._exit(0)


def make_cases(names: Sequence[str], data: Path, folder: Path) -> dict[str, Case]:
    from slurmft.job import process_group

    is_main = os.environ["RANK"] == "0"
    cases: dict[str, Case] = {}
    for name in names:
        cases[name] = Case(name, data, folder, is_main)
        world = cases[names[0]].world
        process_group.init = lambda *_, world=world: world
        if is_main and not (folder / "tokens").exists():
            shutil.copytree(cases[name].setup.run_dir.tokens, folder / "tokens")
    return cases


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
        if cases["ddp"].world.is_main:
            print(
                f"{mbit_s:.0f} Mbit/s: efficiency {efficiency:.3f} of plain DDP",
                flush=True,
            )
        if wanted[0] <= efficiency <= wanted[1]:
            break
        middle = sum(wanted) / 2
        # what waits, is sent
        mbit_s *= max(0.3, (1 / efficiency - 1) / (1 / middle - 1))
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

    pairs = over("one") | {
        name: whole[name] for name in times if name == "ddp" or "whole" in name
    }
    return {
        "over_plain_node": middle(whole, "one, whole table"),
        "efficiency": middle(pairs, "one"),
        "lowest": {name: min(all_of) for name, all_of in pairs.items()},
        "highest": {name: max(all_of) for name, all_of in pairs.items()},
        "median_step_s": {name: statistics.median(own) for name, own in times.items()},
    }


# --- accuracy -------------------------------------------------------------------------------------


def accuracy(data: Path, seeds: int, names: Sequence[str]) -> None:
    """Two epochs on two simulated nodes, with every way to communicate; it resumes where it was
    stopped."""
    before = load("gradient_communication_accuracy") or {
        "accuracy": {},
        "gradients": {},
    }
    found: dict[str, list[float]] = {
        name: before["accuracy"].get(name, []) for name in MODES
    }
    used: dict[str, Any] = before["gradients"]
    for number in range(seeds):
        for name in names:
            if len(found[name]) > number:
                continue
            values = train(data, name, FIRST_SEED + number)
            found[name].append(values["metrics"]["accuracy"])
            used[name] = values["gradients"]
            print(FIRST_SEED + number, name, found[name][-1], flush=True)
            save("gradient_communication_accuracy", {
                "epochs": 2, "batch_size": BATCH, "first_seed": FIRST_SEED, "accuracy": found,
                "points_from_fp32": points_from(found["fp32"], found), "gradients": used,
            })  # fmt: skip


def points_from(base: list[float], found: dict[str, list[float]]) -> dict[str, float]:
    """Differences of means over the seeds that both have."""
    return {
        name: 100
        * statistics.mean(own - other for own, other in zip(values, base, strict=False))
        for name, values in found.items()
        if values
    }


def train(data: Path, mode: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return result(
            submit(
                Path(folder),
                *(
                    "--cluster",
                    "local",
                    "--nodes",
                    "2",
                    "--task",
                    "emotion",
                    "--data",
                    str(data),
                ),
                *(
                    "--model",
                    str(encoder()),
                    "--batch-size",
                    str(BATCH),
                    "--epochs",
                    "2",
                ),
                *("--precision", "bf16", "--batching", "packed", "--seed", str(seed)),
                *("--grad-comm", mode, "--checkpoint-every", "0", "--save", "last"),
            )
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], *map(Path, sys.argv[3:]))
    arguments = parser(__doc__)
    arguments.add_argument("part", choices=[*LINKS, "accuracy"])
    arguments.add_argument("data", type=Path, metavar="DATA_DIR")
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument(
        "--modes", nargs="+", default=MODES, choices=MODES, metavar="MODE"
    )
    asked = arguments.parse_args()
    if asked.part == "accuracy":
        accuracy(asked.data.absolute(), asked.seeds, asked.modes)
    else:
        measure(asked.part, asked.data.absolute())
