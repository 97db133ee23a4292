"""Agreement between ranks, in a process group of three."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import PATIENCE_S, prepared

pytestmark = pytest.mark.processes


def test_ranks_agree(tmp_path: Path) -> None:
    torchrun = prepared.command("torch.distributed.run")
    done = subprocess.run(
        [
            *torchrun,
            "--standalone",
            "--nproc-per-node=3",
            "-m",
            "tests.support.ranks",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} done" for rank in range(3)
    ]
