"""Runs a program of your own as a job. On the nodes of a Slurm cluster, or on this machine, it is
watched, stopped, requeued and logged like a training of slurmft's.

PROGRAM is a Python file, -m MODULE, or any executable. All that follows it is the program's.

examples:
  slurmft run --nodes 4 -- train.py --epochs 3
  slurmft run --nodes 4 --gpus-per-node 4 --time 60 --checkpoint-dir out \\
      --resume-args '--resume_from_checkpoint {latest}' -- train.py --output_dir out
  slurmft run -- train.py --batch '{halved:32}' --accumulate '{doubled:1}'      less, if memory ends
  slurmft run --nodes 2 --follow -- -m mypackage.train
  slurmft run --nodes 2 --per node -- ./simulate.sh input.dat
  slurmft run --nodes 4 --dry-run -- train.py      show what would be submitted

A silent program is not taken for a hang, unless --hang-timeout-s is given.
How its stop, end and checkpoints are read: slurmft help your-own-program
"""

import shlex

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, typed_options
from slurmft.cli.submission import submit_or_show
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import options
from slurmft.programs.description import FLAGS, OwnProgram

_EXAMPLE = "slurmft run --nodes 4 -- train.py --epochs 3"
ELSEWHERE = Elsewhere.SUBMITS | Elsewhere.SENDS_FOLDER


def parser() -> Parser:
    """The command line of `slurmft run`, up to `--`."""
    command = Parser("slurmft run", __doc__).add_submission()
    command.add_options(OwnProgram, "the program", FLAGS)
    command.add_options(JobConfig, "where to run it").show_usual()
    command.usage = "%(prog)s [FLAG ...] -- PROGRAM [ARGUMENT ...]"
    return command


def main(argv: list[str]) -> int:
    """The command: parse, describe the program, submit, and follow if asked to."""
    # The first -- alone: further ones are the program's.
    flags_end = len(argv)
    if "--" in argv:
        flags_end = argv.index("--")
    command = parser()
    if flags_end == len(argv):
        _check_separator(command, argv)
    arguments = command.parse(argv[:flags_end])
    program = argv[flags_end + 1 :]
    if not program:
        raise UsageError("no program after --", _EXAMPLE)
    from slurmft.programs import submission  # not above: --help need not wait for it

    declared = options(JobConfig) | FLAGS
    flags = typed_options(arguments, declared)
    config = submission.configure(program, flags, declared, not arguments.dry_run)
    return submit_or_show(config, arguments, "run", argv, declared)


def _check_separator(command: Parser, argv: list[str]) -> None:
    """Refuses a command line without --, unless it asks for help or has a wrong flag."""
    if {"-h", "--help", "--help-all"} & set(argv):
        return
    problem = "no -- before the program"
    flags, words = command.split_at_argument(argv)
    if not words:
        raise UsageError(problem, _EXAMPLE)
    # A flag that is none of slurmft's, before any program, is a typing error.
    if not words[0].startswith("-") or words[0] == "-m":
        line = shlex.join(["slurmft", "run", *flags, "--", *words])
        raise UsageError(f"{problem} {words[0]!r}", line)
