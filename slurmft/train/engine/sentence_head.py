"""Vectors of texts, from the states of their tokens: what modules of sentence-transformers do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from slurmft.core.errors import UsageError
from slurmft.core.files import write_json
from slurmft.train.login.sentence_modules import (
    MODULES,
    POOLINGS,
    SETTINGS,
    Dense,
    SentenceModules,
)


class DenseLayer(nn.Module):
    """A linear layer and its activation. It is no `nn.Linear`, of which adapters adapt all."""

    def __init__(self, dense: Dense) -> None:
        """Loads the layer; UsageError where its weights are others than its configuration says."""
        super().__init__()
        try:
            # In fp32, as all that is trained: files may have weights of 16 bits.
            weights = load_file(dense.weights)
            self.weight = nn.Parameter(weights["linear.weight"].float())
            self.bias: nn.Parameter | None = None
            if dense.has_bias:
                self.bias = nn.Parameter(weights["linear.bias"].float())
        except (OSError, KeyError, SafetensorError) as error:
            raise UsageError(
                f"{str(dense.weights)!r} has no weights of a linear layer: {error}",
                "copy the model anew, or save it again",
            ) from error
        self.dense = dense
        self.activation = _activation(dense.activation)

    def forward(self, vectors: Tensor) -> Tensor:
        output: Tensor = self.activation(linear(vectors, self.weight, self.bias))
        return output

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the layer as sentence-transformers loads it."""
        folder.mkdir()
        config = {
            "in_features": self.dense.in_features,
            "out_features": self.dense.out_features,
            "bias": self.dense.has_bias,
            "activation_function": self.dense.activation,
        }
        write_json(folder / "config.json", config)
        weights = {"linear.weight": self.weight}
        if self.bias is not None:
            weights["linear.bias"] = self.bias
        saved = {}
        for name, weight in weights.items():
            # safetensors writes contiguous tensors alone.
            saved[name] = weight.detach().to("cpu", dtype).contiguous()
        save_file(saved, folder / "model.safetensors")


def _activation(path: str) -> nn.Module:
    """Returns an activation of torch by the path of its class."""
    # torch.nn.modules.activation.Tanh is nn.Tanh: nothing is imported for it.
    activation_class = getattr(nn, path.rpartition(".")[2], None)
    if isinstance(activation_class, type) and issubclass(activation_class, nn.Module):
        return activation_class()
    raise UsageError(
        f"torch has no activation {path!r}, which a Dense module of --model names",
        "correct its config.json",
    )


class _Announced(torch.autograd.Function):
    """Hidden states as they are; weights that are used behind the model stand in their graph, too.

    Where a model has weights that no loss uses, DDP looks for them in the graph of its output.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = len(weights)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*gradients, *[None] * ctx.weights)


class SentenceHead:
    """Makes vectors of length 1, by a pooling and the layers behind it."""

    def __init__(self, modules: SentenceModules) -> None:
        self.modules = modules
        self.layers = nn.Sequential(*map(DenseLayer, modules.dense))

    def attach(self, model: Any) -> None:
        """Puts the layers into a model of transformers: they train, and are in its checkpoints.
        Its own files do not have them."""
        if len(self.layers):
            model.sentence_dense = self.layers
            # In the model's own file, transformers would find weights that it has no layer for.
            model.saved_apart = ("sentence_dense.",)
            model.register_forward_hook(self._announce)

    def _announce(self, model: Any, inputs: Any, output: Any) -> None:
        states = output.last_hidden_state
        output.last_hidden_state = _Announced.apply(states, *self.layers.parameters())  # type: ignore[no-untyped-call]

    def size(self, hidden_size: int) -> int:
        """Returns the numbers of a vector, of a model whose states have so many."""
        if self.modules.dense:
            return self.modules.dense[-1].out_features
        return hidden_size * len(self.modules.poolings)

    def kept(self, vectors: Any) -> Any:
        """Returns what `encode()` returns of vectors, an array or a tensor: (texts, kept)."""
        return vectors[:, : self.modules.truncate_dim]

    def vectors(self, states: Tensor, lengths: Tensor) -> Tensor:
        """Returns a vector of each text: fp32, (texts, size).

        Args:
            states: those of the tokens, padding behind them: (texts, longest, hidden).
            lengths: tokens of each text: (texts,).
        """
        vectors = pooled(states.float(), lengths, self.modules.poolings)
        return normalize(self.layers(vectors), dim=-1)

    def save(self, folder: Path, hidden_size: int, dtype: torch.dtype) -> None:
        """Writes the modules into the folder of a saved model, as all versions of
        sentence-transformers read them."""
        kinds = ["Transformer", "Pooling", *["Dense"] * len(self.layers), "Normalize"]
        modules = []
        for number, kind in enumerate(kinds):
            # The Transformer lies in the folder itself, where transformers looks for a model.
            path = ""
            if number:
                path = f"{number}_{kind}"
            # The names of older versions, which newer ones still read.
            module = {"idx": number, "name": str(number), "path": path}
            modules.append(module | {"type": f"sentence_transformers.models.{kind}"})
        write_json(folder / MODULES, modules)
        (folder / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": hidden_size} | self._pooling()
        write_json(folder / "1_Pooling" / "config.json", pooling)
        for number, layer in enumerate(self.layers, start=2):
            assert isinstance(layer, DenseLayer)
            layer.save(folder / f"{number}_Dense", dtype)
        settings: dict[str, Any] = {"similarity_fn_name": "cosine"}
        if self.modules.prompts:
            settings["prompts"] = dict(self.modules.prompts)
            settings["default_prompt_name"] = self.modules.default_prompt
        if self.modules.truncate_dim is not None:
            settings["truncate_dim"] = self.modules.truncate_dim
        write_json(folder / SETTINGS, settings)

    def _pooling(self) -> dict[str, Any]:
        """Returns how the configuration of a saved model names its poolings."""
        poolings = self.modules.poolings
        switches = {switch: name in poolings for switch, name in POOLINGS.items()}
        in_order = tuple(name for name in POOLINGS.values() if name in poolings)
        if in_order != poolings:
            # Switches have one order; older versions know no other.
            return {"pooling_mode": list(poolings)}
        return switches


def pooled(states: Tensor, lengths: Tensor, poolings: Sequence[str]) -> Tensor:
    """Returns the vectors that poolings make of the states of each text's tokens, joined to one:
    (texts, poolings * hidden). Arguments as of `SentenceHead.vectors`."""
    places = torch.arange(states.shape[1], device=states.device)
    lengths = lengths[:, None]
    # Padding is behind texts; it weighs nothing.
    is_token = places < lengths
    parts = []
    for name in poolings:
        if name == "max":
            # Padding is never the largest then.
            tokens = states.masked_fill(~is_token[:, :, None], float("-inf"))
            parts.append(tokens.max(dim=1).values)
            continue
        match name:
            case "cls":
                # As padding is behind texts, the first token is always in the first place.
                weights = (places == 0).expand_as(is_token)
            case "lasttoken":
                weights = places == lengths - 1
            case "mean":
                weights = is_token / lengths
            case "mean_sqrt_len_tokens":
                weights = is_token / lengths.sqrt()
            case _:  # weightedmean
                # Tokens weigh 1, 2, 3, ...: the later, the more.
                weights = is_token * (places + 1)
                weights = weights / weights.sum(dim=1, keepdim=True)
        # `to`: some weights are flags, and bmm wants both of one type.
        parts.append(torch.bmm(weights[:, None].to(states), states).squeeze(1))
    return torch.cat(parts, dim=-1)
