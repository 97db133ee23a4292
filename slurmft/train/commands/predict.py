"""Predicts the rows of a file with a finished run's model. The job is like that of a training.

examples:
  slurmft predict last new.csv --follow                  writes new.predictions.csv here
  slurmft predict emotion-20261120 new.jsonl --output out.jsonl --nodes 4
  slurmft predict squad-20261120 questions.jsonl         and questions.predictions.jsonl.json
  slurmft predict sft-20261120 chats.jsonl --max-new-tokens 100 --nodes 2 --follow
  slurmft predict sft-20261120 chats.jsonl --generation model --seed 1

The file (.csv, .tsv, .jsonl, .parquet) has the columns of texts that the run was trained on. Its
columns stay, and `prediction` is added: a label, with its `probability`; a number; a vector; a
text; an answer; entities. A job that was stopped resumes with the rows that are left.
"""

import contextlib
from pathlib import Path

from slurmft.cli import foreign
from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, input_file, typed_options
from slurmft.cli.submission import submit_or_show
from slurmft.core.config import JobConfig
from slurmft.core.options import options
from slurmft.train.config import TrainConfig
from slurmft.train.predict_config import PredictConfig

ELSEWHERE = Elsewhere.SUBMITS | Elsewhere.JOB_OUTPUT

_PREDICT_OPTIONS = [
    name
    for name, each in options(TrainConfig).items()
    # Others are as the trained run has them, or are reset.
    if each.predicts == "flag"
]
# `add_run` has --runs-dir already: it says where the trained run is, too.
_JOB_OPTIONS = options(JobConfig).keys() - {"runs_dir"}


def parser() -> Parser:
    command = Parser("slurmft predict", __doc__).add_run()
    command.add_argument(
        "file",
        type=input_file,
        metavar="FILE",
        help="rows to predict",
    )
    output = (
        "file to write (default: NAME.predictions.csv in this folder, or as FILE ends)"
    )
    command.add_argument("--output", metavar="FILE", help=output)
    overwrite = "let it take the place of a file that is there"
    command.add_argument("--overwrite", action="store_true", help=overwrite)
    command.add_submission()
    foreign.add_yes(command)
    title = "how to predict (default: as the run evaluated)"
    command.add_options(TrainConfig, title, _PREDICT_OPTIONS)
    command.add_options(PredictConfig, "how texts are generated")
    command.add_options(JobConfig, "where to run it", _JOB_OPTIONS)
    return command.show_usual("eval_batch_size", *options(PredictConfig))


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    from slurmft.train.login import predict  # --help need not wait for it

    declared = options(TrainConfig) | options(PredictConfig) | options(JobConfig)
    names = {*_PREDICT_OPTIONS, *options(PredictConfig), *_JOB_OPTIONS}
    flags = typed_options(arguments, names)
    if arguments.runs_dir:
        flags["runs_dir"] = arguments.runs_dir
    output = None
    if arguments.output:
        output = Path(arguments.output)
    file = Path(arguments.file)
    # A model of slurmft's own tasks is weights and words; a task of somebody's own is code.
    run = predict.trained_run(run)
    is_dry_run = arguments.dry_run
    with contextlib.ExitStack() as until_submitted:
        if predict.executes_code(run):
            agreed = foreign.agreed(run, arguments.yes, records=not is_dry_run)
            until_submitted.enter_context(agreed)
        overwrite = arguments.overwrite
        config = predict.configure(
            run, file, output, overwrite, flags, is_agreed=is_dry_run
        )
        return submit_or_show(
            config, arguments, "predict", argv, declared, until_submitted.close
        )
