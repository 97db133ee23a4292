"""--metric: the package evaluate's metrics beside our own, and what is wrong with them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, mean_squared_error

from slurmft import locks
from slurmft.core import interpreter, process
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.permissions import current_umask
from slurmft.train import metric_spec, own_task, recipes, tasks
from slurmft.train.commands import fetch
from slurmft.train.config import TrainConfig
from slurmft.train.login import metrics as login_metrics
from slurmft.train.login import sources
from slurmft.train.login.configure import configure
from slurmft.train.loop.evaluator import Evaluator
from slurmft.train.loop.generators import rng_state
from slurmft.train.loop.named_metrics import NamedMetrics
from slurmft.train.loop.timers import PhaseClock
from slurmft.train.metric_process import MetricError, MetricProcess, Numbers
from slurmft.train.metric_spec import MetricSpec
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.evaluate_metrics import (
    EvaluateMetric,
    check_trusted,
    examples,
)
from slurmft.train.tasks.metrics import NAN
from tests.conftest import assert_two_lines, records, slurmft
from tests.support import until
from tests.support.metric_scripts import SCRIPTS, cache_script, write_script
from tests.support.models import (
    LABELS,
    write_copies,
    write_many_labels,
    write_seq2seq_model,
    write_splits,
    write_squad,
    write_words,
)
from tests.train.test_tasks import glue
from tests.train.test_trainer import EXACT, train


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("my metrics")
    for name in SCRIPTS:
        write_script(folder, name)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache, and no hub."""
    import evaluate

    folder = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_MODULES_CACHE", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HOME", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        # It has read the variables already, if another test has imported it.
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", folder / "modules")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", folder / "metrics")
        patch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
        patch.setattr(sys, "path", list(sys.path))
        (folder / "modules").mkdir()
        yield folder


# --- values of --metric ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "configuration", "arguments", "label"),
    [
        ("f1", "f1", None, {}, "f1"),
        ("f1:average=macro", "f1", None, {"average": "macro"}, "f1_macro"),
        ("glue:mrpc", "glue", "mrpc", {}, "glue_mrpc"),
        (
            "f1:multilabel,average=none,labels=[0, 2]",
            "f1",
            "multilabel",
            {"average": None, "labels": [0, 2]},
            "f1_multilabel_average_None_labels_-0-2-",
        ),
        (
            "f1:a=[[0, 1], [2]],b=((1, 2), 3),c",
            "f1",
            "c",
            {"a": [[0, 1], [2]], "b": ((1, 2), 3)},
            "f1_c_a_-0-1-2-_b_-1-2-3-",
        ),
        ("mse:squared=false", "mse", None, {"squared": False}, "mse_squared_False"),
        ("me/stars:most=5", "me/stars", None, {"most": 5}, "stars_most_5"),
        ("ter:better=lower,value=score", "ter", None, {}, "ter"),
        ("./my/stars", "./my/stars", None, {}, "stars"),
        ("./my/stars.py:x=a.b", "./my/stars.py", None, {"x": "a.b"}, "stars_a.b"),
    ],
)
def test_forms(
    text: str,
    name: str,
    configuration: str | None,
    arguments: dict[str, Any],
    label: str,
) -> None:
    spec = MetricSpec.parse(text)
    assert (spec.name, spec.configuration, spec.arguments) == (
        name,
        configuration,
        arguments,
    )
    assert spec.label == label


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["f1:average=macro,average=micro"], "'average=micro' is unclear"),
        (["f1:a,b"], "'b' is unclear"),
        (["f1:"], "'' is unclear"),
        (["f1:1=2"], "'1=2' is unclear"),
        ([":x=1"], "names no metric"),
        (["mse:better=less"], "neither lower nor higher"),
        (["f1", "f1"], "have one name in results"),
        (["f1", "me/f1"], "have one name in results"),
    ],
)
def test_forms_that_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig.resolve(task="emotion", metric=tuple(texts))


@pytest.mark.parametrize(
    ("text", "values", "deciding", "is_lower"),
    [
        ("f1:average=macro", ["f1"], "f1_macro", False),
        ("seqeval", ["overall_precision", "overall_f1"], "seqeval_overall_f1", False),
        ("glue:mrpc", ["accuracy", "f1"], "glue_mrpc_f1", False),
        ("rouge", ["rouge1", "rougeL"], "rouge_rougeL", False),
        ("ter", ["score", "num_edits"], "ter_score", True),
        ("mse", ["mse"], "mse", True),
        ("mse:better=higher", ["mse"], "mse", False),
        ("./my/stars:better=lower", ["off"], "stars", True),
        ("./my/stars", ["off", "mse"], None, False),
        ("squad:value=exact_match", ["exact_match"], "squad_exact_match", False),
    ],
)
def test_which_value_decides(
    text: str, values: list[str], deciding: str | None, is_lower: bool
) -> None:
    """And whether the lowest is the best."""
    spec = MetricSpec.parse(text)
    if deciding is None:
        with pytest.raises(UsageError) as error:
            spec.deciding(values)
        assert error.value.hint == "name it: --metric ./my/stars:value=off"
        return
    value = spec.deciding(values)
    assert spec.value_names(values)[value] == deciding
    assert spec.is_lower_better(value) == is_lower


# --- metrics that agree with ours -----------------------------------------------------------------


def values_of(
    task: Any, data: Any, predictions: np.ndarray, metric: Path, arguments: str = ""
) -> dict[str, float]:
    """What a metric of evaluate gives for predictions of a task."""
    loaded = EvaluateMetric.load(MetricSpec.parse(f"{metric}{arguments}"))
    kind = task.facts.predictions
    form = loaded.form(examples(kind, data.labels or None), task.config.task)
    values = {}
    for suffix, forms in task.metric_inputs(predictions, data).items():
        for name, value in loaded.compute(forms[form]).items():
            values[name + suffix] = value
    return values


def task_of(name: str, data: Path, model: Path, **given: Any) -> Any:
    config = TrainConfig.resolve(task=name, data=str(data), model=str(model), **given)
    return tasks.get(sources.localize(config))


@pytest.mark.parametrize(
    ("task_name", "compared"),
    [
        ("sst2", {"accuracy": ("accuracy", "", "accuracy")}),
        ("mnli", {"accuracy_mismatched": ("accuracy", "", "accuracy_mismatched"),
                  "accuracy_matched": ("accuracy", "", "accuracy_matched")}),
        ("mrpc", {"f1": ("f1", "", "f1"), "accuracy": ("accuracy", "", "accuracy")}),
        ("cola", {"matthews_correlation": ("matthews_correlation", "", "matthews_correlation")}),
        ("stsb", {"pearson": ("correlations", "", "pearson"),
                  "spearman": ("correlations", "", "spearman")}),
    ],
)  # fmt: skip
def test_texts_as_ours(
    task_name: str,
    compared: dict[str, tuple[str, str, str]],
    tmp_path: Path,
    tiny_model: Path,
    scripts: Path,
    home: Path,
) -> None:
    """To the last digit."""
    task = task_of(task_name, glue(tmp_path / "data", task_name, 67), tiny_model)
    data = task.prepare()
    rng = np.random.default_rng(3)
    predictions: Any = rng.permutation(data.validation.labels)
    if task_name == "stsb":
        predictions = predictions + rng.normal(size=len(predictions))
    ours = task.compute(predictions, data)
    for name, (script, arguments, value) in compared.items():
        theirs = values_of(task, data, predictions, scripts / script, arguments)
        assert theirs[value] == ours[name], name


def test_classes_that_are_numbers_are_these_numbers(
    tmp_path: Path, tiny_model: Path, scripts: Path, home: Path
) -> None:
    """As scikit-learn has them of the labels of the file: not counted from 0."""
    stars = [3, 7, 7] * 5
    rows = [{"text": f"a b {star}", "label": star} for star in stars]
    write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    task = task_of("text-classification", tmp_path / "data", tiny_model)
    data = task.prepare()
    predictions = np.random.default_rng(3).integers(0, 2, len(stars))
    guesses = np.array([3, 7])[predictions]
    theirs = values_of(task, data, predictions, scripts / "mse")
    assert theirs["mse"] == mean_squared_error(stars, guesses)
    theirs = values_of(task, data, predictions, scripts / "f1", ":pos_label=3")
    assert theirs["f1"] == f1_score(stars, guesses, pos_label=3)


def test_probabilities_are_not_taken_for_classes(
    tmp_path: Path, scripts: Path, home: Path
) -> None:
    script = tmp_path / "brier_score.py"
    script.write_text((scripts / "mse" / "mse.py").read_text())
    metric = EvaluateMetric.load(MetricSpec.parse(str(script)))
    with pytest.raises(MetricError, match="takes probabilities, and --task x predicts"):
        metric.form(examples("classes", ["a", "b"]), "x")
    assert metric.form(examples("numbers", None), "x") == 0


def test_many_labels_as_ours(
    tmp_path: Path, tiny_model: Path, scripts: Path, home: Path
) -> None:
    write_many_labels(tmp_path / "data", train=40, validation=53)
    task = task_of("multi-label", tmp_path / "data", tiny_model)
    data = task.prepare()
    rng = np.random.default_rng(3)
    predictions = rng.permutation(data.validation.labels).astype(np.int64)
    ours = task.compute(predictions, data)
    for name in ("micro", "macro"):
        arguments = f":multilabel,average={name}"
        theirs = values_of(task, data, predictions, scripts / "f1", arguments)
        assert theirs["f1"] == ours[f"f1_{name}"]
    theirs = values_of(task, data, predictions, scripts / "accuracy", ":multilabel")
    assert theirs["accuracy"] == ours["subset_accuracy"]
    with pytest.raises(MetricError, match="does not take the predictions") as error:
        values_of(task, data, predictions, scripts / "accuracy")
    assert "configuration" in str(error.value.hint)


def predicted(task: Any, data: Any) -> np.ndarray:
    """What a model of random weights predicts."""
    torch.manual_seed(3)
    model = task.model(data).eval()
    batch = data.validation.batch(np.arange(len(data.validation)), data.pad_id)
    with torch.inference_mode():
        values = task.evaluate(model, task.batch(batch, data.validation), data)
    return np.asarray(values.predictions.numpy())


def test_words_as_ours(
    tmp_path: Path, tiny_model: Path, scripts: Path, home: Path
) -> None:
    """As names and as numbers; words that were cut off have no label."""
    data_folder = write_words(tmp_path / "data", train=60, validation=31)
    given = {"metric": (str(scripts / "tags"),), "max_length": 12}
    task = task_of("token-classification", data_folder, tiny_model, **given)
    data = task.prepare()
    predictions = predicted(task, data)
    assert predictions.shape == (31, *task.prediction_shape)
    ours = task.compute(predictions, data)
    theirs = values_of(task, data, predictions, scripts / "tags")
    assert theirs == {"overall_accuracy": ours["accuracy"]}
    theirs = values_of(task, data, predictions, scripts / "accuracy")
    assert theirs == {"accuracy": ours["accuracy"]}
    plain = task_of("token-classification", data_folder, tiny_model, max_length=12)
    assert plain.compute(predicted(plain, data), data) == ours


@pytest.mark.extra("training")
def test_entities_as_seqeval(tmp_path: Path, tiny_model: Path, home: Path) -> None:
    """By its own package, on the labels that its metric would get."""
    from seqeval.metrics import f1_score, precision_score, recall_score

    folder = write_words(tmp_path / "data", train=60, validation=200)
    given = {"metric": ("seqeval",)}
    task = task_of("token-classification", folder, tiny_model, **given)
    data = task.prepare()
    predictions = predicted(task, data)
    names = task.metric_inputs(predictions, data)[""][0]
    ours = task.compute(predictions, data)
    for name, score in (
        ("entity_f1", f1_score),
        ("entity_precision", precision_score),
        ("entity_recall", recall_score),
    ):
        assert ours[name] == score(names.references, names.predictions)


@pytest.mark.parametrize("ids_differ", [True, False])
def test_answers_as_ours(
    ids_differ: bool, tmp_path: Path, tiny_model: Path, scripts: Path, home: Path
) -> None:
    """evaluate finds answers by the ids of the questions, which may be there twice."""
    folder = write_squad(tmp_path / "data", train=20, validation=40)
    if not ids_differ:
        file = folder / "validation.jsonl"
        rows = [
            json.loads(line) | {"id": "x"} for line in file.read_text().splitlines()
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"max_length": 24, "doc_stride": 8}
    task = task_of("squad", folder, tiny_model, **sizes)
    data = task.prepare()
    predictions = predicted(task, data)
    ours = task.compute(predictions, data)
    theirs = values_of(task, data, predictions, scripts / "squad")
    assert theirs["f1"] == pytest.approx(ours["squad_f1"], abs=1e-12)
    assert theirs["exact_match"] == ours["squad_exact_match"]


def test_generated_texts_as_ours(tmp_path: Path, scripts: Path, home: Path) -> None:
    folder = write_copies(tmp_path / "data", train=40, validation=23)
    model = write_seq2seq_model(tmp_path / "bart", "bart")
    given = {"metric": (str(scripts / "sacrebleu"),), "max_target_length": 8}
    task = task_of("seq2seq", folder, model, **given)
    data = task.prepare()
    predictions = predicted(task, data)
    assert predictions.shape == (23, *task.prediction_shape)
    ours = task.compute(predictions, data)
    theirs = values_of(task, data, predictions, scripts / "sacrebleu")
    assert list(theirs) == ["score", "sys_len"]  # counts are a list
    assert theirs["score"] == pytest.approx(ours["bleu"], abs=1e-12)
    # The texts are those that were scored, not others of the same tokens.
    texts = task.metric_inputs(predictions, data)[""][0].predictions
    assert max(map(len, texts)) > 0


# --- metrics that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", sorted({facts.predictions for facts in TASKS.values()} - {""})
)
def test_every_kind_of_predictions_has_a_metric(
    kind: str, scripts: Path, home: Path
) -> None:
    """And all of them refuse a metric of another kind, which evaluate would convert to."""
    takes = {
        "classes": "accuracy", "flags": "accuracy:multilabel", "numbers": "mse", "tags": "tags",
        "answers": "squad", "texts": "sacrebleu",
    }  # fmt: skip
    fitting = {
        "classes": {"classes", "numbers"},
        "tags": {"tags", "classes", "numbers"},
    }
    forms = examples(kind, ["a", "b", "c"])
    for other, name in takes.items():
        metric = EvaluateMetric.load(MetricSpec.parse(f"{scripts}/{name}"))
        if other in fitting.get(kind, {kind}):
            assert metric.compute(forms[metric.form(forms, "x")])
        else:
            with pytest.raises(
                MetricError, match="does not take the predictions of --task x"
            ):
                metric.form(forms, "x")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("f1", "Target is multiclass but average='binary'", "give its arguments"),
        ("f1:average=none", "returns no single number, but f1 (ndarray)", "average=macro"),
        ("f1:value=precision,average=macro", "no number precision", "its numbers are f1"),
        ("lists", "no single number, but each (list)", "average=macro"),
        ("ends", "failed: SystemExit(3)", "leave it out"),
    ],
)  # fmt: skip
def test_computations_that_are_refused(
    text: str, message: str, hint: str, scripts: Path, home: Path
) -> None:
    metric = EvaluateMetric.load(MetricSpec.parse(f"{scripts}/{text}"))
    with pytest.raises(MetricError) as error:
        metric.compute(examples("classes", LABELS)[0])
    assert message in error.value.message
    assert hint in str(error.value.hint)


_NLTK = """
***********************************
  Resource \x1b[93mpunkt_tab\x1b[0m not found.
  Please use the NLTK Downloader to obtain the resource:

  >>> nltk.download('punkt_tab')
"""


class TimeLimitError(BaseException):
    """As those of packages that end a call after a time."""


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (LookupError(_NLTK), "failed: nltk has no 'punkt_tab' here", "downloader punkt_tab"),
        (OSError("We couldn't connect to 'https://huggingface.co' to load the files"),
         "couldn't connect", "into the caches before"),
        (ConnectionError("Offline mode is enabled. Tried to reach https://x/bleu.py"),
         "Tried to reach", "beside the script"),
        (OSError("no such file"), "no such file", "give its arguments"),
        (TimeLimitError("60 s"), "TimeLimitError('60 s')", "leave it out"),
    ],
)  # fmt: skip
def test_what_a_script_lacks_is_told(
    error: BaseException, message: str, hint: str
) -> None:
    def compute(**inputs: Any) -> None:
        raise error

    module = SimpleNamespace(features={}, compute=compute)
    metric = EvaluateMetric(MetricSpec.parse("any"), module)
    with pytest.raises(MetricError) as raised:
        metric.compute(examples("numbers", None)[0])
    assert message in raised.value.message
    assert hint in str(raised.value.hint)


def test_several_imports_on_a_line_are_told(
    scripts: Path, home: Path, tmp_path: Path
) -> None:
    """evaluate reads them as one package, and asks to install "evaluate,"."""
    source = (scripts / "accuracy" / "accuracy.py").read_text()
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "two.py").write_text(f"import evaluate, datasets\n{source}")
    with pytest.raises(MetricError, match="'import a, b' for one package") as error:
        EvaluateMetric.load(MetricSpec.parse(str(folder)))
    assert error.value.hint == "write one import a line in its script"


def test_a_metric_may_return_the_number_itself(scripts: Path, home: Path) -> None:
    metric = EvaluateMetric.load(MetricSpec.parse(f"{scripts}/bare"))
    assert metric.compute(examples("classes", LABELS)[0]) == {"bare": 0.5}


def returned(result: Any) -> dict[str, float]:
    """The numbers of a metric that returns a result."""
    module = SimpleNamespace(features={}, compute=lambda **inputs: result)
    metric = EvaluateMetric(MetricSpec.parse("./any"), module)
    return metric.compute(examples("numbers", None)[0])


class BrokenNumber(float):
    def __float__(self) -> float:
        raise RuntimeError("no number today")


def test_numbers_of_every_kind_are_taken() -> None:
    result = {
        "numpy": np.float32(0.5),
        "array": np.array([0.5]),
        "tensor": torch.tensor(0.5, requires_grad=True),
        "decimal": Decimal("0.5"),
        "fraction": Fraction(1, 2),
        "several": np.array([0.5, 0.5]),
        "flag": True,
        "text": "0.5",
        "nested": {"f1": 0.5},
        5: 0.5,
    }
    numbers = ("numpy", "array", "tensor", "decimal", "fraction", "5")
    assert returned(result) == dict.fromkeys(numbers, 0.5)
    with pytest.raises(MetricError, match="failed: RuntimeError\\('no number today'"):
        returned({"a": BrokenNumber(0.5)})
    with pytest.raises(MetricError, match="returns 10,000 numbers") as error:
        returned({f"v{number}": 0.5 for number in range(10_000)})
    assert "--metric ./any:value=v0" in str(error.value.hint)
    with pytest.raises(MetricError) as error:
        returned({"x" * 1000 + str(number): [] for number in range(10_000)})
    assert len(error.value.message) < 500


def test_names_in_results_can_be_shown_and_are_distinct() -> None:
    """A metric may call its numbers anything."""
    values = ["my", "a b", "a/b", "a\nb", "\ud800", "", "s" * 5000]
    names = MetricSpec.parse("./my").value_names(values)
    assert names["my"] == "my"
    assert names["a b"] == "my_a-b"
    assert len(set(names.values())) == len(values)
    for name in names.values():
        assert re.fullmatch(r"[\w.-]{1,80}", name, re.ASCII)


def test_numbers_that_are_not_finite_are_no_values() -> None:
    """Records have no infinite numbers, and the highest of them would stay the best for ever."""
    result = {"a": float("-inf"), "b": np.float32("inf"), "c": 10**400, "d": 0.5}
    module = SimpleNamespace(features={}, compute=lambda **inputs: result)
    metric = EvaluateMetric(MetricSpec.parse("any"), module)
    values = metric.compute(examples("numbers", None)[0])
    assert values.pop("d") == 0.5
    assert len(values) == 3
    assert np.isnan(list(values.values())).all()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("{scripts}/f1:averag=macro", "has no argument averag", "it has average, pos_label"),
        ("{scripts}", "the folder has several scripts|no script in it", "FILE.py"),
        ("./nowhere", "no such folder", "FILE.py"),
        ("precision", "is not in the cache", "slurmft fetch --metric precision"),
        ("loss:average=micro", "is not in the cache",
         "--metric loss; or, for that of evaluate: slurmft fetch"),
        ("{scripts}/both", "several numbers, none of which is known to decide: left, right",
         "both.py:value=left"),
    ],
)  # fmt: skip
@pytest.mark.processes
def test_submission_tells(
    text: str,
    message: str,
    hint: str,
    scripts: Path,
    home: Path,
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    flags = {
        "task": "emotion",
        "data": str(tiny_data),
        "model": str(tiny_model),
        "metric": (text.format(scripts=scripts),),
    }
    with pytest.raises(UsageError, match=message) as error:
        configure(flags)
    assert hint in str(error.value.hint)


def test_package_that_is_absent(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match="--metric 'f1' is none of the task, and the package evaluate"
    ) as error:
        sources.check_packages(TrainConfig.resolve(metric=("f1",)))
    assert str(error.value.hint).startswith("the task has accuracy, loss; for others: ")
    assert str(error.value.hint).endswith("pip install evaluate")


@pytest.mark.parametrize(
    "task", [name for name, facts in TASKS.items() if not facts.predictions]
)
def test_task_without_predictions(task: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be used with --task {task}"):
        TrainConfig.resolve(task=task, data="d/e", metric=("f1",))


def test_script_that_others_can_write_is_not_executed(
    home: Path, tmp_path: Path
) -> None:
    """Nor compiled code, and modules of C, which Python prefers to it."""
    script = cache_script(home, "accuracy")
    spec = MetricSpec.parse("accuracy")
    assert EvaluateMetric.load(spec).spec.name == "accuracy"
    module = f"evaluate_modules.metrics.evaluate-metric--accuracy.{'a' * 64}.accuracy"
    check_trusted(home / "modules", module)
    library = script.with_suffix(importlib.machinery.EXTENSION_SUFFIXES[0])
    library.touch()
    compiled = Path(importlib.util.cache_from_source(str(script)))
    compiled_package = importlib.util.cache_from_source(str(script.parents[1]))
    package = Path(compiled_package).parent / "__init__.cpython-311.pyc"
    for path in (compiled, package):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    paths = [script, *script.parents][: len(script.relative_to(home).parts)]
    for path in (*paths, library, compiled, compiled.parent, package, package.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        with pytest.raises(UsageError, match="others can write") as error:
            check_trusted(home / "modules", module)
        path.chmod(mode)
        assert "HF_MODULES_CACHE" in str(error.value.hint)
    check_trusted(home / "modules", module)
    (script.parent / "more").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is a link"):
        check_trusted(home / "modules", module)
    (script.parent / "more").unlink()
    # Not code, and of a mode that the umask of a group gives it.
    lock = script.parents[1].with_suffix(".lock")
    lock.touch()
    lock.chmod(0o664)
    check_trusted(home / "modules", module)
    library.unlink()


def test_cache_is_nobody_elses_to_write_whatever_the_umask(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python compiles as it imports the script lies there, too."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    folder = write_script(tmp_path, "within_one")
    with open(folder / "within_one.py", "a") as script:
        script.write(f"# of {tmp_path}\n")  # a script of its own to evaluate
    spec = MetricSpec.parse(str(folder))
    before = os.umask(0o002)
    try:
        for _ in range(2):
            assert EvaluateMetric.load(spec).spec == spec
        assert current_umask() == 0o002
    finally:
        os.umask(before)
    place = home / "modules" / "evaluate_modules" / "metrics" / "within_one"
    assert list(place.rglob("__pycache__"))


def examined(metric: str) -> list[str]:
    """The numbers that a metric of classes returns in its trial at submission."""
    facts = {"task": "sst2", "kind": "classes", "classes": ["a", "b"]}
    request = {"call": "examine", "seed": None, "computes": True} | facts
    numbers = login_metrics._examined(json.dumps(request), (metric,), ())
    return numbers[metric]


@pytest.mark.processes
def test_two_metrics_with_a_number_of_one_name_are_refused(
    scripts: Path, home: Path, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """Results had one of the two, and it may have decided."""
    script = tmp_path / "both_left.py"
    script.write_text((scripts / "bare" / "bare.py").read_text())
    flags = {"task": "emotion", "data": str(tiny_data), "model": str(tiny_model)}
    metrics = (f"{scripts}/both:value=left", str(script))
    with pytest.raises(UsageError, match="that results call 'both_left'"):
        configure(flags | {"metric": metrics})


@pytest.mark.processes
def test_login_node_and_jobs_lock_the_caches_alike(
    home: Path,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two kinds of locks neither sees the other: fetch and trial had none of the site's."""
    site = tmp_path / "site.toml"
    site.write_text('file_locks = "soft"\n')
    monkeypatch.setenv("SLURMFT_SITE", str(site))
    file = write_script(tmp_path, "bare") / "bare.py"
    body = file.read_text().replace(
        "return 0.5", "from slurmft import locks; raise ValueError(locks.installed())"
    )
    file.write_text(body)
    with pytest.raises(MetricError) as error:
        examined(str(file))
    assert error.value.message.endswith("failed: ValueError('soft')")
    # A flag takes precedence, as in the job.
    started: list[dict[str, str]] = []

    class StartedError(Exception):
        """The process would start now."""

    def start(command: Any, env: dict[str, str], **options: Any) -> None:
        started.append(env)
        raise StartedError

    flags = {"task": "emotion", "metric": (str(file),), "file_locks": "lockf"}
    flags |= {"data": str(tiny_data), "model": str(tiny_model)}
    with monkeypatch.context() as patch:
        patch.setattr(process, "start", start)
        with pytest.raises(StartedError):
            configure(flags)
    assert started[0][locks.VARIABLE] == "lockf"
    environments: list[dict[str, str]] = []

    def run(command: Any, env: dict[str, str], **options: Any) -> SimpleNamespace:
        environments.append(env)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("slurmft.train.commands.fetch.subprocess.run", run)
    fetch.load(TrainConfig.resolve(task="emotion"), offline=False)
    (environment,) = environments
    assert environment[locks.VARIABLE] == "soft"
    assert "shim" in environment["PYTHONPATH"]


@pytest.mark.processes
def test_trial_does_not_import_from_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many projects have an evaluate.py; and others may write into the folder."""
    (tmp_path / "json.py").write_text("raise SystemExit('of the project')")
    script = write_script(tmp_path / "metrics", "bare")
    monkeypatch.chdir(tmp_path)
    assert login_metrics.fetch([str(script)], offline=True) == [
        f"{script}: predictions: int32, references: int32"
    ]


# --- runs -----------------------------------------------------------------------------------------


def named_metrics(
    folder: Path, model: Path, metrics: tuple[str, ...], said: list[str]
) -> tuple[NamedMetrics, Any]:
    """The metrics of a run on one rank, and its data; `said`: its warnings."""
    task = task_of("sst2", glue(folder, "sst2"), model, metric=metrics)
    world = SimpleNamespace(on_main=lambda work: work(), device=torch.device("cpu"))
    of_job = SimpleNamespace(job=SimpleNamespace(hang_timeout_s=600))
    job = SimpleNamespace(alive=lambda phase: None, warn=said.append, config=of_job)
    data = task.prepare()
    setup: Any = SimpleNamespace(
        task=task, data=data, config=task.config, world=world, job=job
    )
    return NamedMetrics(setup), data


def has_ended(pid: int) -> bool:
    """Whether a process has ended; whoever has adopted it may not have noticed."""
    stat = process.stat(pid)
    return stat is None or stat[0] == "Z"


@pytest.mark.processes
def test_a_script_reaches_its_own_process_alone(
    scripts: Path,
    home: Path,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had run in the main rank: the run was lost with the process that a script ended, and what
    a script closed, set or drew was so for the training. What fails has no value, and is told."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SLURMFT_STORE_SECRET", "x")
    names = ("exits", "interrupts", "changes", "draws", "accuracy")
    metrics = tuple(str(scripts / name) for name in names)
    said: list[str] = []
    before = rng_state(torch.device("cpu"))
    computed, data = named_metrics(tmp_path / "data", tiny_model, metrics, said)
    values = computed.compute(data.validation.labels, data)
    assert rng_state(torch.device("cpu")) == before
    assert np.isnan(
        [values.pop(name) for name in ("exits", "interrupts", "draws")]
    ).all()
    assert values.pop("evaluate_accuracy") == 1.0
    assert values.pop("changes_variables_of_ranks") == 0
    left_running = int(values.pop("changes_child"))
    assert not values
    assert "has ended its process (exit code 3)" in said[0]
    assert "failed: KeyboardInterrupt()" in said[1]
    assert "gives no finite number for draws" in said[2]
    assert not computed.deciding.has_value(values)
    assert not has_ended(left_running)
    computed.end()
    until(lambda: has_ended(left_running))


@pytest.mark.processes
def test_a_metric_that_does_not_return_has_no_value(
    tmp_path: Path, scripts: Path, home: Path
) -> None:
    """What it has sent before is left out, and the next metric has a process again."""
    request = {"call": "compute", "seed": 1, "predictions": [1], "references": [1]}
    with MetricProcess(dict(os.environ)) as metric_process:
        sleeps = {"metric": str(scripts / "sleeps")}
        with pytest.raises(MetricError, match="took more than 1 s") as slow:
            metric_process.ask(request | sleeps, Numbers, timeout_s=1)
        assert "when this machine has less to do" in str(slow.value.hint)
        bare = {"metric": str(scripts / "bare")}
        answer = metric_process.ask(request | bare, Numbers, timeout_s=None)
        assert answer.numbers == {"bare": 0.5}
        # Own tasks may give arrays.
        arrays = {"predictions": np.array([1]), "references": torch.tensor([1])}
        accuracy = {"metric": str(scripts / "accuracy")}
        answer = metric_process.ask(
            request | accuracy | arrays, Numbers, timeout_s=None
        )
        assert answer.numbers == {"accuracy": 1.0}


@pytest.mark.processes
def test_what_a_script_prints_at_submission_fills_no_disk() -> None:
    with MetricProcess(dict(os.environ)) as metric_process:
        metric_process._start()
        child = metric_process._child
        assert child is not None
        assert os.readlink(f"/proc/{child.pid}/fd/2").startswith("pipe:")
        metric_process.end(at_once=True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo garbage >&", "no answer of a metric: JSONDecodeError"),
        ("echo '[1]' >&", "no answer of a metric: "),
        ('echo \'{"numbers": {"a": "b"}}\' >&', "'b' is no number"),
        ("echo '{\"message\": 1}' >&", "no answer of a metric: "),
        ("printf '[%.0s' {1..5000} >&$fd; echo >&", "deep"),
        ("cat /dev/zero >&", "no answer of a metric: more than 8.0 MiB"),
        ("kill -40 $$ #", "has ended its process (signal 40)"),
        ("{ head -c 9000000 /dev/zero | tr '\\0' x; exit 3; } >&2 #", "xxx"),
    ],
)
def test_what_is_no_answer_is_bounded_and_has_words(
    answer: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(module: str, descriptor: str, **_: Any) -> list[str]:
        return ["bash", "-c", f"fd={descriptor}; read -r -u $fd; {answer}$fd"]

    monkeypatch.setattr(interpreter, "module", script)
    request = {"call": "compute", "metric": "m"}
    with (
        MetricProcess(dict(os.environ)) as metric_process,
        pytest.raises(MetricError, match=re.escape(words)) as caught,
    ):
        metric_process.ask(request, Numbers, timeout_s=None)
    assert "--metric 'm' has" in caught.value.message
    assert len(caught.value.message) < 500


def test_nan_of_the_model_is_told_before_metrics_see_it(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would get classes and tokens that there are not."""
    task = task_of("sst2", glue(tmp_path / "data", "sst2"), tiny_model)
    data = task.prepare()
    world = SimpleNamespace(
        on_main=lambda work: work(), is_main=True, sum=lambda numbers: numbers
    )
    setup: Any = SimpleNamespace(task=task, world=world, eval_batch_size=8)
    clock = PhaseClock(torch.device("cpu"))
    metrics: Any = SimpleNamespace(compute=None)  # raises TypeError
    head: Any = None
    evaluator = Evaluator(setup, head, head, clock, named_metrics=metrics)
    predictions = np.full(len(data.validation), NAN)
    monkeypatch.setattr(evaluator, "predictions", lambda *_: predictions)
    with pytest.raises(SlurmftError, match="logits are NaN"):
        evaluator.measure(data, lambda: None)


@pytest.mark.processes
def test_run(
    scripts: Path, home: Path, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """The first metric decides, the lowest value is the best; it fails once, which does not stop
    the run early. The main rank alone executes it."""
    cache_script(home, "f1")
    metrics = (
        *("--metric", f"{scripts}/distance:better=lower"),
        *("--metric", "f1:average=macro", "--metric", str(scripts / "accuracy")),
    )
    done = train(
        tmp_path,
        *("--task", "text-classification", "--text-column", "text", "--label-column", "label"),
        *("--data", str(tiny_data), "--model", str(tiny_model), "--nodes", "2", *EXACT, *metrics),
        *("--epochs", "4", "--batch-size", "16", "--early-stopping", "1"),
        imported=False,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "the best checkpoint is the one with the lowest distance" in done.out
    evaluations = [record["metrics"] for record in records(done.run, "epoch")]
    assert [each["distance"] for each in evaluations] == [2.0, None, 4.0]
    for each in evaluations:
        assert each["evaluate_f1_macro"] == each["f1_macro"]
        assert each["evaluate_accuracy"] == each["accuracy"]
    (warning,) = [
        each["text"]
        for each in records(done.run, "warning")
        if "distance" in each["text"]
    ]
    assert "no luck" in warning
    assert done.result["metrics"] == evaluations[0]  # the best
    assert done.result["primary_metric"] == "distance"
    assert done.result["best_by"] == "lowest distance"
    logs = done.run.path / "logs"
    assert "distance of 67" in (logs / "rank-000.log").read_text()
    assert "distance of" not in (logs / "rank-001.log").read_text()
    inputs = json.loads(done.run.config.read_text())["program"]["inputs"]
    assert inputs[str(scripts / "distance" / "distance.py")]["what"] == "metric"


@pytest.fixture
def hub(scripts: Path, tmp_path: Path) -> Iterator[str]:
    """A hub that has the script of one metric, in the place where evaluate looks for it."""
    import evaluate

    version = evaluate.__version__
    folder = (
        tmp_path
        / "hub"
        / "spaces"
        / "evaluate-metric"
        / "f1"
        / "resolve"
        / f"v{version}"
    )
    folder.mkdir(parents=True)
    (folder / "f1.py").write_bytes((scripts / "f1" / "f1.py").read_bytes())

    class Handler(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("ETag", '"1"')
            super().end_headers()

        def log_message(self, format: str, *values: object) -> None:
            pass

    handler = partial(Handler, directory=str(tmp_path / "hub"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_fetch_tells_a_hub_that_does_not_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """evaluate says of it that it has no such metric, and the cure is not to fetch."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UsageError, match="cannot be fetched without the hub") as error:
        fetch.fetch_metrics(["precision"])
    assert "slurmft fetch" not in str(error.value)


@pytest.mark.extra("caches")
@pytest.mark.processes
def test_fetch(
    hub: str,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it downloads is enough for a job without internet; a name that is none is told."""
    home = tmp_path / "hf"
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    absent = slurmft("fetch", "--metric", "nonsense", env={"HF_ENDPOINT": hub})
    assert_two_lines(absent, "--metric 'nonsense' is not in the cache")
    done = slurmft("fetch", "--metric", "f1", env={"HF_ENDPOINT": hub})
    assert done.code == 0, done.err
    assert "f1: predictions: int32, references: int32" in done.out
    assert metric_spec.is_cached(MetricSpec.parse("f1"), home / "modules")
    flags = {"task": "emotion", "data": str(tiny_data), "model": str(tiny_model)}
    configure(flags | {"metric": ("f1:average=macro",)})
    with pytest.raises(UsageError, match="Target is multiclass"):
        configure(flags | {"metric": ("f1",)})


# --- metrics of the task itself -------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TASKS))
def test_each_metric_of_a_task_may_decide(name: str) -> None:
    """By its name alone, without evaluate; other names are answered with those that it has."""
    for preset in recipes.presets(name):
        names = own_task.metrics(name, preset)
        for metric in (*names, f"{names[0]}:better=lower", "loss"):
            config = TrainConfig.resolve(
                task=name, preset=preset, data="d/e", metric=(metric,)
            )
            assert config.named_metrics == ()
            # Without the defaults of options that other tasks do not read.
            others: dict[str, Any] = dict.fromkeys(TASKS[name].reads)
            sources.check_packages(replace(config, task="emotion", **others))
    config = TrainConfig.resolve(
        task="emotion", metric=(f"evaluate-metric/{names[0]}",)
    )
    assert len(config.named_metrics) == 1


def test_an_unknown_metric_is_answered_with_those_of_the_task(home: Path) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig.resolve(task="embeddings", data="d/e", metric=("mrr_at_5",))
    assert "accuracy_at_1, mrr_at_10, loss" in str(error.value.hint)
    config = TrainConfig.resolve(
        task="text-classification", data="d/e", metric=("f1_makro",)
    )
    with pytest.raises(UsageError, match="is not in the cache") as error:
        login_metrics.check(config)
    assert "accuracy, f1_macro, loss" in str(error.value.hint)


def deciding_of(task: Any, data: Any = None) -> Any:
    setup: Any = SimpleNamespace(task=task, data=data, config=task.config)
    return NamedMetrics(setup)


@pytest.mark.parametrize(
    ("task_name", "metric", "words"),
    [
        ("text-classification", "f1_macro", "highest f1_macro"),
        ("text-regression", "rmse", "lowest rmse"),
        ("text-regression", "rmse:better=higher", "highest rmse"),
        ("causal-lm", "perplexity", "lowest perplexity"),
        ("causal-lm", "token_accuracy", "highest token_accuracy"),
        ("mnli", "accuracy_mismatched", "highest accuracy_mismatched"),
        ("embeddings", "mrr_at_10", "highest mrr_at_10"),
        ("seq2seq", "rouge2", "highest rouge2"),
        ("squad", "squad_exact_match", "highest squad_exact_match"),
        ("reranker", "loss", "lowest loss"),
    ],
)
def test_a_metric_of_the_task_decides(task_name: str, metric: str, words: str) -> None:
    """And is the first of the results, whichever of its values are good."""
    task = tasks.get(TrainConfig.resolve(task=task_name, data="d/e", metric=(metric,)))
    named_metrics = deciding_of(task)
    assert named_metrics.best_by == words
    values = dict.fromkeys((*task.metric_names, "loss"), 0.5)
    assert next(iter(named_metrics.in_order(values))) == words.split()[1]


def test_a_metric_that_the_data_does_not_have_is_refused() -> None:
    """Before any training: with graded labels a reranker has no average precision."""
    config = TrainConfig.resolve(
        task="reranker", data="d/e", metric=("average_precision",)
    )
    with pytest.raises(UsageError, match="with this data --task reranker") as error:
        deciding_of(tasks.get(config))
    assert error.value.hint == "it has spearman, pearson, loss"
