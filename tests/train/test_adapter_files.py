"""The files of adapters: PEFT, transformers and the lines of the model card load them, by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import AutoConfig, GenerationConfig

from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.engine.lora import Adapter
from slurmft.train.login import model_card
from tests.support.models import (
    write_chats,
    write_copies,
    write_decoder,
    write_documents,
    write_emotion,
    write_many_labels,
    write_model,
    write_seq2seq_model,
    write_splits,
    write_squad,
    write_words,
)
from tests.train.test_hub_commands import RESULT


def write_queries(folder: Path, train: int, validation: int) -> Path:
    """Writes pairs with a label, as rerankers are trained by."""
    row = {"query": "joy", "passage": "word3 word4", "label": 1}
    rows = [row, row | {"label": 0}]
    sizes = {"train": train, "validation": validation}
    return write_splits(
        folder, {name: rows * (size // 2) for name, size in sizes.items()}
    )


LABELLED = ("emotion", "multi-label", "token-classification", "reranker")
MAKERS: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
    "emotion": (write_model, write_emotion, "SequenceClassification", {}),
    "multi-label": (write_model, write_many_labels, "SequenceClassification", {}),
    "token-classification": (write_model, write_words, "TokenClassification", {}),
    "reranker": (write_model, write_queries, "SequenceClassification", {}),
    "squad": (write_model, write_squad, "QuestionAnswering", {"doc_stride": 4}),
    "causal-lm": (write_decoder, write_documents, "CausalLM", {}),
    "sft": (write_decoder, write_chats, "CausalLM", {}),
    "seq2seq": (
        write_seq2seq_model,
        write_copies,
        "Seq2SeqLM",
        {"max_target_length": 30, "num_beams": 2},
    ),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_adapters_load(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_the_model, write_the_data, head, given = MAKERS[name]
    config = TrainConfig.resolve(
        task=name,
        data=str(write_the_data(tmp_path / "data", 24, 8)),
        model=str(write_the_model(tmp_path / "base")),
        lora=4,
        **({"max_length": 32} | given),
    )
    task: Any = tasks.get(config)
    model = task.model(task.prepare())
    adapter = Adapter(model, config)
    for weight_name, weight in model.named_parameters():
        if "lora_B" in weight_name or "modules_to_save" in weight_name:
            torch.nn.init.normal_(weight, std=0.1)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").touch()
    adapter.save(folder, None, False, torch.float32)
    task.save_tokenizer(folder)
    inputs = dict(task.tokenizer()("joy word3", return_tensors="pt"))
    if name in ("causal-lm", "sft", "seq2seq"):
        inputs.pop("token_type_ids", None)
    if name == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"]

    def first_output(of: Any) -> torch.Tensor:
        with torch.inference_mode():
            output: torch.Tensor = of.eval()(**inputs)[0]
        return output

    expected = first_output(model)
    saved_config = AutoConfig.from_pretrained(folder, subfolder="config")
    labels = {}
    if name in LABELLED:
        labels = {"id2label": saved_config.id2label, "label2id": saved_config.label2id}
    by_peft = getattr(peft, f"AutoPeftModelFor{head}").from_pretrained(folder, **labels)
    torch.testing.assert_close(first_output(by_peft), expected)
    # transformers reads them with the configuration, without where there are no labels.
    more: dict[str, Any] = {}
    if name in LABELLED:
        more = {"config": saved_config}
    by_auto = getattr(transformers, f"AutoModelFor{head}")
    torch.testing.assert_close(
        first_output(by_auto.from_pretrained(folder, **more)), expected
    )

    facts = RESULT | {"pipeline": task.facts.pipeline}
    card = model_card.text(config, facts, {}, "a run")
    code = card.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("FOLDER or USER/NAME", str(folder)), names)
    loaded = names["model"]
    if isinstance(loaded, transformers.Pipeline):
        loaded = loaded.model
    torch.testing.assert_close(first_output(loaded), expected)
    if name == "seq2seq":
        generation = GenerationConfig.from_pretrained(folder, subfolder="config")
        assert (generation.num_beams, generation.max_length) == (2, 31)
        assert capsys.readouterr().out


# --- how models generate --------------------------------------------------------------------------

SETTINGS: list[dict[str, Any] | None] = [
    None,
    {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.1},
    {"temperature": 0.6, "top_p": 0.9},
    {"num_beams": 4, "length_penalty": 2.0, "max_length": 60, "early_stopping": True},
    {"max_new_tokens": 40, "eos_token_id": [1, 2]},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["causal-lm", "seq2seq"])
def test_settings_of_generation_are_those_of_the_base(
    name: str, settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    """As transformers saves them, whatever an evaluation generates by; and the token with which the
    texts of the training end."""
    from slurmft.train.engine.saved_weights import save_whole

    write_the_model, write_the_data, head, _ = MAKERS[name]
    base = write_the_model(tmp_path / "base")
    path = base / "generation_config.json"
    path.unlink(missing_ok=True)
    if settings:
        path.write_text(json.dumps(settings))
    given = {"max_target_length": 8} if name == "seq2seq" else {}
    config = TrainConfig.resolve(
        task=name,
        data=str(write_the_data(tmp_path / "data", 24, 8)),
        model=str(base),
        **given,
    )
    task: Any = tasks.get(config)
    model = task.model(task.prepare())
    save_whole(model, tmp_path / "ours", None, torch.float32)
    by_auto = getattr(transformers, f"AutoModelFor{head}")
    by_auto.from_pretrained(base).save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        json.loads((tmp_path / folder / "generation_config.json").read_text())
        for folder in ("ours", "theirs")
    )
    if name == "causal-lm":
        theirs.setdefault("eos_token_id", [1])
    assert ours == theirs
    assert ours.items() >= (settings or {}).items()
    if name == "seq2seq":  # greedy all the same
        used = model.generation_config
        assert (used.do_sample, used.num_beams, used.max_length) == (False, 1, 9)


def test_targets_have_room(tmp_path: Path) -> None:
    """The base's limit is raised to them; the library's own is 20 tokens."""
    base = write_seq2seq_model(tmp_path / "base")
    data = write_copies(tmp_path / "data", 24, 8)
    limits = {}
    for before in ({"max_length": 30}, {"max_new_tokens": 30}, {}):
        (base / "generation_config.json").write_text(json.dumps(before))
        config = TrainConfig.resolve(
            task="seq2seq", data=str(data), model=str(base), max_target_length=50
        )
        task: Any = tasks.get(config)
        saved = task.model(task.prepare()).saved_generation_config
        limits[str(before)] = (saved.max_length, saved.max_new_tokens)
    assert list(limits.values()) == [(51, None), (None, 50), (51, None)]
