"""Scores against scikit-learn and scipy, and against their definitions in plain Python."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from slurmft.train.tasks.metrics import SCORES, by_class, squad

Pairs = list[tuple[int, int]]
"""(prediction, label) of each sample."""
FloatPairs = list[tuple[float, float]]

CLASSES = ("accuracy", "f1", "f1_macro", "matthews_correlation")
NUMBERS = ("pearson", "spearman")
ELSEWHERE = ("f1_micro", "subset_accuracy", "rmse", "average_precision")
"""Those that the tests of multi-label classification and of rerankers have."""

quick = settings(deadline=None, max_examples=60)


def pairs_of(values: st.SearchStrategy[int]) -> st.SearchStrategy[Pairs]:
    return st.lists(st.tuples(values, values), min_size=1, max_size=40)


def float_pairs_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[FloatPairs]:
    return st.lists(st.tuples(values, values), min_size=1, max_size=30)


binary = pairs_of(st.integers(0, 1))
many = st.one_of(
    pairs_of(st.integers(0, 5)),
    pairs_of(st.sampled_from([-1, 0, 7, 2**40])),
    st.lists(st.tuples(st.integers(6, 9), st.integers(0, 5)), min_size=1),  # all wrong
    # labels never predicted
    st.lists(st.tuples(st.just(3), st.integers(0, 5)), min_size=1),
    st.lists(st.tuples(st.integers(0, 5), st.just(3)), min_size=1),  # one true class
)
ties = st.integers(-3, 3).map(float)
nearly_constant = st.integers(0, 4).map(lambda ulps: 1.0 + ulps * 2.0**-52)
extreme = st.floats(allow_nan=False)  # subnormal, 1e308, infinite
wild = st.one_of(
    float_pairs_of(ties), float_pairs_of(nearly_constant), float_pairs_of(extreme)
)


def score(name: str, pairs: Pairs | FloatPairs, dtype: type = np.int64) -> float:
    """The score; a warning that it lets out is an error."""
    predictions, labels = np.array(pairs, dtype).T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = SCORES[name](predictions, labels)
    assert type(value) is float
    return value


def library(function: Callable[..., float], pairs: Pairs | FloatPairs) -> float:
    """What the library says, in its order of arguments, whatever it warns of."""
    first, second = np.array(pairs).T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(first, second)


def same(value: float, expected: float, tolerance: float = 1e-12) -> bool:
    if math.isnan(expected):
        return math.isnan(value)
    return abs(value - expected) <= tolerance


# --- definitions, exact but for one root ----------------------------------------------------------


def exact_accuracy(pairs: Pairs) -> float:
    return float(Fraction(sum(p == t for p, t in pairs), len(pairs)))


def exact_f1(pairs: Pairs, of: int = 1) -> Fraction:
    hits = sum(p == t == of for p, t in pairs)
    named = sum((p == of) + (t == of) for p, t in pairs)
    return Fraction(2 * hits, named) if named else Fraction(0)


def exact_f1_macro(pairs: Pairs) -> float:
    classes = {value for pair in pairs for value in pair}
    return float(sum(exact_f1(pairs, of) for of in classes) / len(classes))


def exact_matthews(pairs: Pairs) -> float:
    """Gorodkin's R_K, from the counts of the confusion matrix."""
    n, right = len(pairs), sum(p == t for p, t in pairs)
    predicted = Counter(p for p, _ in pairs)
    true = Counter(t for _, t in pairs)
    both = n * right - sum(count * true[of] for of, count in predicted.items())
    spread = (
        n * n - sum(c * c for c in counts.values()) for counts in (predicted, true)
    )
    below = math.prod(spread)
    return both / math.sqrt(below) if below else 0.0


def exact_pearson(pairs: list[tuple[Fraction, Fraction]]) -> float:
    n = len(pairs)
    mean_x, mean_y = sum(x for x, _ in pairs) / n, sum(y for _, y in pairs) / n
    cov = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    below = sum((x - mean_x) ** 2 for x, _ in pairs) * sum(
        (y - mean_y) ** 2 for _, y in pairs
    )
    if not below:
        return math.nan
    return math.copysign(math.sqrt(cov * cov / below), cov)


def ranks(values: list[float]) -> list[Fraction]:
    """From 1; equal values share the mean of theirs."""
    return [
        Fraction(
            2 * sum(other < value for other in values) + values.count(value) + 1, 2
        )
        for value in values
    ]


def exact_spearman(pairs: FloatPairs) -> float:
    left, right = (ranks(list(side)) for side in zip(*pairs, strict=True))
    return exact_pearson(list(zip(left, right, strict=True)))


def fractions(pairs: FloatPairs) -> list[tuple[Fraction, Fraction]]:
    return [(Fraction(x), Fraction(y)) for x, y in pairs]


# --- classes --------------------------------------------------------------------------------------


@quick
@given(many)
@example([(4, 4)])
@example([(4, 2)])
@example([(2, 2), (2, 2)])
def test_scores_of_classes(pairs: Pairs) -> None:
    value = score("accuracy", pairs)
    assert same(value, library(lambda p, t: sk.accuracy_score(t, p), pairs))
    assert same(value, exact_accuracy(pairs))
    value = score("f1_macro", pairs)
    assert same(value, library(lambda p, t: sk.f1_score(t, p, average="macro"), pairs))
    assert same(value, exact_f1_macro(pairs))
    value = score("matthews_correlation", pairs)
    assert same(value, library(lambda p, t: sk.matthews_corrcoef(t, p), pairs))
    assert same(value, exact_matthews(pairs))


@quick
@given(binary)
@example([(0, 0)])
@example([(1, 0), (0, 1)])
@example([(1, 1), (1, 1)])
def test_f1_is_of_class_one(pairs: Pairs) -> None:
    value = score("f1", pairs)
    assert same(value, library(lambda p, t: sk.f1_score(t, p), pairs))
    assert same(value, float(exact_f1(pairs)))


def test_known_values_of_classes() -> None:
    pairs = [(1, 1), (1, 0), (0, 1), (0, 0), (1, 1)]
    assert score("accuracy", pairs) == 3 / 5
    assert score("f1", pairs) == 4 / 6
    assert same(score("f1_macro", pairs), (4 / 6 + 2 / 4) / 2)
    assert same(score("matthews_correlation", pairs), 1 / 6)
    assert score("f1", [(0, 0), (0, 0)]) == 0.0  # no positive at all
    assert score("matthews_correlation", [(1, 1), (1, 1)]) == 0.0


def test_matthews_of_many_samples_does_not_overflow() -> None:
    pairs = [(0, 0)] * 70_000 + [(1, 1)] * 70_000 + [(0, 1)] * 9
    assert same(score("matthews_correlation", pairs), exact_matthews(pairs))


# --- numbers --------------------------------------------------------------------------------------


@quick
@given(wild)
@example([(0.5, 2.0)])
@example([(1.0, 2.0), (1.0, 3.0)])
@example([(0.1, 0.3)] * 3)
@example([(1e308, 1.0), (1.5e308, 2.0)])
def test_correlations_are_those_of_scipy(pairs: FloatPairs) -> None:
    value = score("pearson", pairs, np.float64)
    one = len(pairs) == 1  # where pearsonr raises
    assert same(
        value, math.nan if one else library(lambda p, t: stats.pearsonr(p, t)[0], pairs)
    )
    value = score("spearman", pairs, np.float64)
    assert same(value, library(lambda p, t: stats.spearmanr(p, t)[0], pairs))


@quick
@given(float_pairs_of(ties))
def test_pearson_by_fractions(pairs: FloatPairs) -> None:
    assert same(score("pearson", pairs, np.float64), exact_pearson(fractions(pairs)))


@quick
@given(float_pairs_of(st.integers(-50, 50).map(lambda step: 1.0 + step * 2.0**-30)))
def test_pearson_of_nearly_constant_values(pairs: FloatPairs) -> None:
    """Rounding the mean costs 2**-53 of values that differ by 2**-30: 1e-7 of each difference."""
    assert same(
        score("pearson", pairs, np.float64), exact_pearson(fractions(pairs)), 1e-6
    )


@quick
@given(wild)
def test_spearman_by_exact_ranks(pairs: FloatPairs) -> None:
    assert same(score("spearman", pairs, np.float64), exact_spearman(pairs))


def test_known_correlations() -> None:
    pairs = [(1.0, 1.0), (2.0, 4.0), (3.0, 9.0)]
    assert same(score("pearson", pairs, np.float64), 8 / math.sqrt(2 * 98 / 3))
    assert same(score("spearman", pairs, np.float64), 1.0)
    tied = [(1.0, 10.0), (2.0, 20.0), (2.0, 30.0), (3.0, 0.0)]
    assert same(score("spearman", tied, np.float64), -1.5 / math.sqrt(4.5 * 5))
    assert same(
        score("spearman", [(1.0, 0.0), (math.inf, 2.0), (2.0, 1.0)], np.float64), 1.0
    )


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("Denver Broncos", ["Denver Broncos"], 100, 100),
        ("The  DENVER\tbroncos!", ["Denver Broncos"], 100, 100),
        ("Broncos Denver", ["Denver Broncos"], 0, 100),  # F1 knows no order
        ("Carolina Panthers", ["Denver Broncos"], 0, 0),
        ("the Denver Broncos team", ["Denver Broncos"], 0, 80),
        ("Broncos", ["Panthers", "Denver Broncos", "the Broncos"], 100, 100),
        ("Santa Clara", ["Levi's Stadium", "Santa Clara, California"], 0, 80),
        ("x x x", ["x x y z"], 0, 400 / 7),  # words count as often as both have them
        ("u.s.a.", ["USA"], 100, 100),
        ("U S A", ["USA"], 0, 0),
        ("well-known", ["wellknown"], 100, 100),
        # punctuation goes first, and the article with it
        ("a-team", ["ateam"], 100, 100),
        ("an anthem", ["anthem"], 100, 100),
        ("theatre", ["atre"], 0, 0),  # articles are whole words
        ("$1.2 million", ["12 million"], 100, 100),
        ("caf\u00e9\u00a0noir", ["CAF\u00c9 NOIR"], 100, 100),
        ("\u201cyes\u201d", ["yes"], 0, 0),  # only ASCII punctuation is removed
        ("", ["yes"], 0, 0),
        ("the", ["A!"], 100, 0),  # no word left: equal, and without a shared word
    ],
)
def test_squad_of_one_question(
    prediction: str, answers: list[str], exact: float, f1: float
) -> None:
    found = squad([prediction], [answers])
    assert found == {
        "squad_exact_match": exact,
        "squad_f1": pytest.approx(f1, abs=1e-12),
    }


def test_squad_is_the_mean_of_the_questions() -> None:
    found = squad(
        ["Paris", "in Rome", "Oslo"], [["paris."], ["Rome"], ["Bergen", "Moss"]]
    )
    assert same(found["squad_exact_match"], 100 / 3)
    assert same(found["squad_f1"], 500 / 9)


words = st.lists(st.sampled_from(["cat", "dog", "emu", "fox"]), min_size=1, max_size=6)


@quick
@given(words, st.lists(words, min_size=1, max_size=3), st.data())
def test_squad_by_counting(
    prediction: list[str], golds: list[list[str]], data: st.DataObject
) -> None:
    def written(text: list[str]) -> str:
        """The words with what must not matter around them."""
        noise = st.sampled_from(["", "the ", "A ", "  An\n", "!", "("])
        cased = [
            data.draw(st.sampled_from([word, word.title(), word.upper()]))
            for word in text
        ]
        return " ".join(
            data.draw(noise) + word + data.draw(st.sampled_from(["", ","]))
            for word in cased
        )

    def by_precision_and_recall(gold: list[str]) -> Fraction:
        left, shared = list(gold), 0
        for word in prediction:
            if word in left:
                left.remove(word)
                shared += 1
        if not shared:
            return Fraction(0)
        precision, recall = (
            Fraction(shared, len(prediction)),
            Fraction(shared, len(gold)),
        )
        return 2 * precision * recall / (precision + recall)

    found = squad([written(prediction)], [[written(gold) for gold in golds]])
    assert found["squad_exact_match"] == 100 * (prediction in golds)
    assert same(
        found["squad_f1"], float(100 * max(map(by_precision_and_recall, golds)))
    )


# --- the table ------------------------------------------------------------------------------------


def test_every_score_is_of_classes_or_of_numbers() -> None:
    assert set(SCORES) == {*CLASSES, *NUMBERS, *ELSEWHERE}


@pytest.mark.processes
def test_the_module_imports_nothing_slow() -> None:
    slow = "{'sklearn', 'scipy', 'torch'}"
    code = (
        f"import sys, slurmft.train.tasks.metrics; print({slow} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "set()\n"


@quick
@given(pairs_of(st.integers(0, 4)))
def test_classes_are_scikit_learns(pairs: Pairs) -> None:
    predictions, labels = (np.array(values) for values in zip(*pairs, strict=True))
    names = [f"class {i}" for i in range(5)]
    found = by_class(predictions, labels, names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = sk.precision_recall_fscore_support(
            labels, predictions, labels=range(5), zero_division=0.0
        )
    for key, values in zip(
        ("precision", "recall", "f1", "support"), theirs, strict=True
    ):
        assert [found[name][key] for name in names] == pytest.approx(list(values))
    matrix = [[found[true]["predicted_as"].get(p, 0) for p in names] for true in names]
    assert matrix == sk.confusion_matrix(labels, predictions, labels=range(5)).tolist()


def test_classes_of_samples_that_have_several() -> None:
    rng = np.random.default_rng(0)
    predictions, labels = rng.integers(2, size=(2, 50, 3))
    found = by_class(predictions, labels.astype(np.int8), ["a", "b", "c"])
    theirs = sk.precision_recall_fscore_support(labels, predictions)
    for key, values in zip(
        ("precision", "recall", "f1", "support"), theirs, strict=True
    ):
        assert [row[key] for row in found.values()] == pytest.approx(list(values))
    assert all("predicted_as" not in row for row in found.values())
