"""What ranks tell their node of their collectives: real ranks, on gloo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from slurmft import locks
from slurmft.core.decode import read
from slurmft.core.run_files import Calls
from slurmft.node import flight_recorder, heartbeat
from tests.support import PATIENCE_S, until

pytestmark = pytest.mark.processes

LATE = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
some = dist.new_group([0, 1], group_desc="some")
if rank < 2:
    dist.broadcast(torch.ones(3, dtype=torch.bfloat16), 0, group=some)
dist.all_reduce(torch.ones(1000))
Path(sys.argv[1], f"ready-{rank}").write_text(str(os.getpid()))
if rank == 2:
    time.sleep(1000)
dist.all_reduce(torch.ones(2000))
"""


@contextlib.contextmanager
def ranks(folder: Path, script: str) -> Iterator[None]:
    """Three ranks by torchrun, as the task of a node starts them."""
    (folder / "late.py").write_text(script)
    environment = os.environ | {heartbeat.FOLDER: str(folder)}
    environment |= locks.environment("auto", environment)
    environment |= flight_recorder.variables({})
    environment["OMP_NUM_THREADS"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=3", str(folder / "late.py"), str(folder)]
    with subprocess.Popen(command, env=environment, cwd=folder) as running:
        try:
            yield
        finally:
            # torchrun ends its ranks.
            running.terminate()
            running.wait(PATIENCE_S)


def answer(folder: Path, rank: int) -> Calls:
    path = Path(flight_recorder.answer_file(str(folder), rank))
    until(path.exists)
    calls = read(path, Calls)
    assert calls is not None
    return calls


def are_ready(folder: Path) -> bool:
    return len(list(folder.glob("ready-*"))) == 3


def waits(folder: Path, rank: int) -> bool:
    """Asks a rank whether it waits in a collective."""
    Path(flight_recorder.answer_file(str(folder), rank)).unlink(missing_ok=True)
    assert flight_recorder.ask(str(folder), rank)
    return any(call.waits for call in answer(folder, rank).calls)


def test_ranks_tell_what_they_wait_for(tmp_path: Path) -> None:
    with ranks(tmp_path, LATE):
        until(lambda: are_ready(tmp_path))
        until(lambda: waits(tmp_path, 0) and waits(tmp_path, 1))
        calls = answer(tmp_path, 0)
        *_, last = calls.calls
        assert (last.group, last.number, last.operation) == ("gloo:0", 2, "all_reduce")
        assert (last.bytes, last.waits) == (8000, True)
        assert calls.where == "late.py:14"
        assert calls.groups["gloo:0"].ranks == [0, 1, 2]
        some = calls.groups["gloo:1"]
        assert (some.ranks, some.last, some.description) == ([0, 1], 1, "some")
        (broadcast,) = (call for call in calls.calls if call.group == "gloo:1")
        assert (broadcast.operation, broadcast.bytes) == ("broadcast", 6)
        # More than once, and of one that waits for nothing.
        assert not waits(tmp_path, 2)
        late = answer(tmp_path, 2)
        assert (late.groups["gloo:0"].last, late.where) == (1, "late.py:13")
        assert "gloo:1" not in late.groups


def test_ranks_that_lose_a_peer_leave_their_calls(tmp_path: Path) -> None:
    with ranks(tmp_path, LATE):
        until(lambda: are_ready(tmp_path))
        until(lambda: waits(tmp_path, 0))
        path = Path(flight_recorder.answer_file(str(tmp_path), 0))
        path.unlink()
        os.kill(int((tmp_path / "ready-2").read_text()), signal.SIGKILL)
        calls = answer(tmp_path, 0)
        assert calls.lost_peer
        assert calls.calls[-1].number == 2
        until(lambda: not flight_recorder.ask(str(tmp_path), 2))


def test_a_recorder_without_calls_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As NCCL's, where a build of torch for GPUs trains on gloo."""
    functions = "torch._C._distributed_c10d"
    monkeypatch.setattr(
        f"{functions}._dump_nccl_trace_json", lambda *_: b"{}", raising=False
    )
    place = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:
        dist.barrier()
        calls = flight_recorder.recorded()
    finally:
        dist.destroy_process_group()
    assert calls is not None
    assert [call["operation"] for call in calls["calls"]] == ["barrier"]


def test_a_process_that_is_no_rank_is_not_asked(tmp_path: Path) -> None:
    assert not flight_recorder.ask(str(tmp_path), 0)
    assert list(tmp_path.iterdir()) == []


def test_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without the recorder, or that answers otherwise, tells nothing."""
    monkeypatch.setattr(flight_recorder, "_DUMPS", ("_no_such_function",))
    assert flight_recorder.recorded() is None
    monkeypatch.setattr(flight_recorder, "_DUMPS", ("_dump_fr_trace_json",))
    monkeypatch.setattr(
        "torch._C._distributed_c10d._dump_fr_trace_json", lambda *_: "[1]"
    )
    assert flight_recorder.recorded() is None


def test_the_recorder_is_on_unless_the_user_decides_otherwise() -> None:
    assert flight_recorder.variables({}) == {"TORCH_FR_BUFFER_SIZE": "2000"}
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        assert flight_recorder.variables({name: "0"}) == {}
    # No name in /tmp that another user could have taken.
    old = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    home = {"HOME": "/home/ada"}
    trace = "/home/ada/.cache/torch/comm_lib_trace_rank_"
    assert flight_recorder.variables(home)[old] == trace
    for name in ("TORCH_FR_DUMP_TEMP_FILE", old):
        assert old not in flight_recorder.variables(home | {name: "mine"})


def test_names_are_those_of_the_modules_that_own_them() -> None:
    """Older Pythons can import the recorder alone."""
    assert flight_recorder._FOLDER == heartbeat.FOLDER
