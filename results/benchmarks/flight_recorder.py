"""What does the Flight Recorder of torch cost, on in every rank? Steps with and without, in turn.

    python results/benchmarks/flight_recorder.py [--pairs 40]     # ten minutes

Whether it records is settled when a process starts. So there are two process groups of two ranks
each, one with it and one without. They take turns: one does a block of steps while the other waits.
Both train the same small encoder by DDP on gloo; its step has as many all-reduces as DDP has
buckets. Calls of their own, of one number each, show the CPU time of a single collective.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time

from harness import confidence, parser, save

RANKS = 2
STEPS = 4
"""Steps of a block."""
CALLS = 2000
GROUPS = {"with": "2000", "without": "0"}
"""Group -> TORCH_FR_BUFFER_SIZE."""


# --- ranks ----------------------------------------------------------------------------------------


def rank() -> None:
    """Does what each line of the input asks for, and answers with a number."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(ddp.parameters())
    texts = torch.randn(8, 32, 256)
    number = torch.zeros(1)

    def block() -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(texts).square().mean().backward()
            optimizer.step()
        dist.barrier()
        return time.perf_counter() - began

    def calls() -> float:
        # Of this thread alone, which records: others of gloo's do the work.
        began = time.thread_time()
        for _ in range(CALLS):
            dist.all_reduce(number)
        return time.thread_time() - began

    def calls_of_step() -> float:
        before = recorded()
        ddp(texts).square().mean().backward()
        return recorded() - before

    def recorded() -> int:
        dump = vars(torch._C._distributed_c10d)["_dump_fr_trace_json"]
        return len(json.loads(dump(True, False)).get("entries", []))

    work = {"block": block, "calls": calls, "calls of a step": calls_of_step}
    print("ready", flush=True)
    for line in sys.stdin:
        print(work[line.strip()](), flush=True)


# --- both groups ----------------------------------------------------------------------------------


class Group:
    """Two ranks that wait for what they are to do."""

    def __init__(self, buffer_size: str, port: int) -> None:
        self._ranks = []
        for number in range(RANKS):
            environment = os.environ | {
                "TORCH_FR_BUFFER_SIZE": buffer_size,
                "RANK": str(number),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            started = subprocess.Popen(
                [sys.executable, __file__, "rank"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._ranks.append(started)
        self._answers()

    def _answers(self) -> list[str]:
        return [each.stdout.readline() for each in self._ranks if each.stdout]

    def do(self, work: str) -> float:
        """Returns the longest time of a rank, in seconds."""
        for each in self._ranks:
            if each.stdin:
                each.stdin.write(f"{work}\n")
                each.stdin.flush()
        return max(map(float, self._answers()))

    def end(self) -> None:
        for each in self._ranks:
            each.communicate()


def measure(pairs: int) -> dict[str, object]:
    from slurmft.node.rendezvous import free_ports

    ports = free_ports(len(GROUPS))
    groups = {}
    for (name, size), port in zip(GROUPS.items(), ports, strict=True):
        groups[name] = Group(size, port)
    # DDP makes its buckets in the first step. The ring is not full yet: it counts.
    for work in ("block", "calls of a step"):
        calls_of_step = groups["with"].do(work)
    times: dict[str, dict[str, list[float]]] = {}
    for work in ("block", "calls"):
        times[work] = {name: [] for name in groups}
        for group in groups.values():  # warm-up
            group.do(work)
        for _ in range(pairs):
            for name in random.sample(list(groups), len(groups)):
                times[work][name].append(groups[name].do(work))
    for group in groups.values():
        group.end()
    percents = []
    for with_it, without in zip(*times["block"].values(), strict=True):
        percents.append(100 * (with_it / without - 1))
    step_ms = 1000 * statistics.median(times["block"]["without"]) / STEPS
    call_us = {}
    for name, seconds in times["calls"].items():
        # The least: other work on the machine only adds to it.
        call_us[name] = 1e6 * min(seconds) / CALLS
    recording_us = call_us["with"] - call_us["without"]
    return {
        "pairs": pairs,
        "step_ms": step_ms,
        "cost_percent": statistics.median(percents),
        "cost_percent_95": confidence(percents),
        "cpu_us_of_a_call": call_us,
        "cpu_us_of_recording_a_call": recording_us,
        "calls_of_a_step": calls_of_step,
        "cost_percent_by_cpu_time": calls_of_step * recording_us / step_ms / 10,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank()
    else:
        command = parser(__doc__)
        command.add_argument("--pairs", type=int, default=40)
        found = measure(command.parse_args().pairs)
        print(found)
        save("flight_recorder", found)
