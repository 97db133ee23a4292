"""The import of submitit, which would change the logging of the process around it."""

import contextlib
import os
from collections.abc import Iterator

_LEVEL = "SUBMITIT_LOG_LEVEL"


@contextlib.contextmanager
def keeping_logging() -> Iterator[None]:
    """Lets submitit be imported in the block without a change of the process's logging.

    At its import submitit configures logging anew, which closes the handlers of all others: log
    files of a notebook would end at its first submission, and absl's handler closes a stream.
    """
    level = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = "NOCONFIG"
    try:
        yield
    finally:
        # The job has submitit's messages in its logs.
        if level is None:
            del os.environ[_LEVEL]
        else:
            os.environ[_LEVEL] = level
