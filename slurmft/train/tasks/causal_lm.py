"""Causal language modelling: texts, cut into blocks, of which each token tells the next.

Documents follow one another, each ended by the end-of-text token, and are cut into blocks of
--max-length tokens, as transformers' run_clm.py does; but the last, shorter block stays. A token
sees all before it in its block, those of other documents too.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as auto

from slurmft.core.errors import UsageError
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.sources import no_end
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.base import Evaluated
from slurmft.train.tasks.hub import Rows
from slurmft.train.tasks.metrics import check_numbers
from slurmft.train.tasks.pretrained import Pretrained

ROWS_AT_ONCE = 1000
_LOGITS_AT_ONCE = 2**20
"""Numbers that the loss converts to fp32 at a time: 4 MiB."""


class Task(Pretrained):
    """Texts from a hub data set or a local folder."""

    metric_names = TASKS["causal-lm"].metrics
    lower_is_better = True
    prediction_dtype: np.dtype[Any] = np.dtype(np.float64)
    prediction_shape: tuple[int, ...] = (3,)
    """Of a sample: the sum of the loss, tokens, tokens that are predicted rightly."""
    limits_by_configuration = True
    names_padding = False  # a token that ends texts as well is none to a language model

    _chooses_logits = False
    """The model can make logits of chosen tokens alone."""

    def tells_texts_apart(self, tokenizer: Any) -> bool:
        """Returns False: texts follow one another in a block, and an answer its prompt."""
        return False

    # --- blocks -----------------------------------------------------------------------------------

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        """Returns the blocks of a split."""
        tokens = np.concatenate(self._texts(tokenizer, rows))
        longest = self.longest(tokenizer)
        if len(tokens) % longest == 1:
            # the last block would be a token alone, which tells no other
            tokens = tokens[:-1]
        if not len(tokens):
            raise UsageError(
                f"{rows.where!r} has no texts", "choose with --text-column"
            )
        # The label of a token is the one that follows it.
        labels = np.append(tokens[1:], IGNORED)
        labels[longest - 1 :: longest] = IGNORED  # the next token is of another block
        starts = np.arange(0, len(tokens), longest)
        offsets = np.append(starts, len(tokens))
        blocks = len(starts)
        self.notes.append(
            f"{rows.where!r}: {len(tokens):,} tokens, {blocks:,} blocks of {longest}"
        )
        # A block has no label of its own: each of its tokens has one.
        no_labels = np.empty((blocks, 0))
        return TokenTable(tokens, offsets, no_labels, token_labels=labels)

    def _texts(self, tokenizer: Any, rows: Rows) -> list[np.ndarray]:
        """Returns the tokens of every text; those of a plain text file are the parts of one."""
        is_one_text = rows.where.removesuffix(".gz").endswith(".txt")
        (texts,) = self.values(rows)
        if not is_one_text:  # whose parts may be blank lines
            texts = [text for text in texts if text.strip()]
        # so that no texts can be concatenated, too
        tokens = [np.empty(0, dtype=np.int32)]
        for start in range(0, len(texts), ROWS_AT_ONCE):
            part = texts[start : start + ROWS_AT_ONCE]
            # Special tokens would stand between the parts of one text.
            encoded = tokenizer(part, add_special_tokens=not is_one_text)["input_ids"]
            for ids in encoded:
                if not is_one_text:
                    ids = self.ended(tokenizer, ids)
                tokens.append(np.array(ids, dtype=np.int32))
        return tokens

    def ended(self, tokenizer: Any, ids: list[int]) -> list[int]:
        """Returns the tokens of a text with the end-of-text token; UsageError where the tokenizer
        has none."""
        end = tokenizer.eos_token_id
        if end is None:
            raise no_end(self.config.model)
        # Some tokenizers add it themselves.
        if ids[-1:] == [end]:
            return ids
        return [*ids, end]

    # --- prompts ----------------------------------------------------------------------------------

    def unlabelled(self, tokenizer: Any, texts: Sequence[list[Any]]) -> TokenTable:
        return self.prompt_table(tokenizer, texts[0])

    def prompt_table(
        self,
        tokenizer: Any,
        prompts: list[str],
        is_written: bool = False,
    ) -> TokenTable:
        """Returns the tokens of prompts, which the model continues; UsageError where one has none.

        Args:
            is_written: a chat template has written them, with special tokens.
        """
        # Where the tokenizer ends texts, nothing would follow a prompt.
        end = [tokenizer.eos_token_id]
        is_ended = not is_written and tokenizer("a")["input_ids"][-1:] == end
        ids: list[Any] = []
        for start in range(0, len(prompts), ROWS_AT_ONCE):
            part = prompts[start : start + ROWS_AT_ONCE]
            encoded = tokenizer(part, add_special_tokens=not is_written)["input_ids"]
            for tokens in encoded:
                if is_ended:
                    tokens = tokens[:-1]
                ids.append(tokens)
                if not tokens:
                    problem = f"row {len(ids)} has no tokens"
                    raise UsageError(problem, "give it a text, or take it out")
        return TokenTable.build(ids)

    def ends(self, tokenizer: Any) -> list[int]:
        """Returns the tokens that end what the model has learnt to write."""
        end = tokenizer.eos_token_id
        if end is None:
            return []
        return [end]

    # --- model, loss, metrics ---------------------------------------------------------------------

    def model(self, data: TokenData) -> Any:
        """Returns the model; UsageError where it is no causal language model."""
        model_config = self.load(AutoConfig.from_pretrained)
        kind = type(model_config)
        # Encoders such as BERT are in both lists.
        is_encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING
        if is_encoder or kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UsageError(
                f"--model {self.config.model!r} is {model_config.model_type}, no causal language "
                "model",
                "give a decoder, such as Llama, Qwen, Gemma or GPT-2",
            )
        model = self.pretrained(auto.AutoModelForCausalLM)
        tokenizer = self.tokenizer()
        # Sources of --mix are of language models, too.
        sources: list[Any] = [self, *self.mixed_sources()]
        for source in sources:
            _end_at(model, source.ends(tokenizer))
        parameters = inspect.signature(model.forward).parameters
        # A model without it makes logits of all tokens, of which those without a label are masked.
        self._chooses_logits = "logits_to_keep" in parameters
        return model

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        """Returns a batch for which logits are made of tokens with labels alone.

        `logits_to_keep` are the columns that have any; the targets `labels` and `samples`, both
        (rows, columns), are the labels of these columns and the samples that they are of.
        """
        labels = batch.targets["labels"]
        samples = torch.arange(len(batch.indices))
        if len(labels) < len(samples):  # without padding: one row of all samples
            samples = samples.repeat_interleave(batch.lengths)[None]
        else:
            samples = samples[:, None].expand_as(labels)
        inputs = batch.inputs
        columns = torch.arange(labels.shape[1])
        if self._chooses_logits:
            has_label = (labels != IGNORED).any(0)
            columns = has_label.nonzero().squeeze(1)
            inputs = inputs | {"logits_to_keep": columns}
        targets = {
            "labels": labels[:, columns],
            "samples": samples[:, columns],
        }
        return dataclasses.replace(batch, inputs=inputs, targets=targets)

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        labels = batch.targets["labels"].flatten()
        has_label = labels != IGNORED
        losses = _losses(output.logits, labels, self.config.label_smoothing)
        return losses.sum(), has_label.sum()

    def evaluate(self, model: Any, batch: Batch, data: TokenData) -> Evaluated:
        output = model(**batch.inputs)
        predictions = self.predict(output, batch, data)
        # A perplexity is of the labels as they are.
        if self.config.label_smoothing:
            return Evaluated(predictions, *self.loss(output, batch))
        # The predictions have the losses: those of a large vocabulary are not computed twice.
        loss, tokens, _ = predictions.sum(0)
        return Evaluated(predictions, loss, tokens)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns sums over the tokens of each sample, see `prediction_shape`: float64,
        (batch, 3)."""
        labels = batch.targets["labels"].flatten()
        samples = batch.targets["samples"].flatten()
        best_tokens = output.logits.flatten(0, -2).argmax(-1)
        # No token has the number of IGNORED: what has no label is never right.
        is_right = best_tokens == labels
        has_label = labels != IGNORED
        losses = _losses(output.logits, labels)
        # In double: sums over long texts stay exact, and so do counts.
        of_tokens = torch.stack([losses, has_label, is_right], 1).double()
        of_samples = of_tokens.new_zeros(len(batch.indices), 3)
        return of_samples.index_add_(0, samples, of_tokens)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns the metrics of all tokens that are to be predicted."""
        check_numbers(predictions)
        loss, tokens, right = predictions.sum(axis=0).tolist()
        return {
            "perplexity": float(np.exp(loss / tokens)),
            "token_accuracy": right / tokens,
        }


def _end_at(model: Any, ends: list[int]) -> None:
    """Lets a model stop at what it learns to end its texts with, here and where it is loaded from
    the files of the run: a base model knows the end of a document alone, and no end of a turn."""
    settings = model.generation_config
    known_ends = settings.eos_token_id
    if known_ends is None:
        known_ends = []
    elif isinstance(known_ends, int):
        known_ends = [known_ends]
    further = [token for token in ends if token not in known_ends]
    if further:
        settings.eos_token_id = [*known_ends, *further]


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of each token, in the memory of the logits.

    They are by far the largest tensor of a language model. So nothing of their size is made:
    forwards some rows are computed at a time, and backwards their gradient takes their place.
    `smoothing` is the part of each label that is spread evenly over all tokens of the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, smoothing: float
    ) -> torch.Tensor:
        # At least one: a row of a large vocabulary may be larger than the limit.
        ctx.rows = max(_LOGITS_AT_ONCE // logits.shape[-1], 1)
        parts: Any = logits.split(ctx.rows)  # type: ignore[no-untyped-call]
        sums_of_parts = [part.float().logsumexp(-1) for part in parts]
        sums = torch.cat(sums_of_parts)
        ctx.save_for_backward(logits, labels, sums)
        ctx.smoothing = smoothing
        # -log(softmax) at the label: the logarithm of all exponentials' sum, less its own logit.
        targets = logits.gather(1, labels[:, None]).squeeze(1)
        if smoothing:
            means = torch.cat([part.float().mean(-1) for part in parts])
            targets = (1 - smoothing) * targets + smoothing * means
        return sums - targets

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, *others = ctx.saved_tensors
        parts = [tensor.split(ctx.rows) for tensor in (logits, *others, *gradients)]
        for rows, labels, sums, gradient in zip(*parts, strict=True):
            # The gradient of a cross entropy: probabilities, less those of the label.
            rows.sub_(sums[:, None]).exp_()
            if ctx.smoothing:
                rows.sub_(ctx.smoothing / rows.shape[1])
            of_label = rows.new_full((len(rows), 1), ctx.smoothing - 1.0)
            rows.scatter_add_(1, labels[:, None], of_label)
            rows.mul_(gradient[:, None])
        return logits, None, None


def _losses(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Returns the loss of each token, 0 where it has no label: (tokens,).

    The backward pass overwrites the logits.
    """
    # IGNORED is negative, and no index: any class stands for it until its loss becomes 0.
    classes = labels.clamp(min=0)
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), classes, smoothing
    )
    return losses.masked_fill(labels == IGNORED, 0)
