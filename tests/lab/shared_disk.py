"""File systems that two machines have on one disk: OCFS2 with its own cluster stack; GFS2."""

from __future__ import annotations

from pathlib import Path

from tests.lab.machines import PACKAGES, PROGRAMS, Machine, MachineLab, image


class SharedDisk(MachineLab):
    """A lab without a server. Subclasses have the `join` and `make` scripts."""

    names = ("n1", "n2")

    def disks_of(self, name: str) -> list[Path]:
        return [image(self.home / "shared.img", 1024)]

    def serve(self) -> None:
        for number, machine in enumerate(self.machines.values()):
            self.join(machine, number)
        first = self.machines["n1"]
        self.make(first)
        self.version = f"(Linux {first.sh('uname -r').strip()})"

    def join(self, machine: Machine, number: int) -> None:
        """Makes a machine part of the cluster."""
        raise NotImplementedError

    def make(self, machine: Machine) -> None:
        """Makes the file system."""
        raise NotImplementedError


class OCFS2(SharedDisk):
    name, title = "ocfs2", "OCFS2"
    options = "o2cb; defaults"
    packages = (*PACKAGES, "ocfs2-tools")
    programs = (*PROGRAMS, "mkfs.ocfs2", "o2cb")

    def join(self, machine: Machine, number: int) -> None:
        nodes = "".join(
            f"node:\n\tip_port = 7777\n\tip_address = {other.address}\n\tnumber = {n}\n"
            f"\tname = {other.name}\n\tcluster = lab\n\n"
            for n, other in enumerate(self.machines.values())
        )
        cluster = f"cluster:\n\tnode_count = {len(self.machines)}\n\tname = lab\n\n"
        machine.sh(
            f"""
            mkdir -p /etc/ocfs2 /dlm
            cat > /etc/ocfs2/cluster.conf <<'END'
{cluster}{nodes}END
            modprobe ocfs2_stack_o2cb
            modprobe ocfs2_dlmfs
            modprobe ocfs2
            mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
            mount -t ocfs2_dlmfs ocfs2_dlmfs /dlm
            o2cb register-cluster lab
            """
        )

    def make(self, machine: Machine) -> None:
        cluster = "--cluster-stack=o2cb --cluster-name=lab"
        machine.sh(
            f"yes | mkfs.ocfs2 -F -N 2 -b 4K -C 4K {cluster} /dev/vda", timeout_s=300
        )

    def mount(self, client: Machine) -> None:
        client.sh(f"mount -t ocfs2 /dev/vda {self.folder}")


class GFS2(SharedDisk):
    name, title = "gfs2", "GFS2"
    options = "lock_dlm; defaults"
    packages = (*PACKAGES, "gfs2-utils", "dlm-controld", "corosync")
    programs = (*PROGRAMS, "mkfs.gfs2", "dlm_controld", "corosync")

    def join(self, machine: Machine, number: int) -> None:
        nodes = "".join(
            f"node {{\nnodeid: {n}\nname: {other.name}\nring0_addr: {other.address}\n}}\n"
            for n, other in enumerate(self.machines.values(), start=1)
        )
        machine.sh(
            f"""
            mkdir -p /etc/corosync /var/lib/corosync /run/cluster
            cat > /etc/corosync/corosync.conf <<'END'
totem {{
version: 2
cluster_name: lab
transport: udpu
token: 10000
}}
nodelist {{
{nodes}}}
quorum {{
provider: corosync_votequorum
two_node: 1
wait_for_all: 0
}}
END
            corosync
            modprobe dlm
            modprobe gfs2
            mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
            mkdir -p /dev/misc /var/log/dlm_controld
            ln -s /dev/dlm* /dev/misc/
            dlm_controld --enable_fencing 0
            """
        )

    def make(self, machine: Machine) -> None:
        machine.sh(
            "mkfs.gfs2 -O -p lock_dlm -t lab:shared -j 2 -J 32 /dev/vda", timeout_s=300
        )

    def mount(self, client: Machine) -> None:
        client.sh(f"mount -t gfs2 /dev/vda {self.folder}")
