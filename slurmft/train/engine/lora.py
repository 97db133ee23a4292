"""LoRA (`--lora`): low-rank adapters, by PEFT, train in place of a model's weights.

PEFT puts them into the modules of the model, which stays the one that the training loop computes
with. Frozen weights are in no checkpoint: a resume reads them from the model's source again.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import modeling_auto as auto
from transformers.pytorch_utils import Conv1D

from slurmft.core import removal
from slurmft.core.errors import UsageError, one_line
from slurmft.core.text import shown, some
from slurmft.train.config import TrainConfig, required
from slurmft.train.engine import freezing
from slurmft.train.engine.saved_weights import save_whole, saved_generation
from slurmft.train.login.sources import check_packages

Tensors = dict[str, torch.Tensor]

_TASK_TYPES = {
    "SEQ_CLS": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "QUESTION_ANS": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "SEQ_2_SEQ_LM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "CAUSAL_LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
"""PEFT's name of a task -> kind of models -> class of transformers that has its head."""

_WRAPPED_BY_PEFT = {"classifier", "score", "qa_outputs"}
"""Modules that PEFT's classes for tasks train whole, wherever in a model they are."""


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
        try:
            self._peft = get_peft_model(model, lora_config)
        except ValueError as error:
            # PEFT's messages name its own arguments.
            raise UsageError(
                f"PEFT cannot adapt {type(model).__name__}: {one_line(error)}",
                _cure(config),
            ) from error
        # Not before: PEFT's classes for tasks wrap heads that `modules_to_save` has already.
        lora_config.task_type = task_type(model)
        self.facts = settings | {"base_sha256": freezing.fingerprint(model)}
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
        with its labels, and how it generates.

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
        # PEFT's; the run writes one.
        removal.remove(folder / "README.md", removal.exactly("README.md"))
        self._model.config.save_pretrained(folder / "config")
        with saved_generation(self._model) as generation_config:
            if generation_config is not None:
                generation_config.save_pretrained(folder / "config")

    def _merged(self) -> Tensors:
        """Returns the whole model's weights, under its own names."""
        # the frozen weights change: nothing trains after this
        self._peft.merge_adapter()
        weights = {}
        for name, tensor in self._model.state_dict().items():
            if ".lora_" in name or ".original_module." in name:
                continue
            # PEFT has put its own modules in the place of the model's; of experts, one within the
            # other.
            name = re.sub(r"(\.base_layer)+\.", ".", name)
            name = name.replace(".modules_to_save.default.", ".")
            weights[name] = tensor
        return weights


def task_type(model: Any) -> str | None:
    """Returns PEFT's name of the task of a model, by its class; None for others."""
    name = type(model).__name__
    for kind, names in _TASK_TYPES.items():
        if name in names.values():
            return kind
    return None


def attach(model: Any, folder: str) -> None:
    """Puts a saved adapter, with its head, into the modules of its model."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(folder)
    # PEFT's classes for tasks wrap parts of heads, also of one that is saved as a whole.
    config.task_type = None
    # PEFT's own model, which has ours within, is not needed.
    PeftModel.from_pretrained(model, folder, config=config)


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
    tops: set[str] = set()
    heads: set[str] = set()
    writes_words = model.get_output_embeddings() is not None
    has_head = model.base_model is not model
    if has_head and not writes_words:
        for name, module in model.named_children():
            if module is not model.base_model:
                tops.add(name)
                heads.update(_parts_with_weights(name, module))
    new_modules = set()
    for name in getattr(model, "missing_keys", ()):
        # The module of a weight: its name without the last part.
        module_name, _, _ = name.rpartition(".")
        new_modules.add(module_name)
    # A head trains with all that is in it.
    below_heads = {name for name in new_modules if name.partition(".")[0] in tops}
    return sorted(heads | (new_modules - below_heads))


def _parts_with_weights(name: str, module: torch.nn.Module) -> list[str]:
    """Returns the name of a head, or those of its parts where PEFT would wrap one of them besides,
    as in that of BigBird for questions; none where it has nothing to train, as a dropout."""
    if not any(True for _ in module.parameters()):
        return []
    children = dict(module.named_children())
    if not _WRAPPED_BY_PEFT & children.keys():
        return [name]
    parts = []
    for child_name, child in children.items():
        if any(True for _ in child.parameters()):
            parts.append(f"{name}.{child_name}")
    return parts


def _cure(config: TrainConfig) -> str:
    """Returns what to do where PEFT cannot adapt a model."""
    if config.use_dora:  # as of experts
        return "leave --use-dora out, or choose other --lora-targets"
    return "choose other --lora-targets, or train without --lora"


def _check_targets(model: Any, targets: list[str]) -> None:
    linear = []
    for name, module in model.base_model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            linear.append(f".{name}")
    if not linear:  # as IBert, whose layers are of numbers of 8 bits
        raise UsageError(
            f"--lora: {type(model).__name__} has no linear layers below its head, which adapters "
            "could stand beside",
            "train it without --lora",
        )
    for target in targets:
        if not any(name.endswith(f".{target}") for name in linear):
            last_parts = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise UsageError(
                f"--lora-targets: {type(model).__name__} has no linear module {target!r}",
                f"it has {some(list(last_parts))}",
            )
