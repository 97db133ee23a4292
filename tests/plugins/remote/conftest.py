"""A laptop and a cluster, on this machine, with a real sshd between them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slurmft.runs.rundir import RunDir
from tests import support
from tests.conftest import Done
from tests.support import CHECKOUT, PATIENCE_S
from tests.support.sshd import Sshd, missing


@dataclass
class Laptop:
    """Commands are typed in `folder`; `there` is the cluster's folder."""

    sshd: Sshd
    folder: Path
    there: Path
    env: dict[str, str]
    clusters: Path

    def name(
        self, *clusters: str, setup: Sequence[str] = (), site: str = 'cluster = "local"'
    ) -> None:
        """Writes clusters.toml."""
        lines = [f"export PYTHONPATH={CHECKOUT} HOME={os.environ['HOME']}", *setup]
        text = "".join(
            f'[{name}]\nhost = "lab"\nssh = {json.dumps(self.sshd.ssh)}\n'
            f"folder = {json.dumps(str(self.there) + name.removeprefix('lab'))}\n"
            f"python = {json.dumps(sys.executable)}\nsetup = {json.dumps(lines)}\n"
            f"[{name}.site]\n{site}\n"
            for name in clusters
        )
        self.clusters.write_text(text)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "slurmft", *arguments],
            cwd=self.folder,
            env=os.environ | self.env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def slurmft(self, *arguments: str) -> Done:
        return self.end(self.start(*arguments))

    def end(self, process: subprocess.Popen[str]) -> Done:
        out, err = process.communicate(timeout=PATIENCE_S)
        return Done(process.returncode, out, err)

    def runs(self) -> list[RunDir]:
        """Those on the cluster."""
        return [
            RunDir(path.parent)
            for path in sorted(self.there.glob("runs/*/config.json"))
        ]

    def processes(self) -> list[psutil.Process]:
        """Those that work in the cluster's folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if Path(process.cwd()).is_relative_to(self.there):
                    found.append(process)
        return found


def until(met: Callable[[], object]) -> None:
    """Looks often: what follows is to come at once."""
    support.until(met, every_s=0.005)


@pytest.fixture(scope="session")
def sshd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sshd]:
    reason = missing()
    if reason and not request.config.getoption("--slurm"):
        pytest.skip(reason)
    assert not reason, reason
    with Sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


@pytest.fixture
def laptop(sshd: Sshd, tmp_path: Path) -> Laptop:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import sys\nprint('got', sys.argv[1:], flush=True)\n"
    )
    env = {
        "SLURMFT_CLUSTERS": str(tmp_path / "clusters.toml"),
        "PYTHONPATH": str(CHECKOUT),
    }
    env |= {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_RUNTIME_DIR": str(sshd.folder / "x"),
    }
    made = Laptop(
        sshd, folder, tmp_path / "lab folder", env, tmp_path / "clusters.toml"
    )
    made.name("lab")
    return made
