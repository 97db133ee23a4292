"""Metrics of the package `evaluate`, as --metric names them: `f1:average=macro`, `glue:mrpc`.

A name of the hub or the path of a script, then after a colon, with commas between them: the name of
a configuration, and arguments of the metric. Two arguments are read here, and not by the metric:
`value=NAME` takes one of the numbers that it returns, and `better=lower` or `better=higher` says
which values are good.
"""

import ast
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.core import trusted
from slurmft.core.errors import UsageError
from slurmft.core.filesystem import absolute
from slurmft.core.hub import is_hub_id, is_local

LOSS = "loss"
"""Value of --metric, and the name in results, for the loss of the samples that are evaluated: no
metric of `evaluate` is called so."""
LOWER_IS_BETTER = frozenset(
    (
        "brier_score",
        "cer",
        "character",
        "charcut_mt",
        "mae",
        "mape",
        "mase",
        "mean_perplexity",
        "mse",
        "perplexity",
        "rmse",
        "smape",
        "ter",
        "wer",
    )
)
"""Metrics of `evaluate` that measure errors. The rule in full is `MetricSpec.is_lower_better`."""
_DECIDING = ("f1", "overall_f1", "rougeL", "score", "pearson")
"""Of several numbers, the one that decides, in this order; see `MetricSpec.deciding`."""
_WORDS = {"true": True, "false": False, "none": None, "null": None}
"""Values of arguments that are no texts, in lower case."""
_VALUE_CHARACTERS = 60
"""The name of a number that is longer is cut in results: a metric may name one by a sentence."""
_FORM = "give NAME, NAME:CONFIGURATION or NAME:ARGUMENT=VALUE,ARGUMENT=VALUE"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One value of --metric."""

    text: str
    """All of it."""
    name: str
    """Name on the hub, or path of a script or of its folder."""
    configuration: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the metric."""
    value: str | None = None
    """The number to take of those that it returns; None: all."""
    better: str | None = None
    """lower or higher; None: as `LOWER_IS_BETTER` says."""

    @classmethod
    def parse(cls, text: str) -> "MetricSpec":
        """Reads one value of --metric.

        Raises:
            UsageError: it does not have the form.
        """
        name, rest = _split(text)
        configuration = None
        arguments: dict[str, Any] = {}
        if rest is not None:
            for part in _parts(rest):
                argument, equals, value = part.partition("=")
                # An argument that is there twice is a mistake: one of the two would be lost without
                # a word.
                is_new = argument.isidentifier() and argument not in arguments
                if equals and is_new:
                    arguments[argument] = value
                elif part and not equals and configuration is None:
                    configuration = part
                else:
                    raise UsageError(f"--metric {text!r}: {part!r} is unclear", _FORM)
        if not name:
            raise UsageError(f"--metric {text!r} names no metric", _FORM)
        value_name = arguments.pop("value", None)
        better = arguments.pop("better", None)
        if better not in (None, "lower", "higher"):
            problem = f"--metric {text!r}: better={better} is neither lower nor higher"
            raise UsageError(problem, "give better=lower or better=higher")
        # After `value` and `better` are taken out, which are names whatever they look like.
        values = {key: _value_of(value) for key, value in arguments.items()}
        return cls(text, name, configuration, values, value_name, better)

    @property
    def is_local(self) -> bool:
        """True for a script of the user's own."""
        return is_local(self.name)

    @property
    def short_name(self) -> str:
        """Name of the metric without owner, folder and arguments."""
        return self.name.rpartition("/")[2].removesuffix(".py")

    @property
    def label(self) -> str:
        """Name of the metric in results: f1_macro for f1:average=macro."""
        parts = [self.short_name]
        if self.configuration is not None:
            parts.append(self.configuration)
        for argument, value in self.arguments.items():
            # A text says by itself what it is, a number does not.
            if not isinstance(value, str):
                parts.append(argument)
            parts.append(str(value))
        return _name("_".join(parts))

    def value_names(self, values: Sequence[str]) -> dict[str, str]:
        """Returns the names in results of the numbers that the metric returns: the label, with the
        name of the number where that is another one. No two are equal."""
        names: dict[str, str] = {}
        for value in values:
            is_all = len(values) == 1 and self.value is None
            name = f"{self.label}_{_name(value)[:_VALUE_CHARACTERS]}"
            if is_all or value == self.short_name:
                name = self.label
            # What tells two numbers apart may be left out of names.
            while name in names.values():
                name += "_"
            names[value] = name
        return names

    def deciding(self, values: Sequence[str]) -> str:
        """Returns which of the numbers of the first metric decides about the best checkpoint.

        That is the only one, the one with the metric's own name, or the first of f1, overall_f1,
        rougeL, score and pearson that is among them.

        Raises:
            UsageError: none of them is.
        """
        if len(values) == 1:
            return values[0]
        for name in (self.short_name, *_DECIDING):
            if name in values:
                return name
        raise UsageError(
            f"--metric {self.text!r} returns several numbers, none of which is known to decide: "
            f"{', '.join(values)}",
            f"name it: --metric {self.with_value(values[0])}",
        )

    def is_lower_better(self, value: str) -> bool:
        """Returns whether the lowest value of a number of the metric is the best.

        It is where better=lower says so. Without better=, it is where the metric or the number is
        one of `LOWER_IS_BETTER`.
        """
        if self.better is not None:
            return self.better == "lower"
        return bool({self.short_name, value} & LOWER_IS_BETTER)

    def with_value(self, value: str) -> str:
        """Returns the text of --metric that takes one number of several."""
        separator = ":"
        if _split(self.text)[1] is not None:
            separator = ","
        return f"{self.text}{separator}value={value}"


def _name(text: str) -> str:
    """Returns a text as names in results have it: in tables, files and trackers."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII)


def _split(text: str) -> tuple[str, str | None]:
    """Returns the name of a metric, and what follows the colon behind it; None: there is none."""
    # The path of a script may have a colon itself: the longest part that exists is the path.
    colons = [match.start() for match in re.finditer(":", text)]
    for end in [len(text), *reversed(colons)]:
        name = text[:end]
        is_path = os.sep in name and os.path.exists(os.path.expanduser(name))
        if is_path:
            rest = None
            if end < len(text):
                rest = text[end + 1 :]
            return name, rest
    name, colon, after = text.partition(":")
    if not colon:
        return name, None
    return name, after


def _parts(text: str) -> list[str]:
    """Splits a text at its commas; one within brackets is part of a value: labels=[0,1]."""
    parts = [""]
    depth = 0
    for character in text:
        # Below 0 after a closing bracket too many, which closes nothing.
        if character == "," and depth <= 0:
            parts.append("")
            continue
        if character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        parts[-1] += character
    return parts


def _value_of(text: str) -> Any:
    """Returns the value of an argument: a number, a list, true, false or none; else a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        # Literals alone: nothing of a text is executed.
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


def parsed(texts: Sequence[str]) -> list[MetricSpec]:
    """Returns the metrics that --metric names.

    Raises:
        UsageError: one of them does not have the form, or two have one name in results.
    """
    specs: dict[str, MetricSpec] = {}
    for text in texts:
        spec = MetricSpec.parse(text)
        # Of one metric, two numbers may be wanted: each is a value of --metric.
        label = f"{spec.label}_{spec.value}"
        if label in specs:
            raise UsageError(
                f"--metric {text!r} and --metric {specs[label].text!r} have one name in results",
                "leave one of them out",
            )
        specs[label] = spec
    return list(specs.values())


def check_distinct(names: Mapping[str, Iterable[str]]) -> None:
    """Raises UsageError where two metrics have a number of one name: results would lose one.

    Args:
        names: value of --metric -> names of its numbers in results.
    """
    metric_of: dict[str, str] = {}
    for text, names_of_metric in names.items():
        for name in names_of_metric:
            if name in metric_of:
                raise UsageError(
                    f"--metric {text!r} and --metric {metric_of[name]!r} both have a number that "
                    f"results call {name!r}",
                    "leave one of them out, or give its script another name",
                )
            metric_of[name] = text


def own_metric(text: str, names: Sequence[str]) -> MetricSpec | None:
    """Returns a value of --metric that names a metric of the task itself: its name, maybe with
    better=; None where it names one of `evaluate`.

    Args:
        names: those of the task's metrics.
    """
    if text.partition(":")[0] not in names:
        return None
    spec = MetricSpec.parse(text)
    # With arguments it is the metric of `evaluate` that has this name: the task's own takes none.
    if spec.configuration or spec.arguments or spec.value:
        return None
    return spec


def script(spec: MetricSpec) -> Path:
    """Returns the script of a metric of the user's own.

    In a folder it is FOLDER/FOLDER.py, as evaluate finds it; or else the only script of the folder.

    Raises:
        UsageError: there is none.
    """
    path = absolute(spec.name)
    if path.is_file() and path.suffix == ".py":
        return path
    named = path / f"{path.name}.py"
    if named.is_file():
        return named
    scripts = list(path.glob("*.py"))
    if len(scripts) == 1:
        return scripts[0]
    problem = f"--metric {spec.text!r}: no such folder, or no script in it"
    if scripts:
        problem = f"--metric {spec.text!r}: the folder has several scripts, none is {named.name}"
    raise UsageError(
        problem, "give the path of the script, FILE.py, or a name of the hub"
    )


def localized(text: str) -> str:
    """Returns a value of --metric with the absolute path of its script, as nodes see it.

    Raises:
        UsageError: there is no such script.
        NotOwnError: it is a name of the hub, and that of a folder of another user's.
    """
    spec = MetricSpec.parse(text)
    if not spec.is_local:
        return text
    # No metric of the hub is called FILE.py.
    if is_hub_id(spec.name) and not spec.name.endswith(".py"):
        trusted.check_meant("--metric", spec.name, "a name of the hub")
    _, rest = _split(text)
    path = str(script(spec))
    if rest is None:
        return path
    return f"{path}:{rest}"


def modules_folder() -> Path:
    """Returns the folder in which evaluate keeps the scripts of metrics, without importing it."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    modules = os.environ.get("HF_MODULES_CACHE", os.path.join(home, "modules"))
    return Path(modules).expanduser()


def is_cached(spec: MetricSpec, modules: Path) -> bool:
    """Returns whether the script of a metric of the hub is in a cache."""
    names = [spec.name.replace("/", "--")]
    if "/" not in spec.name:
        # Where evaluate looks for a name without an owner.
        kinds = ("metric", "comparison", "measurement")
        names = [f"evaluate-{kind}--{spec.name}" for kind in kinds]
    scripts: list[Path] = []
    for name in names:
        folder = modules / "evaluate_modules" / "metrics" / name
        # evaluate keeps each version in a folder that is named after its sha256.
        scripts += folder.glob(f"{'?' * 64}/{spec.short_name}.py")
    return bool(scripts)
