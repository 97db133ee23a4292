"""The processes of a node, without torchrun: `python -m slurmft.node.processes MODULE RUN_DIR ...`.

Each gets the variables that torchrun sets. When one fails, the others are ended. Nothing is started
again within the job.
"""

import os
import signal
import subprocess
import sys
import time

from slurmft.core import interpreter, process
from slurmft.core.errors import UsageError, run_main
from slurmft.node import signals
from slurmft.node.hardware import host_name, select, visible_gpus

# Between SIGTERM and SIGKILL to the processes that outlive one that failed.
_END_S = 5.0
_POLL_S = 0.05


def environments(
    per: str, count: int, node: int, nodes: int, head: str, port: str
) -> list[dict[str, str]]:
    """Returns the variables of each process of this node.

    Args:
        per: "gpu" gives each process a GPU of its own.
        count: number of processes, the same on every node.
        node: index of this node among `nodes`.
        head: the first node, on which rank 0 listens at `port`.

    Raises:
        UsageError: there are fewer GPUs than processes that need one.
    """
    common = {
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(nodes * count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": head,
        "MASTER_PORT": port,
    }
    each = []
    for local_rank in range(count):
        rank = node * count + local_rank
        each.append({"RANK": str(rank), "LOCAL_RANK": str(local_rank), **common})
    if per == "gpu":
        gpus = visible_gpus(os.environ)
        if len(gpus) < count:
            raise UsageError(
                f"--per gpu: {host_name()} shows this job {len(gpus)} GPU(s), not {count}",
                "request them: --gpus-per-node N; or use --per process",
            )
        for variables, gpu in zip(each, gpus, strict=False):
            variables |= select([gpu])
    return each


def run(command: list[str], each: list[dict[str, str]]) -> int:
    """Runs a process for each set of variables; returns the first exit code that is not 0."""
    children: list[subprocess.Popen[bytes]] = []

    def relay(number: int, sender: int) -> None:
        for child in children:
            child.send_signal(signals.RELAYED)

    # A stop that comes between two starts waits: `listen` takes it up when all are there.
    for variables in each:
        children.append(process.start(command, env=os.environ | variables))
    signals.listen(relay)
    while True:
        # poll() is None for a process that runs, and 0 for one that has succeeded.
        codes = [child.poll() for child in children]
        has_failed = any(codes)
        all_ended = None not in codes
        if has_failed or all_ended:
            return _end(children)
        time.sleep(_POLL_S)


def _end(children: list[subprocess.Popen[bytes]]) -> int:
    """Ends the processes that still run; returns the exit code of the first that failed."""
    # Before the others are ended, whose codes then are those of SIGTERM.
    code = next((child.returncode for child in children if child.returncode), 0)
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _END_S
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.end(child)
    if code < 0:  # a signal: as a shell writes it
        return int(128 - code)
    return int(code)


def main(argv: list[str]) -> int:
    # In the order of `start.node_command`.
    module, run_dir, per, count, node, nodes, head, port = argv
    # Before any process is started: it inherits the mask.
    signals.block()
    # a failed rank sends it, to end torchrun
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    each = environments(per, int(count), int(node), int(nodes), head, port)
    return run(interpreter.module(module, run_dir), each)


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
