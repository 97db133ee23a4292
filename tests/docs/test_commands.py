"""The commands of README.md and docs/*.md are run as they stand, by the rules of rules.py.

Those that want a Slurm are in test_commands_slurm.py.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.cli import completion, foreign_flags, help_pages
from slurmft.cli.commands import load_command
from slurmft.cli.parser import Parser
from slurmft.core import shipped
from slurmft.train.commands import prepare, submit
from tests.conftest import Done
from tests.docs import pages, rules
from tests.docs import world as worlds
from tests.docs.rules import LOGIN, MERE_NAME, RULES, Command, filled
from tests.docs.world import World
from tests.support import PATIENCE_S
from tests.support.cluster.__main__ import parser as cluster_parser
from tests.support.hub import Hub

COMMANDS_THERE = rules.commands()
OURS = re.compile(
    r"(\bslurmft(?= )|-m slurmft\.submit\b|-m tests\.support\.cluster\b|\.sbatch\b)"
)
"""Where a command of ours begins; its arguments follow."""

FLAG = r"(?<![\w-])--[a-z][\w-]*"
OF_OTHERS = {
    "--signal": "sbatch",
    "--no-kill": "sbatch",
    "--dependency": "sbatch",
    "--nnodes": "torchrun",
    "--mpi": "srun",
    "--container-image": "srun",
    "--write-fake": "ch-run",
    "--nvidia": "ch-fromhost",
    "--config_file": "accelerate",
    "--frozen": "uv",
    "--save_steps": "Trainer",
    "--init_from": "nanoGPT",
    "--resume": "many programs",
    "--slurm": "the tests",
    "--lab": "the tests",
    "--extra": "the tests",
    "--each": "the search for faults",
    "--index-url": "pip",
}
"""Flags in inline code that are not slurmft's, and whose they are."""


MODULE = '"""'
"""How a block begins that is a module, as of a task or a launcher: they have their own tests."""


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path
) -> Iterator[World]:
    """A folder with runs and a study, without Slurm; a hub takes what is pushed."""
    made = worlds.make(tmp_path_factory.mktemp("docs") / "login", tiny_model, tiny_data)
    made = worlds.without_slurm(made)
    worlds.write_runs(made, tiny_model)
    for file in made.folder.glob("*.toml"):
        if rules.study_name(file.read_text()):
            worlds.write_study(made, file.name)
    with Hub(tiny_model) as hub:
        made.env.update(HF_ENDPOINT=hub.url(), HF_TOKEN="hf_" + "x1" * 17)
        yield made


def run(world: World, *command: str, env: dict[str, str] | None = None) -> Done:
    """Runs a command in the world's folder; nobody answers its questions."""
    done = subprocess.run(
        command,
        cwd=world.folder,
        env={"LANG": "C.UTF-8", "TMPDIR": str(world.folder)} | world.env | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


# --- every command has its rule -------------------------------------------------------------------


def test_every_command_has_a_rule() -> None:
    assert not [c.text for c in COMMANDS_THERE if c.rule is None]


def test_every_rule_has_a_command() -> None:
    used = [c.rule for c in COMMANDS_THERE]
    assert not [rule.begins for rule in RULES if rule not in used]


@pytest.mark.parametrize(
    ("markdown", "found"),
    [
        ("```sh\na \\\n   --b   # c\n# d\n\ne && f; g\n```", ["a --b", "e", "f", "g"]),
        ("```\n$ slurmft list\nrun job\n```\n", ["slurmft list"]),
        ("`slurmft\n  list`, `slurmft`, `--nodes 2`", ["slurmft list"]),
        ("```toml\n[slurmft list]\n```\n", []),
    ],
)
def test_commands_are_found(
    markdown: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGES", {Path("page.md"): markdown})
    assert [c.text for c in rules.commands()] == found


# --- what needs no cluster ------------------------------------------------------------------------


@pytest.mark.processes
def test_bash_reads_all_commands() -> None:
    script = "\n".join(command.text for command in COMMANDS_THERE)
    done = subprocess.run(
        ["bash", "-n", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS_THERE if OURS.search(c.text)], ids=str
)
def test_flags_are_known(command: Command) -> None:
    """Also of commands that are not run here."""
    text = re.sub(r' > .*|\)"$', "", command.as_run)
    _, ours, arguments = OURS.split(text, maxsplit=1)
    words = shlex.split(filled(arguments, {"RUN": "last"}))
    # the rest is the program's
    words = words[: words.index("--")] if "--" in words else words
    if command.rule is MERE_NAME:
        module = load_command(words[0])
        assert all(part in module.PARTS for part in words[1:])
    elif ours.endswith("cluster"):
        assert cluster_parser().parse_args(words)
    elif ours.endswith("sbatch"):
        prepare.refuse_sbatch_options(words)
        assert prepare.parser().parse(words)
    elif words[0] == "help":
        assert words[1] in {help_pages.LIST, *(page.stem for page in shipped.pages())}
    else:
        words = words if ours == "slurmft" else ["submit", *words]
        # then a program's own
        words = words[: words.index("--")] if "--" in words else words
        assert parse(words[0], words[1:])


def test_flags_in_the_text_are_known() -> None:
    """Those that stand alone in inline code, too."""
    ours = set(re.findall(FLAG, completion.script("bash")))
    code = [code for text in pages.texts() for code in pages.inline(text)]
    named = set(re.findall(FLAG, " ".join(code)))
    # Those that are answered where somebody types them by habit.
    habits = foreign_flags.SENTENCES.keys() | foreign_flags.OF_SBATCH
    answered = {f"--{name}" for name in habits}
    for option in submit.parser().options.values():
        answered |= {f"--{name}" for name in option.elsewhere}
    # Trainer's have underscores where ours have hyphens, and sbatch's the reverse.
    answered |= {name for name in named if name.replace("_", "-") in ours}
    answered |= {name.replace("_", "-") for name in answered}
    assert named - ours - answered == OF_OTHERS.keys() - answered


def parse(command: str, words: list[str]) -> argparse.Namespace:
    """By the command's own parser."""
    module = load_command(command)
    part = getattr(module, "PARTS", {}).get(words[0] if words else "")
    parser: Parser = part.parser() if part else module.parser()
    return parser.parse(words[1:] if part else words)


@pytest.mark.extra("docs")
@pytest.mark.parametrize("command", rules.tested(LOGIN), ids=str)
def test_command(command: Command, world: World) -> None:
    path = world.env["PATH"]
    if "--dry-run" in command.as_run:
        path = f"{world.folder}/bin/dry:{path}"
    done = run(world, *world.command(command.as_run), env={"PATH": path})
    assert done.code == 0, f"$ {command.as_run}\n{done.out}\n{done.err}"
    assert "Traceback" not in done.err
    if re.search(r"(submit|study run) .*--dry-run", command.as_run):
        assert "nothing was submitted" in done.out


@pytest.mark.extra("docs")
@pytest.mark.parametrize(
    "block",
    [text for text in pages.blocks("python") if not text.startswith(MODULE)],
)
def test_python(block: str, world: World) -> None:
    """Without Slurm, on one simulated node: more of them on two cores only take their time."""
    place = (
        worlds.SITE + f'model = "{world.folder}/gpfs/models/distilbert-base-uncased"\n'
    )
    (world.folder / "python.toml").write_text(
        place + f'data = "{world.folder}/gpfs/emotion"\n'
    )
    env = {"SLURMFT_SITE": str(world.folder / "python.toml")}
    script = re.sub(r"\bnodes=4\b", "nodes=1", block)
    done = run(world, "python", "-c", script, env=env)
    assert done.code == 0, done.err
    # The program of a job prints nothing here.
    assert done.out.strip() or "not in a job" in done.err
