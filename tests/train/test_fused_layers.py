"""Fused layers compute what the layers do that they stand for; see also test_packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slurmft.train.engine import fused_layers, packing
from slurmft.train.engine.fused_layers import Dropouts, Rows
from slurmft.train.engine.packing import Form
from tests.support.packed_models import LENGTHS, SIZES, announced, make, pack

DROPOUT = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}


def dropping(**more: float) -> Any:
    """A model that drops out."""
    config = transformers.BertConfig(**(SIZES | DROPOUT | more))
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def test_training() -> None:
    """Also by a fused optimizer, whose changes of weights torch does not count."""
    found = []
    for fuse in (False, True):
        model = make("Bert")
        inputs, labels = (
            announced(pack(model, fuse), LENGTHS).inputs,
            torch.arange(9) % 3,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        losses = []
        for _ in range(6):
            loss = model(**inputs, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[0][-1] < 0.9 * found[0][0]


@pytest.mark.parametrize(
    "head", ["ForSequenceClassification", "ForTokenClassification"]
)
def test_rounded_as_under_autocast(head: str) -> None:
    """Hidden states and gradients are as near to fp32's as autocast's are, or nearly."""
    models = [make("Bert", head) for _ in range(3)]
    form = Form.FIRST if head == "ForSequenceClassification" else Form.FLAT
    packed = [pack(model, fuse=model is models[2], form=form) for model in models]
    found = []
    for model, each, rounds in zip(models, packed, (False, True, True), strict=True):
        inputs = announced(each, LENGTHS).inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            kept = model(**inputs).logits
        kept.float().square().sum().backward()
        last = next(
            p
            for name, p in model.named_parameters()
            if "layer.0.attention.self.q" in name
        )
        found.append((kept.detach().float(), last.grad))
    for exact, by_autocast, ours in zip(*found, strict=True):
        error = (ours - exact).norm() / exact.norm()
        assert error < 2 * (by_autocast - exact).norm() / exact.norm() + 0.01


def test_without_a_backward_pass() -> None:
    """Outputs are the same, but for what rounding leaves: GELU is applied elsewhere."""
    model = make("Bert").eval()
    inputs = announced(pack(model, fuse=True), LENGTHS).inputs
    found = []
    for keep in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(keep):
            found.append(model(**inputs).logits)
    assert found[0].requires_grad
    assert not found[1].requires_grad
    torch.testing.assert_close(found[1], found[0].detach(), rtol=0.02, atol=0.02)


def test_gradients_with_dropout() -> None:
    """They are those of the function that was computed: a small step changes it as they say."""
    model = dropping().double()
    inputs, labels = (
        announced(pack(model, fuse=True), LENGTHS).inputs,
        torch.arange(9) % 3,
    )

    def loss() -> Tensor:
        torch.manual_seed(3)
        found: Tensor = model(**inputs, labels=labels).loss
        return found

    loss().backward()  # type: ignore[no-untyped-call, unused-ignore]
    for name in (
        "query",
        "value",
        "attention.output.dense",
        "intermediate.dense",
        "0.output.dense",
    ):
        weight = next(p for n, p in model.named_parameters() if f"{name}.weight" in n)
        assert weight.grad is not None
        direction = weight.grad / weight.grad.norm()
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                weight += sign * 1e-5 * direction
                found.append(loss())
                weight -= sign * 1e-5 * direction
        slope = float(found[0] - found[1]) / 2e-5
        assert slope == pytest.approx(float(weight.grad.norm()), rel=1e-5), name


def test_dropout_in_training_alone() -> None:
    model = dropping()
    inputs = announced(pack(model, fuse=True), LENGTHS).inputs

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = model(**inputs).logits
        return found

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))


def test_layers_that_are_computed_again_drop_the_same() -> None:
    models = [dropping(), dropping()]
    models[1].gradient_checkpointing_enable()
    for model in models:
        inputs = announced(pack(model, fuse=True), LENGTHS).inputs
        torch.manual_seed(4)
        model(**inputs, labels=torch.arange(9) % 3).loss.backward()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert p.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropouts(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dropouts = Dropouts([p], 10_000, dtype)
    first, second = dropouts.take(p, 100, 100), dropouts.take(p, 10_000)
    assert first is not None
    assert second is not None
    assert first.shape == (100, 100)
    assert torch.unique(first).tolist() == [0.0, pytest.approx(1 / (1 - p), rel=0.005)]
    assert float((first == 0).float().mean()) == pytest.approx(p, abs=0.02)
    both = ((first.flatten() == 0) & (second == 0)).float().mean()
    assert float(both) == pytest.approx(p * p, abs=0.02)  # pieces that begin elsewhere


@pytest.mark.parametrize("parts", [[[4]], [[1, 1], [3, 9]], [[8, 8], [16]]])
def test_every_token_has_a_place(parts: list[list[int]]) -> None:
    rows, heads = Rows.of(parts, heads=2, dtype=torch.float32), 2
    tokens = sum(map(sum, parts))
    assert rows.tokens == tokens < rows.count
    assert rows.apart[rows.together].tolist() == list(range(tokens * heads))
    assert rows.apart_in[rows.together_in].tolist() == list(range(tokens * 3 * heads))
    padding = set(range(rows.places)) - set(rows.together.tolist())
    assert {int(rows.apart[place]) // heads for place in padding} <= {tokens}


def test_a_long_batch_is_computed_by_the_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("Bert").eval()
    inputs = announced(pack(model, fuse=True), LENGTHS).inputs
    short = model(**inputs).logits
    monkeypatch.setattr(packing, "SHORT", 8)
    monkeypatch.setattr(fused_layers, "run", lambda *_: pytest.fail("too long for it"))
    torch.testing.assert_close(model(**inputs).logits, short)


def test_layers_that_are_not_known() -> None:
    model = make("Bert", hidden_act="relu")
    found = packing.pack(model, fuse=True)
    assert isinstance(found, packing.Packing)
    assert not found.layers
