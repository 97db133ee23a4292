"""Encoder layers on GPUs: those that `fused_layers` knows, in few kernels.

A layer of a short batch is computed faster than the host asks for it, and under autocast most
kernels are casts: of each weight, bias and input by itself. Here one kernel rounds the weights of a
layer, one product makes queries, keys and values, and hidden states stay in 16 bits between layers.
"""

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
    """Returns the reason for which a layer cannot be computed here; None: it can.

    Args:
        dtype: type that autocast rounds to. In fp16, residuals would overflow that autocast has in
            fp32.
    """
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"layers are computed so in bf16, not {name}"
    head_size = layer.linear[0].out_features // layer.heads
    return packed_attention.why_no_flash(device, dtype, head_size)


class _Rounded(torch.autograd.Function):
    """Rounds the weights of a layer by one kernel; backwards, their gradients are in fp32."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        torch._foreach_copy_(_parts(copies), weights)
        # Not the copies themselves: autograd would make them outputs of this step.
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = _parts(gradients)
        gradients_of_weights = [
            torch.empty_like(part, dtype=ctx.dtype) for part in parts
        ]
        # All by one kernel, as forwards.
        torch._foreach_copy_(gradients_of_weights, parts)
        return None, *gradients_of_weights


def _parts(copies: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of joined tensors in the order of `Layer.parameters`.

    In copies, weights and biases of queries, keys and values are one tensor each.
    """
    weights = copies[0].chunk(3)
    biases = copies[1].chunk(3)
    parts: list[Tensor] = []
    for pair in zip(weights, biases, strict=True):
        parts += pair
    return [*parts, *copies[2:]]


class GpuLayer:
    """A layer, and memory for its rounded weights."""

    def __init__(self, layer: Layer, device: torch.device, dtype: torch.dtype) -> None:
        self._layer = layer
        weights = layer.parameters()
        # Weights and biases alternate; those of queries, keys and values come first.
        in_weight = torch.cat(weights[:6:2])
        in_bias = torch.cat(weights[1:6:2])
        joined = [in_weight, in_bias, *weights[6:]]
        # Made once, and written in every step: their memory stays where it is.
        self.copies = []
        for weight in joined:
            self.copies.append(weight.detach().to(device, dtype, copy=True))

    def rounded(self) -> Any:
        """Returns the weights and biases of in (query, key, value as one), out, up, down and the
        two norms, rounded."""
        return _Rounded.apply(self.copies, *self._layer.parameters())  # type: ignore[no-untyped-call]

    def compute(self, x: Tensor, starts: Starts, training: bool) -> Tensor:
        """Returns the layer's output for (T, hidden): the same shape, or (sequences, hidden) of
        first tokens."""
        layer = self._layer
        # Rounded layer by layer, so that DDP sends a layer's gradients while the next is computed.
        (
            w_in,
            b_in,
            w_out,
            b_out,
            w_up,
            b_up,
            w_down,
            b_down,
            w_a,
            b_a,
            w_y,
            b_y,
        ) = self.rounded()
        attention_norm, last_norm = layer.norms
        qkv = linear(x, w_in, b_in)
        qkv = qkv.view(len(x), 3, layer.heads, -1)
        query, key, value = qkv.unbind(1)
        how = How(
            causal=False,
            window=None,
            dropout=layer.p_scores if training else 0.0,
            scaling=layer.scaling,
            softcap=None,
        )
        attended = flash(query, key, value, starts, how, layer.first_only)
        if layer.first_only:
            x = take(x, starts.firsts)
        width = x.shape[1:]
        out = linear(attended.flatten(1), w_out, b_out)
        out = dropout(out, layer.p_out, training)
        a = layer_norm(x + out, width, w_a, b_a, attention_norm.eps)
        inner = gelu(linear(a, w_up, b_up))
        down = linear(inner, w_down, b_down)
        down = dropout(down, layer.p_down, training)
        return layer_norm(a + down, width, w_y, b_y, last_norm.eps)


class GpuLayers:
    """The layers of an encoder."""

    def __init__(
        self,
        layers: list[Layer],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._layers = [GpuLayer(layer, device, dtype) for layer in layers]
        self._dtype = dtype

    def run(self, x: Tensor, starts: Starts, training: bool, again: bool) -> Tensor:
        """Returns hidden states after all layers; the last may return first tokens alone.

        Args:
            x: hidden states: (T, hidden).
            again: keep no activations; layers are computed again for their backward passes.
        """
        # Once, in place of autocast's casts before each product.
        x = x.to(self._dtype)
        with torch.autocast(x.device.type, enabled=False):
            for layer in self._layers:
                if again and training:
                    x = checkpoint(
                        layer.compute,
                        x,
                        starts,
                        training,
                        # The other form computes no gradients where its inputs want none, as behind
                        # frozen embeddings.
                        use_reentrant=False,
                    )
                else:
                    x = layer.compute(x, starts, training)
        return x
