"""torchrun on the node that serves the others' store."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.node.rendezvous import LISTEN, LOST_STORE
from tests.support import PATIENCE_S

pytestmark = pytest.mark.processes

SERVER = """
import subprocess
import sys
from datetime import timedelta
from slurmft.node import agents, torchrun

served = []
torchrun.bind_stores(served)
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

store = c10d_rendezvous_backend.TCPStore(
    "localhost", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
)
client = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(store.port)])
store.wait(["connected"])
del store
agents.wait_for_clients(served, timeout_s={timeout_s})
client.kill()
client.wait()
print("ended")
"""
CLIENT = """
import sys
import time
from torch.distributed import TCPStore

store = TCPStore("localhost", int(sys.argv[1]), is_master=False)
store.set("connected", "yes")
time.sleep({stay_s})
store.set("a last", "word")
print("bye", flush=True)
"""


def serve(*, timeout_s: float, stay_s: float) -> str:
    """Serves a store to a client that stays connected for `stay_s`; returns what was printed."""
    command = [sys.executable, "-c", SERVER.format(timeout_s=timeout_s)]
    return subprocess.run(
        [*command, CLIENT.format(stay_s=stay_s)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    ).stdout  # fmt: skip


def test_a_store_outlives_its_clients() -> None:
    assert serve(timeout_s=PATIENCE_S, stay_s=1) == "bye\nended\n"


def test_a_client_that_stays_is_not_waited_for_forever() -> None:
    assert serve(timeout_s=0.1, stay_s=PATIENCE_S) == "ended\n"


TAKEN = """
import socket
from slurmft.node import torchrun

taken = socket.create_server(("127.0.0.1", 0))
port = taken.getsockname()[1]
torchrun.bind_stores()
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

parameters = RendezvousParameters("c10d", f"localhost:{port}", "id", 1, 1, is_host="true")
try:
    create_backend(parameters)
except RendezvousConnectionError as error:
    assert f"cannot listen on port {port} of 127.0.0.1: Address already in use" in str(
        error.__cause__
    )
    print("refused")
"""


def test_a_port_that_is_taken_in_between_is_an_error_of_the_rendezvous() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TAKEN],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {LISTEN: "localhost=127.0.0.1"},
        check=False,
    )
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


def test_a_lost_store_has_an_exit_code_of_its_own() -> None:
    """Its node may have died; the run is not at fault."""
    from torch.distributed import DistNetworkError

    from slurmft.node import torchrun

    lost = RuntimeError("no store")
    lost.__cause__ = DistNetworkError("Failed to recv")
    assert torchrun.exit_code_of(lost) == LOST_STORE
    assert torchrun.exit_code_of(RuntimeError("another")) is None


INTERRUPTED = """
import logging
import sys
import threading
from types import SimpleNamespace
from slurmft.node import agents, torchrun


class SignalException(Exception):
    pass


def end_ranks(argv):
    # As a reader of a rank's log, which torch's own end would have ended.
    threading.Thread(target=threading.Event().wait).start()
    server = logging.getLogger("torch.distributed.elastic.agent.server.api")
    server.warning("Received %s death signal, shutting down workers", 1)
    ranks = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    ranks.warning("Sending process %s closing signal %s", 7, "SIGHUP")
    ranks.warning("another word of torch")
    raise SignalException("a second rank has failed")


# torch itself takes seconds to import, and is not the subject.
multiprocessing = "torch.distributed.elastic.multiprocessing"
stand_ins = {
    f"{multiprocessing}.api": SimpleNamespace(SignalException=SignalException),
    f"{multiprocessing}.subprocess_handler": SimpleNamespace(SubprocessHandler=None),
    "torch.distributed.run": SimpleNamespace(main=end_ranks),
}
sys.modules.update(stand_ins)
torchrun.bind_stores = agents.serve_ranks = lambda *_: None
agents.Ending.await_others = lambda *_: None
torchrun.main([])
"""


def test_torchrun_that_is_interrupted_while_it_ends_its_ranks_waits_for_no_thread() -> (
    None
):
    """Two ranks that fail at once each end torchrun: the second interrupts the end of the first.
    The hangup by which they do so is no signal that their user sent, and not in the log."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.endswith(" another word of torch")


def test_torch_tells_of_signals_in_these_words() -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    elastic = Path(torch.origin).parent / "distributed/elastic"
    server = (elastic / "agent/server/api.py").read_text()
    ranks = (elastic / "multiprocessing/api.py").read_text()
    assert '"Received %s death signal, shutting down workers"' in server
    assert '"Sending process %s closing signal %s"' in ranks
