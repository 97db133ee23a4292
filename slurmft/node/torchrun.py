"""torchrun that survives stop signals and relays them: `python -m slurmft.node.torchrun ...`.

The stock agent kills its ranks on SIGTERM, and dies of SIGUSR2. This one passes both on to the
ranks, which agree on a step, save, and exit by themselves. SIGHUP still ends it and its ranks.
"""

import contextlib
import gc
import importlib
import logging
import os
import re
import sys
import traceback
from typing import Any, NoReturn

import psutil

from slurmft.core import interpreter
from slurmft.core.errors import Exit
from slurmft.node import agents, prefork, sealed, signals
from slurmft.node.rendezvous import (
    LISTEN,
    LOST_STORE,
    NO_PORT,
    TakenPortError,
    listen,
    reserved,
)
from slurmft.runs import log_times

_HANGUP = re.compile(r"Received 1 death signal|closing signal SIGHUP")
_TELL_OF_SIGNALS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)
"""Names of the loggers by which torch tells of signals."""


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


def exit_code_of(error: Exception) -> int | None:
    """Returns the exit code that says why the torchruns could not meet; None: it is another
    error."""
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    if sealed.cause_of(error) is not None:
        return int(Exit.RENDEZVOUS)
    if sealed.cause(error, TakenPortError) is not None:
        return NO_PORT
    for kind in (DistNetworkError, RendezvousConnectionError):
        if sealed.cause(error, kind) is not None:
            return LOST_STORE
    return None


def _end_now(code: int) -> NoReturn:
    """Ends this process, and with it its ranks, without waiting for its threads.

    A second rank that fails interrupts torchrun while it ends the first ones. The threads that read
    its ranks' logs then never hear that they are to end, and Python would wait for them for ever.
    """
    for stream in (sys.stdout, sys.stderr):
        # The disk of the log may be full.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


class _WithoutHangups(logging.Filter):
    """Leaves out what torch says of a hangup: a rank that has failed for good sends it, to end
    torchrun, and has said why. Behind that, a signal that nobody sent would be a riddle."""

    def filter(self, record: logging.LogRecord) -> bool:
        return _HANGUP.search(record.getMessage()) is None


def say_no_hangups() -> None:
    """Leaves what torch says of a hangup out of the logs."""
    for name in _TELL_OF_SIGNALS:
        logging.getLogger(name).addFilter(_WithoutHangups())


def main(argv: list[str]) -> None:
    signals.block()
    log_times.stamp_output("stdout", "stderr")  # before torch's logging uses them
    gc.disable()  # while torch is imported, which leaves no garbage
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        SubprocessHandler,
    )
    from torch.distributed.run import main as torchrun

    prefork.fork_ranks(argv, SubprocessHandler)
    gc.freeze()
    gc.enable()
    signals.listen(relay)  # a thread: not before ranks are forked
    say_no_hangups()
    served: list[Any] = []
    bind_stores(served)
    agents.serve_ranks()
    ending = agents.Ending()
    ending.await_others()
    try:
        torchrun(rank_arguments(argv))
    except SignalException:
        # A rank that has failed for good ends torchrun so, and has recorded why: a traceback of
        # torchrun itself would bury it.
        _end_now(1)
    except Exception as error:
        # The task of the node records what the exit code says.
        code = exit_code_of(error)
        if code is None:
            raise
        traceback.print_exc()
        raise SystemExit(code) from None
    ending.leave(served)


if __name__ == "__main__":
    main(sys.argv[1:])
