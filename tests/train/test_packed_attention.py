"""Flash attention of packed batches, on a CPU that computes what a GPU would."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slurmft.train.engine import packed_attention
from slurmft.train.engine.packing import Form
from tests.support import flash_attention
from tests.support.packed_models import LENGTHS, announced, batch, make, pack

UNUSUAL = pytest.mark.extra("models")
"""Families that only a change of the engine concerns."""

H100 = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with flash_attention.as_on_an_h100(monkeypatch):
        yield


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "softcap", "reason"),
    [
        ((9, 0), torch.bfloat16, 64, None, None),
        ((8, 0), torch.float16, 256, None, None),
        ((8, 9), torch.float16, 192, None, None),
        ((8, 9), torch.float16, 256, None, "no heads of size 256"),
        ((9, 0), torch.bfloat16, 12, None, "no heads of size 12"),
        ((9, 0), torch.bfloat16, 264, None, "no heads of size 264"),
        ((9, 0), torch.float32, 64, None, "not float32"),
        ((9, 0), torch.bfloat16, 64, 30.0, "caps no scores"),
        ((7, 5), torch.float16, 64, None, "sm_75"),
    ],
)
def test_which_devices_have_flash_attention(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, size: int,
    softcap: float | None, reason: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(
        torch.backends.cuda, "is_flash_attention_available", lambda: True
    )
    found = packed_attention.why_no_flash(H100, dtype, size, softcap)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")
    assert "NVIDIA" in str(
        packed_attention.why_no_flash(torch.device("cpu"), dtype, size)
    )
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in str(packed_attention.why_no_flash(H100, dtype, size))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is for CUDA")
def test_a_build_of_torch_without_flash_attention() -> None:
    assert "no flash attention" in str(
        packed_attention.why_no_flash(H100, torch.bfloat16, 64)
    )


def errors(found: Any, exact: Any) -> list[float]:
    """Of logits and of all gradients, relative."""
    pairs = zip(found, exact, strict=True)
    return [
        float((own.float() - right).norm() / right.norm().clamp(min=1e-6))
        for own, right in pairs
    ]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("name", "head", "form"),
    [
        ("Bert", "ForSequenceClassification", Form.FIRST),
        pytest.param("Bert", "ForTokenClassification", Form.FLAT, marks=UNUSUAL),
        pytest.param("Bert", "ForQuestionAnswering", Form.ROWS, marks=UNUSUAL),
        pytest.param("Llama", "ForCausalLM", Form.FLAT, marks=UNUSUAL),
        pytest.param(
            "DistilBert", "ForSequenceClassification", Form.FIRST, marks=UNUSUAL
        ),
        pytest.param("ModernBert", "ForTokenClassification", Form.FLAT, marks=UNUSUAL),
        pytest.param("Llama", "ForSequenceClassification", Form.LAST, marks=UNUSUAL),
        pytest.param("Mistral", "ForCausalLM", Form.FLAT, marks=UNUSUAL),
        pytest.param("Gemma3Text", "ForCausalLM", Form.FLAT, marks=UNUSUAL),
    ],
)
def test_one_call_a_layer(name: str, head: str, form: Form, again: bool) -> None:
    """Outputs and gradients are as near to fp32's as those of padded batches in bf16 are."""
    exact = make(
        name, head, **({} if head != "ForQuestionAnswering" else {"num_labels": 2})
    )
    models = [exact, copy.deepcopy(exact), copy.deepcopy(exact)]
    packed = pack(models[2], form=form)
    if again:
        models[2].gradient_checkpointing_enable()
    whole, ours = batch(exact, LENGTHS).inputs, announced(packed, LENGTHS).inputs
    there = whole["attention_mask"].bool()
    found = []
    flash_attention.calls.clear()
    for model, inputs in zip(models, (whole, whole, ours), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=model is not exact):
            output = model.train()(**inputs)
        logits = (
            output.logits
            if "logits" in output
            else output.start_logits + output.end_logits
        )
        logits = logits[there] if logits.shape[:2] == there.shape else logits
        logits.float().square().sum().backward()
        gradients = [
            p.grad for p in model.parameters() if p.grad is not None and p.ndim > 1
        ]
        found.append(
            [logits.detach().reshape(-1), torch.cat([g.flatten() for g in gradients])]
        )
    layers = 2
    assert flash_attention.calls.count("forward") == layers * (1 + again)
    assert flash_attention.calls.count("backward") == layers
    for own, of_padded in zip(
        errors(found[2], found[0]), errors(found[1], found[0]), strict=True
    ):
        assert own < 1.5 * of_padded + 0.005


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "rounds"), [("Gemma2", True), ("Llama", False)])
def test_groups_where_flash_attention_cannot(name: str, rounds: bool) -> None:
    """Scores are capped; and fp32. Tokens of padding are there as well."""
    padded = make(name, "ForCausalLM")
    bare = copy.deepcopy(padded)
    packed = pack(bare, form=Form.FLAT)
    whole = batch(padded, LENGTHS).inputs
    with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
        expected = padded(**whole).logits[whole["attention_mask"].bool()]
        found = bare(**announced(packed, LENGTHS).inputs).logits[0]
    assert not flash_attention.calls
    assert (found - expected).norm() < (0.02 if rounds else 1e-5) * expected.norm()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["MPNet", "DebertaV2"])
def test_positions_of_their_own_need_the_longest_sequence_last(name: str) -> None:
    packed = pack(make(name))
    seen: list[int] = []
    embeddings = packed.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda *parts: seen.append(parts[2].shape[1]))
    packed.model(**announced(packed, LENGTHS).inputs)
    assert seen == [sum(LENGTHS)]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("lengths", [LENGTHS, [16], [8, 8], [15], [17]])
def test_models_compute_few_numbers_of_tokens(lengths: list[int]) -> None:
    packed = pack(make("Bert"))
    seen: list[int] = []
    embeddings = packed.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda *parts: seen.append(parts[2].shape[1]))
    with torch.autocast("cpu", torch.bfloat16):
        logits = packed.model(**announced(packed, lengths).inputs).logits
    assert seen == [(sum(lengths) // 16 + 1) * 16]
    assert logits.shape == (len(lengths), 3)
    assert logits.isfinite().all()


@pytest.mark.usefixtures("gpu")
def test_flash_attention_drops_out_in_training_alone() -> None:
    model = make("Bert", attention_probs_dropout_prob=0.5)
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    packed = pack(model)
    inputs = announced(packed, LENGTHS).inputs
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (model.train()(**inputs).logits for _ in range(2))
        assert not torch.equal(first, second)
        model.eval()
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)
