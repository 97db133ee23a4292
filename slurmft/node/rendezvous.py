"""The rendezvous of a job's nodes: hosts, head, port, interface.

Everything is read from Slurm and checked; nothing is guessed. In particular, a node that cannot
reach the head fails: falling back to localhost would make N worlds of one node each, which all
train, and overwrite each other's results.
"""

import contextlib
import errno
import itertools
import os
import random
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from slurmft.core.config import JobConfig
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.run_files import ATTEMPT
from slurmft.node import sealed
from slurmft.node.connections import owners_of
from slurmft.node.peers import Peers
from slurmft.node.sealed import Channel, ForgedError

LISTEN = "SLURMFT_LISTEN"
"""Variable with this node's name in the job, and the address on which its processes listen:
"n1=10.1.0.1". Set but empty: on all addresses."""
RESERVED = "SLURMFT_RESERVED_PORT"
"""Variable with the port of a store, and the descriptor of the socket that listens on it, which
this process has inherited: "12345=3"."""
HOSTS = "SLURMFT_HOSTS"
"""Variable with the hosts of a job, in Slurm's order or mpirun's, with commas between them."""
NODE_COUNT = "SLURMFT_NODE_COUNT"
"""Variable with their number, for the batch script."""
PORT_VARIABLE = "SLURMFT_RENDEZVOUS_PORTS"
"""Variable with the ports that the head picked: torchrun's, and that of the reachability check."""
START_PORT = "SLURMFT_START_PORT"
"""Variable with the port on which the ranks of a program exchange its checkpoint before it starts,
where torchrun's agent has that of their store."""
LOCAL_NODE = "SLURMFT_LOCAL_NODE"
"""Set for a simulated node: its index among `--nodes`, on the loopback network."""

NO_PORT = errno.EADDRINUSE
"""Exit code of a torchrun that could open no port."""
LOST_STORE = errno.ECONNRESET
"""Exit code of a torchrun that has lost the store of the torchruns, or could not reach it."""

_LOOPBACK = "127.0.0.1"
_LOWEST_PORT = 10000
_HIGHEST_PORT = 65535
# A thousand nodes may connect at once, before any is answered.
_BACKLOG = 2048
# How long one try to connect may take.
_CONNECT_S = 5.0
_RETRY_S = 0.2
# How long free ports are looked for.
_FREE_PORTS_S = 30.0
_FREE_PORTS_POLL_S = 0.5
_LONGEST_LINE = 1000
# The name of a checkpoint is in it, perhaps as JSON escapes it.
_LONGEST_GREETING = 2**13
_EPHEMERAL = (32768, 60999)
"""Linux' own range of ports for outgoing connections."""
_SECRET_PORTS = 3
# Any port does: nothing is sent to it.
_DISCARD_PORT = 9

_NETWORK_HINT = (
    "`slurmft doctor --nodes 2` checks the nodes' names, ports and links; --host-suffix and "
    "--interface are for fabrics with host names of their own"
)


class RendezvousError(SlurmftError):
    """The nodes of the job cannot reach each other."""

    def __init__(
        self, message: str, hint: str | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message, hint, Exit.RENDEZVOUS)
        self.reason = reason or message
        """The end of the message: what is wrong, without the hosts."""


class TakenPortError(RendezvousError, RuntimeError):
    """A port was free when it was chosen, and is taken by now: the next start chooses another one.

    torch's callers of stores catch RuntimeError, which torch's own store raises.
    """

    retry = True

    def __init__(self, port: int, error: OSError, address: str = "") -> None:
        place = ""
        if address:
            place = f" of {address}"
        # Python's own text of it repeats the address.
        problem = str(error)
        if error.errno is not None:
            problem = os.strerror(error.errno)
        reason = _taken_by(owners_of([port]))
        if error.errno in (errno.EMFILE, errno.ENFILE):
            reason = "somebody may have opened very many connections to this job"
        super().__init__(
            f"{socket.gethostname()} cannot listen on port {port}{place}: {problem}",
            f"{reason}; a new start takes other ports, as `slurmft resume` does",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """One node's view of the rendezvous of its job."""

    hosts: tuple[str, ...]
    """Every host of the job in Slurm's order, under the names by which they reach each other."""
    node_rank: int
    """Index of this node in `hosts`."""
    port: int | str
    """Port of torchrun's store on the head. A variable's name where the port is not known yet."""
    check_port: int
    """Port on which the head answers the other nodes' reachability checks (see `check`)."""
    id: str
    """Job id, attempt, and what nobody can guess; torchrun's store has a key of this name."""
    interface: str | None = None
    """Network interface of the collectives. None: the one that leads to the peers."""
    elastic: bool = False
    """True if nodes may join that `hosts` does not name."""

    @classmethod
    def of_node(cls, job: JobConfig, environment: Mapping[str, str]) -> Self:
        """Reads the rendezvous from the variables of this node's Slurm step, or of a simulated
        node.

        Raises:
            RendezvousError: variables are missing, or do not fit the run.
        """
        simulated = environment.get(LOCAL_NODE)
        host_list = environment.get(HOSTS)
        secret = sealed.secret_of(environment)
        ports = environment.get(PORT_VARIABLE, "")
        if simulated:
            # Several runs may be simulated on one machine at a time: each has ports of its own.
            job_id = f"local-{ports.partition(',')[0]}"
            suffix = ""
        else:
            job_id = environment.get("SLURM_JOB_ID", "")
            suffix = job.host_suffix
        has_ports = re.fullmatch(r"\d+,\d+", ports) is not None
        if not (host_list and job_id and secret and has_ports):
            raise RendezvousError(
                f"{HOSTS}, {PORT_VARIABLE}, {sealed.SECRET} or SLURM_JOB_ID is not set: no batch "
                "script of slurmft started this task",
                "submit it with `slurmft submit`, which starts one task per node under srun",
            )
        hosts = tuple(host + suffix for host in host_list.split(","))
        # srun numbers the nodes in the order of the list.
        rank = int(simulated or environment.get("SLURM_NODEID", "0"))
        is_allowed = job.least_nodes <= len(hosts) <= job.nodes
        if not is_allowed or rank >= len(hosts):
            raise RendezvousError(
                f"the run is set up for {job.node_range} nodes, but Slurm allocated "
                f"{len(hosts)}, of which this is number {rank + 1}"
            )
        # The head picked them in the batch script, just before the tasks started.
        port, check_port = ports.split(",")
        interface = job.interface
        # Simulated nodes are on the loopback network.
        if not interface and simulated:
            interface = "lo"
        return cls(
            hosts=hosts,
            node_rank=rank,
            port=int(port),
            check_port=int(check_port),
            id=f"{job_id}.{environment.get(ATTEMPT, '0')}.{sealed.tag(secret)}",
            interface=interface,
        )

    @property
    def has_several_nodes(self) -> bool:
        """Whether other nodes take part, or may join."""
        return self.elastic or len(self.hosts) > 1

    @property
    def head(self) -> str:
        return self.hosts[0]

    @property
    def host(self) -> str:
        return self.hosts[self.node_rank]

    @property
    def is_head(self) -> bool:
        return self.node_rank == 0

    def check(self, timeout_s: float) -> Peers:
        """Checks that this node reaches the head, and no other host of that name; returns the
        connections.

        The head answers as long as this process lives, to those that have the secret of the
        attempt. torchrun takes long to import torch before it listens, and its errors do not say
        which host cannot be reached.

        Raises:
            RendezvousError: the head does not answer in time. It names both hosts.
        """
        if len(self.hosts) == 1:
            return Peers()
        secret = sealed.secret_of(os.environ)
        if self.is_head:
            return answer_checks(self.check_port, self.id, secret, self.addresses())
        _, peers = check_reachable(
            self.host, self.head, self.check_port, self.id, secret, timeout_s
        )
        return peers

    def socket_interface(self) -> str | None:
        """Returns the interface for the collectives: the requested one, which must exist, or the
        one that leads to the peers.

        Libraries left alone take the address of the host's own name, which Debian maps to
        127.0.1.1, where no other node answers.
        """
        if self.interface:
            return check_interface(self.interface, self.host)
        if not self.has_several_nodes:
            return "lo"
        return interface_of(address_towards(self.peer))

    @property
    def peer(self) -> str:
        """Another host of the job: the head; for the head itself, the next one if it is known."""
        if self.is_head and len(self.hosts) > 1:
            return self.hosts[1]
        return self.head

    def listen_address(self) -> str | None:
        """Returns the address on which this node listens for the others (IPv4).

        It is the one that its own name resolves to, unless that is Debian's 127.0.1.1, which the
        others cannot reach. None, for all addresses: the name resolves to several, or no other
        node is known.
        """
        if self.elastic:
            return None
        if len(self.hosts) == 1:
            return _LOOPBACK
        addresses = own_addresses(self.host, socket.AF_INET)
        # a simulated node's name is its loopback address
        if self.host not in addresses:
            addresses = [a for a in addresses if not a.startswith("127.")]
        if len(addresses) == 1:
            return addresses[0]
        if addresses:
            return None
        with contextlib.suppress(RendezvousError):
            return address_towards(self.peer)
        return None

    def reserve_port(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Opens the port of torchrun's store on the head, for torchrun to inherit: until it has
        imported torch, another process could take the port.

        Args:
            environment: variables of this process; `LISTEN` may be the user's.

        Returns:
            The variable by which torchrun finds the socket.

        Raises:
            TakenPortError: the port is taken already.
        """
        port = int(self.port)
        chosen = environment.get(LISTEN)
        if chosen is None:
            address = self.listen_address() or ""
        else:
            _, _, address = chosen.partition("=")
        descriptor = listen(address, port)
        os.set_inheritable(descriptor, True)
        return {RESERVED: f"{port}={descriptor}"}

    def addresses(self) -> list[str]:
        """Lists the addresses on which to answer the other nodes and this one; [""]: all."""
        address = self.listen_address()
        if address is None:
            return [""]
        addresses = [address, *own_addresses(self.host, socket.AF_INET)]
        return list(dict.fromkeys(addresses))


def simulated_host(node: int) -> str:
    """Returns the address of a simulated node, on the loopback network."""
    return f"127.0.0.{node + 1}"


# --- ports ----------------------------------------------------------------------------------------


def ephemeral_ports() -> tuple[int, int]:
    """Returns the first and the last port that the kernel takes for outgoing connections."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _EPHEMERAL


def candidate_ports(count: int = 20) -> list[int]:
    """Lists ports for a job, chosen at random outside the ephemeral range."""
    low, high = ephemeral_ports()
    # A port of the ephemeral range may be taken at any moment, by any outgoing connection.
    below = range(_LOWEST_PORT, low)
    above = range(max(_LOWEST_PORT, high + 1), _HIGHEST_PORT + 1)
    allowed = [*below, *above]
    if not allowed:
        raise RendezvousError(
            f"the ephemeral port range {low}-{high} leaves no port to use"
        )
    # Not Python's own generator, whose seed others may guess.
    return random.SystemRandom().sample(allowed, min(count, len(allowed)))


def free_ports(count: int = 2) -> list[int]:
    """Returns ports that nothing on this host listens on.

    Run on the head node (sbatch runs its script there), just before the tasks start. Somebody may
    take all ports for a moment: others are tried for a while.

    Raises:
        RendezvousError: fewer than `count` are free.
    """
    deadline = time.monotonic() + _FREE_PORTS_S
    while True:
        ports = candidate_ports()
        free = [port for port in ports if _can_bind(port)]
        if len(free) >= count:
            return free[:count]
        owners = owners_of(ports)
        if time.monotonic() >= deadline:
            break
        time.sleep(_FREE_PORTS_POLL_S)
    raise RendezvousError(
        f"these ports are taken on {socket.gethostname()}, and others before: {ports}",
        f"{_taken_by(owners)}; `ss -tlnp` there shows the processes",
    )


def secret_ports(secret: str, purpose: str) -> list[int]:
    """Returns ports that nobody but the processes of an attempt can know before they are opened,
    for a process to listen on the first that is free."""
    # The same on all nodes, whatever the ephemeral range of each is.
    ports = range(_LOWEST_PORT, _EPHEMERAL[0])
    return random.Random(sealed.derive(secret, purpose)).sample(ports, _SECRET_PORTS)


def _taken_by(owners: str) -> str:
    if not owners:
        return "the kernel does not show whose processes those are"
    return f"taken by processes of {owners}"


def listen(address: str, port: int, is_held: bool = False) -> int:
    """Returns the descriptor of a socket that listens; "" for all addresses of this host.

    Args:
        is_held: another process may hold the port for this one (`hold_anywhere`).

    Raises:
        TakenPortError: it cannot.
    """
    family = _family_of(address)
    try:
        server = socket.create_server(
            (address, port),
            family=family,
            backlog=_BACKLOG,
            reuse_port=is_held,
            dualstack_ipv6=family == socket.AF_INET6,
        )
    except OSError as error:
        raise TakenPortError(port, error, address) from error
    # The object would close the socket when it goes.
    return server.detach()


def listen_anywhere(address: str) -> tuple[int, int]:
    """Opens one of `candidate_ports`; returns the port, and the descriptor of its socket.

    Raises:
        TakenPortError: all are taken.
    """
    *ports, last = candidate_ports()
    for port in ports:
        with contextlib.suppress(TakenPortError):
            return port, listen(address, port)
    return last, listen(address, last)


def hold_anywhere(address: str) -> socket.socket:
    """Takes one of `candidate_ports` for another process of this user; nobody else can then listen
    on it, as long as the socket is open.

    Raises:
        TakenPortError: all are taken.
    """
    family = _family_of(address)
    for port in candidate_ports():
        held = socket.socket(family)
        # Not SO_REUSEADDR: a port that is bound, and not listened on, would be everybody's.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            held.bind((address, port))
        except OSError as error:
            held.close()
            problem = TakenPortError(port, error, address)
        else:
            return held
    raise problem


def _family_of(address: str) -> socket.AddressFamily:
    # As torch's own store: on all addresses, of both versions of IP.
    if not address and socket.has_dualstack_ipv6():
        return socket.AF_INET6
    return socket.AF_INET


def reserved(environment: Mapping[str, str], port: int) -> int | None:
    """Returns the descriptor of the socket that `Rendezvous.reserve_port` has opened, if it has."""
    reserved_port, _, descriptor = environment.get(RESERVED, "").partition("=")
    if reserved_port != str(port):
        return None
    return int(descriptor)


def reserved_descriptors(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the descriptors that a child of this process has to inherit."""
    _, _, descriptor = environment.get(RESERVED, "").partition("=")
    if not descriptor:
        return ()
    return (int(descriptor),)


def _can_bind(port: int) -> bool:
    # Something may listen on IPv4 or on IPv6 alone.
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.create_server(("", port), family=family).close()
        except OSError as error:
            # Another error, as on a host without IPv6: nothing can listen there.
            if error.errno == errno.EADDRINUSE:
                return False
    return True


# --- the reachability check -----------------------------------------------------------------------


def answer_checks(
    port: int, rendezvous_id: str, secret: str, addresses: Sequence[str] = ("",)
) -> Peers:
    """Sends the rendezvous id, in the background, to everyone who connects and has the secret.

    Args:
        port: where to listen.
        secret: that of the attempt.
        addresses: of this host; "" for all.

    Returns the head's view of those who connect.

    Raises:
        TakenPortError: the port was taken meanwhile.
    """
    try:
        servers = [socket.create_server((a, port), backlog=_BACKLOG) for a in addresses]
    except OSError as error:
        raise TakenPortError(port, error) from None
    return Peers(servers, rendezvous_id, secret)


def check_reachable(
    host: str,
    head: str,
    port: int,
    rendezvous_id: str,
    secret: str,
    timeout_s: float,
    attempts: bool = False,
    other_ports: Sequence[int] = (),
) -> tuple[str, Peers]:
    """Asks the head for its rendezvous id until the answer is the expected one; returns the answer
    and the connection.

    Args:
        host: this node, for the error message.
        attempts: "ID.1.TAG", "ID.2.TAG" and so on are expected instead.
        other_ports: where it may answer instead.

    Raises:
        RendezvousError: `head` does not resolve, does not answer, or is part of another job.
    """
    deadline = time.monotonic() + timeout_s
    problem = "timed out"
    ports = itertools.cycle([port, *other_ports])
    while (left_s := deadline - time.monotonic()) > 0:
        connect_s = min(left_s, _CONNECT_S)
        try:
            address = (head, next(ports))
            connection = socket.create_connection(address, timeout=connect_s)
            channel, answer = greet(connection, secret, connect_s)
            answered_id = answer
            if attempts:
                # Without the number of the start and the tag, which every attempt has anew.
                answered_id = ".".join(answer.split(".")[:-2])
            if answered_id == rendezvous_id:
                return answer, Peers(head=(connection, channel))
            connection.close()
            problem = f"it answers {answer!r}, not {rendezvous_id!r}"
        except ForgedError as error:
            problem = f"{error}: is it another host?"
        # Before OSError, of which it is one: it is the name that is wrong, not the network.
        except socket.gaierror as error:
            problem = f"the name does not resolve ({error.strerror})"
        except OSError as error:
            problem = error.strerror or str(error) or "timed out"
        left_s = deadline - time.monotonic()
        time.sleep(min(_RETRY_S, max(0.0, left_s)))
    raise RendezvousError(
        f"node {host} cannot reach the head node {head}, port {port}: {problem}",
        _NETWORK_HINT,
        problem,
    )


def greet(
    connection: socket.socket, secret: str, timeout_s: float
) -> tuple[Channel, str]:
    """Answers the challenge of the other side; returns the channel to it, and its first line.

    Raises:
        ForgedError: it does not have the secret.
        OSError: it does not answer in time.
    """
    try:
        challenge = first_line(connection, timeout_s)
        try:
            channel, answer = Channel.answer(secret, challenge)
        except ForgedError:
            raise ForgedError(f"it answers {challenge!r}, as no job does") from None
        connection.sendall(answer)
        greeting = first_line(connection, timeout_s, _LONGEST_GREETING)
        try:
            return channel, channel.open(greeting)
        except ForgedError:
            raise ForgedError("it does not have the secret of this job") from None
    except (ForgedError, OSError):
        connection.close()
        raise


def first_line(
    connection: socket.socket,
    timeout_s: float,
    most_bytes: int = _LONGEST_LINE,
) -> str:
    """Reads up to a line break, and nothing after it: that is for whoever has the connection
    next.

    Raises:
        OSError: there is no whole line in time, however many bytes have come.
    """
    before = connection.gettimeout()
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n") and len(line) < most_bytes:
        # 0 would make the socket non-blocking.
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    connection.settimeout(before)
    return line.decode(errors="replace").strip()


def own_addresses(host: str, family: int = socket.AF_UNSPEC) -> list[str]:
    """Lists the addresses of this host that a name resolves to."""
    try:
        # Of one type of socket: else each address comes once for every type.
        resolved = socket.getaddrinfo(host, 0, family, socket.SOCK_DGRAM)
    except OSError:
        return []
    addresses = []
    for version, _, _, _, address in resolved:
        # Only an address of this host can be bound.
        with (
            contextlib.suppress(OSError),
            socket.socket(version, socket.SOCK_DGRAM) as probe,
        ):
            probe.bind(address)
            addresses.append(str(address[0]))
    return list(dict.fromkeys(addresses))


def address_towards(peer: str) -> str:
    """Returns this host's address on the network that leads to a peer (IPv4). Sends nothing."""
    # To connect a UDP socket sends no packet, but makes the kernel choose a route, and with it the
    # address on this side.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, _DISCARD_PORT))
        except OSError as error:
            problem = error.strerror or str(error)
            if isinstance(error, socket.gaierror):
                problem = f"the name does not resolve ({problem})"
            message = f"node {socket.gethostname()} cannot reach {peer}: {problem}"
            raise RendezvousError(message, _NETWORK_HINT) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface that has this IPv4 address, or None."""
    import psutil  # 40 ms: not for commands

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return None


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def check_interface(name: str, host: str) -> str:
    if name not in interfaces():
        raise RendezvousError(
            f"node {host} has no network interface {name!r}",
            f"it has: {', '.join(interfaces())}",
        )
    return name
