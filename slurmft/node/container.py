"""Runs the task of a node in a container: `python -m slurmft.node.container RUN_DIR COMMAND...`.

The command is that of the container runtime; `slurmft.cluster.container` makes it. A module of its
own: submitting commands need not wait for what only a node imports.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from slurmft.core import process
from slurmft.core.errors import SlurmftError, run_main
from slurmft.core.run_files import Failure
from slurmft.core.trusted import temporary_place
from slurmft.node import signals
from slurmft.node.hardware import host_name
from slurmft.runs.rundir import RunDir


def main(argv: list[str]) -> int:
    """Runs the runtime's command. Stop signals are for the task: blocked, they kill no helper
    process (conmon, squashfuse)."""
    run = RunDir.open(argv[0])
    program = argv[1]
    if shutil.which(program) is None:
        missing = SlurmftError(
            f"--container: there is no {program} on this node",
            "load its module by --setup, or choose another --container-runtime",
        )
        run.add(Failure.of(f"node {host_name()}", missing))
        raise missing
    signals.block()
    if program == "podman":
        return _run_detached(argv[1:])
    # In the place of this process: a signal of srun's reaches the runtime without a relay.
    os.execvp(program, argv[1:])


def _run_detached(command: list[str]) -> int:
    """Runs a container of Podman; returns its exit code. Podman itself, if not detached, would end
    at SIGTERM, with code 0. Its monitor, conmon, ends with the container, and with its code."""
    # Before podman starts: conmon becomes a child of this process only if that adopts by then.
    process.adopt_orphans()
    with tempfile.TemporaryDirectory(dir=temporary_place()) as folder:
        file = Path(folder, "pid")
        podman, subcommand, *arguments = command
        done = subprocess.run(
            [podman, subcommand, f"--conmon-pidfile={file}", *arguments]
        )
        if done.returncode:
            return done.returncode
        # A stop signal came before the container.
        if not file.exists():
            return 128 + signal.SIGTERM
        monitor = int(file.read_text())
        # conmon has become a child of this process: its own parent, podman, has ended.
        _, status = os.waitpid(monitor, 0)
    code = os.waitstatus_to_exitcode(status)
    # Python has -N for a death by the signal N; shells and srun have 128 + N.
    if code < 0:
        return 128 - code
    return code


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
