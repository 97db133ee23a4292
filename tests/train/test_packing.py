"""Batches without padding give what padded ones give."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

from slurmft.train import packing
from slurmft.train.tasks.base import set_dropout

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40, "num_labels": 3,
}  # fmt: skip
DISTIL = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
LENGTHS = [5, 12, 1, 12, 7, 3, 9, 2, 12]


def make(name: str, head: str = "ForSequenceClassification", **more: Any) -> Any:
    """A small model of random weights, without dropout."""
    sizes = DISTIL | {"num_labels": 3} if name == "DistilBert" else SIZES
    config = getattr(transformers, f"{name}Config")(**(sizes | more))
    set_dropout(config, 0.0)
    config.pad_token_id = 1 if "oberta" in name else 0
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{head}")(config)


def pack(model: Any, fuse: bool = False) -> packing.Packing:
    found = packing.pack(model, fuse)
    assert isinstance(found, packing.Packing), found
    assert bool(found.layers) == fuse
    return found


def batch(model: Any, lengths: list[int], width: int | None = None) -> dict[str, Tensor]:
    width = width or max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(2, 60, mask.shape, generator=torch.Generator().manual_seed(1))
    tokens = tokens.masked_fill(~mask, model.config.pad_token_id)
    return {"input_ids": tokens, "attention_mask": mask.long()}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    "name", ["Bert", "DistilBert", "Roberta", "XLMRoberta", "Camembert", "Electra"]
)
def test_logits_and_gradients_are_those_of_the_padded_batch(name: str, fuse: bool) -> None:
    padded = make(name)
    bare = copy.deepcopy(padded)
    packed = pack(bare, fuse)
    assert packed.is_first_token_only
    inputs = batch(padded, LENGTHS, width=20)
    seen: list[torch.Size] = []
    bare.base_model.embeddings.LayerNorm.register_forward_hook(
        lambda *parts: seen.append(parts[2].shape[:2])
    )
    packed.expect(inputs["attention_mask"], torch.device("cpu"))
    labels = torch.arange(len(LENGTHS)) % 3
    outputs = [model(**inputs, labels=labels) for model in (padded, bare)]
    assert seen == [torch.Size([1, sum(LENGTHS)])]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-5, atol=1e-6)
    for output in outputs:
        output.loss.backward()
    for (parameter, p), q in zip(padded.named_parameters(), bare.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), parameter
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=parameter)


@pytest.mark.parametrize("fuse", [False, True])
def test_every_token_has_its_place_again(fuse: bool) -> None:
    padded = make("Bert", "ForQuestionAnswering", num_labels=2)
    bare = copy.deepcopy(padded)
    assert not pack(bare, fuse).is_first_token_only
    inputs = batch(padded, LENGTHS)
    there = inputs["attention_mask"].bool()
    for name in ("start_logits", "end_logits"):
        ours, own = (getattr(model(**inputs), name)[there] for model in (bare, padded))
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)


def test_layers_see_real_tokens_alone() -> None:
    model = make("Bert")
    pack(model)
    seen: list[torch.Size] = []
    model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(
        lambda _, inputs, __: seen.append(inputs[0].shape)
    )
    model(**batch(model, LENGTHS, width=30))
    assert seen == [torch.Size([1, sum(LENGTHS), 32])]


@pytest.mark.parametrize(
    ("name", "layers", "wide"),
    [
        ("Bert", "bert.encoder.layer", "output.dense"),
        ("DistilBert", "distilbert.transformer.layer", "ffn.lin2"),
    ],
)
def test_the_last_layer_sees_what_a_classifier_looks_at(name: str, layers: str, wide: str) -> None:
    model = make(name)
    pack(model)
    seen: list[int] = []
    for layer in model.get_submodule(layers):
        layer.get_submodule(wide).register_forward_hook(
            lambda _, inputs, __: seen.append(inputs[0].shape[1])
        )
    model(**batch(model, LENGTHS))
    assert seen == [sum(LENGTHS), len(LENGTHS)]


class MeanOfTokens(transformers.BertForSequenceClassification):  # type: ignore[misc, unused-ignore]
    """A classifier that looks at every token."""

    def forward(self, **inputs: Any) -> Any:
        states = self.bert(**inputs).last_hidden_state
        return SequenceClassifierOutput(logits=self.classifier(states.mean(1)))


def test_a_classifier_that_looks_at_all_tokens_gets_them() -> None:
    padded = MeanOfTokens(make("Bert").config).eval()
    bare = copy.deepcopy(padded)
    assert not pack(bare).is_first_token_only
    inputs = batch(padded, [6, 6, 6])
    torch.testing.assert_close(bare(**inputs).logits, padded(**inputs).logits)


def test_a_batch_that_was_announced_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Bert").eval()
    packed, inputs = pack(model), batch(model, LENGTHS)
    found = model(**inputs).logits
    packed.expect(inputs["attention_mask"], torch.device("cpu"))
    monkeypatch.setattr(packing.Layout, "of", lambda *_: pytest.fail("laid out again"))
    assert torch.equal(model(**inputs).logits, found)


@pytest.mark.parametrize("fuse", [False, True])
def test_layers_that_are_computed_again_for_backward(fuse: bool) -> None:
    model = make("Bert")
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable()
    for each in (model, again):
        pack(each, fuse)
        torch.manual_seed(2)
        labels = torch.arange(len(LENGTHS)) % 3
        each.train()(**batch(each, LENGTHS), labels=labels).loss.backward()
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert p.grad is None or torch.allclose(p.grad, q.grad)


@pytest.mark.parametrize("lengths", [[4], [1, 1], [7, 7, 7, 7, 7], list(range(1, 14))])
def test_groups_hold_every_token_once(lengths: list[int]) -> None:
    mask = torch.arange(15) < torch.tensor(lengths)[:, None]
    layout = packing.Layout.of(mask.long(), mask.device)
    assert sorted(layout.places.tolist()) == mask.flatten().nonzero().squeeze(1).tolist()
    assert [g.end for g in layout.groups[:-1]] == [g.start for g in layout.groups[1:]]
    assert (layout.groups[0].start, layout.groups[-1].end) == (0, sum(lengths))
    assert len(layout.groups) <= packing.GROUPS
    padded = sum(g.sequences * g.length for g in layout.groups)
    assert padded <= len(lengths) * max(lengths)


def test_attention_drops_out_in_training_alone() -> None:
    model = make("Bert")
    pack(model)
    inputs = batch(model, LENGTHS)
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    first, second = (model(**inputs).logits for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_a_model_with_other_attention_is_left_as_it_was() -> None:
    model = transformers.DebertaV2ForSequenceClassification(
        transformers.DebertaV2Config(**SIZES, pos_att_type=["c2p", "p2c"], relative_attention=True)
    )
    model.eval()
    inputs = batch(model, LENGTHS)
    before = model(**inputs).logits
    assert packing.pack(model) == "DebertaV2ForSequenceClassification cannot work without padding"
    assert torch.equal(model(**inputs).logits, before)


def test_a_model_that_gives_other_outputs_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("Bert").eval()
    inputs = batch(model, LENGTHS)
    before = model(**inputs).logits
    right = packing.attention

    def wrong(*arguments: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return right(*arguments, **kwargs)[0] * 1.01, None

    monkeypatch.setattr(packing, "attention", wrong)
    reason = packing.pack(model)
    assert isinstance(reason, str)
    assert "gives other outputs without padding (outputs differ by" in reason
    assert torch.equal(model(**inputs).logits, before)


def test_a_saved_model_loads_as_any_other(tmp_path: Path) -> None:
    model = make("Bert")
    pack(model)
    model.save_pretrained(tmp_path)
    assert packing.NAME not in (tmp_path / "config.json").read_text()
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    inputs = batch(model, LENGTHS)
    torch.testing.assert_close(loaded.eval()(**inputs).logits, model.eval()(**inputs).logits)
