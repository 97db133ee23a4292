"""What the ranks of `test_dist.py` do; started by torchrun with three processes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from slurmft.job import process_group
from slurmft.job.process_group import PeerFailedError, World
from slurmft.train.loop.evaluator import gather
from slurmft.train.parallel.muon import MuonAdamW


def check_collectives(world: World) -> None:
    assert world.sum([world.rank, 1.0]) == [3.0, 3.0]
    assert world.all_values(world.rank * 2.0) == [0.0, 2.0, 4.0]


def check_gather(world: World) -> None:
    """Of numbers and of rows of them; a rank, or each, may have none."""
    for sizes in ([4, 0, 3], [1, 1, 1], [0, 0, 5], [0, 0, 0]):
        for dtype, shape in ((np.int64, ()), (np.float64, (3,))):
            parts = [
                np.full((n, *shape), rank + 1, dtype) for rank, n in enumerate(sizes)
            ]
            whole = gather(world, parts[world.rank], sizes)
            assert (whole is None) != world.is_main
            if whole is not None:
                assert whole.dtype == dtype
                assert whole.tolist() == np.concatenate(parts).tolist()


def check_work_of_some(world: World) -> None:
    """The others wait; a failure of one is told to all, with its words."""
    done = []
    world.on_some(world.rank == 2, lambda: done.append(world.rank))
    assert done == ([2] if world.rank == 2 else [])
    with pytest.raises(PeerFailedError if world.is_main else KeyError) as raised:
        world.on_some(world.rank > 0, lambda: dict[int, int]()[world.rank])
    if world.is_main:
        assert "rank 1 failed: KeyError: 1" in str(raised.value)


def check_work_of_main(world: World) -> None:
    """All have its result, or its failure, at once; the next collective still works."""

    def fail() -> None:
        raise ValueError("no such metric")

    found = world.on_main(lambda: {"a": 1 / 3, "rank": world.rank})
    assert found == {"a": 1 / 3, "rank": 0}
    with pytest.raises(
        ValueError if world.is_main else PeerFailedError, match="no such metric"
    ):
        world.on_main(fail)
    assert world.sum([1.0]) == [3.0]


def identity(value: object) -> object:
    return value


def check_objects(world: World) -> None:
    """Of different lengths, as JSON has them; what it cannot hold is an error of its rank."""
    own = {"rank": world.rank, "text": "ä" * 100 * world.rank, "none": None}
    of_all = [{**own, "rank": r, "text": "ä" * 100 * r} for r in range(world.size)]
    assert world.all_objects(own) == of_all
    assert world.gather_objects(own) == (of_all if world.is_main else [])
    assert world.share_object(own, source=1) == of_all[1]
    assert world.share_object((1 / 3, np.float64(2 / 3), np.int64(7))) == [
        *(1 / 3, 2 / 3, 7)
    ]
    assert world.all_objects(None) == [None] * world.size
    for value in ({1: "key"}, Path("/"), np.zeros(2), b"x", {"a": [{2: 3}]}):
        error = TypeError if world.is_main else PeerFailedError
        with pytest.raises(error):
            world.on_main(partial(identity, value))
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.ones(0).bfloat16()}
    shared = world.share_tensors(tensors if world.is_main else {})
    for name, tensor in tensors.items():
        assert shared[name].dtype == tensor.dtype
        assert torch.equal(shared[name], tensor)


def check_muon(world: World) -> None:
    """Each rank works on a part of the matrices; all end with the weights, and the momentum, of one
    rank that does it all."""
    shapes = [(8, 4), (4, 8), (3, 3), (5, 2)]
    gradients = [
        [torch.randn(s, generator=_drawn(i)) for s in shapes] for i in range(3)
    ]
    ours = [torch.nn.Parameter(torch.ones(s)) for s in shapes]
    alone = [torch.nn.Parameter(torch.ones(s)) for s in shapes]
    hidden = {"params": ours[:3], "weight_decay": 0.1}
    others = torch.optim.AdamW([{"params": ours[3:]}], lr=0.1, fused=True)
    together = MuonAdamW([hidden], others, lr=0.1)
    muon: torch.optim.Optimizer = torch.optim.Muon(
        alone[:3], lr=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(alone[3:], lr=0.1)
    for step in gradients:
        for a, b, gradient in zip(ours, alone, step, strict=True):
            a.grad, b.grad = gradient, gradient.clone()
        together.step()
        muon.step()
        adamw.step()
    for a, b in zip(ours, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.002)
    assert set(together.state) == set(ours)
    for a, b in zip(ours[:3], alone[:3], strict=True):
        assert torch.equal(
            together.state[a]["momentum_buffer"], muon.state[b]["momentum_buffer"]
        )


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    world = process_group.init("gloo")
    check_collectives(world)
    check_gather(world)
    check_work_of_some(world)
    check_work_of_main(world)
    check_objects(world)
    check_muon(world)
    process_group.leave()
    # in one write: torchrun starts python -u
    print(f"rank {world.rank} done\n", end="")
    os._exit(0)  # as ranks do: threads of the process group may not end in order
