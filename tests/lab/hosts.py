"""Hosts made of namespaces: processes, mounts, name and network are their own.

All of a host's processes and mounts end with its first process, and that ends with ours, however
that ends. So nothing can be left behind: not even a bridge, which is in the server's namespace.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.core import process
from tests.support import CHECKOUT

SERVER_ADDRESS = "10.78.0.254"
_BRIDGE = "lab-br0"
_START_S = 10.0
_INIT = "sleep infinity & wait"
"""Does nothing, but collects the exit status of daemons: glusterd takes a dead brick whose status
nobody has collected for a live one."""


class LabError(RuntimeError):
    """A lab cannot be set up."""


class Host:
    """A host; `command` runs a program on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        namespaces = [
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
        ]
        self._unshare = process.start(
            ["unshare", *namespaces, "--mount-proc", "bash", "-c", _INIT],
            stdin=subprocess.DEVNULL,
        )
        self.pid = self._first_process()
        """Of its first process, as seen from here."""
        self.sh("hostname", name)
        self.sh("ip", "link", "set", "lo", "up")

    def _first_process(self) -> int:
        """The pid of its init, when it has become that: then all namespaces are there."""
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text() == "bash\n":
                    return int(pid)
            time.sleep(0.01)
        raise LabError(f"the namespaces of {self.name} were not made; are you root?")

    def command(self, argv: Sequence[str], user: int = 0) -> list[str]:
        """The command, to be started here, that runs `argv` there, in the checkout, as a user. It
        is killed there when it is killed here."""
        enter = ["nsenter", f"--target={self.pid}", "--all", f"--wd={CHECKOUT}"]
        become = ["setpriv", "--pdeathsig=KILL"]
        if user:
            become += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [*enter, *become, *argv]

    def sh(self, *argv: str, timeout_s: float = 180, check: bool = True) -> str:
        """What a program prints there.

        Raises:
            LabError: it failed, with its words.
        """
        done = subprocess.run(
            self.command(argv), capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if check and done.returncode:
            said = (done.stderr + done.stdout).strip()
            raise LabError(
                f"{self.name}: {' '.join(argv)}: exit {done.returncode}: {said}"
            )
        return done.stdout

    def bind(self, private: Path, *places: str) -> None:
        """Puts empty folders of its own over folders that daemons have fixed in their code."""
        for place in places:
            own = private / place.strip("/").replace("/", "-")
            own.mkdir(parents=True, exist_ok=True)
            Path(place).mkdir(parents=True, exist_ok=True)
            self.sh("mount", "--bind", str(own), place)

    def end(self) -> None:
        """Ends it, with all its processes and mounts."""
        process.end(self._unshare)


class Server(Host):
    """The host of a file system's daemons, and the switch that its clients are plugged into."""

    def __init__(self, name: str = "server") -> None:
        super().__init__(name)
        self.sh("ip", "link", "add", _BRIDGE, "type", "bridge")
        self.sh("ip", "addr", "add", f"{SERVER_ADDRESS}/24", "dev", _BRIDGE)
        self.sh("ip", "link", "set", _BRIDGE, "up")

    def plug(self, client: Host, address: str) -> None:
        """A cable from a client to the switch."""
        cable = f"to-{client.name}"
        self.sh("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0")
        self.sh("ip", "link", "set", cable, "master", _BRIDGE, "up")
        # a pid as we see it
        move = ["ip", "link", "set", "eth0", "netns", str(client.pid)]
        subprocess.run(
            ["nsenter", f"--net=/proc/{self.pid}/ns/net", *move], check=True, timeout=30
        )
        client.sh("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        client.sh("ip", "link", "set", "eth0", "up")


class NamespaceClient(Host):
    """A client of a file system: a host on the server's switch."""

    def __init__(self, name: str, server: Server, number: int) -> None:
        super().__init__(name)
        self._server = server
        self.address = f"10.78.0.{number}"
        server.plug(self, self.address)

    def cut(self) -> None:
        """Pulls its cable, at the switch: it keeps its address."""
        self._server.sh("ip", "link", "set", f"to-{self.name}", "down")

    def restore(self) -> None:
        self._server.sh("ip", "link", "set", f"to-{self.name}", "up")


def python(*arguments: str) -> list[str]:
    """The command of a Python of ours on a client: that of this process."""
    return [
        "env",
        f"PYTHONPATH={CHECKOUT}",
        "PYTHONDONTWRITEBYTECODE=1",
        sys.executable,
        *arguments,
    ]


def root_only() -> None:
    """
    Raises:
        LabError: this is not root.
    """
    if os.geteuid() != 0:
        raise LabError("labs need root: namespaces and mounts")
