"""What the seals of torch's stores cost: the start of a job on four nodes, with and without.

    python results/benchmarks/sealed_store.py [--rounds 20]

Four processes of this machine, forked after their imports, are a node each: they meet as torchrun's
agents do, then form a process group of one rank each, whose store the agent of rank 0 serves. A
round does so with a secret and without one, in turn; printed are the medians, in milliseconds, of
the slowest node, and those of single calls.
"""

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as agents
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from slurmft.node import rendezvous, sealed, torchrun
from slurmft.node.agents import serve_ranks

NODES = 4
CALLS = 500


def start(node: int, port: int) -> None:
    """Meets the others, and forms a process group with them, as one node."""
    params = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "job", NODES, NODES, is_host=str(node == 0).lower()
    )
    backend, store = agents.create_backend(params)
    handler = dynamic.create_handler(store, backend, params)
    info = handler.next_rendezvous()
    served = info.bootstrap_store_info
    assert served is not None
    os.environ |= {"RANK": str(info.rank), "WORLD_SIZE": str(NODES)}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(served.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.zeros(1))


def fork(node: int, port: int, begin: int, end: int) -> int:
    """Starts a node, which begins when `begin` is closed, and writes its seconds to `end`."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torchrun.bind_stores()
        serve_ranks()
        os.read(begin, 1)
        began = time.perf_counter()
        start(node, port)
        took = time.perf_counter() - began
        os.write(end, f"{took}\n".encode())
        # The stores end with rank 0.
        time.sleep(0.5)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def round_s(secret: str) -> float:
    """Returns the seconds of the slowest of four nodes."""
    os.environ[sealed.SECRET] = secret
    (port,) = rendezvous.free_ports(1)
    begin, begin_writer = os.pipe()
    end_reader, end = os.pipe()
    pids = [fork(node, port, begin, end) for node in range(NODES)]
    time.sleep(0.3)
    os.write(begin_writer, b"." * NODES)
    os.close(end)
    with open(end_reader) as times:
        seconds = [float(line) for line in times]
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(begin)
    os.close(begin_writer)
    assert len(seconds) == NODES
    return max(seconds)


def call_us(secret: str) -> dict[str, float]:
    """Returns the microseconds of single calls."""
    os.environ[sealed.SECRET] = secret
    torchrun.bind_stores()
    store = agents._create_tcp_store(
        RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, is_host="true")
    )
    store.set("key", "x" * 200)
    calls: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("key", "x" * 200),
        "get": lambda: store.get("key"),
        "add": lambda: store.add("counter", 1),
        "wait": lambda: store.wait(["key"]),
    }
    times = {}
    for name, call in calls.items():
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times[name] = (time.perf_counter() - began) / CALLS * 1e6
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", rendezvous.LISTEN: ""}
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"plain": [], "sealed": []}
    for _ in range(rounds):
        seconds["plain"].append(round_s(""))
        seconds["sealed"].append(round_s(sealed.new_secret()))
    for name, times in seconds.items():
        print(f"start, {name}: {statistics.median(times) * 1e3:.0f} ms")
    pairs = zip(seconds["sealed"], seconds["plain"], strict=True)
    differences = [with_seals - without for with_seals, without in pairs]
    print(f"difference: {statistics.median(differences) * 1e3:+.0f} ms")
    for name, secret in (("plain", ""), ("sealed", sealed.new_secret())):
        calls = ", ".join(f"{call} {us:.0f}" for call, us in call_us(secret).items())
        print(f"calls, {name}, µs: {calls}")


if __name__ == "__main__":
    main()
