"""Are steps on a CPU faster with oneCCL's binding than with gloo?

    python results/benchmarks/ccl_and_gloo.py          # ten minutes; the binding is installed
    python results/benchmarks/ccl_and_gloo.py --task mrpc --data DATA_DIR --batch-size 32 \\
        --precision bf16 --rounds 1

The 22M-parameter encoder; without --task in fp32, 8 texts of a dozen tokens a process. 1, 2 and 4
processes of a thread each on this machine, gloo and ccl in turn. Medians of the steps of each run,
and of all-reduces alone. DATA_DIR holds train.jsonl and validation.jsonl.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import Steps, encoder, make_emotion, make_run, parser, save, torchrun

PROCESSES, BACKENDS = (1, 2, 4), ("gloo", "ccl")
STEPS, WARM_UP = 10, 3
LENGTHS = {"emotion": 128, "mrpc": 128, "qqp": 128, "squad": 384}
"""Task -> the most tokens of a text, as in the published studies."""
BYTES = (8, 2**20, 2**26)


def main(
    task: str, data: Path | None, batch_size: int, precision: str, rounds: int
) -> None:
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = data or make_emotion(Path(folder) / "data")
        train: dict[str, Any] = {
            "task": task, "data": str(data), "batch_size": batch_size, "precision": precision,
            "max_length": LENGTHS[task],
        }  # fmt: skip
        name = "ccl_and_gloo" + ("" if task == "emotion" else f"_{task}")
        for number in range(rounds):
            for processes in PROCESSES:
                for backend in BACKENDS[:: 1 if number % 2 else -1]:
                    place = Path(folder) / f"{number}-{processes}-{backend}"
                    times = found.setdefault(f"{backend}, {processes} processes", {})
                    for what, seconds in run(place, processes, backend, train).items():
                        times.setdefault(what, []).append(seconds)
                        print(
                            f"{place.name} {what}: {1000 * seconds:.2f} ms", flush=True
                        )
            report(name, batch_size, precision, found)


def report(
    name: str, batch_size: int, precision: str, found: dict[str, dict[str, list[float]]]
) -> None:
    """Writes the rounds so far."""
    medians = {
        case: {name: statistics.median(times) for name, times in each.items()}
        for case, each in found.items()
    }
    ratios = {
        f"{processes} processes": {
            name: gloo_s / medians[f"ccl, {processes} processes"][name]
            for name, gloo_s in medians[f"gloo, {processes} processes"].items()
        }
        for processes in PROCESSES
    }
    cpus = len(os.sched_getaffinity(0))
    save(name, {"batch_size": batch_size, "precision": precision, "seconds": found,
                "median_s": medians, "gloo_over_ccl": ratios, "cpus": cpus})  # fmt: skip


def run(
    folder: Path, processes: int, backend: str, train: dict[str, Any]
) -> dict[str, float]:
    """Seconds of a step and of all-reduces: medians, of the slower rank."""
    from slurmft.core.config import JobConfig
    from slurmft.node import ccl, hardware, profiles

    folder.mkdir()
    path = make_run(folder / "runs", backend=backend, model=str(encoder()), **train)
    here = hardware.detect(os.environ)
    binding = None
    if backend == "ccl":
        binding = ccl.find()
    job = JobConfig(profile="cpu", nproc_per_node=min(processes, len(here.cores)))
    profile = profiles.choose(here, job, uses_ccl=binding is not None)
    environment = {setting.name: setting.value for setting in profile.settings()}
    # more processes than cores have none of their own
    environment.pop(profiles.CORES, None)
    environment["OMP_NUM_THREADS"] = "1"
    if binding is not None:
        environment |= binding.environment() | {
            "FI_TCP_IFACE": "lo",
            "CCL_KVS_IFACE": "lo",
        }
    torchrun(processes, __file__, "rank", str(path), env=environment)
    seconds: dict[str, float] = json.loads((path.parent / "times.json").read_text())
    return seconds


def rank(path: Path) -> None:
    import torch
    from torch import distributed

    steps = Steps(path)
    found = {"step": timed(steps, steps.step)}
    for size in BYTES if steps.world.size > 1 else ():
        tensor = torch.zeros(size // 4)
        found[f"all-reduce of {size} bytes"] = timed(
            steps, partial(distributed.all_reduce, tensor)
        )
    if steps.world.is_main:
        (path.parent / "times.json").write_text(json.dumps(found))
    steps.leave()
    os._exit(0)


def timed(steps: Steps, work: Callable[[], object]) -> float:
    times = []
    for _ in range(STEPS):
        steps.world.all_objects(None)  # all ranks begin together, by gloo in both cases
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(steps.world.all_values(statistics.median(times[WARM_UP:])))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]))
    arguments = parser(__doc__)
    arguments.add_argument("--task", choices=LENGTHS, default="emotion")
    arguments.add_argument("--data", type=Path, metavar="DATA_DIR")
    arguments.add_argument("--batch-size", type=int, default=8, help="of a process")
    arguments.add_argument("--precision", default="fp32")
    arguments.add_argument("--rounds", type=int, default=3)
    main(**vars(arguments.parse_args()))
