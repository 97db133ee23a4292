"""Runs a script with an integration:
`python -m slurmft.plugins.integrations NAME (SCRIPT|-m MODULE) ...`.

The script stays as it is, and runs as Python itself would run it. Its library gets the callback
when the script imports it; a script that does not is left alone.
"""

import importlib
import os
import runpy
import sys
from typing import Any

from slurmft.core import interpreter
from slurmft.core.after_import import AfterImport

LIBRARIES = {
    "transformers": "transformers.trainer",
    "lightning": "lightning.pytorch.trainer.trainer",
}
"""Name of an integration -> the module of its library that has the Trainer."""


def main(name: str, script: str, *arguments: str) -> None:
    integration = f"slurmft.plugins.integrations.{name}"

    def enable(_: Any) -> None:
        importlib.import_module(integration).enable()

    # Not now: the import takes seconds, and a script may need none of it.
    AfterImport([LIBRARIES[name]], enable)
    try:
        if script == "-m":
            interpreter.import_as_plain(os.getcwd())
            sys.argv = [*arguments]
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            interpreter.import_as_plain(os.path.dirname(os.path.realpath(script)))
            sys.argv = [script, *arguments]
            runpy.run_path(os.path.abspath(script), run_name="__main__")
    except Exception as error:
        # The traceback begins with the script, as if Python itself had run it.
        trace = error.__traceback__
        while trace and _is_runner(trace.tb_frame.f_globals):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _is_runner(variables: dict[str, Any]) -> bool:
    """Returns whether these are the global variables of this module, or of runpy."""
    return variables is globals() or variables is vars(runpy)


if __name__ == "__main__":
    main(*sys.argv[1:])
