"""The saved model beside the one that was trained: the outputs of both for some validation samples.

Whoever uses a run's model loads its files by transformers. Whatever computes otherwise here (packed
batches, layers of our own, a trimmed vocabulary) must not make another model of them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurmft.core import descent
from slurmft.core.errors import one_line
from slurmft.node import hardware
from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.engine.evaluating import evaluating
from slurmft.train.engine.lora import attach
from slurmft.train.engine.packing import OUTPUTS, without_padding
from slurmft.train.loop.loaded_model import MOST_TOKENS, LoadedModel
from slurmft.train.loop.setup import Setup
from slurmft.train.tasks.seq2seq import NO_CACHE

_ROUNDING = 1e-3
"""Largest difference that is rounding, relative to the largest output."""
_COARSE_ROUNDING = 0.05
"""That of weights that are saved in 16 bits, or of another device's arithmetic."""
_LARGEST_SHARE = 0.25
"""Share of a node's memory that the second model may take."""


def compare(setup: Setup, loaded: LoadedModel) -> dict[str, Any] | None:
    """Compares the saved model, as transformers loads it, with the trained one; a warning where
    they differ. On the main rank, which has the whole model. Adapters are compared with the base
    that they are for.

    Returns:
        Number of samples, and the largest difference of outputs; None: they were not compared, as
        where the model has no output of `OUTPUTS`.
    """
    folder = descent.through(setup.run_dir.model)
    # A base in 4 bits computes on GPUs alone.
    if setup.config.load_in_4bit or not hasattr(loaded.model, "from_pretrained"):
        return None
    size_mib = loaded.parameters * 4 / 2**20
    if size_mib > _LARGEST_SHARE * hardware.memory_mib(Path("/")):
        setup.job.say(
            "the saved model is not compared: a second one needs too much memory"
        )
        return None
    try:
        samples = _Samples.few(setup, loaded)
        trained = _outputs_of_trained(setup, loaded, samples)
        saved = _outputs_of_saved(folder, loaded.model, samples)
        pairs = [(trained[name], saved[name]) for name in saved]
        if not pairs:
            return None
        difference, largest = _largest(pairs)
    except Exception as error:  # whatever it is: the run has its model
        setup.job.warn(f"the saved model could not be compared: {one_line(error)}")
        return None
    limit = _ROUNDING
    on_cpu = setup.world.device.type == "cpu"
    if not on_cpu or loaded.save_dtype() is not torch.float32:
        limit = _COARSE_ROUNDING
    if not difference <= limit * largest:  # NaN is no agreement
        setup.job.warn(
            f"the saved model gives other outputs than the trained one: for {samples.count} "
            f"validation samples they differ by {difference:.2g}"
        )
    return {"samples": samples.count, "largest_difference": difference}


@dataclass(frozen=True, slots=True)
class _Samples:
    """A few validation samples, as batches for both models, in the same order."""

    count: int
    table: TokenTable
    """The table that they are of."""
    of_run: Batch
    """As the run makes its batches."""
    plain: list[Batch]
    """As users of the saved model have them: padding that the run has put in the wrong place would
    not be seen beside the same padding."""

    @classmethod
    def few(cls, setup: Setup, loaded: LoadedModel) -> "_Samples":
        """Returns the shortest of the first samples; of a language model their first tokens."""
        table = setup.data.validation
        samples = table.few_samples()
        has_token_labels = table.token_labels is not None
        if has_token_labels:
            table = table.few(MOST_TOKENS)
            samples = np.arange(len(table))
        of_run = loaded.batch(table, samples)
        # A packed batch has sorted its samples.
        plain = loaded.plain_batches(table, of_run.indices)
        # Samples may have targets that the model takes, as those of a decoder. `few` has none.
        if not has_token_labels:
            of_run = setup.task.batch(of_run, table)
            plain = [setup.task.batch(batch, table) for batch in plain]
        return cls(len(samples), table, of_run, plain)


@torch.no_grad()
def _outputs_of_trained(
    setup: Setup, loaded: LoadedModel, samples: _Samples
) -> dict[str, Tensor]:
    """Returns the outputs of the model that the run has trained."""
    model = loaded.model
    # In fp32: Accelerate's wrapper would let it compute in the run's precision.
    forward = getattr(model, "_original_forward", model)
    with evaluating(model):
        output = forward(**_uncached(loaded.sent(samples.of_run, samples.table)))
    return _compared(output, samples.of_run, samples.table)


@torch.no_grad()
def _outputs_of_saved(
    folder: Path, trained: Any, samples: _Samples
) -> dict[str, Tensor]:
    """Returns the outputs of the saved model on the CPU, as its card loads it."""
    model = _load(folder, trained)
    model.eval()
    outputs = []
    for batch in samples.plain:
        output = model(**_uncached(batch))
        outputs.append(_compared(output, batch, samples.table))
    return {name: torch.cat([each[name] for each in outputs]) for name in outputs[0]}


def _load(folder: Path, trained: Any) -> Any:
    given = {
        "dtype": torch.float32,
        "use_safetensors": True,
        "trust_remote_code": False,
    }
    if (folder / "config.json").is_file():
        return type(trained).from_pretrained(folder, **given)
    # An adapter: its base has another head.
    given["config"] = type(trained.config).from_pretrained(folder / "config")
    adapter = json.loads((folder / "adapter_config.json").read_text())
    if not adapter["use_dora"]:
        return type(trained).from_pretrained(folder, **given)
    # transformers would leave out its magnitudes.
    base = adapter["base_model_name_or_path"]
    # A head of another task gives way to the adapter's.
    model = type(trained).from_pretrained(base, ignore_mismatched_sizes=True, **given)
    attach(model, str(folder))
    return model


def _uncached(batch: Batch) -> dict[str, Any]:
    """Returns the inputs of a batch, with which a decoder computes as in the training."""
    if "decoder_input_ids" in batch.inputs:
        return batch.inputs | NO_CACHE
    return batch.inputs


def _compared(output: Any, batch: Batch, table: TokenTable) -> dict[str, Tensor]:
    """Returns those outputs of a batch that are compared: of the samples, or of their tokens one
    after another."""
    is_token = _is_token(batch, table)
    values = {}
    for name in OUTPUTS & output.keys():
        value = without_padding(name, output[name], is_token)
        values[name] = value.float().cpu()
    return values


def _is_token(batch: Batch, table: TokenTable) -> Tensor:
    """Returns which places of a padded batch, or of padded outputs of a packed one, hold a token:
    bool, (batch, width)."""
    if "decoder_input_ids" in batch.inputs:
        return batch.targets["labels"] != IGNORED
    if "attention_mask" in batch.inputs:
        return batch.inputs["attention_mask"].bool()
    lengths = torch.from_numpy(table.lengths(batch.indices))
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _largest(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Returns the largest difference of outputs, NaN where one of them is NaN; and the largest
    output, at least 1."""
    differences = []
    sizes = [torch.tensor(1.0)]
    for output, expected in pairs:
        differences.append((output - expected).abs().max())
        sizes.append(expected.abs().max())
    # Not Python's max, which passes NaN over.
    return float(torch.stack(differences).max()), float(torch.stack(sizes).max())
