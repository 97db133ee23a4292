"""Declarations of options: each answers every question, and rules are checked in one place."""

# No `from __future__ import annotations`: options are read from the types of their fields.

import ast
import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmft.core import options as module
from slurmft.core import plugins
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import (
    Excludes,
    Needs,
    Option,
    build,
    check_options,
    option,
    options,
    own_options,
    unread,
)
from slurmft.programs.description import OwnProgram
from tests.support import CHECKOUT

CONFIGURATIONS = (
    JobConfig,
    *plugins.load_all(plugins.JOB_OPTIONS),
    *plugins.load_all(plugins.OPTIONS),
)
"""The options of a job, and those of every program and plug-in that is installed."""
ALL = {
    name: each
    for config in CONFIGURATIONS
    for name, each in own_options(config).items()
}
"""Name -> declaration of each of them."""


_WORDS_OF_CODE = (
    "shell ",
    "image to run",
    "Python environment of",
    "class of your own",
)
"""Words in the help of options whose value is executed."""


def problems(config: type[Any]) -> Iterator[str]:
    """Questions to which options of a configuration have no answer, or none that can be right."""
    known = own_options(config)
    answers = {
        name: typing.get_args(getattr(module, name))
        for name in ("Affects", "Place", "Path", "Prediction", "Count", "Command")
    }
    for name, each in known.items():
        where = f"{config.__name__}.{name}"
        if each.affects not in answers["Affects"]:
            yield f"{where} does not say what it affects"
        if each.at not in answers["Place"]:
            yield f"{where} does not say where it acts (at)"
        if each.path not in (None, *answers["Path"]):
            yield f"{where}: path = {each.path!r}"
        if each.predicts not in answers["Prediction"]:
            yield f"{where}: predicts = {each.predicts!r}"
        if each.counts not in (None, *answers["Count"]):
            yield f"{where}: counts = {each.counts!r}"
        if not set(each.commands) <= set(answers["Command"]):
            yield f"{where}: commands = {each.commands}"
        is_number = each.value_type in (int, float)
        has_smallest = (each.least, each.above) != (None, None)
        has_largest = (each.most, each.below) != (None, None)
        if (is_number, is_number) != (has_smallest, has_largest):
            yield f"{where}: a number has bounds on both sides, and nothing else has"
        if not each.help or each.help[0].isspace() or each.help.endswith("."):
            yield f"{where}: help is one clause without a full stop"
        if each.metavar in ("DIR", "FILE", "ID|DIR") and each.path is None:
            yield f"{where} does not say which kind of path it is"
        names_code = any(word in each.help for word in _WORDS_OF_CODE)
        if names_code and not each.executes and each.default is not False:
            yield f"{where} does not say that its value is executed"
        if each.metavar and each.choices:
            yield f"{where} has choices, which its metavar hides"
        others = [rule.other for rule in each.needs] + [
            rule.other for rule in each.excludes
        ]
        for other in others:
            if other not in known:
                yield f"{where}: {other} is no option of {config.__name__}"
        for rule in each.read_with:
            if rule.other not in ALL:
                yield f"{where}: {rule.other} is no option"
        # Slurm alone reads what sbatch carries, but for what all launchers read, too.
        is_of_slurm = each.sbatch and name not in ("nodes", "time", "job_name")
        if is_of_slurm and [rule.other for rule in each.read_with] != ["cluster"]:
            yield f"{where} does not say that Slurm alone reads it"
        for need in each.needs:
            if each.predicts != "reset" and known[need.other].predicts == "reset":
                yield f"{where} must be reset in predictions, as {need.other} is, which it needs"


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_every_option_answers_every_question(config: type[Any]) -> None:
    assert own_options(config)
    assert list(problems(config)) == []


def test_an_option_without_an_answer_is_named() -> None:
    @dataclass(frozen=True)
    class Incomplete:
        wheels: int = option(4, "number of wheels", at="job", least=0, most=9)
        doors: int = option(4, "doors", affects="nothing", at="job", least=0)
        colour: str = option("red", "colour of the paint.", affects="nothing")

    assert list(problems(Incomplete)) == [
        "Incomplete.wheels does not say what it affects",
        "Incomplete.doors: a number has bounds on both sides, and nothing else has",
        "Incomplete.colour does not say where it acts (at)",
        "Incomplete.colour: help is one clause without a full stop",
    ]


def test_names_of_options_differ_between_configurations() -> None:
    """They are keys of one site file, and flags of the same commands."""
    names = [name for config in CONFIGURATIONS for name in own_options(config)]
    assert len(names) == len(set(names))


@dataclass(frozen=True, kw_only=True)
class Car:
    engine: str = option(
        "petrol",
        "kind",
        affects="both",
        at="job",
        choices=("petrol", "diesel", "electric"),
    )
    volts: int | None = option(
        None,
        "voltage",
        affects="speed",
        at="job",
        metavar="V",
        above=0,
        needs=(Needs("engine", ("electric",), why="others have no battery"),),
    )
    seats: int = option(4, "seats", affects="nothing", at="job", least=1, most=9)
    loading: float = option(0.0, "share", affects="speed", at="job", least=0, below=1)
    children: int = option(
        0, "seats of children", affects="nothing", at="job", below="seats"
    )
    tow_bar: bool = option(
        False,
        "tow bar",
        affects="speed",
        at="job",
        excludes=(Excludes("engine", but=("diesel", "petrol")), Excludes("trailer")),
    )
    trailer: str | None = option(None, "trailer", affects="speed", at="job")
    sport: str = option(
        "off",
        "sports mode",
        affects="speed",
        at="job",
        choices=("off", "on", "auto"),
        needs=(Needs("trailer", when=("auto",)),),
        excludes=(
            Excludes("seats", when=("on",), why="it is low", cure="stay at home"),
        ),
    )

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"engine": "steam"}, "unknown --engine 'steam'", None),
        (
            {"volts": 12},
            "--volts 12 needs --engine electric: others have no battery",
            "add --engine electric, or leave --volts out",
        ),
        (
            {"trailer": ""},
            "--trailer '' is empty",
            "give a value, or leave --trailer out",
        ),
        ({"trailer": " "}, "--trailer ' ' is empty", None),
        ({"volts": 0, "engine": "electric"}, "--volts 0 must be above 0", None),
        ({"seats": 10}, "--seats 10 must be between 1 and 9", None),
        ({"seats": 0}, "--seats 0 must be between 1 and 9", None),
        ({"loading": 1.0}, "--loading 1.0 must be 0 or more and below 1", None),
        ({"loading": -0.1}, "--loading -0.1 must be 0 or more and below 1", None),
        (
            {"loading": float("nan")},
            "--loading nan must be 0 or more and below 1",
            None,
        ),
        ({"loading": float("inf")}, "--loading inf must be a finite number", None),
        ({"children": 4}, "--children 4 must be below --seats 4", None),
        (
            {"tow_bar": True, "engine": "electric"},
            "--tow-bar cannot be used with --engine electric",
            "use diesel, or leave --tow-bar out",
        ),
        (
            {"tow_bar": True, "trailer": "x"},
            "--tow-bar cannot be used with --trailer x",
            "leave it, or leave --tow-bar out",
        ),
        (
            {"sport": "auto"},
            "--sport auto needs --trailer TEXT",
            "add --trailer TEXT, or leave --sport out",
        ),
        (
            {"sport": "on", "seats": 2},
            "--sport on cannot be used with --seats 2: it is low",
            "stay at home",
        ),
    ],
)
def test_values_that_cannot_be_right(
    values: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as error:
        Car(**values)
    assert error.value.message.startswith(message)
    assert hint is None or error.value.hint == hint


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "engine": "electric",
            "volts": 400,
            "seats": 9,
            "children": 8,
            "loading": 0.999,
        },
        {"tow_bar": True, "engine": "diesel"},
        {"sport": "auto", "trailer": "x", "seats": 1},
        {"sport": "on"},
    ],
)
def test_values_that_are_right(values: dict[str, Any]) -> None:
    assert dataclasses.asdict(Car(**values)).items() >= values.items()


def other_value(each: Option) -> Any:
    """A value of an option that is not its default."""
    if each.value_type is bool:
        return not each.default
    if each.choices:
        return next(choice for choice in each.choices if choice != each.default)
    return {str: "x", int: 7, float: 0.7}[each.value_type]


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if each.read_with])
def test_an_option_that_nothing_reads_because_of_others(name: str) -> None:
    each = ALL[name]
    values = {name: other_value(each)}
    for rule in each.read_with:
        other = ALL[rule.other]
        candidates = [other.default, other_value(other), *other.choices]
        unfit = [value for value in candidates if value not in rule.values]
        values[other.name] = unfit[0]
    (remark,) = unread([name], ALL, values)
    assert remark.startswith(each.flag)
    assert " has no effect with" in remark
    # Nobody typed it; or it is not set.
    assert not list(unread([], ALL, values))
    assert not list(unread([name], ALL, values | {name: each.default}))
    # Each rule is enough.
    for rule in each.read_with:
        fit = rule.values[0] if rule.values else other_value(ALL[rule.other])
        assert not list(unread([name], ALL, values | {rule.other: fit}))


def test_what_is_said_of_an_option_that_nothing_reads() -> None:
    values = {
        "reference_batch_size": 64,
        "lr_rule": "none",
        "optimizer": "adamw",
        "stage_dir": "/x",
        "stage_env": False,
        "max_mem": "9G",
        "requeue": False,
    }
    names = ["reference_batch_size", "stage_dir", "max_mem"]
    assert list(unread(names, ALL, values)) == [
        "--reference-batch-size 64 has no effect with --lr-rule none and "
        "with --optimizer adamw",
        "--stage-dir /x has no effect without --stage-env",
        "--max-mem 9G has no effect with --no-requeue",
    ]


def test_what_a_declaration_says_of_its_field() -> None:
    known = own_options(JobConfig)
    fields = [each.name for each in dataclasses.fields(JobConfig)]
    assert list(known) == [name for name in fields if name != "plugins"]
    assert known["nodes"].value_type is int
    assert known["mem"].value_type is str
    assert known["setup"].value_type is str
    assert known["setup"].is_repeatable
    assert not known["mem"].is_repeatable
    assert known["gpus_per_node"].flag == "--gpus-per-node"
    assert {name: each.default for name, each in known.items()} == JobConfig().values()


def test_fields_that_are_no_options_are_no_flags() -> None:
    assert "argv" not in options(OwnProgram)
    with pytest.raises(UsageError, match="folder must be a text, not 3"):
        build(OwnProgram, {"argv": ["true"], "folder": 3, "file": ""})


def test_a_declaration_takes_only_known_facets() -> None:
    with pytest.raises(TypeError, match="afects"):
        option(1, "help", afects="nothing")  # type: ignore[call-arg]
    assert Option(1, "help").affects is None


# --- no list of options away from the declarations ------------------------------------------------

COLUMNS = {"list.py", "result_table.py"}
"""Files with names of columns: facts of runs, some of them called like options."""


def collections_of_options(file: Path, names: set[str]) -> Iterator[str]:
    """The names of collections at the top of a module that hold three names of options or more;
    declarations of options are no such collections."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if (
            not isinstance(statement, (ast.Assign, ast.AnnAssign))
            or statement.value is None
        ):
            continue
        texts = {
            node.value
            for node in ast.walk(statement.value)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if len({text.lstrip("-").replace("-", "_") for text in texts} & names) >= 3:
            target = (
                statement.targets[0]
                if isinstance(statement, ast.Assign)
                else statement.target
            )
            yield ast.unparse(target)


def test_no_list_repeats_options() -> None:
    """Whoever needs some options derives them from what the declarations say."""
    names = {name for config in CONFIGURATIONS for name in options(config)}
    found = [
        f"{file.relative_to(CHECKOUT)}: {name}"
        for file in sorted((CHECKOUT / "slurmft").rglob("*.py"))
        if file.name not in COLUMNS
        for name in collections_of_options(file, names)
    ]
    assert found == []


IN_FUNCTIONS = {
    "node/start.py: nproc_per_node max_restarts": "flags of torchrun",
    "plugins/notify/notification.py: task model": "what a message says of a training",
    "plugins/studies/report/matching.py: batch_size precision": "what a published table's column "
    "of configurations says",
    "train/recipes.py: learning_rate muon_learning_rate": "rates that LoRA multiplies",
    "train/recipes.py: task preset": "what the name of a recipe fixes",
}
"""Collections in functions that name two options or more, and why they are no lists to derive."""


def lists_in_functions(file: Path, names: set[str]) -> Iterator[str]:
    """The options that tuples, lists, sets and arguments of a call in functions name, where they
    are two or more."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in {node: None for each in functions for node in ast.walk(each)}:
        elements: list[ast.expr] = []
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            elements = node.elts
        elif isinstance(node, ast.Call):
            elements = node.args
        texts = [each.value for each in elements if isinstance(each, ast.Constant)]
        words = [
            text.lstrip("-").replace("-", "_")
            for text in texts
            if isinstance(text, str)
        ]
        of_options = dict.fromkeys(word for word in words if word in names)
        if len(of_options) >= 2:
            yield " ".join(of_options)


def test_no_function_repeats_options() -> None:
    """But for those that IN_FUNCTIONS justifies."""
    names = {name for config in CONFIGURATIONS for name in own_options(config)}
    top = CHECKOUT / "slurmft"
    found = {
        f"{file.relative_to(top)}: {words}"
        for file in sorted(top.rglob("*.py"))
        for words in lists_in_functions(file, names)
    }
    assert found - IN_FUNCTIONS.keys() == set()


def test_a_list_in_a_function_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "A = ('nodes', 'mem')\n"
        "class B:\n"
        "    def b(self):\n"
        "        for name in ('seed', 'x', '--batch-size'):\n"
        "            f('nodes', {'mem'})\n"
        "        return g('nodes', 'mem')\n"
    )
    names = {name for config in CONFIGURATIONS for name in own_options(config)}
    assert sorted(lists_in_functions(file, names)) == ["nodes mem", "seed batch_size"]


def test_a_list_that_repeats_options_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "A = ('nodes', 'mem', 'other')\n"
        "B: dict = {'nodes': 1, '--batch-size': 2, 'x': ['seed']}\n"
        "C = frozenset({*('mem', 'qos'), 'time'})\n"
        "D = [name for name in options if name != 'nodes']\n"
    )
    names = {name for config in CONFIGURATIONS for name in options(config)}
    assert list(collections_of_options(file, names)) == ["B", "C"]


def test_what_a_program_cannot_do_without_is_named() -> None:
    settings = {"argv": ["python", "train.py"], "folder": "/home/ada"}
    with pytest.raises(UsageError, match="lacks 'file'"):
        build(OwnProgram, settings)
