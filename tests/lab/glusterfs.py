"""GlusterFS: two bricks, replicated or not, and its FUSE clients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from tests.lab.hosts import SERVER_ADDRESS, LabError, NamespaceClient
from tests.lab.labs import NamespaceLab


class GlusterFS(NamespaceLab):
    """A volume distributed over two bricks, with its defaults."""

    name, title = "glusterfs", "GlusterFS"
    packages = ("glusterfs-server", "glusterfs-client", "attr")
    programs = ("glusterd", "gluster", "glusterfs", "mount.glusterfs")
    fixed_folders = ("/var/lib/glusterd", "/var/log/glusterfs", "/var/run/gluster")
    options = "2 bricks, distributed; defaults"

    def start_server(self) -> None:
        first = not hasattr(self, "version")
        self.server.sh("glusterd")
        if not first:  # its bricks start with it
            self._wait("Online", lambda: self._gluster("volume", "status").count(" Y ") >= 2)
            return
        self.version = self._gluster("--version").split()[1]
        bricks = [f"{SERVER_ADDRESS}:{self.home}/server/brick{n}" for n in (1, 2)]
        self._wait("the daemon", lambda: "State" in self._gluster("pool", "list"))
        self._gluster("volume", "create", "lab", "transport", "tcp", *bricks, "force")
        self._gluster("volume", "start", "lab")

    def stop_server(self) -> None:
        self.server.sh("pkill", "-KILL", "gluster", check=False)

    def mount(self, client: NamespaceClient) -> None:
        client.sh("mount", "-t", "glusterfs", f"{SERVER_ADDRESS}:/lab", str(self.folder))

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
