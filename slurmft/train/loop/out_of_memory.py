"""A device's memory is too small: what it was needed for, and what needs less."""

import torch

from slurmft.core.errors import SlurmftError
from slurmft.train.loop.environment import peak_memory_bytes
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.position import Position
from slurmft.train.loop.setup import Setup


def explained(
    error: torch.OutOfMemoryError,
    setup: Setup,
    loaded: LoadedModel,
    position: Position,
) -> SlurmftError:
    """Returns an error that says when the memory was too small, and which options need less."""
    config = setup.config
    # The phase changes after the last step of an epoch, before anything of the evaluation.
    trains = position.phase == "train"
    when = f"in step {position.step + 1}"
    size = config.batch_size
    if not trains:
        when = f"in the evaluation after step {position.step}"
        size = config.eval_batch_size
    # torch's message: "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total …". With
    # what is appended, a message of one sentence has two parts, too.
    request, capacity, *_ = f"{error}. ".split(". ")
    used_gib = peak_memory_bytes(setup.world.device) / 2**30
    message = (
        f"{request} {when}, on a batch of {size} samples and {loaded.batch_tokens:,} tokens, with "
        f"{used_gib:.1f} GiB used. {capacity}"
    )
    if not trains:
        half_size = max(1, size // 2)
        return SlurmftError(message, f"use --eval-batch-size {half_size}")
    cures = []
    if size > 1:
        steps = 2 * config.gradient_accumulation_steps
        halves = f"--batch-size {size // 2} --gradient-accumulation-steps {steps}"
        cures.append(f"{halves} (the global batch stays)")
    if not config.activation_checkpointing:
        cures.append("--activation-checkpointing")
    if config.shard != "full":
        cures.append("--shard full on several GPUs")
    # Where all is in use, nothing but the model is left to change.
    all_cures = ", or ".join(cures) or "a smaller model"
    return SlurmftError(message, f"use {all_cures}")
