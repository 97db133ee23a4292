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

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from slurmft.train.data.tables import TokenTable
from slurmft.train.engine import fused_layers, gpu_layers, packed_attention
from slurmft.train.engine.evaluating import evaluating
from slurmft.train.engine.fused_layers import Layer, Rows, layer_of
from slurmft.train.engine.gpu_layers import GpuLayers
from slurmft.train.engine.packed_attention import (
    FIRST_TOKEN_ONLY,
    SHORT,
    Layout,
    attention,
    take,
)

NAME = "slurmft_packed"
"""Name under which transformers knows the attention function."""

PACKED = ("input_ids", "position_ids", "token_type_ids")
"""Inputs of shape (1, T)."""

ENCODERS = ("encoder", "transformer")
"""Names that BERT, DistilBERT and their relatives have for the module that all layers are in."""

TABLES = ("position_embeddings", "wpe", "embed_positions")
"""Names that models have for their table of positions."""

BY_MODULE = {
    "MPNetSelfAttention": "position_bias",
    "DisentangledSelfAttention": "relative_pos",
}
"""Attention modules that use no function of transformers' registry, and the argument that tells
them of positions; what computes that for the longest sequence is in `POSITIONS`."""

POSITIONS = ("compute_position_bias", "get_rel_pos")

OUTPUTS = frozenset({"logits", "start_logits", "end_logits", "last_hidden_state"})
"""Outputs that are compared, of those that a model has."""

_ROUNDING = 1e-4
"""Largest difference of outputs that is rounding, relative to the largest output."""

_SAMPLE_LENGTHS = (2, 5, 9)
"""Tokens of the texts that a model is tried out with: different ones, so that there is padding."""

_SHORT = 9
"""Tokens of the short sample beside a long one."""

_BEYOND_WINDOW = 40
"""Tokens by which the long one is longer than the window of the model's attention."""

_VARIES = 1e-3
"""Logits that differ less from text to text do not show which tokens a head looks at."""


class Form(enum.Enum):
    """Form in which a head gets the hidden states (1, T, hidden)."""

    FIRST = "the first token of each sequence: (B, 1, hidden)"
    LAST = "its last token that is none of padding: (B, 1, hidden)"
    FLAT = "all tokens, as they are"
    ROWS = "padded with zeros: (B, longest, hidden)"


class Packing:
    """A model of transformers that computes without padding what is announced to it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.base = model.base_model
        self.form = Form.ROWS
        self.is_first_token_only = False
        """The last layer computes first tokens alone, beyond its keys and values."""
        self.layers: list[Layer] = []
        """Layers that compute batches in place of the encoder; none: nothing does."""
        self.gpu_layers: GpuLayers | None = None
        """The same layers on a GPU; made for the first batch."""
        self.encoder = _encoder(self.base)  # None: layers are those of the model
        self._announced: Layout | None = None
        self._ends_with_longest = False
        """Positions are computed for the longest sequence: there can be none of padding after
        it."""
        self._inputs: dict[str, Tensor] | None = None
        """Inputs of the packed batch under way."""
        self._lasts: Tensor | None = None
        """Tokens of that batch that `Form.LAST` takes: int64, (B,)."""
        self._wrapped: list[tuple[Any, str]] = []
        self._position_count, self._first_position = position_limits(self.base)
        self._parameters = inspect.signature(self.base.forward).parameters
        self._configs: list[tuple[Any, str]] = []
        """Configurations of the model's modules, and the attention that each had."""
        for module in self.base.modules():
            config = getattr(module, "config", None)
            # Modules share configurations: by identity, as equal ones may be different objects.
            is_noted = any(config is each for each, _ in self._configs)
            if config and not is_noted:
                self._configs.append((config, config._attn_implementation))
        self._wrap(getattr(self.base, "pooler", None), "forward", self._pooled)
        self._wrap_attention_modules()
        self._wrap(self.base, "forward", self._base_forward)
        # Before the next line: a model without a head is its own base, and is wrapped again there.
        self._states_of = self.base.forward
        self._wrap(model, "forward", self._forward)

    def _wrap_attention_modules(self) -> None:
        """Wraps modules of `BY_MODULE`, and what computes their positions."""
        for module in self.base.modules():
            positions = BY_MODULE.get(type(module).__name__)
            if positions:
                self._ends_with_longest = True
                self._wrap(
                    module,
                    "forward",
                    packed_attention.group_by_group,
                    positions,
                )
            for name in POSITIONS:
                if hasattr(module, name):
                    self._wrap(module, name, packed_attention.of_longest)

    def _wrap(
        self,
        module: Any,
        name: str,
        method: Callable[..., Any],
        *more: Any,
    ) -> None:
        """Puts another method, which is called with the module's own, in its place."""
        if module is not None:
            original = getattr(module, name)
            replacement = functools.partial(method, original, *more)
            setattr(module, name, functools.wraps(original)(replacement))
            self._wrapped.append((module, name))

    def undo(self) -> None:
        """Makes the model what it was, unless its last layer computes first tokens alone."""
        self._use(None)
        for module, name in self._wrapped:
            # The wrapper is an attribute of the instance: without it the class's method is back.
            vars(module).pop(name, None)

    def expect(self, lengths: Tensor, device: torch.device) -> None:
        """Announces the batch that the model gets next.

        Args:
            lengths: lengths of its sequences, sorted, on the CPU: int64, (B,).
            device: where the model computes.

        Raises:
            ValueError: the model has no positions for a sequence of this length.
        """
        # on a GPU the lookup would say nothing of it
        if lengths[-1] > self._position_count:
            raise ValueError(
                f"a text of {lengths[-1]} tokens is longer than the {self._position_count} "
                f"positions of the model: train with --max-length {self._position_count}"
            )
        multiple = 0
        if not self._ends_with_longest:
            multiple = packed_attention.token_multiple(device)
        self._announced = Layout(lengths, device, multiple)

    def _use(self, layout: Layout | None) -> None:
        """Lets attention work on a packed batch; None: on a padded one, as transformers does."""
        packed_attention.in_force = layout
        for config, implementation in self._configs:
            if layout:
                implementation = NAME
            config._attn_implementation = implementation

    # --- forward passes ---------------------------------------------------------------------------

    def _forward(self, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The model's forward: its head sees the batch in the form that it wants."""
        layout = self._announced
        ids = named.get("input_ids")
        is_packed = "position_ids" in named and "attention_mask" not in named
        # A batch with padding, as of a generation within an evaluation.
        if layout is None or not is_packed or ids is None:
            self._use(None)
            return forward(*args, **named)
        if ids.shape != (1, layout.tokens):  # not the batch that was announced
            self._use(None)
            return forward(*args, **named)
        self._use(layout)
        # The head sees inputs of the form that it wants; the model below it gets the packed ones.
        self._inputs = {}
        for name in PACKED:
            if name in named:
                self._inputs[name] = named.pop(name)
        if self.form is Form.LAST:
            self._lasts = self._last_of_text(ids.squeeze(0))
        named["input_ids"] = self._shaped(ids)
        if self.form is Form.ROWS:
            mask = self._shaped(torch.ones_like(ids))
            named["attention_mask"] = mask
            # Heads may look for it, and not at the mask.
            pad = self._pad_id
            if pad:
                named["input_ids"] = named["input_ids"].masked_fill(mask == 0, pad)
        try:
            return forward(*args, **named)
        finally:
            self._inputs = None

    def _base_forward(
        self,
        forward: Callable[..., Any],
        *args: Any,
        **named: Any,
    ) -> Any:
        """The forward of the model without its head, which gets the packed batch."""
        if self._inputs is None:
            self._use(None)
            return forward(*args, **named)
        # Positional arguments get their names, by which they are replaced below.
        by_name = dict(zip(self._parameters, args, strict=False))
        named = by_name | named
        padding = _layout().padding
        # Some models take no token_type_ids.
        for name in self._inputs.keys() & self._parameters.keys():
            tokens = self._inputs[name]
            if padding:
                tokens = torch.nn.functional.pad(tokens, (0, padding))
            named[name] = tokens
        positions = named["position_ids"] + self._first_position
        named["position_ids"] = positions
        # Of four dimensions: transformers makes no mask of it, and looks for no padding.
        named["attention_mask"] = torch.ones(1, 1, 1, 1, device=positions.device)
        # keys and values of packed tokens are of no use
        if "use_cache" in self._parameters:
            named["use_cache"] = False
        output = forward(**named)
        output.last_hidden_state = self._shaped(output.last_hidden_state)
        return output

    def _pooled(self, forward: Callable[..., Any], states: Tensor) -> Any:
        """The forward of a pooler, which is between the model without its head and the head."""
        if self._inputs is not None:
            states = self._shaped(states)
        return forward(states)

    def _shaped(self, tokens: Tensor) -> Tensor:
        """Returns (1, T, ...), or (1, B, ...) of first tokens alone, in the form that the head
        wants."""
        layout = _layout()
        rows = tokens.squeeze(0)
        if len(rows) < layout.tokens:  # first tokens alone, of a narrowed last layer
            return rows.unsqueeze(1)
        rows = rows[: layout.tokens]  # without the padding that makes a multiple
        match self.form:
            case Form.FLAT:
                return rows.unsqueeze(0)
            case Form.ROWS:
                return layout.all.apart(rows)
            case Form.FIRST:
                return take(rows, layout.firsts).unsqueeze(1)
            case Form.LAST:
                assert self._lasts is not None
                return take(rows, self._lasts).unsqueeze(1)

    @property
    def _pad_id(self) -> int | None:
        config = self.model.config.get_text_config()
        pad: int | None = getattr(config, "pad_token_id", None)
        return pad

    def _last_of_text(self, ids: Tensor) -> Tensor:
        """Returns the last token of each sequence that is none of padding, which transformers'
        heads look for, also where a tokenizer ends texts with that token: int64, (B,).

        It is the first token where all are of padding.
        """
        layout = _layout()
        if self._pad_id is None:
            return layout.lasts
        places = torch.arange(len(ids), device=ids.device)
        text_places = places.masked_fill(ids == self._pad_id, -1)
        # Of each place, the last one of text up to it; it may be of the sequence before.
        last_so_far = text_places.cummax(0).values
        return torch.maximum(last_so_far[layout.lasts], layout.firsts)

    def _narrowed(self, forward: Callable[..., Any], *rows: Tensor) -> Any:
        """The forward of the module of the last layer from which on there are first tokens
        alone."""
        layout = packed_attention.in_force
        if layout is None:
            return forward(*rows)
        # The states of attention, and where the module adds a residual, its input, too.
        first_rows = []
        for each in rows:
            of_firsts = take(each.squeeze(0), layout.firsts)
            first_rows.append(of_firsts.unsqueeze(0))
        return forward(*first_rows)

    def _encoded(
        self,
        forward: Any,
        hidden_states: Tensor,
        *args: Any,
        **named: Any,
    ) -> Any:
        """The forward of the encoder: by our own layers; on CPUs, where sequences are short."""
        layout = packed_attention.in_force
        if layout is None or not self.layers:
            return forward(hidden_states, *args, **named)
        tokens = hidden_states.squeeze(0)
        dtype = packed_attention.computed_in(tokens)
        if gpu_layers.why_not(self.layers[0], tokens.device, dtype) is None:
            states = self._by_gpu_layers(tokens, layout, dtype)
        elif tokens.device.type == "cpu" and layout.longest <= SHORT:
            states = self._by_fused_layers(tokens, layout, dtype)
        else:
            return forward(hidden_states, *args, **named)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=states.unsqueeze(0)
        )

    def _by_gpu_layers(
        self,
        tokens: Tensor,
        layout: Layout,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns hidden states after all layers on a GPU: (T, hidden), or (B, hidden) of first
        tokens."""
        if self.gpu_layers is None:
            self.gpu_layers = GpuLayers(self.layers, tokens.device, dtype)
        training = self.model.training
        states = self.gpu_layers.run(
            tokens,
            layout.starts,
            training,
            self._computes_again,
        )
        # To the layers, padding is one more sequence: the last.
        if self.is_first_token_only:
            states = states[: layout.sequences]
        return states

    def _by_fused_layers(
        self,
        tokens: Tensor,
        layout: Layout,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns hidden states after all layers on a CPU: (T, hidden), or (B, hidden) of first
        tokens."""
        rows = Rows.of(layout.lengths, self.layers[0].heads, dtype)
        more_rows = rows.count - len(tokens)
        padded = torch.nn.functional.pad(tokens.to(dtype), (0, 0, 0, more_rows))
        training = self.model.training
        states = fused_layers.run(
            self.layers,
            padded,
            rows,
            training,
            self._computes_again,
        )
        if not self.is_first_token_only:
            states = states[: rows.tokens]
        return states

    @property
    def _computes_again(self) -> bool:
        """transformers' switch of --activation-checkpointing, which is on each layer."""
        return getattr(self.encoder.layer[0], "gradient_checkpointing", False)

    # --- what is learnt by trial ------------------------------------------------------------------

    def try_out(self, longest: int | None) -> float:
        """Finds the form that the head wants, for texts of up to `longest` tokens.

        Returns:
            The largest difference of outputs to those of padded batches; 0: they are the same.
        """
        difference = self._try_long(longest)
        if difference:
            return difference
        sample = _Sample.of(self.model, *_SAMPLE_LENGTHS)
        expected = self.model(**sample.padded)
        for form in _forms(expected.get("logits")):
            self.form = form
            if self.form is Form.ROWS:  # the last resort: what it raises is raised
                difference = self._difference(sample, expected)
            else:
                difference = self._difference_or_inf(sample, expected)
            # Texts may end with the token of padding, for which some heads look.
            if self.form is Form.LAST and not difference:
                difference = self._difference_or_inf(*self._padding_at_end())
            if not difference:
                break
        if self.form is Form.FIRST:
            self._compute_first_only(sample, expected)
        return difference

    def _padding_at_end(self) -> tuple["_Sample", Any]:
        """Returns texts that end with the token of padding, and the outputs for them."""
        sample = _Sample.of(self.model, *_SAMPLE_LENGTHS, ends_with_padding=True)
        return sample, self.model(**sample.padded)

    @torch.no_grad()
    def difference_for(self, table: TokenTable, pad_id: int) -> float:
        """Returns the largest difference of outputs for samples, packed and padded.

        0: they are the same.
        """
        packed = table.packed(np.arange(len(table)))
        padded = table.batch(packed.indices, pad_id)
        mask = padded.inputs["attention_mask"].bool()
        sample = _Sample(padded.inputs, packed.inputs, mask)
        with evaluating(self.model):
            return self._difference(sample, self.model(**sample.padded))

    def _difference_or_inf(self, sample: "_Sample", expected: Any) -> float:
        try:
            return self._difference(sample, expected)
        except Exception:  # whatever a head does with a form that it does not expect
            return torch.inf

    def _difference(self, sample: "_Sample", expected: Any) -> float:
        """Returns the largest difference of the model's outputs; 0: rounding alone."""
        self.expect(sample.mask.sum(1), self.model.device)
        output = self.model(**sample.packed)
        differences = []
        for name in OUTPUTS & expected.keys():
            padded = without_padding(name, expected[name], sample.mask)
            packed = without_padding(name, output[name], sample.mask)
            differences.append(difference(padded, packed))
        return max(differences)

    def _compute_first_only(self, sample: "_Sample", expected: Any) -> None:
        """Makes the last layer compute nothing for a sequence's other tokens, where this is known
        to be possible and gives the same."""
        if not self.encoder:
            return
        parts = _first_only_parts(self.encoder.layer[-1])
        if parts is None:
            return
        attention_module, next_module = parts
        setattr(attention_module, FIRST_TOKEN_ONLY, True)
        self._wrap(next_module, "forward", self._narrowed)
        self.is_first_token_only = not self._difference(sample, expected)
        if not self.is_first_token_only:
            delattr(attention_module, FIRST_TOKEN_ONLY)
            del next_module.forward

    def _try_long(self, longest: int | None) -> float:
        """Compares a text that is longer than windows of attention; a layer of each kind is
        enough."""
        sizes = [SHORT]  # beyond it attention is computed otherwise
        for module in self.base.modules():
            window = getattr(module, "sliding_window", None)
            if isinstance(window, int):
                sizes.append(window)
        limits = [
            self._position_count,
            getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize,
            longest or sys.maxsize,
        ]
        # Somewhat longer than the window, so that its first and its last tokens are strangers.
        length = min(max(sizes) + _BEYOND_WINDOW, *limits)
        # Lengths are sorted: the short text beside it comes first, and has padding.
        sample = _Sample.of(self.model, _SHORT, max(_SHORT + 1, length))
        with _few_layers(self.base):
            expected = self.base(**sample.padded).last_hidden_state
            states = without_padding("last_hidden_state", expected, sample.mask)
            return difference(states, self._states(sample))

    def _states(self, sample: "_Sample") -> Tensor:
        """Returns hidden states: (tokens, hidden)."""
        form = self.form
        self.form = Form.FLAT  # whatever the head wants: here there is none
        self._inputs = sample.packed
        self._use(Layout(sample.mask.sum(1), self.model.device))
        try:
            states: Tensor = self._states_of(**sample.packed).last_hidden_state
        finally:
            self.form = form
            self._inputs = None
        return states.squeeze(0)

    def fuse(self) -> None:
        """Lets fused layers compute, where they are known and give the same."""
        if not self.encoder:
            return
        layers = [layer_of(module) for module in self.encoder.layer]
        known_layers = [layer for layer in layers if layer]
        # All or none: the forward of the encoder is replaced as a whole.
        if not known_layers or len(known_layers) < len(layers):
            return
        sample = _Sample.of(self.model, *_SAMPLE_LENGTHS)
        before = self._states(sample)
        # Compared with the layers that are replaced: a known name may hide other mathematics.
        known_layers[-1].first_only = self.is_first_token_only
        self._wrap(self.encoder, "forward", self._encoded)
        self.layers = known_layers
        if difference(before, self._states(sample)):
            self.layers = []


def pack(model: Any, fuse: bool = True, longest: int | None = None) -> Packing | str:
    """Makes a model compute without padding.

    Every model is tried out: its outputs must be what they were.

    Args:
        model: a model of transformers, or the one in PEFT's.
        fuse: let our own layers compute, where they can.
        longest: tokens of the longest text that is to come; None: any.

    Returns:
        The packing; or why the model cannot do it, as a text.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = type(model).__name__
    is_encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    if hasattr(model, "get_base_model"):  # PEFT's
        model = model.get_base_model()
    if is_encoder_decoder or not _has_known_attention(model):
        return f"{name} cannot work without padding"
    # A registry of the whole process: only modules whose configuration has the name use it.
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    packing = Packing(model)
    with torch.no_grad(), evaluating(model):
        try:
            difference = packing.try_out(longest)
            cause = f"outputs differ by {difference:.2g}" if difference else None
        except Exception as error:  # whatever a model does with what it does not expect
            cause = f"{type(error).__name__}: {error}"
        if cause is None and fuse:
            packing.fuse()
    if cause is None:
        return packing
    packing.undo()
    return f"{name} gives other outputs without padding ({cause})"


def _has_known_attention(model: Any) -> bool:
    """Returns whether attention is by transformers' registry, or by a module of `BY_MODULE`."""
    if getattr(model, "_supports_attention_backend", False):
        return True
    return any(type(module).__name__ in BY_MODULE for module in model.modules())


def _layout() -> Layout:
    """Returns the layout of the packed batch under way."""
    assert packed_attention.in_force is not None
    return packed_attention.in_force


def _encoder(base: Any) -> Any:
    """Returns the module that all layers are in; None: there is none of a known name."""
    for name, module in base.named_children():
        if name in ENCODERS and hasattr(module, "layer"):
            return module
    return None


def position_limits(base: Any) -> tuple[int, int]:
    """Returns how many tokens of a text have a position in the model's table, and the position of
    the first."""
    for name, module in base.named_modules():
        if name.rpartition(".")[2] in TABLES and isinstance(module, torch.nn.Embedding):
            # BART's and OPT's add to positions by themselves
            offset = getattr(module, "offset", 0)
            if offset:
                return module.num_embeddings - offset, 0
            first = 0
            # RoBERTa's positions begin behind that of padding
            if module.padding_idx is not None:
                first = module.padding_idx + 1
            most = module.num_embeddings - first
            # Nystromformer, YOSO and MRA have two rows more than numbers of positions.
            numbers = getattr(
                base.get_submodule(name.rpartition(".")[0]), "position_ids", None
            )
            if numbers is not None:
                most = min(most, numbers.shape[-1])
            return most, first
    return sys.maxsize, 0


def _forms(logits: Tensor | None) -> list[Form]:
    """Returns the forms that a head may want, by its logits for a sample; the best one first."""
    if logits is None:
        return [Form.ROWS]
    if logits.ndim > 2:  # of tokens, not of texts
        return [Form.FLAT, Form.ROWS]
    if logits.std(0).max() > _VARIES:
        return [Form.FIRST, Form.LAST, Form.ROWS]
    return [Form.ROWS]


def without_padding(name: str, output: Tensor, is_token: Tensor) -> Tensor:
    """Returns an output of `OUTPUTS` for a batch: of its texts, as it is; or of their tokens, one
    after another.

    Args:
        output: of a padded batch, or of a packed one: (1, tokens, ...), or padded as well.
        is_token: which places of the padded batch hold a token that counts: bool, (batch, width).
    """
    # By its dimensions: there may be as many classes as tokens.
    if name == "logits" and output.ndim == 2:
        return output
    shape = output.shape[:2]
    if shape == is_token.shape:
        return output[is_token.to(output.device)]
    if shape == (1, int(is_token.sum())):
        return output[0]
    return output


def difference(expected: Tensor, output: Tensor) -> float:
    """Returns the largest difference; 0 where it is rounding alone."""
    if expected.shape != output.shape:
        return torch.inf
    difference = float((output - expected).abs().max())
    # At least 1: relative to outputs near 0, rounding would look like a difference.
    largest = max(1.0, float(expected.abs().max()))
    if difference <= _ROUNDING * largest:
        return 0.0
    return difference


def _first_only_parts(layer: Any) -> tuple[Any, Any] | None:
    """Returns the module of a layer that attends, and the first one after it.

    All that follows works on each token by itself. None: the layer is none that is known here.
    """
    attention_module: Any = getattr(layer, "attention", None)
    is_bert = hasattr(attention_module, "self") and hasattr(attention_module, "output")
    if is_bert:  # or one of its relatives
        return attention_module.self, attention_module.output
    if hasattr(layer, "sa_layer_norm"):  # DistilBERT
        return attention_module, layer.sa_layer_norm
    return None


@dataclass(frozen=True, slots=True)
class _Sample:
    """Texts to try out a model with, sorted by length."""

    padded: dict[str, Tensor]
    packed: dict[str, Tensor]
    mask: Tensor
    """Places of the padded ones that hold a token: bool, (B, L)."""

    @classmethod
    def of(
        cls,
        model: Any,
        *lengths: int,
        ends_with_padding: bool = False,
    ) -> "_Sample":
        longest = lengths[-1]
        ends = torch.tensor(lengths)[:, None]
        mask = torch.arange(longest) < ends
        config = model.config.get_text_config()
        pad = config.pad_token_id or 0
        # At most vocab_size - 2: with the 1 that is added to some below, still a token.
        numbers = torch.arange(mask.numel()).view(mask.shape)
        tokens = numbers % (config.vocab_size - 3) + 2
        # No token of a text may be that of padding: heads and positions look for it.
        tokens = tokens + (tokens == pad)
        tokens = tokens.masked_fill(~mask, pad)
        if ends_with_padding:
            tokens = tokens.scatter(1, ends - 1, pad)
        positions = torch.arange(longest).expand(mask.shape)[mask]
        return cls(
            padded={"input_ids": tokens, "attention_mask": mask.long()},
            packed={"input_ids": tokens[mask][None], "position_ids": positions[None]},
            mask=mask,
        )


@contextlib.contextmanager
def _few_layers(base: Any) -> Iterator[None]:
    """Leaves a model, of its layers, the first of each kind and those before."""
    path = ""
    # The longest list of modules in a model is that of its layers.
    layers = torch.nn.ModuleList()
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) > len(layers):
            path = name
            layers = module
    # Models whose layers are all alike do not name kinds.
    kinds = getattr(base.config, "layer_types", None) or [None]
    # `index` is of the first one of a kind
    last = max(kinds.index(kind) for kind in kinds)
    base.set_submodule(path, layers[: last + 1])
    try:
        yield
    finally:
        base.set_submodule(path, layers)
