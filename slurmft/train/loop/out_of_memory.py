"""The memory of a device, or of the host, is too small: the ranks start again with fewer samples at
a time; where that cannot be, the error says what needs less."""

import contextlib
import re
from collections.abc import Iterator

import torch

from slurmft.core.errors import SlurmftError
from slurmft.core.text import counted
from slurmft.train.loop import memory_limits
from slurmft.train.loop.environment import peak_memory_bytes
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.memory_limits import MemoryLimits
from slurmft.train.loop.position import Position
from slurmft.train.loop.setup import Setup

_HOST_IS_FULL = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")
"""What torch says, as a RuntimeError, where the kernel gives this process no more memory."""


@contextlib.contextmanager
def of_host_too() -> Iterator[None]:
    """Raises torch.OutOfMemoryError also where it is the host's memory that was too small for what
    is done within: a limit of the site's (ulimit -v) is met there."""
    try:
        yield
    except MemoryError as error:
        raise _of_host("") from error
    except RuntimeError as error:
        match = _HOST_IS_FULL.search(str(error))
        if match is None:
            raise
        gib = int(match[1]) / 2**30
        raise _of_host(f" for {gib:.1f} GiB more") from error


def _of_host(size: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"the host's memory, or a limit on it (ulimit -v), was too small{size}"
    )


@contextlib.contextmanager
def in_the_save() -> Iterator[None]:
    """Raises an error that asks for another start, where memory is too small to save the model. No
    batch is at fault, and none is made smaller; a new process has the memory that steps have
    left in use."""
    try:
        with of_host_too():
            yield
    except torch.OutOfMemoryError as error:
        request, *_ = str(error).split(". ")
        again = SlurmftError(
            f"{request}, while the model was saved",
            "the ranks start again, and save it then; if they fail again, use more memory",
        )
        again.retry = True
        raise again from error


def answered(
    error: torch.OutOfMemoryError,
    setup: Setup,
    loaded: LoadedModel,
    position: Position,
    evaluated_samples: int,
) -> SlurmftError:
    """Returns an error that says when the memory was too small.

    Where half of the samples may fit, that is noted for the next start of the ranks, which the
    error asks for; else it says which options need less memory.

    Args:
        evaluated_samples: the most samples that an evaluation takes at a time.
    """
    # The phase changes after the last step of an epoch, before anything of the evaluation.
    trains = position.phase == "train"
    when = f"in step {position.step + 1}"
    size = setup.plan.largest_part
    if not trains:
        when = f"in the evaluation after step {position.step}"
        size = evaluated_samples
    # torch's message: "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total …". With
    # what is appended, a message of one sentence has two parts, too.
    request, capacity, *_ = f"{error}. ".split(". ")
    used_gib = peak_memory_bytes(setup.world.device) / 2**30
    message = (
        f"{request} {when}, on a batch of {counted(size, 'sample')} and "
        f"{counted(loaded.batch_tokens, 'token')}, with {used_gib:.1f} GiB used. {capacity}"
    )
    keeps_mathematics = not (
        trains and memory_limits.has_batch_statistics(loaded.model)
    )
    if size == 1 or not keeps_mathematics:
        return SlurmftError(message, _cure(setup, trains, size))
    half = size // 2
    limits = MemoryLimits(evaluate_samples=half)
    if trains:
        limits = MemoryLimits(train_samples=half)
    memory_limits.note(setup.run_dir, limits)
    again = SlurmftError(
        message,
        f"the ranks start again with {counted(half, 'sample')} at a time: nothing to do",
    )
    again.retry = True
    return again


def _cure(setup: Setup, trains: bool, size: int) -> str:
    """Returns which options need less memory."""
    config = setup.config
    if not trains:
        return "use a smaller model, shorter samples (--max-length), or more memory"
    cures = []
    if size > 1:
        # Batch norms: other batches are another training, which the user has to want.
        steps = 2 * config.gradient_accumulation_steps
        halves = f"--batch-size {size // 2} --gradient-accumulation-steps {steps}"
        cures.append(f"{halves} (the model's batch norms see other batches then)")
    if not config.activation_checkpointing:
        cures.append("--activation-checkpointing")
    if config.shard != "full":
        cures.append("--shard full on several GPUs")
    # Where all is in use, nothing but the model is left to change.
    all_cures = ", or ".join(cures) or "a smaller model"
    return f"use {all_cures}"


def one_does_not_fit(setup: Setup, tokens: int) -> SlurmftError:
    """Returns the error of --batch-size auto where memory does not hold one sample."""
    config = setup.config
    cures = [f"shorter samples (--max-length {max(1, tokens // 2)})"]
    if not config.lora:
        cures.append("--lora 16")
    if setup.precision == "fp32":
        cures.append("--precision bf16")
    if not config.activation_checkpointing:
        cures.append("--activation-checkpointing")
    if config.shard != "full":
        cures.append("--shard full on several processes")
    return SlurmftError(
        f"--batch-size auto: memory does not hold one sample, the longest, of {tokens:,} tokens",
        f"use {', or '.join(cures)}",
    )
