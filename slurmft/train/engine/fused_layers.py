"""Encoder layers on CPUs as one autograd function each, with a backward pass written by hand.

Where a CPU has matrix units, most of a step is not matrix products, but what stands between them:
casts, random numbers, sums of gradients, copies in and out of padding. A fused layer does less of
it. It computes what the layers of BERT, RoBERTa, ELECTRA and DistilBERT compute:

    a = norm(x + dropout(attention(x) W + b));  y = norm(a + dropout(gelu(a W + b) W + b))

Weights stay the modules' own, in fp32: only copies of them are rounded, once for each batch. Under
autocast the hidden states between layers are rounded as well, which autocast alone does not do.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from slurmft.train.engine.cpu import draw_factors

_ROWS = 64
"""Numbers of rows are multiples of it: few sizes, for which oneDNN keeps its code."""
_VECTOR_BYTES = 64
"""Attention is padded to lengths that fill the registers of AVX-512: softmax is slow elsewhere."""
_BANK = 2
"""Random numbers of a batch: as many as its largest dropout needs, times this."""
_APART = 32
"""Dropouts begin at multiples of it in the bank, where memory is aligned."""


# --- where tokens are -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences that attention pads to one length, in arrays that hold all of them, flat."""

    attending: int
    """Sequences x heads."""
    length: int
    start: int
    """The first of its places in an array."""
    mask: Tensor | None
    """What is added to its scores: 0 or -inf, (sequences x heads, 1, length)."""

    def of(self, array: Tensor) -> Tensor:
        """Its part of an array: (sequences x heads, length, head size)."""
        part = array[self.start : self.start + self.attending * self.length]
        return part.view(self.attending, self.length, -1)


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of a batch as rows, one after the other, and zeros up to a round number.

    Attention has an array each of queries, keys and values, (places, head size), in the order span,
    sequence, head, token.
    """

    tokens: int
    count: int
    """Rows: at least one is no token."""
    firsts: Tensor
    """Row of each sequence's first token: int64, (sequences,)."""
    spans: list[Span]
    places: int
    """Rows of an array."""
    apart: Tensor
    """Which of (count x heads) parts of rows is in each place: int64, (places,)."""
    apart_in: Tensor
    """The same for (count x 3 x heads) parts, in all three arrays: int64, (3 x places,)."""
    together: Tensor
    """In which place each of (tokens x heads) is: int64."""
    together_in: Tensor
    """In which of all arrays' places each of (tokens x 3 x heads) is: int64."""

    @classmethod
    def of(cls, parts: Sequence[Sequence[int]], heads: int, dtype: torch.dtype) -> "Rows":
        """
        Args:
            parts: lengths of the sequences, sorted, in the groups that are padded to one length.
            dtype: of what is computed.
        """
        multiple = _VECTOR_BYTES // dtype.itemsize
        sizes = torch.tensor([length for part in parts for length in part])
        starts, tokens = sizes.cumsum(0) - sizes, int(sizes.sum())
        head, part_of = torch.arange(heads), torch.arange(3)
        spans, rows, together = [], [], []
        begun = done = 0
        for part in parts:
            length, mine = -(-part[-1] // multiple) * multiple, slice(done, done + len(part))
            valid = torch.arange(length) < sizes[mine, None]
            row = torch.where(valid, starts[mine, None] + torch.arange(length), tokens)
            rows.append(row[:, None, :].expand(-1, heads, -1).flatten())
            places = torch.arange(len(part) * heads * length).view(len(part), heads, length) + begun
            together.append(places.transpose(1, 2)[valid])
            spans.append(Span(len(part) * heads, length, begun, _mask_of(valid, heads)))
            begun, done = begun + places.numel(), done + len(part)
        row, place = torch.cat(rows), torch.cat(together)
        which = torch.cat([head.repeat_interleave(span.length).repeat(span.attending // heads)
                           for span in spans])  # fmt: skip
        return cls(
            tokens=tokens,
            count=(tokens // _ROWS + 1) * _ROWS,
            firsts=starts,
            spans=spans,
            places=begun,
            apart=row * heads + which,
            apart_in=((row * 3 + part_of[:, None]) * heads + which).flatten(),
            together=place.flatten(),
            together_in=(place[:, None, :] + part_of[:, None] * begun).flatten(),
        )


def _mask_of(valid: Tensor, heads: int) -> Tensor | None:
    """What keeps scores of padding out, of a span: 0 or -inf, (sequences x heads, 1, length)."""
    if valid.all():
        return None
    mask = torch.zeros(valid.shape).masked_fill_(~valid, -torch.inf)
    return mask.repeat_interleave(heads, 0)[:, None, :]


# --- dropout --------------------------------------------------------------------------------------


class Dropouts:
    """Factors of dropout, 0 or 1 / (1 - p): drawn once for a batch, used by all of its layers. So a
    layer that is computed again draws the same.

    Every dropout takes a piece that begins at a random place: what one drops says nothing of what
    another drops of the same token.
    """

    def __init__(self, probabilities: Iterable[float], size: int, dtype: torch.dtype) -> None:
        """`size` is that of the largest piece."""
        count = _BANK * size + _APART
        self._banks = {p: draw_factors(count, p, dtype) for p in sorted(set(probabilities)) if p}

    def take(self, p: float, *shape: int) -> Tensor | None:
        """Factors of this shape, a view; None: nothing is dropped."""
        if p not in self._banks:
            return None
        bank, size = self._banks[p], torch.Size(shape).numel()
        start = int(torch.randint((len(bank) - size) // _APART + 1, ())) * _APART
        return bank[start : start + size].view(shape)


# --- layers ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Layer:
    """A layer's modules, and what it computes with them."""

    linear: tuple[nn.Linear, ...]
    """Of queries, keys and values; out, up, down."""
    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    """That behind attention, and the last."""
    heads: int
    scaling: float
    """Of the scores."""
    p_scores: float
    p_out: float
    p_down: float
    first_only: bool = False
    """Of the last layer, where only first tokens' outputs are wanted."""

    def parameters(self) -> list[Tensor]:
        modules: tuple[Any, ...] = (*self.linear, *self.norms)
        return [each for module in modules for each in (module.weight, module.bias)]

    def asked(self, span: Span) -> int:
        """Queries of a sequence."""
        return 1 if self.first_only else span.length

    def asking(self, queries: Tensor) -> Tensor:
        """Those that are asked of (sequences x heads, length, head size)."""
        return queries[:, :1] if self.first_only else queries

    def scores(self, span: Span) -> int:
        """Numbers in the attention scores of a span."""
        return span.attending * self.asked(span) * span.length

    def views(self, scores: Tensor, rows: Rows) -> list[Tensor]:
        """Flat scores by span: (sequences x heads, queries, keys) each."""
        parts = torch.split(scores, [self.scores(span) for span in rows.spans])
        return [
            part.view(span.attending, -1, span.length)
            for span, part in zip(rows.spans, parts, strict=True)
        ]

    def copies(self, dtype: torch.dtype) -> list[Tensor]:
        """Weights and biases of in (query, key, value as one), out, up, down, rounded to a type.
        That of queries has the scaling of the scores.

        Made for every batch: what fused optimizers change has the same version as before.
        """
        linear = self.parameters()[:12]
        scaled = [linear[0] * self.scaling, linear[1] * self.scaling, *linear[2:6]]
        joined = [torch.cat(scaled[::2]), torch.cat(scaled[1::2])]
        return [each.to(dtype) for each in (*joined, *linear[6:])]


def layer_of(module: Any) -> Layer | None:
    """The parts of a layer of transformers; None: it is none that we know."""
    for parts in (_of_bert, _of_distilbert):
        with contextlib.suppress(AttributeError):
            activation, layer = parts(module)
            x = torch.linspace(-4, 4, 9)
            known = torch.equal(activation(x), gelu(x))
            known &= all(type(each) is nn.Linear and each.bias is not None for each in layer.linear)
            known &= all(type(n) is nn.LayerNorm and n.bias is not None for n in layer.norms)
            query, _, value, *_ = layer.linear
            return layer if known and query.out_features == value.out_features else None
    return None


def _of_bert(module: Any) -> tuple[Any, Layer]:
    """The activation of a layer, and its parts. AttributeError where it is another kind."""
    if module.is_decoder:
        raise AttributeError("causal attention")
    attends, out, inner = module.attention.self, module.attention.output, module.intermediate
    last = module.output
    return inner.intermediate_act_fn, Layer(
        (attends.query, attends.key, attends.value, out.dense, inner.dense, last.dense),
        (out.LayerNorm, last.LayerNorm), attends.num_attention_heads, attends.scaling,
        attends.dropout.p, out.dropout.p, last.dropout.p,
    )  # fmt: skip


def _of_distilbert(module: Any) -> tuple[Any, Layer]:
    attends, ffn = module.attention, module.ffn
    return ffn.activation, Layer(
        (attends.q_lin, attends.k_lin, attends.v_lin, attends.out_lin, ffn.lin1, ffn.lin2),
        (module.sa_layer_norm, module.output_layer_norm), attends.n_heads, attends.scaling,
        attends.dropout.p, 0.0, ffn.dropout.p,
    )  # fmt: skip


def run(layers: Sequence[Layer], x: Tensor, rows: Rows, training: bool, again: bool) -> Tensor:
    """The layers on (rows, hidden); the last one may return first tokens alone.

    Args:
        again: keep no activations; layers are computed again for their backward passes.
    """
    scores = sum(map(layers[0].scores, rows.spans))
    used = itertools.chain(*((each.p_scores, each.p_out, each.p_down) for each in layers))
    dropouts = Dropouts(used if training else (), max(x.numel(), scores), x.dtype)
    keep = torch.is_grad_enabled()
    for layer in layers:
        call: Any = functools.partial(_Fused.apply, rows, layer, dropouts, keep)
        if again and training:
            x = checkpoint(call, x, *layer.parameters(), use_reentrant=False)
        else:
            x = call(x, *layer.parameters())
    return x


class _Fused(torch.autograd.Function):
    """One layer: (rows, hidden) -> (rows, hidden), or (sequences, hidden) of first tokens."""

    @staticmethod
    def forward(
        ctx: Any, rows: Rows, layer: Layer, dropouts: Dropouts, keep: bool, x: Tensor, *_: Tensor
    ) -> Tensor:
        """`keep` says whether to keep what a backward pass needs."""
        w_in, b_in, w_out, b_out, w_up, b_up, w_down, b_down = layer.copies(x.dtype)
        arrays = _apart(_linear(x, w_in, b_in), rows, layer)
        attended, *of_scores = _attend(arrays, rows, layer, dropouts)
        out = _linear(attended, w_out, b_out)
        out_factors = dropouts.take(layer.p_out, *out.shape)
        a_sum = _add(x[rows.firsts] if layer.first_only else x, out, out_factors)
        a, a_mean, a_rstd = _norm(a_sum, layer.norms[0])
        inner = _linear(a, w_up, b_up) if keep else None
        active = _linear(a, w_up, b_up, "gelu") if inner is None else gelu(inner)
        down = _linear(active, w_down, b_down)
        down_factors = dropouts.take(layer.p_down, *down.shape)
        y_sum = _add(a, down, down_factors)
        y, y_mean, y_rstd = _norm(y_sum, layer.norms[1])
        if not keep:
            return y
        ctx.rows, ctx.layer = rows, layer
        ctx.save_for_backward(
            w_in, w_out, w_up, w_down, x, arrays, attended, out_factors, a_sum, a, a_mean, a_rstd,
            inner, active, down_factors, y_sum, y_mean, y_rstd, *of_scores,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, layer = ctx.rows, ctx.layer
        (
            w_in, w_out, w_up, w_down, x, arrays, attended, out_factors, a_sum, a, a_mean, a_rstd,
            inner, active, down_factors, y_sum, y_mean, y_rstd, *of_scores,
        ) = ctx.saved_tensors  # fmt: skip
        d_sum, *of_last_norm = _norm_backward(gradients[0], y_sum, y_mean, y_rstd, layer.norms[1])
        d_down = d_sum if down_factors is None else d_sum * down_factors
        of_down = _of_linear(d_down, active)
        d_inner = torch.ops.aten.gelu_backward(d_down @ w_down, inner)
        of_up = _of_linear(d_inner, a)
        d_a = d_sum.addmm_(d_inner, w_up)
        d_sum, *of_norm = _norm_backward(d_a, a_sum, a_mean, a_rstd, layer.norms[0])
        d_out = d_sum if out_factors is None else d_sum * out_factors
        of_out = _of_linear(d_out, attended)
        d_arrays = _attend_backward(d_out @ w_out, arrays, of_scores, rows, layer)
        d_in = _together(d_arrays.flatten(0, 1), rows.together_in, rows.count * 3 * layer.heads)
        d_in = d_in.view(rows.count, -1)
        weight, bias = _of_linear(d_in, x)
        of_in = [*zip(weight.chunk(3), bias.chunk(3), strict=True)]
        for each in of_in[0]:
            each.mul_(layer.scaling)
        if layer.first_only:
            d_x = (d_in @ w_in).index_add_(0, rows.firsts, d_sum)
        else:
            d_x = d_sum.addmm_(d_in, w_in)
        of_linear = [each for pair in (*of_in, of_out, of_up, of_down) for each in pair]
        return None, None, None, None, d_x, *of_linear, *of_norm, *of_last_norm


def _linear(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "none") -> Tensor:
    """A linear layer, and "gelu" after it, or "none"."""
    if _by_onednn(x.dtype):  # bias and activation as it computes; addmm begins with a copy of bias
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none")
        return found
    found = torch.addmm(bias, x, weight.t())
    return gelu(found) if activation == "gelu" else found


@functools.cache
def _by_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes products of this type here. fp32 is left to the BLAS library."""
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    known = built and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(known and dtype == torch.bfloat16)


def _add(x: Tensor, y: Tensor, factors: Tensor | None) -> Tensor:
    return x + y if factors is None else torch.addcmul(x, y, factors)


def _norm(x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _norm_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, norm: nn.LayerNorm
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
        gradient, x, norm.normalized_shape, mean, rstd, norm.weight, norm.bias, [True, True, True]
    )
    return found


def _of_linear(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, in fp32."""
    ones = gradient.new_ones(1, len(gradient))  # a product sums bf16 faster than torch's sum
    return _of_weight(gradient, x), (ones @ gradient).squeeze(0).float()


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight, in fp32: (outputs, inputs).

    For AMX, oneDNN blocks products well only where the first factor is stored by rows; one that is
    transposed it packs again for every few columns of the second. So the narrower one is copied.
    """
    if x.dtype == torch.float32:
        return gradient.t() @ x
    if gradient.shape[1] <= x.shape[1]:
        return (gradient.t().contiguous() @ x).float()
    found = x.t().contiguous() @ gradient
    return found.t().contiguous().float()


# --- attention ------------------------------------------------------------------------------------


def _apart(qkv: Tensor, rows: Rows, layer: Layer) -> Tensor:
    """(rows, 3 x hidden) -> queries, keys and values: (3, places, head size)."""
    parts = qkv.view(rows.count * 3 * layer.heads, -1)
    return parts.index_select(0, rows.apart_in).view(3, rows.places, -1)


def _together(array: Tensor, places: Tensor, count: int) -> Tensor:
    """What is in places, and zeros up to a count: (count, head size)."""
    whole = array.new_empty(count, array.shape[1])
    torch.index_select(array, 0, places, out=whole[: len(places)])
    whole[len(places) :].zero_()
    return whole


def _attend(
    arrays: Tensor, rows: Rows, layer: Layer, dropouts: Dropouts
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns what is attended to, (rows, hidden) or (sequences, hidden); and, flat, the scores
    after softmax, the same after dropout, and its factors."""
    query, key, value = arrays
    scores = arrays.new_empty(sum(map(layer.scores, rows.spans)))
    for span, view in zip(rows.spans, layer.views(scores, rows), strict=True):
        asking, keys = layer.asking(span.of(query)), span.of(key).transpose(1, 2)
        if span.mask is None:
            torch.bmm(asking, keys, out=view)
        else:
            view.copy_(span.mask.expand_as(view)).baddbmm_(asking, keys)
        torch.softmax(view, -1, out=view)
    factors = dropouts.take(layer.p_scores, len(scores))
    kept = scores if factors is None else scores * factors
    views = layer.views(kept, rows)
    found = [v.bmm(span.of(value)).flatten(0, 1) for span, v in zip(rows.spans, views, strict=True)]
    attended = torch.cat(found)
    if not layer.first_only:
        attended = _together(attended, rows.together, rows.count * layer.heads)
    return attended.view(-1, layer.heads * arrays.shape[2]), scores, kept, factors


def _attend_backward(
    gradient: Tensor, arrays: Tensor, of_scores: list[Any], rows: Rows, layer: Layer
) -> Tensor:
    """From the gradient of what is attended to, that of queries, keys and values."""
    query, key, value = arrays
    scores, kept, factors = of_scores
    d_query, d_key, d_value = found = torch.empty_like(arrays)
    d_attended = gradient.view(-1, arrays.shape[2])
    if layer.first_only:
        d_query.zero_()
    else:
        d_attended = d_attended.index_select(0, rows.apart)
    d_scores = torch.empty_like(scores)
    sizes = [span.attending * layer.asked(span) for span in rows.spans]
    parts = torch.split(d_attended, sizes)
    of_kept, of_d_scores = layer.views(kept, rows), layer.views(d_scores, rows)
    for span, part, mine, d_mine in zip(rows.spans, parts, of_kept, of_d_scores, strict=True):
        d_out = part.view(span.attending, -1, arrays.shape[2])
        torch.bmm(mine.transpose(1, 2), d_out, out=span.of(d_value))
        torch.bmm(d_out, span.of(value).transpose(1, 2), out=d_mine)
    if factors is not None:
        d_scores.mul_(factors)
    for span, mine, d_mine in zip(rows.spans, layer.views(scores, rows), of_d_scores, strict=True):
        d_mine = torch.ops.aten._softmax_backward_data(d_mine, mine, -1, mine.dtype)
        layer.asking(span.of(d_query)).copy_(d_mine.bmm(span.of(key)))
        torch.bmm(d_mine.transpose(1, 2), layer.asking(span.of(query)), out=span.of(d_key))
    return found
