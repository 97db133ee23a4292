"""Metrics of the package `evaluate`: their scripts, what they take, the numbers that they return.

`evaluate` is imported here alone, and only where --metric names a metric: it takes seconds. Its
scripts are code: those of a cache are executed after a look at who can have written them, see
`check_trusted`.
"""

import contextlib
import importlib.machinery
import inspect
import math
import numbers
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from slurmft.core import permissions, trusted
from slurmft.core.errors import SlurmftError, UsageError, one_line
from slurmft.core.hub import NotOnHubError, is_hub_offline
from slurmft.core.text import some
from slurmft.train.metric_process import MetricError
from slurmft.train.metric_spec import MetricSpec, is_cached, script

SCRIPTS = trusted.Door(
    "the scripts of metrics in the cache of evaluate",
    "`$HF_HOME/modules/`, `$HF_MODULES_CACHE/`",
    "what `--metric` executes",
    cure="take a cache of your own",
)


_WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,8}", re.ASCII)
"""The name of a class that is a number, as metrics take them: of 32 bits."""
_OF_PROBABILITIES = ("brier_score",)
"""Metrics that take probabilities, which their features call numbers, as those of an error do."""
_LONGEST_LINE = 300
_MOST_NUMBERS = 200
"""Each is a line of tables, and in the records of each evaluation."""


@dataclass(frozen=True, slots=True)
class MetricInputs:
    """Predictions and references of samples, in a form that some metrics take."""

    predictions: list[Any]
    references: list[Any]


class AbsentMetricError(MetricError, NotOnHubError):
    """A metric that is nowhere."""


# --- what metrics take ----------------------------------------------------------------------------


def examples(kind: str, classes: Sequence[str] | None) -> list[MetricInputs]:
    """Returns a few samples in every form of a kind of predictions, to try a metric on.

    Args:
        kind: see `TaskFacts.predictions`.
        classes: names of the classes; None: they are not known, and nor is what a metric makes of
            such samples.
    """
    class_names = classes or ("0", "1")
    count = len(class_names)
    # Every class occurs, and half of the predictions are right.
    references = [*range(count), *range(count)]
    predicted = [*range(count), *range(1, count), 0]
    match kind:
        case "classes":
            return [class_inputs(predicted, references, class_names)]
        case "numbers":
            return [MetricInputs([0.5, 1.0, 2.5, 3.5], [0.5, 1.5, 2.0, 4.0])]
        case "flags":
            return [MetricInputs(_flags(predicted), _flags(references))]
        case "tags":
            names = list(classes or ("O", "B-X", "I-X"))
            return tag_inputs([predicted, references], [references, references], names)
        case "answers":
            contexts = {"answers": [["a cat"], ["two dogs"]], "starts": [[3], [0]]}
            return answer_inputs(["a cat", "dogs"], {"ids": ["1", "2"], **contexts})
        case "texts":
            texts = ["the cat sat on the mat", "a dog barks at the moon today"]
            targets = ["a cat sat on the mat", "the dog barks at the moon"]
            return text_inputs(texts, targets)
    return []


def class_inputs(
    predictions: Sequence[int],
    references: Sequence[int],
    names: Sequence[str],
) -> MetricInputs:
    """Returns classes as metrics take them: the whole numbers that they are called; else their
    numbers from 0 on, in the order of the model.

    Stars from 1 to 5, say, are these numbers: in `labels=[1,5]`, and in a squared error.
    """
    numbers: Sequence[int] = range(len(names))
    if all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        numbers = [int(name) for name in names]
    return MetricInputs(
        [numbers[each] for each in predictions], [numbers[each] for each in references]
    )


def _flags(classes: list[int]) -> list[list[int]]:
    count = max(classes) + 1
    return [[int(number == each) for number in range(count)] for each in classes]


def tag_inputs(
    predictions: Sequence[Sequence[int]],
    references: Sequence[Sequence[int]],
    names: Sequence[str],
) -> list[MetricInputs]:
    """Returns the labels of words in two forms: their names, in a list for each text, as seqeval
    takes them; and as classes, in one list, as accuracy does."""

    def named(texts: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[names[number] for number in text] for text in texts]

    def joined(texts: Sequence[Sequence[int]]) -> list[int]:
        return [number for text in texts for number in text]

    return [
        MetricInputs(named(predictions), named(references)),
        class_inputs(joined(predictions), joined(references), names),
    ]


def answer_inputs(
    answers: Sequence[str], texts: Mapping[str, Any]
) -> list[MetricInputs]:
    """Returns the answers to questions in two forms: as the metrics squad and squad_v2 take them.

    Args:
        texts: see `squad.texts_of`.
    """
    with_none = []
    predictions = []
    references = []
    ids = texts["ids"]
    # Metrics find answers by them: questions that share one would have the answer of the last.
    if len(set(ids)) < len(ids):
        ids = [str(place) for place in range(len(ids))]
    columns = zip(answers, ids, texts["answers"], texts["starts"], strict=True)
    for answer, number, gold, starts in columns:
        prediction = {"id": number, "prediction_text": answer}
        predictions.append(prediction)
        # As transformers' run_qa.py: the answer is empty where there is none.
        with_none.append(prediction | {"no_answer_probability": 0.0})
        gold_answers = {"text": gold, "answer_start": starts}
        references.append({"id": number, "answers": gold_answers})
    return [
        MetricInputs(predictions, references),
        MetricInputs(with_none, references),
    ]


def text_inputs(texts: list[str], targets: list[str]) -> list[MetricInputs]:
    """Returns texts and their targets in two forms: as rouge takes them, and as sacrebleu does."""
    return [
        MetricInputs(texts, targets),
        MetricInputs(texts, [[target] for target in targets]),
    ]


def fits(feature: Any, value: Any) -> bool:
    """Returns whether a value is what a feature of a metric takes, without a conversion.

    `evaluate` converts: a class would become a text, and the number 0.9 the class 0.
    """
    # What a list has in it: [feature], or List and Sequence of datasets.
    element = getattr(feature, "feature", None)
    if isinstance(feature, list | tuple):
        element = feature[0]
    # The values of a list of dictionaries are a dictionary of lists.
    if isinstance(element, dict):
        feature = {name: [part] for name, part in element.items()}
    if isinstance(feature, dict):
        if not isinstance(value, dict) or feature.keys() != value.keys():
            return False
        return all(fits(part, value[name]) for name, part in feature.items())
    if element is not None:
        return isinstance(value, list) and all(fits(element, each) for each in value)
    dtype = str(getattr(feature, "dtype", ""))
    match value:
        case str():
            return "string" in dtype
        # A whole number will do for a float; a float is no class.
        case int():
            return dtype.startswith(("int", "uint", "float"))
        case float():
            return dtype.startswith("float")
    return False


# --- a metric -------------------------------------------------------------------------------------


class EvaluateMetric:
    """A metric of `evaluate`, loaded."""

    def __init__(self, spec: MetricSpec, module: Any) -> None:
        self.spec = spec
        self._module = module
        features = module.features
        self._features = features if isinstance(features, list) else [features]

    @classmethod
    def load(
        cls,
        spec: MetricSpec,
        seed: int | None = None,
        refresh: bool = False,
    ) -> "EvaluateMetric":
        """Loads a metric: of the cache if it is there, else of the hub.

        Args:
            seed: of what the metric draws.
            refresh: ask the hub all the same.

        Raises:
            MetricError: it is nowhere, or its script does not run.
        """
        what = f"--metric {spec.text!r}"
        try:
            module = _load(spec, seed, refresh)
        except SlurmftError:
            raise
        # Whatever a script raises: to end the process, say.
        except BaseException as error:
            why = reason(error)
            if not spec.is_local and _is_absent(error):
                raise AbsentMetricError(
                    f"{what} is not in the cache, and was not found on the hub: {why}",
                    f"on the login node: slurmft fetch --metric {spec.name}; or give the folder "
                    "of its script",
                ) from error
            if isinstance(error, ImportError) and _imports_several(spec):
                raise MetricError(
                    f"{what} cannot be loaded: evaluate takes 'import a, b' for one package",
                    "write one import a line in its script",
                ) from error
            cure = "install what it imports, correct its script, or leave it out"
            raise MetricError(
                f"{what} cannot be loaded: {why}",
                _cure(error, cure),
            ) from error
        metric = cls(spec, module)
        metric._check_arguments()
        return metric

    def _check_arguments(self) -> None:
        """Raises MetricError for an argument that the metric does not have."""
        parameters = inspect.signature(self._module._compute).parameters.values()
        # It passes on whatever it gets: which arguments are right, a call alone tells.
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return
        names = {each.name for each in parameters} - self._feature_names()
        unknown = sorted(self.spec.arguments.keys() - names)
        if unknown:
            known = ", ".join(sorted(names)) or "none"
            raise MetricError(
                f"--metric {self.spec.text!r}: {self.spec.name} has no argument "
                f"{', '.join(unknown)}",
                f"it has {known}",
            )

    def _feature_names(self) -> set[str]:
        return {name for features in self._features for name in features}

    def describe(self) -> str:
        """Returns what it takes, in words."""
        return _described(self._features[0])

    def form(self, forms: Sequence[MetricInputs], task: str) -> int:
        """Returns the number of the first form of predictions that the metric takes.

        Raises:
            MetricError: it takes none.
        """
        is_of_classes = any(isinstance(form.predictions[0], int) for form in forms)
        if is_of_classes and self.spec.short_name in _OF_PROBABILITIES:
            raise MetricError(
                f"--metric {self.spec.text!r} takes probabilities, and --task {task} predicts "
                "classes",
                "choose another metric",
            )
        for number, form in enumerate(forms):
            example = {
                "predictions": form.predictions[0],
                "references": form.references[0],
            }
            if any(fits(dict(features), example) for features in self._features):
                return number
        raise MetricError(
            f"--metric {self.spec.text!r} does not take the predictions of --task {task}: it takes "
            f"{self.describe()}",
            self._other_form(),
        )

    def _other_form(self) -> str:
        """Returns the advice for a metric that takes something else."""
        if self.spec.configuration is None and not self.spec.is_local:
            return (
                "some metrics have a configuration for it, as f1:multilabel,average=macro; else "
                "choose another metric"
            )
        return "choose another metric or configuration"

    def compute(self, inputs: MetricInputs) -> dict[str, float]:
        """Returns the numbers of the metric, or the one that `value=` takes.

        Raises:
            MetricError: the metric raises an error, or returns no number.
        """
        what = f"--metric {self.spec.text!r}"
        try:
            result = self._module.compute(
                predictions=inputs.predictions,
                references=inputs.references,
                **self.spec.arguments,
            )
            # Some metrics return the number itself.
            if not isinstance(result, Mapping):
                result = {self.spec.short_name: result}
            # The script's own objects, which may fail as well.
            values = dict(_numbers(result))
        # Whatever a script raises: the exceptions of time limits are not of Exception, either.
        except BaseException as error:
            problem = f"{what} failed: {reason(error)}"
            cure = _cure(error, "give its arguments, or leave it out")
            raise MetricError(problem, cure) from error
        chosen = values
        if self.spec.value is not None:
            chosen = {name: values[name] for name in values if name == self.spec.value}
        if not chosen:
            raise self._no_number(result, list(values))
        if len(chosen) > _MOST_NUMBERS:
            raise MetricError(
                f"{what} returns {len(chosen):,} numbers, and results take {_MOST_NUMBERS} of one "
                "metric",
                f"choose one of them, or some: --metric {self.spec.with_value(next(iter(chosen)))}",
            )
        return chosen

    def _no_number(self, result: Mapping[str, Any], numbers: list[str]) -> MetricError:
        """Returns the error of a result without a number, or without that of `value=`.

        Args:
            numbers: names of the numbers that it has.
        """
        sought = "no single number"
        if self.spec.value is not None:
            sought = f"no number {self.spec.value}"
        hint = "give arguments with which it returns one, as average=macro"
        if numbers:
            hint = f"its numbers are {_beginning(some(list(numbers)))}"
        returned = _shape(result)
        problem = f"--metric {self.spec.text!r} returns {sought}, but {returned}"
        return MetricError(problem, hint)


def _load(spec: MetricSpec, seed: int | None, refresh: bool) -> Any:
    import evaluate
    from evaluate import loading

    evaluate.logging.set_verbosity_error()
    evaluate.logging.disable_progress_bar()
    modules = Path(evaluate.config.HF_MODULES_CACHE)
    name = spec.name
    if spec.is_local:
        name = str(script(spec))
    was_offline = evaluate.config.HF_EVALUATE_OFFLINE
    # evaluate has a variable of its own, and would try the hub for each file of a script.
    is_offline = was_offline or is_hub_offline()
    # Code is nobody else's to write, whatever the umask of the user is: neither what evaluate
    # copies, nor what Python compiles.
    umask = permissions.current_umask()
    os.umask(umask | 0o022)
    try:
        # What was fetched counts, in every attempt of a run.
        uses_cache = is_cached(spec, modules) and not refresh
        evaluate.config.HF_EVALUATE_OFFLINE = is_offline or uses_cache
        # It copies the script into the cache, and executes nothing of it yet.
        _check_cache(modules)
        imported = loading.evaluation_module_factory(name)
        check_trusted(modules, imported.module_path)
        metric_class = loading.import_main_class(imported.module_path)
    finally:
        # It is the module's own: whatever loads next would see it.
        evaluate.config.HF_EVALUATE_OFFLINE = was_offline
        os.umask(umask)
    if metric_class is None:
        problem = (
            f"--metric {spec.text!r}: the script has no subclass of evaluate.Metric"
        )
        raise UsageError(problem, "write one, with _info() and _compute()")
    # In memory: files in a cache of several nodes would need locks.
    module = metric_class(
        config_name=spec.configuration,
        keep_in_memory=True,
        hash=imported.hash,
        seed=seed,
    )
    module.download_and_prepare()
    return module


def _check_cache(modules: Path) -> None:
    """Looks at the folders into which evaluate writes by their paths: others could have put links
    to folders of this user's there.

    Raises:
        UsageError: somebody else can write them.
    """
    scripts = modules / "evaluate_modules"
    try:
        for folder in (modules, scripts, scripts / "metrics"):
            if os.path.lexists(folder):
                with SCRIPTS.folder(folder):
                    pass
    except trusted.NotOwnError as error:
        raise _not_own(error) from error


def _not_own(error: trusted.NotOwnError) -> UsageError:
    return UsageError(
        f"the script of a metric is code: {error.message}",
        f"{error.hint}; or a cache of your own: export HF_MODULES_CACHE=DIR, slurmft fetch",
    )


def check_trusted(modules: Path, module_path: str) -> None:
    """Looks at all files that are executed when a module of evaluate's cache is imported.

    Args:
        modules: folder of the cache.

    Raises:
        UsageError: somebody else can have written them, as in a cache that a group shares.
    """
    folder = modules
    try:
        # evaluate_modules.metrics.NAME.HASH.NAME: the last is a file of HASH, whose other files it
        # may import; of the packages above it Python imports __init__ alone.
        for part in module_path.split(".")[:-1]:
            _check_code(folder)
            folder = folder / part
        _check_code(folder, with_folders=True)
    except trusted.NotOwnError as error:
        raise _not_own(error) from error


def _check_code(folder: Path, with_folders: bool = False) -> None:
    """Looks at the files of a folder from which Python imports, compiled ones among them.

    Args:
        with_folders: look at all folders below it, too.

    Raises:
        NotOwnError: somebody else can have written them; or one is a link.
    """
    with SCRIPTS.folder(folder) as descriptor:
        for path in sorted(folder.iterdir()):
            is_code = path.name.endswith(tuple(importlib.machinery.all_suffixes()))
            if path.is_symlink() and (is_code or with_folders):
                raise trusted.NotOwnError(
                    f"{str(path)!r} is a link", f"rm {shlex.quote(str(path))}"
                )
            if path.is_dir() and (with_folders or path.name == "__pycache__"):
                _check_code(path, with_folders)
            elif is_code and path.is_file():
                # Only looked at: Python opens it by its name, in a folder where nobody else can
                # write.
                os.close(SCRIPTS.open(path, descriptor))


def _cure(error: BaseException, otherwise: str) -> str:
    """Returns the advice for a script that fails; `otherwise` where its error says too little."""
    resource = _nltk_resource(error)
    if resource:
        return (
            f"on the login node: python -m nltk.downloader {resource}; the nodes find it in "
            "~/nltk_data, or in $NLTK_DATA"
        )
    # evaluate's error where a script imports from an address, and those of the hub's libraries.
    is_of_hub = isinstance(error, OSError) and "connect to 'https://huggingface" in str(
        error
    )
    if is_of_hub or isinstance(error, ConnectionError):
        return (
            "it loads something from the internet: fetch that into the caches before, or put it "
            "beside the script, which then names its file; or leave the metric out"
        )
    return otherwise


def _nltk_resource(error: BaseException) -> str:
    """Returns the name of the data that nltk lacks; "": it is another error."""
    match = re.search(r"nltk\.download\('([\w-]+)'\)", str(error))
    if match is None:
        return ""
    return match[1]


def _is_absent(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError | ConnectionError)


def _imports_several(spec: MetricSpec) -> bool:
    """Returns whether a script of the user's own has a line that imports several modules."""
    if not spec.is_local:
        return False
    text = script(spec).read_text(encoding="utf-8", errors="replace")
    return bool(re.search(r"^import [^#\n]*,", text, re.MULTILINE))


def reason(error: BaseException) -> str:
    """Returns an error of a script in one line; of long messages their beginning."""
    resource = _nltk_resource(error)
    if resource:
        return f"nltk has no {resource!r} here"
    line = " ".join(one_line(error).split())
    text = " ".join(str(error).split())
    # evaluate's own messages are whole sentences.
    if isinstance(error, FileNotFoundError | ConnectionError | ImportError) and text:
        line = text
    elif isinstance(error, OSError) and error.filename:
        line += f": {str(error.filename)!r}"
    return _beginning(line)


def _beginning(line: str) -> str:
    """Returns a line of a script's, of a long one its beginning."""
    if len(line) > _LONGEST_LINE:
        return f"{line[:_LONGEST_LINE]} ..."
    return line


def _numbers(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a result, NaN for infinite ones; not the lists and dictionaries, as of
    each class."""
    for name, value in result.items():
        number = value
        # Of numpy and torch; arrays of several values have no item.
        if hasattr(value, "item"):
            with contextlib.suppress(Exception):
                number = value.item()
        is_number = isinstance(number, numbers.Real | Decimal)
        if is_number and not isinstance(number, bool):
            yield str(name), _finite(number)


def _finite(number: numbers.Real | Decimal) -> float:
    """Returns a number as records and comparisons take it; NaN: it is infinite, or too large."""
    try:
        value = float(number)
    except OverflowError:
        return math.nan
    if math.isinf(value):
        return math.nan
    return value


def _shape(result: Mapping[str, Any]) -> str:
    """Returns what a result is, in words."""
    if not result:
        return "an empty dictionary"
    names = [f"{key} ({type(each).__name__})" for key, each in result.items()]
    return _beginning(some(names))


def _described(features: Mapping[str, Any]) -> str:
    """Returns the features of a metric in words."""
    parts = []
    for name, feature in features.items():
        dtype = getattr(feature, "dtype", None)
        if not isinstance(dtype, str) or hasattr(feature, "feature"):
            dtype = " ".join(str(feature).split())
        parts.append(f"{name}: {dtype}")
    return ", ".join(parts)
