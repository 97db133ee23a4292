"""MooseFS: a master, a chunkserver, and its FUSE clients."""

from __future__ import annotations

import shutil

from tests.lab.hosts import SERVER_ADDRESS, NamespaceClient
from tests.lab.labs import NamespaceLab

_COMMON = "WORKING_USER = root\nWORKING_GROUP = root\nDISABLE_OOM_KILLER = 0\nNICE_LEVEL = 0\n"


class MooseFS(NamespaceLab):
    """With its defaults: a client may be away for a day before its session ends."""

    name, title = "moosefs", "MooseFS"
    packages = ("moosefs-master", "moosefs-chunkserver", "moosefs-client")
    programs = ("mfsmaster", "mfschunkserver", "mfsmount", "mfssetquota")
    fixed_folders = ("/etc/mfs", "/var/lib/mfs")
    options = "1 chunkserver"

    def start_server(self) -> None:
        if not hasattr(self, "version"):
            self._configure()
            self.version = self.server.sh("sh", "-c", "mfsmaster -v 2>&1").split()[1]
        self.server.sh("sh", "-c", "mfsmaster -a start >/var/lib/mfs/master.log 2>&1")
        self.server.sh(
            "sh", "-c", "mfschunkserver start >/var/lib/mfs/chunkserver.log 2>&1"
        )

    def _configure(self) -> None:
        etc, data = (self.home / "server" / name for name in ("etc-mfs", "var-lib-mfs"))
        disk = self.home / "server" / "disk"
        disk.mkdir()
        shutil.copy("/var/lib/mfs/metadata.mfs.empty", data / "metadata.mfs")
        (etc / "mfsmaster.cfg").write_text(_COMMON)
        (etc / "mfsexports.cfg").write_text("* / rw,alldirs,admin,maproot=0:0\n")
        chunks = f"MASTER_HOST = {SERVER_ADDRESS}\nHDD_LEAVE_SPACE_DEFAULT = 16MiB\n"
        (etc / "mfschunkserver.cfg").write_text(_COMMON + chunks)
        (etc / "mfshdd.cfg").write_text(f"{disk}\n")

    def stop_server(self) -> None:
        self.server.sh("pkill", "-KILL", "mfs")

    def mount(self, client: NamespaceClient) -> None:
        client.sh("mfsmount", "-H", SERVER_ADDRESS, "-o", "mfsnice=0", str(self.folder))

    def set_quota(self, limit: int | None) -> None:
        client, folder = self.hosts[1], str(self.folder / "quota")
        if limit is None:
            client.sh("mfsdelquota", "-a", "-A", folder)
        else:
            client.sh("mfssetquota", "-L", str(limit), folder)
