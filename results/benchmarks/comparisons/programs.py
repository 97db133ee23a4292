"""Programs that know nothing of slurmft, in the manner of the examples of their libraries: two
processes under `slurmft run`, interrupted in each way, against runs that were left alone.

The references are started by torchrun alone, on this machine.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import call

from comparisons.interruptions import INTERRUPTED, interrupt
from comparisons.table import Row, check, largest

STEPS = 60
SAVED_EVERY = 5
PROGRAM = "own.py"
SLOWLY = ("--pause_s", "0.2")
"""Interruptions come between steps, not after the last."""
LIMIT = 1e-6


@dataclass(frozen=True)
class Program:
    """A script, how it is started, and how it resumes."""

    text: str
    arguments: tuple[str, ...] = ()
    slowly: tuple[str, ...] = SLOWLY
    resume: str = "--resume_from_checkpoint {latest}"


def run_alone(folder: Path, program: Program, *arguments: str) -> list[float]:
    """Runs a program by torchrun; returns its losses."""
    write(folder, program)
    call(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node=2", PROGRAM, *program.arguments, *arguments),
        timeout_s=600, cwd=folder, env=environment(),
    )  # fmt: skip
    return losses(folder)


def run_interrupted(folder: Path, program: Program) -> list[float]:
    """Runs a program by `slurmft run` and interrupts it; returns its losses."""
    write(folder, program)
    call(
        *(sys.executable, "-m", "slurmft", "run", "--cluster", "local", "--nodes", "2"),
        *("--runs-dir", str(folder / "runs"), "--checkpoint-dir", "out"),
        *("--resume-args", program.resume, "--max-requeues", "9", "--max-restarts", "9"),
        *("--", PROGRAM, *program.arguments, *program.slowly),
        timeout_s=600, cwd=folder, env=environment(),
    )  # fmt: skip
    (config,) = folder.glob("runs/*/config.json")
    interrupt(config.parent, PROGRAM, lambda: progress(folder), 13)
    log = rank_log(folder).read_text(errors="replace")
    sizes = re.findall(r"world size (\d+)", log)
    # Each start has both processes.
    assert len(sizes) > 3, sizes
    assert set(sizes) == {"2"}, sizes
    return losses(folder)


def rank_log(folder: Path) -> Path:
    (log,) = folder.glob("runs/*/logs/rank-000.log")
    return log


def environment() -> dict[str, str]:
    """Returns the variables of both ways: threads decide about the order of sums."""
    threads = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return {**os.environ, **threads}


def write(folder: Path, program: Program) -> None:
    folder.mkdir(exist_ok=True)
    (folder / PROGRAM).write_text(program.text)
    (folder / "out").mkdir(exist_ok=True)


def losses(folder: Path) -> list[float]:
    """Returns the loss of each step; of one that was made twice, the second."""
    file = folder / "losses.json"
    if file.exists():
        return list(json.loads(file.read_text()))
    return [loss for _, loss in sorted(by_step(folder).items())]


def by_step(folder: Path) -> dict[int, float]:
    file = folder / "out" / "losses.jsonl"
    if not file.exists():
        return {}
    lines = file.read_text().splitlines()
    return dict(json.loads(line) for line in lines if line.endswith("]"))


def progress(folder: Path) -> int:
    """Returns the last step that is recorded or saved."""
    steps = [0]
    lines = (folder / "out/losses.jsonl").open() if by_step(folder) else ()
    # The newest line, as steps are made again.
    for line in lines:
        steps = [json.loads(line)[0]]
    for path in (folder / "out").iterdir():
        number = re.search(r"\d+", path.name)
        if number and path.name != "losses.jsonl":
            steps.append(int(number.group()))
    return max(steps)


def row_of(name: str, folder: Path, program: Program) -> Row:
    expected = run_alone(folder / "alone", program)
    assert len(expected) == STEPS, len(expected)
    values = run_interrupted(folder / "interrupted", program)
    reference = "the same script by torchrun, left alone"
    return Row(f"{name}: {INTERRUPTED}", reference, largest(values, expected))


def emotions(folder: Path) -> tuple[str, str]:
    """Writes a model and its data; returns their places."""
    from tests.support.models import write_emotion, write_model

    data = write_emotion(folder / "data", train=160, validation=8)
    return str(write_model(folder / "model")), str(data / "train.jsonl")


TRAINER_FLAGS = (
    *(
        "--output_dir",
        "out",
        "--max_steps",
        str(STEPS),
        "--save_steps",
        str(SAVED_EVERY),
    ),
    *("--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "1"),
    *("--per_device_train_batch_size", "4", "--learning_rate", "1e-3"),
)


@check("programs", LIMIT)
def trainer_program(folder: Path) -> Iterator[Row]:
    from tests.support.own_programs import GLUE

    model, data = emotions(folder)
    source = ("--model_name_or_path", model, "--train_file", data)
    program = Program(GLUE, (*source, *TRAINER_FLAGS))
    yield row_of("transformers' Trainer", folder, program)


@check("programs", LIMIT)
def accelerate_program(folder: Path) -> Iterator[Row]:
    from tests.support.own_programs import NLP

    model, data = emotions(folder)
    flags = ("--output_dir", "out", "--checkpointing_steps", str(SAVED_EVERY))
    source = ("--model", model, "--data", data, "--epochs", "3")
    yield row_of("Accelerate", folder, Program(NLP, (*source, *flags)))


@check("programs", LIMIT, "trl")
def trl_program(folder: Path) -> Iterator[Row]:
    from tests.support.models import write_chats, write_decoder
    from tests.support.own_programs import SFT

    data = write_chats(folder / "data", train=160, validation=8) / "train.jsonl"
    model = write_decoder(folder / "model")
    source = ("--model_name_or_path", str(model), "--train_file", str(data))
    program = Program(SFT, (*source, *TRAINER_FLAGS, "--bf16", "0"))
    yield row_of("TRL's SFTTrainer", folder, program)


@check("programs", LIMIT, "lightning")
def lightning_program(folder: Path) -> Iterator[Row]:
    from tests.support.own_programs import LIGHTNING

    program = Program(LIGHTNING, resume="--ckpt_path {latest}")
    yield row_of("Lightning", folder, program)


@check("programs", LIMIT)
def ddp_program(folder: Path) -> Iterator[Row]:
    from tests.support.own_programs import DDP

    program = Program(DDP, resume="--resume {latest}")
    yield row_of("plain DDP", folder, program)


@check("programs", LIMIT)
def nanogpt_program(folder: Path) -> Iterator[Row]:
    """nanoGPT saves no state of its generators: the reference is resumed after the same steps."""
    from tests.support.own_programs import NANOGPT

    program = Program(
        NANOGPT, slowly=("--pause_s=0.2",), resume="--init_from=resume"
    )  # fmt: skip
    interrupted = folder / "interrupted"
    values = run_interrupted(interrupted, program)
    alone = folder / "alone"
    expected: dict[int, float] = {}
    begun: list[str] = []
    for last in (*resumed_after(interrupted), STEPS):
        run_alone(alone, program, f"--max_iters={last}", *begun)
        expected |= by_step(alone)
        begun = ["--init_from=resume"]
    reference = "the same script by torchrun, resumed after the same steps"
    difference = largest(values, expected.values())
    yield Row(f"nanoGPT's loop: {INTERRUPTED}", reference, difference)


def resumed_after(folder: Path) -> list[int]:
    """Returns the step after which each later start has begun."""
    log = rank_log(folder).read_text(errors="replace")
    first, *others = re.findall(r"world size \d+ after (\d+)", log)
    assert first == "0"
    return [int(step) for step in others]
