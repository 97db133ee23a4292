"""CUDA graphs on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.train.test_gpu_layers import losses


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_graphs_on_and_off_give_equal_losses(
    gpu: torch.device, micro_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout; attention's gradients are summed in any order."""
    captured: list[Any] = []
    capture = torch.cuda.make_graphed_callables

    def record(*args: Any, **named: Any) -> Any:
        captured.append(args)
        return capture(*args, **named)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    batches = [[*[5, 9] * 8, *[30, 31] * 8], [*[2] * 16, *[3] * 16]] * 6
    eager, graphed = (losses(graphs, batches, micro_steps, gpu) for graphs in (False, True))
    assert graphed == pytest.approx(eager, rel=0.01)
    assert len(captured) == 2
