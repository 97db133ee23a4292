"""One rank of a training run: `python -m slurmft.train.rank RUN_DIR`, started by torchrun."""

import contextlib
import gc
import importlib
import sys
from types import ModuleType
from typing import Any

from slurmft.core import process
from slurmft.core.hub import leave_out_kernels
from slurmft.core.program import PREDICT
from slurmft.job import attach
from slurmft.job.process import end

_imports_s: float | None = None


class _Later(ModuleType):
    """A module of functions that import it when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: getattr(importlib.import_module(self.__name__), name)(
            *args
        )


def prepare() -> None:
    """Imports what a training needs; torchrun's process may do so for all its ranks."""
    global _imports_s
    if _imports_s is None:
        # collections of garbage would find none, and take a third of the time
        gc.disable()
        leave_out_kernels()
        # For one function, in losses of object detection: a tenth of the time of all imports.
        later = sys.modules.setdefault("scipy.optimize", _Later("scipy.optimize"))
        with contextlib.suppress(ImportError):
            import transformers.loss.loss_utils  # noqa: F401
        if isinstance(later, _Later):
            del sys.modules["scipy.optimize"]
        import slurmft.train.loop.trainer  # noqa: F401

        gc.freeze()
        gc.enable()
        _imports_s = process.age_s()


def main(run_dir: str) -> None:
    """Trains as one rank, to the end or to an agreed stop."""
    with attach(run_dir) as job:
        prepare()  # here, what fails in it is recorded, too
        if job.config.program.kind == PREDICT:
            from slurmft.train.predict import prediction

            prediction.run(job)
        else:
            from slurmft.train.loop import trainer

            trainer.run(job, _imports_s)
    end(0)


if __name__ == "__main__":
    main(sys.argv[1])
