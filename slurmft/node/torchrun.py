"""torchrun that survives stop signals and relays them: `python -m slurmft.node.torchrun ...`.

The stock agent kills its ranks on SIGTERM, and dies of SIGUSR2. This one passes both on to the
ranks, which agree on a step, save, and exit by themselves. SIGHUP still ends it and its ranks.
"""

import contextlib
import gc
import importlib
import os
import sys
import time
from typing import Any

import psutil

from slurmft.node import prefork, signals
from slurmft.node.rendezvous import LISTEN, listen, reserved
from slurmft.runs import log_times

# How long the head's torchrun outlives its own ranks for the others' torchruns.
_LEAVE_TIMEOUT_S = 30
_LEAVE_POLL_S = 0.05
# Where torchrun and the ranks create their stores.
_MODULES = (
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.rendezvous",
)


def bind_stores(served: list[Any] | None = None) -> None:
    """Makes the stores of this process listen on this node's address alone, if it is known.

    On the node itself, its name may resolve to another address (Debian's 127.0.1.1): it is replaced
    for connections, too.

    Args:
        served: takes the stores that other processes reach through this one. They end with their
            last reference.
    """
    own_address = os.environ.get(LISTEN, "")  # "n1=10.1.0.1"
    host, _, address = own_address.partition("=")
    modules = [importlib.import_module(name) for name in _MODULES]
    original: Any = modules[0].__dict__["TCPStore"]

    def store(
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        **rest: Any,
    ) -> Any:
        if address and host_name == host:
            host_name = address
        if is_master:
            # The task of the node may have opened it.
            descriptor = reserved(os.environ, port)
            if descriptor is None and address:
                descriptor = listen(address, port)
            if descriptor is not None:
                rest["master_listen_fd"] = descriptor
            host_name = address or host_name
        created = original(host_name, port, world_size, is_master, **rest)
        if is_master and served is not None:
            served.append(created)
        return created

    for module in modules:
        module.__dict__["TCPStore"] = store


def wait_for_clients(served: list[Any], timeout_s: float = _LEAVE_TIMEOUT_S) -> None:
    """Waits until no other process is connected to the stores that this process serves.

    All torchruns end together, but the one that serves the store may be the first to be gone. The
    others then lose the connection in the middle of their last exchange, and log a traceback after
    a run that went well.
    """
    ports = {store.port for store in served}
    deadline = time.monotonic() + timeout_s
    while _has_clients(ports) and time.monotonic() < deadline:
        time.sleep(_LEAVE_POLL_S)


def _has_clients(ports: set[int]) -> bool:
    connections = psutil.Process().net_connections("tcp")
    own_ports = {connection.laddr.port for connection in connections}
    for connection in connections:
        # A socket that listens has no other end.
        if connection.status != psutil.CONN_ESTABLISHED:
            continue
        is_served = connection.laddr.port in ports
        # This process is a client of its own store: it need not wait for itself.
        is_own = connection.raddr.port in own_ports
        if is_served and not is_own:
            return True
    return False


def relay(signum: int, sender: int) -> None:
    """Relays a stop signal to the ranks, and records it for ranks that start later."""
    os.environ[signals.STOPPING] = str(signum)
    for rank in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signals.RELAYED)


def main(argv: list[str]) -> None:
    signals.block()
    log_times.stamp_output("stdout", "stderr")  # before torch's logging uses them
    gc.disable()  # while torch is imported, which leaves no garbage
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        SubprocessHandler,
    )
    from torch.distributed.run import main as torchrun

    prefork.fork_ranks(argv, SubprocessHandler)
    gc.freeze()
    gc.enable()
    signals.listen(relay)  # a thread: not before ranks are forked
    served: list[Any] = []
    bind_stores(served)
    torchrun(argv)
    wait_for_clients(served)


if __name__ == "__main__":
    main(sys.argv[1:])
