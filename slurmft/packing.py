"""Batches without padding: the encoder's layers see real tokens alone, attention each sequence.

A batch of B sequences, padded to length L, holds T real tokens. Between its embeddings and its
head, a packed model works on hidden states of shape (1, T, hidden): linear layers, norms and
dropouts have no padding to compute. Only inside attention are sequences set apart again, in groups
of near length that are padded each to its own longest. Outputs and gradients are those of the
padded batch, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "slurmft_packed"
"""Under which transformers knows the attention function."""

ENCODERS = ("encoder", "transformer")
"""What transformers' models call the module that all layers are in."""

_SAME = 1e-4
"""Largest difference of outputs that is rounding, relative to the largest output."""

GROUPS = 4
"""Groups of near length in a batch, at most: more of them save padding, and cost calls."""


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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a padded batch are among the packed ones."""

    places: Tensor
    """Place in (B x L) of each packed token: int64, (T,)."""
    shape: tuple[int, int]
    """(B, L)."""
    groups: list[Group]

    @classmethod
    def of(cls, mask: Tensor) -> Layout:
        """The layout of a batch, from its attention mask: (B, L), 1 for tokens, which come first.

        The sequences are packed in the order of their lengths: near ones are neighbours.
        """
        lengths, order = mask.sum(1).sort(stable=True)
        batch, width = mask.shape
        column = torch.arange(width, device=mask.device)
        places = (order[:, None] * width + column)[column < lengths[:, None]]
        return cls(places, (batch, width), _groups(lengths.tolist(), mask.device))


def _groups(lengths: list[int], device: torch.device) -> list[Group]:
    """The groups of sequences that are sorted by length."""
    groups, start = [], 0
    for part in _split(lengths):
        longest, tokens = part[-1], sum(part)
        places = mask = None
        if tokens < len(part) * longest:
            valid = torch.arange(longest) < torch.tensor(part)[:, None]
            places = valid.flatten().nonzero().squeeze(1).to(device)
            mask = valid[:, None, None, :].to(device)
        groups.append(Group(start, start + tokens, len(part), longest, places, mask))
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
        found = gradient.new_zeros(ctx.total, *gradient.shape[1:])
        return found.index_copy_(0, places, gradient), None


def spread(rows: Tensor, places: Tensor, total: int) -> Tensor:
    """Rows at places among zeros: (n, ...) -> (total, ...)."""
    found: Tensor = _Spread.apply(rows, places, total)  # type: ignore[no-untyped-call]
    return found


def take(rows: Tensor, places: Tensor) -> Tensor:
    """The rows at places, no place twice: (total, ...) -> (n, ...)."""
    found: Tensor = _Take.apply(rows, places)  # type: ignore[no-untyped-call]
    return found


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
        query, key, value: (1, heads, T, head size).
        layout: in place of a mask.

    Returns:
        (1, T, heads, head size), and no weights.
    """
    rows = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    parts = [_group_attention(rows, group, dropout, scaling) for group in layout.groups]
    return torch.cat(parts).unsqueeze(0), None


def _group_attention(
    rows: list[Tensor], group: Group, dropout: float, scaling: float | None
) -> Tensor:
    """Attention within the sequences of a group: (tokens, heads, head size)."""
    size = group.sequences * group.length

    def apart(x: Tensor) -> Tensor:
        mine = x[group.start : group.end]
        if group.places is not None:
            mine = spread(mine, group.places, size)
        return mine.reshape(group.sequences, group.length, *mine.shape[1:]).transpose(1, 2)

    query, key, value = map(apart, rows)
    found = scaled_dot_product_attention(
        query, key, value, attn_mask=group.mask, dropout_p=dropout, scale=scaling
    )
    flat = found.transpose(1, 2).flatten(0, 1)
    return flat if group.places is None else take(flat, group.places)


def pack(model: Any) -> str | None:
    """Makes a model of transformers compute without padding, where it can be.

    A model that is not known is tried out: its outputs must be what they were.

    Returns:
        Why it cannot; None: it does now.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    encoder = _encoder(model)
    if encoder is None or not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} cannot work without padding"
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    before = _sample_output(model)
    own = model.config._attn_implementation
    model.config._attn_implementation = NAME
    encoder.forward = packed(encoder.forward)
    try:
        difference = float((_sample_output(model) - before).abs().max())
    except Exception as error:  # whatever a model does with what it does not expect
        difference, cause = math.inf, f" ({type(error).__name__}: {error})"
    else:
        cause = f" (outputs differ by {difference:.2g})"
    if difference <= _SAME * max(1.0, float(before.abs().max())):
        return None
    model.config._attn_implementation = own
    del encoder.forward
    return f"{type(model).__name__} gives other outputs without padding{cause}"


def _encoder(model: Any) -> Any:
    """The module that all layers are in; None: there is none under a name that we know."""
    found = (getattr(model.base_model, name, None) for name in ENCODERS)
    return next((encoder for encoder in found if encoder is not None), None)


@torch.no_grad()
def _sample_output(model: Any) -> Tensor:
    """Hidden states of the tokens of three short sequences: (tokens, hidden)."""
    lengths, width = torch.tensor([5, 9, 2]), 9
    mask = torch.arange(width) < lengths[:, None]
    tokens = torch.arange(3 * width).view(3, width) % (model.config.vocab_size - 2) + 2
    tokens = tokens.masked_fill(~mask, model.config.pad_token_id or 0)
    was_training = model.training
    model.eval()
    output = model.base_model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    model.train(was_training)
    found: Tensor = output[mask]
    return found


def _mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """What a packed encoder gets in place of transformers' masks: the batch's own."""
    return attention_mask


def packed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An encoder's forward that drops the padding on entry, and puts zeros there at its end."""

    @wraps(forward)
    def without_padding(hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        layout = Layout.of(attention_mask)
        rows = take(hidden_states.flatten(0, 1), layout.places)
        output = forward(rows.unsqueeze(0), attention_mask=layout, **kwargs)
        batch, width = layout.shape
        rows = output.last_hidden_state.squeeze(0)
        whole = spread(rows, layout.places, batch * width)
        output.last_hidden_state = whole.reshape(batch, width, -1)
        return output

    return without_padding
