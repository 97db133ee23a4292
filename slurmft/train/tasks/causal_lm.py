"""Causal language modelling: texts, cut into blocks, of which each token tells the next.

Documents follow one another, each ended by the end-of-text token, and are cut into blocks of
--max-length tokens, as transformers' run_clm.py does; but the last, shorter block stays. A token
sees all before it in its block, those of other documents too.
"""

import dataclasses
import inspect
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as auto

from slurmft.core.errors import UsageError
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.tasks.hub import Pretrained, Rows
from slurmft.train.tasks.metrics import check_numbers

ROWS_AT_ONCE = 1000
_LOGITS_AT_ONCE = 2**20


class Task(Pretrained):
    """Texts from a hub data set or a local folder."""

    metric_names = ("perplexity", "eval_loss", "token_accuracy")
    lower_is_better = True
    prediction_dtype: np.dtype[Any] = np.dtype(np.float64)
    prediction_shape: tuple[int, ...] = (3,)
    """Of a sample: the sum of the loss, tokens, tokens that are predicted."""
    eos_may_pad = True  # padding is masked, and has no labels

    _chooses_logits = False
    """Whether the model makes logits of chosen tokens alone."""

    def _longest(self, tokenizer: Any) -> int:
        """Tokens of a sample, at most."""
        asked = self.config.max_length
        known = getattr(self._load(AutoConfig.from_pretrained), "max_position_embeddings", asked)
        return int(min(asked, known, tokenizer.model_max_length))

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        """The blocks of a split."""
        tokens, longest = np.concatenate(self._texts(tokenizer, rows)), self._longest(tokenizer)
        if len(tokens) % longest == 1:
            tokens = tokens[:-1]  # a token alone tells none
        if not len(tokens):
            raise UsageError(f"{rows.where!r} has no texts", "choose with --text-column")
        labels = np.append(tokens[1:], IGNORED)
        labels[longest - 1 :: longest] = IGNORED
        offsets = np.append(np.arange(0, len(tokens), longest), len(tokens))
        blocks = len(offsets) - 1
        cut = f"{len(tokens):,} tokens, {blocks:,} blocks of {longest}"
        self.notes.append(f"{rows.where!r}: {cut}")
        return TokenTable(tokens, offsets, np.empty((blocks, 0)), token_labels=labels)

    def _texts(self, tokenizer: Any, rows: Rows) -> list[np.ndarray]:
        """The tokens of every text; those of a plain text file are the parts of one."""
        (texts,), found = self.values(rows), [np.empty(0, dtype=np.int32)]
        is_one = rows.where.removesuffix(".gz").endswith(".txt")
        texts = [text for text in texts if is_one or text.strip()]
        for start in range(0, len(texts), ROWS_AT_ONCE):
            part = texts[start : start + ROWS_AT_ONCE]
            encoded = tokenizer(part, add_special_tokens=not is_one)["input_ids"]
            whole = encoded if is_one else (self.ended(tokenizer, ids) for ids in encoded)
            found += [np.array(ids, dtype=np.int32) for ids in whole]
        return found

    def ended(self, tokenizer: Any, ids: list[int]) -> list[int]:
        """Tokens of a text, with the end-of-text token.

        Raises:
            UsageError: the tokenizer has none.
        """
        end = tokenizer.eos_token_id
        if end is None:
            raise UsageError(
                f"the tokenizer of {self.config.model!r} has no end-of-text token",
                "set eos_token in its tokenizer_config.json, to a token of its vocabulary",
            )
        return ids if ids[-1:] == [end] else [*ids, end]

    def model(self, data: TokenData) -> Any:
        """
        Raises:
            UsageError: it is no causal language model.
        """
        config = self._load(AutoConfig.from_pretrained)
        is_encoder = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING
        if is_encoder or type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UsageError(
                f"--model {self.config.model!r} is {config.model_type}, no causal language model",
                "give a decoder, such as Llama, Qwen, Gemma or GPT-2",
            )
        model = self.pretrained(auto.AutoModelForCausalLM)
        self._chooses_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        return model

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        """Logits are wanted of tokens with labels alone: `logits_to_keep` are the columns that have
        any, `labels` and `samples`, (rows, columns), those of them and whose they are."""
        labels = batch.targets["labels"]
        samples = torch.arange(len(batch.indices))
        if len(labels) < len(samples):  # without padding: one row of all
            samples = samples.repeat_interleave(batch.lengths)[None]
        else:
            samples = samples[:, None].expand_as(labels)
        inputs, columns = batch.inputs, torch.arange(labels.shape[1])
        if self._chooses_logits:
            columns = (labels != IGNORED).any(0).nonzero().squeeze(1)
            inputs = inputs | {"logits_to_keep": columns}
        targets = {"labels": labels[:, columns], "samples": samples[:, columns]}
        return dataclasses.replace(batch, inputs=inputs, targets=targets)

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        labels = batch.targets["labels"].flatten()
        return _losses(output.logits, labels).sum(), (labels != IGNORED).sum()

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """See `prediction_shape`: float64, (batch, 3)."""
        labels, samples = (batch.targets[name].flatten() for name in ("labels", "samples"))
        right = output.logits.flatten(0, -2).argmax(-1) == labels
        each = torch.stack([_losses(output.logits, labels), labels != IGNORED, right], 1).double()
        return each.new_zeros(len(batch.indices), 3).index_add_(0, samples, each)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Of all tokens that are to be predicted."""
        check_numbers(predictions)
        total, tokens, right = predictions.sum(axis=0).tolist()
        values = (float(np.exp(total / tokens)), total / tokens, right / tokens)
        return dict(zip(self.metric_names, values, strict=True))


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of each token. Nothing of the logits' size is made: some rows at a time, and
    backwards their gradient takes the place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.rows = max(_LOGITS_AT_ONCE // logits.shape[-1], 1)
        parts: Any = logits.split(ctx.rows)  # type: ignore[no-untyped-call]
        sums = torch.cat([part.float().logsumexp(-1) for part in parts])
        ctx.save_for_backward(logits, labels, sums)
        return sums - logits.gather(1, labels[:, None]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, *others = ctx.saved_tensors
        rows = zip(*(t.split(ctx.rows) for t in (logits, *others, *gradients)), strict=True)
        for part, labels, sums, gradient in rows:
            part.sub_(sums[:, None]).exp_()
            part.scatter_add_(1, labels[:, None], part.new_full((len(part), 1), -1.0))
            part.mul_(gradient[:, None])
        return logits, None


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each token, 0 where it has no label: (tokens,). Its backward pass uses the logits
    up."""
    each: torch.Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.clamp(min=0))  # type: ignore[no-untyped-call]
    return each.masked_fill(labels == IGNORED, 0)
