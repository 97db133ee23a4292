"""`slurmft predict` of models that write texts: as transformers' `generate` of the saved model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
)

from slurmft.core.config import RunConfig
from slurmft.core.errors import UsageError
from slurmft.runs.rundir import RunDir
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.login.predict import configure
from tests.support.made_runs import write_run, write_trained
from tests.support.models import (
    CHAT_TEMPLATE,
    write_chats,
    write_copies,
    write_decoder,
    write_seq2seq_model,
)
from tests.train.test_predict import predict, predicted, write

EXACT = ("--precision", "fp32", "--eval-batch-size", "4", "--nodes", "2")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are large enough for texts that differ."""
    folder = tmp_path_factory.mktemp("decoder") / "llama"
    return write_decoder(folder, initializer_range=0.5, max_position_embeddings=200)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generated(
    folder: Path, prompts: list[Any], auto: Any, **settings: Any
) -> list[str]:
    """What transformers generates for each prompt alone, greedily unless `settings` differ."""
    settings = {"do_sample": False} | settings
    model = auto.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt"
            )["input_ids"]
        output = model.generate(ids, **settings)[0]
        if not model.config.is_encoder_decoder:
            output = output[ids.shape[1] :]
        texts.append(tokenizer.decode(output, skip_special_tokens=True))
    return texts


@pytest.mark.processes
def test_chats_are_answered_as_by_transformers(tmp_path: Path, decoder: Path) -> None:
    """Two ranks, and batches of several lengths; the order is that of the file. The last turn of
    the assistant is what is predicted."""
    run = write_trained(tmp_path / "runs/sft", decoder, task="sft", max_length=100)
    file = write_chats(tmp_path / "chats", 1, 14) / "validation.jsonl"
    output = tmp_path / "answers.jsonl"
    length = ("--max-new-tokens", "12")
    done = predict(run, file, *EXACT, *length, "--output", str(output))
    assert done.code == 0, done.err
    rows = rows_of(output)
    assert [row["messages"] for row in rows] == [
        row["messages"] for row in rows_of(file)
    ]
    prompts = [row["messages"][:-1] for row in rows]
    expected = generated(run.model, prompts, AutoModelForCausalLM, max_new_tokens=12)
    assert [row["prediction"] for row in rows] == expected
    assert len(set(expected)) > 5


# --- in this process ------------------------------------------------------------------------------


def config_of(run: RunDir, file: Path, **flags: Any) -> RunConfig:
    return configure(run, file, file.with_name("out.jsonl"), False, flags)


def texts_of(run: RunDir, file: Path, tmp_path: Path, **flags: Any) -> list[str]:
    folder = tmp_path / f"tokens {flags}"
    predictions = predicted(config_of(run, file, **flags), folder)["prediction"]
    return [str(text) for text in predictions]


@pytest.mark.parametrize(
    "fields",
    [{"task": "causal-lm"}, {"task": "sft", "preset": "completion"}],
    ids=["causal-lm", "completion"],
)
def test_prompts_are_continued_as_by_transformers(
    fields: dict[str, Any], tmp_path: Path, decoder: Path
) -> None:
    run = write_trained(tmp_path / "runs/run", decoder, **fields)
    texts = ["joy love", "fear", "word1 word2 word3 word4 joy", "anger word9"]
    column = {"sft": "prompt", "causal-lm": "text"}[fields["task"]]
    file = write(tmp_path / "new.csv", {column: texts})
    length = {"max_new_tokens": 9}
    for beams in (1, 3):
        found = texts_of(run, file, tmp_path, num_beams=beams, **length)
        settings = length | {"num_beams": beams}
        assert found == generated(run.model, texts, AutoModelForCausalLM, **settings)


def test_conversations_in_other_forms(tmp_path: Path, decoder: Path) -> None:
    """ShareGPT's, contents in parts, and a turn to predict that is null, are the same prompt."""
    run = write_trained(tmp_path / "runs/run", decoder, task="sft", max_length=100)
    texts = ["joy love", "fear", "word1 word2"]
    roles = ["user", "assistant", "user"]
    names = ["human", "gpt", "human"]
    pairs = list(zip(roles, texts, strict=True))
    plain = [{"role": role, "content": text} for role, text in pairs]
    parts = [{"type": "text", "text": texts[2]}]
    sharegpt = [{"from": n, "value": t} for n, t in zip(names, texts, strict=True)]
    forms = [
        plain,
        [*plain[:2], {"role": "user", "content": parts}],
        sharegpt,
        [*sharegpt, {"from": "gpt", "value": None}],
        [*plain, {"role": "assistant", "content": "anger"}],
        [*plain, {"role": "assistant", "content": None}],
        [*plain, {"role": "assistant"}],
    ]
    file = write(tmp_path / "new.jsonl", {"messages": forms})
    found = texts_of(run, file, tmp_path, max_new_tokens=9)
    limit = {"max_new_tokens": 9}
    expected = generated(run.model, [plain], AutoModelForCausalLM, **limit)
    assert found == expected * len(forms)
    unanswered = [plain[0], {"role": "assistant", "content": None}, plain[2]]
    file = write(tmp_path / "null.jsonl", {"messages": [unanswered]})
    with pytest.raises(UsageError, match="no content, or null, in message 2"):
        config_of(run, file)


def test_settings_of_the_model(tmp_path: Path, decoder: Path) -> None:
    """They are taken if asked for; tokens are drawn by the seed."""
    run = write_trained(tmp_path / "runs/run", decoder, task="causal-lm")
    texts = ["joy love", "fear word3 word4"]
    file = write(tmp_path / "new.csv", {"text": texts})
    settings = GenerationConfig.from_pretrained(run.model)
    settings.repetition_penalty = 1.8
    settings.num_beams = 2
    settings.save_pretrained(run.model)
    flags = {"max_new_tokens": 9, "generation": "model"}
    expected = generated(run.model, texts, AutoModelForCausalLM, max_new_tokens=9)
    assert texts_of(run, file, tmp_path, **flags) == expected
    assert texts_of(run, file, tmp_path, max_new_tokens=9) != expected
    settings.num_beams = 1
    settings.do_sample = True
    settings.temperature = 3.0
    settings.save_pretrained(run.model)
    drawn = [texts_of(run, file, tmp_path, seed=seed, **flags) for seed in (1, 2)]
    again = texts_of(run, file, tmp_path, seed=1, precision="fp32", **flags)
    assert drawn[0] == again != drawn[1]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_texts_are_made_as_by_transformers(kind: str, tmp_path: Path) -> None:
    model = write_seq2seq_model(tmp_path / "model", kind)
    run = write_trained(tmp_path / "runs/run", model, task="seq2seq")
    file = write_copies(tmp_path / "data", 1, 6) / "validation.jsonl"
    sources = [row["text"] for row in rows_of(file)]
    flags = {"max_new_tokens": 7, "num_beams": 2}
    found = texts_of(run, file, tmp_path, **flags)
    assert found == generated(run.model, sources, AutoModelForSeq2SeqLM, **flags)
    if kind == "bart":  # the first token of the other one is the end
        assert all(found)


def test_an_adapter_writes_as_by_peft(tmp_path: Path, decoder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(decoder)
    settings = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, settings)
    torch.manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    run = write_run(tmp_path / "runs/run", task="sft", model=str(decoder), lora=4)
    adapted.save_pretrained(run.model)
    adapted.config.save_pretrained(run.model / "config")
    AutoTokenizer.from_pretrained(decoder).save_pretrained(run.model)
    file = write_chats(tmp_path / "chats", 1, 5) / "validation.jsonl"
    prompts = [row["messages"][:-1] for row in rows_of(file)]
    found = texts_of(run, file, tmp_path, max_new_tokens=9)
    limit = {"max_new_tokens": 9}
    assert found == generated(run.model, prompts, AutoPeftModelForCausalLM, **limit)
    assert found != generated(decoder, prompts, AutoModelForCausalLM, **limit)


def test_a_model_stops_where_turns_end(tmp_path: Path) -> None:
    """Also where the saved model is loaded by others: the base knows the end of documents alone."""
    template = CHAT_TEMPLATE.replace("<|end|>", "<|system|>")
    model = write_decoder(tmp_path / "model", template)
    for task, ends in (("sft", [1, 4]), ("causal-lm", 1)):
        config = TrainConfig.resolve(task=task, data="d", model=str(model))
        loaded = tasks.get(config).model(None)  # type: ignore[arg-type]
        loaded.save_pretrained(tmp_path / task)
        settings = GenerationConfig.from_pretrained(tmp_path / task)
        assert settings.eos_token_id == ends


# --- what cannot be right -------------------------------------------------------------------------


def refusal(run: RunDir, file: Path, **flags: Any) -> UsageError:
    with pytest.raises(UsageError) as error:
        config_of(run, file, **flags)
    assert error.value.hint
    return error.value


@pytest.mark.parametrize(
    ("words", "flags", "message", "hint"),
    [
        (60, {}, "60 tokens: with --max-new-tokens 256", "--max-new-tokens 140"),
        (60, {"max_new_tokens": 50}, "and --max-length is 40", "--max-length 60"),
        (60, {"max_length": 60, "max_new_tokens": 150}, "200 positions", "tokens 140"),
        (201, {"max_new_tokens": 1}, "the 200 positions of the model", "shorten it"),
    ],
)
def test_prompts_that_are_too_long(
    words: int,
    flags: dict[str, Any],
    message: str,
    hint: str,
    tmp_path: Path,
    decoder: Path,
) -> None:
    """Both at submission and in the job, which checks every row."""
    run = write_trained(tmp_path / "runs/run", decoder, task="causal-lm", max_length=40)
    short = write(tmp_path / "short.csv", {"text": ["joy"]})
    file = write(tmp_path / "new.csv", {"text": ["joy", "joy " * words]})
    error = refusal(run, file, **flags)
    assert message in error.message
    assert hint in (error.hint or "")
    config = config_of(run, short, **(flags | {"max_new_tokens": 1}))
    settings = config.program.settings | {"data": str(file)}
    settings["max_new_tokens"] = flags.get("max_new_tokens", 256)
    program = dataclasses.replace(config.program, settings=settings)
    config = dataclasses.replace(config, program=program)
    with pytest.raises(UsageError, match="row 2 has") as in_job:
        predicted(config, tmp_path / "tokens")
    assert in_job.value.message.partition(" has ")[2] in error.message
    assert in_job.value.hint == error.hint


def test_flags_that_do_not_fit(tmp_path: Path, decoder: Path, tiny_model: Path) -> None:
    chats = write_chats(tmp_path / "chats", 1, 2) / "validation.jsonl"
    classes = write_trained(
        tmp_path / "runs/classes",
        tiny_model,
        task="text-classification",
        text_column="messages",
    )
    texts = write_trained(tmp_path / "runs/texts", tiny_model, task="seq2seq")
    file = write(tmp_path / "new.csv", {"text": ["joy"]})
    for flags in ({"max_new_tokens": 3}, {"num_beams": 2}, {"generation": "model"}):
        message = refusal(classes, file, **flags).message
        assert "--task text-classification generates no texts" in message
    message = refusal(texts, file, generation="model").message
    assert "--task seq2seq is none" in message
    run = write_trained(tmp_path / "runs/chats", decoder, task="sft", max_length=100)
    tool = {"messages": [{"role": "tool", "content": "joy"}]}
    chats.write_text(chats.read_text() + json.dumps(tool) + "\n")
    message = refusal(run, chats, max_new_tokens=9).message
    assert "row 3: the chat template" in message
    assert "refuses it: no tools here" in message
