"""`slurmft push`: uploads the model of a finished run to the Hugging Face hub."""

from __future__ import annotations

from typing import Any

from slurmft import card
from slurmft.cli import Parser
from slurmft.errors import Exit, SlurmftError, UsageError
from slurmft.rundir import RunDir, read_json

EXAMPLES = """\
examples:
  slurmft push runs/emotion-20261120-093012-a1b2 me/emotion-distilbert
  slurmft push runs/emotion-20261120-093012-a1b2 me/emotion-distilbert --public

The token is that of `hf auth login`, or $HF_TOKEN.
"""

FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", card.FILE)
"""What of the model's folder is uploaded: no pickles, whatever was put there."""


def parser() -> Parser:
    """The command line of `slurmft push`."""
    made = Parser(
        prog="slurmft push",
        description="Uploads the model, tokenizer and card of a finished run to the hub, from a "
        "machine with internet. The repository is private, unless it is asked for or was public.",
        epilog=EXAMPLES,
    )
    made.add_argument("run_dir", help="run directory that `slurmft submit` printed")
    made.add_argument("repo", help="repository on the hub: NAME, or USER/NAME; made if absent")
    made.add_argument("--public", action="store_true", help="everybody may see it")
    return made


def check_finished(run: RunDir) -> dict[str, Any]:
    """The result of a run whose model is whole.

    Raises:
        UsageError: it has none.
    """
    state, result = run.get_state()["state"], read_json(run.result)
    if state != "finished" or result is None:
        raise UsageError(
            f"the run {str(run.path)!r} has not finished: it is {state}",
            "slurmft follow it, or slurmft resume it; then push",
        )
    if not any(run.model.glob("*.safetensors")):
        raise UsageError(f"{str(run.model)!r} holds no model", "was it moved?")
    return result


def push(run: RunDir, repo: str, public: bool) -> str:
    """Uploads; returns the address of the commit.

    Raises:
        UsageError: the run has not finished; the repository is public, and that was not asked for.
        SlurmftError: the hub refuses, or cannot be reached.
    """
    result = check_finished(run)
    from huggingface_hub import HfApi

    if not card.exists(run):
        card.write(run, result)
    api: Any = HfApi()
    try:
        made = api.create_repo(repo, private=not public, exist_ok=True)
        if not public and api.repo_info(made.repo_id).private is False:
            raise UsageError(
                f"the repository {made.repo_id} is public", "give another, or say so: --public"
            )
        message = f"Model of {run.path.name}"
        found = api.upload_folder(
            repo_id=made.repo_id,
            folder_path=str(run.model),
            commit_message=message,
            allow_patterns=list(FILES),
        )
    except (OSError, ValueError) as error:  # the library's HTTP errors are OSErrors
        raise refusal(repo, error) from error
    return str(found.commit_url)


def refusal(repo: str, error: Exception) -> SlurmftError:
    """An error of the hub in two lines."""
    words = " ".join(str(error).split())[:300]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or "token" in words.lower():
        hint = "log in with a token that may write: hf auth login; or export HF_TOKEN=..."
    else:
        hint = "is the hub in reach of this machine? compute nodes mostly have no internet"
    return SlurmftError(f"the hub did not take {repo!r}: {words}", hint)


def main(argv: list[str]) -> int:
    """The command."""
    arguments = parser().parse(argv)
    address = push(RunDir.open(arguments.run_dir), arguments.repo, arguments.public)
    print(f"{'public' if arguments.public else 'private'}: {address}")
    return Exit.OK
