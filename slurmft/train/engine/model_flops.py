"""How many floating-point operations the training of a model takes, by the usual account.

A token's states and a matrix: two operations for each weight forwards, as many for the gradient of
the states, and as many for that of the weight, if it trains. Attention: two products of a
sequence's tokens with each other. What is computed again, or for padding, does not count: over what
the hardware could do, it is the model FLOPs utilisation (MFU).
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
    """Of tokens of one sequence, in all layers."""

    @classmethod
    def of(cls, model: Any) -> "ModelFlops":
        """Those of a model of transformers; heads that see one token of a sequence are left out."""
        named = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D))
        matrices = [module for name, module in named if "classifier" not in name]
        each = (2 * m.weight.numel() * (3 if m.weight.requires_grad else 2) for m in matrices)
        layers, width = (
            getattr(model.config, name, None) or 0 for name in ("num_hidden_layers", "hidden_size")
        )
        attention = 12 * layers * width
        causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        return cls(sum(each), attention / 2 if causal else attention)

    def of_batch(self, lengths: Tensor) -> float:
        """Those of sequences of so many tokens: (batch,)."""
        return self.per_token * float(lengths.sum()) + self.per_pair * float(lengths.square().sum())
