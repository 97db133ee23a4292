"""Flags of other tools: the error says what they are called here."""

import re
from pathlib import Path

import pytest

from slurmft.api import checked_options
from slurmft.cli import foreign_commands, foreign_flags, parser, run
from slurmft.cli import list as list_command
from slurmft.cli.commands import command_parser, load_command
from slurmft.core import plugins
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError, unknown
from slurmft.core.options import named_elsewhere
from slurmft.core.site import typed_values
from slurmft.train.commands import submit


def flags_of(command: parser.Parser) -> set[str]:
    return {flag for action in command.arguments() for flag in action.option_strings}


SUBMIT = flags_of(submit.parser())
OPTIONS = submit.parser().options
ELSEWHERE = [
    (name, option.flag) for option in OPTIONS.values() for name in option.elsewhere
]


def test_a_name_elsewhere_is_of_one_option() -> None:
    names = [name for name, _ in ELSEWHERE]
    assert len(names) > 80
    assert len(set(names)) == len(names)
    assert set(names).isdisjoint(foreign_flags.SENTENCES)
    assert set(names).issuperset(foreign_flags.VALUES)


@pytest.mark.parametrize(("name", "ours"), ELSEWHERE)
def test_flag_of_another_tool(name: str, ours: str) -> None:
    words = ours
    if value := foreign_flags.VALUES.get(name):
        words = f"{ours} {value}"
        submit.parser().parse([ours, value])  # what is advised is taken
    assert foreign_flags.hint(f"--{name}", OPTIONS) == f"that is {words} here"
    # One that we have ourselves would never be unknown.
    assert "--" + name.replace("_", "-") not in SUBMIT


@pytest.mark.parametrize("name", sorted(foreign_flags.SENTENCES))
def test_flag_without_a_flag_here(name: str) -> None:
    assert "--" + name.replace("_", "-") not in SUBMIT
    assert foreign_flags.hint(f"--{name}", OPTIONS) == foreign_flags.SENTENCES[name]


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--lr", "--learning-rate"),
        ("--lr-scheduler", "--lr-schedule"),
        ("--per_device_train_batch_size", "--batch-size"),
        ("--per-device-train-batch-size=8", "--batch-size"),
        ("--num_train_epochs", "--epochs"),
        ("--output_dir", "--runs-dir"),
        ("--fp16", "that is --precision fp16 here"),
        ("-N", "--nodes"),
        ("-n", "--nodes and --nproc-per-node say how many"),
        ("--resume_from_checkpoint", "slurmft resume"),
    ],
)
def test_submit_answers_a_foreign_flag(typed: str, ours: str) -> None:
    with pytest.raises(UsageError) as error:
        submit.parser().parse([typed, "3"])
    assert ours in str(error.value.hint)


@pytest.mark.parametrize(
    "typed", [*(name for name, _ in ELSEWHERE), *foreign_flags.SENTENCES]
)
def test_command_names_no_flag_that_it_does_not_have(typed: str) -> None:
    """`slurmft run` starts jobs, and trains nothing itself."""
    flags = flags_of(run.parser())
    with pytest.raises(UsageError) as error:
        run.parser().parse([f"--{typed}", "3"])
    # Those of another command are called so.
    hint = re.sub(r"that is --\S+ of slurmft submit", "", str(error.value.hint))
    hint = hint.removesuffix("-- PROGRAM --flag")
    for word in hint.split():
        if word.startswith("--") and word != "--":
            assert word.rstrip("?,;") in flags


@pytest.mark.parametrize(
    ("command", "typed", "hint"),
    [
        ("list", "-n", "that is --newest here"),
        ("list", "--format", "that is --json here"),
        ("logs", "-n", "that is --tail here"),
        ("logs", "-f", "that is --follow here"),
        ("clean", "-y", "that is --yes here"),
        ("predict", "--batch", "that is --eval-batch-size here"),
        ("predict", "--model", "that is --model of slurmft submit; a run keeps its settings"),
        ("resume", "--lr", "that is --learning-rate of slurmft submit; a run keeps its settings"),
        ("submit", "--batch", "that is --batch-size here"),
        ("submit", "--gradient-clip", "that is --max-grad-norm here"),
        ("submit", "-w", "it is sbatch's: --sbatch nodelist=VALUE"),
        ("submit", "--begin", "it is sbatch's: --sbatch begin=VALUE"),
        ("fetch", "--json", "this command prints no JSON; slurmft schema lists those that do"),
        # Of one letter, every short flag is near.
        ("status", "-x", "slurmft status --help-all lists its flags"),
    ],
)  # fmt: skip
def test_flag_by_habit(command: str, typed: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        load_command(command).parser().parse(["last", "rows.csv", typed, "3"])
    assert error.value.hint == hint


def test_options_of_sbatch_are_no_flags() -> None:
    assert {
        f"--{name.replace('_', '-')}" for name in foreign_flags.OF_SBATCH
    }.isdisjoint(SUBMIT)
    names = {name for name, _ in ELSEWHERE} | foreign_flags.SENTENCES.keys()
    assert names.isdisjoint(foreign_flags.OF_SBATCH)
    for name in foreign_flags.OF_SBATCH:
        JobConfig(sbatch=(f"{name.replace('_', '-')}=1",))


def test_script_behind_the_command_of_another_launcher() -> None:
    with pytest.raises(UsageError) as error:
        load_command("torchrun", "--nproc_per_node", "4", "train.py", "--lr", "1")
    assert str(error.value.hint).endswith(": slurmft run -- train.py --lr 1")
    # Behind what means `submit`, a script may be the value of a flag.
    for words, hint in (
        (["train", "--metric", "./f1.py"], "that is slurmft submit here"),
        (["sbatch", "job.sh", "a"], "of your own: slurmft run -- job.sh a"),
    ):
        with pytest.raises(UsageError) as error:
            load_command(*words)
        assert str(error.value.hint).endswith(hint)


@pytest.mark.parametrize("name", sorted(foreign_commands.COMMANDS))
def test_command_of_another_tool(name: str) -> None:
    """Each is answered with a command of ours that exists."""
    ours, *_ = foreign_commands.COMMANDS[name].split()
    commands = plugins.entries(plugins.COMMANDS)
    assert ours in {*commands, "help", "--version"}
    assert name not in commands
    with pytest.raises(UsageError) as error:
        load_command(name)
    assert error.value.hint == f"that is slurmft {foreign_commands.COMMANDS[name]} here"


@pytest.mark.parametrize(
    "words", [["./job.sh"], ["train.py", "--epochs", "3"], ["--", "./job", "-x"]]
)
def test_program_in_submit(words: list[str]) -> None:
    with pytest.raises(UsageError, match="unexpected argument") as error:
        submit.parser().parse(["--nodes", "2", *words])
    line = " ".join(word for word in words if word != "--")
    assert str(error.value.hint).endswith(f": slurmft run -- {line}")


def test_program_as_a_command() -> None:
    with pytest.raises(UsageError, match=r"unknown command 'train\.py'") as error:
        load_command("train.py", "--epochs", "3")
    assert str(error.value.hint).endswith(": slurmft run -- train.py --epochs 3")


@pytest.mark.parametrize("words", [["--", "x"], ["./job.sh"]])
def test_word_that_a_command_has_no_place_for(words: list[str]) -> None:
    with pytest.raises(UsageError, match="unexpected argument") as error:
        list_command.parser().parse(words)
    assert error.value.hint == "see slurmft list --help"


def test_word_that_a_flag_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my mails").mkdir()
    monkeypatch.chdir(tmp_path)
    for command, word, flag in (
        (submit, "emotion", "--task emotion"),
        (submit, "my mails", "--data 'my mails'"),
        # Its --data is part of what the data of a run are called.
        (list_command, "my mails", "--runs-dir 'my mails'"),
    ):
        with pytest.raises(UsageError, match="unexpected argument") as error:
            command.parser().parse([word])
        assert error.value.hint == f"did you mean {flag}?"


def test_what_must_be_typed_is_in_the_hint() -> None:
    for words, hint in (
        (["logs"], "slurmft logs [FLAG ...] RUN; RUN may be last: the newest of yours"),
        (["study", "run"], "slurmft study run [FLAG ...] STUDY"),
    ):
        parser = command_parser(words)
        assert parser is not None
        with pytest.raises(UsageError, match="arguments are required") as error:
            parser.parse([])
        assert error.value.hint == hint


@pytest.mark.parametrize("name", ["lr", "per_device_train_batch_size"])
def test_key_of_another_tool(name: str) -> None:
    """Site files, studies and Python calls know the same names as the command line."""
    ours = named_elsewhere(name, OPTIONS)
    assert ours is not None
    with pytest.raises(UsageError) as error:
        typed_values("site.toml", {name: 3}, OPTIONS)
    assert error.value.hint == f"that is {ours.name} here"
    with pytest.raises(UsageError) as error:
        checked_options("submit", {name: 3}, OPTIONS)
    assert error.value.hint == f"that is {ours.name} here"


def test_many_values_are_not_all_listed() -> None:
    names = [f"choice-{number}" for number in range(800)]
    hint = str(unknown("choice", "none of them", names).hint)
    assert hint.count("choice-") <= 10
    assert "more" in hint


def test_table_of_trainers_arguments_is_that_of_the_errors() -> None:
    """docs/coming-from.md: what stands in it is answered, with the flag that stands beside it."""
    page = Path(__file__).parents[2] / "docs" / "coming-from.md"
    _, _, section = page.read_text().partition("## From transformers' Trainer")
    rows = 0
    for row in section.partition("\n## ")[0].splitlines():
        if not row.startswith("| `--"):
            continue
        theirs, ours = row.strip("|").split(" | ", 1)
        for flag in re.findall(r"--\w+", theirs):
            if flag in SUBMIT:
                continue
            hint = foreign_flags.hint(flag, OPTIONS)
            if flag.replace("_", "-") in SUBMIT:
                assert flag.replace("_", "-") in ours
            else:
                assert hint is not None, flag
            rows += 1
    assert rows > 15


def test_data_is_no_program(tmp_path: Path) -> None:
    """What can be executed is one, and what is called like a script."""
    data = tmp_path / "rows.csv"
    data.touch()
    assert not foreign_commands.is_program(str(data))
    assert not foreign_commands.is_program("x" * 5000)
    data.chmod(0o755)
    assert foreign_commands.is_program(str(data))
    assert foreign_commands.is_program("train.py")
