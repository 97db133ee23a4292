"""Uploads the model of a finished run to the hub. The tokenizer and the model card go with it. This
machine needs internet. The repository is private, except with --public.

examples:
  slurmft push last me/emotion-distilbert
  slurmft push emotion-20261120-093012 me/emotion-distilbert --public
  slurmft submit --task emotion --nodes 4 --follow && slurmft push last me/emotion-distilbert

The token is that of `hf auth login`, or $HF_TOKEN.
"""

import contextlib
import fnmatch
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.program import OWN, PREDICT, trained_by
from slurmft.core.terminal import unprotected
from slurmft.core.text import shown
from slurmft.core.trusted import Door
from slurmft.runs import origin, scan
from slurmft.runs.rundir import CONFIG, RunDir
from slurmft.runs.scan import MeasuredRun

ELSEWHERE = Elsewhere.PLAIN

_REASON_CHARACTERS = 300
"""Characters of an answer of the hub that a message has: it may be a page of HTML."""
MODEL = Door(
    "the files of a model that `slurmft push` uploads",
    "`RUN/model/`",
    "what is published in your name",
    cure="put a copy of your own in its place",
)
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md")
"""Files of the model's folder that are uploaded: no pickles, whatever was put there."""


def parser() -> Parser:
    command = Parser("slurmft push", __doc__).add_run()
    command.add_argument(
        "repo",
        metavar="REPO",
        help="repository on the hub: NAME, or USER/NAME; made if absent",
    )
    command.add_argument("--public", action="store_true", help="everybody may see it")
    return command


def check_finished(run: RunDir) -> dict[str, Any]:
    """Returns the result of a run whose model is whole.

    Raises:
        UsageError: the run has not finished, or its model is gone.
    """
    state = run.get_state().state
    result = run.read_result()
    if state != "finished" or result is None:
        raise UsageError(
            f"the run {str(run.path)!r} has not finished: it is {state}",
            scan.what_now([MeasuredRun.read(run.path)]),
        )
    if not any(run.model.glob("*.safetensors")):
        raise UsageError(f"{str(run.model)!r} holds no model", _why_no_model(run))
    return result


def _why_no_model(run: RunDir) -> str:
    """Returns where to look for a model that is not in the folder of its run."""
    program = run.load_own_config().program
    if program.kind == PREDICT:
        trained = trained_by(program.settings)
        return f"it is a prediction; give the run that trained the model: {trained}"
    if program.kind == OWN:
        return "a program of your own leaves its model elsewhere: hf upload REPO FOLDER"
    return "was it moved away?"


def push(run: RunDir, repo: str, public: bool) -> str:
    """Uploads the model of a run; returns the address of the commit.

    Raises:
        UsageError: the run has not finished; the repository is public, and that was not asked for.
        NotOwnError: the run is another user's, or others can write it.
        SlurmftError: the hub refuses, or cannot be reached.
    """
    # For what they raise: another user's run may hold anything, and the upload is in our name.
    _check_owner_elsewhere(run)
    CONFIG.read(run.config)
    result = check_finished(run)
    # --help need not wait for it
    from huggingface_hub import CommitOperationAdd, HfApi

    from slurmft.train.login import model_card

    # What is refused leaves neither a card here nor an empty repository there.
    with _opened(run.model):
        if not model_card.exists(run):
            model_card.write(run, result)
    api: Any = HfApi()
    try:
        name = api.create_repo(repo, private=not public, exist_ok=True).repo_id
        # `private` is for a new repository: one that exists stays as public as it is.
        if not public and api.repo_info(name).private is False:
            hint = "give another one, or add --public"
            raise UsageError(f"the repository {name} is public", hint)
        with unprotected(), _opened(run.model) as files:  # for its progress bars
            operations = []
            for file, descriptor in files.items():
                # What is uploaded is what was looked at, not what has its name by then.
                opened = f"/proc/self/fd/{descriptor}"
                operations.append(
                    CommitOperationAdd(path_in_repo=file, path_or_fileobj=opened)
                )
            commit = api.create_commit(
                repo_id=name,
                operations=operations,
                commit_message=f"Model of {run.path.name}",
            )
    except (OSError, ValueError) as error:  # the library's HTTP errors are OSErrors
        raise refusal(repo, error) from error
    return str(commit.commit_url)


def _check_owner_elsewhere(run: RunDir) -> None:
    """Raises ForeignRunError for a run that was fetched, and was another user's there."""
    came_from = origin.origin_of(run.path)
    if came_from is not None and not came_from.is_own:
        origin.check(run.path)


@contextlib.contextmanager
def _opened(model: Path) -> Iterator[dict[str, int]]:
    """Opens the files of a model that are uploaded; yields path below the folder -> descriptor.

    Raises:
        NotOwnError: one of them, or a folder, is another user's, or others can write it; or it is a
            link, or no regular file.
    """
    with contextlib.ExitStack() as opened:
        descriptors = {}
        for below, folder in MODEL.tree(model):
            for name in sorted(os.listdir(folder)):
                path = os.path.join(below, name)
                is_named = any(fnmatch.fnmatch(name, pattern) for pattern in FILES)
                if not is_named or path.startswith("."):
                    continue
                descriptors[path] = MODEL.open(model / path, folder)
                opened.callback(os.close, descriptors[path])
        yield descriptors


def refusal(repo: str, error: Exception) -> SlurmftError:
    """Returns an error of the hub in two lines."""
    # The library's messages have several lines, and may hold a page of HTML.
    reason = shown(str(error), _REASON_CHARACTERS)
    # Only an answer of the hub has a status; a connection that failed has none.
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status in (401, 403) or "token" in reason.lower():
        hint = (
            "log in with a token that may write: hf auth login; or export HF_TOKEN=..."
        )
    else:
        hint = "check that this machine reaches the hub; compute nodes often have no internet"
    return SlurmftError(f"the hub did not take {repo!r}: {reason}", hint)


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    address = push(run, arguments.repo, arguments.public)
    visibility = "private"
    if arguments.public:
        visibility = "public"
    print(f"{visibility}: {address}")
    return Exit.OK
