"""LoRA (`--lora`): low-rank adapters, by PEFT, train in place of a model's weights.

PEFT puts them into the modules of the model, which stays the one that the training loop computes
with. Frozen weights are in no checkpoint: a resume reads them from the model's source again.
"""

import hashlib
import importlib
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from slurmft.core.errors import UsageError, one_line
from slurmft.core.text import shown, some
from slurmft.train.config import TrainConfig, required
from slurmft.train.engine.saved_weights import save_whole
from slurmft.train.login.sources import check_packages

Tensors = dict[str, torch.Tensor]

_FINGERPRINT_NUMBERS = 2**16
"""Numbers of each frozen tensor, about, that tell one model from another."""


class Adapter:
    """Adapters of a model of transformers; they, and its head, are all that trains.

    Raises:
        UsageError: PEFT is not installed, or the model lacks a target.
    """

    def __init__(self, model: Any, config: TrainConfig) -> None:
        check_packages(config)
        from peft import LoraConfig, get_peft_model

        rank = int(required(config, "lora"))
        targets = []
        if config.lora_targets:
            targets = config.lora_targets.split(",")
        _check_targets(model, targets)
        settings: dict[str, Any] = {
            "r": rank,
            # Without --use-rslora, PEFT scales adapters by alpha / rank: by 2, whatever the rank.
            "lora_alpha": config.lora_alpha or 2 * rank,
            "target_modules": targets or "all-linear",
            "use_rslora": config.use_rslora,
            "use_dora": config.use_dora,
        }
        lora_config = LoraConfig(
            **settings,
            lora_dropout=config.lora_dropout,
            modules_to_save=_heads(model),
        )
        self._model = model
        self._peft = get_peft_model(model, lora_config)
        self.facts = settings | {"base_sha256": _fingerprint(model)}
        """Settings and frozen weights that a checkpoint's adapters belong to."""

    def save(
        self,
        folder: Path,
        weights: Tensors | None,
        merge: bool,
        dtype: torch.dtype,
    ) -> None:
        """Writes adapters and heads as PEFT does, or the whole model with the adapters merged.

        The folder `config` gets what an adapter's own configuration lacks: that of the whole model,
        with its labels.

        Args:
            weights: weights of a sharded model; None: the model's own.
            merge: write the whole model.
            dtype: type of the weights of a whole model; adapters are in fp32.
        """
        if merge:
            save_whole(self._model, folder, self._merged(), dtype)
            return
        state = None
        if weights:
            # PEFT takes the names of its own model, which has ours within.
            state = {}
            for name, tensor in weights.items():
                state[f"base_model.model.{name}"] = tensor
        self._peft.save_pretrained(
            str(folder),
            state_dict=state,
            save_embedding_layers=False,
        )
        (folder / "README.md").unlink()  # PEFT's; the run writes one
        self._model.config.save_pretrained(folder / "config")

    def _merged(self) -> Tensors:
        """Returns the whole model's weights, under its own names."""
        # the frozen weights change: nothing trains after this
        self._peft.merge_adapter()
        weights = {}
        for name, tensor in self._model.state_dict().items():
            if ".lora_" in name or ".original_module." in name:
                continue
            # PEFT has put its own modules in the place of the model's.
            name = name.replace(".base_layer.", ".")
            name = name.replace(".modules_to_save.default.", ".")
            weights[name] = tensor
        return weights


def trained(model: Any) -> Tensors:
    """Returns a model's state without frozen weights."""
    frozen = set()
    for name, weight in model.named_parameters(remove_duplicate=False):
        if not weight.requires_grad:
            frozen.add(name)
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def check_same(
    checkpoint: str,
    facts: dict[str, Any] | None,
    adapter: Adapter | None,
) -> None:
    """Raises UsageError where a checkpoint's adapters do not fit those of this run.

    Args:
        checkpoint: its name.
        facts: `Adapter.facts` of the run that wrote it; None: it had no adapters.
    """
    before = facts or {}
    now: dict[str, Any] = {}
    if adapter:
        now = adapter.facts
    for name in before | now:
        if before.get(name) == now.get(name):
            continue
        if name == "base_sha256":
            raise UsageError(
                f"the model has changed since {checkpoint}: its frozen weights are others",
                "bring --model back as it was when the run started, or submit a new run",
            )
        raise UsageError(
            f"{checkpoint} has LoRA adapters of {name}={before.get(name)}, this run "
            f"{now.get(name)}",
            "put the run's config.json back as it was, or submit a new run",
        )


# --- weights in 4 bits ----------------------------------------------------------------------------


def quantization(config: TrainConfig) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` for --load-in-4bit.

    Raises:
        UsageError: there is no GPU, or no bitsandbytes that works with it.
    """
    if not config.load_in_4bit:
        return {}
    if not torch.accelerator.is_available():
        problem = "--load-in-4bit needs a GPU, and this process has none"
        raise UsageError(problem, "leave it out")
    check_packages(config)
    _check_bitsandbytes()
    from transformers import BitsAndBytesConfig

    # As in QLoRA (Dettmers et al. 2023).
    settings: dict[str, Any] = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }
    # Each rank loads the whole model onto its own GPU.
    device = torch.accelerator.current_device_index()
    return {
        "quantization_config": BitsAndBytesConfig(**settings),
        "device_map": {"": device},
    }


def _check_bitsandbytes() -> None:
    """Raises UsageError where its compiled part cannot be used."""
    try:
        library = importlib.import_module("bitsandbytes.cextension").lib
        # of its stand-in, if there is none
        problem = getattr(library, "formatted_error", None)
    except Exception as error:  # whatever the import of another build raises
        problem = one_line(error)
    if problem and torch.cuda.is_available():  # on XPUs it does without
        raise UsageError(
            f"--load-in-4bit: bitsandbytes does not work here: {shown(problem, 200)}",
            f"install one for torch {torch.__version__} and its GPUs, or leave the flag out",
        )


# --- parts of a model -----------------------------------------------------------------------------


def _heads(model: Any) -> list[str]:
    """Returns the modules that train whole.

    They are those on top of the base model, unless it writes words, and those that its source has
    no weights for.
    """
    heads = set()
    writes_words = model.get_output_embeddings() is not None
    if not writes_words:
        for name, module in model.named_children():
            # Dropouts and activations have nothing to train.
            has_weights = any(True for _ in module.parameters())
            if module is not model.base_model and has_weights:
                heads.add(name)
    new_modules = set()
    for name in getattr(model, "missing_keys", ()):
        # The module of a weight: its name without the last part.
        module_name, _, _ = name.rpartition(".")
        new_modules.add(module_name)
    # A head trains with all that is in it.
    below_heads = {name for name in new_modules if name.partition(".")[0] in heads}
    return sorted(heads | (new_modules - below_heads))


def _check_targets(model: Any, targets: list[str]) -> None:
    linear = []
    for name, module in model.base_model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            linear.append(f".{name}")
    for target in targets:
        if not any(name.endswith(f".{target}") for name in linear):
            last_parts = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise UsageError(
                f"--lora-targets: {type(model).__name__} has no linear module {target!r}",
                f"it has {some(list(last_parts))}",
            )


def _fingerprint(model: Any) -> str:
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
