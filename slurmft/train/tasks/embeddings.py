"""Embeddings of texts, which cosines compare: vectors of length 1.

They are made as the base model of sentence-transformers makes them, by its pooling and its layers
behind that; by the mean of a text's tokens where --model is another one.

Rows are an anchor and a text that goes with it, and maybe others that do not; or two texts with a
score. Of anchors the loss is sentence-transformers' MultipleNegativesRankingLoss over the whole
global batch: the texts of all other rows are negatives, too. Of scores it is its
CosineSimilarityLoss. The saved model is one of sentence-transformers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoConfig, AutoModel

from slurmft.core.errors import UsageError
from slurmft.train.config import TrainConfig, required
from slurmft.train.data.stream import epoch_order
from slurmft.train.data.tables import Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.engine.saved_weights import dtype_of_saved
from slurmft.train.engine.sentence_head import SentenceHead
from slurmft.train.login import sentence_modules
from slurmft.train.login.cells import label_numbers
from slurmft.train.login.formats import LEAST_ROWS
from slurmft.train.metric_spec import LOSS
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.base import Evaluated
from slurmft.train.tasks.hub import Rows, cached_file, from_hub, may_exist
from slurmft.train.tasks.metrics import SCORES, check_numbers
from slurmft.train.tasks.pretrained import Pretrained

SCALE = 20.0
"""Cosines are multiplied by it before the softmax, as sentence-transformers does by default."""
_MOST_RANKED = 10
"""Places of a ranking that MRR looks at."""
_SIMILARITIES_AT_ONCE = 2**24
"""Cosines that are computed at a time in an evaluation: 64 MiB."""


class Task(Pretrained):
    """Pairs, triplets, or pairs with scores. A sample of a table is one text."""

    prediction_dtype: np.dtype[Any] = np.dtype(np.float32)
    # Rounded vectors would tie, which rankings see.
    evaluates_in_fp32 = True
    limits_by_configuration = (
        True  # sentence-transformers cuts the texts of encode() so
    )

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        form: Any = self.form
        self._has_scores: bool = form.has_scores
        self._texts: int = form.texts_apart
        self.couples_rows = not self._has_scores
        if form.has_negatives_of_step:
            self.least_step_rows = LEAST_ROWS
        self.metric_names = TASKS["embeddings"].metrics_of(config.preset)

    # --- data and model ---------------------------------------------------------------------------

    def prepare(self) -> TokenData:
        return dataclasses.replace(super().prepare(), row_size=self._texts)

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        """Returns the texts of a split, those of each row one after another, with its score."""
        columns = self.values(rows)
        ids = []
        types = []
        for column, texts in zip(
            self.form.columns, columns[: self._texts], strict=False
        ):
            what = f"texts of {rows.where!r} ({column})"
            ids_of_column, types_of_column = self.encode(tokenizer, [texts], what)
            if types_of_column is None:
                # What models take where they are given none.
                types_of_column = [np.zeros_like(each) for each in ids_of_column]
            ids.append(ids_of_column)
            types.append(types_of_column)
        scores = [0.0] * len(rows)
        if self._has_scores:
            scores = label_numbers(columns[-1], rows.where)
        labels = np.repeat(scores, self._texts).tolist()
        return TokenTable.build(_texts_by_row(ids), labels, _texts_by_row(types))

    def texts(self, validation: Rows) -> list[int]:
        """Returns a number for each text of a split; equal texts have the same."""
        numbers: dict[str, int] = {}
        columns = self.values(validation)[: self._texts]
        rows = zip(*columns, strict=True)
        texts = itertools.chain.from_iterable(rows)
        return [numbers.setdefault(text, len(numbers)) for text in texts]

    def sources(self) -> dict[str, Any] | None:
        sources = super().sources()
        if sources is not None:
            sources["prefix"] = self.prefix
        return sources

    @functools.cached_property
    def head(self) -> SentenceHead:
        """The modules that make vectors of the states of tokens, as the base model has them."""
        name = str(required(self.config, "model"))

        def read() -> sentence_modules.SentenceModules:
            return sentence_modules.read(name, functools.partial(cached_file, name))

        modules = from_hub("--model", name, read)
        if may_exist(name, sentence_modules.MODULES):
            self.notes.append(
                f"the cache does not say whether {name!r} is of sentence-transformers: vectors are "
                f"the means of tokens (slurmft fetch {name} --task {self.config.task} asks the hub)"
            )
        sentence_modules.check_options(modules, self.config)
        return SentenceHead(modules)

    @property
    def prefix(self) -> str:
        return self.head.modules.prompt

    @functools.cached_property
    def _hidden_size(self) -> int:
        """Numbers of the state of a token."""
        model_config = self.load(AutoConfig.from_pretrained)
        # A model of texts and images has the configuration of its text part within its own; of one
        # of texts alone this is the configuration itself.
        return int(model_config.get_text_config().hidden_size)

    @functools.cached_property
    def vector_size(self) -> int:
        """Numbers of a vector."""
        return self.head.size(self._hidden_size)

    def model(self, data: TokenData) -> Any:
        """Returns the model with the layers behind its pooling; UsageError where it is no
        encoder."""
        model_config = self.load(AutoConfig.from_pretrained)
        if getattr(model_config, "is_encoder_decoder", False):
            raise UsageError(
                f"--model {self.config.model!r} is {model_config.model_type}, an encoder-decoder",
                "give an encoder, such as BERT, MPNet or a model of sentence-transformers",
            )
        model = self.pretrained(AutoModel)
        self.prediction_shape = (self.vector_size,)
        return model

    def pretrained(self, auto_model: Any, **settings: Any) -> Any:
        model = super().pretrained(auto_model, **settings)
        _drop_pooler(model)
        self.head.attach(model)
        return model

    def save_extras(self, folder: Path, model: Any) -> None:
        """Writes what sentence-transformers needs besides."""
        self.head.save(folder, self._hidden_size, dtype_of_saved(model, self.config))

    # --- loss -------------------------------------------------------------------------------------

    def batch(self, batch: Batch, table: TokenTable) -> Batch:
        """Returns a batch with the lengths of its texts, and the order that puts those of a row
        together."""
        order = by_row(batch.indices, self._texts)
        targets = batch.targets | {
            "lengths": batch.lengths,
            "order": torch.from_numpy(order),
        }
        return dataclasses.replace(batch, targets=targets)

    def _vectors(self, output: Any, batch: Batch) -> Tensor:
        """Returns the vector of each text of a batch, in its order: fp32, (texts, size)."""
        return self.head.vectors(output.last_hidden_state, batch.targets["lengths"])

    def vectors(self, output: Any, batch: Batch) -> Tensor:
        """Returns the vectors of the texts of each row: (rows, texts, hidden)."""
        vectors = self._vectors(output, batch)[batch.targets["order"]]
        return vectors.view(-1, self._texts, vectors.shape[-1])

    def coupled_loss(self, vectors: Tensor, first: int, count: int) -> Tensor:
        """Returns the sum of the cross entropies of the anchors of some rows, of which each is to
        find the second text of its row among all texts but the anchors."""
        anchors = vectors[first : first + count, 0]
        # The second texts of all rows come first: so a row has the number of its own.
        others = vectors[:, 1:].transpose(0, 1).flatten(0, 1)
        logits = SCALE * anchors @ others.T
        classes = torch.arange(first, first + count, device=vectors.device)
        return cross_entropy(logits, classes, reduction="sum")

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Any]:
        vectors = self.vectors(output, batch)
        rows = len(vectors)
        if self.couples_rows:
            return self.coupled_loss(vectors, 0, rows), rows
        # Each text of a row has the score of the row: that of the first will do.
        scores = batch.targets["labels"][batch.targets["order"]][:: self._texts]
        cosines = (vectors[:, 0] * vectors[:, 1]).sum(-1)
        return (cosines - scores).square().sum(), rows

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, model: Any, batch: Batch, data: TokenData) -> Evaluated:
        # Texts come one by one, and a loss is of rows.
        return Evaluated(self.predict(model(**batch.inputs), batch, data))

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns the vector of each text."""
        return self._vectors(output, batch)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns the correlation of cosines with scores; or how anchors rank the texts of the
        split."""
        check_numbers(predictions)
        table = data.validation
        compared = self._compared(predictions)
        if self._has_scores:
            cosines = _cosines(compared)
            # Both texts of a pair have its score.
            scores = table.labels[::2]
            values = {name: SCORES[name](cosines, scores) for name in self.metric_names}
            errors = _cosines(predictions) - scores
            return values | {LOSS: float(np.mean(np.square(errors)))}
        texts = self._ranked_texts(data)
        ranks = ranks_of_positives(compared, texts, self._texts)
        reciprocals = np.where(ranks <= _MOST_RANKED, 1 / ranks, 0)
        first_name, second_name = self.metric_names
        return {
            first_name: float(np.mean(ranks == 1)),
            second_name: float(np.mean(reciprocals)),
        }

    def _compared(self, vectors: np.ndarray) -> np.ndarray:
        """Returns what cosines of the saved model's vectors compare. A loss is of whole vectors, as
        that of sentence-transformers."""
        if self.head.modules.truncate_dim is None:
            return vectors
        return normalize(torch.from_numpy(self.head.kept(vectors)), dim=-1).numpy()

    def _ranked_texts(self, data: TokenData) -> np.ndarray:
        """Returns a number for each text of the validation split: int64, (texts,).

        Anchors that differ are two. Of the texts that they rank, those of equal tokens are one:
        they have the same vector, as of words in another case.
        """
        texts = np.array(data.read_texts())
        table = data.validation
        numbers: dict[bytes, int] = {}
        bounds = itertools.pairwise(table.offsets.tolist())
        for place, (begin, end) in enumerate(bounds):
            if place % self._texts:
                tokens = table.tokens[begin:end].tobytes()
                # Numbers that no anchor has.
                texts[place] = -1 - numbers.setdefault(tokens, len(numbers))
        return texts

    def split_loss(
        self,
        predictions: np.ndarray,
        data: TokenData,
        step_rows: int,
    ) -> float | None:
        """Returns the mean loss of the rows, in batches as those of training: drawn by the seed,
        the same ones in every evaluation, with as many negatives as an optimizer step has."""
        if not self.couples_rows:
            return None
        vectors = torch.from_numpy(predictions)
        by_row = vectors.view(-1, self._texts, vectors.shape[-1])
        order = epoch_order(len(by_row), self.config.seed, 0)
        # Each row of a step has a cosine with each of its texts, about: so many rows fit into the
        # limit.
        at_once = max(1, _SIMILARITIES_AT_ONCE // (step_rows * self._texts))
        total = 0.0
        for start in range(0, len(order), step_rows):
            rows = by_row[order[start : start + step_rows]]
            for first in range(0, len(rows), at_once):
                count = min(at_once, len(rows) - first)
                total += float(self.coupled_loss(rows, first, count))
        return total / len(by_row)


def _texts_by_row(columns: list[list[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yields the texts of all columns, those of a row one after another."""
    return itertools.chain.from_iterable(zip(*columns, strict=True))


def _cosines(vectors: np.ndarray) -> np.ndarray:
    """Returns the cosine of each pair of texts, whose vectors of length 1 follow one another."""
    pairs = vectors.reshape(-1, 2, vectors.shape[-1]).astype(np.float64)
    cosines: np.ndarray = (pairs[:, 0] * pairs[:, 1]).sum(axis=-1)
    return cosines


def by_row(samples: np.ndarray, row_size: int) -> np.ndarray:
    """Returns the order that puts the texts of each row together: int64, (samples,).

    A row may be among them several times, as a source of --mix that is repeated has it.

    Args:
        samples: numbers of the texts in their table, in any order.
        row_size: texts of a row.
    """
    order = np.argsort(samples, kind="stable")
    in_order = samples[order]
    times_before = np.arange(len(samples)) - np.searchsorted(in_order, in_order)
    # lexsort sorts by its last key first: by rows; then by how often a row was there before; then
    # by the place of the text in its row.
    keys = (in_order, times_before, in_order // row_size)
    return order[np.lexsort(keys)]


def _drop_pooler(model: Any) -> None:
    """Takes the pooler of a model out of the training: nothing of a loss goes through it."""
    pooler = getattr(model, "pooler", None)
    if pooler is None:
        return
    missing = getattr(model, "missing_keys", ())
    if any(name.startswith("pooler.") for name in missing):
        # One that is not in the source is in no result, either.
        model.pooler = None
        model.missing_keys = [
            each for each in missing if not each.startswith("pooler.")
        ]
    else:
        # DDP would wait for its gradient, which never comes.
        pooler.requires_grad_(False)


def ranks_of_positives(
    vectors: np.ndarray, texts: np.ndarray, row_size: int
) -> np.ndarray:
    """Returns for each anchor the rank, from 1, of the best text that goes with it among all texts
    of the split but the anchors: int64, (anchors,).

    Equal texts count once: an anchor that has several rows has the second text of each of them. A
    text as near as the best one ranks before it: vectors that are all the same find nothing.

    Args:
        vectors: of length 1, those of the texts of a row one after another: (texts, hidden).
        texts: a number for each text; equal ones have the same: (texts,).
        row_size: texts of a row; the first is the anchor.
    """
    rows = texts.reshape(-1, row_size)
    anchors, anchor_of_row = np.unique(rows[:, 0], return_inverse=True)
    others, other_of_text = np.unique(rows[:, 1:], return_inverse=True)
    # The second text of a row goes with its anchor, further ones do not. NumPy 1 returns the
    # numbers flat, NumPy 2 in the shape of the texts.
    positive_of_row = other_of_text.reshape(len(rows), -1)[:, 0]
    # Where a text is first: its vector stands for all equal ones.
    numbers, places = np.unique(texts, return_index=True)
    anchor_vectors = vectors[places[np.searchsorted(numbers, anchors)]]
    other_vectors = vectors[places[np.searchsorted(numbers, others)]]
    # Rows in the order of their anchors, cut where the next anchor begins.
    order = np.argsort(anchor_of_row, kind="stable")
    ends = np.cumsum(np.bincount(anchor_of_row))
    positives = np.split(positive_of_row[order], ends[:-1])
    ranks = np.empty(len(anchors), dtype=np.int64)
    at_once = max(1, _SIMILARITIES_AT_ONCE // len(others))
    for start in range(0, len(anchors), at_once):
        similarities = anchor_vectors[start : start + at_once] @ other_vectors.T
        for number, row in enumerate(similarities, start):
            best = row[positives[number]].max()
            is_before = row >= best
            # Further texts that go with the anchor do not push the best one down.
            is_before[positives[number]] = False
            ranks[number] = 1 + is_before.sum()
    return ranks
