"""Tokens and passwords: what looks like one goes into no file, no log, no argument of a process.

They reach the ranks through the environment alone (`sbatch` and `srun` hand it on), or from the
file that `hf auth login` wrote. Only under mpirun, whose starters hand it to whoever connects to
them, they lie in a private file as long as an attempt lasts.
"""

import json
import os
import re

_NAME = r"[A-Z0-9_]*(?:TOKEN|PASSWORD|PASSWD|SECRET|API_KEY|ACCESS_KEY)"
"""Names of variables that hold a secret: HF_TOKEN, HUGGING_FACE_HUB_TOKEN, WANDB_API_KEY, ..."""
_SECRET_NAME = re.compile(_NAME)

_TELLING_NAME = re.compile(
    "TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|JWT|SIGNATURE", re.I
)
"""Names of variables whose values are not for others, though they may be no secrets."""

_SHORTEST = 8
"""Characters: a shorter value of such a variable is no secret, and may be part of any word."""

_FORMS = (
    ("a Hugging Face token", re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{10,}")),
    (
        "a token",
        re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|wandb_v\d_|sk-)[\w-]{16,}"),
    ),
    ("a key of AWS", re.compile(r"\bAKIA[0-9A-Z]{16}\b")),
    # NAME:PASSWORD, or a token alone; a short name alone, as in git@host, is none.
    (
        "a URL with credentials",
        re.compile(r"(?<=://)(?:[^\s/@'\":]*:[^\s/@'\"]+|[^\s/@'\":]{16,})(?=@)"),
    ),
    # Not HF_TOKEN=$(cat file), which says where it is, not what.
    (
        "a variable with its secret",
        re.compile(rf"\b({_NAME}=[\"']?)(?![\"'$<`~/])[^\s\"'$]{{{_SHORTEST},}}"),
    ),
)

HIDDEN = "[hidden]"


def is_private(name: str) -> bool:
    """Returns True for a variable that may hold a secret, by its name."""
    return _TELLING_NAME.search(name) is not None


def holds_secret(name: str) -> bool:
    """Returns True for a variable whose value is a secret, by its name."""
    return _SECRET_NAME.fullmatch(name) is not None


def kind_in(text: str) -> str | None:
    """Returns in words which kind of credential a text holds; None: it holds none."""
    for kind, form in _FORMS:
        if form.search(text):
            return kind
    # Tokens of a site of its own have forms that nobody here knows.
    if any(value in text for value in _values()):
        return "the value of a variable of this shell"
    return None


def redact(text: str) -> str:
    """Returns a text with its credentials hidden."""
    for value in _values():
        text = text.replace(value, HIDDEN)
        # Also as JSON writes it, with quotes and backslashes escaped.
        text = text.replace(json.dumps(value)[1:-1], HIDDEN)
    for _, form in _FORMS:
        replacement = HIDDEN
        # The group is the name of a variable, which stays.
        if form.groups:
            replacement = rf"\g<1>{HIDDEN}"
        text = form.sub(replacement, text)
    return text


def _values() -> list[str]:
    """Returns the secrets of this process's environment, the longest first.

    One may be part of another: the longer one must be hidden before it is no longer found.
    """
    secrets = []
    for name, value in os.environ.items():
        if holds_secret(name) and len(value) >= _SHORTEST:
            secrets.append(value)
    return sorted(secrets, key=len, reverse=True)
