"""Batches without padding give what padded ones give."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

from slurmft.train.engine import packed_attention, packing
from slurmft.train.engine.packed_attention import Layout
from slurmft.train.engine.packing import Form
from tests.support.packed_models import (
    CPU,
    DECODER,
    DECODERS,
    ENCODERS,
    FUSED,
    LENGTHS,
    MEANS,
    SLIDING,
    announced,
    batch,
    make,
    pack,
    table,
)

USUAL = {"Bert", "DistilBert", "ModernBert", "Llama"}
"""Families whose tests always run: each packs in a way of its own."""


def families(names: list[str]) -> list[Any]:
    """The families as cases of a test; the unusual ones are for changes of the engine."""
    return [case(name) for name in names]


def families_to_fuse(names: list[str]) -> list[Any]:
    """The families without fused layers, and then those with them that can have them."""
    plain = [case(name, False) for name in names]
    return plain + [case(name, True) for name in names if name in FUSED]


def case(name: str, *more: Any) -> Any:
    """One case of a test of families."""
    marks = () if name in USUAL else pytest.mark.extra("models")
    return pytest.param(name, *more, marks=marks)


def assert_same_gradients(padded: Any, bare: Any, rtol: float = 1e-4) -> None:
    for (parameter, p), q in zip(
        padded.named_parameters(), bare.parameters(), strict=True
    ):
        if p.grad is None or q.grad is None:
            assert not (p.grad is not None and p.grad.any()), parameter
            assert not (q.grad is not None and q.grad.any()), parameter
        else:
            torch.testing.assert_close(q.grad, p.grad, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(("name", "fuse"), families_to_fuse(ENCODERS))
def test_classifiers(name: str, fuse: bool) -> None:
    """Logits and gradients are those of the padded batch; no layer sees padding."""
    padded = make(name)
    bare = copy.deepcopy(padded)
    packed = pack(bare, fuse, Form.ROWS if name in MEANS else Form.FIRST)
    assert packed.is_first_token_only == (name in FUSED or name == "DebertaV2")
    seen: list[torch.Size] = []
    embeddings = bare.get_input_embeddings()
    embeddings.register_forward_hook(lambda *parts: seen.append(parts[2].shape[:2]))
    outputs = [
        model(**inputs.inputs, labels=inputs.targets["labels"])
        for model, inputs in (
            (padded, batch(padded, LENGTHS, width=20)),
            (bare, announced(packed, LENGTHS)),
        )
    ]
    assert seen == [torch.Size([1, sum(LENGTHS)])]
    torch.testing.assert_close(
        outputs[1].logits, outputs[0].logits, rtol=1e-5, atol=1e-5
    )
    for output in outputs:
        output.loss.backward()
    assert_same_gradients(padded, bare)


@pytest.mark.parametrize("name", families(DECODERS))
def test_classifiers_that_look_at_the_last_token(name: str) -> None:
    padded = make(name)
    bare = copy.deepcopy(padded)
    packed = pack(bare, form=Form.LAST)
    expected = padded(**batch(padded, LENGTHS, width=20).inputs).logits
    found = bare(**announced(packed, LENGTHS).inputs).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for logits in (expected, found):
        logits.square().mean().backward()
    assert_same_gradients(padded, bare)


@pytest.mark.parametrize("name", families([*ENCODERS, *DECODERS]))
@pytest.mark.parametrize("lengths", [LENGTHS, [4]])
def test_heads_of_tokens(name: str, lengths: list[int]) -> None:
    """They get all tokens; decoders compute logits of those alone that are asked for."""
    padded = make(name, "ForCausalLM" if name in DECODERS else "ForTokenClassification")
    bare = copy.deepcopy(padded)
    packed = pack(bare, form=Form.FLAT)
    whole = batch(padded, lengths, width=20).inputs
    there = whole["attention_mask"].bool()
    expected = padded(**whole).logits[there]
    inputs = announced(packed, lengths).inputs
    found = bare(**inputs).logits
    torch.testing.assert_close(found, expected[None], rtol=1e-5, atol=1e-5)
    for logits in (expected, found):
        logits.square().mean().backward()
    assert_same_gradients(padded, bare)
    if name in DECODERS:
        asked = torch.arange(1, sum(lengths), 3)
        some = bare(**inputs, logits_to_keep=asked).logits
        torch.testing.assert_close(some, found[:, asked], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Bert", "ModernBert", "MPNet"])
def test_heads_that_get_rows(name: str) -> None:
    padded = make(name, "ForQuestionAnswering", num_labels=2)
    bare = copy.deepcopy(padded)
    packed = pack(bare, name == "Bert", form=Form.ROWS)
    whole = batch(padded, LENGTHS).inputs
    there = whole["attention_mask"].bool()
    outputs = padded(**whole), bare(**announced(packed, LENGTHS).inputs)
    for logits in ("start_logits", "end_logits"):
        own, ours = (output[logits][there] for output in outputs)
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)
    for output in outputs:
        (
            output.start_logits[there] - output.end_logits[there]
        ).square().mean().backward()
    assert_same_gradients(padded, bare)


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "ModernBert", "Gte"])
def test_models_without_a_head(name: str) -> None:
    padded = make(name, "Model")
    bare = copy.deepcopy(padded)
    packed = pack(bare, form=Form.ROWS)
    whole = batch(padded, LENGTHS).inputs
    outputs = padded(**whole), bare(**announced(packed, LENGTHS).inputs)
    there = whole["attention_mask"].bool()
    own, ours = (output.last_hidden_state[there] for output in outputs)
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)
    if name == "Bert":
        torch.testing.assert_close(outputs[1].pooler_output, outputs[0].pooler_output)


@pytest.mark.parametrize(
    "name", ["Bert", "ModernBert", "MPNet", "Gemma2", "Llama", "Mistral"]
)
def test_long_texts(name: str) -> None:
    """Longer than fused layers and attention in memory are for, and than windows."""
    head = "ForCausalLM" if name in DECODERS else "ForTokenClassification"
    window = {"sliding_window": 100} if name in ("Gemma2", "Mistral") else {}
    window = {"local_attention": 128} if name == "ModernBert" else window
    padded = make(name, head, max_position_embeddings=700, **window)
    bare = copy.deepcopy(padded)
    packed = pack(bare, name == "Bert", form=Form.FLAT)
    lengths = [3, 90, 530, 600]
    whole = batch(padded, lengths).inputs
    with torch.no_grad():
        expected = padded(**whole).logits[whole["attention_mask"].bool()]
        found = bare(**announced(packed, lengths).inputs).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Gemma2", "Llama", "ModernBert"])
def test_attention_in_memory(name: str) -> None:
    """What CPUs compute in bf16, in fp32: that nothing but rounding differs."""
    model = make(name, "ForCausalLM" if name in DECODERS else "ForTokenClassification")
    packed = pack(model, form=Form.FLAT)
    inputs = announced(packed, LENGTHS).inputs
    with torch.no_grad():
        exact = model(**inputs).logits
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(**inputs).logits
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(
    ("name", "layers", "wide"),
    [
        ("Bert", "bert.encoder.layer", "output.dense"),
        ("DistilBert", "distilbert.transformer.layer", "ffn.lin2"),
    ],
)
def test_the_last_layer_sees_what_a_classifier_looks_at(
    name: str, layers: str, wide: str
) -> None:
    model = make(name)
    packed = pack(model)
    seen: list[int] = []
    for layer in model.get_submodule(layers):
        layer.get_submodule(wide).register_forward_hook(
            lambda _, inputs, __: seen.append(inputs[0].shape[1])
        )
    model(**announced(packed, LENGTHS).inputs)
    assert seen == [sum(LENGTHS), len(LENGTHS)]


class MeanOfTokens(transformers.BertForSequenceClassification):  # type: ignore[misc, unused-ignore]
    """A classifier that looks at every token."""

    def forward(self, attention_mask: Tensor, **inputs: Any) -> Any:
        states = self.bert(attention_mask=attention_mask, **inputs).last_hidden_state
        there = attention_mask.unsqueeze(-1)
        return SequenceClassifierOutput(
            logits=self.classifier((states * there).sum(1) / there.sum(1))
        )


def test_a_classifier_that_looks_at_all_tokens_gets_them() -> None:
    padded = MeanOfTokens(make("Bert").config).eval()
    bare = copy.deepcopy(padded)
    packed = pack(bare, form=Form.ROWS)
    assert not packed.is_first_token_only
    found = bare(**announced(packed, LENGTHS).inputs).logits
    torch.testing.assert_close(found, padded(**batch(padded, LENGTHS).inputs).logits)


def test_the_only_layer_of_a_model() -> None:
    assert pack(make("Bert", num_hidden_layers=1)).is_first_token_only


def test_a_classifier_whose_logits_say_nothing_gets_all_tokens() -> None:
    model = make("Bert")
    torch.nn.init.zeros_(model.classifier.weight)
    pack(model, form=Form.ROWS)


@pytest.mark.parametrize("name", ["Bert", "DebertaV2", "Llama"])
def test_padded_batches_are_computed_as_ever(name: str) -> None:
    padded = make(name).eval()
    bare = copy.deepcopy(padded)
    packed = pack(bare, name == "Bert", Form.LAST if name == "Llama" else Form.FIRST)
    bare(**announced(packed, LENGTHS).inputs)
    inputs = batch(padded, LENGTHS).inputs
    assert torch.equal(bare(**inputs).logits, padded(**inputs).logits)
    states = [model.base_model(**inputs).last_hidden_state for model in (padded, bare)]
    assert torch.equal(*states)


def test_texts_are_generated_as_ever() -> None:
    padded = make("Llama", "ForCausalLM").eval()
    bare = copy.deepcopy(padded)
    packed = pack(bare, form=Form.FLAT)
    bare(**announced(packed, [4]).inputs)
    prompt = table(bare, [4]).batch(np.arange(1), 0).inputs
    own, ours = (
        model.generate(**prompt, max_new_tokens=5, do_sample=False)
        for model in (padded, bare)
    )
    assert torch.equal(ours, own)


@pytest.mark.parametrize(
    ("name", "fuse"),
    [("Bert", False), ("Bert", True), ("Llama", False), ("ModernBert", False)],
)
def test_layers_that_are_computed_again_for_backward(name: str, fuse: bool) -> None:
    model = make(name, "ForTokenClassification" if name != "Llama" else "ForCausalLM")
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable()
    for each in (model, again):
        packed = pack(each, fuse, Form.FLAT)
        torch.manual_seed(2)
        each.train()(
            **announced(packed, LENGTHS).inputs
        ).logits.square().mean().backward()
    assert_same_gradients(model, again)


@pytest.mark.parametrize("lengths", [[4], [1, 1], [7, 7, 7, 7, 7], list(range(1, 14))])
def test_groups_hold_every_token_once(lengths: list[int]) -> None:
    layout = Layout(torch.tensor(lengths), CPU)
    tokens = torch.arange(1, sum(lengths) + 1)
    assert len(layout.groups) <= packed_attention.GROUPS
    for group, part in zip(layout.groups, layout.split(tokens), strict=True):
        rows = group.apart(part)
        assert rows.shape == (group.sequences, group.length)
        assert group.together(rows).equal(part)
        assert rows[rows > 0].equal(part)
    rows = layout.all.apart(tokens)
    assert rows.shape == (len(lengths), max(lengths))
    assert rows[:, 0].equal(tokens[layout.firsts])
    assert rows.amax(1).equal(tokens[layout.lasts])


def test_attention_drops_out_in_training_alone() -> None:
    model = make("Bert")
    packed = pack(model)
    inputs = announced(packed, LENGTHS).inputs
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    first, second = (model.train()(**inputs).logits for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_a_text_that_the_model_has_no_positions_for() -> None:
    packed = pack(make("Roberta"))
    packed.expect(torch.tensor([1, 38]), CPU)
    with pytest.raises(ValueError, match="39 tokens is longer than the 38 positions"):
        packed.expect(torch.tensor([1, 39]), CPU)


@pytest.mark.parametrize("name", ["T5", "Bart", "T5Gemma"])
def test_models_that_work_with_padding_alone(name: str) -> None:
    sizes: dict[str, Any] = {
        "T5": {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    }
    sizes["Bart"] = {
        "vocab_size": 60,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    side = {**DECODER, **SLIDING, "query_pre_attn_scalar": 8}
    sizes["T5Gemma"] = {"vocab_size": 60, "encoder": side, "decoder": side}
    config = getattr(transformers, f"{name}Config")(**sizes[name])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    assert packing.pack(model) == f"{type(model).__name__} cannot work without padding"


def leaky(own: Any, *args: Any, **named: Any) -> Any:
    """A convolution: states of a sequence depend on the one before it."""
    output = own(*args, **named)
    output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.roll(
        1, 1
    )
    return output


def sliding(own: Any, module: Any, query: Tensor, *args: Any, **named: Any) -> Any:
    """Attention that knows no windows."""
    return own(module, query, *args, **(named | {"sliding_window": None}))


def no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed_attention.attention
    monkeypatch.setattr(packing, "attention", lambda *a, **k: sliding(right, *a, **k))


@pytest.mark.parametrize(("longest", "fails"), [(None, True), (120, False)])
def test_windows_are_seen_by_texts_that_are_longer(
    monkeypatch: pytest.MonkeyPatch, longest: int | None, fails: bool
) -> None:
    """And are of no matter to a run whose texts are shorter."""
    model = make(
        "Mistral", "ForCausalLM", sliding_window=128, max_position_embeddings=1000
    ).eval()
    inputs = batch(model, [150, 200]).inputs
    before = model(**inputs).logits
    no_windows(monkeypatch)
    found = packing.pack(model, longest=longest)
    assert isinstance(found, str) == fails
    if fails:
        assert "gives other outputs without padding (outputs differ by" in str(found)
        assert torch.equal(model(**inputs).logits, before)


def test_a_model_whose_trial_fails_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("Llama").eval()
    inputs = batch(model, LENGTHS).inputs
    before = model(**inputs).logits
    monkeypatch.setattr(packing, "attention", lambda *_, **__: 1 / 0)
    reason = packing.pack(model)
    assert isinstance(reason, str)
    assert "without padding (ZeroDivisionError: division by zero)" in reason
    assert torch.equal(model(**inputs).logits, before)


def test_a_model_that_mixes_sequences_is_left_as_it_was() -> None:
    model = make("Bert").eval()
    model.bert.encoder.forward = functools.partial(leaky, model.bert.encoder.forward)
    inputs = batch(model, LENGTHS).inputs
    before = model(**inputs).logits
    reason = packing.pack(model)
    assert isinstance(reason, str)
    assert "gives other outputs without padding (outputs differ by" in reason
    assert torch.equal(model(**inputs).logits, before)


def test_a_saved_model_loads_as_any_other(tmp_path: Path) -> None:
    model = make("Bert").eval()
    packed = pack(model)
    inputs = announced(packed, LENGTHS).inputs
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    assert packing.NAME not in (tmp_path / "config.json").read_text()
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**batch(model, LENGTHS).inputs).logits, expected)
