"""Attention of a packed batch: where its sequences are, and how each attends to itself.

GPUs of sm_80 and later compute it in bf16 and fp16 by one call of flash attention, which is told
where sequences begin. Elsewhere, and where flash attention knows no such scores, sequences attend
in groups of near length that are padded each to its own longest.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slurmft.train.engine.cpu import dropout as drop

GROUPS = 4
"""Most groups of near length in a batch: more of them save padding, and cost calls."""

SHORT = 512
"""On CPUs, attention to so many tokens holds its scores in memory: torch's own is slower."""

_MULTIPLE = 256
"""On GPUs, numbers of tokens are multiples of it: kernels and memory are kept for few shapes."""

FIRST_TOKEN_ONLY = "slurmft_first_token_only"
"""Attribute of an attention module of which only first tokens' outputs are wanted."""

_FLASH_SINCE = (8, 0)
"""Compute capability of the first GPUs with flash attention."""

_WIDE_HEADS = {(8, 0), (9, 0), (10, 0)}
"""Compute capabilities of GPUs whose memory on chip holds heads of more than 192 backwards."""


# --- where sequences are --------------------------------------------------------------------------


class Group:
    """Consecutive sequences of a packed batch that are padded to one length, that of the longest.

    Attributes:
        places: places of its tokens in (sequences x length): int64, (tokens,).
        valid: where tokens are: bool, (sequences, length).

    Both are None where sequences are of one length.
    """

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.tokens = sum(lengths)
        self.sequences = len(lengths)
        self.length = max(lengths)
        self.places = None
        self.valid = None
        if self.tokens < self.sequences * self.length:
            ends = torch.tensor(lengths)[:, None]
            valid = torch.arange(self.length) < ends
            self.places = _sent(valid.flatten().nonzero().squeeze(1), device)
            self.valid = _sent(valid, device)
        self._biases: dict[Any, Tensor | None] = {}

    def apart(self, tokens: Tensor) -> Tensor:
        """Pads sequences with zeros: (tokens, ...) -> (sequences, length, ...)."""
        if self.places is not None:
            tokens = spread(tokens, self.places, self.sequences * self.length)
        return tokens.reshape(self.sequences, self.length, *tokens.shape[1:])

    def together(self, rows: Tensor) -> Tensor:
        """Leaves padding out: (sequences, length, ...) -> (tokens, ...)."""
        flat = rows.flatten(0, 1)
        if self.places is None:
            return flat
        return take(flat, self.places)

    def bias(self, causal: bool, window: int | None, like: Tensor) -> Tensor | None:
        """Returns what is added to scores, 0 or a number that leaves nothing of them.

        It broadcasts to (sequences, heads, length, length). None: nothing is added. Padding comes
        last: tokens that see none that comes later need no mask for it.

        Args:
            causal: tokens see none that comes later.
            window: tokens see those that are nearer than that; None: all.
            like: a tensor of the type and device of the scores.
        """
        # All layers of a batch ask for the same one or two.
        key = causal, window, like.dtype
        if key not in self._biases:
            self._biases[key] = self._make_bias(causal, window, like)
        return self._biases[key]

    def _make_bias(
        self,
        causal: bool,
        window: int | None,
        like: Tensor,
    ) -> Tensor | None:
        at = torch.arange(self.length, device=like.device)
        # of a query from a key, positive for keys before it
        distance = at[:, None] - at
        conditions = []
        if causal:
            conditions.append(distance >= 0)
        if window:
            conditions.append(distance.abs() < window)
        if self.valid is not None and not causal:
            conditions.append(self.valid[:, None, None, :])
        if not conditions:
            return None
        # They broadcast: (length, length), and of padding (sequences, 1, 1, length).
        is_hidden = ~functools.reduce(torch.logical_and, conditions)
        # Not -inf: a padding token may see nothing within its window, and would become NaN.
        lowest = torch.finfo(like.dtype).min / 2
        return like.new_zeros(is_hidden.shape).masked_fill_(is_hidden, lowest)


class Starts(NamedTuple):
    """Where sequences start among the tokens of a packed batch, as flash attention is told."""

    cum_seq: Tensor
    """The first token of each, and the end of the last: int32, (sequences + 1,)."""
    most: int
    """No sequence has more tokens."""

    @property
    def firsts(self) -> Tensor:
        """First token of each sequence: int64, (sequences,)."""
        return self.cum_seq[:-1].long()


class Layout:
    """Where the sequences of a packed batch are among its tokens.

    Args:
        lengths: lengths of the sequences, sorted, on the CPU: int64, (B,).
        device: where the model computes.
        multiple: the model computes a multiple of so many tokens. What is missing is one more
            sequence, of padding: 1 to `multiple` tokens. 0: there is none.

    Attributes:
        sequences, tokens: their numbers, without padding.
        longest: tokens of the longest sequence.
        padding: tokens of padding.
        lengths: lengths in groups of near length; padding is the last group.
    """

    def __init__(
        self,
        lengths: Tensor,
        device: torch.device,
        multiple: int = 0,
    ) -> None:
        sizes = lengths.tolist()
        self.sequences = len(sizes)
        self.tokens = sum(sizes)
        self.longest = sizes[-1]
        # Rounded up. Lengths are sorted: neighbours have near ones.
        of_group = math.ceil(len(sizes) / GROUPS)
        group_starts = range(0, len(sizes), of_group)
        self.lengths = [sizes[start : start + of_group] for start in group_starts]
        self.padding = 0
        self._sizes = sizes
        if multiple:
            # 1 to `multiple`, never 0: so the last one of `lengths` is always the padding.
            self.padding = multiple - self.tokens % multiple
            self.lengths.append([self.padding])
            self._sizes = [*sizes, self.padding]
        self._device = device
        ends = torch.tensor([0, *self._sizes]).cumsum(0).int()
        # Rounded up to a power of 2, so that kernels see few values.
        most = 2 ** (max(self.longest, multiple) - 1).bit_length()
        self.starts = Starts(_sent(ends, device), most)

    @property
    def firsts(self) -> Tensor:
        """First token of each sequence: int64, (B,)."""
        return self.starts.firsts[: self.sequences]

    @property
    def lasts(self) -> Tensor:
        """Last token of each sequence: int64, (B,)."""
        return self.starts.cum_seq[1 : self.sequences + 1].long() - 1

    @functools.cached_property
    def groups(self) -> list[Group]:
        """Groups of near length, which hold all tokens."""
        return [Group(part, self._device) for part in self.lengths]

    @functools.cached_property
    def all(self) -> Group:
        """All sequences as one group, without padding."""
        return Group(self._sizes[: self.sequences], self._device)

    def split(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Divides (T, ...) by group. Backwards this is one copy; slices would be added up."""
        return torch.split(tokens, [group.tokens for group in self.groups])


def token_multiple(device: torch.device) -> int:
    """Returns the `multiple` of a `Layout` on a device."""
    return _MULTIPLE if device.type == "cuda" else 0


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the CPU on a device, without waiting for it."""
    if device.type == "cpu":
        return tensor
    # From memory that is not pinned, the copy would wait all the same.
    return tensor.pin_memory().to(device, non_blocking=True)


class _Take(torch.autograd.Function):
    """Rows at places, backwards spread again.

    index_select's own backward adds up, for places that come twice, and is slow.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.total = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return spread(gradients[0], places, ctx.total), None


def spread(rows: Tensor, places: Tensor, total: int) -> Tensor:
    """Puts rows at places among zeros: (n, ...) -> (total, ...)."""
    zeros = rows.new_zeros(total, *rows.shape[1:])
    return zeros.index_copy_(0, places, rows)


def take(rows: Tensor, places: Tensor) -> Tensor:
    """Returns the rows at places, no place twice: (total, ...) -> (n, ...)."""
    taken: Tensor = _Take.apply(rows, places)  # type: ignore[no-untyped-call]
    return taken


# --- attention ------------------------------------------------------------------------------------

in_force: Layout | None = None
"""Layout of the batch that a packed model computes, or computes again in its backward pass.

A global, because transformers calls attention with nothing of ours.
"""


class How(NamedTuple):
    """Settings of attention, as transformers names them."""

    causal: bool
    window: int | None
    dropout: float
    scaling: float | None
    softcap: float | None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _: Any = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Lets each sequence attend to itself; the interface is that of transformers.

    Args:
        module: where it has `FIRST_TOKEN_ONLY`, only first tokens attend; the others get zeros.
        query: (1, heads, T, head size); key and value may have fewer heads.

    Returns:
        (1, T, heads, head size), and no weights.
    """
    assert in_force is not None
    # As in transformers' own functions: the argument goes before the module's attribute.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    first_only = getattr(module, FIRST_TOKEN_ONLY, False)
    how = How(is_causal, sliding_window or None, dropout, scaling, softcap)
    q = query.squeeze(0).transpose(0, 1)
    k = key.squeeze(0).transpose(0, 1)
    v = value.squeeze(0).transpose(0, 1)
    reason = why_no_flash(q.device, computed_in(q), q.shape[-1], softcap)
    # As the only query, a first token would be the last one to flash attention's masks.
    masks_first = first_only and (is_causal or how.window)
    if reason is None and not masks_first:
        states = flash(q, k, v, in_force.starts, how, first_only)
    else:
        states = _by_groups(q, k, v, in_force, how, first_only)
    if first_only:
        states = spread(states, in_force.starts.firsts, len(q))
    return states.unsqueeze(0), None


def why_no_flash(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    softcap: float | None = None,
) -> str | None:
    """Returns the reason for which flash attention cannot compute a packed batch; None: it can.

    Args:
        dtype: type of queries, keys and values, as they are or as autocast rounds them.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "flash attention is for NVIDIA's GPUs"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"this build of torch ({torch.__version__}) has no flash attention"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FLASH_SINCE:
        return f"a GPU of sm_{capability[0]}{capability[1]} has no flash attention (sm_80 has)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention computes bf16 and fp16, not {str(dtype).removeprefix('torch.')}"
    if softcap is not None:
        return "flash attention caps no scores"
    largest_head = 256 if capability in _WIDE_HEADS else 192
    if head_size % 8 or head_size > largest_head:
        return f"flash attention has no heads of size {head_size}"
    return None


def computed_in(tensor: Tensor) -> torch.dtype:
    """Returns the type that a product of this tensor is computed in."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Starts,
    how: How,
    first_only: bool = False,
) -> Tensor:
    """Computes attention of all sequences by one call of flash attention.

    It is what torch's public `varlen_attn` calls, too: that has no dropout.

    Args:
        query: (T, heads, head size), as key and value.
        first_only: only first tokens attend.

    Returns:
        (T, heads, head size), or (sequences, heads, head size) of first tokens.
    """
    # As autocast has it for scaled_dot_product_attention; rotary positions are fp32.
    dtype = computed_in(query)
    query = query.to(dtype)
    query_starts = starts.cum_seq
    most_queries = starts.most
    if first_only:
        count = len(query_starts)
        # Each sequence has one query: they start at 0, 1, 2 and so on.
        query_starts = torch.arange(
            count,
            dtype=torch.int32,
            device=query_starts.device,
        )
        query = take(query, starts.firsts)
        most_queries = 1
    side = -1  # all tokens
    if how.window is not None:
        # A window counts the token itself; flash attention, its neighbours on a side.
        side = how.window - 1
    states: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key.to(dtype),
        value.to(dtype),
        query_starts,
        starts.cum_seq,
        most_queries,
        starts.most,
        how.dropout,
        how.causal,
        False,  # a mask of dropout to look at is not returned
        scale=how.scaling,
        window_size_left=side,
        window_size_right=side,
    )[0]
    return states


def _by_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    how: How,
    first_only: bool,
) -> Tensor:
    """Computes attention group by group; shapes are those of `flash`."""
    parts = []
    queries = layout.split(query)
    keys = layout.split(key)
    values = layout.split(value)
    for group, q, k, v in zip(layout.groups, queries, keys, values, strict=True):
        q = group.apart(q).transpose(1, 2)
        k = group.apart(k).transpose(1, 2)
        v = group.apart(v).transpose(1, 2)
        if first_only:
            q = q[:, :, :1]
        states = _attend(q, k, v, group, how).transpose(1, 2)
        if first_only:
            parts.append(states.flatten(0, 1))
        else:
            parts.append(group.together(states))
    return torch.cat(parts)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    how: How,
) -> Tensor:
    """Computes attention of a group's padded sequences: all (sequences, heads, length, head size).

    On CPUs torch's own is slow backwards in bf16, and with dropout; every sequence has tokens, so
    no row of its mask needs the care that it takes of rows without any. It caps no scores.
    """
    window = how.window
    if window and window >= group.length:  # it hides nothing
        window = None
    on_cpu = query.device.type == "cpu"
    has_slow_kernel = query.dtype.itemsize < 4 or how.dropout > 0
    is_slow = on_cpu and has_slow_kernel and group.length <= SHORT
    # Several heads of queries may share one of keys and values (grouped-query attention).
    repeats = query.shape[1] // key.shape[1]
    if how.softcap is None and not is_slow:
        # torch takes a mask or `is_causal`, not both.
        is_plain_causal = how.causal and window is None
        mask = None if is_plain_causal else group.bias(how.causal, window, query)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            dropout_p=how.dropout,
            is_causal=is_plain_causal,
            scale=how.scaling,
            enable_gqa=repeats > 1,
        )
    if repeats > 1:
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    scale = how.scaling
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    bias = group.bias(how.causal, window, query)
    if bias is not None:
        scores = scores + bias
    kept = drop(scores.softmax(-1), how.dropout)
    return torch.matmul(kept, value)


# --- attention modules outside transformers' registry ---------------------------------------------


def group_by_group(
    forward: Callable[..., Any],
    positions: str,
    *args: Any,
    **named: Any,
) -> Any:
    """The forward of an attention module that knows padded sequences alone, for packed ones.

    Args:
        forward: the module's own.
        positions: its argument that tells of positions, of the longest: (..., length, length).
    """
    if in_force is None:
        return forward(*args, **named)
    call = inspect.signature(forward).bind(*args, **named)
    states = call.arguments["hidden_states"]
    all_positions = call.arguments[positions]
    parts = []
    for group, tokens in zip(in_force.groups, in_force.split(states[0]), strict=True):
        bias = group.bias(False, None, states)
        if bias is None:
            bias = states.new_zeros(1, 1, 1, 1)
        # MPNet adds its mask to scores; DeBERTa's says which tokens there are.
        mask = bias
        if positions != "position_bias":
            mask = bias == 0
        call.arguments["attention_mask"] = mask
        call.arguments["hidden_states"] = group.apart(tokens)
        call.arguments[positions] = all_positions[..., : group.length, : group.length]
        output = forward(*call.args, **call.kwargs)
        parts.append(group.together(output[0]))
    return torch.cat(parts).unsqueeze(0), None


def of_longest(forward: Callable[..., Any], states: Tensor, *args: Any) -> Any:
    """The computation of positions, for the longest sequence alone."""
    if in_force:
        states = states[:, : in_force.longest]
    return forward(states, *args)
