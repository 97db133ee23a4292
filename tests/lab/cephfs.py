"""CephFS: one monitor, manager, object store and metadata server, and ceph-fuse on the clients."""

from __future__ import annotations

import time
import uuid

from tests.lab.hosts import SERVER_ADDRESS, LabError, NamespaceClient
from tests.lab.labs import NamespaceLab

_MON = f"[v2:{SERVER_ADDRESS}:3300,v1:{SERVER_ADDRESS}:6789]"
_CONF = f"""\
[global]
fsid = %s
mon_host = {_MON}
mon_initial_members = a
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
osd_memory_target = 939524096
bluestore_block_size = 4294967296
mds_cache_memory_limit = 134217728
"""
_UP_S = 120


class CephFS(NamespaceLab):
    """With its defaults, but one copy of the data, and no authentication."""

    name, title = "cephfs", "CephFS"
    packages = (
        "ceph-mon",
        "ceph-mgr",
        "ceph-osd",
        "ceph-mds",
        "ceph-fuse",
        "ceph-common",
        "attr",
    )
    programs = (
        "ceph",
        "ceph-mon",
        "ceph-mgr",
        "ceph-osd",
        "ceph-mds",
        "ceph-fuse",
        "setfattr",
    )
    fixed_folders = ("/etc/ceph", "/var/lib/ceph", "/var/log/ceph", "/var/run/ceph")
    options = "ceph-fuse"

    def start_server(self) -> None:
        first = not hasattr(self, "version")
        if first:
            self.version = self.server.sh("ceph", "--version").split()[2]
            self._conf = _CONF % uuid.uuid4()
            self._configure(self.server.name)
            for kind in ("mon", "mgr", "osd", "mds"):
                self.server.sh(
                    "mkdir",
                    "-p",
                    f"/var/lib/ceph/{kind}/ceph-a",
                    "/var/lib/ceph/osd/ceph-0",
                )
            fsid = self._conf.split()[3]
            self.server.sh(
                "monmaptool",
                "--create",
                "--addv",
                "a",
                _MON,
                "--fsid",
                fsid,
                "/var/lib/ceph/monmap",
            )
            self.server.sh(
                "ceph-mon", "--mkfs", "-i", "a", "--monmap", "/var/lib/ceph/monmap"
            )
        self.server.sh("ceph-mon", "-i", "a")
        self._wait("status", "quorum")
        self.server.sh("ceph-mgr", "-i", "a")
        if first:
            disk = str(uuid.uuid4())
            self._ceph("osd", "new", disk)
            self.server.sh("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self.server.sh(
            "sh",
            "-c",
            "ceph-osd -i 0 || (tail -30 /var/log/ceph/ceph-osd.0.log; false)",
        )
        if first:
            for pool in ("metadata", "data"):
                self._ceph("osd", "pool", "create", pool, "8")
            self._ceph("fs", "new", "lab", "metadata", "data")
        self.server.sh("ceph-mds", "-i", "a")
        self._wait("mds stat", "up:active")

    def _wait(self, question: str, answer: str) -> None:
        deadline = time.monotonic() + _UP_S
        while answer not in self.server.sh("ceph", *question.split(), check=False):
            if time.monotonic() > deadline:
                raise LabError(f"{self.name}: {self._ceph('status')}")
            time.sleep(0.3)

    def _configure(self, host: str) -> None:
        (self.home / host / "etc-ceph" / "ceph.conf").write_text(self._conf)

    def _ceph(self, *words: str) -> str:
        return self.server.sh("ceph", *words)

    def stop_server(self) -> None:
        self.server.sh("pkill", "-KILL", "ceph-")

    def mount(self, client: NamespaceClient) -> None:
        self._configure(client.name)
        client.sh("ceph-fuse", str(self.folder))

    def set_quota(self, limit: int | None) -> None:
        value = ["-n", "ceph.quota.max_bytes", "-v", str(limit or 0)]
        self.hosts[1].sh("setfattr", *value, str(self.folder / "quota"))
