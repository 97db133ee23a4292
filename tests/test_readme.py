"""The README tells the truth: its commands are run as they stand, by the rules of tests/readme.py.

Those that want a Slurm are in test_readme_slurm.py.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.cli import completion, prepare
from slurmft.cli.parser import parser_of
from slurmft.core import site
from slurmft.studies import spec
from slurmft.train.configure import OPTIONS
from tests import readme, readme_world
from tests.conftest import Done
from tests.readme import LOGIN, RULES, Command, filled
from tests.readme_world import World
from tests.support import CHECKOUT
from tests.support.cluster.__main__ import parser as cluster_parser
from tests.support.hub import Hub

COMMANDS_THERE = readme.commands()
OURS = re.compile(r"(\bslurmft(?= )|-m slurmft\.submit\b|-m tests\.cluster\b|\.sbatch\b)")
"""Where a command of ours begins; its arguments follow."""

FLAG = r"(?<![\w-])--[a-z][\w-]*"
OF_OTHERS = {
    "--signal": "sbatch",
    "--dependency": "sbatch",
    "--slurm": "the tests",
}
"""Flags in inline code that are not slurmft's, and whose they are."""


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path
) -> Iterator[World]:
    """A folder with runs and a study, without Slurm; a hub takes what is pushed."""
    made = readme_world.make(tmp_path_factory.mktemp("readme") / "login", tiny_model, tiny_data)
    made = readme_world.without_slurm(made)
    readme_world.write_runs(made, tiny_model)
    for file in made.folder.glob("*.toml"):
        if readme.study_name(file.read_text()):
            readme_world.write_study(made, file.name)
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
        timeout=120,
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
    monkeypatch.setattr(readme, "TEXT", markdown)
    assert [c.text for c in readme.commands()] == found


# --- what needs no cluster ------------------------------------------------------------------------


def test_bash_reads_all_commands() -> None:
    for command in COMMANDS_THERE:
        done = subprocess.run(
            ["bash", "-n", "-c", command.text], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command.text, done.stderr)


@pytest.mark.parametrize("command", [c for c in COMMANDS_THERE if OURS.search(c.text)], ids=str)
def test_flags_are_known(command: Command) -> None:
    """Also of commands that are not run here."""
    text = re.sub(r' > .*|\)"$', "", command.as_run)
    _, ours, arguments = OURS.split(text, maxsplit=1)
    words = shlex.split(filled(arguments, {"RUN": "last"}))
    if "--help" in words:
        return
    if ours.endswith("cluster"):
        assert cluster_parser().parse_args(words)
    elif ours.endswith("sbatch"):
        prepare.refuse_sbatch_options(words)
        assert prepare.parser().parse(words)
    else:
        words = words if ours == "slurmft" else ["submit", *words]
        assert parse(words[0], words[1:])


def test_flags_in_the_text_are_known() -> None:
    """Those that stand alone in inline code, too."""
    ours = set(re.findall(FLAG, completion.script("bash")))
    named = set(re.findall(FLAG, " ".join(readme.inline())))
    assert named - ours == OF_OTHERS.keys()


def parse(command: str, words: list[str]) -> argparse.Namespace:
    """By the command's own parser."""
    module = importlib.import_module(f"slurmft.cli.{command}")
    part = [word for word in words[:1] if word in getattr(module, "COMMANDS", {})]
    main = module.main
    parser = None if command == "completion" else parser_of(main, part)
    return parser.parse(words[len(part) :]) if parser else argparse.Namespace(words=words)


@pytest.mark.parametrize("command", readme.tested(LOGIN), ids=str)
def test_command(command: Command, world: World) -> None:
    path = world.env["PATH"]
    if "--dry-run" in command.as_run:
        path = f"{world.folder}/bin/dry:{path}"
    done = run(world, *world.command(command.as_run), env={"PATH": path})
    assert done.code == 0, f"$ {command.as_run}\n{done.out}\n{done.err}"
    assert "Traceback" not in done.err
    if re.search(r"(submit|study run) .*--dry-run", command.as_run):
        assert "nothing was submitted" in done.out


# --- blocks in other languages --------------------------------------------------------------------


@pytest.mark.parametrize("block", readme.blocks("toml"))
def test_toml(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a study file, all keys are those of a study; of a site file, all are options."""
    (tmp_path / "file.toml").write_text(block)
    if readme.study_name(block):
        assert spec.read(str(tmp_path / "file.toml")).cells
    else:
        monkeypatch.setenv("SLURMFT_SITE", str(tmp_path / "file.toml"))
        assert site.site_defaults(OPTIONS).keys() == tomllib.loads(block).keys()


@pytest.mark.parametrize("block", readme.blocks("python"))
def test_python(block: str, world: World) -> None:
    """Without Slurm, on one simulated node: more of them on two cores only take their time."""
    place = readme_world.SITE + f'model = "{world.folder}/gpfs/models/distilbert-base-uncased"\n'
    (world.folder / "python.toml").write_text(place + f'data = "{world.folder}/gpfs/emotion"\n')
    env = {"SLURMFT_SITE": str(world.folder / "python.toml")}
    script = re.sub(r"\bnodes=4\b", "nodes=1", block)
    done = run(world, "python", "-c", script, env=env)
    assert done.code == 0, done.err
    assert "accuracy" in done.out or "'label': " in done.out


def test_pip() -> None:
    """What pip is told to install, and the file of versions, are there."""
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"pip install [^`&\n]*\[([a-z]+)\]", readme.TEXT)
    assert named
    assert set(named) <= extras["optional-dependencies"].keys()
    for file in re.findall(r"pip install [^`&\n]*-c (\S+)", readme.TEXT):
        assert (CHECKOUT / file).exists()


def test_links() -> None:
    """Files and headings that it links to are there."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", readme.TEXT), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", readme.TEXT):
        file, _, anchor = target.partition("#")
        assert (CHECKOUT / file).exists(), target
        assert file or anchor in anchors, target


def test_ci_runs_the_test_command() -> None:
    """.ci/run takes it from the README."""
    pattern = re.search(r"sed -n '/(.+)/p' README.md", (CHECKOUT / ".ci/run").read_text())
    assert pattern
    lines = [x for x in readme.TEXT.splitlines() if re.search(pattern[1], x)]
    assert len(lines) == 1
