"""The processes of a node, without torchrun: `python -m slurmft.node.processes MODULE RUN_DIR ...`.

Each gets the variables that torchrun sets. When one fails, the others are ended. Nothing is started
again within the job.
"""

import os
import signal
import subprocess
import sys
import time

from slurmft.core import process
from slurmft.core.errors import UsageError, run_main
from slurmft.node import signals
from slurmft.node.hardware import host_name, select, visible_gpus

_END_S, _POLL_S = 5.0, 0.05


def environments(
    per: str, count: int, node: int, nodes: int, head: str, port: str
) -> list[dict[str, str]]:
    """The variables of each process of this node: as many as on every other node. UsageError where
    a process a GPU is wanted, and there are fewer GPUs."""
    found = [
        {
            "RANK": str(node * count + local), "LOCAL_RANK": str(local), "GROUP_RANK": str(node),
            "WORLD_SIZE": str(nodes * count), "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": head, "MASTER_PORT": port,
        }
        for local in range(count)
    ]  # fmt: skip
    if per == "gpu":
        gpus = visible_gpus(os.environ)
        if len(gpus) < count:
            raise UsageError(
                f"--per gpu: {host_name()} shows this job {len(gpus)} GPU(s), not {count}",
                "request them: --gpus-per-node N; or use --per process",
            )
        for variables, gpu in zip(found, gpus, strict=False):
            variables |= select([gpu])
    return found


def run(command: list[str], each: list[dict[str, str]]) -> int:
    """Runs a process for each set of variables; returns the first exit code that is not 0."""
    started: list[subprocess.Popen[bytes]] = []

    def relay(number: int, sender: int) -> None:
        for child in started:
            child.send_signal(signals.RELAYED)

    for variables in each:
        started.append(process.start(command, env=os.environ | variables))
    signals.listen(relay)
    while True:
        codes = [child.poll() for child in started]
        if any(codes) or None not in codes:
            return _end(started)
        time.sleep(_POLL_S)


def _end(started: list[subprocess.Popen[bytes]]) -> int:
    """Ends what still runs; returns the exit code of the first that failed."""
    code = next((child.returncode for child in started if child.returncode), 0)
    for child in started:
        child.terminate()
    deadline = time.monotonic() + _END_S
    for child in started:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.end(child)
    return int(128 - code if code < 0 else code)


def main(argv: list[str]) -> int:
    module, run_dir, per, count, node, nodes, head, port = argv
    signals.block()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by which a failed rank ends its torchrun
    each = environments(per, int(count), int(node), int(nodes), head, port)
    return run([sys.executable, "-m", module, run_dir], each)


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
