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
    command.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS), help="your shell")
    return command


def main(argv: list[str]) -> int:
    print(script(parser().parse(argv).shell))
    return Exit.OK


def script(shell: str) -> str:
    """Returns the completion script for a shell."""
    import shtab  # a tenth of a second: no other command needs it

    # The function that completes names of runs: shtab has none for that.
    preamble = Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")
    runs_dir = shlex.quote(str(site.job_default("runs_dir")))
    preamble = preamble.replace("RUNS_DIR/", f"{runs_dir}/")
    return str(shtab.complete(whole_parser(), shell, preamble=preamble))


def whole_parser() -> argparse.ArgumentParser:
    """Returns one parser of all commands, which knows what values their arguments take."""
    import shtab

    root = argparse.ArgumentParser(prog="slurmft")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, entry in sorted(plugins.entries(plugins.COMMANDS).items()):
        try:
            module = entry.load()
        except plugins.PluginError as error:  # the other commands can be completed
            print(f"warning: {error.message}", file=sys.stderr)
            continue
        command_parser = module.parser() if hasattr(module, "parser") else None
        command = _add(commands, name, entry.summary(), command_parser)
        parts = getattr(module, "PARTS", {})
        if parts:
            below = command.add_subparsers(parser_class=argparse.ArgumentParser)
            for part_name, part in parts.items():
                _add(below, part_name, f"slurmft {name} {part_name}", part.parser())
    options = site.all_options()
    for action in _all_actions(root):
        _explain(action, options, shtab.FILE, shtab.DIRECTORY)
    return root


def _add(commands: Any, name: str, text: str, parser: Parser | None) -> Any:
    parents = [] if parser is None else [parser]
    text = text.replace("%", "%%")
    return commands.add_parser(name, parents=parents, add_help=parser is None, help=text)


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _all_actions(below)


def _explain(
    action: Any, options: Mapping[str, Option], file: dict[str, str], folder: dict[str, str]
) -> None:
    """Adds what values an argument takes, where its parser leaves that to later checks."""
    action.help = re.sub(r"\s+", " ", action.help or "")
    if action.dest in _NAMES:
        action.choices = tuple(plugins.entries(_NAMES[action.dest]))
    elif action.dest in options and options[action.dest].choices:
        action.choices = options[action.dest].choices
    if action.choices or action.nargs == 0:
        return
    metavar = str(action.metavar or action.dest).upper()
    if not action.option_strings and metavar.startswith("RUN"):
        action.complete = dict.fromkeys(SHELLS, "_slurmft_runs")
    elif metavar == "DIR":
        action.complete = folder
    elif metavar in ("FILE", "PATH", "SOURCE") or not action.option_strings:
        action.complete = file
