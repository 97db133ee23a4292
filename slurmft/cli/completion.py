"""Prints a script for TAB completion in bash or zsh. The script completes commands, flags, choices
and runs, and starts no Python.

examples:
  bash:  slurmft completion bash > ~/.local/share/bash-completion/completions/slurmft
  zsh:   slurmft completion zsh > ~/.zfunc/_slurmft      # a folder in $fpath, before compinit
Again after an update of slurmft.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser
from slurmft.core import plugins, site
from slurmft.core.errors import Exit
from slurmft.core.options import Option

ELSEWHERE = Elsewhere.HERE

SHELLS = ("bash", "zsh")
_NAMES = {"cluster": plugins.LAUNCHERS, "task": plugins.TASKS}
"""Options whose values are the names of plug-ins. There may be others, which TAB cannot know."""


def parser() -> Parser:
    command = Parser("slurmft completion", __doc__)
    command.add_argument(
        "shell", choices=SHELLS, metavar="|".join(SHELLS), help="your shell"
    )
    return command


def main(argv: list[str]) -> int:
    print(script(parser().parse(argv).shell))
    return Exit.OK


def script(shell: str) -> str:
    """Returns the completion script for a shell."""
    import shtab  # a tenth of a second: no other command needs it

    # The function that completes names of runs: shtab has none for that.
    preamble = Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")
    # The shell reads no site file: the folder is written into the script.
    runs_dir = shlex.quote(str(site.job_default("runs_dir")))
    preamble = preamble.replace("RUNS_DIR/", f"{runs_dir}/")
    return str(shtab.complete(whole_parser(), shell, preamble=preamble))


def whole_parser() -> argparse.ArgumentParser:
    """Returns one parser of all commands, which knows what values their arguments take."""
    root = argparse.ArgumentParser(prog="slurmft")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, entry in sorted(plugins.entries(plugins.COMMANDS).items()):
        try:
            module = entry.load()
        except plugins.PluginError as error:  # the other commands can be completed
            print(f"warning: {error.message}", file=sys.stderr)
            continue
        # A command of parts, such as `study`, has a parser for each part alone.
        command_parser = None
        if hasattr(module, "parser"):
            command_parser = module.parser()
        command = _add(commands, name, entry.summary(), command_parser)
        parts = getattr(module, "PARTS", {})
        if parts:
            below = command.add_subparsers(parser_class=argparse.ArgumentParser)
            for part_name, part in parts.items():
                text = f"slurmft {name} {part_name}"
                _add(below, part_name, text, part.parser())
    options = site.all_options()
    for action in _all_actions(root):
        _explain(action, options)
    return root


def _add(commands: Any, name: str, text: str, parser: Parser | None) -> Any:
    text = text.replace("%", "%%")  # argparse formats the help with %
    if parser is None:
        return commands.add_parser(name, help=text)
    # The parent has a --help of its own, and a flag may be there only once.
    return commands.add_parser(name, parents=[parser], add_help=False, help=text)


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _all_actions(below)


def _explain(action: Any, options: Mapping[str, Option]) -> None:
    """Adds what values an argument takes, where its parser leaves that to later checks."""
    # zsh shows the help beside the flag, in one line.
    action.help = re.sub(r"\s+", " ", action.help or "")
    name = action.dest
    if name in _NAMES:
        group = _NAMES[name]
        action.choices = tuple(plugins.entries(group))
    elif name in options and options[name].choices:
        # argparse does not know the choices: the option's own check has a better message.
        action.choices = options[name].choices
    # Nothing more to explain: its values are known, or it takes none.
    if action.choices or action.nargs == 0:
        return
    is_positional = not action.option_strings
    metavar = str(action.metavar or name).upper()
    if is_positional and metavar.startswith("RUN"):
        action.complete = dict.fromkeys(SHELLS, "_slurmft_runs")
    elif metavar == "DIR":
        action.complete = dict.fromkeys(SHELLS, "_slurmft_dirs")
    elif metavar in ("FILE", "PATH", "SOURCE") or is_positional:
        action.complete = dict.fromkeys(SHELLS, "_slurmft_files")
