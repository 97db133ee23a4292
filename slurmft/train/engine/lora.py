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
from slurmft.train.config import TrainConfig
from slurmft.train.login.sources import check_packages
from slurmft.train.loop.state import Tensors

_COMPARED = 2**16
"""Numbers of each frozen tensor that tell one model from another, about."""


class Adapter:
    """The adapters of a model."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        """Puts adapters into a model of transformers; they, and its head, are all that trains.
        UsageError where PEFT is not installed, or the model lacks a target."""
        check_packages(config)
        from peft import LoraConfig, get_peft_model

        assert config.lora is not None
        targets = config.lora_targets.split(",") if config.lora_targets else []
        _check_targets(model, targets)
        settings: dict[str, Any] = {
            "r": config.lora,
            "lora_alpha": config.lora_alpha or 2 * config.lora,
            "target_modules": targets or "all-linear",
            "use_rslora": config.use_rslora,
            "use_dora": config.use_dora,
        }
        whole = {"lora_dropout": config.lora_dropout, "modules_to_save": _heads(model)}
        self._model = model
        self._peft = get_peft_model(model, LoraConfig(**settings, **whole))
        self.facts = settings | {"base_sha256": _fingerprint(model)}
        """What a checkpoint's adapters belong to."""

    def save(self, folder: Path, weights: Tensors | None, merge: bool) -> None:
        """Writes adapters and heads as PEFT does, and in `config/` what an adapter's own
        configuration lacks: that of the whole model, with its labels. Or that model, merged. Its
        weights are the model's own, where they are not given."""
        if merge:
            self._model.save_pretrained(folder, state_dict=self._merged(), max_shard_size="5GB")
            return
        state = weights and {f"base_model.model.{name}": t for name, t in weights.items()}
        self._peft.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
        (folder / "README.md").unlink()  # PEFT's; the run writes one
        self._model.config.save_pretrained(folder / "config")

    def _merged(self) -> Tensors:
        """The whole model's weights, under its own names."""
        self._peft.merge_adapter()  # the frozen weights change: nothing trains after this
        return {
            name.replace(".base_layer.", ".").replace(".modules_to_save.default.", "."): tensor
            for name, tensor in self._model.state_dict().items()
            if ".lora_" not in name and ".original_module." not in name
        }


def trained(model: Any) -> Tensors:
    """A model's state without frozen weights."""
    weights = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def check_same(checkpoint: str, before: dict[str, Any] | None, adapter: Adapter | None) -> None:
    """Raises UsageError where a checkpoint's adapters (their `facts`) fit not those of this run."""
    was, now = before or {}, adapter.facts if adapter else {}
    name = next((name for name in was | now if was.get(name) != now.get(name)), None)
    if name == "base_sha256":
        raise UsageError(
            f"the model has changed since {checkpoint}: its frozen weights are others",
            "bring --model back as it was when the run started, or submit a new run",
        )
    if name:
        raise UsageError(
            f"{checkpoint} has LoRA adapters of {name}={was.get(name)}, this run {now.get(name)}",
            "put the run's config.json back as it was, or submit a new run",
        )


def quantization(config: TrainConfig) -> dict[str, Any]:
    """What `from_pretrained` gets for --load-in-4bit; UsageError without GPU, or a bitsandbytes
    that works with it."""
    if not config.load_in_4bit:
        return {}
    if not torch.accelerator.is_available():
        raise UsageError("--load-in-4bit needs a GPU, and this process has none", "leave it out")
    check_packages(config)
    _check_bitsandbytes()
    from transformers import BitsAndBytesConfig

    bits: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    rounded = BitsAndBytesConfig(load_in_4bit=True, **bits)
    here = torch.accelerator.current_device_index()
    return {"quantization_config": rounded, "device_map": {"": here}}


def _check_bitsandbytes() -> None:
    """Raises UsageError where its compiled part cannot be used."""
    try:
        native = importlib.import_module("bitsandbytes.cextension").lib
        problem = getattr(native, "formatted_error", None)  # of the stand-in, if it has none
    except Exception as error:  # whatever the import of another build raises
        problem = one_line(error)
    if problem and torch.cuda.is_available():  # on XPUs it does without
        raise UsageError(
            f"--load-in-4bit: bitsandbytes does not work here: {shown(problem, 200)}",
            f"install one for torch {torch.__version__} and its GPUs, or leave the flag out",
        )


def _heads(model: Any) -> list[str]:
    """Modules that train whole: those on top of the base model, where it is not to write words, and
    those that its source has no weights for."""
    writes, base = model.get_output_embeddings() is not None, model.base_model
    above = () if writes else (n for n, m in model.named_children() if m is not base)
    heads = {name for name in above if [*model.get_submodule(name).parameters()]}
    new = {name.rpartition(".")[0] for name in getattr(model, "missing_keys", ())}
    return sorted(heads | {name for name in new if name.partition(".")[0] not in heads})


def _check_targets(model: Any, targets: list[str]) -> None:
    modules = model.base_model.named_modules()
    linear = [f".{n}" for n, m in modules if isinstance(m, torch.nn.Linear | Conv1D)]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in linear):
            names = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise UsageError(
                f"--lora-targets: {type(model).__name__} has no linear module {target!r}",
                f"it has {some([*names])}",
            )


def _fingerprint(model: Any) -> str:
    """Of a model's frozen weights."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if not weight.requires_grad and ".original_module." not in name:
            flat = weight.detach().flatten()
            part = flat[:: len(flat) // _COMPARED + 1].cpu().contiguous().view(torch.uint8)
            digest.update(f"{name}{tuple(weight.shape)}".encode() + part.numpy().tobytes())
    return digest.hexdigest()
