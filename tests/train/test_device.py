"""What a step asks of a GPU, shown without one: see `tests/support/on_device.py`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmft.job.process_group import World
from slurmft.train.data import stream
from slurmft.train.data.tables import TokenTable
from slurmft.train.parallel.local_sgd import LocalSgd
from tests.support import on_device, prepared

META = torch.device("meta")
CHECKS = {
    "numbers": (
        "check_packages_are_not_looked_for", "check_overflow", "check_windows_are_read_late",
        "check_gradients_that_are_not_finite", "check_memory",
    ),
    "meta": ("check_no_waits", "check_evaluation_waits_once"),
}  # fmt: skip


def check(processes: int, place: Path, *names: str) -> None:
    script = (
        "--standalone",
        f"--nproc-per-node={processes}",
        "-m",
        "tests.support.on_device",
    )
    command = [*prepared.command("torch.distributed.run"), *script, str(place), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("done") == processes


@pytest.mark.processes
@pytest.mark.parametrize("group", CHECKS)
def test_steps(group: str, tmp_path: Path) -> None:
    check(1, tmp_path, *CHECKS[group])


@pytest.mark.processes
def test_a_slow_save(tmp_path: Path) -> None:
    check(2, on_device.new_run(tmp_path), "check_slow_save")


def test_local_sgd_sends_what_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl refuses tensors of the CPU."""
    sent: list[torch.device] = []
    monkeypatch.setattr(
        dist, "broadcast", lambda tensor, src: sent.append(tensor.device)
    )
    world = World(
        rank=0, size=2, local_rank=0, device=META, backend="nccl", control=None
    )
    model = torch.nn.Linear(3, 3)
    accelerator = SimpleNamespace(
        prepare_model=lambda model, evaluation_mode: model.to(META)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    LocalSgd(world, 2).wrap(accelerator, model, optimizer)
    assert sent == [META, META]


# --- batches --------------------------------------------------------------------------------------


def test_batches_are_made_one_ahead() -> None:
    made: list[int] = []

    def make(item: int) -> int:
        made.append(item)
        if item == 3:
            raise ValueError("of item 3")
        return 10 * item

    pairs = stream.prepared(range(5), make, META)
    assert [next(pairs) for _ in range(3)] == [(0, 0), (1, 10), (2, 20)]
    with pytest.raises(ValueError, match="of item 3"):
        next(pairs)
    assert made == [0, 1, 2, 3] or made == [0, 1, 2, 3, 4]
    assert list(stream.prepared(range(1), str, META)) == [(0, "0")]
    assert list(stream.prepared([], make, META)) == []


def test_batches_of_cpus_are_made_when_their_turn_comes() -> None:
    made: list[int] = []
    pairs = stream.prepared(
        range(3), lambda item: made.append(item), torch.device("cpu")
    )
    next(pairs)
    assert made == [0]


@pytest.mark.parametrize("pack", [False, True])
def test_one_copy_takes_a_batch_to_a_gpu(
    pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of several types; one of bytes is not where others begin."""
    table = TokenTable.build(
        [[5, 6, 7], [8], [9, 10]], [0.5, 1.5, 2.5], [[0, 0, 1], [1], [0, 1]]
    )
    indices = torch.arange(3).numpy()
    batch = table.packed(indices) if pack else table.batch(indices, pad_id=0)
    batch.inputs["of_bytes"] = torch.tensor([1, 0, 1], dtype=torch.int8)
    empty, copies = torch.empty, list[torch.Tensor]()

    def to(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        copies.append(tensor)
        return tensor

    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory, **of: empty(*size, **of)
    )
    monkeypatch.setattr(torch.Tensor, "to", to)
    sent = batch.to(META)
    assert len(copies) == 1
    for own, found in ((batch.inputs, sent.inputs), (batch.targets, sent.targets)):
        assert own.keys() == found.keys()
        for name, tensor in own.items():
            assert tensor.dtype == found[name].dtype
            assert torch.equal(tensor, found[name])
