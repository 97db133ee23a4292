"""Encoder layers on GPUs: those that `fused_layers` knows, in few kernels, or as CUDA graphs.

A layer of a short batch is computed faster than the host asks for it, and under autocast most
kernels are casts: of each weight, bias and input by itself. Here one kernel rounds the weights of a
layer, one product makes queries, keys and values, and hidden states stay in 16 bits between layers.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import dropout, gelu, layer_norm, linear
from torch.utils.checkpoint import checkpoint

from slurmft.train import packed_attention
from slurmft.train.fused_layers import Layer
from slurmft.train.packed_attention import How, Starts, flash, take

_SEEN = 3
"""A graph is captured when batches of its shape come for this time: rare ones are not worth it."""

_GRAPHS = 16
"""At most: each keeps the memory of its activations' gradients."""


def why_not(layer: Layer, device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps a layer from being computed here, as a text; None: nothing.

    Args:
        dtype: what autocast rounds to. In fp16, residuals would overflow that autocast has in fp32.
    """
    if dtype is not torch.bfloat16:
        return f"layers are computed so in bf16, not {str(dtype).removeprefix('torch.')}"
    return packed_attention.why_no_flash(device, dtype, layer.query.out_features // layer.heads)


class _Rounded(torch.autograd.Function):
    """The weights of a layer, in copies whose memory stays the same; backwards, gradients."""

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
    """As `Layer.parameters`: queries, keys and values are one copy."""
    in_weights, in_biases = (each.chunk(3) for each in copies[:2])
    return [*itertools.chain(*zip(in_weights, in_biases, strict=True)), *copies[2:]]


class GpuLayers:
    """The layers of an encoder."""

    def __init__(self, layers: list[Layer], device: torch.device, dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype
        self._copies = [_copies(layer, device, dtype) for layer in layers]
        self._graphs: dict[Any, Callable[..., Tensor]] | None = None
        self._seen: Counter[Any] = Counter()
        self._pool: Any = None

    def use_graphs(self) -> None:
        """Lets batches in training be computed by CUDA graphs, where their shape is not rare."""
        self._graphs = {}

    def run(self, x: Tensor, starts: Starts, training: bool, again: bool) -> Tensor:
        """Hidden states (T, hidden) through all layers; the last may return first tokens alone.

        Args:
            again: keep no activations; layers are computed again for their backward passes.
        """
        x = x.to(self._dtype)
        with torch.autocast(x.device.type, enabled=False):
            if training and torch.is_grad_enabled() and (graph := self._graph(x, starts)):
                # Graphs begin and end with the copies: nothing of theirs stays in a gradient.
                pairs = zip(self._layers, self._copies, strict=True)
                rounded = [_rounded(layer, copies) for layer, copies in pairs]
                return graph(x, starts.cum_seq, *itertools.chain(*rounded))
            for layer, copies in zip(self._layers, self._copies, strict=True):
                call = functools.partial(_round_and_compute, layer, copies, starts, training)
                x = checkpoint(call, x, use_reentrant=False) if again and training else call(x)
        return x

    def _graph(self, x: Tensor, starts: Starts) -> Callable[..., Tensor] | None:
        """That of this shape; None: there is none, or none yet."""
        if self._graphs is None:
            return None
        key = x.shape, x.requires_grad, starts.cum_seq.shape, starts.most
        self._seen[key] += 1
        if key not in self._graphs and self._seen[key] >= _SEEN and len(self._graphs) < _GRAPHS:
            self._graphs[key] = self._capture(x, starts)
        return self._graphs.get(key)

    def _capture(self, x: Tensor, starts: Starts) -> Callable[..., Tensor]:
        def compute(x: Tensor, cum_seq: Tensor, *copies: Tensor) -> Tensor:
            same, each = Starts(cum_seq, starts.most), len(self._copies[0])
            for i, layer in enumerate(self._layers):
                x = _compute(layer, x, copies[i * each : (i + 1) * each], same, True)
            return x

        sample = [x.detach().clone().requires_grad_(x.requires_grad), starts.cum_seq.clone()]
        copies = [each.detach().requires_grad_() for each in itertools.chain(*self._copies)]
        on_gpu = x.device.type == "cuda"
        self._pool = self._pool or (torch.cuda.graph_pool_handle() if on_gpu else None)
        # Warming up draws numbers: a resumed run, which captures at other steps, would see others.
        with torch.random.fork_rng([x.device.index] if on_gpu else []):
            graph: Any = torch.cuda.make_graphed_callables(
                compute, (*sample, *copies), pool=self._pool
            )
        return cast(Callable[..., Tensor], graph)


def _copies(layer: Layer, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Where a layer's rounded weights are: see `_parts`."""
    weights = layer.parameters()
    joined = [(3 * len(weights[0]), *weights[0].shape[1:]), (3 * len(weights[1]),)]
    shapes: Iterable[Any] = [*joined, *(each.shape for each in weights[6:])]
    return [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]


def _rounded(layer: Layer, copies: list[Tensor]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _Rounded.apply(copies, *layer.parameters())  # type: ignore[no-untyped-call]
    return found


def _round_and_compute(
    layer: Layer, copies: list[Tensor], starts: Starts, training: bool, x: Tensor
) -> Tensor:
    # Layer by layer: DDP sends the gradients of one while another is computed.
    return _compute(layer, x, _rounded(layer, copies), starts, training)


def _compute(
    layer: Layer, x: Tensor, copies: Sequence[Tensor], starts: Starts, training: bool
) -> Tensor:
    """One layer: (T, hidden) -> the same, or (sequences, hidden) of first tokens."""
    w_in, b_in, w_out, b_out, w_up, b_up, w_down, b_down, w_norm, b_norm, w_last, b_last = copies
    query, key, value = linear(x, w_in, b_in).view(len(x), 3, layer.heads, -1).unbind(1)
    how = How(False, None, layer.p_scores if training else 0.0, layer.scaling, None)
    attended = flash(query, key, value, starts, how, layer.first_only)
    x = take(x, starts.firsts) if layer.first_only else x
    out = dropout(linear(attended.flatten(1), w_out, b_out), layer.p_out, training)
    a = layer_norm(x + out, x.shape[1:], w_norm, b_norm, layer.norm.eps)
    down = linear(gelu(linear(a, w_up, b_up)), w_down, b_down)
    down = dropout(down, layer.p_down, training)
    return layer_norm(a + down, x.shape[1:], w_last, b_last, layer.last_norm.eps)
