"""What a node has of its own besides its network: process ids, mounts and /dev/shm.

One process stands for a node, the first in its namespace of process ids; it collects orphans, as
init does. It outlives slurmd, whose jobs run on when it is killed, and goes with the node's power.
What is mounted on the machine later is seen on the nodes, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.cluster import network, system

_INIT = """\
import os, signal, subprocess
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while True:
    signal.sigwait([signal.SIGCHLD])
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass
"""
_MARK = "slurmft-node-init"


def share_mounts() -> None:
    """Makes later mounts of this machine visible on the nodes; a container's root is private."""
    system.sh("mount", "--make-rshared", "/")


def mark(host: str) -> str:
    """Returns the name of the node's first process, see `system.spawn`."""
    return f"node-{host}"


def first_command(host: str) -> list[str]:
    """Returns the command of the node's first process."""
    own = [
        "unshare",
        "--mount",
        "--propagation",
        "slave",
        "--pid",
        "--fork",
        "--mount-proc",
    ]
    return network.as_host(host, [*own, sys.executable, "-IS", "-c", _INIT, _MARK])


def inside_command(host: str, argv: Sequence[str]) -> list[str]:
    """Returns the command that runs `argv` on a node whose first process runs."""
    folder = Path("/proc", str(min(system.marked(mark(host)))), "ns")
    enter = [
        "nsenter",
        f"--mount={folder / 'mnt'}",
        f"--pid={folder / 'pid_for_children'}",
    ]
    return network.as_host(host, [*enter, *argv])


def is_up(host: str) -> bool:
    """Returns whether the node's first process has set up what is the node's own."""
    return any(
        _MARK in system.argv_of(pid) and _has_shm(pid)
        for pid in system.marked(mark(host))
    )


def is_of_the_node(argv: Sequence[str]) -> bool:
    """Returns whether a command line is that of what makes a node, and not of what runs on it."""
    return argv[0] in ("nsenter", "unshare") or _MARK in argv


def _has_shm(pid: int) -> bool:
    try:
        mounts = Path(f"/proc/{pid}/mounts").read_text()
    except OSError:
        return False
    return mounts.count(" /dev/shm tmpfs ") > Path("/proc/mounts").read_text().count(
        " /dev/shm tmpfs "
    )
