"""Layers as GPUs compute them, on a CPU in a GPU's place; see also test_packed_attention."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from slurmft.train.engine import gpu_layers, packing
from slurmft.train.engine.packing import Form
from tests.support import flash_attention
from tests.support.packed_models import DISTIL, LENGTHS, announced, batch, make, pack
from tests.train.test_fused_layers import dropping
from tests.train.test_packed_attention import errors

pytestmark = pytest.mark.extra("models")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with flash_attention.as_on_an_h100(monkeypatch):
        yield


def ours(packed: packing.Packing) -> gpu_layers.GpuLayers:
    assert packed.gpu_layers is not None
    return packed.gpu_layers


def step(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits, and all gradients."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs).logits
    torch.autograd.backward(logits.float().square().sum())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["Bert", "DistilBert", "Electra", "Roberta"])
@pytest.mark.parametrize(
    "head", ["ForSequenceClassification", "ForTokenClassification"]
)
def test_outputs_and_gradients(name: str, head: str, again: bool) -> None:
    """They are as near to fp32's as those of padded batches under autocast."""
    exact = make(name, head)
    rounded, bare = copy.deepcopy(exact), copy.deepcopy(exact)
    packed = pack(bare, True, Form.FIRST if "Sequence" in head else Form.FLAT)
    if again:
        bare.gradient_checkpointing_enable()
    whole = batch(exact, LENGTHS).inputs
    there = whole["attention_mask"].bool()
    found = []
    for model in (exact, rounded, bare):
        inputs = announced(packed, LENGTHS).inputs if model is bare else whole
        with torch.autocast("cpu", torch.bfloat16, enabled=model is not exact):
            logits = model.train()(**inputs).logits
        logits = logits[there] if logits.shape[:2] == there.shape else logits
        logits.float().square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(
            [logits.detach().flatten(), torch.cat([g.flatten() for g in gradients])]
        )
    assert flash_attention.calls.count("forward") == 2 * (1 + again)
    assert ours(packed)
    for own, of_padded in zip(
        errors(found[2], found[0]), errors(found[1], found[0]), strict=True
    ):
        assert own < 2 * of_padded + 0.01


WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "lift_fresh",
    "equal", "is_nonzero",
}  # fmt: skip
"""Operations that wait for the device, or bring what the host has just made to it."""


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Operations that launch kernels. A CPU takes three where a GPU takes one for dropout."""

    NONE = {  # noqa: RUF012
        "empty",
        "empty_like",
        "detach",
        "alias",
        "_unsafe_view",
        "bernoulli_",
        "div_",
    }

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in self.NONE and "record_function" not in name:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def test_kernels_of_a_step() -> None:
    """Of DistilBERT's six layers, forwards, backwards, clipping and AdamW."""
    model = transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(
            **(DISTIL | {"n_layers": 6, "seq_classif_dropout": 0.0})
        )
    )
    packed = pack(model, True)
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
    for _ in range(2):
        inputs = announced(packed, [22] * 64).inputs
        with Kernels() as kernels:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(**inputs).logits
            loss = cross_entropy(logits.float(), torch.zeros(64, dtype=torch.int64))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert kernels.count["_flash_attention_forward"] == 6
    assert kernels.count["_foreach_copy_"] == 12
    assert not kernels.count.keys() & WAITS
    assert kernels.count.total() <= 300, kernels.count.most_common()


@pytest.mark.parametrize(
    "kept", ["hidden_dropout_prob", "attention_probs_dropout_prob"]
)
def test_each_dropout_drops_in_training_alone(kept: str) -> None:
    model = dropping(classifier_dropout=0.0, **{kept: 0.0})
    packed = pack(model, True)
    model.bert.embeddings.dropout.p = 0.0
    for is_training in (True, False):
        model.train(is_training)
        first, second = (
            step(model, announced(packed, LENGTHS).inputs)[0] for _ in range(2)
        )
        assert torch.equal(first, second) != is_training
