"""Connections between nodes, tried by plain sockets: names, ports, clocks, speed."""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from slurmft.core.errors import SlurmftError, one_line
from slurmft.node import rendezvous
from slurmft.plugins.examine.host import call_all
from slurmft.plugins.examine.report import LinkReport

_CHUNK = bytes(2**20)
# A stranger may send a line without end.
_LONGEST_REQUEST = 100
# Every port gets at least so long.
_LEAST_S = 0.5


class _PeerServer(socketserver.StreamRequestHandler):
    """Answers other nodes.

    A request is a line: "who" asks for the token and this host's time; "sink" has the bytes counted
    that follow.
    """

    token = ""
    timeout = 10

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the other node has gone
            while line := self.rfile.readline(_LONGEST_REQUEST):
                if line == b"who\n":
                    answer = f"{self.token} {time.time()}"
                else:
                    answer = str(self._count_bytes())
                self.wfile.write(f"{answer}\n".encode())

    def _count_bytes(self) -> int:
        count = 0
        while chunk := self.rfile.read1(len(_CHUNK)):
            count += len(chunk)
        return count


class _Server(socketserver.ThreadingTCPServer):
    # A port of an examination that has just ended may be taken again.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024  # many nodes may connect at once


def listen(token: str) -> dict[str, int]:
    """Listens from now on, and answers whoever asks with a token.

    Returns the ports by purpose: "rendezvous", of the range of a job's rendezvous; "ephemeral", of
    the kernel's range; and "torchrun", which is left free for torchrun's store.
    """
    _PeerServer.token = token  # of all servers of this process
    torchrun_port, *others = rendezvous.free_ports(3)
    return {
        "torchrun": torchrun_port,
        "rendezvous": _serve(others),
        "ephemeral": _serve([0]),
    }


def _serve(ports: Sequence[int]) -> int:
    """Starts a server on the first free port; returns the port."""
    for port in ports:
        with contextlib.suppress(OSError):
            server = _Server(("", port), _PeerServer)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return int(server.server_address[1])
    raise SlurmftError(
        f"cannot listen on any of these ports: {ports}", "ss -tlnp shows who does"
    )


def reach_all(
    peers: Mapping[str, tuple[str, Mapping[str, int]]], timeout_s: float
) -> dict[str, LinkReport]:
    """Resolves the names of other hosts and connects to their ports, all at the same time.

    Args:
        peers: host -> (the token that it answers, its ports by purpose).
    """
    calls = []
    for name, (token, ports) in peers.items():
        calls.append(partial(_reach, name, token, ports, timeout_s))
    links = {}
    for host, answer in zip(peers, call_all(timeout_s + 1, calls), strict=True):
        if isinstance(answer, Exception):
            answer = LinkReport(problem=one_line(answer))
        links[host] = answer
    return links


def _reach(
    host: str,
    token: str,
    ports: Mapping[str, int],
    timeout_s: float,
) -> LinkReport:
    deadline = time.monotonic() + timeout_s
    resolve = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    # name servers have time-outs of their own
    resolved = call_all(timeout_s, [resolve])[0]
    if isinstance(resolved, Exception):
        return LinkReport(problem=one_line(resolved))
    address = str(resolved[0][4][0])
    reasons: dict[str, str | None] = {}
    ahead_s = None
    round_trip_s = 0.0
    for purpose, port in ports.items():
        # A port that does not answer leaves the other one half of the time.
        limit_s = max(_LEAST_S, (deadline - time.monotonic()) / 2)
        reasons[purpose] = None
        try:
            ahead_s, round_trip_s = _ask_who(address, port, token, limit_s)
        except (OSError, ValueError) as error:
            # "Connection refused" rather than "[Errno 111] Connection refused". A ValueError has no
            # strerror, and some time-outs have no text at all.
            strerror = getattr(error, "strerror", None)
            reasons[purpose] = strerror or str(error) or "timed out"
    return LinkReport(
        ports=reasons,
        ahead_s=ahead_s,
        round_trip_s=round_trip_s,
    )


def _ask_who(
    address: str,
    port: int,
    token: str,
    timeout_s: float,
) -> tuple[float, float]:
    """Asks a host who it is; returns how far its clock is ahead, and the round trip, in seconds.

    Raises:
        OSError: the port cannot be reached.
        ValueError: another host answers there.
    """
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        began = time.time()
        ticks = time.perf_counter()
        connection.sendall(b"who\n")
        line = connection.makefile("rb").readline(200).decode(errors="replace").strip()
        round_trip_s = time.perf_counter() - ticks
    answered_token, _, time_there = line.rpartition(" ")
    if answered_token != token:
        raise ValueError(f"{line!r} answers there, at {address}: another host?")
    # Its clock was read half a round trip after the question was sent.
    return float(time_there) - began - round_trip_s / 2, round_trip_s


def send(host: str, port: int, seconds: float, timeout_s: float) -> float:
    """Sends to a host for some time; returns the bytes per second that arrived there."""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        # The other side counts: what is sent may still be in buffers here.
        connection.sendall(b"sink\n")
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        arrived_bytes = int(connection.makefile("rb").readline())
        return arrived_bytes / (time.perf_counter() - began)
