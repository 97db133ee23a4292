"""torchrun's agents: how they end together, and serve their ranks; though strangers connect."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from slurmft.node import agents, heartbeat, rank_deaths, sealed
from slurmft.node.agents import Marks
from slurmft.node.rendezvous import LISTEN, START_PORT, ephemeral_ports, listen
from slurmft.node.sealed_store import SealedStore
from tests.support import until
from tests.support.stores import plain_store


@pytest.fixture
def server() -> Any:
    return plain_store()


@pytest.fixture
def both(server: Any) -> tuple[Marks, Marks]:
    """The marks of a job of two agents, as each of them sees them."""
    marks = []
    for number in range(2):
        client = SealedStore(plain_store(server.port, False), "s", keeps_keys=True)
        marks.append(Marks(PrefixStore("round 0", client), "ended", number, 2))
    return marks[0], marks[1]


@pytest.mark.parametrize(("nodes", "pause_s"), [(2, 0.1), (500, 0.5), (5000, 1)])
def test_few_agents_meet_soon(
    nodes: int, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = dynamic_rendezvous
    monkeypatch.setattr(module, "_delay", module._delay)  # set back at the end
    unused: Any = None
    state = dynamic_rendezvous._BackendRendezvousStateHolder(unused, unused)
    settings = SimpleNamespace(max_nodes=nodes)
    agents.poll_often(SimpleNamespace(_settings=settings, _state_holder=state))
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    module._delay(seconds=1)
    assert (pauses, state._cache_duration) == ([pause_s], pause_s)


@pytest.mark.parametrize("value", [None, b"", b"1", b"x" * 60])
def test_a_mark_that_a_stranger_removes_is_made_again(
    server: Any, both: tuple[Marks, Marks], value: bytes | None
) -> None:
    """Deleted, or overwritten."""
    first, second = both
    stranger = plain_store(server.port, False)
    first.make()
    assert not first.are_complete()
    for key in stranger.list_keys():
        if key.startswith("round"):
            stranger.delete_key(key)
            if value is not None:
                stranger.set(key, value)
    second.make()
    time.sleep(0.02)
    assert first.are_complete()
    time.sleep(0.02)
    assert second.are_complete()


def test_a_stranger_makes_no_mark(server: Any, both: tuple[Marks, Marks]) -> None:
    first, _ = both
    first.make()
    plain_store(server.port, False).set("round 0/ended/1", b"1")
    assert not first.are_complete()
    assert not first.have_others()


def test_who_removes_a_mark_again_and_again_holds_up_nobody(
    server: Any, both: tuple[Marks, Marks]
) -> None:
    first, _ = both
    stranger = plain_store(server.port, False)
    for _ in range(agents._MOST_LOSSES):
        assert not first.are_complete()
        stranger.delete_key("round 0/ended/0")
    assert first.are_complete()


@pytest.mark.processes
def test_the_head_does_not_wait_for_a_stranger(
    server: Any, both: tuple[Marks, Marks]
) -> None:
    """Who connects, and says nothing."""
    left, other = both
    code = (
        f"import socket; s = socket.create_connection(('127.0.0.1', {server.port})); "
    )
    stranger = subprocess.Popen(
        [sys.executable, "-Ic", code + "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        # The store accepts connections in a thread of its own.
        until(lambda: agents._has_clients({server.port}))
        began_at = time.monotonic()
        agents.wait_for_clients([server], left, timeout_s=1)
        assert time.monotonic() - began_at >= 1
        other.make()
        began_at = time.monotonic()
        agents.wait_for_clients([server], left, timeout_s=60)
        assert time.monotonic() - began_at < 60
        stranger.kill()


def test_the_agent_listens_for_the_ranks_before_others_know_the_port(
    monkeypatch: pytest.MonkeyPatch, server: Any
) -> None:
    """On this node's address, outside of the ports of outgoing connections; anew at each start."""
    backend = import_module(sealed.AGENTS)
    dynamic = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    handler_type = dynamic.DynamicRendezvousHandler
    for name in ("next_rendezvous", "_create_tcp_store_server"):
        monkeypatch.setattr(handler_type, name, getattr(handler_type, name))
    agents.serve_ranks()
    monkeypatch.setenv(LISTEN, "n1=127.0.0.1")
    monkeypatch.setenv(START_PORT, "")
    store = SealedStore(server, "s", keeps_keys=True)
    handler = handler_type.from_backend(
        "7.0", store, backend.C10dRendezvousBackend(store, "7.0"), 1, 1, local_addr="n1"
    )
    ports = []
    kept: list[str] = []
    for name in ("keep_calls", "tell_mismatch"):
        monkeypatch.setattr(rank_deaths, name, lambda name=name: kept.append(name))
    for _ in range(2):
        kept.clear()
        info = handler.next_rendezvous()
        # What ranks of before have told, once all nodes have kept it.
        assert kept == ["keep_calls", "tell_mismatch"]
        port = info.bootstrap_store_info.master_port
        start_port = int(os.environ[START_PORT])
        assert start_port not in (0, port)
        # Nobody else can be first on it.
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", start_port)).close()
        os.close(listen("127.0.0.1", start_port, is_held=True))
        ports.append(port)
        low, high = ephemeral_ports()
        assert not low <= port <= high
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port)).close()
        # Of this node's address alone.
        socket.create_server(("127.0.0.2", port)).close()
        TCPStore("127.0.0.1", port, wait_for_workers=False).set("key", "value")
    assert handler.use_agent_store
    assert ports[0] != ports[1]
    handler.shutdown()


@pytest.mark.parametrize(
    ("writers", "is_unsealed"),
    [
        ([], False),
        (["ranks"], False),
        (["stranger", "ranks"], False),
        (["unsealed ranks"], True),
        (["counted clients"], False),
    ],
)
def test_ranks_that_write_without_seals_are_seen(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    server: Any,
    writers: list[str],
    is_unsealed: bool,
) -> None:
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setenv(sealed.SECRET, "s")
    monkeypatch.setattr(agents, "_UNSEALED_LOOK_S", 0)
    client = plain_store(server.port, False)
    for writer in writers:
        match writer:
            case "ranks":
                SealedStore(client, "s").set("key", "value")
            case "counted clients":
                client.set("init/", "2")
            case _:
                client.set("0//other", "value")
    watch = agents.SealWatch()
    watch.look(None)
    for _ in range(10):
        watch.look(server)
    assert (tmp_path / heartbeat.UNSEALED).exists() == is_unsealed


def test_values_of_strangers_say_nothing_before_a_rank_is_connected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Any
) -> None:
    """A rank may import for minutes."""
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setenv(sealed.SECRET, "s")
    monkeypatch.setattr(agents, "_UNSEALED_LOOK_S", 0)
    server.set("key", "of a stranger")
    watch = agents.SealWatch()
    for _ in range(10):
        watch.look(server)
    assert not (tmp_path / heartbeat.UNSEALED).exists()
    rank = plain_store(server.port, False)
    for _ in range(10):
        watch.look(server)
    assert (tmp_path / heartbeat.UNSEALED).exists()
    del rank


def test_store_that_cannot_list_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of torch 2.8: nothing is known of its seals, and nothing fails."""
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setenv(sealed.SECRET, "s")
    monkeypatch.setattr(agents, "_UNSEALED_LOOK_S", 0)
    watch = agents.SealWatch()
    for _ in range(10):
        watch.look(object())
    assert not (tmp_path / heartbeat.UNSEALED).exists()
