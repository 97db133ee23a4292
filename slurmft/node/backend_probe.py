"""Times the sum of a gradient over all ranks by gloo and by oneCCL, as one of the ranks:
`python backend_probe.py REQUEST`.

Of slurmft it imports the seals of the store alone: the program's Python may lack it. Rank 0 prints
the seconds as JSON: those of gloo first, because oneCCL may end this process, or hang. Other
processes then train.
"""

import datetime
import faulthandler
import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

# How long one library is measured, about.
_MEASURE_S = 0.5
_MOST_ROUNDS = 20


def main(request: dict[str, Any]) -> None:
    """Measures both libraries.

    Args:
        request: "numbers" in a gradient, their "dtype", how many are sent in one "message", the
            "module" that registers ccl, the seconds after which it hangs, "ccl_s", and the
            "cores" of the rank; none: it is not bound.
    """
    if request["cores"]:
        # First: the libraries' threads inherit them.
        os.sched_setaffinity(0, request["cores"])
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        store=_sealed(_store(rank)),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(minutes=2),
    )
    size = min(request["numbers"], request["message"])
    tensor = torch.zeros(size, dtype=getattr(torch, request["dtype"]))
    # A gradient is sent in parts.
    parts = request["numbers"] / size
    seconds = {"gloo": parts * _all_reduce_s(tensor, None)}
    _print(rank, seconds)
    # By a thread of C, which ends the process whatever Python waits for.
    faulthandler.dump_traceback_later(request["ccl_s"], exit=True)
    importlib.import_module(request["module"])
    group = dist.new_group(backend="ccl")
    _check_sum(group)
    seconds["ccl"] = parts * _all_reduce_s(tensor, group)
    _print(rank, seconds)
    # Rank 0 must not end before the others, whose store it has.
    dist.barrier()


def _store(rank: int) -> TCPStore:
    """Returns the store by which the ranks meet."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    size = int(os.environ["WORLD_SIZE"])
    # "n1=10.1.0.1": the name of the host may resolve to another address on the host itself.
    name, _, address = os.environ.get("SLURMFT_LISTEN", "").partition("=")
    if name == host:
        host = address
    if rank != 0:
        return TCPStore(host, port, size)
    # "12345=3": the task has opened the port.
    _, _, descriptor = os.environ["SLURMFT_RESERVED_PORT"].partition("=")
    return TCPStore(host, port, size, True, master_listen_fd=int(descriptor))


def _sealed(store: TCPStore) -> Any:
    """Returns the store with the seals of the attempt."""
    secret = os.environ.get("SLURMFT_STORE_SECRET")
    if not secret:
        return store
    package = str(Path(__file__).parents[2])
    # No longer than for this import: there may be another torch beside the package.
    sys.path.append(package)
    try:
        from slurmft.node.sealed_store import SealedStore
    finally:
        sys.path.remove(package)
    return SealedStore(store, secret)


def _check_sum(group: Any) -> None:
    """Raises RuntimeError where the library does not sum over all ranks."""
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    if ones.item() != dist.get_world_size():
        raise RuntimeError(
            f"the sum over {dist.get_world_size()} ranks is {ones.item()}"
        )


def _all_reduce_s(tensor: torch.Tensor, group: Any) -> float:
    """Returns the seconds of one sum on the slowest rank."""

    def reduce() -> None:
        dist.all_reduce(tensor, group=group)

    _timed(reduce)  # connects the ranks
    # All ranks must call it equally often: by gloo, which works.
    estimate = torch.tensor([_timed(reduce)])
    dist.all_reduce(estimate, op=dist.ReduceOp.MAX)
    rounds = int(_MEASURE_S / max(estimate.item(), 1e-6))
    rounds = max(1, min(_MOST_ROUNDS, rounds))
    times = [_timed(reduce) for _ in range(rounds)]
    slowest = torch.tensor([statistics.median(times)])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _print(rank: int, seconds: dict[str, float]) -> None:
    if rank == 0:
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    code = 0
    try:
        main(json.loads(sys.argv[1]))
    except Exception:
        # Now: destructors of lost connections may abort the process, and hide the cause.
        traceback.print_exc()
        sys.stderr.flush()
        code = 1
    os._exit(code)  # the libraries' threads may wait for ranks that are gone
