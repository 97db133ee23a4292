"""Batches without padding: embeddings and layers see real tokens alone, attention each sequence.

A batch of B sequences, padded to length L, holds T real tokens. Up to its head, a packed model
works on hidden states of shape (1, T, hidden): embeddings, linear layers, norms and dropouts have
no padding to compute. Only inside attention are sequences set apart again, in groups of near length
that are padded each to its own longest. Where a head looks at the first token alone, as that of a
classifier does, the last layer computes no other beyond its keys and values. Outputs and gradients
are those of the padded batch, up to rounding. On CPUs whole layers are fused, see `fused_layers`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from slurmft.train import fused_layers
from slurmft.train.cpu import dropout as drop
from slurmft.train.fused_layers import Layer, Rows, layer_of

NAME = "slurmft_packed"
"""Under which transformers knows the attention function."""

ENCODERS = ("encoder", "transformer")
"""What transformers' models call the module that all layers are in."""

FIRST_TOKEN_ONLY = "slurmft_first_token_only"
"""Attribute of an attention module of which only first tokens' outputs are wanted."""

_SAME = 1e-4
"""Largest difference of outputs that is rounding, relative to the largest output."""

GROUPS = 4
"""Groups of near length in a batch, at most: more of them save padding, and cost calls."""

_SHORT = 512
"""On CPUs, attention to so many tokens holds its scores in memory: torch's own is slower."""


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive sequences of the packed tokens that are padded to one length in attention."""

    start: int
    end: int
    """Its tokens are [start, end) of the packed ones."""
    sequences: int
    length: int
    """Of the longest."""
    places: Tensor | None
    """Where each token is in (sequences x length): int64, (end - start,). None: all are full."""
    mask: Tensor | None
    """Which places hold a token: bool, (sequences, 1, 1, length). None: all."""
    firsts: Tensor
    """Which of its tokens is the first of each sequence: int64, (sequences,)."""


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a padded batch are among the packed ones."""

    places: Tensor
    """Place in (B x L) of each packed token: int64, (T,)."""
    shape: tuple[int, int]
    """(B, L)."""
    lengths: list[list[int]]
    """Of the sequences, sorted, in groups of near length."""
    firsts: Tensor
    """Which packed token is the first of each sequence: int64, (B,)."""
    device: torch.device

    @functools.cached_property
    def groups(self) -> list[Group]:
        return _groups(self.lengths, self.device)

    @classmethod
    def of(cls, mask: Tensor, device: torch.device) -> Layout:
        """The layout of a batch, from its attention mask: (B, L), 1 for tokens, which come first.

        The sequences are packed in the order of their lengths: near ones are neighbours.

        Args:
            mask: on the CPU, or making the layout waits for its device.
            device: where the model computes.
        """
        lengths, order = mask.cpu().sum(1).sort(stable=True)
        batch, width = mask.shape
        column = torch.arange(width)
        places = (order[:, None] * width + column)[column < lengths[:, None]]
        firsts = lengths.cumsum(0) - lengths
        parts, where = _split(lengths.tolist()), (batch, width)
        return cls(_sent(places, device), where, parts, _sent(firsts, device), device)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _groups(lengths: list[list[int]], device: torch.device) -> list[Group]:
    """The groups of sequences that are sorted by length."""
    groups, start = [], 0
    for part in lengths:
        longest, sizes = part[-1], torch.tensor(part)
        tokens = sum(part)
        places = mask = None
        if tokens < len(part) * longest:
            valid = torch.arange(longest) < sizes[:, None]
            places = _sent(valid.flatten().nonzero().squeeze(1), device)
            mask = _sent(valid[:, None, None, :], device)
        firsts = _sent(sizes.cumsum(0) - sizes, device)
        groups.append(Group(start, start + tokens, len(part), longest, places, mask, firsts))
        start += tokens
    return groups


def _split(lengths: list[int]) -> list[list[int]]:
    """Sorted lengths in at most `GROUPS` parts of nearly equal size."""
    size = -(-len(lengths) // GROUPS)
    return [lengths[i : i + size] for i in range(0, len(lengths), size)]


class _Spread(torch.autograd.Function):
    """Backwards, it takes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(total, *rows.shape[1:]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class _Take(torch.autograd.Function):
    """Backwards, it spreads: index_select's own backward adds up, for places that come twice, and
    is slow."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.total = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0]
        (places,) = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.total, *gradient.shape[1:])
        return whole.index_copy_(0, places, gradient), None


def spread(rows: Tensor, places: Tensor, total: int) -> Tensor:
    """Rows at places among zeros: (n, ...) -> (total, ...)."""
    whole: Tensor = _Spread.apply(rows, places, total)  # type: ignore[no-untyped-call]
    return whole


def take(rows: Tensor, places: Tensor) -> Tensor:
    """The rows at places, no place twice: (total, ...) -> (n, ...)."""
    taken: Tensor = _Take.apply(rows, places)  # type: ignore[no-untyped-call]
    return taken


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each sequence to itself; the interface is that of transformers.

    Args:
        module: where it has `FIRST_TOKEN_ONLY`, only first tokens attend; the others get zeros.
        query, key, value: (1, heads, T, head size).
        layout: in place of a mask.

    Returns:
        (1, T, heads, head size), and no weights.
    """
    rows = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    first_token_only = getattr(module, FIRST_TOKEN_ONLY, False)
    parts = [
        _group_attention(rows, group, dropout, scaling, first_token_only) for group in layout.groups
    ]
    return torch.cat(parts).unsqueeze(0), None


def _group_attention(
    rows: list[Tensor], group: Group, dropout: float, scaling: float | None, first_token_only: bool
) -> Tensor:
    """Attention within the sequences of a group: (tokens, heads, head size)."""
    size = group.sequences * group.length

    def apart(x: Tensor) -> Tensor:
        tokens = x[group.start : group.end]
        if group.places is not None:
            tokens = spread(tokens, group.places, size)
        return tokens.reshape(group.sequences, group.length, *tokens.shape[1:]).transpose(1, 2)

    query, key, value = map(apart, rows)
    if first_token_only:
        query = query[:, :, :1]
    attended = _attend(query, key, value, group.mask, dropout, scaling)
    flat = attended.transpose(1, 2).flatten(0, 1)
    if first_token_only:
        return spread(flat, group.firsts, group.end - group.start)
    return flat if group.places is None else take(flat, group.places)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Attention of padded sequences: all (sequences, heads, length, head size).

    torch's own is slow backwards on CPUs, and slower with dropout; every sequence has tokens, so no
    row of its mask needs the care that it takes of rows without any.
    """
    if query.device.type != "cpu" or key.shape[2] > _SHORT:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min / 2
        scores = scores + scores.new_zeros(mask.shape).masked_fill_(~mask, lowest)
    return torch.matmul(drop(scores.softmax(-1), dropout), value)


class Packing:
    """A model of transformers that computes without padding."""

    def __init__(self, model: Any, encoder: Any) -> None:
        self.model, self.encoder = model, encoder
        self.is_first_token_only = False
        self.layers: list[Layer] = []
        """What computes batches of short sequences; none: the encoder does by itself."""
        self._expected: Layout | None = None
        self._current: Layout | None = None
        self._of_model = model.config._attn_implementation, encoder.forward
        model.config._attn_implementation = NAME
        encoder.forward = self._without_padding

    def expect(self, mask: Tensor, device: torch.device) -> None:
        """Lays out the batch that the model gets next, from its mask on the CPU.

        A model that got none finds it out by itself, which makes the CPU wait for a GPU.
        """
        self._expected = Layout.of(mask, device)

    def compute_first_only(self) -> bool:
        """Makes the last layer compute nothing for a sequence's other tokens, where this is known
        to be possible and no output of the model depends on them; returns whether it is so."""
        last = self.encoder.layer[-1] if hasattr(self.encoder, "layer") else None
        parts = _first_only_parts(last)
        before = _sample_logits(self.model)
        if parts is None or before is None:
            return False
        attends, narrows = parts
        self._narrow(attends, narrows)
        after = _sample_logits(self.model)
        if after is not None and _is_same(before, after):
            return True
        self.is_first_token_only = False
        delattr(attends, FIRST_TOKEN_ONLY)
        del narrows.forward
        return False

    def _narrow(self, attends: Any, narrows: Any) -> None:
        """From the module `narrows` of the last layer on, first tokens alone."""
        setattr(attends, FIRST_TOKEN_ONLY, True)
        forward = narrows.forward
        self.is_first_token_only = True

        @functools.wraps(forward)
        def narrowed(*rows: Tensor) -> Any:
            assert self._current is not None  # set for backward too, which may compute it again
            firsts = self._current.firsts
            return forward(*(take(each.squeeze(0), firsts).unsqueeze(0) for each in rows))

        narrows.forward = narrowed

    def pack_embeddings(self) -> bool:
        """Lets the embeddings, too, see real tokens alone in batches that are announced, where this
        gives the same; returns whether so."""
        embeddings: Any = getattr(self.model.base_model, "embeddings", None)
        table = getattr(embeddings, "position_embeddings", None)
        if not isinstance(table, torch.nn.Embedding):
            return False
        before = _sample_states(self.model)
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        embeddings.forward = self._packed_embeddings(embeddings.forward, first)
        self.expect(_sample(self.model)["attention_mask"], self.model.device)
        with contextlib.suppress(Exception):  # whatever a model does with what it does not expect
            if _is_same(before, _sample_states(self.model)):
                return True
        self._expected = None
        del embeddings.forward
        return False

    def _packed_embeddings(self, forward: Callable[..., Tensor], first: int) -> Any:
        """
        Args:
            forward: of the embeddings.
            first: position of a sequence's first token in their table.
        """
        signature = inspect.signature(forward)
        longest = self.model.base_model.embeddings.position_embeddings.num_embeddings - first

        @functools.wraps(forward)
        def packed(*arguments: Any, **named: Any) -> Tensor:
            layout, given = self._expected, signature.bind(*arguments, **named)
            ids = given.arguments.get("input_ids")
            if layout is None or ids is None or given.arguments.get("position_ids") is not None:
                return forward(*arguments, **named)
            types = given.arguments.get("token_type_ids")
            for name, value in (("input_ids", ids), ("token_type_ids", types)):
                if name in signature.parameters:  # a model's own default may be too short for all
                    value = torch.zeros_like(ids) if value is None else value
                    given.arguments[name] = value.flatten()[layout.places][None]
            if layout.shape[1] > longest:  # on a GPU the lookup would say nothing of it
                raise ValueError(
                    f"a text of {layout.shape[1]} tokens is longer than the {longest} positions of "
                    f"the model: train with --max-length {longest}"
                )
            positions = layout.places % layout.shape[1] + first
            given.arguments["position_ids"] = positions[None]
            return forward(*given.args, **given.kwargs)

        return packed

    def fuse(self) -> bool:
        """Lets fused layers compute, where they are known and give the same; returns whether so.
        After `compute_first_only`."""
        layers = [layer_of(module) for module in getattr(self.encoder, "layer", ())]
        before = _sample_states(self.model)
        self.layers = [layer for layer in layers if layer]
        if self.layers:
            self.layers[-1].first_only = self.is_first_token_only
        if len(self.layers) < len(layers) or not _is_same(before, _sample_states(self.model)):
            self.layers = []
        return bool(self.layers)

    def undo(self) -> None:
        """Makes the model what it was; not after `compute_first_only`."""
        self.model.config._attn_implementation = self._of_model[0]
        del self.encoder.forward

    def _without_padding(self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        """The encoder's forward: drops the padding on entry, and puts zeros there at its end."""
        layout = self._expected or Layout.of(attention_mask, attention_mask.device)
        self._expected, self._current = None, layout
        packed = hidden_states.flatten(0, 1)
        if hidden_states.shape[:2] == layout.shape:  # the embeddings had padding
            packed = take(packed, layout.places)
        if self.layers and layout.lengths[-1][-1] <= _SHORT:
            output = BaseModelOutputWithPastAndCrossAttentions()
            states = self._by_fused_layers(packed, layout)
        else:
            output = self._of_model[1](packed.unsqueeze(0), attention_mask=layout, **kwargs)
            states = output.last_hidden_state.squeeze(0)
        batch, width = layout.shape
        places = layout.places[layout.firsts] if self.is_first_token_only else layout.places
        output.last_hidden_state = spread(states, places, batch * width).view(batch, width, -1)
        return output

    def _by_fused_layers(self, packed: Tensor, layout: Layout) -> Tensor:
        """(T, hidden) -> (T, hidden), or (B, hidden) of first tokens."""
        on = packed.device.type
        autocast = torch.is_autocast_enabled(on)
        dtype = torch.get_autocast_dtype(on) if autocast else packed.dtype
        rows = Rows.of(layout.lengths, self.layers[0].heads, dtype)
        padded = torch.nn.functional.pad(packed.to(dtype), (0, 0, 0, rows.count - len(packed)))
        again = getattr(self.encoder.layer[0], "gradient_checkpointing", False)
        states = fused_layers.run(self.layers, padded, rows, self.model.training, again)
        return states if self.is_first_token_only else states[: rows.tokens]


def pack(model: Any, fuse: bool = True) -> Packing | str:
    """Makes a model of transformers compute without padding, where it can be.

    A model that is not known is tried out: its outputs must be what they were.

    Args:
        fuse: let fused layers compute, where they can; for CPUs.

    Returns:
        A text where it cannot: why.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    encoder = _encoder(model)
    if encoder is None or not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} cannot work without padding"
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    before = _sample_states(model)
    packing = Packing(model, encoder)
    try:
        after = _sample_states(model)
    except Exception as error:  # whatever a model does with what it does not expect
        cause = f"{type(error).__name__}: {error}"
    else:
        if _is_same(before, after):
            packing.compute_first_only()
            packing.pack_embeddings()
            if fuse:
                packing.fuse()
            return packing
        cause = f"outputs differ by {float((after - before).abs().max()):.2g}"
    packing.undo()
    return f"{type(model).__name__} gives other outputs without padding ({cause})"


def _is_same(before: Tensor, after: Tensor) -> bool:
    """Whether outputs differ by rounding alone."""
    difference = float((after - before).abs().max())
    return difference <= _SAME * max(1.0, float(before.abs().max()))


def _encoder(model: Any) -> Any:
    """The module that all layers are in; None: there is none under a name that we know."""
    encoders = (getattr(model.base_model, name, None) for name in ENCODERS)
    return next((encoder for encoder in encoders if encoder is not None), None)


def _first_only_parts(layer: Any) -> tuple[Any, Any] | None:
    """Of a layer, the module that attends, and the first one after it; all that follows works on
    each token by itself. None: a layer that we do not know."""
    attends: Any = getattr(layer, "attention", None)
    if hasattr(attends, "self") and hasattr(attends, "output"):  # BERT and its relatives
        return attends.self, attends.output
    if hasattr(layer, "sa_layer_norm"):  # DistilBERT
        return attends, layer.sa_layer_norm
    return None


def _sample_states(model: Any) -> Tensor:
    """Hidden states of the tokens of three short sequences: (tokens, hidden)."""
    inputs = _sample(model)
    with _evaluating(model):
        output = model.base_model(**inputs).last_hidden_state
    kept: Tensor = output[inputs["attention_mask"].bool()]
    return kept


def _sample_logits(model: Any) -> Tensor | None:
    """Logits of three short sequences; None: the model has no such output."""
    with _evaluating(model):
        return getattr(model(**_sample(model)), "logits", None)


def _sample(model: Any) -> dict[str, Tensor]:
    lengths, width = torch.tensor([5, 9, 2]), 9
    mask = torch.arange(width) < lengths[:, None]
    tokens = torch.arange(3 * width).view(3, width) % (model.config.vocab_size - 2) + 2
    tokens = tokens.masked_fill(~mask, model.config.pad_token_id or 0)
    return {"input_ids": tokens, "attention_mask": mask.long()}


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def _mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """What a packed encoder gets in place of transformers' masks: the batch's own."""
    return attention_mask
