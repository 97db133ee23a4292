"""Sequence to sequence: a text is made of a text, as in summarization and translation.

The loss is that of the target's tokens. In an evaluation the model generates, and a sample's
prediction is what the metrics need of its text: their sums are exact on any number of ranks.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from slurmft.core.text import shown
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.tasks.hub import Pretrained, Rows
from slurmft.train.tasks.metrics import check_numbers

ROUGE = ("rouge1", "rouge2", "rougeL")
LENGTHS, CORRECT, TOTAL = slice(3, 5), slice(5, 9), slice(9, 13)
"""A prediction: F1 of each of ROUGE; sacrebleu's lengths of text and reference, and its n-grams
that are right, and all, for n from 1 to 4."""
_SHOWN = 3
"""Samples of which an evaluation shows the texts."""


class Task(Pretrained):
    """Texts and targets from a hub data set or a local folder."""

    prediction_dtype = np.dtype(np.float64)
    prediction_shape = (13,)
    _data: TokenData | None = None
    """Of which the references are those at hand."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        names = ("rougeL", "rouge1", "rouge2", "bleu")
        self.metric_names = names if config.preset == "summarization" else ("bleu", *names[:-1])

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        sources, targets = self.values(rows)
        ids, _ = self.encode(tokenizer, [sources], f"texts of {rows.where!r}")
        what = f"targets of {rows.where!r}"
        target_ids, _ = self.encode(tokenizer, [targets], what, as_target=True)
        own = TokenTable.build(target_ids)
        return TokenTable.build(ids, target_tokens=own.tokens, target_offsets=own.offsets)

    def texts(self, validation: Rows) -> list[str]:
        return self.values(validation)[1]

    def model(self, data: TokenData) -> Any:
        """With the settings of generation that it is evaluated with, and saved."""
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        model = self.pretrained(AutoModelForSeq2SeqLM)
        length, beams = self.config.max_target_length, self.config.num_beams
        assert length is not None  # from the recipe
        own: dict[str, Any] = {"max_length": length + 1}  # the first one starts the decoder
        if beams == 1:
            own |= {"early_stopping": False, "length_penalty": 1.0}  # or it cannot be saved
        own |= {"max_new_tokens": None, "num_beams": beams, "do_sample": False}
        model.generation_config.update(**own)
        self._decoder_inputs = model.prepare_decoder_input_ids_from_labels
        at = data.folder  # the source of the tokenizer may be gone
        self._words = AutoTokenizer.from_pretrained(at / "tokenizer") if at else self.tokenizer()
        return model

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        """Labels are the target's tokens; the decoder gets those before each."""
        targets = _targets(table)
        lengths = targets.lengths(batch.indices)
        ids = targets.padded(targets.tokens, batch.indices, int(lengths.max()), IGNORED)
        labels = torch.from_numpy(ids)
        return dataclasses.replace(
            batch,
            inputs=batch.inputs | {"decoder_input_ids": self._decoder_inputs(labels=labels)},
            targets={"labels": labels},
            lengths=batch.lengths + torch.from_numpy(lengths),
            padded_tokens=batch.padded_tokens + labels.numel(),
        )

    def count(self, table: TokenTable, samples: np.ndarray) -> float:
        return int(_targets(table).lengths(samples).sum())

    def evaluate(self, model: Any, batch: Batch, data: TokenData) -> Any:
        """Of the texts that the model generates: float64, (batch, 13), see `TOTAL`."""
        is_nan = torch.zeros(len(batch.indices), dtype=torch.bool, device=model.device)

        def note_nan(_: Any, scores: torch.Tensor) -> torch.Tensor:
            is_nan.logical_or_(scores.isnan().view(len(is_nan), -1).any(dim=1))
            return scores

        inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
        tokens = model.generate(**inputs, logits_processor=[note_nan])
        texts = self._words.batch_decode(tokens, skip_special_tokens=True)
        if data is not self._data:
            self._data, self._references = data, data.read_texts()
        wanted = [self._references[i] for i in batch.indices]
        for i, text, target in zip(batch.indices, texts, wanted, strict=True):
            if i < _SHOWN:
                print(f"validation text {i + 1} became {shown(text, 200)!r}", flush=True)
                print(f"  its target is {shown(target, 200)!r}", flush=True)
        found = torch.tensor(list(map(scores_of, texts, wanted)), dtype=torch.float64)
        return found.masked_fill(is_nan.cpu()[:, None], torch.nan)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """0..100: means of ROUGE's F1, and BLEU of the corpus, as sacrebleu defines it."""
        check_numbers(predictions)
        rouge = (100 * predictions[:, : len(ROUGE)].mean(axis=0)).tolist()
        found = dict(zip(ROUGE, rouge, strict=True)) | {"bleu": bleu(predictions)}
        return {name: found[name] for name in self.metric_names}


def _targets(table: TokenTable) -> TokenTable:
    """The tokens of all targets."""
    return TokenTable(table.extra["target_tokens"], table.extra["target_offsets"], table.labels)


@functools.cache
def _scorers() -> tuple[Any, Any]:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    return RougeScorer(ROUGE, use_stemmer=True), BLEU(effective_order=True)


def scores_of(text: str, reference: str) -> list[float]:
    """The prediction of a sample, see `TOTAL`."""
    rouge, sentence_bleu = _scorers()
    shared = rouge.score(reference, text)
    found = sentence_bleu.sentence_score(text, [reference])
    parts = (shared[name].fmeasure for name in ROUGE)
    return [*parts, found.sys_len, found.ref_len, *found.counts, *found.totals]


def bleu(predictions: np.ndarray) -> float:
    """BLEU of a corpus, 0..100."""
    from sacrebleu.metrics import BLEU

    sums = predictions.sum(axis=0).astype(np.int64)
    correct, total, lengths = (sums[part].tolist() for part in (CORRECT, TOTAL, LENGTHS))
    return float(BLEU.compute_bleu(correct, total, *lengths, smooth_method="exp").score)
