"""The options of messages."""

# No `from __future__ import annotations`: options are read from the types of their fields.

import re
from dataclasses import dataclass

from slurmft.core.filesystem import absolute
from slurmft.core.options import option


@dataclass(frozen=True, kw_only=True, slots=True)
class NotifyOptions:
    """Messages about the run."""

    notify: tuple[str, ...] = option(
        (),
        "tell of the end, a failure, a hang: file:PATH or env:NAME, which have URLs of apprise's; "
        "or such a URL without a secret; repeatable",
        affects="nothing",
        at="node",
        metavar="WHERE",
        sends=True,
        elsewhere=(
            "mail_user",
            "mail_type",
        ),
    )
    notify_command: str | None = option(
        None,
        "shell command that tells of the same; it reads the message on stdin",
        affects="nothing",
        at="node",
        metavar="COMMAND",
        executes=True,
    )

    def __post_init__(self) -> None:
        # The job may start in another folder than the command that submits it.
        targets = tuple(_absolute(target) for target in self.notify)
        object.__setattr__(self, "notify", targets)  # the class is frozen


def _absolute(target: str) -> str:
    return re.sub("^file:(.+)", lambda match: f"file:{absolute(match[1])}", target)
