"""Batches without padding: a model sees real tokens alone, its attention each sequence.

A batch of B sequences holds T tokens, one sequence after another, sorted by length: inputs of shape
(1, T), and no attention mask. Embeddings, linear layers, norms and dropouts compute these and no
other. Only inside attention are sequences set apart again, in groups of near length that are padded
each to its own longest. The head gets what it looks at, see `Form`; where that is first tokens
alone, the last layer of BERT and its relatives computes no other beyond its keys and values.
Outputs and gradients are those of the padded batch, up to rounding. On CPUs whole layers are fused,
see `fused_layers`. Batches with padding are computed as ever: evaluation may generate texts.
"""

import contextlib
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from slurmft.train import fused_layers
from slurmft.train.cpu import dropout as drop
from slurmft.train.fused_layers import Layer, Rows, layer_of

NAME = "slurmft_packed"
"""Under which transformers knows the attention function."""

PACKED = ("input_ids", "position_ids", "token_type_ids")
"""Inputs of shape (1, T)."""

ENCODERS = ("encoder", "transformer")
"""What BERT, DistilBERT and their relatives call the module that all layers are in."""

TABLES = ("position_embeddings", "wpe")
"""What models call their table of positions."""

BY_MODULE = {"MPNetSelfAttention": "position_bias", "DisentangledSelfAttention": "relative_pos"}
"""Attention modules that use no function of transformers' registry, and the argument that tells
them of positions; what computes that for the longest sequence is in `POSITIONS`."""

POSITIONS = ("compute_position_bias", "get_rel_pos")

FIRST_TOKEN_ONLY = "slurmft_first_token_only"
"""Attribute of an attention module of which only first tokens' outputs are wanted."""

_SAME = 1e-4
"""Largest difference of outputs that is rounding, relative to the largest output."""

_VARIES = 1e-3
"""Logits that differ less from text to text do not show which tokens a head looks at."""

GROUPS = 4
"""Groups of near length in a batch, at most: more of them save padding, and cost calls."""

_SHORT = 512
"""On CPUs, attention to so many tokens holds its scores in memory: torch's own is slower."""


class Form(enum.Enum):
    """In which form a head gets the hidden states (1, T, hidden)."""

    FIRST = "the first token of each sequence: (B, 1, hidden)"
    LAST = "its last token: (B, 1, hidden)"
    FLAT = "all tokens, as they are"
    ROWS = "padded with zeros: (B, longest, hidden)"


class Group:
    """Consecutive sequences of a packed batch that are padded to one length, that of the longest.

    `places` are those of its tokens in (sequences x length): int64, (tokens,); `valid` is where
    tokens are: bool, (sequences, length). Both are None where sequences are of one length. `firsts`
    and `lasts` tell which of its tokens begin and end a sequence: int64, (sequences,).
    """

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        sizes = torch.tensor(lengths)
        self.tokens, self.sequences, self.length = sum(lengths), len(lengths), max(lengths)
        ends = sizes.cumsum(0)
        self.firsts, self.lasts = (_sent(each, device) for each in (ends - sizes, ends - 1))
        self.places = self.valid = None
        if self.tokens < self.sequences * self.length:
            valid = torch.arange(self.length) < sizes[:, None]
            self.places = _sent(valid.flatten().nonzero().squeeze(1), device)
            self.valid = _sent(valid, device)
        self._biases: dict[Any, Tensor | None] = {}

    def apart(self, tokens: Tensor) -> Tensor:
        """(tokens, ...) -> (sequences, length, ...)."""
        if self.places is not None:
            tokens = spread(tokens, self.places, self.sequences * self.length)
        return tokens.reshape(self.sequences, self.length, *tokens.shape[1:])

    def together(self, rows: Tensor) -> Tensor:
        """(sequences, length, ...) -> (tokens, ...)."""
        flat = rows.flatten(0, 1)
        return flat if self.places is None else take(flat, self.places)

    def bias(self, causal: bool, window: int | None, like: Tensor) -> Tensor | None:
        """What is added to scores, 0 or a number that leaves nothing of them: broadcasts to
        (sequences, heads, length, length). None: nothing.

        Padding comes last: tokens that see none that comes later need no mask for it.

        Args:
            window: tokens see those that are nearer than that; None: all.
        """
        key = causal, window, like.dtype
        if key not in self._biases:
            at = torch.arange(self.length, device=like.device)
            distance, seen = at[:, None] - at, []
            seen += [distance >= 0] if causal else []
            seen += [distance.abs() < window] if window else []
            seen += [self.valid[:, None, None, :]] if self.valid is not None and not causal else []
            self._biases[key] = None
            if seen:
                hidden = ~functools.reduce(torch.logical_and, seen)
                lowest = torch.finfo(like.dtype).min / 2
                self._biases[key] = like.new_zeros(hidden.shape).masked_fill_(hidden, lowest)
        return self._biases[key]


class Layout:
    """Where the sequences of a packed batch are among its tokens."""

    def __init__(self, lengths: Tensor, device: torch.device) -> None:
        """
        Args:
            lengths: of the sequences, sorted, on the CPU: int64, (B,).
            device: where the model computes.
        """
        sizes, part = lengths.tolist(), -(-len(lengths) // GROUPS)
        self.lengths = [sizes[i : i + part] for i in range(0, len(sizes), part)]
        """In groups of near length."""
        self.tokens, self.longest = sum(sizes), sizes[-1]
        self._device = device

    @functools.cached_property
    def groups(self) -> list[Group]:
        return [Group(part, self._device) for part in self.lengths]

    @functools.cached_property
    def all(self) -> Group:
        return Group([size for part in self.lengths for size in part], self._device)

    def split(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """(T, ...) by group. Backwards one copy; slices would be added up."""
        return torch.split(tokens, [group.tokens for group in self.groups])


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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
        (places,) = ctx.saved_tensors
        return spread(gradients[0], places, ctx.total), None


def spread(rows: Tensor, places: Tensor, total: int) -> Tensor:
    """Rows at places among zeros: (n, ...) -> (total, ...)."""
    whole: Tensor = _Spread.apply(rows, places, total)  # type: ignore[no-untyped-call]
    return whole


def take(rows: Tensor, places: Tensor) -> Tensor:
    """The rows at places, no place twice: (total, ...) -> (n, ...)."""
    taken: Tensor = _Take.apply(rows, places)  # type: ignore[no-untyped-call]
    return taken


# --- attention ------------------------------------------------------------------------------------

_in_force: Layout | None = None
"""Of the batch that a packed model computes, or computes again in its backward pass."""


class _How(NamedTuple):
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
    """Attention of each sequence to itself; the interface is that of transformers.

    Args:
        module: where it has `FIRST_TOKEN_ONLY`, only first tokens attend; the others get zeros.
        query: (1, heads, T, head size); key and value may have fewer heads.

    Returns:
        (1, T, heads, head size), and no weights.
    """
    assert _in_force is not None
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    first_token_only = getattr(module, FIRST_TOKEN_ONLY, False)
    split = [_in_force.split(x.squeeze(0).transpose(0, 1)) for x in (query, key, value)]
    parts = []
    for group, *tokens in zip(_in_force.groups, *split, strict=True):
        q, k, v = (group.apart(each).transpose(1, 2) for each in tokens)
        window = sliding_window if sliding_window and sliding_window < group.length else None
        how = _How(causal, window, dropout, scaling, softcap)
        if first_token_only:
            firsts = _attend(q[:, :, :1], k, v, group, how).transpose(1, 2).flatten(0, 1)
            parts.append(spread(firsts, group.firsts, group.tokens))
        else:
            parts.append(group.together(_attend(q, k, v, group, how).transpose(1, 2)))
    return torch.cat(parts).unsqueeze(0), None


def _attend(query: Tensor, key: Tensor, value: Tensor, group: Group, how: _How) -> Tensor:
    """Attention of a group's padded sequences: all (sequences, heads, length, head size).

    On CPUs torch's own is slow backwards in bf16, and with dropout; every sequence has tokens, so
    no row of its mask needs the care that it takes of rows without any. It caps no scores.
    """
    slow = query.device.type == "cpu" and (query.dtype.itemsize < 4 or how.dropout > 0)
    repeats = query.shape[1] // key.shape[1]
    if how.softcap is None and not (slow and group.length <= _SHORT):
        plain = how.causal and how.window is None
        return scaled_dot_product_attention(
            query, key, value, None if plain else group.bias(how.causal, how.window, query),
            dropout_p=how.dropout, is_causal=plain, scale=how.scaling, enable_gqa=repeats > 1,
        )  # fmt: skip
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    bias = group.bias(how.causal, how.window, query)
    if bias is not None:
        scores = scores + bias
    return torch.matmul(drop(scores.softmax(-1), how.dropout), value)


def _group_by_group(own: Callable[..., Any], positions: str, *args: Any, **named: Any) -> Any:
    """The forward of an attention module that knows padded sequences alone, for packed ones.

    Args:
        own: the module's.
        positions: its argument that tells of them, of the longest: (..., length, length).
    """
    if _in_force is None:
        return own(*args, **named)
    given = inspect.signature(own).bind(*args, **named)
    states, told = (given.arguments[name] for name in ("hidden_states", positions))
    parts = []
    for group, tokens in zip(_in_force.groups, _in_force.split(states[0]), strict=True):
        bias = group.bias(False, None, states)
        bias = states.new_zeros(1, 1, 1, 1) if bias is None else bias
        given.arguments["hidden_states"] = group.apart(tokens)
        given.arguments["attention_mask"] = bias if positions == "position_bias" else bias == 0
        given.arguments[positions] = told[..., : group.length, : group.length]
        parts.append(group.together(own(*given.args, **given.kwargs)[0]))
    return torch.cat(parts).unsqueeze(0), None


def _of_longest(own: Callable[..., Any], states: Tensor, *args: Any) -> Any:
    """What tells of positions, of the longest sequence alone."""
    return own(states[:, : _in_force.longest] if _in_force else states, *args)


# --- models ---------------------------------------------------------------------------------------


class Packing:
    """A model of transformers that computes without padding what is announced to it."""

    def __init__(self, model: Any) -> None:
        self.model, self.base = model, model.base_model
        self.form = Form.ROWS
        self.is_first_token_only = False
        encoders = (m for n, m in self.base.named_children() if n in ENCODERS)
        self.encoder: Any = next((m for m in encoders if hasattr(m, "layer")), None)
        self.layers: list[Layer] = []
        """What computes batches of short sequences in place of the encoder; none: nothing does."""
        self._announced: Layout | None = None
        self._inputs: dict[str, Tensor] | None = None
        """Of the packed batch under way."""
        self._wrapped: list[tuple[Any, str]] = []
        self._most, self._first = _positions(self.base)
        self._takes = inspect.signature(self.base.forward).parameters
        configs = {id(c): c for m in self.base.modules() if (c := getattr(m, "config", None))}
        self._configs = [(config, config._attn_implementation) for config in configs.values()]
        self._wrap(getattr(self.base, "pooler", None), "forward", self._pooled)
        for module in self.base.modules():
            if positions := BY_MODULE.get(type(module).__name__):
                self._wrap(module, "forward", _group_by_group, positions)
            for name in POSITIONS:
                self._wrap(module if hasattr(module, name) else None, name, _of_longest)
        self._wrap(self.base, "forward", self._base_forward)
        self._states_of = self.base.forward
        self._wrap(model, "forward", self._forward)

    def _wrap(self, module: Any, name: str, method: Callable[..., Any], *more: Any) -> None:
        """Puts another method, which is called with the module's own, in its place."""
        if module is not None:
            own = getattr(module, name)
            setattr(module, name, functools.wraps(own)(functools.partial(method, own, *more)))
            self._wrapped.append((module, name))

    def undo(self) -> None:
        """Makes the model what it was; not after `compute_first_only`."""
        self._use(None)
        for module, name in self._wrapped:
            vars(module).pop(name, None)

    def expect(self, lengths: Tensor, device: torch.device) -> None:
        """Announces the batch that the model gets next.

        Args:
            lengths: of its sequences, sorted, on the CPU: int64, (B,).
            device: where the model computes.

        Raises:
            ValueError: the model has no positions for a sequence of this length.
        """
        if lengths[-1] > self._most:  # on a GPU the lookup would say nothing of it
            raise ValueError(
                f"a text of {lengths[-1]} tokens is longer than the {self._most} positions of the "
                f"model: train with --max-length {self._most}"
            )
        self._announced = Layout(lengths, device)

    def _use(self, layout: Layout | None) -> None:
        """Lets attention work on a packed batch; None: on a padded one, as transformers does."""
        global _in_force
        _in_force = layout
        for config, implementation in self._configs:
            config._attn_implementation = NAME if layout else implementation

    # --- forward passes ---------------------------------------------------------------------------

    def _forward(self, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The model's: its head sees the batch in the form that it wants."""
        layout, ids = self._announced, named.get("input_ids")
        packed = "position_ids" in named and "attention_mask" not in named
        if layout is None or not packed or ids is None or ids.shape != (1, layout.tokens):
            self._use(None)
            return own(*args, **named)
        self._use(layout)
        self._inputs = {name: named.pop(name) for name in PACKED if name in named}
        named["input_ids"] = self._shaped(ids)
        if self.form is Form.ROWS:
            named["attention_mask"] = self._shaped(torch.ones_like(ids))
        try:
            return own(*args, **named)
        finally:
            self._inputs = None

    def _base_forward(self, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """That of the model without its head, which gets the packed batch."""
        if self._inputs is None:
            self._use(None)
            return own(*args, **named)
        named = dict(zip(self._takes, args, strict=False)) | named
        named |= {name: value for name, value in self._inputs.items() if name in self._takes}
        named["position_ids"] = named["position_ids"] + self._first
        # Of four dimensions: transformers makes no mask of it, and looks for no padding.
        named["attention_mask"] = torch.ones(1, 1, 1, 1, device=named["position_ids"].device)
        if "use_cache" in self._takes:
            named["use_cache"] = False
        output = own(**named)
        output.last_hidden_state = self._shaped(output.last_hidden_state)
        return output

    def _pooled(self, own: Callable[..., Any], states: Tensor) -> Any:
        return own(states if self._inputs is None else self._shaped(states))

    def _shaped(self, tokens: Tensor) -> Tensor:
        """(1, T, ...), or (1, B, ...) of first tokens alone, in the form that the head wants."""
        assert _in_force is not None
        rows = tokens.squeeze(0)
        if self.form is Form.FLAT:
            return tokens
        if self.form is Form.ROWS:
            return _in_force.all.apart(rows)
        if len(rows) == _in_force.tokens:
            every = _in_force.all
            rows = take(rows, every.firsts if self.form is Form.FIRST else every.lasts)
        return rows.unsqueeze(1)

    def _narrowed(self, own: Callable[..., Any], *rows: Tensor) -> Any:
        """From this module of the last layer on, first tokens alone."""
        if _in_force is None:
            return own(*rows)
        return own(*(take(each.squeeze(0), _in_force.all.firsts).unsqueeze(0) for each in rows))

    def _encoded(self, own: Any, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """That of the encoder: by fused layers, where sequences are short."""
        if _in_force is None or not self.layers or _in_force.longest > _SHORT:
            return own(hidden_states, *args, **named)
        tokens, on = hidden_states.squeeze(0), hidden_states.device.type
        autocast = torch.is_autocast_enabled(on)
        dtype = torch.get_autocast_dtype(on) if autocast else tokens.dtype
        rows = Rows.of(_in_force.lengths, self.layers[0].heads, dtype)
        padded = torch.nn.functional.pad(tokens.to(dtype), (0, 0, 0, rows.count - len(tokens)))
        again = getattr(self.encoder.layer[0], "gradient_checkpointing", False)
        states = fused_layers.run(self.layers, padded, rows, self.model.training, again)
        states = states if self.is_first_token_only else states[: rows.tokens]
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states.unsqueeze(0))

    # --- what is found out by trial ---------------------------------------------------------------

    def try_out(self, longest: int | None) -> float:
        """Finds the form that the head wants. Returns the largest difference of outputs to those of
        padded batches; 0: they are the same.

        Args:
            longest: tokens of the longest text that is to come; None: any.
        """
        if difference := self._try_long(longest):
            return difference
        sample = _Sample.of(self.model, 2, 5, 9)
        expected = self.model(**sample.padded)
        logits, forms = expected.get("logits"), [Form.ROWS]
        if logits is not None and logits.ndim > 2:
            forms = [Form.FLAT, Form.ROWS]
        elif logits is not None and logits.std(0).max() > _VARIES:
            forms = [Form.FIRST, Form.LAST, Form.ROWS]
        for self.form in forms:
            with contextlib.suppress(*[Exception] * (self.form is not Form.ROWS)):
                difference = self._difference(sample, expected)
                if not difference:
                    break
        if self.form is Form.FIRST:
            self._compute_first_only(sample, expected)
        return difference

    def _difference(self, sample: "_Sample", expected: Any) -> float:
        """Of the model's outputs; 0: rounding alone."""
        self.expect(sample.mask.sum(1), self.model.device)
        found = self.model(**sample.packed)
        names = {"logits", "start_logits", "end_logits", "last_hidden_state"} & expected.keys()
        return max(_difference(sample.real(expected[n]), sample.real(found[n])) for n in names)

    def _compute_first_only(self, sample: "_Sample", expected: Any) -> None:
        """Makes the last layer compute nothing for a sequence's other tokens, where this is known
        to be possible and gives the same."""
        parts = _first_only_parts(self.encoder.layer[-1]) if self.encoder else None
        if parts is None:
            return
        attends, narrows = parts
        setattr(attends, FIRST_TOKEN_ONLY, True)
        self._wrap(narrows, "forward", self._narrowed)
        self.is_first_token_only = not self._difference(sample, expected)
        if not self.is_first_token_only:
            delattr(attends, FIRST_TOKEN_ONLY)
            del narrows.forward

    def _try_long(self, longest: int | None) -> float:
        """On a text that is longer than windows of attention; a layer of each kind is enough."""
        windows = (getattr(module, "sliding_window", None) for module in self.base.modules())
        length = max([_SHORT, *(size for size in windows if isinstance(size, int))]) + 40
        most = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize
        length = min(length, most, self._most, longest or sys.maxsize)
        sample = _Sample.of(self.model, 9, max(10, length))
        with _few_layers(self.base):
            expected = self.base(**sample.padded).last_hidden_state
            return _difference(sample.real(expected), self._states(sample))

    def _states(self, sample: "_Sample") -> Tensor:
        """Hidden states: (tokens, hidden)."""
        form, self.form, self._inputs = self.form, Form.FLAT, sample.packed
        self._use(Layout(sample.mask.sum(1), self.model.device))
        try:
            states: Tensor = self._states_of(**sample.packed).last_hidden_state
        finally:
            self.form, self._inputs = form, None
        return states.squeeze(0)

    def fuse(self) -> None:
        """Lets fused layers compute, where they are known and give the same."""
        sample = _Sample.of(self.model, 2, 5, 9)
        layers = [layer_of(module) for module in self.encoder.layer] if self.encoder else []
        known = [layer for layer in layers if layer]
        if known and len(known) == len(layers):
            before = self._states(sample)
            known[-1].first_only = self.is_first_token_only
            self._wrap(self.encoder, "forward", self._encoded)
            self.layers = known
            if _difference(before, self._states(sample)):
                self.layers = []


def pack(model: Any, fuse: bool = True, longest: int | None = None) -> Packing | str:
    """Makes a model of transformers compute without padding, where it can be.

    Every model is tried out: its outputs must be what they were.

    Args:
        model: or one of PEFT around it.
        fuse: let fused layers compute, where they can; for CPUs.
        longest: tokens of the longest text that is to come; None: any.

    Returns:
        A text where it cannot: why.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name, config = type(model).__name__, model.config
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = getattr(model, "_supports_attention_backend", False) or any(
        type(module).__name__ in BY_MODULE for module in model.modules()
    )
    if not known or getattr(config, "is_encoder_decoder", False):
        return f"{name} cannot work without padding"
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    packing = Packing(model)
    with _evaluating(model):
        try:
            difference = packing.try_out(longest)
            cause = f"outputs differ by {difference:.2g}" if difference else None
        except Exception as error:  # whatever a model does with what it does not expect
            cause = f"{type(error).__name__}: {error}"
        if cause is None:
            if fuse:
                packing.fuse()
            return packing
        packing.undo()
    return f"{name} gives other outputs without padding ({cause})"


def _positions(base: Any) -> tuple[int, int]:
    """How many tokens of a text have a position in the model's table; that of the first."""
    for name, module in base.named_modules():
        if name.rpartition(".")[2] in TABLES and isinstance(module, torch.nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - first, first
    return sys.maxsize, 0


def _difference(expected: Tensor, found: Tensor) -> float:
    """The largest one; 0 where it is rounding alone."""
    if expected.shape != found.shape:
        return torch.inf
    difference = float((found - expected).abs().max())
    return 0.0 if difference <= _SAME * max(1.0, float(expected.abs().max())) else difference


def _first_only_parts(layer: Any) -> tuple[Any, Any] | None:
    """Of a layer, the module that attends, and the first one after it; all that follows works on
    each token by itself. None: a layer that we do not know."""
    attends: Any = getattr(layer, "attention", None)
    if hasattr(attends, "self") and hasattr(attends, "output"):  # BERT and its relatives
        return attends.self, attends.output
    if hasattr(layer, "sa_layer_norm"):  # DistilBERT
        return attends, layer.sa_layer_norm
    return None


@dataclass(frozen=True, slots=True)
class _Sample:
    """Texts to try out a model with, sorted by length."""

    padded: dict[str, Tensor]
    packed: dict[str, Tensor]
    mask: Tensor
    """Which places of the padded ones hold a token: bool, (B, L)."""

    @classmethod
    def of(cls, model: Any, *lengths: int) -> "_Sample":
        mask = torch.arange(lengths[-1]) < torch.tensor(lengths)[:, None]
        config = model.config.get_text_config()
        pad = config.pad_token_id or 0
        tokens = torch.arange(mask.numel()).view(mask.shape) % (config.vocab_size - 3) + 2
        tokens = (tokens + (tokens == pad)).masked_fill(~mask, pad)
        padded = {"input_ids": tokens, "attention_mask": mask.long()}
        positions = torch.arange(lengths[-1]).expand(mask.shape)[mask]
        packed = {"input_ids": tokens[mask][None], "position_ids": positions[None]}
        return cls(padded, packed, mask)

    def real(self, output: Tensor) -> Tensor:
        """(B, L, ...) and (1, T, ...) -> (T, ...); other outputs are left as they are."""
        if output.shape[:2] == self.mask.shape:
            return output[self.mask]
        return output[0] if output.shape[:2] == self.packed["input_ids"].shape else output


@contextlib.contextmanager
def _few_layers(base: Any) -> Iterator[None]:
    """Of its layers the first of each kind, and those before."""
    named = ((name, m) for name, m in base.named_modules() if isinstance(m, torch.nn.ModuleList))
    path, layers = max(named, key=lambda found: len(found[1]))
    kinds = getattr(base.config, "layer_types", None) or [None]
    base.set_submodule(path, layers[: max(map(kinds.index, kinds)) + 1])
    try:
        yield
    finally:
        base.set_submodule(path, layers)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)
