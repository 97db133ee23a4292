"""Token classification: a label for each word of a text, as of named entities.

A word's first token has its label, its other tokens have none, as in transformers' run_ner.py; with
--label-all-tokens those of the training data have one, too.
Entities are read from labels as seqeval reads them; labels that are of no entities, such as parts
of speech, are classes of words (see `tags`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.cells import describe_rows
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.base import label_maps
from slurmft.train.tasks.evaluate_metrics import MetricInputs, tag_inputs
from slurmft.train.tasks.hub import Rows
from slurmft.train.tasks.metrics import NAN, check_numbers
from slurmft.train.tasks.pretrained import Pretrained, are_cut, filled
from slurmft.train.tasks.tags import OUTSIDE, are_entities, entities, scheme, tag_of

# Places in a prediction, which counts for a whole text: entities that are predicted rightly, that
# are predicted, that are true; words whose label is right, and all words.
RIGHT_ENTITIES, PREDICTED, TRUE, RIGHT_WORDS, WORDS = range(5)
# Of plain tags it is (3, classes): words of each class that are predicted rightly, that are
# predicted, that are true; one after the other.


class Task(Pretrained):
    """Words with labels, from a hub data set or a local folder."""

    # Of entities; `model` has those of plain tags.
    metric_names = TASKS["token-classification"].metrics
    prediction_shape: tuple[int, ...] = (5,)
    needs_offsets = True
    _has_noted_scheme = False

    def found_labels(self, train: Rows) -> list[str]:
        """Returns the labels that occur, and for each entity that begins (B-) the one that goes on
        (I-)."""
        label_names = super().found_labels(train)
        if not are_entities(label_names):
            return label_names
        names = set(label_names)
        for name in label_names:
            # In a small file every entity may have one word; others may be longer.
            if name.startswith("B"):
                names.add("I" + name[1:])
        return sorted(names)

    def training_table(
        self, tokenizer: Any, rows: Rows, names: list[str]
    ) -> TokenTable:
        return self._table(tokenizer, rows, names, self.config.label_all_tokens)

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        return self._table(tokenizer, rows, names, all_tokens=False)

    def _table(
        self,
        tokenizer: Any,
        rows: Rows,
        names: list[str],
        all_tokens: bool,
    ) -> TokenTable:
        words, labels = self.values(rows)
        what = f"texts of {rows.where!r}"
        tokens, types, words_of_tokens = self._encoded(tokenizer, words, what)
        inner_ids = np.array(inner_labels(names))
        token_labels = []
        names_of_texts = []
        rows_with_lost_labels = []
        longest = self.longest(tokenizer)
        pairs = zip(labels, words_of_tokens, strict=True)
        for place, (labels_of_row, words_of_row) in enumerate(pairs):
            what = f"{rows.where}: row {rows.number(place)}"
            class_ids = self.class_ids(labels_of_row, names, rows, what)
            ids = np.array(class_ids, dtype=np.int64)
            first_tokens = np.array(first_of_word(words_of_row))
            # The place -1, of tokens that begin no word, is that of IGNORED.
            labels_of_tokens = np.append(ids, IGNORED)[first_tokens]
            if all_tokens:
                word_places = [-1 if word is None else word for word in words_of_row]
                inner = np.append(inner_ids[ids], IGNORED)[word_places]
                begins_word = first_tokens >= 0
                labels_of_tokens = np.where(begins_word, labels_of_tokens, inner)
            token_labels.append(labels_of_tokens)
            names_of_texts.append([names[i] for i in ids])
            cut_side = None
            if len(words_of_row) >= longest:
                cut_side = tokenizer.truncation_side
            lost = without_token(words_of_row, len(ids), cut_side)
            if any(names[ids[word]] != OUTSIDE for word in lost):
                rows_with_lost_labels.append(rows.number(place))
        if rows_with_lost_labels:
            self.warnings.append(
                f"{rows.where!r}: words without a token, such as '' or '\\u200b', have labels, "
                "which are neither learnt nor evaluated: "
                f"{describe_rows(rows_with_lost_labels)}"
            )
        if not self._has_noted_scheme:  # the training data is the first
            self._has_noted_scheme = True
            self.notes.append(_scheme_note(names, names_of_texts))
        return TokenTable.build(tokens, types=types, token_labels=token_labels)

    def unlabelled(self, tokenizer: Any, texts: Sequence[list[Any]]) -> TokenTable:
        tokens, types, words_of_tokens = self._encoded(tokenizer, texts[0], "texts")
        # The place of the word that begins with a token stands for its label, see
        # `predict.heads`: there are words without tokens.
        token_labels = []
        for words in words_of_tokens:
            places = np.array(first_of_word(words))
            token_labels.append(np.where(places < 0, IGNORED, places))
        return TokenTable.build(tokens, types=types, token_labels=token_labels)

    def _encoded(
        self,
        tokenizer: Any,
        words: list[list[str]],
        what: str,
    ) -> tuple[list[list[int]], list[list[int]] | None, list[list[int | None]]]:
        """Returns the token ids of each text; the type of each token, where the model has them; and
        for each token the word that it is of, or None."""
        longest = self.longest(tokenizer)
        encoded = tokenizer(
            words,
            is_split_into_words=True,
            truncation=True,
            max_length=longest,
        )
        self.warn_of_cuts(tokenizer, are_cut(encoded), what, longest)
        ids = list(filled(encoded["input_ids"], tokenizer.pad_token_id))
        types = None
        if self.tells_texts_apart(tokenizer):
            types = list(filled(encoded["token_type_ids"], 0))
        words_of_tokens = [encoding.word_ids for encoding in encoded.encodings]
        # A token that stands for a text without any is of no word.
        return ids, types, list(filled(words_of_tokens, None))

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForTokenClassification

        maps = label_maps(data)
        if not are_entities(data.labels):
            self.metric_names = TASKS["token-classification"].data_metrics
        length = _count_places(data.labels)
        # --metric takes the labels of all words: they travel beside the counts.
        if self.config.named_metrics:
            length += _most_words(data)
        self.prediction_shape = (length,)
        return self.pretrained(AutoModelForTokenClassification, **maps)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns what the metrics need of each text: int64, (batch, 5), see `RIGHT_ENTITIES`; with
        --metric also the labels of its words."""
        counts = data.validation.label_counts
        assert counts is not None  # of a table whose tokens have labels
        labels = batch.targets["labels"].flatten()
        has_label = labels != IGNORED
        logits = output.logits.flatten(0, -2)[has_label]
        has_nan = logits.isnan().any(-1)
        # argmax takes NaN for the largest number.
        best = logits.argmax(-1).masked_fill(has_nan, NAN)
        predicted = best.cpu().numpy()
        true = labels[has_label].cpu().numpy()
        # Words of all texts lie one after the other.
        ends = np.cumsum(counts[batch.indices])[:-1]
        texts = zip(np.split(true, ends), np.split(predicted, ends), strict=True)
        count = _counts
        if not are_entities(data.labels):
            count = _counts_of_classes
        rows = []
        for true_of_text, predicted_of_text in texts:
            row = count(true_of_text, predicted_of_text, data.labels)
            if self.config.named_metrics:
                row += predicted_of_text.tolist()
            # As many numbers for each text, however few words it has.
            (length,) = self.prediction_shape
            rows.append(row + [IGNORED] * (length - len(row)))
        return torch.tensor(rows)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns the metrics of entities, which are right where type and both ends are; and of
        words; of plain tags those of words alone."""
        check_numbers(predictions)
        counts = predictions[:, : _count_places(data.labels)].sum(axis=0)
        if not are_entities(data.labels):
            return _scores_of_words(counts)
        sums = counts.tolist()
        right = sums[RIGHT_ENTITIES]
        # Where no entity is predicted, or none is true, `right` is 0 and so is the share.
        precision = right / max(sums[PREDICTED], 1)
        recall = right / max(sums[TRUE], 1)
        f1 = 0.0
        if right:
            f1 = 2 * precision * recall / (precision + recall)
        return {
            "entity_f1": f1,
            "entity_precision": precision,
            "entity_recall": recall,
            "accuracy": sums[RIGHT_WORDS] / max(sums[WORDS], 1),
        }

    def metric_inputs(
        self,
        predictions: np.ndarray,
        data: TokenData,
    ) -> dict[str, list[MetricInputs]]:
        table = data.validation
        assert table.token_labels is not None
        predicted = []
        true = []
        for row, begin, end in zip(
            predictions, table.offsets, table.offsets[1:], strict=False
        ):
            labels = table.token_labels[begin:end]
            labels_of_words = labels[labels != IGNORED].tolist()
            true.append(labels_of_words)
            labels_of_row = row[_count_places(data.labels) :]
            predicted.append(labels_of_row[: len(labels_of_words)].tolist())
        return {"": tag_inputs(predicted, true, data.labels)}


def _count_places(labels: list[str]) -> int:
    """Returns how many places of a prediction are counts, see `RIGHT_ENTITIES`."""
    if are_entities(labels):
        return WORDS + 1
    return 3 * len(labels)


def _most_words(data: TokenData) -> int:
    """Returns the most words of a text that is evaluated."""
    tables = [data.validation]
    if data.test:
        tables.append(data.test.validation)
    counts = [table.label_counts for table in tables if table.label_counts is not None]
    return max(int(each.max()) for each in counts)


def first_of_word(words: Sequence[int | None]) -> list[int]:
    """Returns for each token the word that it begins; -1 for others.

    Args:
        words: the word that each token is of; None for special tokens.
    """
    first_tokens = []
    previous = None
    for word in words:
        if word is None or word == previous:
            first_tokens.append(-1)
        else:
            first_tokens.append(word)
        previous = word
    return first_tokens


def without_token(
    words: Sequence[int | None], count: int, cut_side: str | None = None
) -> list[int]:
    """Returns the words of a text that the tokenizer makes no token of.

    Args:
        words: the word that each token is of; None for special tokens.
        count: number of the words.
        cut_side: "right" or "left", where tokens may be cut off: words beyond the outermost token
            of that side may have had some. None: the text is whole.
    """
    with_token = {word for word in words if word is not None}
    begin = 0
    end = count
    if cut_side == "left":
        begin = min(with_token, default=count)
    elif cut_side == "right":
        end = max(with_token, default=0)
    return [word for word in range(begin, end) if word not in with_token]


def inner_labels(names: Sequence[str]) -> list[int]:
    """Returns for each class that of the further tokens of its words: of an entity that begins
    (B-), the one that goes on (I-), where there is one."""
    inner = []
    for number, name in enumerate(names):
        tag = tag_of(name)
        goes_on = "I" + name[1:]
        if tag and tag.prefix == "B" and goes_on in names:
            number = names.index(goes_on)
        inner.append(number)
    return inner


def _counts(true: np.ndarray, predicted: np.ndarray, names: list[str]) -> list[int]:
    """Returns the prediction of one text, see `RIGHT_ENTITIES`."""
    if (predicted == NAN).any():
        return [NAN] * 5
    true_names = [names[i] for i in true]
    predicted_names = [names[i] for i in predicted]
    # An entity is right where its type, its first and its last word are.
    true_entities = set(entities(true_names))
    predicted_entities = set(entities(predicted_names))
    return [
        len(true_entities & predicted_entities),
        len(predicted_entities),
        len(true_entities),
        int((true == predicted).sum()),
        len(true),
    ]


def _counts_of_classes(
    true: np.ndarray, predicted: np.ndarray, names: list[str]
) -> list[int]:
    """Returns the prediction of one text with plain tags, see `RIGHT_ENTITIES`."""
    classes = len(names)
    if (predicted == NAN).any():
        return [NAN] * (3 * classes)
    counts = []
    for labels in (true[true == predicted], predicted, true):
        counts += np.bincount(labels, minlength=classes).tolist()
    return counts


def _scores_of_words(counts: np.ndarray) -> dict[str, float]:
    """Returns accuracy and macro F1 of words, as scikit-learn defines them; a class that is found
    neither among predictions nor labels does not count.

    Args:
        counts: sums over all texts, see `RIGHT_ENTITIES`.
    """
    right, predicted, true = counts.reshape(3, -1)
    occurring = predicted + true
    f1 = 2 * right[occurring > 0] / occurring[occurring > 0]
    f1_macro = 0.0
    if len(f1):  # else there are no words
        f1_macro = float(f1.mean())
    return {
        "accuracy": float(right.sum() / max(true.sum(), 1)),
        "f1_macro": f1_macro,
    }


def _scheme_note(names: list[str], texts: list[list[str]]) -> str:
    if not are_entities(names):
        return "labels of words: plain tags, of no scheme of entities (B-, I-, O)"
    return f"labels of words: entities, in the scheme {scheme(names, texts)}"
