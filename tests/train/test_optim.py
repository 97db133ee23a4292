"""Optimizers and schedules: learning rates of every rule, Muon and AdamW as one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.optim import AdamW

from slurmft.core.errors import UsageError
from slurmft.core.run_records import TrainingStart, record_of
from slurmft.show.progress import describe_start
from slurmft.show.result_table import result_table
from slurmft.train.config import TrainConfig
from slurmft.train.login.configure import configure
from slurmft.train.loop.step_plan import Plan
from slurmft.train.parallel import muon
from slurmft.train.parallel.muon import MuonAdamW, orthogonal, split
from slurmft.train.parallel.optim import (
    hidden_matrices,
    join_optimizer,
    make_optimizer,
    make_scheduler,
    split_optimizer,
)
from slurmft.train.recipes import CHANGES, RECIPES

BASE = {"learning_rate": 5e-4, "warmup_ratio": 0.25, "batch_size": 256, "epochs": 4}


def plan(world_size: int = 1, **values: Any) -> Plan:
    train = values.pop("train", None) or TrainConfig.resolve(**BASE | values)
    return Plan(
        config=train, world_size=world_size, precision="fp32",
        train_samples=16_000, validation_samples=2_000,
    )  # fmt: skip


def small_bert() -> Any:
    """Two layers, random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
    layers = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_dropout_prob": 0.0,
    }
    return BertForSequenceClassification(
        BertConfig(**sizes, **layers, attention_probs_dropout_prob=0.0)
    )


def train(model: Any, optimizer: Any, steps: range) -> None:
    """Some steps, each on tokens of its own."""
    for step in steps:
        tokens = torch.randint(
            40, (8, 6), generator=torch.Generator().manual_seed(step)
        )
        model(input_ids=tokens, labels=tokens[:, 0] % 2).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


RULES = {
    "none": {256: 5e-4, 1024: 5e-4, 2048: 5e-4, 4096: 5e-4},
    "sqrt": {256: 5e-4, 1024: 5e-4, 2048: 5e-4 * 2**0.5, 4096: 1e-3},
    "linear": {256: 5e-4, 1024: 5e-4, 2048: 1e-3, 4096: 2e-3},
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("rule", RULES)
def test_learning_rates_of_every_rule(rule: str, optimizer: str) -> None:
    """Warm-up and decay are the same parts of any number of steps; the peak is the rule's."""
    for size, peak in RULES[rule].items():
        of = plan(
            size // 256, lr_rule=rule, reference_batch_size=1024, optimizer=optimizer
        )
        made = make_optimizer(small_bert(), of)
        scheduler = make_scheduler(made, of)
        total, warmup = of.total_steps, round(of.total_steps / 4)
        assert total == 4 * -(-16_000 // size)
        for step in range(total):
            part = step / warmup if step < warmup else (total - step) / (total - warmup)
            rates = [group["lr"] for group in made.param_groups]
            assert rates == pytest.approx([peak * part] * len(rates))
            made.step()
            scheduler.step()


def test_recipe_by_number_of_ranks() -> None:
    """As published up to a global batch of 1,024."""
    config = TrainConfig.of(configure({"recipe": "mn4-emotion"}).program)
    plans = {n: plan(n, train=config) for n in (1, 4, 8, 16)}
    found = {n: (of.optimizer, of.learning_rate) for n, of in plans.items()}
    assert found[1] == found[4] == ("adamw", 5e-4)
    assert found[8] == ("muon", 4e-3)
    assert found[16] == ("muon", 2e-3 * 2672 / 1024)
    assert [of.global_batch_size for of in plans.values()] == [256, 1024, 2048, 2672]
    published = TrainConfig.of(
        configure({"recipe": "mn4-emotion", "as_published": True}).program
    )
    assert {plan(n, train=published).optimizer for n in (1, 16)} == {"adamw"}
    assert {plan(n, train=published).learning_rate for n in (1, 16)} == {5e-4}
    assert plan(16, train=published).global_batch_size == 4096


def test_choice_of_optimizer_and_rate_has_a_reason() -> None:
    """In the first line of a run, and in the table at its end."""
    config = TrainConfig.of(configure({"recipe": "mn4-emotion"}).program)
    reasons = {n: plan(n, train=config).optimizer_reason for n in (1, 16)}
    assert reasons[1] == (
        "--optimizer auto: 256 samples a step are no more than "
        "--reference-batch-size 1,024"
    )
    assert reasons[16] == (
        "--optimizer auto: 2,672 samples a step are more than "
        "--reference-batch-size 1,024; 0.002 x 2.61 by --lr-rule linear"
    )
    assert plan(16).optimizer_reason == ""


def test_batch_counts_no_samples_that_the_data_has_not() -> None:
    """A step of 64 samples is small, whatever global batch was to be."""
    config = TrainConfig.of(configure({"recipe": "mn4-emotion"}).program)
    small = dataclasses.replace(plan(16, train=config), train_samples=64)
    assert (small.optimizer, small.learning_rate) == ("adamw", 5e-4)
    assert "64 samples a step" in small.optimizer_reason
    facts = {
        "global_batch_size": 2672,
        "step_samples": 64,
        "steps": 5,
        "optimizer": small.optimizer,
        "learning_rate": small.learning_rate,
        "optimizer_reason": small.optimizer_reason,
    }
    start = record_of(
        {
            "event": "start",
            "task": "emotion",
            "world_size": 16,
            "nodes": 4,
            "precision": "fp16",
            "backend": "nccl",
            "parameters": 66_000_000,
            "total_steps": 5,
            **facts,
        }
    )
    assert isinstance(start, TrainingStart)
    for text in (describe_start(start), result_table(facts)):
        in_one_line = " ".join(text.split())
        assert "the data has 64" in in_one_line
        assert "adamw at 0.0005 (--optimizer auto: 64 samples" in in_one_line


def test_changes_are_all_that_differs_from_published() -> None:
    assert CHANGES.keys() <= RECIPES.keys()
    for name, recipe in RECIPES.items():
        plain, published = (
            dataclasses.asdict(TrainConfig.resolve(recipe=name, as_published=flag))
            for flag in (False, True)
        )
        changed = {key for key in plain if plain[key] != published[key]}
        assert changed - {"as_published"} == CHANGES.get(name, {}).keys()
        assert {k: published[k] for k in recipe if k in published} == {
            k: v for k, v in recipe.items() if k in published
        }


SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
T5_SIZES = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("BertForSequenceClassification", SMALL),
        ("MPNetForSequenceClassification", SMALL),
        ("DebertaV2ForSequenceClassification", SMALL),
        ("ModernBertForSequenceClassification", SMALL | {"pad_token_id": 0}),
        ("Qwen3ForSequenceClassification", SMALL | {"head_dim": 8}),
        ("GPT2ForSequenceClassification", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
        ("T5ForConditionalGeneration", T5_SIZES | {"num_heads": 2}),
        (
            "XLNetForSequenceClassification",
            {"vocab_size": 40, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 8},
        ),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_that_decay_are_those_of_trainer(
    name: str, sizes: dict[str, int], optimizer: str
) -> None:
    head = next(h for h in ("ForSequence", "ForConditional") if h in name)
    config = getattr(transformers, f"{name.partition(head)[0]}Config")(**sizes)
    model = getattr(transformers, name)(config)
    trainer: Any = transformers.Trainer
    expected = set(trainer.get_decay_parameter_names(None, model))
    names = {id(p): n for n, p in model.named_parameters()}
    made = make_optimizer(model, plan(optimizer=optimizer, weight_decay=0.1))
    decayed = set()
    for group in made.param_groups:
        if group["weight_decay"]:
            decayed |= {names[id(p)] for p in group["params"]}
    assert decayed == expected & set(names.values())


@pytest.mark.processes
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.06, 0.25])
@pytest.mark.parametrize("steps", [1, 3, 7, 32, 33])
def test_warm_up_is_that_of_trainer(ratio: float, steps: int, tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), warmup_steps=ratio)
    warmup = arguments.get_warmup_steps(steps)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    of = plan(warmup_ratio=ratio, max_steps=steps, lr_schedule="constant")
    scheduler = make_scheduler(optimizer, of)
    for step in range(steps):
        expected = 1.0
        if step < warmup:
            expected = step / warmup
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()


def test_weights_of_muon() -> None:
    """The matrices of the layers and the pooler; not the tables, nor the fresh head."""
    model = small_bert()
    names = {id(p): name for name, p in model.named_parameters()}
    hidden = {names[id(p)] for p in hidden_matrices(model)}
    expected = {n for n, p in model.named_parameters() if p.ndim == 2}
    assert hidden == {
        n for n in expected if "embeddings" not in n and "classifier" not in n
    }
    made = make_optimizer(model, plan(optimizer="muon"))
    grouped = [p for group in made.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(names)
    for group in made.param_groups:
        assert (group["weight_decay"] == 0) == all(p.ndim < 2 for p in group["params"])


def test_rates_where_muon_trains() -> None:
    """The fresh head learns at Muon's rate, what AdamW has of the pretrained model at its own."""
    model = small_bert()
    hidden = {id(p) for p in hidden_matrices(model)}
    of = plan(optimizer="muon", learning_rate=1e-4, muon_learning_rate=1e-3)
    made = make_optimizer(model, of)
    rates = {id(p): group["lr"] for group in made.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        at_muons = id(p) in hidden or name.startswith("classifier")
        assert rates[id(p)] == (1e-3 if at_muons else 1e-4), name


def test_as_one_they_do_what_each_does_alone() -> None:
    one, other = small_bert(), small_bert()
    train(
        one,
        make_optimizer(one, plan(optimizer="muon", learning_rate=1e-2), True),
        range(3),
    )
    hidden = hidden_matrices(other)
    rest = [p for p in other.parameters() if all(p is not h for h in hidden)]
    theirs: torch.optim.Optimizer = torch.optim.Muon(
        hidden, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    decays = [{"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.01}]
    stays = [{"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]
    adamw = AdamW(decays + stays, lr=1e-2, fused=True)
    for step in range(3):
        tokens = torch.randint(
            40, (8, 6), generator=torch.Generator().manual_seed(step)
        )
        other(input_ids=tokens, labels=tokens[:, 0] % 2).loss.backward()
        theirs.step()
        adamw.step()
        other.zero_grad()
    begun = torch.cat([p.detach().flatten() for p in small_bert().parameters()])
    moved = [
        torch.cat([p.detach().flatten() for p in m.parameters()]) - begun
        for m in (one, other)
    ]
    assert (moved[0] - moved[1]).norm() < 0.01 * moved[1].norm()


def test_resumed_muon_goes_on_exactly() -> None:
    """Weights, momentum, second moments and the schedule, through the form of a checkpoint."""
    of = plan(16, optimizer="muon", lr_rule="linear", reference_batch_size=1024)
    whole, stopped = small_bert(), small_bert()
    runs = [(m, *_scheduled(m, of)) for m in (whole, stopped)]
    for model, optimizer, scheduler in runs:
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
    tensors, rest = split_optimizer(runs[1][1])
    state = json.loads(json.dumps({"rest": rest, "scheduler": runs[1][2].state_dict()}))
    again = small_bert()
    again.load_state_dict(stopped.state_dict())
    optimizer, scheduler = _scheduled(again, of)
    join_optimizer(optimizer, {k: v.clone() for k, v in tensors.items()}, state["rest"])
    scheduler.load_state_dict(state["scheduler"])
    runs[1] = (again, optimizer, scheduler)
    for model, optimizer, scheduler in (runs[0], runs[1]):
        for step in range(4, 7):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
    assert same(whole, again)
    assert not same(whole, stopped)


def _scheduled(model: Any, of: Plan) -> tuple[Any, Any]:
    optimizer = make_optimizer(model, of)
    return optimizer, make_scheduler(optimizer, of)


def test_every_rank_has_its_part_of_the_matrices() -> None:
    matrices = [torch.empty(size, 3) for size in (1, 9, 2, 9, 4, 4, 1)]
    parts = split(matrices, 3)
    assert sorted(p.numel() for part in parts for p in part) == [
        3,
        3,
        6,
        12,
        12,
        27,
        27,
    ]
    assert max(sum(p.numel() for p in part) for part in parts) == 30
    assert [len(part) for part in split(matrices[:1], 3)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("world_size", "micro_steps", "limit", "size", "parts"),
    [
        (16, 1, None, 4096, 16),
        (16, 1, 2672, 2672, 16),
        (1, 16, 2672, 2672, 11),  # full batches, but for the last
        (16, 2, 5000, 5000, 32),
        (16, 1, 4096, 4096, 16),
        (4, 1, 2672, 1024, 4),
        (4, 1, 3, 3, 4),
    ],
)
def test_limit_of_the_global_batch(
    world_size: int, micro_steps: int, limit: int | None, size: int, parts: int
) -> None:
    of = plan(
        world_size, gradient_accumulation_steps=micro_steps, max_global_batch_size=limit
    )
    assert (of.global_batch_size, of.parts) == (size, parts)
    assert of.steps_per_epoch == -(-16_000 // size)
    requested = 256 * world_size * micro_steps
    assert of.limited_from == (requested if size < requested else None)


@pytest.mark.parametrize(
    ("world_size", "micro_steps", "largest"),
    [(1, 13, 254), (4, 4, 207), (16, 1, 207), (3301, 1, 2)],
)
def test_global_batch_that_is_set(
    world_size: int, micro_steps: int, largest: int
) -> None:
    """Micro-steps make it up, on any number of processes; a recipe's limit is for others."""
    config = TrainConfig.of(
        configure({"recipe": "mn4-emotion", "global_batch_size": 3302}).program
    )
    assert config.max_global_batch_size is None
    of = plan(world_size, train=config)
    assert (of.global_batch_size, of.limited_from) == (3302, None)
    assert (of.micro_steps, of.largest_part) == (micro_steps, largest)
    assert of.learning_rate == pytest.approx(2e-3 * 3302 / 1024)
    assert of.steps_per_epoch == 5


def test_global_batch_of_fewer_samples_than_processes() -> None:
    refused = "--global-batch-size 7 is fewer than the 8 processes"
    with pytest.raises(UsageError, match=refused) as error:
        configure({"global_batch_size": 7, "nodes": 4, "nproc_per_node": 2})
    assert str(error.value.hint).startswith("give 8 or more, or fewer --nodes")


@pytest.mark.parametrize(
    ("values", "fact", "cure"),
    [
        (
            {"global_batch_size": 8, "gradient_accumulation_steps": 2},
            "--global-batch-size 8 cannot be used with --gradient-accumulation-steps 2: the number "
            "of micro-steps follows from it",
            "leave it, or leave --global-batch-size out",
        ),
        ({"optimizer": "adam"}, "unknown --optimizer 'adam'", "did you mean adamw?"),
        ({"lr_rule": "cubic"}, "unknown --lr-rule 'cubic'", "none, sqrt, linear"),
        ({"optimizer": "auto"}, "--optimizer auto needs", "--reference-batch-size"),
        ({"lr_rule": "linear"}, "--lr-rule linear needs", "--reference-batch-size"),
        (
            {"reference_batch_size": 0},
            "--reference-batch-size 0 must be between 1 and",
            "",
        ),
    ],
)
def test_combinations_that_cannot_be_right(
    values: dict[str, Any], fact: str, cure: str
) -> None:
    with pytest.raises(UsageError) as error:
        configure(values)
    assert fact in str(error.value)
    assert cure in f"{error.value} {error.value.hint}"


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_orthogonal_matrices_are_those_of_torch(shape: tuple[int, int]) -> None:
    """Up to rounding, to numbers of 8 bits."""
    updates = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    for update, found in zip(updates, orthogonal(updates), strict=True):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = update
        theirs: torch.optim.Optimizer = torch.optim.Muon(
            [p], lr=1.0, momentum=0.0, weight_decay=0.0, nesterov=False
        )
        theirs.step()
        expected = -p.detach() / max(1, shape[0] / shape[1]) ** 0.5
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_matrices_of_one_shape_take_one_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def see(updates: torch.Tensor) -> torch.Tensor:
        seen.append(updates.shape)
        return orthogonal(updates)

    monkeypatch.setattr(muon, "orthogonal", see)
    model = small_bert()
    train(model, make_optimizer(model, plan(optimizer="muon")), range(1))
    assert sorted(seen) == [(2, 16, 24), (2, 24, 16), (9, 16, 16)]
    monkeypatch.setattr(muon, "_TOGETHER", 4 * 16 * 16)
    train(model, make_optimizer(model, plan(optimizer="muon")), range(1))
    assert seen[3:].count((4, 16, 16)) == 2


def test_fp16_skips_the_whole_step() -> None:
    """One overflow anywhere, and no weight moves: the scaler sees one optimizer."""
    model = small_bert()
    optimizer = make_optimizer(model, plan(optimizer="muon"))
    assert isinstance(optimizer, MuonAdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)  # type: ignore[attr-defined, unused-ignore]
    tokens = torch.arange(12).view(2, 6)
    scaler.scale(model(input_ids=tokens, labels=tokens[:, 0] % 2).loss).backward()
    model.classifier.bias.grad[0] = torch.inf
    before = small_bert()
    scaler.step(optimizer)
    scaler.update()
    assert same(model, before)
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adam_has_its_settings(optimizer: str) -> None:
    settings: dict[str, Any] = {
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
    }
    made = make_optimizer(small_bert(), plan(optimizer=optimizer, **settings))
    of_adam = [group for group in made.param_groups if "betas" in group]
    assert of_adam
    for group in of_adam:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)
