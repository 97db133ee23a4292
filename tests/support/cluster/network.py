"""The network: a bridge for the login host, one namespace and one cable (veth) for each node.

There is one such network on a machine, so its names are fixed: whoever comes after a killed run
finds the leftovers by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from slurmft.node import rendezvous
from tests.support.cluster import system

LOGIN = "login"
LOGIN_ADDRESS = "10.77.0.254"
SLURMCTLD_PORT, SLURMD_PORT, SLURMDBD_PORT, MARIADB_PORT = 27817, 27818, 27819, 27820
"""Below the kernel's ephemeral ports, and not Slurm's own (6817 to 6819)."""
BRIDGE = "sft-br0"
CABLE = "sft-"
"""Prefix of a cable's end in the root namespace; its end in the node is `eth0`."""
NAMESPACE = "slurmft-"
NETNS = Path("/run/netns")
HOSTS_FILE = Path("/etc/hosts")
HOSTS_MARK = "# slurmft test cluster"
"""Ends each of our lines in /etc/hosts: a torn block cannot be mistaken."""


def address(host: str) -> str:
    """Returns the address of node n<i>: 10.77.0.<i>."""
    return f"10.77.0.{int(host.removeprefix('n'))}"


def namespace(host: str) -> Path:
    """Returns the file that stands for the node's network namespace."""
    return NETNS / f"{NAMESPACE}{host}"


def namespaces() -> list[Path]:
    """Finds the namespaces of a cluster, running or left over."""
    return sorted(NETNS.glob(f"{NAMESPACE}*"))


def as_host(host: str, argv: Sequence[str]) -> list[str]:
    """Returns the command that runs `argv` under a host's name, on its network.

    Every program of the chain execs the next, so the pid stays the same. Not `ip netns exec`: it
    mounts /sys anew, and slurmd then finds no cgroups and dies.
    """
    enter = [] if host == LOGIN else ["nsenter", f"--net={namespace(host)}"]
    rename = ["unshare", "--uts", "bash", "-c", 'hostname "$0" && exec "$@"', host]
    return [*enter, *rename, *argv]


def create(hosts: Sequence[str]) -> None:
    """Builds bridge, namespaces and cables, and writes the names into /etc/hosts."""
    lines = [
        f"link add {BRIDGE} type bridge",
        f"addr add {LOGIN_ADDRESS}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ]
    for host in hosts:
        system.sh("ip", "netns", "add", namespace(host).name)
        peer = f"peer name eth0 netns {namespace(host).name}"
        lines += [
            f"link add {CABLE}{host} type veth {peer}",
            f"link set {CABLE}{host} master {BRIDGE} up",
        ]
    _ip(lines)
    for host in hosts:
        eth0 = [
            f"addr add {address(host)}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
        ]
        _ip(eth0, inside=host)
    write_names(hosts)


def destroy() -> None:
    """Removes all of it, as far as it exists. Its processes must be dead already."""
    links = [
        link["ifname"] for link in json.loads(system.sh("ip", "-json", "link", "show"))
    ]
    # The bridge first: a cable's packets would otherwise be flooded to the rest for nothing.
    ours = [name for name in links if name == BRIDGE or name.startswith(CABLE)]
    _ip([f"link del {name}" for name in sorted(ours, key=lambda name: name != BRIDGE)])
    for path in namespaces():
        system.run(["ip", "netns", "del", path.name], check=False)
        # A run killed between creating and mounting the file leaves a plain file behind.
        path.unlink(missing_ok=True)
    write_names([])


def _ip(lines: Sequence[str], *, inside: str | None = None) -> None:
    enter = ["nsenter", f"--net={namespace(inside)}"] if inside else []
    if lines:
        system.sh(*enter, "ip", "-batch", "-", stdin="\n".join(lines) + "\n")


def write_names(hosts: Sequence[str]) -> None:
    """Replaces our lines of /etc/hosts, in place: in a container the file is a mount point."""
    old = HOSTS_FILE.read_text() if HOSTS_FILE.exists() else ""
    kept = [line for line in old.splitlines(keepends=True) if HOSTS_MARK not in line]
    names = [(LOGIN_ADDRESS, LOGIN)] if hosts else []
    names += [(address(host), host) for host in hosts]
    ours = "".join(f"{at} {name} {HOSTS_MARK}\n" for at, name in names)
    text = "".join(kept)
    text += ours if not text or text.endswith("\n") else f"\n{ours}" if ours else ""
    if text != old:
        _overwrite(HOSTS_FILE, text.encode())


def _overwrite(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def set_link(host: str, up: bool) -> None:
    """Plugs or pulls the node's cable, at the switch: the node keeps its address."""
    _ip([f"link set {CABLE}{host} {'up' if up else 'down'}"])


def close_rendezvous_ports(host: str) -> None:
    """Keeps the node from all TCP ports of others that a rendezvous may take, but for the few on
    which the daemons listen."""
    low, high = rendezvous.ephemeral_ports()
    ranges = (
        (10000, SLURMCTLD_PORT - 1),
        (MARIADB_PORT + 1, low - 1),
        (high + 1, 65534),  # a rule takes no 65535
    )
    for first, last in ranges:
        rule = f"rule add ipproto tcp dport {first}-{last} unreachable"
        _ip([rule], inside=host)


def open_ports(host: str) -> None:
    """Takes back `close_rendezvous_ports`."""
    rules = system.sh("nsenter", f"--net={namespace(host)}", "ip", "rule")
    for line in rules.splitlines():
        if "dport" in line:
            _ip(["rule del priority " + line.split(":")[0]], inside=host)


def shape(host: str, rate: str | None) -> None:
    """Limits the node's cable in both directions; None removes the limit.

    The burst must hold what arrives between two timer ticks and one offloaded 64 KB packet.
    """
    ends = [([], f"{CABLE}{host}"), (["nsenter", f"--net={namespace(host)}"], "eth0")]
    for enter, device in ends:
        at = ["dev", device, "root"]
        if rate is None:
            system.run([*enter, "tc", "qdisc", "del", *at], check=False)
        else:
            tbf = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            system.sh(*enter, "tc", "qdisc", "replace", *at, *tbf)
