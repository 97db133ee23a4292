"""Slurm's allocations and steps: srun, salloc."""

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import IO

from slurmft.cluster.slurm.commands import error_text, offers
from slurmft.core import interpreter, process
from slurmft.core.errors import Exit, SlurmftError


def srun_command(
    nodes: int, options: Sequence[str], program: Sequence[str]
) -> list[str]:
    """Returns an srun with one task, of one CPU, on each node: within the current allocation, or in
    a new one, for which it waits in the queue."""
    where = ["--job-name=slurmft-doctor", *options]
    if "SLURM_JOB_ID" in os.environ:
        # The steps of this job may have all CPUs: without --overlap, srun would wait for them.
        where = ["--overlap"]
    size = [
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
    ]
    return ["srun", "--quiet", "--kill-on-bad-exit=1", *size, *where, *program]


@contextlib.contextmanager
def allocation(options: Sequence[str], wait_s: float) -> Iterator[dict[str, str]]:
    """Holds a new allocation with these options of salloc until the end of the block; yields
    Slurm's variables for what runs in it. SlurmftError where salloc refuses, or the nodes are not
    allocated in time."""
    # salloc holds the nodes while its program runs: this one until its stdin is closed, which also
    # happens when this process dies.
    program = (
        "import json, os, sys; names = [n for n in os.environ if n.startswith('SLURM_')]; "
        "print(json.dumps({n: os.environ[n] for n in names}), flush=True); sys.stdin.read()"
    )
    # Not --immediate: where no node is free, it gives up at once, or after a single try.
    command = ["salloc", "--quiet", "--no-kill", "--job-name=slurmft-doctor", *options]
    with process.unnamed_file() as errors:
        child = process.start(
            [*command, *interpreter.code(program)],
            env=interpreter.library_environment(dict(os.environ)),
            death=signal.SIGTERM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield _granted(child, errors, wait_s)
        finally:
            _give_back(child)


def _granted(
    child: subprocess.Popen[bytes], errors: IO[bytes], wait_s: float
) -> dict[str, str]:
    """Returns the variables that the program in the allocation prints, when it has begun."""
    assert child.stdout is not None
    # Nothing was read before: no bytes are in Python's buffer, where select would miss them.
    readable, _, _ = select.select([child.stdout], [], [], wait_s)
    if not readable:
        raise SlurmftError(
            f"no nodes were allocated within {wait_s:.0f} s",
            "squeue shows who has them; wait longer (--wait), or use another --partition",
            code=Exit.SUBMIT,
        )
    line = child.stdout.readline()
    if not line:  # salloc has ended without running the program
        errors.seek(0)
        lines = error_text(errors.read().decode(errors="replace").splitlines())
        raise SlurmftError(
            f"salloc refused: {' '.join(lines)}", offers(otherwise=""), code=Exit.SUBMIT
        )
    variables: dict[str, str] = json.loads(line)
    return variables


def _give_back(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()  # its program ends, and with it the job
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=2)
    child.terminate()  # if it still waits, it gives its job up
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    process.end(child)
    child.stdout.close()


def on_host(host: str, program: Sequence[str]) -> list[str]:
    """Returns an srun with one task on one node of the current allocation, with all its resources.

    One step per node: a step that does not start does not affect the others.
    """
    return on_hosts([host], program)


def on_hosts(hosts: Sequence[str], program: Sequence[str]) -> list[str]:
    """Returns an srun with one task on each of these nodes of the current allocation."""
    count = len(hosts)
    host_list = ",".join(hosts)
    size = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1")
    where = ("--overlap", f"--nodelist={host_list}")
    return ["srun", "--quiet", "--export=ALL", *where, *size, *program]


def allocated_nodes() -> int | None:
    """Returns how many nodes the current allocation has; None: there is none."""
    count = os.environ.get("SLURM_JOB_NUM_NODES")
    if not count:
        return None
    return int(count)
