"""The secret of an attempt, and the seals that it puts on what a job's processes send each other.

Whoever is on the network can connect to a job's ports and write into torch's stores. What does not
carry a seal of this attempt is refused before it is used. The standard library alone, of any
Python: the one of a user's program may lack this package, and be older.
"""

# Annotations are then not evaluated: an older Python lacks some of their syntax.
from __future__ import annotations

import hmac
import re
import secrets
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET = "SLURMFT_STORE_SECRET"
"""Variable with the secret, as 64 hexadecimal digits. Its name is one of those whose values are
recorded nowhere."""
HINT = "nothing of it was used; the next start has another secret and other ports"
SEAL_BYTES = 32
AGENTS = "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"
"""The module of torch that creates the store of torchrun's agents."""
MODULES = (
    AGENTS,
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.rendezvous",
)
"""Those that create stores: of the agents, of agents with --master-addr, and of the ranks."""

_Error = TypeVar("_Error", bound=BaseException)

_CHALLENGE = re.compile(r"[0-9a-f]{32}")
_TAG_DIGITS = 12


class ForeignWriteError(RuntimeError):
    """A value in the job's store was written by a process that is not of this attempt.

    torch's callers of stores catch RuntimeError.
    """


class ForgedError(ValueError):
    """A line does not come from a process of this attempt."""


def new_secret() -> str:
    return secrets.token_hex(32)


def secret_of(environment: Mapping[str, str]) -> str:
    """Returns the secret of the attempt that a process belongs to; "" where slurmft has not started
    it."""
    return environment.get(SECRET, "")


def seal(secret: str, *parts: bytes) -> bytes:
    """Returns the seal of some bytes, in `SEAL_BYTES`."""
    # Each with its length: ("a", "bc") must not have the seal of ("ab", "c").
    lengths = b"".join(len(part).to_bytes(8, "big") for part in parts)
    return hmac.digest(secret.encode(), lengths + b"".join(parts), "sha256")


def derive(secret: str, purpose: str) -> str:
    """Returns another secret, which does not tell the one that it is made of."""
    return seal(secret, b"derive", purpose.encode()).hex()


def tag(secret: str) -> str:
    """Returns a name of the attempt that nobody can guess, and that may be shown."""
    return derive(secret, "tag")[:_TAG_DIGITS]


def cause_of(error: BaseException) -> ForeignWriteError | None:
    """Returns the foreign write that an error is about; None: it is about something else."""
    return cause(error, ForeignWriteError)


def cause(error: BaseException, kind: type[_Error]) -> _Error | None:
    """Returns an error of a kind that has led to another one; None: none has."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kind):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


# --- connections ----------------------------------------------------------------------------------


class Channel:
    """The lines of one connection, sealed in their order and in their direction.

    The head sends a challenge. The task answers with one of its own, sealed. By the first line that
    the head seals then, both sides have shown that they have the secret.
    """

    def __init__(
        self, secret: str, challenge: str, answer: str, is_head: bool = False
    ) -> None:
        # A secret of this connection: no line of it fits into another one.
        self._secret = derive(secret, f"channel {challenge} {answer}")
        self._is_head = is_head
        # The number of a line is sealed with it: none can be left out, or sent again.
        self._sent = 0
        self._received = 0

    @classmethod
    def answer(cls, secret: str, challenge: str) -> tuple[Channel, bytes]:
        """Returns a task's channel, and the line by which it answers the head's challenge.

        Raises:
            ForgedError: it is none.
        """
        if not _CHALLENGE.fullmatch(challenge):
            raise ForgedError(f"{challenge!r} is no challenge")
        task_challenge = new_challenge()
        proof = seal(
            secret, b"answer", challenge.encode(), task_challenge.encode()
        ).hex()
        return cls(
            secret, challenge, task_challenge
        ), f"{task_challenge} {proof}\n".encode()

    @classmethod
    def accept(cls, secret: str, challenge: str, line: str) -> Channel:
        """Returns the head's channel to a task that has answered the challenge.

        Raises:
            ForgedError: the answer is not sealed with the secret.
        """
        task_challenge, _, proof = line.partition(" ")
        expected = seal(
            secret, b"answer", challenge.encode(), _bytes(task_challenge)
        ).hex()
        # Not ==, whose time tells how many characters of a guess are right.
        if not hmac.compare_digest(_bytes(proof), expected.encode()):
            raise ForgedError("an answer without the secret")
        return cls(secret, challenge, task_challenge, is_head=True)

    def seal(self, text: str) -> bytes:
        """Returns a text, of one line, as it is to be sent next."""
        digits = self._seal(self._is_head, self._sent, text)
        self._sent += 1
        return f"{digits} {text}\n".encode()

    def open(self, line: str) -> str:
        """Returns the text of the next line that was received.

        Raises:
            ForgedError: the other side has not sealed it, or not as its next one.
        """
        digits, _, text = line.partition(" ")
        expected = self._seal(not self._is_head, self._received, text)
        if not hmac.compare_digest(_bytes(digits), expected.encode()):
            raise ForgedError("a line without a seal")
        self._received += 1
        return text

    def _seal(self, by_head: bool, number: int, text: str) -> str:
        # With the direction: a side does not take its own lines, which somebody sends back to it.
        parts = (b"%d" % by_head, b"%d" % number, _bytes(text))
        return seal(self._secret, *parts).hex()


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def new_challenge() -> str:
    return secrets.token_hex(16)
