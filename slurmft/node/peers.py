"""The tasks of a job, connected: the others' reachability checks leave a connection to the head.

What concerns all tasks goes by it, as one word, and not by files: a thousand nodes that look into
the run directory every second are more than a file system takes. Every line is sealed: whoever
connects without the secret of the attempt gets a challenge, and nothing else.
"""

import contextlib
import errno
import json
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from slurmft.node import sealed
from slurmft.node.sealed import Channel, ForgedError

FAILED = "failed"
"""Word: a task ends with a failure."""
HANG = "hang"
"""Word: ranks hang."""
WAIT = "wait"
"""Word: ranks wait in a collective, in a job that no hang ends."""
STOP = "stop"
"""Word: the job is to stop."""
PASSED = "passed"
"""Word: all nodes are good."""
MEASURE = "measure"
"""Word: all nodes are to measure gloo and oneCCL."""
GLOO = "gloo"
"""Word: the ranks are to use gloo."""
CCL = "ccl"
"""Word: the ranks are to use oneCCL."""
_WORDS = frozenset({FAILED, HANG, WAIT, STOP, PASSED, MEASURE, GLOO, CCL})
LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "gloo/transport",
)
"""Signs of errors that only say that another rank is gone, in lower case."""
_MISMATCH = "distributed collective mismatch"
"""What gloo says where ranks have called different collectives, beside one of these signs."""

# Begins a line that is for the head alone.
_REPORT = "report "
_LONGEST_LINE = 2**14
_MOST_STRANGERS = 2048
"""How many connections may be without an answer: a thousand nodes may connect at once."""
_NO_LINGER = struct.pack("ii", 1, 0)


def says_lost_peer(error: str) -> bool:
    """Returns whether the text of an error only says that another rank is gone."""
    text = error.lower()
    return _MISMATCH not in text and any(sign in text for sign in LOST_PEER)


class Peers:
    """The words and reports that the tasks of a job exchange.

    The head passes on each word that it hears. A task that connects later hears it, too.
    """

    def __init__(
        self,
        servers: Sequence[socket.socket] = (),
        greeting: str = "",
        secret: str = "",
        head: tuple[socket.socket, Channel] | None = None,
    ) -> None:
        """Starts to listen to the other tasks, in the background.

        Args:
            servers: on the head, the sockets to which the others connect.
            greeting: the first line that they get.
            secret: that of the attempt, on the head.
            head: on another task, its connection to the head.
        """
        self.is_head = head is None
        self._greeting = greeting
        self._secret = secret
        self._news = threading.Condition()
        self._words: list[str] = []
        self._reports: dict[str, list[tuple[float, Any]]] = {}
        """What the others have reported about each topic."""
        self._unfinished: dict[socket.socket, bytes] = {}
        """The beginning of a line, by the link whose next data ends it."""
        self._challenges: dict[socket.socket, str] = {}
        """Those that nobody has answered yet, the oldest first."""
        self._most_strangers = _most_strangers()
        self._links: dict[socket.socket, Channel] = {}
        """The connections to tasks that have the secret."""
        self._welcomed = 0
        """How many tasks have connected, of which some may have ended."""
        self._selector = selectors.DefaultSelector()
        for server in servers:
            self._selector.register(server, selectors.EVENT_READ, self._accept)
        if head is not None:
            link, channel = head
            self._links[link] = channel
            self._listen_to(link)
        self._servers = servers
        self._is_closed = False
        # A daemon: it listens until the process ends, which does not wait for it.
        self._listener = threading.Thread(
            target=self._listen, name="peers", daemon=True
        )
        if servers or head:
            self._listener.start()

    def tell(self, word: str, source: socket.socket | None = None) -> None:
        """Sends a word to all other tasks, once, but not back to its `source`."""
        with self._news:
            # No others: a word of another task goes on to all.
            if word in self._words or word not in _WORDS:
                return
            self._words.append(word)
            self._news.notify_all()
            # A word is short: it goes into the socket's buffer, and the send does not block.
            for link, channel in self._links.items():
                if link is source:
                    continue
                with contextlib.suppress(OSError):  # that task has ended
                    link.send(channel.seal(word))

    def heard(self, word: str, wait_s: float | None = 0) -> bool:
        """Waits until this task or another one has told a word; False: none has within
        `wait_s`. None waits without end."""
        return self.heard_any([word], wait_s) is not None

    def take(self, word: str) -> bool:
        """Returns whether a word was told, and forgets it here: it may be told again."""
        with self._news:
            if word not in self._words:
                return False
            self._words.remove(word)
            return True

    def heard_any(self, words: Sequence[str], wait_s: float | None) -> str | None:
        """Waits for one of several words; returns the first of them that was told, or None."""
        with self._news:
            # One that was told before counts, unless it was taken.
            self._news.wait_for(lambda: set(words) & set(self._words), wait_s)
            for word in words:
                if word in self._words:
                    return word
            return None

    def have_come(self, others: int, wait_s: float) -> bool:
        """Waits as the head until so many other tasks have connected, or one tells a failure;
        False: they have not within `wait_s`."""
        with self._news:
            return self._news.wait_for(
                lambda: self._welcomed >= others or FAILED in self._words, wait_s
            )

    def report(self, topic: str, facts: Any) -> None:
        """Sends something to the head alone, as JSON."""
        line = report_line(topic, facts)
        # Under the lock: lines are sealed in the order in which they are sent.
        with self._news:
            for link, channel in self._links.items():
                with contextlib.suppress(OSError):  # that task has ended
                    link.sendall(channel.seal(line))

    def reports(self, topic: str, count: int, wait_s: float) -> list[tuple[float, Any]]:
        """Waits until the head has `count` reports about a topic, or `wait_s` has passed; returns
        each with the time at which it came, by this host's clock."""
        with self._news:
            self._news.wait_for(
                lambda: len(self._reports.get(topic, ())) >= count, wait_s
            )
            return list(self._reports.get(topic, ()))

    def close(self) -> None:
        """Ends all connections, and frees the ports on which the head listens."""
        self._is_closed = True
        for server in self._servers:
            # The thread that listens wakes up.
            server.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        for each in list(self._selector.get_map().values()):
            link: Any = each.fileobj
            # Else the kernel keeps the port for a minute, for those who have not closed first.
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            link.close()
        self._selector.close()

    def _listen(self) -> None:
        while not self._is_closed:
            for ready, _ in self._selector.select():
                on_ready = ready.data
                try:
                    on_ready(ready.fileobj)
                except OSError as error:
                    # The connection waits on: without a pause this would be tried without end.
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        time.sleep(0.1)

    def _accept(self, server: socket.socket) -> None:
        link, _ = server.accept()
        challenge = sealed.new_challenge()
        try:
            link.sendall(f"{challenge}\n".encode())
        except OSError:  # whoever connected is gone
            link.close()
            return
        self._challenges[link] = challenge
        self._listen_to(link)
        # A task answers at once, and one that is dropped tries again.
        if len(self._challenges) > self._most_strangers:
            oldest = next(iter(self._challenges))
            self._drop(oldest)

    def _listen_to(self, link: socket.socket) -> None:
        # Whoever stops in the middle of a line must not hold up the others.
        link.setblocking(False)
        self._unfinished[link] = b""
        self._selector.register(link, selectors.EVENT_READ, self._receive)

    def _receive(self, link: socket.socket) -> None:
        # Dropped since it was found ready.
        if link not in self._unfinished:
            return
        data = b""
        with contextlib.suppress(OSError):
            data = link.recv(4096)
        *lines, rest = (self._unfinished[link] + data).split(b"\n")
        self._unfinished[link] = rest
        # A stranger may send without end.
        if len(rest) > _LONGEST_LINE:
            data = b""
        try:
            for line in lines:
                self._take_line(line.decode(errors="replace"), link)
        except (ForgedError, OSError):
            data = b""
        if not data:  # the other side has closed it, or is no task of this attempt
            self._drop(link)

    def _take_line(self, line: str, link: socket.socket) -> None:
        if link in self._challenges:
            self._welcome(line, link)
            return
        text = self._links[link].open(line)
        if not text.startswith(_REPORT):
            self.tell(text, link)
            return
        # A task of another version may report something else.
        with self._news, contextlib.suppress(ValueError, TypeError):
            topic, facts = json.loads(text.removeprefix(_REPORT))
            self._reports.setdefault(topic, []).append((time.time(), facts))
            self._news.notify_all()

    def _welcome(self, answer: str, link: socket.socket) -> None:
        """Takes up a task that has answered the challenge."""
        channel = Channel.accept(self._secret, self._challenges.pop(link), answer)
        with self._news:
            lines = [channel.seal(text) for text in (self._greeting, *self._words)]
            link.sendall(b"".join(lines))
            # Under the lock: a word that another thread tells now reaches it, with these or later.
            self._links[link] = channel
            self._welcomed += 1
            self._news.notify_all()

    def _drop(self, link: socket.socket) -> None:
        """Forgets a task that has ended, or a stranger."""
        with self._news:
            self._links.pop(link, None)
        self._challenges.pop(link, None)
        del self._unfinished[link]
        self._selector.unregister(link)
        link.close()


def _most_strangers() -> int:
    """Returns how many connections may be without an answer: strangers must leave this process
    descriptors of its own."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # RLIM_INFINITY is -1.
    if open_files < 0:
        return _MOST_STRANGERS
    return min(_MOST_STRANGERS, open_files // 2)


def report_line(topic: str, facts: Any) -> str:
    """Returns the line by which a task reports something to the head."""
    return f"{_REPORT}{json.dumps([topic, facts])}"
