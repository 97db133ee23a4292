"""Sequence to sequence: a text is made of a text, as in summarization and translation.

The loss is that of the target's tokens. In an evaluation the model generates, and a sample's
prediction is what the metrics need of its text: their sums are exact on any number of ranks.
"""

import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from slurmft.core.text import shown
from slurmft.train.config import TrainConfig, required
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.base import Evaluated
from slurmft.train.tasks.evaluate_metrics import MetricInputs, text_inputs
from slurmft.train.tasks.hub import Rows
from slurmft.train.tasks.metrics import check_numbers
from slurmft.train.tasks.pretrained import Pretrained

ROUGE = ("rouge1", "rouge2", "rougeL")
# Places in a prediction, after the F1 of each of ROUGE: sacrebleu's lengths of text and reference,
# and its n-grams that are right, and all, for n from 1 to 4.
LENGTHS = slice(3, 5)
CORRECT = slice(5, 9)
TOTAL = slice(9, 13)
NO_TOKEN = -1
"""Behind the tokens of a text, which follow with --metric."""
_DEFAULT_MAX_LENGTH = 20
"""Tokens that transformers generates at most, where a model does not say it."""
_PRINTED_SAMPLES = 3
"""Number of samples of which an evaluation prints the texts."""

_OF_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
_OF_BEAMS = ("early_stopping", "length_penalty")

NO_CACHE = {"use_cache": False}
"""Argument by which a model keeps no keys and values."""


class Task(Pretrained):
    """Texts and targets from a hub data set or a local folder."""

    prediction_dtype = np.dtype(np.float64)
    prediction_shape = (13,)
    _data: TokenData | None = None
    """Data whose `_references` are in memory."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.metric_names = TASKS["seq2seq"].metrics_of(config.preset)
        # --metric takes texts: their tokens travel beside what our own metrics need.
        self._kept_tokens = 0
        if config.named_metrics:
            self._kept_tokens = 1 + int(required(config, "max_target_length"))
            self.prediction_shape = (TOTAL.stop + self._kept_tokens,)

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        sources, targets = self.values(rows)
        ids, _ = self.encode(tokenizer, [sources], f"texts of {rows.where!r}")
        what = f"targets of {rows.where!r}"
        target_ids, _ = self.encode(tokenizer, [targets], what, as_target=True)
        # Targets are a table of their own, in the extra arrays of the sources' table.
        target_table = TokenTable.build(target_ids)
        return TokenTable.build(
            ids,
            target_tokens=target_table.tokens,
            target_offsets=target_table.offsets,
        )

    def joined(self, tables: Sequence[TokenTable]) -> TokenTable:
        targets = TokenTable.joined([_targets(table) for table in tables])
        extra = {"target_tokens": targets.tokens, "target_offsets": targets.offsets}
        return dataclasses.replace(TokenTable.joined(tables), extra=extra)

    def texts(self, validation: Rows) -> list[str]:
        _, targets = self.values(validation)
        return targets

    def model(self, data: TokenData) -> Any:
        """Returns the model with the settings of generation that it is evaluated with, and those
        that it is saved with."""
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        model = self.pretrained(AutoModelForSeq2SeqLM)
        longest_target = int(required(self.config, "max_target_length"))
        generation_config = model.generation_config
        model.saved_generation_config = self._saved_generation(generation_config)
        generation_config.update(
            max_length=longest_target + 1,
            # `generate` would prefer it to max_length.
            max_new_tokens=None,
            num_beams=self.config.num_beams,
            # Texts that are drawn would differ between two evaluations of one model.
            do_sample=False,
        )
        _drop_unused(generation_config)
        self._decoder_inputs = _maker_of_decoder_inputs(model)
        keep_no_cache(model)
        if data.folder:  # the source of the tokenizer may be gone
            self._decoder = AutoTokenizer.from_pretrained(data.folder / "tokenizer")
        else:
            self._decoder = self.tokenizer()
        return model

    def _saved_generation(self, of_base: Any) -> Any:
        """Returns the settings of the base, with room for the targets, and with --num-beams."""
        saved = copy.deepcopy(of_base)
        longest_target = int(required(self.config, "max_target_length"))
        if saved.max_new_tokens is not None:
            saved.max_new_tokens = max(saved.max_new_tokens, longest_target)
        elif longest_target >= (saved.max_length or _DEFAULT_MAX_LENGTH):
            saved.max_length = longest_target + 1  # the first token starts the decoder
        beams = self.config.num_beams or 1
        # The recipe's 1 is for the evaluation.
        if beams > 1:
            saved.num_beams = beams
        return saved

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        """Returns a batch whose labels are the target's tokens; the decoder gets those before."""
        targets = _targets(table)
        lengths = targets.lengths(batch.indices)
        longest = int(lengths.max())
        ids = targets.padded(targets.tokens, batch.indices, longest, IGNORED)
        labels = torch.from_numpy(ids)
        # The labels, one place further: a token is made from those before it. Of a copy, as FSMT
        # writes padding into what it gets.
        decoder_inputs = self._decoder_inputs(labels=labels.clone())
        return dataclasses.replace(
            batch,
            inputs=batch.inputs | {"decoder_input_ids": decoder_inputs},
            targets={"labels": labels},
            lengths=batch.lengths + torch.from_numpy(lengths),
            padded_tokens=batch.padded_tokens + labels.numel(),
        )

    def count(self, table: TokenTable, samples: np.ndarray) -> float:
        return int(_targets(table).lengths(samples).sum())

    def evaluate(self, model: Any, batch: Batch, data: TokenData) -> Evaluated:
        """Returns what the metrics need of the texts that the model generates: float64,
        (batch, 13), see `LENGTHS`; with --metric their tokens as well. And the loss of the targets.

        The encoder computes once, for both.
        """
        with _states_of(model.get_encoder()) as states:
            predictions = self._generated(model, batch, data)
        inputs = batch.inputs | {"encoder_outputs": states[0]}
        del inputs["input_ids"]
        loss, tokens = self.loss(model(**inputs), batch)
        return Evaluated(predictions, loss, tokens)

    def _generated(self, model: Any, batch: Batch, data: TokenData) -> torch.Tensor:
        """Returns the predictions of a batch, see `evaluate`."""
        has_nan = torch.zeros(len(batch.indices), dtype=torch.bool, device=model.device)

        # The scores of each generated token pass through here, before the best one is chosen.
        def note_nan(_: Any, scores: torch.Tensor) -> torch.Tensor:
            # With beams there are several rows of scores for a sample.
            rows_of_samples = scores.isnan().view(len(has_nan), -1)
            has_nan.logical_or_(rows_of_samples.any(dim=1))
            return scores

        inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
        tokens = model.generate(**inputs, logits_processor=[note_nan])
        texts = self._decoder.batch_decode(tokens, skip_special_tokens=True)
        if data is not self._data:
            self._data = data
            self._references = data.read_texts()
        references = [self._references[i] for i in batch.indices]
        for i, text, reference in zip(batch.indices, texts, references, strict=True):
            if i < _PRINTED_SAMPLES:
                print(
                    f"validation text {i + 1} became {shown(text, 200)!r}", flush=True
                )
                print(f"  its target is {shown(reference, 200)!r}", flush=True)
        pairs = zip(texts, references, strict=True)
        scores = [scores_of(text, reference) for text, reference in pairs]
        predictions = torch.tensor(scores, dtype=torch.float64)
        if self._kept_tokens:
            kept = predictions.new_full((len(texts), self._kept_tokens), NO_TOKEN)
            # Shorter texts of the batch end with padding, a special token, which decoding leaves
            # out.
            kept[:, : tokens.shape[1]] = tokens
            predictions = torch.cat((predictions, kept), dim=1)
        return predictions.masked_fill(has_nan.cpu()[:, None], torch.nan)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns means of ROUGE's F1, and BLEU of the corpus, as sacrebleu defines it; 0..100."""
        check_numbers(predictions)
        means = predictions[:, : len(ROUGE)].mean(axis=0)
        percentages = (100 * means).tolist()
        values = dict(zip(ROUGE, percentages, strict=True))
        values["bleu"] = bleu(predictions)
        return {name: values[name] for name in self.metric_names}

    def metric_inputs(
        self,
        predictions: np.ndarray,
        data: TokenData,
    ) -> dict[str, list[MetricInputs]]:
        tokens = predictions[:, TOTAL.stop :].astype(np.int64)
        ids = [row[row != NO_TOKEN] for row in tokens]
        texts = self._decoder.batch_decode(ids, skip_special_tokens=True)
        return {"": text_inputs(texts, data.read_texts())}


def _maker_of_decoder_inputs(model: Any) -> Callable[..., torch.Tensor]:
    """Returns what makes the decoder's inputs of `labels`, as the model does of labels alone."""
    name = "prepare_decoder_input_ids_from_labels"
    if hasattr(model, name):
        make: Callable[..., torch.Tensor] = getattr(model, name)
        return make
    # M2M-100, NLLB and Blenderbot have no method for it, but a function of their module.
    shift = vars(sys.modules[type(model).__module__])["shift_tokens_right"]
    pad = model.config.pad_token_id
    start = model.config.decoder_start_token_id
    return lambda labels: shift(labels, pad, start)


def keep_no_cache(model: Any) -> None:
    """Lets a model keep keys and values only for callers that ask for it, as `generate` does.

    As in a call with labels: with a cache, FSMT's decoder sees the tokens that it is to predict.
    """

    def without_cache(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, Any]:
        return args, NO_CACHE | named

    model.register_forward_pre_hook(without_cache, with_kwargs=True)


@contextlib.contextmanager
def _states_of(encoder: torch.nn.Module) -> Iterator[list[Any]]:
    """Notes the outputs that an encoder returns, of them the hidden states alone: a list, which is
    empty before that."""
    states: list[Any] = []

    # In an output of its own: `generate` puts copies for each beam into the one that it gets. Of
    # the same class, as decoders of NLLB-MoE look for what others do not have.
    def note(_: Any, inputs: Any, output: Any) -> None:
        states.append(type(output)(last_hidden_state=output[0]))

    hook = encoder.register_forward_hook(note)
    try:
        yield states
    finally:
        hook.remove()


def _targets(table: TokenTable) -> TokenTable:
    """Returns the tokens of all targets as a table."""
    tokens = table.extra["target_tokens"]
    offsets = table.extra["target_offsets"]
    # A table has labels; nobody reads them of this one.
    return TokenTable(tokens, offsets, table.labels)


@functools.cache
def _scorers() -> tuple[Any, Any]:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    # effective_order is for single sentences, which may have no n-gram of 4 words; sacrebleu warns
    # without it. The counts, which alone are used, are the same.
    return RougeScorer(ROUGE, use_stemmer=True), BLEU(effective_order=True)


def scores_of(text: str, reference: str) -> list[float]:
    """Returns the prediction of a sample, see `LENGTHS`."""
    rouge_scorer, bleu_scorer = _scorers()
    rouge_scores = rouge_scorer.score(reference, text)
    f1_values = [rouge_scores[name].fmeasure for name in ROUGE]
    counts = bleu_scorer.sentence_score(text, [reference])
    lengths = [counts.sys_len, counts.ref_len]
    return [*f1_values, *lengths, *counts.counts, *counts.totals]


def bleu(predictions: np.ndarray) -> float:
    """Returns BLEU of a corpus, 0..100."""
    from sacrebleu.metrics import BLEU

    sums = predictions.sum(axis=0).astype(np.int64)
    correct = sums[CORRECT].tolist()
    total = sums[TOTAL].tolist()
    lengths = sums[LENGTHS].tolist()
    # As `BLEU()` smooths by default; `compute_bleu` itself would smooth nothing.
    scores = BLEU.compute_bleu(correct, total, *lengths, smooth_method="exp")
    return float(scores.score)


def _drop_unused(config: Any) -> None:
    """Takes settings of sampling, or of beams, from a configuration that generates without."""
    unused: list[str] = []
    if not config.do_sample:
        unused += _OF_SAMPLING
    if config.num_beams in (None, 1):
        unused += _OF_BEAMS
    defaults = type(config)()
    for name in unused:
        setattr(config, name, getattr(defaults, name, None))
