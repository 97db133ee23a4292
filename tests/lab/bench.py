"""A lab with agents on its clients: operations are asked for here, and done there."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slurmft.plugins.examine.agents import AgentError, Agents
from tests.lab.hosts import python
from tests.lab.labs import Client, Lab

ANSWER_S = 60.0


class Remote:
    """One agent on one client; `call` and `start` are for one operation at a time."""

    def __init__(self, client: Client, user: int = 0) -> None:
        self.client = client
        self._agents = Agents(
            {client.name: client.command(python("-m", "tests.lab.agent"), user)}
        )
        self._pool = ThreadPoolExecutor(1)

    def call(
        self, operation: str, /, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Any:
        """What the client answers.

        Raises:
            AgentError: there is no answer in time, or the operation failed.
        """
        name = self.client.name
        answer = self._agents.ask(operation, {name: arguments}, timeout_s)[name]
        if isinstance(answer, AgentError):
            raise answer
        return answer

    def start(
        self, operation: str, /, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Future[Any]:
        """The same, in the background."""
        return self._pool.submit(self.call, operation, timeout_s, **arguments)

    def close(self) -> None:
        self._agents.__exit__()
        self._pool.shutdown(wait=False, cancel_futures=True)


class Bench:
    """What the checks get: the lab, and as many agents as they want."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._remotes: list[Remote] = []

    def remote(self, number: int, user: int = 0) -> Remote:
        """A new agent on a client, which does operations beside those of the client's others."""
        made = Remote(self.lab.clients[number], user)
        self._remotes.append(made)
        made.call("hello")  # it has started
        return made

    def folder(self, name: str) -> Path:
        """A new folder of the file system, writable for all."""
        path = self.lab.folder / f"{name}-{secrets.token_hex(3)}"
        maker = self.remote(0)
        maker.call("make_folder", path=str(path), mode=0o777)
        return path

    def close(self) -> None:
        for remote in self._remotes:
            remote.close()
        self._remotes.clear()


@contextlib.contextmanager
def bench(lab: Lab) -> Iterator[Bench]:
    made = Bench(lab)
    try:
        yield made
    finally:
        made.close()
