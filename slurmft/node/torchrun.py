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
import traceback
from typing import Any

import psutil

from slurmft.core import interpreter
from slurmft.core.errors import Exit
from slurmft.node import prefork, sealed, signals
from slurmft.node.rendezvous import LISTEN, listen, reserved
from slurmft.runs import log_times

# How long the head's torchrun outlives its own ranks for the others' torchruns.
_LEAVE_TIMEOUT_S = 30
_LEAVE_POLL_S = 0.05
# Prefix of the keys by which torchruns tell each other that their ranks have finished.
_FINISHED = "slurmft/finished"


def bind_stores(served: list[Any] | None = None) -> None:
    """Makes the stores of this process listen on this node's address alone, if it is known, and
    seals what it writes into them (`slurmft.node.sealed_store`).

    On the node itself, its name may resolve to another address (Debian's 127.0.1.1): it is replaced
    for connections, too.

    Args:
        served: takes the stores that other processes reach through this one. They end with their
            last reference.
    """
    from torch._C._distributed_c10d import TCPStore

    from slurmft.node import sealed_store

    own_address = os.environ.get(LISTEN, "")  # "n1=10.1.0.1"
    host, _, address = own_address.partition("=")

    def store(
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *more: Any,
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
        created = TCPStore(host_name, port, world_size, is_master, *more, **rest)
        if is_master and served is not None:
            served.append(created)
        return created

    for name in sealed.MODULES:
        sealed_store.seal_stores(importlib.import_module(name), store)


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


def await_others() -> None:
    """Makes a torchrun whose ranks have finished start them again with those of the others.

    When a rank dies, its torchrun waits until all torchruns start their ranks again. torch's own do
    so while their ranks run. One whose ranks have finished does not look, and the job stands still
    for the 300 s that it waits for the others to finish.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import (
        LocalElasticAgent,
    )
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.elastic.utils import store as stores

    monitor = LocalElasticAgent._monitor_workers
    results: dict[Any, Any] = {}  # processes of a start -> how all of them ended
    last_keys: dict[Any, str] = {}  # processes of a start -> key of the last that ends

    def have_others_ended(agent: Any, group: Any) -> bool:
        ranks = agent._pcontext
        try:
            if ranks not in last_keys:
                last_keys[ranks] = stores._barrier_nonblocking(
                    agent._store, group.group_world_size, _FINISHED
                )
            has_last = agent._store.check([last_keys[ranks]])
            return bool(has_last or group.spec.rdzv_handler.is_closed())
        # The torchrun that serves store and rendezvous is gone.
        except (RuntimeError, RendezvousError):
            return True

    def monitor_all(agent: Any, group: Any) -> Any:
        ranks = agent._pcontext
        if ranks not in results:
            result = monitor(agent, group)
            if result.state is not WorkerState.SUCCEEDED:
                return result
            results[ranks] = result
        if have_others_ended(agent, group):
            return results[ranks]
        # As long as its ranks are healthy, the agent looks for others that start theirs again.
        return RunResult(state=WorkerState.HEALTHY)

    LocalElasticAgent._monitor_workers = monitor_all  # type: ignore[method-assign]


def rank_arguments(argv: list[str]) -> list[str]:
    """Returns torchrun's arguments so that its ranks start without the present folder on their
    path; torchrun itself has no option for it."""
    # A script, whose own folder comes first.
    if "--module" not in argv:
        return argv
    place = argv.index("--module")
    module, *arguments = argv[place + 1 :]
    command = interpreter.module(module, *arguments, unbuffered=True)
    return [*argv[:place], "--no-python", *command]


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
    await_others()
    try:
        torchrun(rank_arguments(argv))
    except Exception as error:
        foreign_write = sealed.cause_of(error)
        if foreign_write is None:
            raise
        traceback.print_exc()
        # The task of the node records what this exit code says.
        raise SystemExit(Exit.RENDEZVOUS) from None
    wait_for_clients(served)


if __name__ == "__main__":
    main(sys.argv[1:])
