"""torch's stores, where ranks and torchruns find each other: on one address, not on all.

Left alone, TCPStore listens on every interface of its host, and answers whoever connects. This one
is given a socket that is bound to the address by which the job's nodes reach this one.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from slurmft.rendezvous import LISTEN

_BACKLOG = 2048
_MODULES = (
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.rendezvous",
)
"""Where torchrun and the ranks make their stores."""


def bind() -> None:
    """Makes the stores of this process listen on this node's address alone, if one is known.

    On the node itself its name may stand for another address (Debian's 127.0.1.1), so that it is
    replaced here, for those who connect, too.
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
