"""torchrun that survives stop signals and relays them: `python -m slurmft.node.torchrun ...`.

The stock agent kills its ranks on SIGTERM, and dies of SIGUSR2. This one passes both on to the
ranks, which agree on a step, save, and exit by themselves. SIGHUP still ends it and its ranks.
"""

import contextlib
import gc
import importlib
import os
import socket
import sys
from typing import Any

import psutil

from slurmft.node import prefork, signals
from slurmft.node.rendezvous import LISTEN
from slurmft.runs import log_times

_BACKLOG = 2048
# Where torchrun and the ranks create their stores.
_MODULES = (
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.rendezvous",
)


def bind_stores() -> None:
    """Makes the stores of this process listen on this node's address alone, if it is known.

    On the node itself, its name may resolve to another address (Debian's 127.0.1.1): it is replaced
    for connections, too.
    """
    host, _, address = os.environ.get(LISTEN, "").partition("=")
    if not address:
        return
    modules = [importlib.import_module(name) for name in _MODULES]
    original: Any = modules[0].__dict__["TCPStore"]

    def store(
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        **rest: Any,
    ) -> Any:
        if host_name == host:
            host_name = address
        if is_master:
            server = socket.create_server((address, port), backlog=_BACKLOG)
            rest["master_listen_fd"] = server.detach()
            host_name = address
        return original(host_name, port, world_size, is_master, **rest)

    for module in modules:
        module.__dict__["TCPStore"] = store


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
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main as torchrun

    prefork.fork_ranks(argv, SubprocessHandler)
    gc.freeze()
    gc.enable()
    signals.listen(relay)  # a thread: not before ranks are forked
    bind_stores()
    torchrun(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
