"""A real sshd on a free port of this machine, for this user alone: keys, known hosts and
configuration in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from types import TracebackType

import psutil

from slurmft.node.rendezvous import free_ports
from tests.support import until

SSHD = shutil.which(
    "sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", "")
)


def missing() -> str:
    """Why there can be no sshd here; "": it can."""
    lacking = [
        name for name in ("ssh", "ssh-keygen", "rsync") if not shutil.which(name)
    ]
    lacking += [] if SSHD else ["sshd"]
    return f"needs {', '.join(lacking)}" if lacking else ""


class Sshd:
    """The server; `ssh` is the command whose host `lab` it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ssh = f"ssh -F {folder}/config"
        self._log = folder / "sshd.log"

    def __enter__(self) -> Sshd:
        folder, port = self.folder, free_ports()[0]
        for name in ("host_key", "key"):
            command = [
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-f",
                str(folder / name),
            ]
            subprocess.run(command, check=True, timeout=30)
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / "known").write_text(f"[127.0.0.1]:{port} {public}\n")
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPidFile none\n"
        )
        (folder / "config").write_text(
            f"Host lab\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/key\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n"
        )
        with contextlib.suppress(OSError):
            os.makedirs("/run/sshd", exist_ok=True)
        assert SSHD is not None
        command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._await(port)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()
        self._process.terminate()
        self._process.wait(30)

    def cut(self) -> int:
        """Kills the processes of all connections, as a network that fails does; what they started
        goes on. Returns how many there were."""
        killed = 0
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith("sshd"):
                    child.send_signal(signal.SIGKILL)
                    killed += 1
        return killed

    def _await(self, port: int) -> None:
        def answers() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 1),
            ):
                return True
            return False

        until(answers, self._log.read_text, every_s=0.05)
