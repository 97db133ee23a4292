"""What torch.cuda.make_graphed_callables does, on a CPU: replays compute eagerly, in the memory and
by the operations of the capture; what a capture or a replay cannot do is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "lift_fresh",
    "equal", "is_nonzero",
}  # fmt: skip
"""Operations that wait for the device, or bring what the host has just made to it."""
captures: list[torch.Size] = []
"""Shapes of the first argument."""


class Recorded(TorchDispatchMode):
    """The operations, with the shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        assert name not in WAITS, f"a graph cannot hold {name}"
        result = func(*args, **(kwargs or {}))
        shapes = [x.shape for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self.found.append((name, shapes))
        return result


class Graph:
    """Forward and backward pass of a function of tensors."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self.function, self.inputs = function, inputs
        self.copied = 0
        """Tensors that a replay had to copy."""
        self.recorded: list[Any] = []
        for _ in range(3):  # torch warms up
            self._forward()
            self._backward(torch.empty_like(self.result))
        self.recorded = [*self._forward(), *self._backward(torch.zeros_like(self.result))]
        self.output = self.result.detach().clone()
        self.gradients = [None if g is None else g.clone() for g in self.found]

    def _forward(self) -> list[Any]:
        mode = Recorded()
        with torch.enable_grad(), mode:
            self.result = self.function(*self.inputs)
        return mode.found

    def _backward(self, gradient: Tensor) -> list[Any]:
        wanted = [each for each in self.inputs if each.requires_grad]
        mode = Recorded()
        with mode:
            found = iter(torch.autograd.grad(self.result, wanted, gradient))
        self.found = [next(found) if each.requires_grad else None for each in self.inputs]
        return mode.found

    def replay(self, given: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            for static, each in zip(self.inputs, given, strict=True):
                assert static.shape == each.shape
                assert static.requires_grad == each.requires_grad
                if static.data_ptr() != each.data_ptr():
                    self.copied += 1
                    static.copy_(each)
        self.replayed = self._forward()
        return self.output.copy_(self.result.detach()).detach()

    def replay_backward(self, gradient: Tensor) -> list[Tensor | None]:
        assert self.replayed + self._backward(gradient) == self.recorded
        for static, each in zip(self.gradients, self.found, strict=True):
            if static is not None and each is not None:
                static.copy_(each)  # the next replay overwrites what this one returns
        return [None if g is None else g.detach() for g in self.gradients]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, *inputs: Tensor) -> Tensor:
        ctx.graph = graph
        return graph.replay(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.graph.replay_backward(gradients[0])


def make_graphed_callables(
    function: Callable[..., Tensor], sample_args: tuple[Tensor, ...], pool: Any = None
) -> Callable[..., Any]:
    assert not torch.is_autocast_enabled("cpu")
    captures.append(sample_args[0].shape)
    graph = Graph(function, sample_args)

    def replay(*inputs: Tensor) -> Any:
        before = graph.copied
        output = _Replay.apply(graph, *inputs)  # type: ignore[no-untyped-call, unused-ignore]
        assert graph.copied - before <= 2, "weights are copied once more"
        return output

    return replay
