"""Vocabulary trimming: only the rows of an embedding table that the data looks up are trained.

A table has a row for every token of its languages; a run's data has some of them. The gradients of
all others are zero in every step: to make, clip, sum over ranks and apply them is work for nothing,
and their moments take memory for nothing. So the table is trimmed to the rows in use before
training, and made whole again when the model is saved. What is trained is the same, up to the
rounding of the norm that gradients are clipped by.

AdamW moves a row without gradients by its weight decay alone. By how much, a row of ones tells,
which is trained beside the others and never looked up; it is in every checkpoint, too.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurmft.core.errors import UsageError
from slurmft.train.data.token_data import TokenData
from slurmft.train.engine.evaluating import evaluating

_LEAST_SAVED_BYTES = 2**20
"""Trimming a table by less is not worth it."""
# Sizes of the batch with which a trimmed model is compared.
_SAMPLES = 2
_LENGTH = 16
_TOKENS_AT_ONCE = 2**20


class TrimmedVocabulary:
    """The trimmed embedding table of a model.

    Args:
        module: the embedding; its table is trimmed in place.
        used: tokens whose rows stay, sorted: int64, (rows,).
    """

    def __init__(self, module: torch.nn.Embedding, used: Tensor) -> None:
        self.used = used
        self.total = module.num_embeddings
        self._whole: Tensor | None = module.weight.data
        self._padding = module.padding_idx
        # A token that is not in use has a place beyond the table: to look it up is an error.
        place_of = torch.full((self.total,), self.total)
        place_of[used] = torch.arange(len(used))
        # As a buffer it moves to the device with the model; no checkpoint needs it.
        module.register_buffer("place_of", place_of, persistent=False)
        if self._padding is not None:
            # torch gives the row of padding no gradients, by its index.
            module.padding_idx = int(place_of[self._padding])
        ones = module.weight.data.new_ones(1, module.embedding_dim)
        rows = module.weight.data[used]
        _set(module, torch.cat([rows, ones]))
        self._hook = module.register_forward_pre_hook(_look_up, with_kwargs=True)

    @classmethod
    def trim(cls, model: Any, data: TokenData) -> "TrimmedVocabulary | str | None":
        """Trims the table of a model that is still on the CPU, where that gains something.

        Returns:
            None: it gains nothing. A text: why it cannot be done, as the model gave other outputs;
            it is left as it was.
        """
        try:
            module = model.get_input_embeddings()
        except NotImplementedError:  # transformers' own, for models that do not say
            return None
        is_table = isinstance(module, torch.nn.Embedding)
        if model.config.is_encoder_decoder or not is_table:
            return None
        used = _tokens(data, module)
        if not is_plain_table(model, module):
            return None
        # One row less is saved: that of ones is added.
        unused_rows = module.num_embeddings - len(used) - 1
        if unused_rows * module.weight[0].nbytes < _LEAST_SAVED_BYTES:
            return None
        before = _logits(model, data)
        trimmed = cls(module, used)
        try:
            after = _logits(model, data)
        except (IndexError, RuntimeError) as error:
            cause = f"{type(error).__name__}: {error}"
        else:
            if torch.equal(before, after):
                return trimmed
            difference = (after - before).abs().max()
            cause = f"outputs differ by {float(difference):.2g}"
        trimmed.restore(module)
        return f"{type(model).__name__} cannot do without the rows of unused tokens ({cause})"

    def forget(self) -> None:
        """Frees the whole table, where the model is not saved."""
        self._whole = None

    def facts(self) -> dict[str, int]:
        """Returns the number of rows: all, and those in use."""
        return {"all": self.total, "used": len(self.used)}

    def state_dict(self, model: Any) -> dict[str, Tensor]:
        """Returns the state of the model with the whole table. Not after `forget`."""
        table = model.get_input_embeddings()
        weights: dict[str, Tensor] = model.state_dict()
        for name, weight in model.named_parameters():
            if weight is table.weight:
                weights[name] = self._restored(table)
        return weights

    def restore(self, module: torch.nn.Embedding) -> None:
        """Makes the table whole again, with the rows as they are now. Not after `forget`."""
        whole = self._restored(module)
        self._hook.remove()
        del module.place_of
        module.padding_idx = self._padding
        _set(module, whole)

    @torch.no_grad()
    def _restored(self, module: torch.nn.Embedding) -> Tensor:
        assert self._whole is not None
        # Rows that nobody looked up have shrunk like the row of ones, by weight decay alone.
        rows = module.weight.detach().to(self._whole)
        whole = self._whole * rows[-1]
        whole[self.used] = rows[:-1]
        return whole


def is_plain_table(model: Any, module: Any) -> bool:
    """Returns whether a table trains, is looked up as in torch, and belongs to one layer alone."""
    return (
        isinstance(module, torch.nn.Embedding)
        # others compute their rows
        and type(module).forward is torch.nn.Embedding.forward
        and module.weight.requires_grad
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
        and not is_shared(model, module)
    )


def is_shared(model: Any, module: Any) -> bool:
    """Returns whether a module's weight is also that of another module."""
    count = 0
    # By default a shared weight comes once; here it comes under each of its names.
    for _, weight in model.named_parameters(remove_duplicate=False):
        if weight is module.weight:
            count += 1
    return count > 1


def _look_up(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A hook that puts the places of rows in place of tokens."""
    if args:
        return (module.place_of[args[0]], *args[1:]), kwargs
    return args, kwargs | {"input": module.place_of[kwargs["input"]]}


def _set(module: torch.nn.Embedding, weight: Tensor) -> None:
    module.weight = torch.nn.Parameter(weight)
    module.num_embeddings = len(weight)


def check_tokens(model: Any, data: TokenData) -> None:
    """Raises UsageError where the data has a token that a model does not know: to look it up is an
    error that says nothing of its cause."""
    try:
        module = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a model that does not say
        return
    if not isinstance(module, torch.nn.Embedding):
        return
    largest = max(int(table.tokens.max()) for table in data.tables)
    if largest >= module.num_embeddings:
        raise UsageError(
            f"the tokenizer makes token {largest}, but the model knows {module.num_embeddings} "
            "tokens only",
            "give --model a folder with a model and the tokenizer that belongs to it",
        )


def _tokens(data: TokenData, module: torch.nn.Embedding) -> Tensor:
    """Returns the tokens that a run can look up: int64, (rows,), sorted."""
    is_used = np.zeros(module.num_embeddings, dtype=bool)
    # Batches have padding, which tables do not.
    is_used[data.pad_id] = True
    if module.padding_idx is not None:
        is_used[module.padding_idx] = True
    for table in data.tables:
        for start in range(0, len(table.tokens), _TOKENS_AT_ONCE):
            part = table.tokens[start : start + _TOKENS_AT_ONCE]
            is_used[part] = True
    return torch.from_numpy(is_used.nonzero()[0])


@torch.inference_mode()
def _logits(model: Any, data: TokenData) -> Tensor:
    """Returns a model's outputs for the beginnings of the first samples."""
    samples = np.arange(min(_SAMPLES, len(data.train)))
    batch = data.train.batch(samples, data.pad_id)
    inputs = {}
    for name, tensor in batch.inputs.items():
        inputs[name] = tensor[:, :_LENGTH]
    with evaluating(model):
        output = model(**inputs)
    logits: Tensor = output[0]
    return logits
