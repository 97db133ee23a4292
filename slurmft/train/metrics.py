"""What each metric is: a number from predictions and labels, as scikit-learn and scipy define it.

Every score takes whole arrays, of at least one sample, and returns a plain float. A sentinel among
the predictions, such as -1, is a class like any other here.
"""

from __future__ import annotations

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import numpy as np

from slurmft.core.errors import SlurmftError

Score = Callable[[np.ndarray, np.ndarray], float]
"""Predictions and labels, both (samples,), to the value."""

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


# --- classes --------------------------------------------------------------------------------------


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Fraction of predictions that equal their labels, 0..1, as scikit-learn's accuracy_score.

    Args:
        predictions: int64, (samples,).
        labels: int64, (samples,).

    Raises:
        SlurmftError: no samples, or not one prediction per label.
    """
    _check_arrays(predictions, labels)
    return float(np.mean(predictions == labels))  # importing scikit-learn takes longer than a step


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1 against class 0, 0..1: scikit-learn's binary f1_score.

    0.0 where no sample is of class 1, predicted or true.

    Args:
        predictions: int64, (samples,), each 0 or 1.
        labels: int64, (samples,), each 0 or 1.

    Raises:
        SlurmftError: another class, no samples, or not one prediction per label.
    """
    from sklearn.metrics import f1_score

    _check_arrays(predictions, labels)
    _check_binary(predictions, labels)
    return float(f1_score(labels, predictions, zero_division=0.0))


def f1_macro(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean of the classes' F1, each of equal weight, 0..1: scikit-learn's macro f1_score.

    The classes are those found among predictions or labels: one that is found in neither does not
    count, and one that is predicted but never true counts as 0.0.

    Args:
        predictions: int64, (samples,).
        labels: int64, (samples,).

    Raises:
        SlurmftError: no samples, or not one prediction per label.
    """
    from sklearn.metrics import f1_score

    _check_arrays(predictions, labels)
    return float(f1_score(labels, predictions, average="macro", zero_division=0.0))


def matthews_correlation(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation of any number of classes, -1..1: scikit-learn's matthews_corrcoef.

    0.0 where all predictions or all labels are of one class, even if all are right.

    Args:
        predictions: int64, (samples,).
        labels: int64, (samples,).

    Raises:
        SlurmftError: no samples, or not one prediction per label.
    """
    from sklearn.metrics import matthews_corrcoef

    _check_arrays(predictions, labels)
    with _quiet():
        return float(matthews_corrcoef(labels, predictions))


# --- numbers --------------------------------------------------------------------------------------


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Linear correlation, -1..1: the statistic of scipy's pearsonr.

    NaN where it is undefined: predictions or labels all equal, a single sample, an infinite value,
    or values so large that their sums overflow.

    Args:
        predictions: float64, (samples,).
        labels: float64, (samples,).

    Raises:
        SlurmftError: a NaN, no samples, or not one prediction per label.
    """
    from scipy.stats import pearsonr

    _check_arrays(predictions, labels)
    _check_numbers(predictions, labels)
    if len(labels) == 1:  # an error in pearsonr, NaN in spearmanr
        return float("nan")
    with _quiet():
        return float(pearsonr(predictions, labels).statistic)


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Correlation of the ranks, -1..1: the statistic of scipy's spearmanr.

    Equal values share the mean of their ranks; infinite values rank first or last. NaN where it is
    undefined: predictions or labels all equal, or a single sample.

    Args:
        predictions: float64, (samples,).
        labels: float64, (samples,).

    Raises:
        SlurmftError: a NaN, no samples, or not one prediction per label.
    """
    from scipy.stats import spearmanr

    _check_arrays(predictions, labels)
    _check_numbers(predictions, labels)
    with _quiet():
        return float(spearmanr(predictions, labels).statistic)


SCORES: dict[str, Score] = {
    "accuracy": accuracy,
    "f1": f1,
    "f1_macro": f1_macro,
    "matthews_correlation": matthews_correlation,
    "pearson": pearson,
    "spearman": spearman,
}
NEEDS = {
    "f1": "sklearn.metrics",
    "f1_macro": "sklearn.metrics",
    "matthews_correlation": "sklearn.metrics",
    "pearson": "scipy.stats",
    "spearman": "scipy.stats",
}
"""The module that a score imports when it is computed; those without compute by themselves."""


# --- texts ----------------------------------------------------------------------------------------


def squad(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 of extracted answers, 0..100, as SQuAD v1.1's official script has them.

    Texts are compared as words, without case, punctuation and articles. Each prediction counts
    with the gold answer that is best for it, in each score on its own. As in that script, texts
    of which no word is left match exactly, but have an F1 of 0.

    Args:
        predictions: one text per question.
        answers: the gold answers of each question, at least one.

    Returns:
        Means over the questions: squad_exact_match and squad_f1.

    Raises:
        SlurmftError: no questions, one without answers, or not one prediction per question.
    """
    _check_counts(len(predictions), len(answers))
    exact, shared = [], []
    for i, (text, golds) in enumerate(zip(predictions, answers, strict=True)):
        if not len(golds):
            raise SlurmftError(
                f"question {i} has no gold answer", "SQuAD v1.1's scores need at least one each"
            )
        words, choices = _words(text), [_words(gold) for gold in golds]
        exact.append(float(words in choices))
        shared.append(max(_word_f1(words, choice) for choice in choices))
    return {"squad_exact_match": 100 * fmean(exact), "squad_f1": 100 * fmean(shared)}


def squad_v2(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 as SQuAD v2.0's official script has them, 0..100.

    Beside v1.1's rules (see `squad`): a question may have no answer, and the empty text says so. In
    both scores that is right where there is none, and wrong elsewhere. Gold answers of which no
    word is left do not count.

    Args:
        predictions: one text per question.
        answers: the gold answers of each question; none where it has no answer.

    Returns:
        Means over the questions: squad_exact_match and squad_f1.

    Raises:
        SlurmftError: no questions, or not one prediction per question.
    """
    _check_counts(len(predictions), len(answers))
    exact, shared = [], []
    for text, golds in zip(predictions, answers, strict=True):
        words, choices = _words(text), [found for gold in golds if (found := _words(gold))] or [[]]
        exact.append(float(words in choices))
        both = [(words, choice) for choice in choices]
        shared.append(max(_word_f1(w, c) if w and c else float(w == c) for w, c in both))
    return {"squad_exact_match": 100 * fmean(exact), "squad_f1": 100 * fmean(shared)}


def _words(text: str) -> list[str]:
    """The words of a text that SQuAD compares."""
    # Punctuation goes before articles, and leaves no gap: "a.b" is the word "ab".
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def _word_f1(words: list[str], gold: list[str]) -> float:
    """F1 of two bags of words, 0..1."""
    shared = (Counter(words) & Counter(gold)).total()
    return 2 * shared / (len(words) + len(gold)) if shared else 0.0


# --- checks ---------------------------------------------------------------------------------------


def _check_counts(predictions: int, labels: int) -> None:
    if predictions != labels:
        raise SlurmftError(
            f"{predictions} predictions for {labels} labels",
            "a score needs one prediction per label, in the same order",
        )
    if not labels:
        raise SlurmftError("no samples to score", "give a validation split that is not empty")


def _check_arrays(predictions: np.ndarray, labels: np.ndarray) -> None:
    if predictions.ndim != 1 or labels.ndim != 1:  # scikit-learn takes 2-d ones as multi-label
        raise SlurmftError(
            f"predictions of shape {predictions.shape}, labels of shape {labels.shape}",
            "a score needs one value per sample in each",
        )
    _check_counts(len(predictions), len(labels))


def _check_binary(predictions: np.ndarray, labels: np.ndarray) -> None:
    found = np.union1d(predictions, labels).tolist()
    if set(found) <= {0, 1}:
        return
    shown = ", ".join(map(str, found[:10])) + (", ..." if len(found) > 10 else "")
    raise SlurmftError(
        f"f1 needs the labels 0 and 1, found {shown}", "f1_macro takes any number of classes"
    )


def _check_numbers(predictions: np.ndarray, labels: np.ndarray) -> None:
    for what, values, hint in (
        ("predictions", predictions, "the model has diverged: try a lower learning rate"),
        ("labels", labels, "remove the samples that have no label"),
    ):
        if missing := int(np.isnan(values).sum()):
            raise SlurmftError(f"NaN among the {what}: {missing} of {len(values)}", hint)


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings on the screen: each docstring says what an undefined score is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
