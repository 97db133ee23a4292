"""The command that a node's task starts: torchrun, or the processes of a program without it."""

import os
from pathlib import Path

from slurmft.core import interpreter
from slurmft.core.config import RunConfig
from slurmft.core.program import kind_of
from slurmft.node.rendezvous import Rendezvous

# How long torchrun waits for the other nodes' torchrun: importing torch from a cold shared file
# system takes minutes. That the head can be reached is known before (`Rendezvous.check`).
_START_TIMEOUT_S = 600


def node_command(
    config: RunConfig,
    run_dir: Path,
    rendezvous: Rendezvous,
    nproc: str,
    nodes: str | None = None,
) -> list[str]:
    """Returns the command of a node: torchrun, or the processes of a program that does without.

    Every rank runs the program's module, with the run directory as its only argument.

    Args:
        nproc: number of processes.
        nodes: the number of nodes where it may change, as "2:4".
    """
    module = config.program.module
    kind = kind_of(config.program)
    node_count = str(len(rendezvous.hosts))
    if kind.per != "torchrun":
        count = nproc
        if kind.per == "node":
            count = "1"
        return interpreter.module(
            "slurmft.node.processes",
            module, str(run_dir),
            kind.per, count,
            str(rendezvous.node_rank), node_count,
            rendezvous.head, str(rendezvous.port),
        )  # fmt: skip
    rdzv_conf = {
        # Without it torch finds the store's host by matching host names, which fails where the
        # fabric's name differs from the host's own.
        "is_host": str(rendezvous.is_head).lower(),
        "join_timeout": _START_TIMEOUT_S,
        "read_timeout": _START_TIMEOUT_S,
    }
    return interpreter.module(
        "slurmft.node.torchrun",
        "--nnodes", nodes or node_count,
        "--nproc-per-node", nproc,
        "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{rendezvous.head}:{rendezvous.port}",
        "--rdzv-id", rendezvous.id,
        "--rdzv-conf", ",".join(f"{k}={v}" for k, v in rdzv_conf.items()),
        "--local-addr", rendezvous.host,
        "--max-restarts", str(config.job.max_restarts),
        "--log-dir", os.devnull,  # the ranks have logs of their own
        "--module", module, str(run_dir),
    )  # fmt: skip
