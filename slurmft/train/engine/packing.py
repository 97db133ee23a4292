"""Batches without padding: a model sees real tokens alone, its attention each sequence.

A batch of B sequences holds T tokens, one sequence after another, sorted by length: inputs of shape
(1, T), and no attention mask. Embeddings, linear layers, norms and dropouts compute these and no
other. Only attention tells sequences apart, see `packed_attention`. The head gets what it looks at,
see `Form`; where that is first tokens alone, the last layer of BERT and its relatives computes no
other beyond its keys and values. Outputs and gradients are those of the padded batch, up to
rounding. Layers that we know are computed by `fused_layers` on CPUs, by `gpu_layers` on GPUs.
Batches with padding are computed as ever: evaluation may generate texts.
"""

import contextlib
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from slurmft.train.engine import fused_layers, gpu_layers, packed_attention
from slurmft.train.engine.fused_layers import Layer, Rows, layer_of
from slurmft.train.engine.gpu_layers import GpuLayers
from slurmft.train.engine.packed_attention import FIRST_TOKEN_ONLY, SHORT, Layout, attention, take

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

_SAME = 1e-4
"""Largest difference of outputs that is rounding, relative to the largest output."""

_VARIES = 1e-3
"""Logits that differ less from text to text do not show which tokens a head looks at."""


class Form(enum.Enum):
    """In which form a head gets the hidden states (1, T, hidden)."""

    FIRST = "the first token of each sequence: (B, 1, hidden)"
    LAST = "its last token: (B, 1, hidden)"
    FLAT = "all tokens, as they are"
    ROWS = "padded with zeros: (B, longest, hidden)"


class Packing:
    """A model of transformers that computes without padding what is announced to it."""

    def __init__(self, model: Any) -> None:
        self.model, self.base = model, model.base_model
        self.form = Form.ROWS
        self.is_first_token_only = False
        encoders = (m for n, m in self.base.named_children() if n in ENCODERS)
        self.encoder: Any = next((m for m in encoders if hasattr(m, "layer")), None)
        self.layers: list[Layer] = []
        """What computes batches in place of the encoder; none: nothing does."""
        self.gpu_layers: GpuLayers | None = None
        """That on a GPU; made for the first batch."""
        self._announced: Layout | None = None
        self._ends_with_longest = False
        """Whether its positions do: there can be no longer sequence of padding."""
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
                self._ends_with_longest = True
                self._wrap(module, "forward", packed_attention.group_by_group, positions)
            for name in POSITIONS:
                told = module if hasattr(module, name) else None
                self._wrap(told, name, packed_attention.of_longest)
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
        multiple = 0 if self._ends_with_longest else packed_attention.token_multiple(device)
        self._announced = Layout(lengths, device, multiple)

    def _use(self, layout: Layout | None) -> None:
        """Lets attention work on a packed batch; None: on a padded one, as transformers does."""
        packed_attention.in_force = layout
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
        padding = _layout().padding
        for name in self._inputs.keys() & self._takes.keys():
            tokens = self._inputs[name]
            named[name] = torch.nn.functional.pad(tokens, (0, padding)) if padding else tokens
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
        layout, rows = _layout(), tokens.squeeze(0)
        if len(rows) >= layout.tokens:
            rows = rows[: layout.tokens]
            if self.form is Form.FLAT:
                return rows.unsqueeze(0)
            if self.form is Form.ROWS:
                return layout.all.apart(rows)
            rows = take(rows, layout.firsts if self.form is Form.FIRST else layout.lasts)
        return rows.unsqueeze(1)

    def _narrowed(self, own: Callable[..., Any], *rows: Tensor) -> Any:
        """From this module of the last layer on, first tokens alone."""
        if packed_attention.in_force is None:
            return own(*rows)
        firsts = packed_attention.in_force.firsts
        return own(*(take(each.squeeze(0), firsts).unsqueeze(0) for each in rows))

    def _encoded(self, own: Any, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """That of the encoder: by our own layers; on CPUs, where sequences are short."""
        layout, tokens = packed_attention.in_force, hidden_states.squeeze(0)
        if layout is None or not self.layers:
            return own(hidden_states, *args, **named)
        device, dtype = tokens.device, packed_attention.computed_in(tokens)
        training = self.model.training
        again = getattr(self.encoder.layer[0], "gradient_checkpointing", False)
        if gpu_layers.why_not(self.layers[0], device, dtype) is None:
            if self.gpu_layers is None:
                self.gpu_layers = GpuLayers(self.layers, device, dtype)
            states = self.gpu_layers.run(tokens, layout.starts, training, again)
            states = states[: layout.sequences] if self.is_first_token_only else states
        elif device.type == "cpu" and layout.longest <= SHORT:
            rows = Rows.of(layout.lengths, self.layers[0].heads, dtype)
            padded = torch.nn.functional.pad(tokens.to(dtype), (0, 0, 0, rows.count - len(tokens)))
            states = fused_layers.run(self.layers, padded, rows, training, again)
            states = states if self.is_first_token_only else states[: rows.tokens]
        else:
            return own(hidden_states, *args, **named)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states.unsqueeze(0))

    # --- what is found out by trial ---------------------------------------------------------------

    def try_out(self, longest: int | None) -> float:
        """Finds the form that the head wants, for texts of up to `longest` tokens. Returns the
        largest difference of outputs to those of padded batches; 0: they are the same."""
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
        length = max([SHORT, *(size for size in windows if isinstance(size, int))]) + 40
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
    """Makes a model of transformers, or the one in PEFT's, compute without padding; a text where it
    cannot: why. Every model is tried out: its outputs must be what they were.

    Args:
        fuse: let our own layers compute, where they can.
        longest: tokens of the longest text that is to come; None: any.
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
    was_training = model.training
    model.eval()
    with torch.no_grad():
        try:
            difference = packing.try_out(longest)
            cause = f"outputs differ by {difference:.2g}" if difference else None
        except Exception as error:  # whatever a model does with what it does not expect
            cause = f"{type(error).__name__}: {error}"
        if cause is None and fuse:
            packing.fuse()
    model.train(was_training)
    if cause is None:
        return packing
    packing.undo()
    return f"{name} gives other outputs without padding ({cause})"


def _layout() -> Layout:
    """Of the packed batch under way."""
    assert packed_attention.in_force is not None
    return packed_attention.in_force


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
