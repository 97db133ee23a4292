"""Encoder layers on GPUs: those that `fused_layers` knows, in few kernels.

A layer of a short batch is computed faster than the host asks for it, and under autocast most
kernels are casts: of each weight, bias and input by itself. Here one kernel rounds the weights of a
layer, one product makes queries, keys and values, and hidden states stay in 16 bits between layers.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, gelu, layer_norm, linear
from torch.utils.checkpoint import checkpoint

from slurmft.train.engine import packed_attention
from slurmft.train.engine.fused_layers import Layer
from slurmft.train.engine.packed_attention import How, Starts, flash, take


def why_not(layer: Layer, device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps a layer from being computed here, as a text; None: nothing.

    Args:
        dtype: what autocast rounds to. In fp16, residuals would overflow that autocast has in fp32.
    """
    if dtype is not torch.bfloat16:
        return f"layers are computed so in bf16, not {str(dtype).removeprefix('torch.')}"
    return packed_attention.why_no_flash(device, dtype, layer.linear[0].out_features // layer.heads)


class _Rounded(torch.autograd.Function):
    """Copies the weights of a layer into rounded ones; backwards, gradients."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        torch._foreach_copy_(_parts(copies), weights)
        return tuple(each.detach() for each in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = _parts(gradients)
        found = [torch.empty_like(each, dtype=ctx.dtype) for each in parts]
        torch._foreach_copy_(found, parts)
        return None, *found


def _parts(copies: Sequence[Tensor]) -> list[Tensor]:
    """As `Layer.parameters`: in copies, queries, keys and values are one."""
    in_weights, in_biases = (each.chunk(3) for each in copies[:2])
    return [*itertools.chain(*zip(in_weights, in_biases, strict=True)), *copies[2:]]


class GpuLayer:
    """A layer, and memory for its rounded weights."""

    def __init__(self, layer: Layer, device: torch.device, dtype: torch.dtype) -> None:
        weights = layer.parameters()
        self._layer = layer
        joined = [torch.cat(weights[:6:2]), torch.cat(weights[1:6:2]), *weights[6:]]
        self.copies = [each.detach().to(device, dtype, copy=True) for each in joined]

    def rounded(self) -> Any:
        return _Rounded.apply(self.copies, *self._layer.parameters())  # type: ignore[no-untyped-call]

    def compute(self, x: Tensor, starts: Starts, training: bool) -> Tensor:
        """(T, hidden) -> the same, or (sequences, hidden) of first tokens."""
        layer = self._layer
        # Rounded layer by layer, so that DDP sends a layer's gradients while the next is computed.
        w_in, b_in, w_out, b_out, w_up, b_up, w_down, b_down, *norms = self.rounded()
        query, key, value = linear(x, w_in, b_in).view(len(x), 3, layer.heads, -1).unbind(1)
        how = How(False, None, layer.p_scores if training else 0.0, layer.scaling, None)
        attended = flash(query, key, value, starts, how, layer.first_only)
        x = take(x, starts.firsts) if layer.first_only else x
        out = dropout(linear(attended.flatten(1), w_out, b_out), layer.p_out, training)
        a = layer_norm(x + out, x.shape[1:], norms[0], norms[1], layer.norms[0].eps)
        down = linear(gelu(linear(a, w_up, b_up)), w_down, b_down)
        down = dropout(down, layer.p_down, training)
        return layer_norm(a + down, x.shape[1:], norms[2], norms[3], layer.norms[1].eps)


class GpuLayers:
    """The layers of an encoder."""

    def __init__(self, layers: list[Layer], device: torch.device, dtype: torch.dtype) -> None:
        self._layers = [GpuLayer(each, device, dtype) for each in layers]
        self._dtype = dtype

    def run(self, x: Tensor, starts: Starts, training: bool, again: bool) -> Tensor:
        """Hidden states (T, hidden) through all layers; the last may return first tokens alone.

        Args:
            again: keep no activations; layers are computed again for their backward passes.
        """
        x = x.to(self._dtype)
        with torch.autocast(x.device.type, enabled=False):
            for layer in self._layers:
                if again and training:
                    x = checkpoint(layer.compute, x, starts, training, use_reentrant=False)
                else:
                    x = layer.compute(x, starts, training)
        return x
