"""What a lab is: a shared file system with a server, and clients that all have it at one path."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tests.lab.hosts import LabError, NamespaceClient, Server, root_only


class Client(Protocol):
    """A host that has mounted the file system. It sees the checkout, and the Python that runs
    this, under the same paths as this machine."""

    name: str

    def command(self, argv: Sequence[str], user: int = 0) -> list[str]:
        """The command, to be started on this machine, that runs `argv` on the client as a user,
        with its stdin, stdout, stderr and exit code. It does not need the client's network, and
        ends there when it is killed here."""

    def cut(self) -> None:
        """Takes the client's network to the server away."""

    def restore(self) -> None:
        """Gives it back."""


class Lab:
    """A file system with certain options; a context manager that starts it and ends it."""

    name: str
    title: str
    """The file system's name in the table."""
    packages: tuple[str, ...]
    """Debian's, that it needs."""
    programs: tuple[str, ...]
    """Of these packages, to see whether they are there."""
    options: str = ""
    """Of server and mount, where they are not the defaults; in the table."""
    folder: Path
    """The shared folder on every client."""
    clients: Sequence[Client]
    version: str

    def start(self) -> None:
        """Starts the server, and mounts it on the clients."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends all of it, also where `start` has failed halfway."""
        raise NotImplementedError

    def stop_server(self) -> None:
        """The server goes down hard, as in a crash."""
        raise NotImplementedError

    def start_server(self) -> None:
        """It comes up again; returns when it serves."""
        raise NotImplementedError

    def set_quota(self, limit: int | None) -> None:
        """Limits the bytes below `folder`/quota, or, where there are no quotas, those that the
        file system has free; None: no limit.

        Raises:
            NotImplementedError: it cannot, with the reason.
        """
        raise NotImplementedError("no quotas")

    def missing(self) -> str | None:
        """Why it cannot work on this machine, and what to type."""
        try:
            root_only()
        except LabError as error:
            return str(error)
        lacking = [name for name in self.programs if not shutil.which(name, path=_PATH)]
        if lacking:
            packages = " ".join(self.packages)
            return (
                f"{self.name} needs {', '.join(lacking)}: apt-get install -y {packages}"
            )
        return None

    def __enter__(self) -> Lab:
        if problem := self.missing():
            raise LabError(problem)
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NamespaceLab(Lab):
    """A lab whose hosts are namespaces of this machine, with a FUSE client process in each.

    Subclasses have `serve` and `mount`, and the names of the server's folders in `fixed_folders`.
    """

    fixed_folders: tuple[str, ...] = ()

    server: Server

    def start(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix=f"slurmft-lab-{self.name}-"))
        """All that the lab writes, in folders of its hosts."""
        self.home.chmod(0o755)
        self.folder = self.home / "shared"
        self.folder.mkdir()
        self.hosts: list[Server | NamespaceClient] = []
        self.server = Server()
        self.hosts.append(self.server)
        self.server.bind(self.home / "server", *self.fixed_folders)
        self.start_server()
        for number in (1, 2):
            client = NamespaceClient(f"n{number}", self.server, number)
            self.hosts.append(client)
            client.bind(self.home / client.name, *self.fixed_folders)
            self.mount(client)
        self.clients = [
            host for host in self.hosts if isinstance(host, NamespaceClient)
        ]

    def mount(self, client: NamespaceClient) -> None:
        """Mounts the file system at `folder`."""
        raise NotImplementedError

    def stop(self) -> None:
        for host in reversed(getattr(self, "hosts", [])):
            host.end()
        if hasattr(self, "home"):
            shutil.rmtree(self.home, ignore_errors=True)


LABS = {
    "cephfs": "tests.lab.cephfs:CephFS",
    "glusterfs": "tests.lab.glusterfs:GlusterFS",
    "glusterfs-replicated": "tests.lab.glusterfs:ReplicatedGlusterFS",
    "glusterfs-uncached": "tests.lab.glusterfs:UncachedGlusterFS",
    "moosefs": "tests.lab.moosefs:MooseFS",
    "gfs2": "tests.lab.shared_disk:GFS2",
    "ocfs2": "tests.lab.shared_disk:OCFS2",
    "nfs3": "tests.lab.nfs:NFS3",
    "nfs3-local-lock-all": "tests.lab.nfs:LocalLockAll",
    "nfs3-local-lock-flock": "tests.lab.nfs:LocalLockFlock",
    "nfs3-nolock": "tests.lab.nfs:NoLock",
    "nfs3-soft": "tests.lab.nfs:Soft3",
    "nfs4": "tests.lab.nfs:NFS",
    "nfs4-noac": "tests.lab.nfs:NoCache",
    "nfs4-soft": "tests.lab.nfs:Soft",
    "ganesha3": "tests.lab.nfs:Ganesha3",
    "ganesha4": "tests.lab.nfs:Ganesha",
}
"""Name -> module and class."""


def make(name: str) -> Lab:
    """The lab of this name, not yet started."""
    module, _, kind = LABS[name].partition(":")
    made: Lab = getattr(importlib.import_module(module), kind)()
    return made
