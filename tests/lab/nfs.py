"""NFS: a server with an XFS disk, the kernel's nfsd or nfs-ganesha, and clients of the kernel."""

from __future__ import annotations

import time
from pathlib import Path

from tests.lab.hosts import LabError
from tests.lab.machines import PACKAGES, PROGRAMS, Machine, MachineLab, image

_DISK = """
modprobe xfs
blkid /dev/vda || mkfs.xfs -q /dev/vda
mkdir -p /srv
mount -o prjquota /dev/vda /srv
mkdir -p /srv/export /srv/state/sm /srv/state/sm.bak /srv/state/nfsdcld /srv/state/v4recovery
touch /srv/state/state /srv/state/etab /srv/state/rmtab
mount --bind /srv/state /var/lib/nfs
"""
"""What the server knows of its clients lies on the disk, too, and comes through a power cut."""

_KERNEL_SERVER = """
modprobe nfsd
mount -t nfsd nfsd /proc/fs/nfsd
mkdir -p /run/rpc_pipefs /run/sendsigs.omit.d
mount -t rpc_pipefs pipefs /run/rpc_pipefs
rpcbind -w
rpc.statd
nfsdcld --pipefsdir=/run/rpc_pipefs
exportfs -o rw,no_root_squash,no_subtree_check,fsid=0 '*:/srv/export'
rpc.nfsd 8
rpc.mountd
sm-notify
"""

_GANESHA = """
mkdir -p /run/ganesha /var/lib/nfs/ganesha
rpcbind -w
rpc.statd
cat > /run/ganesha.conf <<END
NFS_CORE_PARAM { Protocols = 3, 4; mount_path_pseudo = true; }
EXPORT { Export_Id = 1; Path = /srv/export; Pseudo = /srv/export; Access_Type = RW;
         Squash = No_Root_Squash; FSAL { Name = VFS; } }
END
ganesha.nfsd -f /run/ganesha.conf -L /run/ganesha.log -p /run/ganesha.pid
"""


class NFS(MachineLab):
    """NFS 4.2 of the kernel's server, with its defaults."""

    name, title = "nfs4", "NFS 4.2, kernel server"
    options = "defaults"
    packages = (*PACKAGES, "nfs-kernel-server", "nfs-common", "xfsprogs")
    programs = (*PROGRAMS, "rpc.nfsd", "mount.nfs", "mkfs.xfs")
    mount_options = "vers=4.2"
    server_script = _KERNEL_SERVER
    exported = "/"

    def disks_of(self, name: str) -> list[Path]:
        return [image(self.home / "server.img", 1024)] if name == "server" else []

    def serve(self) -> None:
        server = self.machines["server"]
        server.sh(_DISK + self.server_script, timeout_s=300)
        self.version = self._version(server)

    def _version(self, server: Machine) -> str:
        return f"(Linux {server.sh('uname -r').strip()})"

    def mount(self, client: Machine) -> None:
        client.sh("rpcbind -w; rpc.statd")
        source = f"server:{self.exported} {self.folder}"
        deadline = time.monotonic() + 120
        while True:
            try:
                client.sh(f"mount -t nfs -o {self.mount_options} {source}")
                break
            except LabError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
        # A server that has just started gives no new lock for its grace period, 90 s.
        file = f"open('{self.folder}/ready', 'w')"
        lock = f"import fcntl; fcntl.lockf({file}, fcntl.LOCK_EX)"
        client.sh(f'python3 -IS -c "{lock}"', timeout_s=200)

    def stop_server(self) -> None:
        self.machines["server"].kill()

    def start_server(self) -> None:
        self.machines["server"].start()
        self.machines["server"].await_boot()
        self.serve()

    def set_quota(self, limit: int | None) -> None:
        server = self.machines["server"]
        server.sh("xfs_quota -x -c 'project -s -p /srv/export/quota 7' /srv")
        server.sh(f"xfs_quota -x -c 'limit -p bhard={limit or 0} 7' /srv")


class NFS3(NFS):
    name, title = "nfs3", "NFS 3, kernel server"
    exported = "/srv/export"
    mount_options = "vers=3"


class LocalLockAll(NFS3):
    name, options = "nfs3-local-lock-all", "local_lock=all"
    mount_options = "vers=3,local_lock=all"


class LocalLockFlock(NFS3):
    name, options = "nfs3-local-lock-flock", "local_lock=flock"
    mount_options = "vers=3,local_lock=flock"


class NoLock(NFS3):
    name, options = "nfs3-nolock", "nolock"
    mount_options = "vers=3,nolock"


class Soft3(NFS3):
    name, options = "nfs3-soft", "soft,timeo=50,retrans=2"
    mount_options = "vers=3,soft,timeo=50,retrans=2"


class NoCache(NFS):
    name, options = "nfs4-noac", "noac"
    mount_options = "vers=4.2,noac"


class Soft(NFS):
    name, options = "nfs4-soft", "soft,timeo=50,retrans=2"
    mount_options = "vers=4.2,soft,timeo=50,retrans=2"


class Ganesha(NFS):
    """NFS 4.2 of nfs-ganesha, with its defaults."""

    name, title = "ganesha4", "NFS 4.2, nfs-ganesha"
    packages = (*PACKAGES, "nfs-ganesha-vfs", "nfs-common", "xfsprogs")
    programs = (*PROGRAMS, "ganesha.nfsd", "mount.nfs", "mkfs.xfs")
    server_script = _GANESHA
    exported = "/srv/export"

    def _version(self, server: Machine) -> str:
        return server.sh("ganesha.nfsd -v | sed -n 's/.*V//p' | head -1").strip()


class Ganesha3(Ganesha):
    name, title = "ganesha3", "NFS 3, nfs-ganesha"
    mount_options = "vers=3"
