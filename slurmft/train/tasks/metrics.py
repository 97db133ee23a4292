"""What each metric is: a number from predictions and labels, as scikit-learn and scipy define it.

Every score takes whole arrays, of at least one sample, and returns a plain float. Labels were
checked when they were read (`slurmft.train.login.rows`), predictions when they were gathered
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
"""The class predicted where the logits are not numbers."""


def check_numbers(predictions: np.ndarray) -> None:
    """Raises SlurmftError where predictions come from logits that are not numbers: a metric of them
    would look like one of a bad model."""
    is_bad = np.isnan(predictions) if predictions.dtype.kind == "f" else predictions == NAN
    bad = int(is_bad.reshape(len(predictions), -1).any(axis=1).sum())
    if bad:
        raise SlurmftError(
            f"the model's logits are NaN for {bad} of {len(predictions)} validation samples",
            "lower --learning-rate, lengthen --warmup-ratio, or use --precision bf16 or fp32",
        )


# --- classes and numbers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """A score of predictions and labels, both (samples,), or 0 and 1: (samples, classes)."""

    module: str
    """Imported when it is first computed: scikit-learn takes longer than a step."""
    compute: Callable[[Any, np.ndarray, np.ndarray], Any]
    """The module, predictions and labels to the value."""

    def __call__(self, predictions: np.ndarray, labels: np.ndarray) -> float:
        assert predictions.shape == labels.shape
        assert labels.size
        with warnings.catch_warnings():  # the table says what an undefined score is
            warnings.simplefilter("ignore")
            return float(self.compute(importlib.import_module(self.module), predictions, labels))


def _f1(average: str) -> Score:
    options = {"average": average, "zero_division": 0.0}
    return Score("sklearn.metrics", lambda sk, p, t: sk.f1_score(t, p, **options))


def _pearson(stats: Any, predictions: np.ndarray, labels: np.ndarray) -> Any:
    # Of a single sample, pearsonr raises an error, where spearmanr gives NaN.
    return stats.pearsonr(predictions, labels).statistic if len(labels) > 1 else np.nan


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
    "subset_accuracy": Score("numpy", lambda np, p, t: np.mean((p == t).all(axis=1))),
    # Of any number of classes, -1..1; 0.0 where all predictions or all labels are of one class.
    "matthews_correlation": Score("sklearn.metrics", lambda sk, p, t: sk.matthews_corrcoef(t, p)),
    # Numbers, float64. Linear correlation, -1..1. NaN where it is undefined: predictions or labels
    # all equal, a single sample, an infinite value, or values so large that their sums overflow.
    "pearson": Score("scipy.stats", _pearson),
    # Correlation of the ranks, -1..1; infinite values rank first or last. NaN where it is
    # undefined: predictions or labels all equal, or a single sample.
    "spearman": Score("scipy.stats", lambda stats, p, t: stats.spearmanr(p, t).statistic),
    # The root of the mean squared error, in the unit of the labels.
    "rmse": Score("numpy", lambda np, p, t: np.sqrt(np.mean(np.square(p - t)))),
}


def by_class(
    predictions: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Of each class precision, recall and f1, as scikit-learn defines them (0.0 where they are
    undefined), and its samples (support); where samples have one class each, also what those of it
    were predicted as, which is a row of the confusion matrix: class -> count. Predictions and
    labels are int64, (samples,), or 0 and 1: (samples, classes).
    """
    count, rows = len(names), dict[str, dict[str, Any]]()
    sums: tuple[np.ndarray, ...]
    if predictions.ndim == 2:
        sums = ((predictions & labels).sum(0), predictions.sum(0), labels.sum(0))
    else:
        found = (labels[labels == predictions], predictions, labels)
        sums = tuple(np.bincount(values, minlength=count) for values in found)
    for name, right, predicted, true in zip(names, *(s.tolist() for s in sums), strict=True):
        rows[name] = {
            "precision": right / (predicted or 1),
            "recall": right / (true or 1),
            "f1": 2 * right / ((predicted + true) or 1),
            "support": true,
        }
    if predictions.ndim == 1:
        for row in rows.values():
            row["predicted_as"] = {}
        pairs = np.unique(labels.astype(np.int64) * count + predictions, return_counts=True)
        for pair, times in zip(*(values.tolist() for values in pairs), strict=True):
            rows[names[pair // count]]["predicted_as"][names[pair % count]] = times
    return rows


# --- texts ----------------------------------------------------------------------------------------


def squad(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], may_have_none: bool = False
) -> dict[str, float]:
    """F1 and exact match of extracted answers, 0..100, as SQuAD's official scripts have them.

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
    exact, shared = [], []
    for text, golds in zip(predictions, answers, strict=True):
        words, choices = _words(text), [_words(gold) for gold in golds]
        if may_have_none:
            choices = [choice for choice in choices if choice] or [[]]
        exact.append(float(words in choices))
        says_none = may_have_none and not words
        shared.append(exact[-1] if says_none else max(_word_f1(words, c) for c in choices))
    return {"squad_f1": 100 * fmean(shared), "squad_exact_match": 100 * fmean(exact)}


def _words(text: str) -> list[str]:
    """The words of a text that SQuAD compares."""
    # Punctuation goes before articles, and leaves no gap: "a.b" is the word "ab".
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def _word_f1(words: list[str], gold: list[str]) -> float:
    """F1 of two bags of words, 0..1."""
    shared = (Counter(words) & Counter(gold)).total()
    return 2 * shared / (len(words) + len(gold)) if shared else 0.0
