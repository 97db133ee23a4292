"""The parser of every command: flags of configurations, and arguments that commands share."""

import argparse
import functools
import inspect
import re
import shlex
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypedDict

from slurmft.cli import foreign_commands, foreign_flags
from slurmft.core import plugins
from slurmft.core.config import RunConfigFacts
from slurmft.core.errors import Exit, SlurmftWarning, UsageError, nearest, unknown
from slurmft.core.files import to_json
from slurmft.core.options import Option, check_not_empty, extensions, own_options
from slurmft.core.text import NO_BREAK, screen_width, shown

if TYPE_CHECKING:
    from slurmft.runs.rundir import RunDir


SCREEN_LINES = 46
"""The most lines of a help that was not asked for in full."""
SHORT_EXAMPLES = 3
"""Examples in a help that is longer than that."""
_ALL_FLAGS = "show all flags, in full"


class Submitted(TypedDict):
    """A run that was submitted."""

    run: str
    """The run directory."""
    name: str
    job: str
    cluster: str
    """The launcher: slurm, local, ..."""


class Parser(argparse.ArgumentParser):
    """argparse that raises our errors, takes no abbreviations, and suggests the near flag."""

    def __init__(self, command: str, documentation: str | None) -> None:
        """Makes the parser of a command.

        Args:
            command: its words, such as "slurmft study run".
            documentation: its docstring. The first paragraph and the examples begin the help, the
                others end it.
        """
        text = inspect.cleandoc(documentation or "")
        self._about, _, more = text.partition("\n\n")
        width = _help_width()
        super().__init__(command, allow_abbrev=False)
        self.explain(more)
        self.formatter_class = functools.partial(
            _Formatter, width=width - 2, max_help_position=min(28, width * 2 // 5)
        )
        self.options: dict[str, Option] = {}
        """Declarations of the flags that `add_options` has added."""
        self.hidden: set[str] = set()
        """Names of the options that a short help leaves out."""
        self.shows_all = False
        """Whether the help is whole, however long: --help-all was typed."""
        self.printed: tuple[Any, ...] = ()
        """Types of what --json prints."""
        self._typed: dict[str, str] = {}
        """Values of flags that count once, as far as the command line has been read."""
        # What argparse takes for negative numbers, which may be values: --host-suffix -ib0, too.
        self._negative_number_matcher = re.compile("-[^-]")
        self.add_argument(
            "--debug", action="store_true", help="show tracebacks of errors"
        )
        on = "run the command there, by ssh; see slurmft help from-a-laptop"
        self.add_argument("--on", metavar="CLUSTER", help=on)
        # It has a line of its own in short pages, and in all of commands that `show_usual` flags.
        self._help_all = self.add_argument(
            "--help-all", action=_HelpAll, nargs=0, help=argparse.SUPPRESS
        )

    def explain(self, text: str) -> None:
        """Sets what the help says besides flags and the first paragraph: its examples stand before
        the flags, which may be many, all other paragraphs behind them."""
        self._examples = ""
        self._end: list[str] = []
        for block in text.split("\n\n"):
            if block.startswith("examples"):
                self._examples = block
            elif block:
                self._end.append(block)

    def add_run(self, default: str | None = None) -> Self:
        """Adds the argument that names a run, and the folder where it is looked for; without a
        default, a run must be named."""
        text = "path, first letters of its folder's name, job id, or 'last': the newest of yours"
        nargs = None
        if default is not None:
            text += f" (default: {default})"
            nargs = "?"
        self.add_argument("run", metavar="RUN", nargs=nargs, default=default, help=text)
        return self.add_runs_dir()

    def add_runs_dir(self) -> Self:
        """Adds the folder where runs are looked for."""
        default = "the site file's runs_dir, else runs"
        text = f"folder of run directories (default: {default})"
        self.add_argument("--runs-dir", metavar="DIR", help=text)
        return self

    def add_json(self, text: str, *printed: Any) -> Self:
        """Adds --json; `printed`: the types of what it prints, of which `slurmft schema` makes a
        schema."""
        self.add_argument("--json", action="store_true", help=text)
        self.printed = printed
        return self

    def add_follow(self, json: str, *printed: Any) -> Self:
        """Adds --dry-run and either --follow or --json, for commands that submit a run; `printed`:
        see `add_json`."""
        text = "show what would run; submit nothing"
        self.add_argument("--dry-run", action="store_true", help=text)
        # Both write on stdout, where one reader expects JSON and nothing else.
        add = self.add_mutually_exclusive_group().add_argument
        add("--follow", action="store_true", help="stream progress until the job ends")
        add("--json", action="store_true", help=json)
        self.printed = printed
        return self

    def add_submission(self) -> Self:
        """Adds what `submit_or_show` reads."""
        about = "print run, name, job and cluster as JSON"
        return self.add_follow(about, Submitted, RunConfigFacts)

    def add_options(
        self, config: type[Any], title: str, only: Collection[str] | None = None
    ) -> Self:
        """Adds a flag for every option of a configuration, or some; absent flags leave no attribute
        behind. The usage line does not list them: they are many. Those of each plug-in have a
        section of their own."""
        usage = ["%(prog)s [FLAG ...]"]
        for action in self._actions:
            # What must be typed stays in the line.
            if action.required:
                metavar = action.metavar or action.dest.upper()
                usage += [*action.option_strings, str(metavar)]
        self.usage = " ".join(usage)
        self._add_section(title, own_options(config), only)
        for extension in extensions(config):
            declared = own_options(extension)
            taken = sorted(declared.keys() & self.options.keys())
            # argparse would raise an error: another package must not end a command.
            if taken and not plugins.is_ours(extension):
                name = plugins.name_of(extension)
                warning = f"the program has {', '.join(taken)} already; the flags are left out"
                print(
                    f"warning: options of {name}: {warning}",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            self._add_section(_heading(extension), declared, only)
        return self

    def _add_section(
        self, title: str, declared: Mapping[str, Option], only: Collection[str] | None
    ) -> None:
        section = self.add_argument_group(title)
        for name, each in declared.items():
            if only is None or name in only:
                settings = _argument(each)
                if each.lower:
                    settings |= _range_argument(each, only)
                section.add_argument(each.flag, dest=name, **settings)
                self.options[name] = each

    def show_usual(self, *others: str, without: Collection[str] = ()) -> Self:
        """Lets a short help show the usual options and these others, without some; --help-all shows
        all."""
        unusual = {name for name, each in self.options.items() if not each.usual}
        self.hidden = unusual - set(others) | set(without)
        self._help_all.help = _ALL_FLAGS
        return self

    def format_help(self) -> str:
        """Returns the help, no wider than 80 columns: the whole one if it fits a screen, or was
        asked for, else a short one."""
        page = self._page([self._about, self._examples])
        for block in self._end:
            page += f"\n{wrapped(block)}\n"
        if self.shows_all or page.count("\n") <= SCREEN_LINES:
            return page
        return self._short_page()

    def _short_page(self) -> str:
        """Returns the help with the usual flags, in a line each where they fit, and the first
        examples; of the paragraphs at its end, those for which the screen has room."""
        whole = [action.help for action in self._actions]
        usage = self.usage
        for action in self._actions:
            action.help = self._short_text(action)
        self._help_all.help = _ALL_FLAGS
        self.usage = self._short_usage()
        try:
            page = self._page([self._about, _first_examples(self._examples)])
        finally:
            self.usage = usage
            for action, text in zip(self._actions, whole, strict=True):
                action.help = text
        for block in self._end:
            longer = f"{page}\n{wrapped(block)}\n"
            if longer.count("\n") <= SCREEN_LINES:
                page = longer
        return page

    def _page(self, begin: list[str]) -> str:
        """Returns the help up to the last flag.

        Args:
            begin: the blocks before the flags; empty ones are left out.
        """
        self.description = wrapped("\n\n".join(filter(None, begin)))
        return super().format_help()

    def _short_text(self, action: argparse.Action) -> str | None:
        """Returns what a short help says of a flag or an argument."""
        # --debug is for developers, and who reads this knows --help.
        is_left_out = action.dest in {*self.hidden, "help", "debug"}
        if is_left_out or action.help in (None, argparse.SUPPRESS):
            return argparse.SUPPRESS
        return first_clause(str(action.help))

    def _short_usage(self) -> str:
        """Returns the usage line with what must be typed alone."""
        if self.usage is not None:
            # argparse wraps the lines that it has made itself alone.
            line = self.usage % {"prog": self.prog}
            margin = " " * len("usage: ")
            return textwrap.fill(line, _help_width() - 8, subsequent_indent=margin)
        words = ["%(prog)s [FLAG ...]"]
        for action in self._actions:
            name = str(action.metavar or action.dest)
            if action.required:
                words += [*action.option_strings[-1:], name]
            elif not action.option_strings:
                words.append(f"[{name}]")
        return " ".join(words)

    def arguments(self) -> Iterator[argparse.Action]:
        """All flags and arguments that were added, with what argparse knows of each."""
        yield from self._actions

    def error(self, message: str) -> NoReturn:
        hint = f"see {self.prog} --help"
        if message.startswith("the following arguments are required"):
            usage = self._short_usage() % {"prog": self.prog}
            hint = " ".join(usage.split())
            if "RUN" in hint:
                hint += "; RUN may be last: the newest of yours"
        raise UsageError(message, hint)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parses a command line; UsageError for a flag or an argument that it does not have."""
        self._typed.clear()
        arguments, rest = self.parse_known_args(self._with_values_joined(argv))
        # argparse leaves the "--" before words that it has no place for.
        if rest[:1] == ["--"] and len(rest) > 1:
            raise self._unexpected(rest[1], rest[1:], is_program=True)
        # Flags first: a word after an unknown flag was meant as its value.
        for word in rest:
            # A hyphen alone is a file's name by custom, and no flag.
            if word.startswith("-") and word != "-":
                flag = word.partition("=")[0]
                raise self._unknown_flag(flag)
        if rest:
            is_program = foreign_commands.is_program(rest[0])
            words = argv[argv.index(rest[0]) :]
            raise self._unexpected(rest[0], words, is_program)
        return arguments

    def _unexpected(self, word: str, words: list[str], is_program: bool) -> UsageError:
        """Returns the error for a word that this command has no place for.

        Args:
            words: the command line from the word on.
            is_program: the word is a program of the user's own, as far as one can see.
        """
        hint = f"see {self.prog} --help"
        # Others start no jobs: a file is a mistake of another kind there.
        if "nodes" in self.options and is_program:
            hint = foreign_commands.program_hint(words)
        else:
            flag = foreign_flags.taker(word, self.options)
            if self._takes_one_run() and _is_run(word):
                hint = f"{self.prog} takes one run; slurmft list shows several"
            elif flag in self._option_string_actions:
                hint = f"did you mean {flag} {shlex.quote(word)}?"
        return UsageError(f"unexpected argument {word!r}", hint)

    def _takes_one_run(self) -> bool:
        return any(action.dest == "run" for action in self._get_positional_actions())

    def _with_values_joined(self, argv: list[str]) -> list[str]:
        """Returns a command line with `--resume-args=--x` in place of `--resume-args --x`.

        argparse takes a word that begins with a hyphen for a flag of this command.
        """
        joining = {each.flag for each in self.options.values() if each.takes_flags}
        joined: list[str] = []
        for word in argv:
            if joined and joined[-1] in joining and word.startswith("-"):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def split_at_argument(self, argv: list[str]) -> tuple[list[str], list[str]]:
        """Splits a command line before the first word that is no flag of this command, and no value
        of one."""
        argv = self._with_values_joined(argv)
        flags = self._option_string_actions
        index = 0
        while index < len(argv):
            flag, equals, _ = argv[index].partition("=")
            if flag not in flags:
                break
            has_value_behind = flags[flag].nargs != 0 and not equals
            index += 1 + int(has_value_behind)
        return argv[:index], argv[index:]

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes a "--" out of the values, and would store a list without one.
        if action.option_strings and arg_strings == ["--"]:
            self.error(f"argument {action.option_strings[0]}: '--' is no value")
        # Those of options are checked with their declarations: some may be empty.
        if action.dest not in self.options and action.nargs != argparse.REMAINDER:
            for text in arg_strings:
                check_not_empty(_name_of(action), text)
        if action.dest in self.options and arg_strings:
            self._warn_of_second(self.options[action.dest], arg_strings[0])
        return super()._get_values(action, arg_strings)

    def _warn_of_second(self, option: Option, value: str) -> None:
        """Warns where a flag that counts once has had another value before, which is lost."""
        first = self._typed.setdefault(option.flag, value)
        if option.is_repeatable or first == value:
            return
        self._typed[option.flag] = value
        # A script may well add flags to those that it was given: the last counts, as usual.
        counts = shown(value)
        remark = f"{option.flag} is given twice: {counts!r} counts, {shown(first)!r} does not"
        warnings.warn(remark, SlurmftWarning, stacklevel=2)

    def _unknown_flag(self, flag: str) -> UsageError:
        """Returns the error for a flag that this command does not have."""
        flags = self._long_flags()
        hint = self._hint_to_argument(flag)
        hint = hint or foreign_flags.hint(flag, self.options, flags)
        name = flag.strip("-")
        # Without hyphens: they are in all, and would make short flags alike. Of one letter, every
        # short name is near.
        if hint is None and len(name) > 1:
            near = nearest(name, [each.strip("-") for each in flags])
            if near is not None and near.replace("-", "_") == name.replace("-", "_"):
                hint = f"did you mean --{near}?"
            else:
                hint = foreign_flags.hint_to_submission(flag, self._keeps())
            if hint is None and near is not None:
                hint = f"did you mean --{near}?"
        return UsageError(
            f"unknown flag {flag!r}", hint or f"{self.prog} --help-all lists its flags"
        )

    def _keeps(self) -> str:
        """Returns what to say of a flag of a submission where this command is about a run, or
        starts a program."""
        if "run" in {action.dest for action in self._actions}:
            return "; a run keeps its settings"
        if "per" in self.options:
            return "; those of the program stand behind it: -- PROGRAM --flag"
        return ""

    def _hint_to_argument(self, flag: str) -> str | None:
        """Returns how what was typed as a flag is typed here, where it is an argument."""
        for action in self._actions:
            if not action.option_strings and flag == f"--{action.dest}":
                return (
                    f"it is no flag here: {self.prog} {action.metavar or action.dest}"
                )
        return None

    def _long_flags(self) -> list[str]:
        flags: list[str] = []
        for action in self._actions:
            for flag in action.option_strings:
                if flag.startswith("--"):
                    flags.append(flag)
        return flags

    def parse_run(self, argv: list[str]) -> "tuple[argparse.Namespace, RunDir]":
        """Parses the command line of a command about one run (see `add_run`); returns the run,
        too."""
        from slurmft.runs import resolve  # others need not wait for it

        arguments = self.parse(argv)
        return arguments, resolve.find(arguments.run, arguments.runs_dir)


def _name_of(action: argparse.Action) -> str:
    """Returns what a person calls an argument: its flag, or the word in the usage line."""
    return str((*action.option_strings, action.metavar, action.dest)[0])


def _is_run(word: str) -> bool:
    """Returns whether a word names the directory of a run."""
    # Commands without such a mistake need not wait for it.
    from slurmft.runs.rundir import RunDir

    return RunDir(Path(word)).exists()


def _help_width() -> int:
    """Returns the columns of help: those of the terminal, at most 80."""
    return min(80, screen_width(no_terminal=80))


def wrapped(text: str) -> str:
    """Returns paragraphs and examples, as wide as the terminal, at most 80 columns."""
    # Some terminals go to the next line after a character in the last column.
    width = _help_width() - 1
    wrapped_blocks = []
    for block in text.strip("\n").split("\n\n"):
        lines = block.splitlines()
        wrapped_blocks.append(_wrapped_block(lines, width))
    return "\n\n".join(wrapped_blocks)


def _wrapped_block(lines: list[str], width: int) -> str:
    """Returns a paragraph, or examples: a block with indented lines, which stay lines."""
    if not any(line.startswith(" ") for line in lines):
        return textwrap.fill(
            " ".join(lines), width, break_long_words=False, break_on_hyphens=False
        )
    parts = []
    for line in lines:
        parts += _wrapped_example(line, width)
    return "\n".join(parts)


def _wrapped_example(line: str, width: int) -> list[str]:
    """Returns the lines of an example and of what it does; those of a command end with
    backslashes."""
    if len(line) <= width:
        return [line]
    # A path or a flag that is cut in two is another one.
    fill = functools.partial(
        textwrap.wrap, break_long_words=False, break_on_hyphens=False
    )
    indent = line[: len(line) - len(line.lstrip())]
    if not indent:
        return fill(line, width)
    # Two spaces or more are between a command and what it does.
    match = re.match(r"(.*\S)\s{2,}(\S.*)", line)
    command = line
    comment = ""
    if match is not None:
        command, comment = match.groups()
    margin = " " * 6
    comment_lines = fill(
        comment, width, initial_indent=margin, subsequent_indent=margin
    )
    return [wrapped_command(command, width), *comment_lines]


def wrapped_command(command: str, width: int) -> str:
    """Returns a command in lines that end with backslashes: it can be pasted as it stands."""
    # A flag stays with its value, and a value in quotes in one piece.
    in_pieces = re.sub(
        r"(?<= )--[\w-]+ (?!-)|\"[^\"]*\"|'[^']*'",
        lambda piece: piece[0].replace(" ", NO_BREAK),
        command,
    )
    indent = command[: len(command) - len(command.lstrip())]
    pieces = textwrap.wrap(
        in_pieces,
        width - 2,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(pieces).replace(NO_BREAK, " ")


def first_clause(text: str) -> str:
    """Returns the beginning of a help text, and the default at its end, if it is short."""
    match = re.fullmatch(r"(.*?)( \(default: [^ )]{1,12}\))?", text, re.DOTALL)
    assert match is not None  # it matches every text
    clause, default = match.groups(default="")
    return re.split(r"[;:] | \(", clause, maxsplit=1)[0] + default


def _first_examples(block: str) -> str:
    """Returns a block of examples with the first few of them."""
    lines: list[str] = []
    count = 0
    for line in block.splitlines():
        # Further lines of an example are indented more.
        count += bool(re.match(" {2}[^ ]", line))
        if count <= SHORT_EXAMPLES:
            lines.append(line)
    return "\n".join(lines)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help in which a flag is not broken at its hyphens: "--hang-" is no flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        line = " ".join(text.split())
        return textwrap.wrap(
            line, width, break_long_words=False, break_on_hyphens=False
        )


class _NumberOrRange(argparse.Action):
    """Stores a number, or both ends of a range MIN-MAX; see `Option.lower`."""

    def __init__(self, lower: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._lower = lower

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, *_: Any
    ) -> None:
        least = None
        ends = re.fullmatch("([0-9]+)-([0-9]+)", value)
        if ends is not None:
            least = int(ends[1])
            most = int(ends[2])
            self._check_range(least, most)
        elif re.fullmatch("[+-]?[0-9]+", value):
            most = int(value)
        else:
            problem = f"{value!r} is neither a whole number nor a range such as 2-8"
            raise argparse.ArgumentError(self, problem)
        # Typed again as a number alone, it is no range any more.
        is_again = self.dest in namespace and self._lower in namespace
        setattr(namespace, self.dest, most)
        if least is not None or is_again:
            setattr(namespace, self._lower, least)

    def _check_range(self, least: int, most: int) -> None:
        """Raises UsageError where the first number is not the smaller one, or is 0."""
        flag = self.option_strings[0]
        if least >= most:
            problem = f"{flag} {least}-{most} is no range from fewer to more"
        elif least == 0:
            problem = f"{flag} {least}-{most}: a range begins with 1 or more"
        else:
            return
        fewer, more = sorted((max(1, least), max(1, most)))
        cure = f"{flag} {fewer}-{more}"
        if fewer == more:
            cure = f"{flag} {more}"
        raise UsageError(problem, f"did you mean {cure}?")


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        parser.shows_all = True
        parser.print_help()
        parser.exit()


class Part(NamedTuple):
    """A part of a command, such as `run` of `slurmft study run`."""

    parser: Callable[[], Parser]
    main: Callable[[list[str]], int]


def run_part(
    command: str, parts: Mapping[str, Part], argv: list[str], description: str
) -> int:
    """Runs the part of a command that the first argument names."""
    names = list(parts)
    if not argv:
        parts_list = ", ".join(names)
        hint = f"{parts_list}; see {command} --help"
        raise UsageError(f"{command}: which command?", hint)
    name = argv[0]
    if name in parts:
        part = parts[name]
        return part.main(argv[1:])
    if name in ("-h", "--help", "--help-all"):
        print(f"usage: {command} {{{','.join(names)}}} ...\n")
        print(wrapped(description))
        return Exit.OK
    raise unknown(f"{command} command", name, names)


def _heading(extension: type[Any]) -> str:
    """Returns the heading of a plug-in's options: the first line of their class's docstring."""
    first_line, _, _ = inspect.cleandoc(extension.__doc__ or "").partition("\n")
    return first_line.rstrip(".")


def _argument(option: Option) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for an option."""
    text = option.help.replace("%", "%%")  # argparse formats the help with %
    if option.default not in (None, "", (), False):
        text += f" (default: {option.default})"
    # Absent flags leave no attribute: the site file's value comes before the default.
    argument: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if option.value_type is bool:
        return argument | {"action": argparse.BooleanOptionalAction}
    if option.is_repeatable:
        argument["action"] = "append"
    argument["type"] = _TYPES.get(option.value_type, option.value_type)
    if option.texts:
        argument["type"] = _number_or_text(option)
    if option.path == "input":  # --on finds the files to send by this type
        argument["type"] = input_path
    choices = "|".join(option.choices)
    argument["metavar"] = option.metavar or choices or option.placeholder
    return argument


def _range_argument(option: Option, only: Collection[str] | None) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for an option that may be a range; where a command
    has not the option of the lower end, for a number."""
    if only is not None and option.lower not in only:
        return {"metavar": option.placeholder}
    return {"action": _NumberOrRange, "lower": option.lower, "type": str}


def _number_or_text(option: Option) -> Callable[[str], Any]:
    """Returns what reads an option of numbers that has texts as values, too."""
    number_of = _TYPES[option.value_type]

    def read(text: str) -> Any:
        if option.is_text(text):
            return text
        try:
            return number_of(text)
        except argparse.ArgumentTypeError as error:
            others = " or ".join(option.texts)
            raise argparse.ArgumentTypeError(f"{error}, or {others}") from None

    return read


def typed_options(
    arguments: argparse.Namespace, names: Iterable[str]
) -> dict[str, Any]:
    """Returns those of the named options that the command line has, repeatable ones as tuples."""
    names = set(names)
    values = {}
    for name, value in vars(arguments).items():
        # Configurations are frozen: a list in one could still be changed.
        if isinstance(value, list):
            value = tuple(value)
        if name in names:
            values[name] = value
    return values


def print_json(value: Any) -> int:
    """Prints what --json asks for; returns the exit code."""
    print(to_json(value, indent=2))
    return Exit.OK


def input_path(text: str) -> str:
    """The type of an argument that names a file or folder to read: --on sends it along."""
    return text


def input_file(text: str) -> str:
    """The type of an argument that names a file to read; a folder of that name is not sent along by
    --on: it is there."""
    return text


# The types of numbers. Not int and float alone, which take "1_000", " 1" and digits of any script,
# float also "nan" and "inf".


def integer(text: str) -> int:
    """The type of an argument that is a whole number, within bounds that its option declares."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def number(text: str) -> float:
    """The type of an argument that is a number, within bounds that its option declares."""
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)


_TYPES: dict[type[Any], Callable[[str], Any]] = {int: integer, float: number}
"""Types of options -> what reads them from the command line; others read themselves."""


def count(text: str) -> int:
    """The type of an argument that counts something."""
    if not re.fullmatch("[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def whole(text: str) -> int:
    """The type of an argument that counts something of which there may be none."""
    if not re.fullmatch("[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def above_zero(text: str) -> float:
    """The type of an argument that measures something."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number above 0, without a unit"
        )
    return float(text)


def confirmed(question: str) -> bool:
    """Asks the user; returns whether they agree."""
    # Without a terminal, nobody answers: a script must say --yes, and not hang.
    if not sys.stdin.isatty():
        raise UsageError(
            f"nothing was done: there is no terminal to ask: {question}",
            "add --yes or --dry-run",
        )
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:  # Ctrl-D
        return False
    return answer.strip().lower() in ("y", "yes")
