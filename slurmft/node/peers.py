"""The tasks of a job, connected: the others' reachability checks leave a connection to the head.

What concerns all tasks goes by it, as one word, and not by files: a thousand nodes that look into
the run directory every second are more than a file system takes.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

FAILED, HANG, STOP, PASSED = "failed", "hang", "stop", "passed"
"""Words: a task ends with a failure; ranks hang; the job is to stop; all nodes are good."""
_WORDS = frozenset({FAILED, HANG, STOP, PASSED})
_REPORT, _LONGEST = "report ", 2**14
"""What begins a line that is for the head alone; and characters of a line at most."""


class Peers:
    """What the tasks of a job tell each other. The head passes on what it hears; who connects later
    hears it, too."""

    def __init__(
        self,
        servers: Sequence[socket.socket] = (),
        greeting: str = "",
        head: socket.socket | None = None,
    ) -> None:
        """Hears the others in the background: as the head those who connect to its servers, and get
        the greeting, then what was told; as another task by its connection to the head."""
        self.is_head = head is None
        self._greeting = greeting
        self._news = threading.Condition()
        self._words: list[str] = []
        self._reports: list[tuple[float, Any]] = []
        self._rests: dict[socket.socket, bytes] = {}
        self._links: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        for server in servers:
            self._selector.register(server, selectors.EVENT_READ, self._accept)
        if head is not None:
            self._add(head)
        if servers or head:
            threading.Thread(target=self._hear, name="peers", daemon=True).start()

    def tell(self, word: str, source: socket.socket | None = None) -> None:
        """Tells all other tasks, once; but not the one that it came from."""
        with self._news:
            if word in self._words or word not in _WORDS:
                return
            self._words.append(word)
            self._news.notify_all()
            for link in self._links - {source}:
                with contextlib.suppress(OSError):  # that task has ended
                    link.send(f"{word}\n".encode())

    def heard(self, word: str, wait_s: float | None = 0) -> bool:
        """Whether this task or another one told it, within a time; None: waits for it."""
        return self.heard_any([word], wait_s) is not None

    def heard_any(self, words: Sequence[str], wait_s: float | None) -> str | None:
        """The first of these words that this task or another one told, within a time."""
        with self._news:
            self._news.wait_for(lambda: set(words) & set(self._words), wait_s)
            return next((word for word in words if word in self._words), None)

    def report(self, facts: Any) -> None:
        """Tells the head alone, as JSON."""
        for link in self._links:
            with contextlib.suppress(OSError):  # that task has ended
                link.sendall(f"{_REPORT}{json.dumps(facts)}\n".encode())

    def reports(self, count: int, wait_s: float) -> list[tuple[float, Any]]:
        """What was reported to the head, once there are so many, or a time has passed; and when
        it came, by this host's clock."""
        with self._news:
            self._news.wait_for(lambda: len(self._reports) >= count, wait_s)
            return list(self._reports)

    def _accept(self, server: socket.socket) -> None:
        link = server.accept()[0]
        with self._news:
            link.sendall("\n".join([self._greeting, *self._words, ""]).encode())
            self._add(link)

    def _add(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._links.add(link)
        self._selector.register(link, selectors.EVENT_READ, self._take)

    def _hear(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                try:
                    ready.data(ready.fileobj)
                except OSError:
                    time.sleep(0.1)  # too many open files?

    def _hear_line(self, line: str, link: socket.socket) -> None:
        if not line.startswith(_REPORT):
            self.tell(line, link)
            return
        with self._news, contextlib.suppress(ValueError):
            self._reports.append((time.time(), json.loads(line.removeprefix(_REPORT))))
            self._news.notify_all()

    def _take(self, link: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = link.recv(4096)
        *lines, rest = (self._rests.get(link, b"") + data).split(b"\n")
        self._rests[link] = rest[-_LONGEST:]
        for line in lines:
            self._hear_line(line.decode(errors="replace"), link)
        if not data:  # that task has ended
            with self._news:
                self._links.discard(link)
            del self._rests[link]
            self._selector.unregister(link)
            link.close()
