"""What a stranger can write to a job's ports, and what the job takes of it."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from slurmft.core.credentials import HIDDEN, is_private, redact
from slurmft.node import sealed, sealed_store
from slurmft.node.peers import FAILED, Peers
from slurmft.node.rendezvous import answer_checks, check_reachable, free_ports
from slurmft.node.sealed import Channel, ForgedError
from slurmft.node.sealed_store import SealedStore
from tests.support import PATIENCE_S
from tests.support.stores import plain_store

REFUSED = "somebody else has written into this job's store"


class Bomb:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


@pytest.fixture
def server() -> Any:
    return plain_store()


@pytest.fixture
def store(server: Any) -> SealedStore:
    return SealedStore(server, "secret")


@pytest.fixture
def stranger(server: Any) -> Any:
    return plain_store(server.port, serves=False)


# --- as torch's own -------------------------------------------------------------------------------


def random_calls(seed: int, store: Any) -> list[Any]:
    """What a store answers to many calls."""
    draw = random.Random(seed)
    answers: list[Any] = []
    for _ in range(300):
        key = draw.choice("abcd")
        value = draw.choice(["", "x", "yz", "ä"])
        number = draw.choice(["m", "n"])
        match draw.randrange(9):
            case 0:
                answers.append(store.set(key, value))
            case 1:
                answers.append(store.compare_set(key, draw.choice(["", "x"]), value))
            case 2:
                answers.append(store.append(key, value))
            case 3:
                answers.append(store.add(number, draw.choice([-2, 0, 1])))
            case 4:
                answers.append(store.delete_key(key))
            case 5:
                answers.append(store.check([key, number]))
            case 6:
                answers.append(store.multi_set([key, "e"], [value, b"\xff\0".hex()]))
            case 7:
                answers.append(store.num_keys())
            case 8:
                there = [each for each in ["a", "b", "m"] if store.check([each])]
                answers.append([store.get(each) for each in there])
                answers.append(store.multi_get(there))
                store.wait(there)
    return answers


@pytest.mark.parametrize("seed", range(4))
def test_answers_as_torchs_own_store(seed: int) -> None:
    """From Python, and from C++ through a PrefixStore."""
    expected = random_calls(seed, plain_store())
    assert random_calls(seed, SealedStore(plain_store(), "s")) == expected
    prefixed = PrefixStore("p", SealedStore(plain_store(), "s"))
    assert random_calls(seed, prefixed) == expected


def test_queues_timeouts_and_clones(store: SealedStore, server: Any) -> None:
    store.queue_push("q", "1")
    store.queue_push("q", b"\xff")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q")] == [b"1", b"\xff"]
    prefixed = PrefixStore("p", store)
    # As C++ sets it.
    prefixed.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError):
        prefixed.get("nothing")
    with pytest.raises(dist.DistStoreError):
        store.wait(["nothing"], timedelta(milliseconds=50))
    # A busy machine takes longer than that to connect a clone.
    prefixed.set_timeout(timedelta(seconds=PATIENCE_S))
    prefixed.set("key", "value")
    assert store.clone().get("p/key") == b"value"
    assert (store.port, store.host) == (server.port, "127.0.0.1")
    assert "p/key" in store.list_keys()


def test_many_that_count_at_once(store: SealedStore) -> None:
    """Each of them gets a number of its own."""
    numbers: list[int] = []

    def count() -> None:
        client = SealedStore(plain_store(store.port, serves=False), "secret")
        numbers.extend(client.add("n", 1) for _ in range(5))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 41))


@pytest.mark.processes
def test_a_process_group_lives_as_long_as_its_store() -> None:
    """C++ alone refers to it; and a later group on the same port begins anew."""
    code = """\
import gc, importlib, os, torch, torch.distributed as dist
from slurmft.node import sealed, sealed_store
for name in sealed.MODULES:
    sealed_store.seal_stores(importlib.import_module(name))
for turn in range(3):
    dist.init_process_group("gloo")
    gc.collect()
    store = dist.distributed_c10d._get_default_store()
    assert store.add("turns", 1) == 1
    assert isinstance(sealed_store._kept[0], sealed_store.SealedStore)
    assert len(sealed_store._kept) == 1, sealed_store._kept
    group = dist.new_group([0])
    dist.all_reduce(torch.zeros(1), group=group)
    del store, group
    dist.destroy_process_group()
print("good")
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(port), sealed.SECRET: "s"}
    variables |= {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "good\n", done.stderr


def test_stores_of_programs_listen_on_one_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those without torchrun, too; and two of a process share a server, as torch's own."""
    monkeypatch.setenv("SLURMFT_LISTEN", "n1=127.0.0.7")
    monkeypatch.setenv(sealed.SECRET, "s")
    (port,) = free_ports(1)
    module = ModuleType("module")
    sealed_store.seal_stores(module)
    first = module.TCPStore("n1", port, 1, True, multi_tenant=True)
    second = module.TCPStore("n1", port, 1, True, multi_tenant=True)
    first.set("key", "value")
    # One that a program makes later, for a group that follows, begins anew.
    assert not second.check(["key"])
    second.set("key", "new")
    assert (first.get("key"), second.get("key")) == (b"value", b"new")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


# --- strangers ------------------------------------------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: store.get("key"),
    "multi_get": lambda store: store.multi_get(["other", "key"]),
    "wait": lambda store: store.wait(["other", "key"]),
    "check": lambda store: store.check(["key"]),
    "compare_set": lambda store: store.compare_set("key", "a", "b"),
    "compare_set of nothing": lambda store: store.compare_set("key", "", "b"),
    "add": lambda store: store.add("key", 1),
    "read of a counter": lambda store: store.add("key", 0),
    "append": lambda store: store.append("key", "more"),
}


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Also where C++ has made another error of it, its words stay."""
    with pytest.raises(RuntimeError, match=REFUSED) as error:
        yield
    assert sealed.cause_of(error.value) is not None


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("of_cpp", [False, True])
def test_what_is_not_sealed_for_its_key_is_refused(
    read: str, of_cpp: bool, store: SealedStore, stranger: Any, tmp_path: Path
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "bomb"))
    prefix = "p/" if of_cpp else ""
    user: Any = PrefixStore("p", store) if of_cpp else store
    user.set("other", "value")
    other = stranger.get(f"{prefix}other")
    of_attempt = SealedStore(plain_store(store.port, False), "another secret")
    of_attempt.set(f"{prefix}key", "1")
    of_port = SealedStore(plain_store(), "secret")
    of_port.set(f"{prefix}key", "1")
    contents = [
        *(b"0", b"1", b"x" * 100, bomb, base64.b64encode(bomb)),
        *(other, other[:-1], other + b"x", other[:40]),
        stranger.get(f"{prefix}key"),
        of_port._store.get(f"{prefix}key"),
    ]
    for content in contents:
        stranger.set(f"{prefix}key", content)
        with refused():
            READS[read](user)
    assert not (tmp_path / "bomb").exists()


def test_another_takes_nothing_out_of_a_queue(
    store: SealedStore, stranger: Any
) -> None:
    stranger.queue_push("q", b"x")
    with refused():
        store.queue_pop("q")


def test_an_agent_does_not_wait_for_what_a_stranger_has_deleted(server: Any) -> None:
    store = SealedStore(server, "secret", keeps_keys=True)
    store.set("key", "value")
    assert store.get("key") == b"value"
    plain_store(server.port, serves=False).delete_key("key")
    with refused():
        store.get("key")


def test_an_agent_unpickles_no_state_of_strangers(
    store: SealedStore, stranger: Any, tmp_path: Path
) -> None:
    backend = import_module(sealed.MODULES[0])
    dynamic = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    api = import_module("torch.distributed.elastic.rendezvous")
    handler = dynamic.DynamicRendezvousHandler.from_backend(
        "7.0", store, backend.C10dRendezvousBackend(store, "7.0"), 1, 1
    )
    bomb = base64.b64encode(pickle.dumps(Bomb(tmp_path / "bomb")))
    stranger.set("torch.rendezvous.7.0", bomb)
    with pytest.raises(api.RendezvousConnectionError) as error:
        handler.next_rendezvous()
    assert sealed.cause_of(error.value) is not None
    assert not (tmp_path / "bomb").exists()
    # With torch's own store it is carried out.
    bare = plain_store()
    handler = dynamic.DynamicRendezvousHandler.from_backend(
        "7.0", bare, backend.C10dRendezvousBackend(bare, "7.0"), 1, 1
    )
    bare.set("torch.rendezvous.7.0", bomb)
    with contextlib.suppress(Exception):
        handler.next_rendezvous()
    assert (tmp_path / "bomb").exists()


def test_gloo_connects_to_no_address_of_a_stranger(
    store: SealedStore, stranger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C++, which reads the addresses of the other ranks from the store."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # A counter of groups, and the rank: as torch 2.13 names them.
    for group in range(20):
        stranger.set(f"g/{group}/1", b"\0" * 64)
    with pytest.raises(RuntimeError, match=REFUSED):
        dist.ProcessGroupGloo(
            PrefixStore("g", store), 0, 2, timedelta(seconds=PATIENCE_S)
        )


# --- connections ----------------------------------------------------------------------------------


def channels() -> tuple[Channel, Channel]:
    """Both ends of a connection: the head's and the task's."""
    challenge = sealed.new_challenge()
    task, line = Channel.answer("s", challenge)
    return Channel.accept("s", challenge, line.decode().strip()), task


def line_of(channel: Channel, text: str) -> str:
    return channel.seal(text).decode().removesuffix("\n")


def test_lines_are_taken_once_in_order_and_from_the_other_side() -> None:
    head, task = channels()
    first = line_of(head, "one")
    second = line_of(head, "two")
    with pytest.raises(ForgedError):
        task.open(second)
    assert task.open(first) == "one"
    with pytest.raises(ForgedError):
        task.open(first)
    assert task.open(second) == "two"
    # Sent back to its sender; of another connection; changed.
    with pytest.raises(ForgedError):
        head.open(line_of(head, "three"))
    with pytest.raises(ForgedError):
        head.open(line_of(channels()[1], "one"))
    with pytest.raises(ForgedError):
        head.open(line_of(task, "one").replace("one", "failed"))
    for line in ("", "failed", "report []", " failed", "\ud800 ä"):
        with pytest.raises(ForgedError):
            channels()[0].open(line)


def test_an_answer_without_the_secret_is_none() -> None:
    challenge = sealed.new_challenge()
    _, answer = Channel.answer("another secret", challenge)
    _, earlier = Channel.answer("s", sealed.new_challenge())
    for line in (answer.decode().strip(), earlier.decode().strip(), "", "x", "ä ä"):
        with pytest.raises(ForgedError):
            Channel.accept("s", challenge, line)
    for line in ("", "SSH-2.0", challenge[:-1], challenge.upper() + "0"):
        with pytest.raises(ForgedError):
            Channel.answer("s", line)


def test_strangers_hear_a_challenge_alone_and_tell_nothing() -> None:
    """Whatever they send, and though they have heard what a task sent."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    head = answer_checks(port, "7.0", "s", ["127.0.0.1"])

    def join() -> Peers:
        return check_reachable("n2", "127.0.0.1", port, "7.0", "s", PATIENCE_S)[1]

    node = join()
    for words in (b"failed\n", b"hang\nstop\n", b"a b\nfailed\n", b'report ["x", 1]\n'):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(PATIENCE_S)
            stranger.sendall(words)
            heard = stranger.makefile("rb")
            assert len(heard.readline()) == 33
            # Closed, perhaps before all that was sent was read.
            with contextlib.suppress(ConnectionResetError):
                assert heard.read() == b""
    assert not head.heard_any(["failed", "hang", "stop"], 0)
    assert head.reports("x", 1, 0) == []
    node.tell(FAILED)
    assert head.heard(FAILED, PATIENCE_S)
    assert join().heard(FAILED, PATIENCE_S)


def test_the_secret_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = sealed.new_secret()
    assert len(bytes.fromhex(secret)) == 32
    assert sealed.new_secret() != secret
    assert is_private(sealed.SECRET)
    monkeypatch.setenv(sealed.SECRET, secret)
    assert redact(f"it is {secret}") == f"it is {HIDDEN}"
    assert secret not in sealed.tag(secret) + sealed.derive(secret, "x")
    assert secret not in str(vars(sealed_store))
