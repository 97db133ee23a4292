"""Learning rates of every step, and which weights decay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparisons.table import Row, check, largest
from comparisons.trainings import TRAINER

STEPS = (3, 13, 32, 315)
WARM_UPS = (0.0, 0.06, 0.1, 0.25)


@check("schedules", 1e-12)
def learning_rates(folder: Path) -> Iterator[Row]:
    """The rates are of the order of 1."""
    for schedule in ("linear", "cosine", "constant"):
        differences = [
            largest(
                rates(schedule, steps, ratio), expected_rates(schedule, steps, ratio)
            )
            for steps in STEPS
            for ratio in WARM_UPS
        ]
        check = f"learning rates, `--lr-schedule {schedule}`, 16 warm-ups"
        yield Row(check, TRAINER, max(differences))


def a_model() -> Any:
    import torch

    return torch.nn.Linear(2, 2)


def rates(schedule: str, steps: int, warmup_ratio: float) -> list[float]:
    from slurmft.train.config import TrainConfig
    from slurmft.train.loop.step_plan import Plan
    from slurmft.train.parallel.optim import make_optimizer, make_scheduler

    config = TrainConfig.resolve(
        batch_size=8, epochs=1, learning_rate=1.0, lr_schedule=schedule,
        warmup_ratio=warmup_ratio,
    )  # fmt: skip
    plan = Plan(
        config=config, world_size=1, precision="fp32",
        train_samples=8 * steps, validation_samples=8,
    )  # fmt: skip
    optimizer = make_optimizer(a_model(), plan)
    return rates_of(optimizer, make_scheduler(optimizer, plan), steps)


def expected_rates(schedule: str, steps: int, warmup_ratio: float) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        learning_rate=1.0, warmup_steps=warmup_ratio, use_cpu=True, report_to=[],
        # transformers' "constant" has no warm-up.
        lr_scheduler_type=schedule.replace("constant", "constant_with_warmup"),
    )  # fmt: skip
    trainer = Trainer(a_model(), arguments)
    trainer.create_optimizer_and_scheduler(steps)
    return rates_of(trainer.optimizer, trainer.lr_scheduler, steps)


def rates_of(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@check("schedules", 0)
def weight_decay(_: Path) -> Iterator[Row]:
    import transformers
    from transformers import Trainer, TrainingArguments

    from slurmft.train.parallel.optim import decaying_weights
    from tests.support.packed_models import DECODERS, ENCODERS, make

    models = [make(name) for name in (*ENCODERS, *DECODERS)]
    sizes = {"vocab_size": 60, "d_model": 32, "num_layers": 1, "encoder_layers": 1}
    for name in ("T5", "Bart"):
        config = getattr(transformers, f"{name}Config")(**sizes, decoder_layers=1)
        models.append(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    config = transformers.XLNetConfig(vocab_size=60, d_model=32, n_layer=1, n_head=4)
    models.append(transformers.XLNetForSequenceClassification(config))
    trainer = Trainer(a_model(), TrainingArguments(use_cpu=True, report_to=[]))
    different = 0
    for model in models:
        weights = dict(model.named_parameters())
        expected = {
            id(weights[n])
            for n in trainer.get_decay_parameter_names(model)
            if n in weights
        }
        different += len(decaying_weights(model) ^ expected)
    check = f"weights that decay, {len(models)} families: how many differ"
    yield Row(check, TRAINER, different)
