"""Training the rows that the data uses gives what training the whole table gives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from slurmft.core.errors import UsageError
from slurmft.train.data.tables import TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.engine.vocab_trim import TrimmedVocabulary, check_tokens
from tests.support.packed_models import make

WORDS = 10_000
"""A table of 1.2 MiB."""
TOKENS = [2, 3, 5, 90, 700, 4000, 9998, 9999]


def data(pad_id: int, tokens: list[int] = TOKENS) -> TokenData:
    rng = np.random.default_rng(0)
    samples = [rng.choice(tokens, size=n) for n in (3, 12, 7, 5)]
    train = TokenTable.build(samples, [0, 1, 2, 0])
    validation = TokenTable.build([tokens], [1])
    return TokenData(train, validation, ["a", "b", "c"], pad_id)


def trim(model: Any, of: TokenData) -> TrimmedVocabulary:
    found = TrimmedVocabulary.trim(model, of)
    assert isinstance(found, TrimmedVocabulary), found
    return found


def train(model: Any, of: TokenData) -> list[float]:
    """Six steps of all that a step has, at a rate that falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    losses = []
    for step in range(6):
        batch = of.train.batch(np.arange(step % 2, 4), of.pad_id)
        loss = model(**batch.inputs, **batch.targets).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] *= 0.8
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "name", ["Bert", "DistilBert", "Roberta", "Electra", "DebertaV2"]
)
def test_the_trained_model_is_the_same(name: str) -> None:
    whole = make(name, vocab_size=WORDS)
    narrowed = copy.deepcopy(whole)
    of = data(whole.config.pad_token_id)
    vocabulary = trim(narrowed, of)
    table = narrowed.get_input_embeddings()
    assert vocabulary.used.tolist() == [whole.config.pad_token_id, *TOKENS]
    # padding, and the row that tells the decay
    assert len(table.weight) == len(TOKENS) + 2
    assert train(narrowed, of) == pytest.approx(train(whole, of), rel=1e-5)
    vocabulary.restore(table)
    found, expected = (dict(m.state_dict()) for m in (narrowed, whole))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5, msg=key)
    # tokens that were no part of the data
    inputs = {"input_ids": torch.tensor([[8, 9, 10, 11]])}
    for model in (whole, narrowed):
        model.eval()
    torch.testing.assert_close(
        narrowed(**inputs).logits, whole(**inputs).logits, rtol=1e-4, atol=1e-4
    )


def test_a_token_that_the_data_does_not_have_is_an_error() -> None:
    model = make("Bert", vocab_size=WORDS)
    trim(model, data(0))
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[2, 4]]))


def test_a_token_that_the_model_does_not_know_is_an_error() -> None:
    with pytest.raises(
        UsageError, match="makes token 9999, but the model knows 9000 tokens"
    ):
        check_tokens(make("Bert", vocab_size=9000), data(0))


def test_small_gains_are_left() -> None:
    assert (
        TrimmedVocabulary.trim(
            make("Bert", vocab_size=WORDS), data(0, list(range(5000)))
        )
        is None
    )


def test_a_shared_table_stays_whole() -> None:
    model = make("Bert", "ForMaskedLM", vocab_size=WORDS)
    assert TrimmedVocabulary.trim(model, data(0)) is None


def test_a_model_that_does_not_name_its_table_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> Any:
        raise NotImplementedError  # as transformers does

    model = make("Bert", vocab_size=WORDS)
    monkeypatch.setattr(model, "get_input_embeddings", refuse)
    assert TrimmedVocabulary.trim(model, data(0)) is None


def test_a_table_that_does_not_train_stays_whole() -> None:
    model = make("Bert", vocab_size=WORDS)
    model.get_input_embeddings().weight.requires_grad_(False)
    assert TrimmedVocabulary.trim(model, data(0)) is None


def test_a_model_that_uses_its_table_otherwise_stays_as_it_was() -> None:
    model = make("Bert", vocab_size=WORDS)
    table = model.get_input_embeddings()
    model.classifier.register_forward_hook(
        lambda *found: found[-1] + table.weight.sum()
    )
    before = copy.deepcopy(model.state_dict())
    found = TrimmedVocabulary.trim(model, data(0))
    assert isinstance(found, str)
    assert found.startswith("BertForSequenceClassification cannot do without the rows")
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert model.get_input_embeddings().num_embeddings == WORDS
    assert not table._forward_pre_hooks
