"""What a script of somebody else may change in a rank, and training relies on."""

import contextlib
import os
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from slurmft.core.permissions import current_umask
from slurmft.train.loop.generators import kept_generators


@contextlib.contextmanager
def kept_process(device: torch.device) -> Iterator[None]:
    """Sets, at the end of the block, what the process had at its start: generators of random
    numbers, working directory, umask, environment, warnings, and settings of torch and numpy.

    The scripts of metrics switch gradients off, fix a seed, or go to a folder of their own; the
    training around them goes on as without them.
    """
    with (
        kept_generators(device),
        _kept_torch(),
        _kept_environment(),
        np.errstate(),
        warnings.catch_warnings(),
    ):
        yield


@contextlib.contextmanager
def _kept_torch() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    matmul_precision = torch.get_float32_matmul_precision()
    deterministic = torch.get_deterministic_debug_mode()
    # As a context it sets what was there before.
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(matmul_precision)
            torch.set_deterministic_debug_mode(deterministic)


@contextlib.contextmanager
def _kept_environment() -> Iterator[None]:
    variables = dict(os.environ)
    umask = current_umask()
    # The folder itself: one that was moved has no path any more.
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        os.umask(umask)
        # New ones stay: a script may set them once, when it is imported.
        os.environ.update(variables)
