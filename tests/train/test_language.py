"""Causal language modelling and supervised fine-tuning: what is learnt, perplexity, bad data."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from slurmft.core.errors import UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED
from slurmft.train.data.token_data import TokenData
from slurmft.train.engine import packing
from slurmft.train.login import chats, inputs
from slurmft.train.login.sources import localize
from slurmft.train.tasks.causal_lm import Task, _losses
from tests.conftest import Done, records
from tests.support.models import (
    CHAT_TEMPLATE,
    made_text,
    write_chats,
    write_decoder,
    write_documents,
    write_splits,
)
from tests.train.test_trainer import train

USER, ANSWER = (
    {"role": "user", "content": "joy word1"},
    {"role": "assistant", "content": "love"},
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder") / "tiny llama")


def config_of(data: Path, model: Path, task: str = "sft", **given: Any) -> TrainConfig:
    config = TrainConfig.resolve(task=task, data=str(data), model=str(model), **given)
    return localize(config)


def task_of(data: Path, model: Path, task: str = "sft", **given: Any) -> Task:
    found = tasks.get(config_of(data, model, task, **given))
    assert isinstance(found, Task)
    return found


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    return write_splits(folder, {"train": list(rows), "validation": list(rows)})


def learnt(task: Task, data: TokenData) -> list[list[str]]:
    """The words that each sample of the training split is to predict."""
    table, tokenizer = data.train, task.tokenizer()
    found = []
    for i in range(len(table)):
        places = slice(*table.offsets[i : i + 2])
        tokens, labels = table.tokens[places], table.token_labels[places]  # type: ignore[index]
        kept = labels != IGNORED
        assert (labels[:-1] == tokens[1:])[kept[:-1]].all()
        assert not kept[-1]
        found.append(tokenizer.convert_ids_to_tokens(labels[kept].tolist()))
    return found


# --- what is learnt -------------------------------------------------------------------------------


def test_documents_follow_one_another_in_blocks(tmp_path: Path, decoder: Path) -> None:
    texts = ("joy love fear", "", "anger", "word1 word2 word3")
    data = write_rows(tmp_path / "data", *({"text": text} for text in texts))
    task = task_of(data, decoder, "causal-lm", max_length=4)
    found = task.prepare()
    tokens = [
        "joy",
        "love",
        "fear",
        "<|end|>",
        "anger",
        "<|end|>",
        "word1",
        "word2",
        "word3",
    ]
    # The end-of-text token of the last is alone in its block, and tells nothing.
    assert task.tokenizer().convert_ids_to_tokens(found.train.tokens.tolist()) == [
        *tokens, "<|end|>",
    ]  # fmt: skip
    assert found.train.lengths(np.arange(3)).tolist() == [4, 4, 2]
    assert learnt(task, found) == [tokens[1:4], tokens[5:8], ["<|end|>"]]
    assert "10 tokens, 3 blocks of 4" in found.notes[0]


def test_a_plain_text_is_one_document(tmp_path: Path, decoder: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.txt").write_text("joy love " * 350 + "\n" + " fear" * 250)
    with gzip.open(folder / "validation.txt.gz", "wt") as file:
        file.write("joy <|end|> love")
    task = task_of(folder, decoder, "causal-lm", max_length=500)
    found = task.prepare()
    assert found.train.lengths(np.arange(2)).tolist() == [500, 451]
    names = task.tokenizer().convert_ids_to_tokens(found.validation.tokens.tolist())
    assert names == ["joy", "<|end|>", "love"]  # as it is written there
    with pytest.raises(UsageError, match="has no column 'label'"):
        inputs.check(config_of(folder, decoder, "text-classification"))
    with pytest.raises(UsageError, match="row 1 has the messages 'joy love"):
        inputs.check(config_of(folder, decoder, "sft"))


def test_every_turn_of_the_assistant_is_learnt_with_its_end(
    tmp_path: Path, decoder: Path
) -> None:
    second = {"role": "assistant", "content": "fear anger"}
    data = write_rows(
        tmp_path / "data", {"messages": [USER, ANSWER, USER, second, USER]}
    )
    task = task_of(data, decoder)
    turns = ["love", "<|end|>", "\n", "fear", "anger", "<|end|>", "\n"]
    assert learnt(task, task.prepare()) == [turns]


def test_turns_that_change_once_others_follow_are_samples_of_their_own(
    tmp_path: Path,
) -> None:
    """As Qwen3's template leaves the thoughts of earlier turns out."""
    template = CHAT_TEMPLATE.replace(
        "{{ m.content }}", "{% if loop.last %}word39 {% endif %}{{ m.content }}"
    )
    model = write_decoder(tmp_path / "model", template)
    data = write_rows(tmp_path / "data", {"messages": [USER, ANSWER, USER, ANSWER]})
    with pytest.raises(UsageError, match="writes turns of the assistant otherwise"):
        task_of(data, model).prepare()  # the user's turn, too
    template = template.replace("loop.last", "loop.last and m.role == 'assistant'")
    task = task_of(data, write_decoder(tmp_path / "other", template))
    assert learnt(task, task.prepare()) == [["word39", "love", "<|end|>", "\n"]] * 2


def test_completions_are_learnt_with_the_end_of_text(
    tmp_path: Path, decoder: Path
) -> None:
    rows = [
        {"prompt": "joy word1 ", "completion": "fear love"},
        {"prompt": "joy", "completion": " fear<|end|>"},
        {"prompt": "joy", "completion": " "},
    ]
    data = write_rows(tmp_path / "data", *rows)
    task = task_of(data, decoder, preset="completion")
    expected = [["fear", "love", "<|end|>"], ["fear", "<|end|>"]]
    assert learnt(task, task.prepare()) == expected
    with pytest.warns(UserWarning, match="1 of 3 rows have an empty text: row 3"):
        inputs.check(config_of(data, decoder, preset="completion", batch_size=1))


def test_what_is_cut_is_told(tmp_path: Path, decoder: Path) -> None:
    long = {"role": "user", "content": "word1 " * 30}
    chats = [[USER, ANSWER], [long, ANSWER], [USER, ANSWER, long, ANSWER]]
    data = write_rows(
        tmp_path / "data", *({"messages": messages} for messages in chats)
    )
    task = task_of(data, decoder, max_length=16)
    found = task.prepare()
    assert learnt(task, found) == [["love", "<|end|>", "\n"]] * 2
    assert found.notes[0].endswith(
        "2 samples, 6 of 25 tokens learnt; 2 longer than the 16 tokens of --max-length, which were "
        "cut; 1 left out, as no completion is left: row 2"
    )
    with pytest.raises(
        UsageError, match=r"no completion is left: 3 longer than the 4 tokens"
    ):
        task_of(data, decoder, max_length=4).prepare()


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_its_gradient_are_torchs(smoothing: float) -> None:
    labels = torch.randint(0, 50_000, (64,))
    labels[::5] = IGNORED
    given = (3 * torch.randn(64, 50_000)).requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        given, labels, reduction="sum", label_smoothing=smoothing
    )
    (gradient,) = torch.autograd.grad(expected, given)
    other = given.detach().clone().requires_grad_()
    losses = _losses(other * 1, labels, smoothing)
    assert (losses[::5] == 0).all()
    assert losses.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    (own,) = torch.autograd.grad(losses.sum() * 2, other)
    torch.testing.assert_close(own, 2 * gradient, rtol=1e-4, atol=1e-6)


def test_logits_of_labelled_tokens_alone_give_the_same(
    tmp_path: Path, decoder: Path
) -> None:
    task = task_of(write_chats(tmp_path / "data", 12, 4), decoder)
    data = task.prepare()
    model = task.model(data).eval()
    batch = data.train.batch(np.arange(12), data.pad_id)
    with torch.no_grad():
        logits = model(**batch.inputs).logits
        chosen = task.batch(batch, data.train)
        assert (
            chosen.inputs["logits_to_keep"].numel()
            < batch.inputs["input_ids"].shape[1] - 1
        )
        total, count = task.loss(model(**chosen.inputs), chosen)
        sums = task.predict(model(**chosen.inputs), chosen, data)
    labels = batch.targets["labels"].flatten()
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels, reduction="sum"
    )
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert count == (labels != IGNORED).sum() == task.count(data.train, np.arange(12))
    assert sums[:, 0].sum().item() == pytest.approx(total.item(), rel=1e-6)
    assert sums[:, 1].tolist() == [
        task.count(data.train, np.array([i])) for i in range(12)
    ]
    packed = packing.pack(model)
    assert isinstance(packed, packing.Packing), packed
    batch = task.batch(data.train.packed(np.arange(12)), data.train)
    packed.expect(batch.lengths, model.device)
    with torch.no_grad():
        output = model(**batch.inputs)
    assert output.logits.shape[1] == count
    torch.testing.assert_close(task.predict(output, batch, data), sums[batch.indices])


# --- training -------------------------------------------------------------------------------------


def run(folder: Path, model: Path, task: str, data: Path, *flags: str) -> Done:
    done = train(
        folder, "--task", task, "--data", str(data), "--model", str(model), "--precision", "fp32",
        *("--max-length", "64", "--learning-rate", "0.02", "--log-every", "4", *flags),
    )  # fmt: skip
    assert done.code == 0, done.err
    return done


@pytest.mark.processes
def test_perplexity_falls_alike_on_one_and_two_ranks(
    tmp_path: Path, decoder: Path
) -> None:
    """Each word is one of two, or the last: below 3; untrained, any of 52 is as likely."""
    data = write_documents(tmp_path / "data", 300, 40)
    flags = ("--epochs", "4", "--early-stopping", "1")
    one = run(tmp_path / "1", decoder, "causal-lm", data, *flags, "--batch-size", "16")
    two = run(
        tmp_path / "2",
        decoder,
        "causal-lm",
        data,
        *flags,
        "--batch-size",
        "8",
        "--nodes",
        "2",
    )
    metrics = one.result["metrics"]
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss"]))
    assert 2 < metrics["perplexity"] < 3
    for name, value in two.result["metrics"].items():
        assert value == pytest.approx(metrics[name], rel=1e-4)
    perplexities = [r["metrics"]["perplexity"] for r in records(one.run, "epoch")]
    assert perplexities == sorted(perplexities, reverse=True)
    # the lowest is the best
    assert one.run.checkpoint_names()[-1].startswith("step-00000048")


@pytest.mark.extra("training")
@pytest.mark.processes
def test_a_chat_model_answers(tmp_path: Path, decoder: Path) -> None:
    from transformers import pipeline

    data = write_chats(tmp_path / "data", 300, 40)
    done = run(tmp_path, decoder, "sft", data, "--epochs", "3", "--batch-size", "16")
    assert done.result["metrics"]["token_accuracy"] > 0.95
    model = done.run.path / "model"
    assert "pipeline_tag: text-generation" in (model / "README.md").read_text()
    chat = pipeline("text-generation", str(model), do_sample=False)
    asked = [{"role": "user", "content": "word4 word5 joy"}]
    assert (
        chat(asked, max_new_tokens=8)[0]["generated_text"][-1]["content"]
        == "joy word7 joy"
    )


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "joy"}, "row 3 has the messages 'joy'"),
        ({"messages": [{"role": "user"}]}, "row 3 has no content, or null, in message 1"),
        ({"messages": [{"role": "user", "content": None}]}, "row 3 has no content, or null"),
        ({"messages": []}, "row 3 has no message of the assistant"),
        ({"messages": [USER]}, "row 3 has no message of the assistant"),
        ({"messages": [USER, {"role": "bot", "content": "joy"}]}, "message of the role 'bot'"),
        ({"prompt": "joy"}, "row 3 has the messages None"),
    ],
)  # fmt: skip
def test_rows_that_are_wrong(
    row: dict[str, object], message: str, tmp_path: Path, decoder: Path
) -> None:
    """Told at submission, with the row."""
    good = {"messages": [USER, ANSWER]}
    data = write_rows(tmp_path / "data", good, good, row, good)
    with pytest.raises(UsageError, match=message):
        inputs.check(config_of(data, decoder))


def test_columns_that_are_missing(tmp_path: Path, decoder: Path) -> None:
    data = write_rows(tmp_path / "data", {"prompt": "joy", "completion": "love"})
    with pytest.raises(UsageError, match="no column 'messages'") as error:
        inputs.check(config_of(data, decoder))
    assert "--preset completion" in str(error.value.hint)
    empty = write_rows(tmp_path / "empty", {"text": ""}, {"text": " "})
    with pytest.raises(UsageError, match="no row has a text"):
        inputs.check(config_of(empty, decoder, "causal-lm"))


def test_one_text_is_enough_for_many_ranks(tmp_path: Path, decoder: Path) -> None:
    data = write_rows(tmp_path / "data", {"text": made_text(random.Random(0), 500)})
    inputs.check(config_of(data, decoder, "causal-lm"), processes=8)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"template": None}, "has no chat template"),
        ({"eos": None}, "has no padding token"),
        ({"eos": None, "pad": "<unk>"}, "has no end-of-text token"),
    ],
)
def test_tokenizers_that_lack_something(
    made: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = write_decoder(tmp_path / "model", **made)
    row = {"messages": [USER, ANSWER], "prompt": "joy", "completion": "love"}
    data = write_rows(tmp_path / "data", row)
    preset = "chat" if "template" in made else "completion"
    with pytest.raises(UsageError, match=message):
        config_of(data, model, preset=preset)
    # Of a model on the hub, the job finds out.
    config = TrainConfig.resolve(
        task="sft", data=str(data), model=str(model), preset=preset
    )
    with pytest.raises(UsageError, match=message):
        tasks.get(config).prepare()


def test_a_chat_template_is_found(decoder: Path, tmp_path: Path) -> None:
    """In a file of its own, as transformers writes it, or in the tokenizer's."""
    data = write_rows(tmp_path / "data", {"messages": [USER, ANSWER]})
    model = shutil.copytree(decoder, tmp_path / "model")
    assert config_of(data, model).model == str(model)
    (template,) = model.glob("*chat_template*")
    told = json.loads((model / "tokenizer_config.json").read_text())
    told["chat_template"] = template.read_text()
    (model / "tokenizer_config.json").write_text(json.dumps(told))
    template.unlink()
    assert config_of(data, model).model == str(model)


def test_an_adapter_is_no_model(decoder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", {"messages": [USER, ANSWER]})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(
        UsageError, match="holds an adapter of PEFT, and no config"
    ) as error:
        config_of(data, tmp_path / "adapter")
    assert "--merge" in str(error.value.hint)


def test_a_row_that_the_template_refuses(tmp_path: Path, decoder: Path) -> None:
    tool = {"role": "tool", "content": "joy"}
    data = write_rows(tmp_path / "data", {"messages": [USER, tool, ANSWER]})
    with pytest.raises(
        UsageError, match=r"row 1: the chat template .* refuses it: no tools here"
    ):
        task_of(data, decoder).prepare()


NO_END = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As GLM-4's: nothing ends a turn but the next one."""
THINKS = CHAT_TEMPLATE.removesuffix("<|assistant|>{% endif %}") + (
    "<|assistant|> <think>{% endif %}"
)
"""As DeepSeek-R1's: the prompt goes on otherwise than turns begin."""


def test_a_template_that_ends_no_turn(tmp_path: Path) -> None:
    """The model learns where it is to stop, and the log says so."""
    model = write_decoder(tmp_path / "model", template=NO_END)
    messages = [USER, ANSWER, USER, ANSWER]
    data = write_rows(tmp_path / "data", {"messages": messages})
    task = task_of(data, model)
    prepared = task.prepare()
    answer = ANSWER["content"].split()
    assert learnt(task, prepared) == [[*answer, *answer, "<|end|>"]]
    assert "ends no turn: '<|end|>' is learnt" in prepared.notes[0]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            THINKS,
            [USER, ANSWER],
            "row 1: the chat template .* otherwise than the beginning",
        ),
        ("{{ messages.nothing.at_all }}", [USER, ANSWER], "template .* refuses it"),
        ("{{ 1 + 'a' }}", [USER, ANSWER], "template .* refuses it"),
        (
            CHAT_TEMPLATE,
            [ANSWER, USER, ANSWER],
            "row 1 has a first message of the assistant",
        ),
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_chats_that_cannot_be_learnt_are_refused_at_submission(
    template: str,
    messages: list[dict[str, str]],
    message: str,
    beside: bool,
    tmp_path: Path,
) -> None:
    """And in the job, which is the first to see data of the hub; wherever the template is."""
    model = write_decoder(tmp_path / "model", template=template)
    if not beside:
        (file,) = model.glob("*chat_template*")
        config = json.loads((model / "tokenizer_config.json").read_text())
        config["chat_template"] = file.read_text()
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        file.unlink()
    data = write_rows(tmp_path / "data", {"messages": messages})
    with pytest.raises(UsageError, match=message) as error:
        inputs.check(config_of(data, model))
    assert error.value.hint
    with pytest.raises(UsageError, match=message):
        task_of(data, model).prepare()


def test_templates_are_rendered_as_transformers_does(tmp_path: Path) -> None:
    """With all that templates may use, white space alike."""
    template = """
    {%- for m in messages %}
        {%- if loop.index > 3 %}{% break %}{% endif %}
        {%- if m.role == "assistant" %}
    {% generation %}{{ m | tojson }}{% endgeneration %}
        {% else %}
    {{ bos_token }}{{ m.content | trim | upper }} {{ tools is none }}
        {% endif %}
    {%- endfor %}
    {{- eos_token if not add_generation_prompt else strftime_now("%Y") }}
    """
    model = write_decoder(tmp_path / "model", template=template)
    tokenizer = AutoTokenizer.from_pretrained(model)
    write = chats.local_template(str(model))
    assert write is not None
    messages = [USER, ANSWER | {"content": "Ä <&>"}, USER, ANSWER]
    for prompt in (True, False):
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert write(messages, add_generation_prompt=prompt) == expected


def test_an_encoder_is_refused(tmp_path: Path, tiny_model: Path, decoder: Path) -> None:
    data = write_documents(tmp_path / "data", 20, 5)
    made = task_of(data, decoder, "causal-lm").prepare()
    with pytest.raises(UsageError, match="is bert, no causal language model"):
        task_of(data, tiny_model, "causal-lm").model(made)


@pytest.mark.processes
def test_tokens_that_the_model_does_not_know(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model", vocab_size=40, tie_word_embeddings=True)
    data = write_documents(tmp_path / "data", 20, 5)
    done = train(
        tmp_path, "--task", "causal-lm", "--data", str(data), "--model", str(model)
    )
    assert done.code
    assert "but the model knows 40 tokens only" in done.err
