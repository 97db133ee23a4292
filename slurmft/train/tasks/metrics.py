"""Metrics: numbers from predictions and labels, as scikit-learn and scipy define them.

Every score takes whole arrays, of at least one sample, and returns a plain float. Labels were
checked when they were read (`slurmft.train.login.cells`), predictions when they were gathered
(`check_numbers`).
"""

import importlib
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from slurmft.core.errors import SlurmftError

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")

NAN = -1
"""Class that is predicted where the logits are not numbers."""


def check_numbers(predictions: np.ndarray) -> None:
    """Raises SlurmftError where predictions come from logits that are not numbers.

    A metric of them would look like one of a bad model.
    """
    if predictions.dtype.kind == "f":
        is_nan = np.isnan(predictions)
    else:
        is_nan = predictions == NAN
    # A prediction may have any shape; one NaN in it spoils the sample.
    values_of_samples = is_nan.reshape(len(predictions), -1)
    samples_with_nan = int(values_of_samples.any(axis=1).sum())
    if samples_with_nan:
        raise SlurmftError(
            f"the model's logits are NaN for {samples_with_nan} of {len(predictions)} validation "
            "samples",
            "lower --learning-rate, lengthen --warmup-ratio, or use --precision bf16 or fp32",
        )


# --- classes and numbers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """A score of predictions and labels, both (samples,), or 0 and 1: (samples, classes)."""

    module: str
    """Imported when it is first computed: scikit-learn takes longer than a step."""
    compute: Callable[[Any, np.ndarray, np.ndarray], Any]
    """Function of the module, predictions and labels."""

    def __call__(self, predictions: np.ndarray, labels: np.ndarray) -> float:
        assert predictions.shape == labels.shape
        assert labels.size
        # the table below says what an undefined score is
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(self.module)
            return float(self.compute(module, predictions, labels))


def _f1(average: str) -> Score:
    def compute(sklearn: Any, predictions: np.ndarray, labels: np.ndarray) -> Any:
        return sklearn.f1_score(labels, predictions, average=average, zero_division=0.0)

    return Score("sklearn.metrics", compute)


def _pearson(stats: Any, predictions: np.ndarray, labels: np.ndarray) -> Any:
    # Of a single sample, pearsonr raises an error, where spearmanr gives NaN.
    if len(labels) == 1:
        return np.nan
    return stats.pearsonr(predictions, labels).statistic


def _subset_accuracy(_: Any, predictions: np.ndarray, labels: np.ndarray) -> Any:
    are_all_right = (predictions == labels).all(axis=1)
    return are_all_right.mean()


def _rmse(_: Any, predictions: np.ndarray, labels: np.ndarray) -> Any:
    errors = predictions - labels
    return np.sqrt(np.mean(np.square(errors)))


SCORES = {
    # Classes, int64. The fraction of predictions that equal their labels, 0..1.
    "accuracy": Score("numpy", lambda np, p, t: np.mean(p == t)),
    # F1 of class 1 against class 0, 0..1; 0.0 where no sample is of class 1, predicted or true.
    "f1": _f1("binary"),
    # Mean of the classes' F1, each of equal weight, 0..1. A class that is found neither among
    # predictions nor labels does not count; one that is predicted but never true counts as 0.0.
    # Where samples have several classes, one that is found in neither counts as 0.0.
    "f1_macro": _f1("macro"),
    # F1 of all decisions on a class together, 0..1.
    "f1_micro": _f1("micro"),
    # The fraction of samples of which all classes are right, 0..1.
    "subset_accuracy": Score("numpy", _subset_accuracy),
    # Of any number of classes, -1..1; 0.0 where all predictions or all labels are of one class.
    "matthews_correlation": Score(
        "sklearn.metrics", lambda sk, p, t: sk.matthews_corrcoef(t, p)
    ),
    # Of scores, float64, of samples whose labels are 0 and 1: the area below precision against
    # recall, 0..1; 0.0 where all labels are 0.
    "average_precision": Score(
        "sklearn.metrics", lambda sk, p, t: sk.average_precision_score(t, p)
    ),
    # Numbers, float64. Linear correlation, -1..1. NaN where it is undefined: predictions or labels
    # all equal, a single sample, an infinite value, or values so large that their sums overflow.
    "pearson": Score("scipy.stats", _pearson),
    # Correlation of the ranks, -1..1; infinite values rank first or last. NaN where it is
    # undefined: predictions or labels all equal, or a single sample.
    "spearman": Score(
        "scipy.stats", lambda stats, p, t: stats.spearmanr(p, t).statistic
    ),
    # The root of the mean squared error, in the unit of the labels.
    "rmse": Score("numpy", _rmse),
}


def by_class(
    predictions: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Returns precision, recall, f1 and samples (support) of each class, as scikit-learn defines
    them; 0.0 where they are undefined.

    Where samples have one class each, also what those of a class were predicted as (predicted_as),
    which is a row of the confusion matrix: class -> count.

    Args:
        predictions: int64, (samples,); or 0 and 1, (samples, classes).
        labels: of the same shape.
        names: names of the classes.
    """
    if predictions.ndim == 2:
        right = (predictions & labels).sum(0)
        predicted = predictions.sum(0)
        true = labels.sum(0)
    else:
        right_labels = labels[labels == predictions]
        right = np.bincount(right_labels, minlength=len(names))
        predicted = np.bincount(predictions, minlength=len(names))
        true = np.bincount(labels, minlength=len(names))
    rows = {}
    # Strict: a class without a name would be left out without a word.
    counts = zip(names, right.tolist(), predicted.tolist(), true.tolist(), strict=True)
    for name, right_count, predicted_count, true_count in counts:
        rows[name] = _scores_of_class(right_count, predicted_count, true_count)
    # Of several classes none is what another one was taken for.
    if predictions.ndim == 1:
        _add_confusions(rows, predictions, labels, names)
    return rows


def _scores_of_class(right: int, predicted: int, true: int) -> dict[str, Any]:
    return {
        "precision": right / (predicted or 1),
        "recall": right / (true or 1),
        "f1": 2 * right / ((predicted + true) or 1),
        "support": true,
    }


def _add_confusions(
    rows: dict[str, dict[str, Any]],
    predictions: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
) -> None:
    """Adds the row of the confusion matrix to each class."""
    for row in rows.values():
        row["predicted_as"] = {}
    # One number for each pair of classes, so that numpy counts the pairs.
    pairs = labels.astype(np.int64) * len(names) + predictions
    different_pairs, counts = np.unique(pairs, return_counts=True)
    for pair, count in zip(different_pairs.tolist(), counts.tolist(), strict=True):
        true, predicted = divmod(pair, len(names))
        rows[names[true]]["predicted_as"][names[predicted]] = count


# --- texts ----------------------------------------------------------------------------------------


def squad(
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    may_have_none: bool = False,
) -> dict[str, float]:
    """Returns F1 and exact match of extracted answers, 0..100, as SQuAD's official scripts do.

    Texts are compared as words, without case, punctuation and articles. Each prediction counts
    with the gold answer that is best for it, in each score on its own. As in v1.1's script, texts
    of which no word is left match exactly, but have an F1 of 0.

    Args:
        predictions: one text per question.
        answers: the gold answers of each question; at least one, unless `may_have_none`.
        may_have_none: as v2.0's script: a question may have no answer, and the empty text says so.
            In both scores that is right where there is none, and wrong elsewhere. Gold answers of
            which no word is left do not count.

    Returns:
        Means over the questions: squad_f1 and squad_exact_match.
    """
    exact_matches = []
    f1_values = []
    for text, gold_texts in zip(predictions, answers, strict=True):
        words = _words(text)
        gold_answers = [_words(gold) for gold in gold_texts]
        if may_have_none:
            gold_answers = [gold for gold in gold_answers if gold] or [[]]
        exact_match = float(words in gold_answers)
        exact_matches.append(exact_match)
        if may_have_none and not words:
            f1_values.append(exact_match)
        else:
            f1_of_answers = [_word_f1(words, gold) for gold in gold_answers]
            f1_values.append(max(f1_of_answers))
    return {
        "squad_f1": 100 * fmean(f1_values),
        "squad_exact_match": 100 * fmean(exact_matches),
    }


def _words(text: str) -> list[str]:
    """Returns the words of a text that SQuAD compares."""
    # Punctuation goes before articles, and leaves no gap: "a.b" is the word "ab".
    without_punctuation = text.lower().translate(NO_PUNCTUATION)
    return ARTICLES.sub(" ", without_punctuation).split()


def _word_f1(words: list[str], gold: list[str]) -> float:
    """Returns F1 of two bags of words, 0..1."""
    shared = (Counter(words) & Counter(gold)).total()
    if not shared:  # there may be no words at all to divide by
        return 0.0
    return 2 * shared / (len(words) + len(gold))
