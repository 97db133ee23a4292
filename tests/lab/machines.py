"""Machines with kernels of their own: Debian's kernel in QEMU, on this machine's files.

The root of a machine is the root of this one, read-only, with a layer in memory over it: Python,
the packages and the checkout lie where they lie here, and nothing that it writes there comes back.
Commands go in over a second network, so a machine whose cable is pulled still answers.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.core import process
from tests.lab.hosts import LabError
from tests.lab.labs import Lab
from tests.support import CHECKOUT

PACKAGES = ("qemu-system-x86", "busybox-static", "kmod", "cpio")
PROGRAMS = ("qemu-system-x86_64", "busybox", "depmod", "cpio")

_PORT = 7900
_BOOT_S = 180.0
_BOOT_MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_net",
    "virtio_blk",
)
_READY = "lab: ready"
_REMOTE = Path(__file__).with_name("remote.py")


class Network:
    """What machines of one lab have in common: names, addresses, kernel, key."""

    def __init__(self, home: Path, names: Sequence[str]) -> None:
        self.home = home
        self.addresses = {name: f"10.79.0.{n}" for n, name in enumerate(names, start=1)}
        self.port = _free_port(socket.SOCK_DGRAM)
        self.key = home / "key"
        self.key.touch(0o600)
        self.key.write_text(secrets.token_hex())
        self.kernel = _kernel()
        self.initrd = _initrd(self.kernel, home)


class Machine:
    """A machine on a network; a client of a file system, or its server."""

    def __init__(
        self,
        name: str,
        network: Network,
        disks: Sequence[Path] = (),
        *,
        memory_mb: int = 700,
    ) -> None:
        """
        Args:
            disks: images, /dev/vda and on; other machines may have the same.
        """
        self.name, self._network, self._disks = name, network, disks
        self.address = network.addresses[name]
        self._memory_mb = memory_mb
        self._console = network.home / f"{name}.console"
        self._monitor = network.home / f"{name}.monitor"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def start(self) -> None:
        """Switches it on, with nothing in its memory; `await_boot` returns when it is up."""
        self._port = _free_port(socket.SOCK_STREAM)
        self._console.write_text("")
        kernel = next((self._network.kernel / "boot").glob("vmlinuz-*"))
        root = "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"
        data = (
            f"socket,id=data,mcast=230.9.8.7:{self._network.port},localaddr=127.0.0.1"
        )
        door = f"tcp:127.0.0.1:{self._port}-10.0.2.15:{_PORT}"
        control = f"user,id=control,restrict=on,hostfwd={door}"
        mac = f"52:54:00:79:00:{int(self.address.rpartition('.')[2]):02x}"
        command = [
            "qemu-system-x86_64",
            *_accelerator(),
            "-m",
            str(self._memory_mb),
            "-nodefaults",
        ]
        command += [
            "-display",
            "none",
            "-no-reboot",
            "-serial",
            f"file:{self._console}",
        ]
        command += [
            "-monitor",
            f"unix:{self._monitor},server,nowait",
            "-kernel",
            str(kernel),
        ]
        command += [
            "-initrd",
            str(self._network.initrd),
            "-append",
            self._kernel_arguments(),
        ]
        command += ["-virtfs", root]
        command += ["-netdev", data, "-device", f"virtio-net-pci,netdev=data,mac={mac}"]
        command += ["-netdev", control, "-device", "virtio-net-pci,netdev=control"]
        for disk in self._disks:
            image = f"file={disk},format=raw,if=virtio,cache=none,file.locking=off"
            command += ["-drive", image]
        self._process = process.start(command, stdin=subprocess.DEVNULL)

    def _kernel_arguments(self) -> str:
        """What the kernel does not know itself, it gives to its first process as variables."""
        others = [
            f"{address}={name}" for name, address in self._network.addresses.items()
        ]
        variables = {
            "LAB_NAME": self.name,
            "LAB_ADDRESS": self.address,
            "LAB_HOSTS": ",".join(["127.0.0.1=localhost", *others]),
            "LAB_KERNEL": self._network.kernel,
            "LAB_REMOTE": f"{_REMOTE}:serve:{_PORT}:{self._network.key}",
        }
        words = [f"{name}={value}" for name, value in variables.items()]
        return " ".join(["console=ttyS0", "quiet", "panic=-1", "net.ifnames=0", *words])

    def await_boot(self) -> None:
        """
        Raises:
            LabError: it does not come up.
        """
        deadline = time.monotonic() + _BOOT_S
        while _READY not in (said := self._console.read_text(errors="replace")):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"{self.name} does not boot: {said[:2000]}")
            time.sleep(0.1)
        while self.sh("echo up", check=False) != "up\n":
            if time.monotonic() > deadline:
                raise LabError(f"{self.name} does not answer")
            time.sleep(0.2)

    def command(self, argv: Sequence[str], user: int = 0) -> list[str]:
        """The command, to be started here, that runs `argv` there, in the checkout, as a user. It
        is killed there when it is killed here."""
        become = []
        if user:
            become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        there = ["env", "-C", str(CHECKOUT), *become, *argv]
        client = [sys.executable, "-I", "-S", str(_REMOTE), "run", str(self._port)]
        return [*client, str(self._network.key), *there]

    def sh(self, script: str, *, timeout_s: float = 120, check: bool = True) -> str:
        """What a script of the shell prints there.

        Raises:
            LabError: it failed, with its words.
        """
        done = subprocess.run(
            self.command(["sh", "-ec", script]), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if check and done.returncode:
            said = (done.stderr + done.stdout).strip()
            raise LabError(f"{self.name}: {script}: exit {done.returncode}: {said}")
        return done.stdout

    def cut(self) -> None:
        """Pulls its cable."""
        self._order("set_link data off")

    def restore(self) -> None:
        """Plugs it in."""
        self._order("set_link data on")

    def _order(self, line: str) -> None:
        """An order to QEMU's monitor; it is carried out when the next prompt comes."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(10)
            monitor.connect(str(self._monitor))
            monitor.sendall(f"{line}\n".encode())
            said = b""
            while said.count(b"(qemu) ") < 2:
                said += monitor.recv(4096)

    def kill(self) -> None:
        """Cuts its power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class MachineLab(Lab):
    """A lab whose hosts are machines. Subclasses have `serve` and `mount`."""

    packages: tuple[str, ...] = PACKAGES
    programs: tuple[str, ...] = PROGRAMS
    names: tuple[str, ...] = ("server", "n1", "n2")
    folder = Path("/mnt/shared")

    def start(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="slurmft-lab-"))
        self.machines: dict[str, Machine] = {}
        network = Network(self.home, self.names)
        for name in self.names:
            self.machines[name] = Machine(name, network, self.disks_of(name))
        for machine in self.machines.values():
            machine.start()
        for machine in self.machines.values():
            machine.await_boot()
        clients = [
            machine for name, machine in self.machines.items() if name != "server"
        ]
        self.serve()
        for client in clients:
            client.sh(f"mkdir -p {self.folder}")
            self.mount(client)
        self.clients = clients

    def disks_of(self, name: str) -> list[Path]:
        """The images of a machine's disks, which may be made here."""
        return []

    def serve(self) -> None:
        """Starts the servers."""

    def mount(self, client: Machine) -> None:
        """Mounts the file system at `folder`."""
        raise NotImplementedError

    def stop(self) -> None:
        for machine in getattr(self, "machines", {}).values():
            machine.kill()
        if hasattr(self, "home"):
            shutil.rmtree(self.home, ignore_errors=True)


def image(path: Path, mib: int) -> Path:
    """A disk of zeros, which takes no room before it is written."""
    if not path.exists():
        path.touch()
        os.truncate(path, mib * 2**20)
    return path


def _accelerator() -> list[str]:
    """KVM where the processor does it. Where only a hypervisor does (PVM), Debian's kernel cannot
    boot on it: there QEMU translates, ten times slower."""
    hardware = any(
        Path(f"/sys/module/kvm_{maker}").exists() for maker in ("intel", "amd")
    )
    if hardware and os.access("/dev/kvm", os.W_OK):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg", "-cpu", "max"]


def _kernel() -> Path:
    """Debian's kernel: boot/ and lib/modules/, unpacked; downloaded once."""
    folder = Path(tempfile.gettempdir()) / f"slurmft-lab-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise LabError(f"{folder} belongs to somebody else")
    kernel = folder / "kernel"
    if not kernel.exists():
        depends = _run("apt-cache", "depends", "linux-image-amd64")
        package = next(
            word for word in depends.split() if re.match(r"linux-image-\d", word)
        )
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            _run("apt-get", "download", package, cwd=Path(aside))
            (archive,) = Path(aside).glob("*.deb")
            new = Path(aside) / "kernel"
            _run("dpkg-deb", "-x", str(archive), str(new))
            _run("depmod", "-b", str(new), _modules(new).name)
            new.rename(kernel)
    return kernel


def _modules(kernel: Path) -> Path:
    (found,) = (kernel / "lib/modules").iterdir()
    return found


def _initrd(kernel: Path, home: Path) -> Path:
    """What mounts the root: busybox, a script, and modules in the order to load them."""
    tree, modules = home / "initrd", _modules(kernel)
    for name in ("bin", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", tree / "bin/busybox")
    shutil.copy(Path(__file__).with_name("machine-init.sh"), tree / "init")
    (tree / "init").chmod(0o755)
    needs = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        file, _, others = line.partition(":")
        needs[Path(file).stem] = [*reversed(others.split()), file]
    order = dict.fromkeys(file for name in _BOOT_MODULES for file in needs[name])
    for file in order:
        shutil.copy(modules / file, tree / "modules")
    (tree / "modules/order").write_text(
        "".join(f"{Path(file).name}\n" for file in order)
    )
    packed = home / "initrd.img"
    pack = f"find . | cpio --quiet -o -H newc > {shlex.quote(str(packed))}"
    _run("sh", "-c", pack, cwd=tree)
    return packed


def _free_port(kind: socket.SocketKind) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise LabError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout
