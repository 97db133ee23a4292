"""Freezing (`--freeze`): weights of a model that training leaves as they are.

What is frozen is in no checkpoint, as the weights below adapters are not: a resume reads it from
the model's source again, and is refused where that has changed.
"""

import hashlib
from typing import Any

import torch
from torch import nn

from slurmft.core.errors import UsageError
from slurmft.train.config import frozen_layers

Tensors = dict[str, torch.Tensor]

_FINGERPRINT_NUMBERS = 2**16
"""Numbers of each frozen tensor, about, that tell one model from another."""


def freeze(model: Any, what: str) -> int:
    """Freezes a part of a model of transformers: what --freeze says, without weights that the
    source of the model does not have.

    Returns:
        The number of layers that are frozen.

    Raises:
        UsageError: the model has no such layers, or nothing would train.
    """
    base = getattr(model, "base_model", model)
    layers = _layers(base)
    count = 0
    if what == "base":
        count = len(layers)
        frozen = [base]
    else:
        count = frozen_layers(what) or 0
        if count > len(layers):
            raise UsageError(
                f"--freeze {what}: {type(model).__name__} has {len(layers)} layers",
                f"give at most layers:{len(layers)}",
            )
        frozen = [*_embeddings(base, layers), *layers[:count]]
    # Modules that the source lacks begin with random weights, as the pooler of many a base model.
    missing = set(getattr(model, "missing_keys", ()))
    names = {id(weight): name for name, weight in model.named_parameters()}
    for module in frozen:
        for weight in module.parameters():
            if names[id(weight)] not in missing:
                weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        reason = "its head is its table of embeddings"
        if base is model:
            reason = "it has no head"
        hint = "leave --freeze out"
        if count > 1:
            hint = f"freeze fewer layers, as --freeze layers:{count - 1}"
        raise UsageError(
            f"--freeze {what} leaves nothing of {type(model).__name__} to train: {reason}",
            hint,
        )
    return count


def _layers(base: nn.Module) -> list[nn.Module]:
    """Returns the layers of a model in the order of its modules: those of an encoder come before
    those of its decoder."""
    layers: list[nn.Module] = []
    within: set[int] = set()
    for module in base.modules():
        # Lists within a layer are parts of it.
        if id(module) in within:
            continue
        lists = [each for each in module.children() if isinstance(each, nn.ModuleList)]
        # As of XLM, which has a list of attentions and one of what follows them.
        if len(lists) > 1:
            name = type(base).__name__
            raise UsageError(
                f"--freeze: {name} does not tell its layers apart", "leave --freeze out"
            )
        for each in lists:
            layers += each
            within |= {id(part) for part in each.modules()}
    return layers


def _embeddings(base: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Returns the table of tokens, and the modules outside of layers that are called embeddings, as
    BERT's, which has other tables and a norm."""
    within: set[int] = set()
    for layer in layers:
        within |= {id(part) for part in layer.modules()}
    embeddings = [base.get_input_embeddings()]  # type: ignore[operator]
    for name, module in base.named_modules():
        last_part = name.rpartition(".")[2]
        is_named = "emb" in last_part or last_part == "wpe"  # GPT-2's
        if id(module) not in within and is_named:
            embeddings.append(module)
    return embeddings


# --- checkpoints ----------------------------------------------------------------------------------


def trained(model: Any) -> Tensors:
    """Returns a model's state without frozen weights."""
    frozen = set()
    for name, weight in model.named_parameters(remove_duplicate=False):
        if not weight.requires_grad:
            frozen.add(name)
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def fingerprint(model: Any) -> str:
    """Returns a digest of a model's frozen weights, of some numbers of each."""
    # Some numbers of each tensor tell models apart: all of them would take minutes.
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if weight.requires_grad or ".original_module." in name:
            continue
        flat = weight.detach().flatten()
        # Never 0, as of a tensor with fewer numbers.
        stride = len(flat) // _FINGERPRINT_NUMBERS + 1
        numbers = flat[::stride].cpu().contiguous()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        # As bytes: numpy has no bf16.
        digest.update(numbers.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_same(
    checkpoint: str,
    before: dict[str, Any] | None,
    now: dict[str, Any] | None,
) -> None:
    """Raises UsageError where what trains in a checkpoint does not fit what this run freezes.

    Args:
        checkpoint: its name.
        before: `LoadedModel.frozen_facts` of the run that wrote it; None: all of it trained.
        now: those of this run.
    """
    before = before or {}
    now = now or {}
    for name in before | now:
        if before.get(name) == now.get(name):
            continue
        if name == "base_sha256" and before.keys() == now.keys():
            raise UsageError(
                f"the model has changed since {checkpoint}: its frozen weights are others",
                "bring --model back as it was when the run started, or submit a new run",
            )
        what = "LoRA adapters of "
        if name == "freeze":
            what = ""
        raise UsageError(
            f"{checkpoint} has {what}{name}={before.get(name)}, this run {now.get(name)}",
            "put the run's config.json back as it was, or submit a new run",
        )
