"""--global-batch-size on any number of ranks: losses are those of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, Trainer, TrainingArguments

from slurmft.train.data.stream import epoch_order
from tests.conftest import Done, records, slurmft
from tests.support.by_trainer import classifier, samples, training_rows

pytestmark = [pytest.mark.processes, pytest.mark.extra("training")]

STEPS = 6
SIZES = {
    "1": ("--nodes", "1", "--global-batch-size", "32"),
    "2": ("--nodes", "2", "--global-batch-size", "32"),
    "4": ("--nodes", "4", "--global-batch-size", "32"),
    "plain": ("--nodes", "2", "--gradient-accumulation-steps", "2"),
}


class InOrder(Trainer):  # type: ignore[misc, unused-ignore]
    """Takes the samples in their order, and keeps the exact losses of micro-steps."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        # The loss of this model is a mean, whatever number of terms it is passed: without this,
        # gradients of four micro-steps are summed, not averaged.
        self.model_accepts_loss_kwargs = False
        self.losses: list[float] = []

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **keywords: Any) -> Any:
        loss = super().training_step(*args, **keywords)
        self.losses.append(float(loss))
        return loss


@pytest.fixture(scope="module")
def expected(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """Losses of steps of four batches of 8."""
    rows = training_rows(tiny_data)
    ordered = [rows[row] for row in epoch_order(len(rows), 42, 0)]
    trainer = InOrder(
        classifier(tiny_model),
        TrainingArguments(
            output_dir=str(tmp_path_factory.mktemp("trainer")),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            max_steps=STEPS,
            learning_rate=0.003,
            lr_scheduler_type="linear",
            warmup_steps=1,
            weight_decay=0.01,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=samples(tiny_model, ordered),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    trainer.train()
    return [sum(trainer.losses[at : at + 4]) for at in range(0, 4 * STEPS, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_losses_are_those_of_trainer(
    sizes: str, expected: list[float], tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    done: Done = slurmft(
        *("submit", "--cluster", "local", "--follow", "--runs-dir", str(tmp_path)),
        *("--task", "emotion", "--data", str(tiny_data), "--model", str(tiny_model)),
        *("--precision", "fp32", "--dropout", "0", "--log-every", "1"),
        *("--learning-rate", "0.003", "--warmup-steps", "1"),
        *("--max-steps", str(STEPS), "--batch-size", "8", *SIZES[sizes]),
        imported=True,
    )
    assert done.code == 0, done.err
    assert done.result["global_batch_size"] == 32
    losses = [record["loss"] for record in records(done.run, "step")]
    assert losses == pytest.approx(expected, rel=1e-6, abs=1e-6)
