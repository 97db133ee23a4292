"""GlusterFS and its FUSE clients; all bricks are on one server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import ClassVar

from tests.lab.hosts import SERVER_ADDRESS, LabError, NamespaceClient
from tests.lab.labs import NamespaceLab


class GlusterFS(NamespaceLab):
    """A volume distributed over two bricks, with its defaults."""

    name, title = "glusterfs", "GlusterFS"
    packages = ("glusterfs-server", "glusterfs-client", "attr")
    programs = ("glusterd", "gluster", "glusterfs", "mount.glusterfs")
    fixed_folders = ("/var/lib/glusterd", "/var/log/glusterfs", "/run")
    options = "distributed over 2 bricks"
    bricks = 2
    layout: tuple[str, ...] = ()
    volume_options: ClassVar[dict[str, str]] = {}
    mount_options = "defaults"

    def start_server(self) -> None:
        first = not hasattr(self, "version")
        self.server.sh("mkdir", "-p", "/run/gluster")
        self.server.sh("glusterd")
        if not first:  # its bricks start with it
            self._wait(
                "Online",
                lambda: self._gluster("volume", "status").count(" Y ") >= self.bricks,
            )
            return
        self.version = self._gluster("--version").split()[1]
        bricks = [
            f"{SERVER_ADDRESS}:{self.home}/server/brick{n}" for n in range(self.bricks)
        ]
        self._wait("the daemon", lambda: "State" in self._gluster("pool", "list"))
        self._gluster("volume", "create", "lab", *self.layout, *bricks, "force")
        for name, value in self.volume_options.items():
            self._gluster("volume", "set", "lab", name, value)
        self._gluster("volume", "start", "lab")

    def stop_server(self) -> None:
        self.server.sh("pkill", "-KILL", "gluster", check=False)

    def mount(self, client: NamespaceClient) -> None:
        mount = ["mount", "-t", "glusterfs", "-o", self.mount_options]
        client.sh(*mount, f"{SERVER_ADDRESS}:/lab", str(self.folder))

    def set_quota(self, limit: int | None) -> None:
        if limit is None:
            self._gluster("volume", "quota", "lab", "disable")
            return
        self._gluster("volume", "quota", "lab", "enable")
        self._gluster("volume", "set", "lab", "quota-deem-statfs", "on")
        for name in ("soft-timeout", "hard-timeout"):
            self._gluster("volume", "quota", "lab", name, "0")
        self._gluster("volume", "quota", "lab", "limit-usage", "/quota", str(limit))

    def _gluster(self, *words: str) -> str:
        return self.server.sh("gluster", "--mode=script", *words)

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(LabError):
                if ready():
                    return
            time.sleep(0.2)
        raise LabError(f"{self.name}: {what} did not come up")


class ReplicatedGlusterFS(GlusterFS):
    """The same, but every file on three bricks."""

    name, options = "glusterfs-replicated", "replicated on 3 bricks"
    bricks, layout = 3, ("replica", "3")


class UncachedGlusterFS(GlusterFS):
    """Clients remember no names and attributes."""

    name = "glusterfs-uncached"
    options = "uncached: stat-prefetch off, entry-timeout=0, attribute-timeout=0"
    volume_options: ClassVar[dict[str, str]] = {"performance.stat-prefetch": "off"}
    mount_options = "entry-timeout=0,attribute-timeout=0"
