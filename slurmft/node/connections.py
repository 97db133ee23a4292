"""TCP sockets of this host, as the kernel's tables show them to every user."""

import os
import pwd
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED = "01"
LISTENING = "0A"
# An IPv4 address that IPv6 maps, as the tables write it.
_MAPPED = "0000000000000000FFFF0000"


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One line of a table."""

    state: str
    local: str
    """Address and port as the kernel writes them: "0100007F:1F90"."""
    remote: str
    uid: int
    """The user who has opened it."""

    @property
    def port(self) -> int:
        _, _, port = self.local.rpartition(":")
        return int(port, 16)


def tcp_sockets(tables: Collection[Path] = TABLES) -> Iterator[TcpSocket]:
    for table in tables:
        try:
            # Its first line names the columns.
            _, *lines = table.read_text().splitlines()
        except (OSError, ValueError):  # a kernel without IPv6
            continue
        for line in lines:
            _, local, remote, state, _, _, _, uid, *_ = line.split()
            local = local.removeprefix(_MAPPED)
            yield TcpSocket(state, local, remote.removeprefix(_MAPPED), int(uid))


def clients_of(
    port: int, tables: Collection[Path] = TABLES, from_others: bool = True
) -> int:
    """Counts the connections to a port of this host on which this user listens. Those from this
    host count if they are of this user.

    Args:
        from_others: those from other hosts count; nobody here knows their user.
    """
    sockets = [s for s in tcp_sockets(tables) if s.state == ESTABLISHED]
    users = {(s.local, s.remote): s.uid for s in sockets}
    user = os.getuid()
    count = 0
    for each in sockets:
        client = users.get((each.remote, each.local))
        if client is None and from_others:
            client = user
        if each.port == port and each.uid == user and client == user:
            count += 1
    return count


def owners_of(ports: Collection[int], tables: Collection[Path] = TABLES) -> str:
    """Says which users listen on some ports: "root (uid 0), ann (uid 1000)"; "" where it does not
    show."""
    users = set()
    for each in tcp_sockets(tables):
        if each.state == LISTENING and each.port in ports:
            users.add(each.uid)
    return ", ".join(_in_words(uid) for uid in sorted(users))


def _in_words(uid: int) -> str:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
    return f"{name} (uid {uid})"
