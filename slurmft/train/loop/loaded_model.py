"""The model of a run as this rank computes with it, and the batches that it takes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import set_seed

from slurmft.core.errors import UsageError
from slurmft.job.process_group import World
from slurmft.node import hardware
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import Batch, TokenTable
from slurmft.train.engine import cpu, lora, packing
from slurmft.train.engine.model_flops import ModelFlops
from slurmft.train.engine.vocab_trim import TrimmedVocabulary
from slurmft.train.loop.checkpoint import Tensors

if TYPE_CHECKING:
    from slurmft.train.loop.trainer import Training


class LoadedModel:
    """The task's model, changed to what the run asks for; of a sharded one, this rank's share."""

    def __init__(self, training: "Training", trims: bool) -> None:
        """
        Args:
            trims: leave the rows of a large vocabulary out that the data has no tokens for.
        """
        self._training = training
        config, sharding = training.config, training.sharding
        set_seed(config.seed)
        model = training.task.model(training.data)
        self.model: Any = model  # DDP's inner one
        self.parameters: int = sum(p.numel() for p in model.parameters())
        self.adapter = lora.Adapter(model, config) if config.lora else None
        self.trained_parameters: int = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.flops = ModelFlops.of(model)
        self.packing = self._pack()
        self.vocabulary = self._trim() if trims else None
        if config.activation_checkpointing:
            recompute_activations(model)
        if training.world.device.type == "cpu":
            cpu.replace_dropout(model)
        if sharding:
            sharding.shard(model)

    def _pack(self) -> packing.Packing | None:
        """Makes the model compute without padding, if asked to; a warning, where it cannot."""
        training = self._training
        if training.config.batching not in ("packed", "grouped"):
            return None
        longest = max(int(np.diff(table.offsets).max()) for table in training.data.tables)
        packed = packing.pack(self.model, not training.sharding, longest)
        if isinstance(packed, packing.Packing):
            return packed
        training.job.warn(f"{packed}; batches are padded to their longest sample")
        return None

    def _trim(self) -> TrimmedVocabulary | None:
        vocabulary = TrimmedVocabulary.trim(self.model, self._training.data)
        if isinstance(vocabulary, str):
            self._training.job.warn(f"{vocabulary}; they are trained as well")
            return None
        if vocabulary and not self._training.world.is_main:
            vocabulary.forget()
        return vocabulary

    def load(self, weights: Tensors) -> None:
        """Takes the weights of a checkpoint, which has none that are frozen."""
        self.model.load_state_dict(weights, strict=not self.adapter)

    def save(self, folder: Path, weights: Tensors | None = None) -> None:
        """Writes the model as transformers, or PEFT, loads it.

        Args:
            weights: all of a sharded model.
        """
        if self.vocabulary:
            weights = self.vocabulary.state_dict(self.model)
        if self.adapter:
            self.adapter.save(folder, weights, self._training.config.merge)
        else:
            self.model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")

    def batch(self, table: TokenTable, samples: np.ndarray) -> Batch:
        """Samples as the model takes them, on the CPU. Any thread may call it."""
        training = self._training
        if self.packing:
            return training.task.batch(table.packed(samples), table)
        on_gpu, least = training.world.device.type != "cpu", 0
        multiple = 8 if on_gpu and training.precision != "fp32" else 1  # fills tensor cores
        if training.config.batching == "padded":
            least = training.config.max_length or int(np.diff(table.offsets).max())
        batch = table.batch(samples, training.data.pad_id, multiple, least)
        return training.task.batch(batch, table)

    def sent(self, batch: Batch, table: TokenTable) -> Batch:
        """A batch on the device, which the model gets next."""
        self.batch_tokens = batch.tokens
        if self.packing:
            lengths = torch.from_numpy(table.lengths(batch.indices))
            self.packing.expect(lengths, self._training.world.device)
        return batch.to(self._training.world.device)


def choose_precision(config: TrainConfig, world: World) -> str:
    """The precision asked for, or the fastest that every rank's hardware computes natively. What
    remains in fp32 is computed in TF32 from then on, if that is asked for.

    Raises:
        UsageError: fp16 or TF32 on a CPU.
    """
    asked, on_gpu = config.precision, world.device.type != "cpu"
    if not on_gpu and (asked == "fp16" or config.tf32):
        flag = "--tf32" if config.tf32 else "--precision fp16"
        raise UsageError(f"{flag} needs GPUs", "use --precision bf16")
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    if asked != "auto":
        return asked
    gpu = torch.get_device_module(world.device)
    native = gpu.is_bf16_supported(False) if on_gpu else hardware.computes_bf16()
    if all(world.all_values(float(native))):
        return "bf16"
    return "fp16" if on_gpu and config.shard == "none" else "fp32"


def recompute_activations(model: Any) -> None:
    """Keeps no activations of layers for the backward pass; transformers 4 has another name."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    # The other kind makes no gradients behind frozen embeddings.
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
