"""The model of a run as this rank computes with it, and the batches that it takes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from slurmft.core.errors import UsageError
from slurmft.train.data.tables import Batch, TokenTable
from slurmft.train.engine import cpu, freezing, lora, own_loss, packing
from slurmft.train.engine.model_flops import ModelFlops
from slurmft.train.engine.saved_weights import dtype_of_saved, save_whole
from slurmft.train.engine.vocab_trim import TrimmedVocabulary, check_tokens
from slurmft.train.loop import padding_trial
from slurmft.train.loop.setup import Setup
from slurmft.train.loop.state import Tensors

_TENSOR_CORES = 8
"""Lengths of padded batches are a multiple of this, where they fill tensor cores."""
MOST_TOKENS = 32
"""Tokens of a sample that a model with a head of tokens is tried out with: logits of a vocabulary,
for every token, take gigabytes."""


class LoadedModel:
    """The task's model, changed to what the run asks for."""

    def __init__(
        self,
        setup: Setup,
        trims: bool = False,
        fuses: bool = True,
        adapter: str | None = None,
        pads_left: bool | None = None,
        trains: bool = False,
    ) -> None:
        """
        Args:
            trims: leave the rows of a large vocabulary out that the data has no tokens for.
            fuses: compute layers that are known together.
            adapter: folder of a saved adapter that the model computes with.
            pads_left: padding stands before all texts; None: where a trial shows that it helps.
            trains: the model is to be trained: a warning, where transformers would train it by
                another loss.
        """
        self._setup = setup
        config = setup.config
        # The head of a model is drawn anew: by the same numbers on every rank.
        set_seed(config.seed)
        model = setup.task.model(setup.data)
        self.model: Any = model  # DDP's inner one
        if trains and (remark := own_loss.remark(model, setup.data)):
            setup.job.warn(remark)
        # Counted before an adapter adds to them, and before the vocabulary is trimmed.
        sizes = [p.numel() for p in model.parameters()]
        self.parameters: int = sum(sizes)
        self.adapter: lora.Adapter | None = None
        self.frozen_facts: dict[str, Any] | None = None
        """What the weights in a checkpoint belong to, where it does not have all."""
        frozen_layers = self._freeze()
        if adapter:
            lora.attach(model, adapter)
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        self.trained_parameters: int = sum(trained)
        self.flops = ModelFlops.of(model, frozen_layers)
        check_tokens(model, setup.data)
        base = getattr(model, "base_model", model)
        self._positions, _ = packing.position_limits(base)
        self._check_lengths()
        # Before the table is trimmed: packing is tried out with tokens that no data need have.
        self.packing = None
        if not pads_left:
            self.packing = self._pack(fuses)
        self._depends_on_padding = False
        """A text has other outputs in a padded batch than alone."""
        if pads_left is None:
            pads_left = self._choose_side()
        self._pads_left = pads_left
        self.vocabulary = None
        if trims:
            self.vocabulary = self._trim()
        self.batch_tokens = 0
        """Tokens of the batch that the model got last."""
        if config.activation_checkpointing:
            recompute_activations(model)
        if setup.world.device.type == "cpu":
            cpu.replace_dropout(model)

    def _freeze(self) -> int | None:
        """Freezes what --freeze or --lora says; returns the number of layers that --freeze has
        frozen, None where it is not given."""
        config = self._setup.config
        frozen_layers = None
        if config.freeze:
            frozen_layers = freezing.freeze(self.model, config.freeze)
            self.frozen_facts = {
                "freeze": config.freeze,
                "base_sha256": freezing.fingerprint(self.model),
            }
        if config.lora:
            self.adapter = lora.Adapter(self.model, config)
            self.frozen_facts = self.adapter.facts
        return frozen_layers

    def _check_lengths(self) -> None:
        """Raises UsageError where a text of any split has more tokens than the model has
        positions: it would be met after hours."""
        # Tokens of a task of the user's own, whatever it cuts its texts to.
        longest = self._setup.data.longest
        most = self._positions
        if longest > most:
            raise UsageError(
                f"a text of {longest:,} tokens is longer than the {most:,} positions of the model",
                f"cut texts: --max-length {most}",
            )

    def _pack(self, fuses: bool) -> packing.Packing | None:
        """Makes the model compute without padding, if asked to; a warning, where it cannot."""
        if self._setup.config.batching not in ("packed", "grouped"):
            return None
        data = self._setup.data
        packed = packing.pack(self.model, fuses, data.longest)
        if isinstance(packed, packing.Packing):
            # A head may see in real texts what those that it was tried out with do not have.
            first_samples = data.train.few(self._most_tokens)
            difference = packed.difference_for(first_samples, data.pad_id)
            if not difference:
                return packed
            packed.undo()
            name = type(self.model).__name__
            packed = (
                f"{name} gives other outputs without padding for samples of the training data "
                f"(they differ by {difference:.2g})"
            )
        self._setup.job.warn(f"{packed}; batches are padded to their longest sample")
        return None

    @property
    def _most_tokens(self) -> int | None:
        """Tokens of each sample that the model is tried out with; None: all."""
        # A head of tokens looks at each token by itself: the first ones are enough.
        if self._setup.data.train.token_labels is None:
            return None
        return MOST_TOKENS

    def _choose_side(self) -> bool:
        """Returns whether padding is to stand before texts: where a head reads the last place of a
        batch, as XLNet's, so that a text has the outputs that it has alone.

        A warning, where it has others in either case.
        """
        # Packed batches have no padding. Other models than transformers' take other arguments;
        # those of few bits round otherwise for each batch.
        is_tried = (
            hasattr(self.model, "can_generate") and not self._setup.config.load_in_4bit
        )
        if self.packing or not is_tried:
            return False
        # Other heads of tokens may look for the end of a text, as Longformer's for questions.
        most_tokens = None
        if self.model.can_generate():
            most_tokens = MOST_TOKENS
        data = self._setup.data
        differences = padding_trial.try_out(
            self.model,
            self._setup.task,
            data.train,
            most_tokens,
            data.pad_id,
            self._positions,
        )
        name = type(self.model).__name__
        if isinstance(differences, str):
            # No warning: training refuses what the model cannot do.
            self._setup.job.say(
                f"whether outputs of {name} depend on padding could not be tried: {differences}"
            )
            return False
        if not differences.behind:
            return False
        # Only where it helps: otherwise padding stays behind texts, as most models have it.
        if differences.before == 0:
            return True
        self._depends_on_padding = True
        cure = "--eval-batch-size 1"
        if self._setup.config.batching == "padded":
            cure = f"--batching dynamic {cure}"
        self._setup.job.warn(
            f"{name} gives other outputs for a text in a padded batch than for the text alone "
            f"(they differ by {differences.behind:.2g}): results depend on which texts are in a "
            f"batch together; {cure} evaluates each text alone"
        )
        return False

    def _trim(self) -> TrimmedVocabulary | None:
        vocabulary = TrimmedVocabulary.trim(self.model, self._setup.data)
        if isinstance(vocabulary, str):
            self._setup.job.warn(f"{vocabulary}; they are trained as well")
            return None
        # The main rank saves the model: the others need no rows that are not trained.
        if vocabulary and not self._setup.world.is_main:
            vocabulary.forget()
        return vocabulary

    def load(self, weights: Tensors) -> None:
        """Takes the weights of a checkpoint, which has none that are frozen."""
        # Those that are frozen are missing: they are as they were loaded.
        is_strict = all(p.requires_grad for p in self.model.parameters())
        self.model.load_state_dict(weights, strict=is_strict)

    def save(self, folder: Path, weights: Tensors | None = None) -> None:
        """Writes the model as transformers, or PEFT, loads it.

        Args:
            weights: all of a sharded model.
        """
        if self.vocabulary:
            weights = self.vocabulary.state_dict(self.model)
        dtype = self.save_dtype()
        if self.adapter:
            self.adapter.save(folder, weights, self._setup.config.merge, dtype)
        else:
            save_whole(self.model, folder, weights, dtype)

    def save_dtype(self) -> torch.dtype:
        """Returns the type of the saved weights."""
        return dtype_of_saved(self.model, self._setup.config)

    def batch(self, table: TokenTable, samples: np.ndarray) -> Batch:
        """Returns samples as the model takes them, on the CPU. Any thread may call it."""
        if self.packing:
            return table.packed(samples)
        setup = self._setup
        on_gpu = setup.world.device.type != "cpu"
        multiple = 1
        # As Trainer pads where padding decides about outputs.
        if on_gpu and setup.precision != "fp32" and not self._depends_on_padding:
            multiple = _TENSOR_CORES
        shortest = 0
        if setup.config.batching == "padded":
            shortest = setup.data.max_length or setup.config.max_length or table.longest
        return table.batch(
            samples,
            setup.data.pad_id,
            multiple,
            shortest,
            self._pads_left,
            most=self._positions,
        )

    def plain_batches(self, table: TokenTable, samples: np.ndarray) -> list[Batch]:
        """Returns samples as any model of transformers takes them, on the CPU: each alone, in its
        order; all in one batch where the outputs of a text depend on padding."""
        pad_id = self._setup.data.pad_id
        if self._depends_on_padding:
            return [table.batch(samples, pad_id)]
        return [table.batch(samples[[place]], pad_id) for place in range(len(samples))]

    def sent(self, batch: Batch, table: TokenTable) -> Batch:
        """Returns a batch on the device, which the model gets next."""
        device = self._setup.world.device
        self.batch_tokens = batch.tokens
        self.expect(batch, table, device)
        return batch.to(device)

    def expect(self, batch: Batch, table: TokenTable, device: torch.device) -> None:
        """Announces a batch to the model, which computes it on a device."""
        if self.packing:
            lengths = torch.from_numpy(table.lengths(batch.indices))
            self.packing.expect(lengths, device)


def recompute_activations(model: Any) -> None:
    """Keeps no activations of layers for the backward pass: they are computed again in it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:  # transformers 4
        enable = model.gradient_checkpointing_enable
    try:
        # The reentrant kind makes no gradients behind frozen embeddings.
        enable({"use_reentrant": False})
    except ValueError:
        name = type(model).__name__
        raise UsageError(
            f"--activation-checkpointing: {name} does not support it", "leave it out"
        ) from None
