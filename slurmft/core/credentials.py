"""Tokens and passwords: what looks like one goes into no file, no log, no argument of a process.

They reach the ranks through the environment alone (`sbatch` and `srun` hand it on), or from the
file that `hf auth login` wrote.
"""

import json
import os
import re

_NAME = r"[A-Z0-9_]*(?:TOKEN|PASSWORD|PASSWD|SECRET|API_KEY|ACCESS_KEY)"
"""How variables are called that hold one: HF_TOKEN, HUGGING_FACE_HUB_TOKEN, WANDB_API_KEY, ..."""

_TELLING_NAME = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|JWT|SIGNATURE", re.I)
"""How a variable may be called whose value is not for others, also where it is no secret."""

_SHORTEST = 8
"""Characters: a shorter value of such a variable is no secret, and may be part of any word."""

_FORMS = (
    ("a Hugging Face token", re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{10,}")),
    ("a token", re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|wandb_v\d_|sk-)[\w-]{16,}")),
    ("a key of AWS", re.compile(r"\bAKIA[0-9A-Z]{16}\b")),
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
    """Whether a variable of that name may hold a secret."""
    return _TELLING_NAME.search(name) is not None


def kind_in(text: str) -> str | None:
    """What kind of credential a text holds, in words; None: it holds none."""
    return next((kind for kind, form in _FORMS if form.search(text)), None) or (
        "the value of a variable of this shell" if any(v in text for v in _values()) else None
    )


def redact(text: str) -> str:
    """The text with credentials hidden."""
    for value in _values():
        for written in (value, json.dumps(value)[1:-1]):
            text = text.replace(written, HIDDEN)
    for _, form in _FORMS:
        text = form.sub(lambda m: (m[1] if m.re.groups else "") + HIDDEN, text)
    return text


def _values() -> list[str]:
    """The secrets of this process's environment, the longest first."""
    found = (v for k, v in os.environ.items() if re.fullmatch(_NAME, k) and len(v) >= _SHORTEST)
    return sorted(found, key=len, reverse=True)
