"""Floating-point operations that the training of a model takes, by the usual account.

A token's states and a matrix: two operations for each weight forwards, as many for the gradient of
the states, and as many for that of the weight, if it trains; below all that trains (--freeze) there
are no gradients. Attention: two products of a sequence's tokens with each other. What is computed
again, or for padding, does not count: over what the hardware could do, it is the model FLOPs
utilisation (MFU).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D  # GPT-2's


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of a training step."""

    per_token: float
    per_pair: float
    """Operations for each pair of tokens of one sequence, in all layers."""

    @classmethod
    def of(cls, model: Any, frozen_layers: int | None = None) -> "ModelFlops":
        """Counts the operations of a model of transformers; heads that see one token of a sequence
        are left out.

        Args:
            frozen_layers: number of layers below all that trains; None: what is frozen is below
                adapters.
        """
        frozen_passes = 2
        if frozen_layers is not None:
            frozen_passes = 1
        per_token = 0
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D) and "classifier" not in name:
                passes = 3 if module.weight.requires_grad else frozen_passes
                per_token += 2 * module.weight.numel() * passes
        layers = getattr(model.config, "num_hidden_layers", None) or 0
        width = getattr(model.config, "hidden_size", None) or 0
        # Two products of 2 operations a number, forwards once and backwards twice.
        frozen = min(frozen_layers or 0, layers)
        per_pair: float = (12 * (layers - frozen) + 4 * frozen) * width
        is_causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if is_causal:  # a token sees those before it alone: half of all pairs
            per_pair = per_pair / 2
        return cls(per_token, per_pair)

    def of_batch(self, lengths: Tensor) -> float:
        """Returns the operations of sequences of so many tokens: (batch,)."""
        tokens = float(lengths.sum())
        pairs = float(lengths.square().sum())
        return self.per_token * tokens + self.per_pair * pairs
