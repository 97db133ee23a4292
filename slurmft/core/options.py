"""Options that describe themselves: all that slurmft knows of an option stands at its declaration.

A configuration is a dataclass whose fields are declared with `option`:

    nodes: int = option(1, "number of nodes", affects="both", at="job", least=1, sbatch="nodes")

Each is a flag of a command (--nodes), a key of the site file (nodes) and a field of the run's
config.json. Whoever needs a list of options derives it from what the declarations say:

    [name for name, each in options(JobConfig).items() if each.sbatch]

Plug-ins add options to a configuration by dataclasses of their own: see `from_plugins`.
"""

# No `from __future__ import annotations`: options are read from the types of their fields.

import dataclasses
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from slurmft.core import credentials, plugins
from slurmft.core.errors import (
    NAME_BYTES,
    PATH_BYTES,
    TOO_LONG,
    TOO_LONG_CURE,
    UsageError,
    one_line,
    unknown,
)
from slurmft.core.text import shown

Affects = Literal["result", "speed", "both", "nothing"]
Place = Literal["submission", "job", "node", "rank"]
Path = Literal["input", "output", "there"]
Prediction = Literal["kept", "flag", "reset"]
Count = Literal["devices", "batch", "work"]
Command = Literal["data", "fetch", "doctor", "doctor node", "doctor locks", "render"]

TYPE_NAMES: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
"""Types of values, as messages call them."""

# Every number has a largest value: a digit too many is an error at submission, and no job that
# waits for days to fail. Each is well beyond what anybody trains with.
MOST_STEPS = 10**9
"""Optimizer steps of a run."""
MOST_TOKENS = 10**7
"""Tokens of a text."""
DAY_S = 86_400
YEAR_S = 365 * DAY_S


@dataclass(frozen=True, slots=True)
class Needs:
    """A rule: the option that has it works only if another option is set."""

    other: str
    """Name of the other option."""
    values: tuple[Any, ...] = ()
    """Values of the other option that will do; empty: every value but its default."""
    when: tuple[Any, ...] = ()
    """Values of the declaring option that need it; empty: every value but its default."""
    why: str = ""
    """Reason, for the message."""


@dataclass(frozen=True, slots=True)
class Excludes:
    """A rule: the option that has it does not work with some values of another option."""

    other: str
    """Name of the other option."""
    but: tuple[Any, ...] = ()
    """Values of the other option that work all the same, the one to advise first; empty: its
    default alone."""
    when: tuple[Any, ...] = ()
    """Values of the declaring option that exclude it; empty: every value but its default."""
    why: str = ""
    """Reason, for the message."""
    cure: str = ""
    """Advice to the user; empty: leave out one of the two."""


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option."""

    default: Any
    help: str
    """One plain clause for --help."""
    # What follows is given by name: nobody knows thirty facets by their order.
    _: KW_ONLY
    affects: Affects | None = None
    """Effect of another value: on the result of a run, on its speed, on both or on nothing.
    Reports and studies take runs that differ in nothing else for repeats of one measurement.
    Every declaration must say it."""
    at: Place | None = None
    """Where the value acts: while the run is submitted; in what the cluster is asked for; on every
    node; in every rank. Every declaration must say it."""
    metavar: str | None = None
    """Word for the value in --help; None: the choices, or a word for the type."""
    choices: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """Texts that are values, too, of an option whose other values are numbers."""
    least: float | None = None
    """The smallest value."""
    above: float | None = None
    """A number that every value is larger than."""
    most: float | None = None
    """The largest value."""
    below: float | str | None = None
    """A number that every value is smaller than, or the name of the option that has it."""
    lower: str = ""
    """The option that has the lower end where a range, MIN-MAX, is typed for this one; empty:
    ranges are no values."""
    needs: tuple[Needs, ...] = ()
    excludes: tuple[Excludes, ...] = ()
    read_with: tuple[Needs, ...] = ()
    """Rules of which one must hold, or nothing reads the value. Nothing is refused: a recipe or a
    site file may have the value for other runs. Whoever types it is warned: see `unread`."""
    path: Path | None = None
    """For paths: an input is read, and sent along by --on; an output is written by the run, and
    belongs to it alone; "there" is a place on the nodes, which means nothing elsewhere."""
    predicts: Prediction = "kept"
    """Fate of the value of a training in `slurmft predict`: it is kept, or there is a flag for
    another, or it is reset to the default, because it concerns training alone."""
    counts: Count | None = None
    """For sizes that a scaling study varies: a number of devices, of the samples of a step, or of
    work. The cost model computes with them."""
    usual: bool = False
    """True if --help shows the option; --help-all shows all."""
    varies: bool = True
    """True if the cells of a study may differ in it."""
    identifies: bool = False
    """True if it says what a run is called and where it is: a run that exists keeps it."""
    may_be_empty: bool = False
    """True if an empty text is a value. Elsewhere it is refused: it comes of a variable of the
    shell that is not set."""
    executes: bool = False
    """True if the value is executed, or chooses what is: shell lines, a Python, an image. Whoever
    resumes a run from elsewhere is shown it first."""
    sends: bool = False
    """True if the run sends data to where the value says. Whoever resumes a run from elsewhere is
    shown it first."""
    takes_flags: bool = False
    """True if the value is options of another program: it may begin with hyphens."""
    decides_tokens: bool = False
    """True if the tokens that are made of the data depend on it."""
    by_task: bool = False
    """True if only tasks that say so read it; see `TaskFacts.reads`."""
    per_source: bool = False
    """True if each source of --mix may have a value of its own: it says how rows are read."""
    sbatch: str | None = None
    """The option of sbatch, salloc and srun that carries the value."""
    scontrol: str | None = None
    """The field of `scontrol show job` that has the value."""
    published: tuple[str, ...] = ()
    """Columns of published tables that have the value under another name."""
    elsewhere: tuple[str, ...] = ()
    """Names of such a flag in Trainer, accelerate, torchrun or sbatch, with underscores: whoever
    types one is told ours."""
    commands: tuple[Command, ...] = ()
    """Commands that have this flag, besides those that submit runs."""
    name: str = ""
    """Name of the field; `options` fills it in."""
    annotation: Any = None
    """Type of the field; `options` fills it in."""

    @property
    def flag(self) -> str:
        """The command-line spelling: batch_size is --batch-size."""
        return flag(self.name)

    @property
    def value_type(self) -> type:
        """The type of one value: `int` for `int | None`, `str` for `tuple[str, ...]`."""
        arguments = get_args(self.annotation)
        value_type: type = self.annotation
        # None and the dots of a tuple come behind it.
        if arguments:
            value_type = arguments[0]
        return value_type

    @property
    def placeholder(self) -> str:
        """Word for a value in help and messages, where no metavar is declared."""
        word = {int: "N", float: "X", str: "TEXT"}[self.value_type]
        return "|".join((word, *self.texts))

    @property
    def is_repeatable(self) -> bool:
        return get_origin(self.annotation) is tuple

    @property
    def affects_result(self) -> bool:
        return self.affects in ("result", "both")

    @property
    def affects_speed(self) -> bool:
        return self.affects in ("speed", "both")

    @property
    def affects_measurement(self) -> bool:
        """True if runs that differ in the value are different measurements."""
        return self.affects != "nothing"

    def is_text(self, value: Any) -> bool:
        """Returns whether a value is one of the texts of an option of numbers."""
        return isinstance(value, str) and value in self.texts

    def is_set(self, value: Any) -> bool:
        """Returns whether a value is another one than the default."""
        return value is not None and value != self.default

    def checked(self, value: Any) -> Any:
        """Converts a value as JSON and TOML have it to the type of the field.

        Raises:
            UsageError: it is of another type.
        """
        value_type = self.value_type
        if self.is_text(value):
            return value
        # JSON has null for an option that was not given.
        is_absent = value is None and self.default is None
        # A field that is no option may be of a type that has no name here.
        expected = TYPE_NAMES.get(value_type, value_type.__name__)
        expected = " or ".join((expected, *self.texts))
        # type() rather than isinstance: True is an int, and no number of nodes.
        if self.is_repeatable:
            is_list = isinstance(value, (list, tuple))
            if is_list and all(type(each) is value_type for each in value):
                # A tuple, as defaults are: a list equals none of them, and would count as set.
                return tuple(value)
            expected = "a list of strings"
        elif type(value) is value_type or is_absent:
            return value
        # Whoever writes JSON or TOML writes 1 for 1.0.
        elif value_type is float and type(value) is int:
            return float(value)
        hint = None
        if self.lower and isinstance(value, str):
            hint = f"a range has two options: {self.lower} = 2 and {self.name} = 8"
        raise UsageError(f"{self.name} must be {expected}, not {value!r}", hint)

    def check_bounds(self, value: Any, config: Any) -> None:
        """Raises UsageError where a value is out of bounds; NaN and infinities are out of all."""
        # An option without bounds on that side would let it pass.
        if isinstance(value, float) and math.isinf(value):
            raise UsageError(f"{self.flag} {value} must be a finite number")
        below: Any = self.below
        # The bound is the value of another option, which this configuration has.
        if isinstance(below, str):
            below = getattr(config, below)
        # NaN is neither above nor below anything: only a comparison that holds lets a value pass.
        is_inside = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (below is None or value < below)
        )
        if not is_inside:
            raise UsageError(f"{self.flag} {value} must be {self._bounds(below)}")

    def _bounds(self, below: float | None) -> str:
        """The bounds in words: "0 or more and below 1"."""
        if self.least is not None and self.most is not None:
            return f"between {_bound(self.least)} and {_bound(self.most)}"
        parts = []
        if self.least == 0:
            parts.append("0 or more")
        elif self.least is not None:
            parts.append(f"at least {_bound(self.least)}")
        if self.above is not None:
            parts.append(f"above {_bound(self.above)}")
        if self.most is not None:
            parts.append(f"at most {_bound(self.most)}")
        if isinstance(self.below, str) and below is not None:
            parts.append(f"below {flag(self.below)} {below}")
        elif below is not None:
            parts.append(f"below {_bound(below)}")
        return " and ".join(parts)


def _bound(value: float) -> str:
    """Writes a bound so that its digits need not be counted: 1,000,000."""
    return f"{value:,}"


def flag(name: str) -> str:
    """The command-line spelling of a field: batch_size is --batch-size."""
    return "--" + name.replace("_", "-")


# --- declarations ---------------------------------------------------------------------------------

_KEY = "option"
_GROUP = "group"
"""Keys of a field's metadata."""
_Facets = ParamSpec("_Facets")


def _declares(make: Callable[_Facets, Option]) -> Callable[_Facets, Any]:
    """Returns a function with the arguments of `make` that returns a dataclass field."""

    # ParamSpec lets mypy check the arguments of every declaration against the fields of Option.
    def declare(*args: _Facets.args, **facets: _Facets.kwargs) -> Any:
        declaration = make(*args, **facets)
        return field(default=declaration.default, metadata={_KEY: declaration})

    return declare


option = _declares(Option)
"""Declares an option as a field of a dataclass; takes the arguments of `Option`."""


def from_plugins(group: str) -> dict[str, str]:
    """Returns the metadata of the field of a configuration that holds the options of plug-ins, name
    -> value. The plug-ins declare dataclasses with these options as entry points of the group."""
    return {_GROUP: group}


def options(config: type[Any]) -> dict[str, Option]:
    """Name -> declaration of every option of a configuration: its fields in their order, then the
    options of plug-ins."""
    declared: dict[str, Option] = {}
    for part in (config, *extensions(config)):
        declared |= own_options(part)
    return declared


def named_elsewhere(name: str, declared: Mapping[str, Option]) -> Option | None:
    """Returns the option that another tool calls by this name; None where there is none.

    Args:
        name: with hyphens or underscores, with or without hyphens before it.
        declared: the options that it may be.
    """
    plain = name.lstrip("-").replace("-", "_")
    # Case tells short flags apart: -c and -C of sbatch.
    names = {plain}
    if len(plain) > 1:
        names.add(plain.lower())
    for each in declared.values():
        if names.intersection(each.elsewhere):
            return each
    return None


def unknown_option(what: str, name: str, declared: Mapping[str, Option]) -> UsageError:
    """Returns the error for a key or a keyword that is no option; the hint knows the names that
    other tools have for options."""
    ours = named_elsewhere(name, declared)
    if ours is None:
        return unknown(what, name, list(declared))
    return UsageError(f"unknown {what} {name!r}", f"that is {ours.name} here")


def own_options(config: type[Any]) -> dict[str, Option]:
    """Name -> declaration of the options that are fields of a configuration."""
    if config not in _OPTIONS:
        declared = {}
        for each in dataclasses.fields(config):
            if _KEY in each.metadata:
                declaration: Option = each.metadata[_KEY]
                # Where it is declared, an option does not know its field yet.
                declared[each.name] = dataclasses.replace(
                    declaration, name=each.name, annotation=each.type
                )
        _OPTIONS[config] = declared
    return _OPTIONS[config]


_OPTIONS: dict[Any, dict[str, Option]] = {}
"""Configuration -> the options that are its fields, kept: every value that is checked asks for
them."""


def extensions(config: type[Any]) -> tuple[type[Any], ...]:
    """Returns the dataclasses by which plug-ins add options to a configuration."""
    for each in dataclasses.fields(config):
        if _GROUP in each.metadata:
            loaded = plugins.load_all(each.metadata[_GROUP])
            # slurmft's own take a name first, wherever other plug-ins come in the list.
            ours_first = sorted(loaded, key=lambda part: not plugins.is_ours(part))
            sound: tuple[type[Any], ...] = ()
            for part in ours_first:
                if _is_sound(part, (config, *sound)):
                    sound += (part,)
            return sound
    return ()


# Cached for the warning: a command asks for the options many times, and says it once.
@functools.cache
def _is_sound(extension: Any, before: tuple[type[Any], ...]) -> bool:
    """Returns whether a plug-in's dataclass can add its options to a configuration. One that cannot
    is left out, with a warning: other commands and jobs do not fail for it."""
    try:
        declared = own_options(extension)
        for each in declared.values():
            if each.value_type not in TYPE_NAMES:
                raise plugins.PluginError(f"{each.name!r} is no text, number or switch")
            _check_answers(each)
        for other in before:
            taken = declared.keys() & own_options(other).keys()
            if taken:
                owner = "slurmft"
                if not plugins.is_ours(other):
                    owner = plugins.name_of(other)
                raise plugins.PluginError(
                    f"{owner} has {', '.join(sorted(taken))} already"
                )
        # Every job makes one, mostly with its defaults alone: they must pass its own checks.
        extension()
    # A package may raise anything.
    except Exception as error:
        print(
            f"warning: the options of {plugins.name_of(extension)} cannot be used: "
            f"{one_line(error)}; they are left out",
            file=sys.stderr,
            flush=True,
        )
        return False
    return True


def _check_answers(declared: Option) -> None:
    """Raises PluginError where an option does not say what every declaration must."""
    for facet, answers in (("affects", get_args(Affects)), ("at", get_args(Place))):
        answer = getattr(declared, facet)
        if answer not in answers:
            raise plugins.PluginError(
                f"{declared.name!r}: {facet} is {answer!r}, none of {', '.join(answers)}"
            )


Config = TypeVar("Config")


def build(config: type[Config], values: dict[str, Any]) -> Config:
    """Makes a configuration of those of `values` that are its options, plug-ins' included.

    Raises:
        UsageError: a value that cannot be right.
    """
    of_plugins: dict[str, Any] = {}
    for extension in extensions(config):
        # Checked here: a plug-in's dataclass need not do what all options need.
        part = build(extension, values)
        check_options(part)
        check_credentials(part)
        check_lines(part)
        of_plugins |= dataclasses.asdict(part)
    return build_own(config, values, of_plugins)


def build_own(
    config: type[Config],
    values: dict[str, Any],
    of_plugins: dict[str, Any] | None = None,
) -> Config:
    """Makes a configuration of those of `values` that are its fields; imports no plug-in.

    Args:
        of_plugins: the options of plug-ins, which are not checked.

    Raises:
        UsageError: a value that cannot be right.
    """
    declared = own_options(config)
    arguments: dict[str, Any] = {}
    for each in dataclasses.fields(config):  # type: ignore[arg-type]
        if _GROUP in each.metadata:
            arguments[each.name] = of_plugins or {}
        elif each.name in values:
            # A field that is no option describes something: its type is checked all the same.
            plain = Option(each.default, "", name=each.name, annotation=each.type)
            declaration = declared.get(each.name, plain)
            arguments[each.name] = declaration.checked(values[each.name])
        elif each.default is each.default_factory is dataclasses.MISSING:
            raise UsageError(f"the configuration lacks {each.name!r}")
    return config(**arguments)


# --- values that cannot be right ------------------------------------------------------------------


def check_options(config: Any) -> None:
    """Checks every value of a configuration against what its declaration says.

    Raises:
        UsageError: a value is none of the choices or out of bounds, or contradicts another one.
    """
    for each in own_options(type(config)).values():
        value = getattr(config, each.name)
        # It was not given.
        if value is None:
            continue
        _check_texts(each, value)
        if each.choices and value not in each.choices:
            raise unknown(each.flag, value, list(each.choices))
        if not each.is_text(value):
            each.check_bounds(value, config)
    # Rules come after all values: a rule is about values that can be right.
    for each in own_options(type(config)).values():
        value = getattr(config, each.name)
        for need in each.needs:
            if _applies(each, value, need.when):
                _check_needed(config, each, value, need)
        for exclusion in each.excludes:
            if _applies(each, value, exclusion.when):
                _check_excluded(config, each, value, exclusion)


def _check_texts(declared: Option, value: Any) -> None:
    texts = value if declared.is_repeatable else (value,)
    for text in texts:
        if not isinstance(text, str):
            continue
        if not declared.may_be_empty:
            check_not_empty(declared.flag, text)
        if declared.path is not None:
            _check_path(declared.flag, text)


def _check_path(name: str, text: str) -> None:
    """Refuses a path that no file system takes."""
    # The settings of a metric, and where an image is from, stand beside colons and commas.
    longest = max(len(os.fsencode(part)) for part in re.split("[/:,]", text))
    if longest > NAME_BYTES or len(os.fsencode(text)) > PATH_BYTES:
        raise UsageError(f"{name} {shown(text)!r} is {TOO_LONG}", TOO_LONG_CURE)


def check_not_empty(name: str, text: str) -> None:
    """Refuses an empty text as the value of a flag or an argument: a variable of the shell was not
    set."""
    if not text.strip():
        raise UsageError(
            f"{name} {text!r} is empty", f"give a value, or leave {name} out"
        )


def _applies(declared: Option, value: Any, when: tuple[Any, ...]) -> bool:
    if when:
        return value in when
    return declared.is_set(value)


def _check_needed(config: Any, declared: Option, value: Any, need: Needs) -> None:
    other = own_options(type(config))[need.other]
    other_value = getattr(config, other.name)
    if _applies(other, other_value, need.values):
        return
    first_value = None
    # The first is the usual one: the message advises it.
    if need.values:
        first_value = need.values[0]
    needed = _typed(other, first_value)
    reason = ""
    if need.why:
        reason = f": {need.why}"
    raise UsageError(
        f"{_typed(declared, value)} needs {needed}{reason}",
        f"add {needed}, or leave {declared.flag} out",
    )


def _check_excluded(
    config: Any, declared: Option, value: Any, exclusion: Excludes
) -> None:
    other = own_options(type(config))[exclusion.other]
    other_value = getattr(config, other.name)
    if other_value in exclusion.but or not other.is_set(other_value):
        return
    instead = "leave it"
    if exclusion.but:
        instead = f"use {exclusion.but[0]}"
    reason = ""
    if exclusion.why:
        reason = f": {exclusion.why}"
    raise UsageError(
        f"{_typed(declared, value)} cannot be used with {_typed(other, other_value)}{reason}",
        exclusion.cure or f"{instead}, or leave {declared.flag} out",
    )


def _typed(declared: Option, value: Any) -> str:
    """An option with a value as a user types it; without a value, with the word for it."""
    if declared.value_type is bool or declared.is_repeatable:
        return declared.flag
    if value is None:
        value = declared.metavar or declared.placeholder
    return f"{declared.flag} {value}"


def unread(
    names: Iterable[str], declared: Mapping[str, Option], values: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a sentence for each option that has no effect because of the values of others.

    Args:
        names: the options that were typed.
        declared: name -> declaration of the options of the command.
        values: name -> value; a rule about an option that is not among them holds.
    """
    for name in names:
        each = declared[name]
        if not each.is_set(values.get(name)):
            continue
        states = [_state_without(rule, declared, values) for rule in each.read_with]
        # One rule that holds is enough.
        if states and all(states):
            yield f"{_typed(each, values[name])} has no effect {' and '.join(states)}"


def _state_without(
    rule: Needs, declared: Mapping[str, Option], values: Mapping[str, Any]
) -> str:
    """Returns the value of the other option in words where a rule does not hold; "": it does."""
    if rule.other not in values:
        return ""
    other = declared[rule.other]
    value = values[rule.other]
    if _applies(other, value, rule.values):
        return ""
    # A switch that is on by default is turned off by --no-.
    if other.default is True:
        return f"with {flag('no_' + other.name)}"
    if value in (None, False):
        return f"without {other.flag}"
    return f"with {_typed(other, value)}"


def texts(config: Any) -> list[tuple[str, str]]:
    """Name of the field and text, for every text that a configuration holds."""
    pairs = []
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if not isinstance(value, tuple):
            value = (value,)
        for text in value:
            if isinstance(text, str):
                pairs.append((each.name, text))
    return pairs


def check_lines(config: Any) -> None:
    """Raises UsageError where a value holds a line break: values stand in batch scripts."""
    for name, value in texts(config):
        # NUL, too: no argument and no variable of a process can hold one.
        if any(character in value for character in "\n\r\0"):
            raise UsageError(
                f"{flag(name)} {value!r} holds a line break",
                "values are one line in sbatch scripts",
            )


def check_credentials(config: Any, names: Mapping[str, str] | None = None) -> None:
    """Raises UsageError where a value holds a password or a token: values are written to files.

    Args:
        names: what is no option -> what it is called.
    """
    for attribute, value in texts(config):
        name = (names or {}).get(attribute, flag(attribute))
        kind = credentials.kind_in(value)
        if kind:
            raise UsageError(
                f"{name} {credentials.redact(value)!r} holds {kind}: everybody who sees the "
                "run's files or this machine's processes would read it",
                "put it into the environment, which the job inherits (export HF_TOKEN=...), or log "
                "in once: hf auth login; and revoke it, if others use this machine",
            )
