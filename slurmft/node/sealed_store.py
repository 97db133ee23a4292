"""torch's store with a seal on every value: see `slurmft.node.sealed`.

The server is torch's own, and takes what anybody writes. The clients check: what is not sealed for
its key is refused before it is used, and so before torch unpickles it.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import random
import socket
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from slurmft.node import sealed
from slurmft.node.sealed import SEAL_BYTES, ForeignWriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

# Values that are set have an empty nonce, so that they can be compared; updates have one each.
_NONCE_BYTES = 16
_NO_NONCE = bytes(_NONCE_BYTES)
# Between two tries to update a value that others update, too.
_SHORTEST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05
# For values that were there a moment ago: torch would wait for minutes for one that a stranger has
# deleted in between.
_PRESENT = timedelta(seconds=5)
_MARK = "slurmft/sealed"
# As in slurmft.node.rendezvous, which older Pythons cannot import.
_BACKLOG = 2048

_kept: list[SealedStore] = []
"""C++ refers to the C++ part of a store alone. Its Python part, which has the methods, must live as
long."""
_generations: dict[int, int] = {}
"""How many process groups of this process have ended, by the port of their store."""


class SealedStore(Store):
    """A client that seals what it writes, and refuses what is not sealed.

    C++ calls the methods, too, also in threads of its own. It looks for some of them by their names
    in C++.
    """

    def __init__(
        self, store: Any, secret: str, keeps_keys: bool = False, generation: int = 0
    ) -> None:
        """
        Args:
            store: a TCPStore, whose stubs lack some methods.
            secret: that of the attempt.
            keeps_keys: nobody of this attempt deletes a key.
            generation: how many process groups have used the store before.
        """
        super().__init__()
        self._store = store
        self._generation = generation
        self._values = store
        if generation:
            self._values = PrefixStore(f"generation {generation}", store)
        self._port = store.port
        self._of_attempt = secret
        self._keeps_keys = keeps_keys
        self._keys: set[str] = set()
        """Keys that were there, where they are kept."""
        # A value of another store of this attempt must not do here.
        self._secret = _secret_of_store(secret, store.port, generation)
        self.set_timeout(store.timeout)
        _kept.append(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("host", "port", "libuvBackend"):
            return getattr(self._store, name)
        raise AttributeError(name)

    # --- values -----------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._client().set(key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        if key not in self._keys:
            return self._open(key, self._client().get(key))
        values = self._present([key])
        if values is None:
            raise ForeignWriteError(f"{self._foreign(key)} is gone")
        return values[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        contents = []
        for key, value in zip(keys, values):  # noqa: B905 - Python 3.9 has no `strict`
            contents.append(self._seal(key, value))
        self._client().multi_set(list(keys), contents)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        contents = self._client().multi_get(list(keys))
        pairs = zip(keys, contents)  # noqa: B905 - as above
        return [self._open(key, content) for key, content in pairs]

    def compare_set(
        self, key: str, expected: str | bytes, desired: str | bytes
    ) -> bytes:
        client = self._client()
        expected = _as_bytes(expected)
        after = self._seal(key, desired)
        before = b""
        # torch's store takes an empty value for "no such key", too.
        if expected:
            before = self._seal(key, expected)
        while True:
            content = client.compare_set(key, before, after)
            value = self._open(key, content)
            if content in (before, after) or value != expected:
                return value
            # It is the expected value, with the nonce of an update.
            before = content

    def add(self, key: str, amount: int) -> int:
        if not amount and self._client().check([key]):
            return int(self.get(key))
        return int(self._update(key, lambda value: b"%d" % (int(value or 0) + amount)))

    def append(self, key: str, value: str | bytes) -> None:
        self._update(key, lambda before: before + _as_bytes(value))

    def _update(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        """Changes a value in one step, with the others that may do so now; returns the new one.

        torch's server would add numbers itself, and append: it cannot seal the result.
        """
        client = self._client()
        before = b""
        value = b""
        longest_s = _SHORTEST_PAUSE_S
        for number in itertools.count(1):
            new = change(value)
            # Unlike any other's: by it, this client sees that the value is its own.
            after = self._seal(key, new, os.urandom(_NONCE_BYTES))
            content = client.compare_set(key, before, after)
            if content == after:
                return new
            is_gone = bool(before) and content == before
            if is_gone:
                before = value = b""
                continue
            value = self._open(key, content)
            before = content
            # Of many that try at once, one succeeds. The first try after a pause has an old value,
            # and brings the present one.
            if number % 2 == 0:
                time.sleep(random.uniform(0, longest_s))
                longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)
        raise AssertionError("unreachable")

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._client().queue_push(key, self._seal(key, value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._open(key, self._client().queue_pop(key, block))

    # --- keys -------------------------------------------------------------------------------------

    def check(self, keys: Sequence[str]) -> bool:
        # That a key is there tells something, too: another's does not count.
        return self._present(keys) is not None

    def _present(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the values of keys that are there; None: one is not."""
        client = self._client()
        if not client.check(list(keys)):
            return None
        client.set_timeout(min(self.timeout, _PRESENT))
        try:
            contents = client.multi_get(list(keys))
        except dist.DistStoreError:
            return None
        finally:
            client.set_timeout(self.timeout)
        pairs = zip(keys, contents)  # noqa: B905 - Python 3.9 has no `strict`
        return [self._open(key, content) for key, content in pairs]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._client().wait(list(keys), timeout or self.timeout)
        self.multi_get(keys)

    def delete_key(self, key: str) -> bool:
        return bool(self._client().delete_key(key))

    def num_keys(self) -> int:
        return int(self._client().num_keys())

    def list_keys(self) -> list[str]:
        return list(self._client().list_keys())

    def queue_len(self, key: str) -> int:
        return int(self._client().queue_len(key))

    # The names by which C++ looks for them.
    deleteKey = delete_key
    getNumKeys = num_keys

    # --- the store itself -------------------------------------------------------------------------

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SealedStore:
        return SealedStore(
            self._store.clone(), self._of_attempt, self._keeps_keys, self._generation
        )

    def _client(self) -> Any:
        """Returns torch's store, with the timeout that this one has: C++ sets it here."""
        if self._store.timeout != self.timeout:
            self._store.set_timeout(self.timeout)
        return self._values

    def _seal(self, key: str, value: str | bytes, nonce: bytes = _NO_NONCE) -> bytes:
        content = nonce + _as_bytes(value)
        return sealed.seal(self._secret, key.encode(), content) + content

    def _open(self, key: str, content: bytes) -> bytes:
        """Returns the value of what the server has for a key.

        Raises:
            ForeignWriteError: it was not sealed for this key, by this attempt.
        """
        if not _fits(self._secret, key, content):
            raise ForeignWriteError(
                f"{self._foreign(key)} does not have the job's seal"
            )
        if self._keeps_keys:
            self._keys.add(key)
        return content[SEAL_BYTES + _NONCE_BYTES :]

    def _foreign(self, key: str) -> str:
        return (
            f"somebody else has written into this job's store (port {self._port}): the value of "
            f"{key!r}"
        )


def is_sealed(secret: str, port: int, key: str, content: bytes) -> bool:
    """Returns whether the content of a key of a store was sealed with the secret of an attempt."""
    return _fits(_secret_of_store(secret, port), key, content)


def _secret_of_store(secret: str, port: int, generation: int = 0) -> str:
    return sealed.derive(secret, f"store {port} {generation}")


def _fits(secret: str, key: str, content: bytes) -> bool:
    expected = sealed.seal(secret, key.encode(), content[SEAL_BYTES:])
    return hmac.compare_digest(content[:SEAL_BYTES], expected)


def _as_bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return value


def release(port: int) -> int:
    """Ends the stores on a port that were of a process group that is gone: a new group on the same
    port must not read their values. Returns how many groups were there before."""
    generation = _generations.get(port, 0)
    if dist.is_initialized():
        return generation
    references = [weakref.ref(store) for store in _kept if store.port == port]
    _kept[:] = [store for store in _kept if store.port != port]
    # Those that the program itself refers to are still there.
    for reference in references:
        store = reference()
        if store is not None:
            _kept.append(store)
    # Where torchrun's agent serves the store, it outlives the group.
    if references:
        generation += 1
        _generations[port] = generation
    return generation


def create_here(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    *rest: Any,
    **named: Any,
) -> Any:
    """Makes a store of torch's, which listens on this node's address alone, if it is known."""
    host, _, address = os.environ.get("SLURMFT_LISTEN", "").partition("=")
    if address and host_name == host:
        host_name = address
    # Of older versions of torch, a store listens on all addresses.
    if is_master and address and "master_listen_fd" in str(TCPStore.__init__.__doc__):
        # Taken: by a store of this process, which torch uses then, or torch says so.
        with contextlib.suppress(OSError):
            server = socket.create_server((address, port), backlog=_BACKLOG)
            named["master_listen_fd"] = server.detach()
            host_name = address
    return TCPStore(host_name, port, world_size, is_master, *rest, **named)


def seal_stores(module: ModuleType, create: Callable[..., Any] = create_here) -> None:
    """Makes a module of torch create sealed stores, where slurmft has started this process.

    Args:
        create: makes a store of torch's, with the arguments of `TCPStore`.
    """

    def create_sealed(host_name: str, port: int, *rest: Any, **named: Any) -> Any:
        secret = sealed.secret_of(os.environ)
        if not secret:
            return create(host_name, port, *rest, **named)
        generation = release(port)
        # torch counts workers without a seal. Who reads a value waits for it anyway.
        named["wait_for_workers"] = False
        is_of_agents = module.__name__ == sealed.AGENTS
        store = SealedStore(
            create(host_name, port, *rest, **named),
            secret,
            keeps_keys=is_of_agents,
            generation=generation,
        )
        # For the agent that looks for seals: ranks may write nothing else before their first step.
        if not is_of_agents:
            store.set(_MARK, "1")
        return store

    module.__dict__["TCPStore"] = create_sealed
