"""The commands of the documentation, and what the tests do with each of them.

A command is found by what it is, not by where it stands. One that no rule fits fails the tests, as
does a rule without a command: a new kind of command needs a new rule in RULES.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from enum import Enum

from tests.docs import pages

_TYPED = re.compile(r"(slurmft|python -m|pip install|bash|pytest) ")
"""How inline code begins that is a command."""


class How(Enum):
    """What is done with a command."""

    LOGIN = "run where there is no Slurm"
    CLUSTER = "run on the tests' Slurm"
    READ = "bash reads it, and slurmft its flags; nothing is run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What is done with the commands that begin with a pattern. The first rule that fits counts."""

    begins: str
    how: How
    add: str = ""
    """Is added at the end, or before the user's program, unless the command has it."""
    leave_out: str = ""
    """A pattern; what it fits is left out."""
    waits: bool = False
    """`last` is a job that waits in the queue; else a finished run."""
    why: str = ""
    """Why the command is not run as it stands; only what is needs no reason."""

    def __post_init__(self) -> None:
        as_it_stands = self.how is not How.READ and not self.add and not self.leave_out
        assert as_it_stands or self.why, f"{self.begins}: say why"

    def fits(self, command: str) -> bool:
        return re.match(self.begins, command) is not None

    def applied(self, command: str) -> str:
        """The command as it is run."""
        shorter = re.sub(self.leave_out, "", command) if self.leave_out else command
        if self.add in shorter:
            return shorter
        ours, dashes, program = shorter.partition(" -- ")
        return f"{ours} {self.add}{dashes}{program}"


LOGIN, CLUSTER, READ = How

_SUBMIT = r"(slurmft submit|\S+ -m slurmft\.submit)"

MERE_NAME = Rule(
    begins="slurmft (cancel|completion|data|fetch|follow|logs|plan|predict|pull|push"
    "|render|report|resume|run|submit|watch|doctor node|study( run| status| cancel)?)$",
    how=READ,
    why="inline code that only names a command, of which more must be said",
)

RULES = (
    MERE_NAME,
    Rule(
        begins=r"slurmft .*--on |ssh ",
        how=READ,
        why="no cluster of that name here: tests/plugins/remote has a real sshd",
    ),
    Rule(
        begins="slurmft list --runs-dir /scratch$",
        how=LOGIN,
        leave_out=" --runs-dir /scratch",
        why="a file system of the site's",
    ),
    # Of others.
    Rule(begins="python3 -m venv ", how=READ, why=".ci/run makes an environment so"),
    Rule(
        begins=r"(\S+/)?pip install |(apptainer|docker|hf|kubectl|mlflow|tensorboard|wandb) ",
        how=READ,
        why="somebody else's; of pip, test_pip checks what it is told",
    ),
    Rule(begins="git tag |uv build$", how=READ, why="test_installed builds from a tag"),
    Rule(
        begins="mkdocs serve$",
        how=READ,
        why="serves until it is stopped; .ci/run builds the site",
    ),
    Rule(
        begins=r"(\S+ -m )?pytest ",
        how=READ,
        why="that is these tests: .ci/run calls them so",
    ),
    Rule(
        begins="(ruff|mypy|lint-imports)( |$)",
        how=READ,
        why=".ci/run calls the lints with the tests",
    ),
    Rule(
        begins=r"bash \.ci/",
        how=READ,
        why="installs for minutes, then calls these tests",
    ),
    Rule(
        begins="mkdir /gpfs/proj42/hf|chgrp |chmod ",
        how=READ,
        why="no such group here; test_shared_caches makes one",
    ),
    Rule(begins="(mkdir|export|unset|head) ", how=LOGIN),
    Rule(begins="source ", how=READ, why="of the environment that these tests run in"),
    Rule(begins="(sinfo|squeue|sacct|scontrol show)( |$)", how=CLUSTER),
    Rule(
        begins="python docs/draw_",
        how=READ,
        why="writes a file; test_drawing_is_true checks it",
    ),
    Rule(
        begins=r"python -m tests\.lab(\.nodes)? ",
        how=READ,
        why="sets up file systems for minutes",
    ),
    Rule(
        begins=r"python -m tests\.support\.faults_found", how=READ, why="takes an hour"
    ),
    # The tests' cluster.
    Rule(
        begins=r"python -m tests\.support\.cluster ",
        how=READ,
        why="the tests have the cluster up",
    ),
    Rule(begins=r'eval "\$\(python -m tests\.support\.cluster env\)"', how=CLUSTER),
    # Submitting.
    Rule(
        begins=f"{_SUBMIT} .*(--partition gpu|--nodes 64|--container|--interface|--host-suffix)",
        how=LOGIN,
        add="--dry-run",
        why="no GPUs, 64 nodes, second network, Apptainer or Pyxis here",
    ),
    Rule(
        begins=f"{_SUBMIT} .*--notify file",
        how=READ,
        why="test_notification has such a file",
    ),
    Rule(
        begins=f"{_SUBMIT} .*--cluster mpirun ",
        how=LOGIN,
        add="--dry-run",
        why="eight ranks on four hosts: test_mpirun starts two",
    ),
    Rule(begins=f"{_SUBMIT} .*--cluster local ", how=LOGIN),
    Rule(begins=f"{_SUBMIT} --nodes 2 --time 10 --follow$", how=CLUSTER),
    Rule(
        begins=_SUBMIT,
        how=LOGIN,
        add="--dry-run",
        why="much like the one before, which is run",
    ),
    Rule(begins="slurmft run -- PROGRAM", how=READ, why="a word for any program"),
    Rule(
        begins="slurmft run .*(--accelerate-config FILE|run_glue.py)",
        how=READ,
        why="a word for any file; test_own_program and test_integrations run such",
    ),
    Rule(
        begins="slurmft run .*--env uv",
        how=READ,
        why="test_own_environment makes one by uv",
    ),
    Rule(
        begins="slurmft run ",
        how=LOGIN,
        add="--dry-run",
        why="test_own_program runs such",
    ),
    Rule(
        begins="sbatch ",
        how=CLUSTER,
        leave_out=" --gpus-per-node=4",
        add="--model /gpfs/models/distilbert-base-uncased",
        why="no GPUs here, and no hub",
    ),
    Rule(
        begins="slurmft predict ",
        how=READ,
        why="test_predict runs such, on a trained model",
    ),
    Rule(begins="slurmft data (DIR|all.csv)", how=READ, why="a word for any folder"),
    Rule(begins="slurmft data ", how=LOGIN),
    # Living with runs.
    Rule(begins="slurmft (cancel |resume |status last)", how=CLUSTER, waits=True),
    Rule(begins="slurmft follow ", how=CLUSTER),
    Rule(
        begins="slurmft clean",
        how=LOGIN,
        add="--dry-run",
        why="it asks, and there is nobody to answer",
    ),
    Rule(
        begins="slurmft plan ",
        how=READ,
        why="the runs here are of several kinds: test_planner",
    ),
    Rule(
        begins="slurmft status nobody",
        how=READ,
        why="an error, which test_schema prints",
    ),
    Rule(begins="slurmft (list|status|watch|logs|report|completion)", how=LOGIN),
    Rule(begins="slurmft schema COMMAND", how=READ, why="a word for any command"),
    Rule(begins="slurmft (help|schema)( |$)", how=LOGIN),
    Rule(begins="slurmft study (status|cancel) ", how=LOGIN),
    Rule(
        begins="slurmft study run ",
        how=LOGIN,
        add="--dry-run",
        why="18 runs on GPUs; test_study and test_slurm_studies run small ones",
    ),
    # Is the cluster well?
    Rule(
        begins="slurmft doctor .*--partition gpu",
        how=READ,
        why="no such partition here",
    ),
    Rule(
        begins="slurmft doctor .*--backend ccl",
        how=READ,
        why="oneCCL's binding is not installed here; .ci/xeon tests with it",
    ),
    Rule(begins="slurmft doctor --nodes 2$", how=READ, why="with --output, it is run"),
    Rule(
        begins=r"(salloc .*)?slurmft doctor(?! locks| node).*--nodes|salloc .*doctor$",
        how=CLUSTER,
        add="--quick",
        why="torch on four nodes takes half a minute: test_doctor does that",
    ),
    Rule(
        begins="slurmft doctor locks DIR",
        how=READ,
        why="six seconds; it stands there with a folder, too",
    ),
    Rule(begins="slurmft doctor", how=CLUSTER),
    # Models, manifests, locks.
    Rule(
        begins="slurmft fetch ",
        how=READ,
        why="no hub here; test_hub fetches from a stand-in",
    ),
    Rule(begins="slurmft push ", how=LOGIN),
    Rule(begins="slurmft examples", how=LOGIN),
    Rule(begins="slurmft render ", how=LOGIN),
    Rule(begins=r"(python|torchrun .*) -m slurmft\.locks run ", how=LOGIN),
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as it stands in the documentation."""

    text: str
    rule: Rule | None
    """None: no rule fits."""

    def __str__(self) -> str:
        return self.text

    @property
    def as_run(self) -> str:
        assert self.rule is not None
        return self.rule.applied(self.text)


def commands() -> list[Command]:
    """All commands, each once: of blocks to type, of outputs, and whole ones within the text."""
    typed = [
        part
        for block in pages.blocks("sh")
        for line in pages.lines(block)
        for part in pages.parts(line)
    ]
    shown = [
        line[2:]
        for block in pages.blocks("")
        for line in pages.lines(block)
        if line.startswith("$ ")
    ]
    within = [
        code
        for text in pages.texts()
        for code in pages.inline(text)
        if _TYPED.match(code)
    ]
    return [
        Command(text, _rule_of(text))
        for text in dict.fromkeys([*typed, *shown, *within])
    ]


def study_name(toml: str) -> str | None:
    """The name in a study file; None: it is no study file."""
    found = tomllib.loads(toml)
    return str(found["name"]) if "grid" in found or "cells" in found else None


def tested(how: How) -> list[Command]:
    """The commands with which this is done."""
    return [c for c in commands() if c.rule is not None and c.rule.how is how]


def _rule_of(command: str) -> Rule | None:
    return next((rule for rule in RULES if rule.fits(command)), None)


def filled(command: str, values: dict[str, str]) -> str:
    """The command with values in place of words in capitals (RUN, also [RUN]), and of `/gpfs`."""
    for name, value in values.items():
        word = re.escape(name) if name.startswith("/") else rf"\[?\b{name}\b\]?"
        command = re.sub(word, value.replace("\\", r"\\"), command)
    return command
