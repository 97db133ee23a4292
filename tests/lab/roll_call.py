"""A program without torch, for jobs of many nodes: all ranks meet, and each says so.

`python -m tests.lab.roll_call RUN_DIR` is a rank; with --task before it, the task of a node, which
starts the rank itself: 64 torchruns are more than one machine can do. Settings of the program:
`late`, a rank that comes 20 s later; `fails`, one that fails then; `stays_s`, how long they stay.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

import slurmft
from slurmft import SlurmftError
from slurmft.core.errors import Exit
from slurmft.node.preparation import use_of_node
from slurmft.node.rendezvous import Rendezvous
from slurmft.node.supervisor import Child, Supervisor, run_task
from slurmft.node.task import meet as meet_nodes
from slurmft.node.task import record_torchrun_failure, run_child
from slurmft.runs import log_times

LATE_S, WAIT_S = 20.0, 240.0


def run_node(supervisor: Supervisor) -> int:
    """As in slurmft.node.task, but for torchrun."""
    run, config = supervisor.run, supervisor.run.load_own_config()
    run.settle_permissions()
    rendezvous = Rendezvous.of_node(config.job, os.environ)
    if config.program.settings.get("late") == rendezvous.node_rank:
        time.sleep(LATE_S)
    if not meet_nodes(supervisor, config, rendezvous):
        return Exit.FAILED
    profile = use_of_node(config, os.environ)
    os.environ |= {
        "RANK": str(rendezvous.node_rank),
        "WORLD_SIZE": str(len(rendezvous.hosts)),
    }
    os.environ |= {"MASTER_ADDR": rendezvous.head, "MASTER_PORT": str(rendezvous.port)}
    child = Child(
        command=[sys.executable, "-m", "tests.lab.roll_call", str(run.path)],
        record_failure=lambda *args: record_torchrun_failure(supervisor, *args),
        tasks=len(rendezvous.hosts),
        others=len(rendezvous.hosts) - 1,
        rdzv_timeout_s=config.job.rdzv_timeout_s,
        records_stop=rendezvous.is_head,
    )
    return run_child(supervisor, child, config, rendezvous, profile)


def meet(rank: int, world_size: int) -> None:
    """Waits until all ranks have come to the first one."""
    head, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + WAIT_S
    while rank and time.monotonic() < deadline:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection((head, port), WAIT_S) as first,
        ):
            assert first.recv(100) == b"all are here\n"
            return
        time.sleep(0.2)  # the first rank is still starting
    with socket.create_server(("", port), backlog=1024) as server:
        server.settimeout(WAIT_S)
        others = [server.accept()[0] for _ in range(world_size - 1)]
    for other in others:
        other.sendall(b"all are here\n")


def main() -> None:
    with slurmft.attach() as job:
        settings = job.config.program.settings
        meet(job.rank, job.world_size)
        print(f"rank {job.rank} of {job.world_size} has met the others", flush=True)
        if job.rank == settings.get("fails"):
            raise SlurmftError("this rank fails")
        until = time.monotonic() + settings.get("stays_s", 0)
        while time.monotonic() < until:
            job.alive("train")
            time.sleep(0.5)
        job.result(ranks=float(job.world_size))


if __name__ == "__main__":
    if sys.argv[1] == "--task":
        log_times.stamp_output("stdout", "stderr")
        run_task(sys.argv[2], run_node)
    main()
