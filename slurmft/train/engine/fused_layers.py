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
import math
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
_ALIGNMENT = 32
"""Dropouts begin at multiples of it in the bank, where memory is aligned."""


# --- where tokens are -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences that attention pads to one length, in arrays that hold all of them, flat."""

    attending: int
    """Number of sequences x heads."""
    length: int
    start: int
    """The first of its places in an array."""
    mask: Tensor | None
    """Added to its scores: 0 or -inf, (sequences x heads, 1, length)."""

    def of(self, array: Tensor) -> Tensor:
        """Returns its part of an array: (sequences x heads, length, head size)."""
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
    """Number of rows: at least one is no token."""
    firsts: Tensor
    """Row of each sequence's first token: int64, (sequences,)."""
    spans: list[Span]
    places: int
    """Number of rows of an array."""
    apart: Tensor
    """Which of (count x heads) parts of rows is in each place: int64, (places,)."""
    apart_in: Tensor
    """Which of (count x 3 x heads) parts is in each place of all three arrays: int64,
    (3 x places,)."""
    together: Tensor
    """In which place each of (tokens x heads) is: int64."""
    together_in: Tensor
    """In which of all arrays' places each of (tokens x 3 x heads) is: int64."""

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[int]],
        heads: int,
        dtype: torch.dtype,
    ) -> "Rows":
        """Lays out the rows of a batch.

        Args:
            groups: lengths of the sequences, sorted, in the groups that are padded to one length.
            dtype: type of what is computed.
        """
        multiple = _VECTOR_BYTES // dtype.itemsize
        sizes = torch.tensor(list(itertools.chain(*groups)))
        # All tokens of the sequences before it.
        starts = sizes.cumsum(0) - sizes
        tokens = int(sizes.sum())
        spans = []
        row_parts = []  # of each place, the row that it is a part of
        head_parts = []  # and the head
        place_parts = []  # of each token and head, the place
        places = 0
        sequences = 0
        for group in groups:
            length = math.ceil(group[-1] / multiple) * multiple
            count = len(group)
            of_group = slice(sequences, sequences + count)
            at = torch.arange(length)
            is_token = at < sizes[of_group, None]
            # Padding is a row that is no token, the one behind the last.
            row = torch.where(is_token, starts[of_group, None] + at, tokens)
            row_of_heads = row[:, None, :].expand(-1, heads, -1)
            row_parts.append(row_of_heads.flatten())
            head = torch.arange(heads).repeat_interleave(length)
            head_parts.append(head.repeat(count))
            size = count * heads * length
            place = torch.arange(places, places + size).view(count, heads, length)
            # In the order of the rows: token by token, and its heads side by side.
            place_parts.append(place.transpose(1, 2)[is_token])
            mask = _mask_of(is_token, heads)
            spans.append(Span(count * heads, length, places, mask))
            places += size
            sequences += count
        row = torch.cat(row_parts)
        head = torch.cat(head_parts)
        place = torch.cat(place_parts)
        array = torch.arange(3)[:, None]  # of queries, keys, values
        return cls(
            tokens=tokens,
            # More than the tokens: padding reads the row behind the last one.
            count=(tokens // _ROWS + 1) * _ROWS,
            firsts=starts,
            spans=spans,
            places=places,
            apart=row * heads + head,
            # The product that makes all three has them side by side: (rows, 3, heads, head size).
            apart_in=((row * 3 + array) * heads + head).flatten(),
            together=place.flatten(),
            together_in=(place[:, None, :] + array * places).flatten(),
        )


def _mask_of(is_token: Tensor, heads: int) -> Tensor | None:
    """Returns the mask of a span: 0 or -inf, (sequences x heads, 1, length)."""
    if is_token.all():
        return None
    mask = torch.zeros(is_token.shape)
    mask.masked_fill_(~is_token, -torch.inf)
    return mask.repeat_interleave(heads, 0)[:, None, :]


# --- dropout --------------------------------------------------------------------------------------


class Dropouts:
    """Factors of dropout, 0 or 1 / (1 - p): drawn once for a batch, used by all of its layers.

    So a layer that is computed again draws the same. Every dropout takes a piece that begins at a
    random place: what one drops says nothing of what another drops of the same token.

    Args:
        probabilities: p of all dropouts.
        size: size of the largest piece.
        dtype: type of the factors.
    """

    def __init__(
        self,
        probabilities: Iterable[float],
        size: int,
        dtype: torch.dtype,
    ) -> None:
        count = _BANK * size + _ALIGNMENT
        self._banks: dict[float, Tensor] = {}
        for p in sorted(set(probabilities)):
            if p:
                self._banks[p] = draw_factors(count, p, dtype)

    def take(self, p: float, *shape: int) -> Tensor | None:
        """Returns factors of this shape, a view; None: nothing is dropped."""
        if p not in self._banks:  # 0, or an evaluation
            return None
        bank = self._banks[p]
        size = math.prod(shape)
        starts = (len(bank) - size) // _ALIGNMENT + 1
        # From torch's generator, which checkpoints hold: a resumed run draws the same.
        start = int(torch.randint(starts, ())) * _ALIGNMENT
        return bank[start : start + size].view(shape)


# --- layers ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Layer:
    """Modules of a layer, and what it computes with them."""

    linear: tuple[nn.Linear, ...]
    """Linear modules of queries, keys and values; out, up, down."""
    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    """The norm behind attention, and the last."""
    heads: int
    scaling: float
    """Factor of the scores."""
    p_scores: float
    p_out: float
    p_down: float
    first_only: bool = False
    """It is the last layer, and only first tokens' outputs are wanted."""

    def parameters(self) -> list[Tensor]:
        """Returns weight and bias of each module."""
        modules: tuple[Any, ...] = (*self.linear, *self.norms)
        parameters: list[Tensor] = []
        for module in modules:
            parameters += (module.weight, module.bias)
        return parameters

    def query_count(self, span: Span) -> int:
        """Returns the number of queries of a sequence."""
        if self.first_only:
            return 1
        return span.length

    def queries(self, array: Tensor) -> Tensor:
        """Returns the queries among (sequences x heads, length, head size)."""
        if self.first_only:
            return array[:, :1]
        return array

    def score_count(self, span: Span) -> int:
        """Returns the number of attention scores of a span."""
        return span.attending * self.query_count(span) * span.length

    def views(self, scores: Tensor, rows: Rows) -> list[Tensor]:
        """Divides flat scores by span: (sequences x heads, queries, keys) each."""
        parts = torch.split(scores, [self.score_count(span) for span in rows.spans])
        views = []
        for span, part in zip(rows.spans, parts, strict=True):
            views.append(part.view(span.attending, -1, span.length))
        return views

    def copies(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns weights and biases of in (query, key, value as one), out, up, down, rounded.

        The weight and bias of queries have the scaling of the scores. Copies are made for every
        batch: what fused optimizers change has the same version as before.
        """
        # of six modules; the norms compute with fp32 weights
        linear = self.parameters()[:12]
        # Scaled before rounding, so that scores need no multiplication of their own.
        query_weight = linear[0] * self.scaling
        query_bias = linear[1] * self.scaling
        in_weight = torch.cat([query_weight, linear[2], linear[4]])
        in_bias = torch.cat([query_bias, linear[3], linear[5]])
        # From the seventh on: weight and bias of out, up and down.
        joined = [in_weight, in_bias, *linear[6:]]
        return [each.to(dtype) for each in joined]


def layer_of(module: Any) -> Layer | None:
    """Returns the parts of a layer of transformers; None: it is none that is known here."""
    for parts in (_of_bert, _of_distilbert):
        with contextlib.suppress(AttributeError):
            activation, layer = parts(module)
            if _is_known(activation, layer):
                return layer
            # It has the names of this kind, and so lacks those of the other.
            break
    return None


def _is_known(activation: Any, layer: Layer) -> bool:
    """Returns whether a layer computes what is computed here."""
    # By its values: GELU has several classes, and approximations that are named like it.
    x = torch.linspace(-4, 4, 9)
    if not torch.equal(activation(x), gelu(x)):
        return False
    # By exact type: a subclass, such as an adapter or a quantized layer, computes otherwise.
    kinds = [type(module) for module in (*layer.linear, *layer.norms)]
    if kinds != [nn.Linear] * 6 + [nn.LayerNorm] * 2:
        return False
    if any(each is None for each in layer.parameters()):  # a module without a bias
        return False
    # One product makes all three, of which `_apart` takes heads of one size.
    query, _, value, *_ = layer.linear
    return query.out_features == value.out_features


def _of_bert(module: Any) -> tuple[Any, Layer]:
    """Returns the activation of a layer, and its parts; AttributeError where it is another kind."""
    if module.is_decoder:
        raise AttributeError("causal attention")
    attention = module.attention.self
    out = module.attention.output
    up = module.intermediate
    down = module.output
    return up.intermediate_act_fn, Layer(
        linear=(
            attention.query,
            attention.key,
            attention.value,
            out.dense,
            up.dense,
            down.dense,
        ),
        norms=(out.LayerNorm, down.LayerNorm),
        heads=attention.num_attention_heads,
        scaling=attention.scaling,
        p_scores=attention.dropout.p,
        p_out=out.dropout.p,
        p_down=down.dropout.p,
    )


def _of_distilbert(module: Any) -> tuple[Any, Layer]:
    attention = module.attention
    ffn = module.ffn
    inputs = (attention.q_lin, attention.k_lin, attention.v_lin)
    return ffn.activation, Layer(
        linear=(*inputs, attention.out_lin, ffn.lin1, ffn.lin2),
        norms=(module.sa_layer_norm, module.output_layer_norm),
        heads=attention.n_heads,
        scaling=attention.scaling,
        p_scores=attention.dropout.p,
        # DistilBERT drops nothing between attention and its norm.
        p_out=0.0,
        p_down=ffn.dropout.p,
    )


def run(
    layers: Sequence[Layer],
    x: Tensor,
    rows: Rows,
    training: bool,
    again: bool,
) -> Tensor:
    """Computes all layers; the last one may return first tokens alone.

    Args:
        x: hidden states: (rows, hidden).
        again: keep no activations; layers are computed again for their backward passes.
    """
    # Of the first layer: the last one may compute fewer, those of first tokens alone.
    scores = sum(layers[0].score_count(span) for span in rows.spans)
    probabilities: list[float] = []
    if training:
        for layer in layers:
            probabilities += (layer.p_scores, layer.p_out, layer.p_down)
    dropouts = Dropouts(probabilities, max(x.numel(), scores), x.dtype)
    for layer in layers:
        # Of frozen layers nothing is kept. Within the function gradients are always off.
        weights = layer.parameters()
        has_gradients = x.requires_grad or any(p.requires_grad for p in weights)
        keep = torch.is_grad_enabled() and has_gradients
        call: Any = functools.partial(_Fused.apply, rows, layer, dropouts, keep)
        if again and training:
            x = checkpoint(call, x, *weights, use_reentrant=False)
        else:
            x = call(x, *weights)
    return x


class _Fused(torch.autograd.Function):
    """One layer: (rows, hidden) -> (rows, hidden), or (sequences, hidden) of first tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Rows,
        layer: Layer,
        dropouts: Dropouts,
        keep: bool,
        x: Tensor,
        *_: Tensor,
    ) -> Tensor:
        """
        Args:
            keep: keep what a backward pass needs.
        """
        # The parameters are arguments for autograd's sake: their values are read from the modules.
        w_in, b_in, w_out, b_out, w_up, b_up, w_down, b_down = layer.copies(x.dtype)
        arrays = _apart(_linear(x, w_in, b_in), rows, layer)
        attended, *of_scores = _attend(arrays, rows, layer, dropouts)
        out = _linear(attended, w_out, b_out)
        out_factors = dropouts.take(layer.p_out, *out.shape)
        residual = x
        if layer.first_only:
            residual = x[rows.firsts]
        a_sum = _add(residual, out, out_factors)
        a, a_mean, a_rstd = _norm(a_sum, layer.norms[0])
        if keep:  # the backward pass needs what GELU gets
            inner = _linear(a, w_up, b_up)
            active = gelu(inner)
        else:
            active = _linear(a, w_up, b_up, "gelu")
        down = _linear(active, w_down, b_down)
        down_factors = dropouts.take(layer.p_down, *down.shape)
        y_sum = _add(a, down, down_factors)
        y, y_mean, y_rstd = _norm(y_sum, layer.norms[1])
        if not keep:
            return y
        ctx.rows = rows
        ctx.layer = layer
        # Not as attributes: checkpointing takes over only what is saved by this call.
        ctx.save_for_backward(
            w_in,
            w_out,
            w_up,
            w_down,
            x,
            arrays,
            attended,
            out_factors,
            a_sum,
            a,
            a_mean,
            a_rstd,
            inner,
            active,
            down_factors,
            y_sum,
            y_mean,
            y_rstd,
            *of_scores,
        )
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.rows
        layer = ctx.layer
        (
            w_in,
            w_out,
            w_up,
            w_down,
            x,
            arrays,
            attended,
            out_factors,
            a_sum,
            a,
            a_mean,
            a_rstd,
            inner,
            active,
            down_factors,
            y_sum,
            y_mean,
            y_rstd,
            *of_scores,
        ) = ctx.saved_tensors
        d_sum, *of_last_norm = _norm_backward(
            gradients[0],
            y_sum,
            y_mean,
            y_rstd,
            layer.norms[1],
        )
        d_down = _dropped(d_sum, down_factors)
        of_down = _of_linear(d_down, active)
        d_inner = torch.ops.aten.gelu_backward(d_down @ w_down, inner)
        of_up = _of_linear(d_inner, a)
        # in place: the residual's gradient is added here
        d_a = d_sum.addmm_(d_inner, w_up)
        d_sum, *of_norm = _norm_backward(d_a, a_sum, a_mean, a_rstd, layer.norms[0])
        d_out = _dropped(d_sum, out_factors)
        of_out = _of_linear(d_out, attended)
        d_arrays = _attend_backward(d_out @ w_out, arrays, of_scores, rows, layer)
        part_count = rows.count * 3 * layer.heads
        d_parts = _together(d_arrays.flatten(0, 1), rows.together_in, part_count)
        d_in = d_parts.view(rows.count, -1)
        weight, bias = _of_linear(d_in, x)
        of_in = list(zip(weight.chunk(3), bias.chunk(3), strict=True))
        # of queries, whose copies had the scaling of the scores
        for gradient in of_in[0]:
            gradient.mul_(layer.scaling)
        if layer.first_only:  # other tokens have a part in keys and values alone
            d_x = d_in @ w_in
            d_x.index_add_(0, rows.firsts, d_sum)
        else:
            d_x = d_sum.addmm_(d_in, w_in)
        of_linear: list[Tensor] = []
        for of_weight_and_bias in (*of_in, of_out, of_up, of_down):
            of_linear += of_weight_and_bias
        # In the order of the inputs: the first four have no gradients.
        return None, None, None, None, d_x, *of_linear, *of_norm, *of_last_norm


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: str = "none",
) -> Tensor:
    """Computes a linear layer, and "gelu" after it, or "none"."""
    # bias and activation as it computes; addmm begins with a copy of bias
    if _by_onednn(x.dtype):
        fused: Tensor = torch.ops.mkldnn._linear_pointwise(
            x,
            weight,
            bias,
            activation,
            [],
            "none",
        )
        return fused
    output = torch.addmm(bias, x, weight.t())
    if activation == "gelu":
        output = gelu(output)
    return output


@functools.cache
def _by_onednn(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN computes products of this type here.

    fp32 is left to the BLAS library.
    """
    if dtype != torch.bfloat16:
        return False
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(is_built and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _add(x: Tensor, y: Tensor, factors: Tensor | None) -> Tensor:
    """Returns x + dropout(y)."""
    if factors is None:
        return x + y
    return torch.addcmul(x, y, factors)


def _dropped(x: Tensor, factors: Tensor | None) -> Tensor:
    """Returns dropout(x), and of a gradient its backward pass."""
    if factors is None:
        return x
    return x * factors


def _norm(x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(
        x,
        norm.normalized_shape,
        norm.weight,
        norm.bias,
        norm.eps,
    )


def _norm_backward(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm: nn.LayerNorm,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = (
        torch.ops.aten.native_layer_norm_backward(
            gradient,
            x,
            norm.normalized_shape,
            mean,
            rstd,
            norm.weight,
            norm.bias,
            # The gradients of all three are made: of input, weight and bias.
            [True, True, True],
        )
    )
    return gradients


def _of_linear(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of weight and bias, in fp32."""
    # a product sums bf16 faster than torch's sum
    ones = gradient.new_ones(1, len(gradient))
    of_bias = (ones @ gradient).squeeze(0).float()
    return _of_weight(gradient, x), of_bias


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of a weight, in fp32: (outputs, inputs).

    For AMX, oneDNN blocks products well only where the first factor is stored by rows; one that is
    transposed it packs again for every few columns of the second. So the narrower one is copied.
    """
    if x.dtype == torch.float32:
        return gradient.t() @ x
    if gradient.shape[1] <= x.shape[1]:
        gradient_by_rows = gradient.t().contiguous()
        return (gradient_by_rows @ x).float()
    x_by_rows = x.t().contiguous()
    transposed = x_by_rows @ gradient
    return transposed.t().contiguous().float()


# --- attention ------------------------------------------------------------------------------------


def _apart(qkv: Tensor, rows: Rows, layer: Layer) -> Tensor:
    """Returns queries, keys and values, (3, places, head size), of (rows, 3 x hidden)."""
    parts = qkv.view(rows.count * 3 * layer.heads, -1)
    in_places = parts.index_select(0, rows.apart_in)
    return in_places.view(3, rows.places, -1)


def _together(array: Tensor, places: Tensor, count: int) -> Tensor:
    """Returns what is in places, and zeros up to a count: (count, head size)."""
    whole = array.new_empty(count, array.shape[1])
    torch.index_select(array, 0, places, out=whole[: len(places)])  # without a copy
    whole[len(places) :].zero_()
    return whole


def _attend(
    arrays: Tensor,
    rows: Rows,
    layer: Layer,
    dropouts: Dropouts,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes attention.

    Args:
        arrays: queries, keys and values: (3, places, head size).

    Returns:
        The states, (rows, hidden) or (sequences, hidden); and, flat, the scores after softmax, the
        scores after dropout, and the factors of dropout.
    """
    query, key, value = arrays
    # One flat tensor of all spans' scores, so that one dropout serves them.
    score_count = sum(layer.score_count(span) for span in rows.spans)
    scores = arrays.new_empty(score_count)
    for span, of_span in zip(rows.spans, layer.views(scores, rows), strict=True):
        queries = layer.queries(span.of(query))
        keys = span.of(key).transpose(1, 2)
        if span.mask is None:
            torch.bmm(queries, keys, out=of_span)
        else:
            # The product is added to what is there: the mask costs no pass of its own.
            of_span.copy_(span.mask.expand_as(of_span))
            of_span.baddbmm_(queries, keys)
        torch.softmax(of_span, -1, out=of_span)
    factors = dropouts.take(layer.p_scores, len(scores))
    kept = _dropped(scores, factors)
    states = []
    for span, of_span in zip(rows.spans, layer.views(kept, rows), strict=True):
        of_sequences = of_span.bmm(span.of(value))
        states.append(of_sequences.flatten(0, 1))
    attended = torch.cat(states)
    if not layer.first_only:
        attended = _together(attended, rows.together, rows.count * layer.heads)
    hidden = layer.heads * arrays.shape[2]
    return attended.view(-1, hidden), scores, kept, factors


def _attend_backward(
    gradient: Tensor,
    arrays: Tensor,
    of_scores: list[Any],
    rows: Rows,
    layer: Layer,
) -> Tensor:
    """Returns the gradient of queries, keys and values, from that of the attended states.

    Args:
        of_scores: what `_attend` returned besides the states.
    """
    query, key, value = arrays
    scores, kept, factors = of_scores
    d_arrays = torch.empty_like(arrays)
    d_query, d_key, d_value = d_arrays
    d_attended = gradient.view(-1, arrays.shape[2])
    if layer.first_only:
        d_query.zero_()  # of tokens that are no queries
    else:
        d_attended = d_attended.index_select(0, rows.apart)
    d_scores = torch.empty_like(scores)
    sizes = [span.attending * layer.query_count(span) for span in rows.spans]
    parts = torch.split(d_attended, sizes)
    kept_views = layer.views(kept, rows)
    d_views = layer.views(d_scores, rows)
    pieces = zip(rows.spans, parts, kept_views, d_views, strict=True)
    for span, part, of_span, d_span in pieces:
        # Of states = scores @ values: the gradients of both factors.
        d_out = part.view(span.attending, -1, arrays.shape[2])
        torch.bmm(of_span.transpose(1, 2), d_out, out=span.of(d_value))
        torch.bmm(d_out, span.of(value).transpose(1, 2), out=d_span)
    if factors is not None:
        d_scores.mul_(factors)
    score_views = layer.views(scores, rows)
    for span, of_span, d_span in zip(rows.spans, score_views, d_views, strict=True):
        # Of s = softmax: s (d - sum(s d)), d being the gradient of s.
        d_span = torch.ops.aten._softmax_backward_data(
            d_span,
            of_span,
            -1,
            of_span.dtype,
        )
        # Of scores = queries @ keys.T; the scaling is in the queries' weight already.
        queries = layer.queries(span.of(query))
        d_queries = layer.queries(span.of(d_query))
        d_queries.copy_(d_span.bmm(span.of(key)))
        torch.bmm(d_span.transpose(1, 2), queries, out=span.of(d_key))
    return d_arrays
