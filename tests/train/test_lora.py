"""LoRA: what trains, what is saved, what resumes, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification
from safetensors.numpy import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from slurmft.core.errors import UsageError
from slurmft.core.files import write_json
from slurmft.runs.rundir import RunDir
from slurmft.train.config import ResolvedConfig, TrainConfig
from slurmft.train.engine import freezing, lora, packing
from slurmft.train.engine.lora import Adapter
from slurmft.train.engine.vocab_trim import TrimmedVocabulary
from slurmft.train.loop.loaded_model import recompute_activations
from slurmft.train.loop.step_plan import Plan
from slurmft.train.parallel.muon import MuonAdamW
from slurmft.train.parallel.optim import make_optimizer
from slurmft.train.recipes import RECIPES
from slurmft.train.tasks.sequence import Task
from tests.conftest import Done, Following, assert_two_lines, records, slurmft
from tests.support.models import write_model
from tests.support.packed_models import LENGTHS, announced, batch, make
from tests.train.test_resume import await_resumes, losses, one_rank, rank_pids
from tests.train.test_trainer import emotion
from tests.train.test_vocab_trim import WORDS, data

LORA = (
    "--lora",
    "4",
    "--lora-dropout",
    "0.1",
    "--learning-rate",
    "0.005",
    "--precision",
    "fp32",
)
SIZES = (
    "--batch-size",
    "4",
    "--dropout",
    "0",
    "--epochs",
    "6",
    "--log-every",
    "1",
    "--cluster",
    "local",
)


def config(**given: Any) -> ResolvedConfig:
    return TrainConfig.resolve(
        **{"task": "emotion", "model": "m", "data": "d", "lora": 4} | given
    )


def adapted(name: str, head: str = "ForSequenceClassification", **given: Any) -> Any:
    """A small model with adapters that are not zero any more."""
    model = make(name, head)
    Adapter(model, config(**given))
    torch.manual_seed(1)
    for parameter, weight in model.named_parameters():
        if "lora_B" in parameter:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def trained(model: Any) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_of_experts_are_saved(merge: bool, tmp_path: Path) -> None:
    """PEFT puts two modules around the experts of a layer, one within the other."""
    mixtral = transformers.MixtralConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=24, num_local_experts=2,
    )  # fmt: skip
    base = transformers.MixtralForCausalLM(mixtral)
    base.save_pretrained(tmp_path / "base")
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "base")
    adapter = Adapter(model, config(task="causal-lm"))
    for parameter, weight in model.named_parameters():
        if "lora_B" in parameter:
            torch.nn.init.normal_(weight, std=0.1)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        adapter.save(tmp_path / "saved", None, merge, torch.float32)
        if merge:
            base = type(base).from_pretrained(tmp_path / "saved")
        else:
            lora.attach(base, str(tmp_path / "saved"))
        torch.testing.assert_close(base.eval()(tokens).logits, expected)
    with pytest.raises(UsageError, match="PEFT cannot adapt MixtralForCausalLM"):
        Adapter(transformers.MixtralForCausalLM(mixtral), config(use_dora=True))


def test_a_model_without_linear_layers() -> None:
    """Those of IBert are of its own, also where their names are given."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1}
    ibert = transformers.IBertConfig(**sizes, num_attention_heads=2)
    model = transformers.IBertForSequenceClassification(ibert)
    for targets in (None, "query"):
        with pytest.raises(UsageError, match="has no linear layers") as refused:
            Adapter(model, config(lora_targets=targets))
        assert refused.value.hint == "train it without --lora"


@pytest.mark.parametrize(
    ("name", "head", "whole"),
    [
        ("Bert", "ForSequenceClassification", {"classifier"}),
        ("DistilBert", "ForSequenceClassification", {"pre_classifier", "classifier"}),
        ("Roberta", "ForSequenceClassification", {"classifier"}),
        ("DebertaV2", "ForSequenceClassification", {"pooler", "classifier"}),
        ("Bert", "ForQuestionAnswering", {"qa_outputs"}),
        ("Bert", "ForTokenClassification", {"classifier"}),
        ("Bert", "LMHeadModel", set()),
    ],
)
def test_adapters_and_heads_train(name: str, head: str, whole: set[str]) -> None:
    model = adapted(name, head)
    found = trained(model)
    heads = {each for each in found if ".modules_to_save." in each}
    assert all(".lora_A." in each or ".lora_B." in each for each in found - heads)
    assert {each.partition(".")[0] for each in heads} == whole
    linear = [m for m in model.modules() if hasattr(m, "lora_A")]
    assert (
        len(found - heads) == 2 * len(linear) >= 2 * 6 * model.config.num_hidden_layers
    )
    assert freezing.trained(model).keys() == found


@pytest.mark.parametrize("load", ["slurmft", "peft"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_head_of_which_peft_wraps_a_part_loads(
    use_dora: bool, load: str, tmp_path: Path
) -> None:
    """As BigBird's for questions, with an output layer of its own."""

    def model() -> Any:
        torch.manual_seed(0)
        bigbird = transformers.BigBirdConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            attention_type="original_full",
        )
        return transformers.BigBirdForQuestionAnswering(bigbird).eval()

    trained_model = model()
    adapter = Adapter(trained_model, config(use_dora=use_dora))
    for name, weight in trained_model.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
            assert not (name.startswith("qa_classifier") and "lora_" in name)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").touch()
    adapter.save(folder, None, False, torch.float32)
    loaded = model()
    if load == "slurmft":
        lora.attach(loaded, str(folder))
    else:
        loaded = peft.PeftModel.from_pretrained(loaded, str(folder))
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        expected = trained_model.eval()(ids).start_logits
        torch.testing.assert_close(loaded.eval()(ids).start_logits, expected)


def test_modules_without_weights_train_whole(tiny_model: Path, tmp_path: Path) -> None:
    """What their source lacks, an adapter has to bring."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=6)
    weights = {k: t for k, t in model.state_dict().items() if "pooler" not in k}
    model.save_pretrained(tmp_path, state_dict=weights)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    of = dataclasses.replace(data(0), labels=list("abcdef"))
    found = Task(config(model=str(tmp_path))).model(of)
    Adapter(found, config())
    assert any("pooler.dense.modules_to_save" in name for name in trained(found))
    found = Task(config(model=str(tiny_model))).model(of)
    Adapter(found, config())
    assert any("pooler.dense.lora_A" in name for name in trained(found))


@pytest.mark.parametrize(
    "name",
    [
        "Bert",
        pytest.param("DistilBert", marks=pytest.mark.extra("models")),
        pytest.param("Roberta", marks=pytest.mark.extra("models")),
    ],
)
@pytest.mark.parametrize("given", [{}, {"use_dora": True, "use_rslora": True}])
def test_packed_batches_give_the_same(name: str, given: dict[str, Any]) -> None:
    padded = adapted(name, **given)
    bare = copy.deepcopy(padded)
    packed = packing.pack(bare, fuse=True)
    assert isinstance(packed, packing.Packing)
    assert packed.layers == []  # they would leave the adapters out
    both = (
        (padded, batch(padded, LENGTHS, width=20)),
        (bare, announced(packed, LENGTHS)),
    )
    outputs = [
        model(**each.inputs, labels=each.targets["labels"]) for model, each in both
    ]
    torch.testing.assert_close(
        outputs[1].logits, outputs[0].logits, rtol=1e-5, atol=1e-6
    )
    for output in outputs:
        output.loss.backward()
    for (key, p), q in zip(padded.named_parameters(), bare.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not p.requires_grad), key
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=key)


def test_frozen_tables_are_not_trimmed() -> None:
    model = make("Bert", vocab_size=WORDS)
    Adapter(model, config())
    assert TrimmedVocabulary.trim(model, data(0)) is None


@pytest.mark.parametrize("packed", [False, True])
def test_recomputed_layers_behind_frozen_embeddings_have_gradients(
    packed: bool,
) -> None:
    kept = adapted("Bert")
    recomputed = copy.deepcopy(kept)
    recompute_activations(recomputed)
    for model in (kept, recomputed):
        found = packing.pack(model) if packed else None
        assert not isinstance(found, str)
        inputs = (announced(found, LENGTHS) if found else batch(kept, LENGTHS)).inputs
        model.train()(**inputs, labels=torch.arange(len(LENGTHS)) % 3).loss.backward()
    for (name, p), q in zip(
        kept.named_parameters(), recomputed.parameters(), strict=True
    ):
        if p.requires_grad:
            assert p.grad is not None
            assert q.grad is not None, name
            torch.testing.assert_close(q.grad, p.grad, msg=name)


def test_muon_takes_adapters() -> None:
    model = adapted("Bert", optimizer="muon")
    plan = Plan(
        config=config(optimizer="muon"), world_size=1, precision="fp32",
        train_samples=8, validation_samples=1,
    )  # fmt: skip
    optimizer = make_optimizer(model, plan)
    assert isinstance(optimizer, MuonAdamW)
    names = {id(p): name for name, p in model.named_parameters()}
    by_muon = {names[id(p)] for p in optimizer.param_groups[0]["params"]}
    assert by_muon == {name for name in trained(model) if "lora_" in name}
    before = {k: t.clone() for k, t in model.state_dict().items()}
    model(
        **batch(model, LENGTHS).inputs, labels=torch.arange(len(LENGTHS)) % 3
    ).loss.backward()
    optimizer.step()
    changed = {
        k for k, t in model.state_dict().items() if not torch.equal(t, before[k])
    }
    assert changed == trained(model)


# --- runs -----------------------------------------------------------------------------------------


def submit(tmp_path: Path, *arguments: str) -> Done:
    done = slurmft(
        *("submit", "--follow", "--runs-dir", str(tmp_path), *LORA, *SIZES, *arguments),
        imported=True,
    )
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Done:
    sizes = ("--nodes", "2", "--keep-checkpoints", "9", "--checkpoint-every-steps", "7")
    return submit(
        tmp_path_factory.mktemp("lora"), *emotion(tiny_data, tiny_model), *sizes
    )


def logits(model: Any, tokenizer: Any) -> Tensor:
    texts = ["joy word3", "word4 anger word1 word9 word11", "word2"]
    with torch.inference_mode():
        found: Tensor = model.eval()(
            **tokenizer(texts, padding=True, return_tensors="pt")
        ).logits
    return found


def test_the_saved_adapter(two_ranks: Done, tiny_data: Path, tiny_model: Path) -> None:
    """PEFT and transformers load it as its card says; the run says what trained."""
    folder = two_ranks.run.model
    facts = json.loads((folder / "adapter_config.json").read_text())
    expected = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "modules_to_save": ["classifier"],
    }
    expected |= {"base_model_name_or_path": str(tiny_model)}
    assert {name: facts[name] for name in expected} == expected
    result = two_ranks.result
    share = result["trained_parameters"] / result["parameters"]
    assert 0.05 < share < 0.2
    assert f"M parameters train ({share:.1%})".replace("%)", " %)") in two_ranks.out
    assert result["saved_model"]["largest_difference"] < 1e-5
    weights = load_file(folder / "adapter_model.safetensors")
    assert sum(w.size for w in weights.values()) == result["trained_parameters"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    by_peft = AutoPeftModelForSequenceClassification.from_pretrained(
        folder, num_labels=6
    )
    model_config = AutoConfig.from_pretrained(folder, subfolder="config")
    loaded = AutoModelForSequenceClassification.from_pretrained(
        folder, config=model_config
    )
    torch.testing.assert_close(logits(loaded, tokenizer), logits(by_peft, tokenizer))

    card = (folder / "README.md").read_text()
    assert "library_name: peft" in card
    code = (
        card.split("```python\n")[1]
        .split("```")[0]
        .replace("FOLDER or USER/NAME", str(folder))
    )
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"]("joy")[0]["label"] in model_config.label2id
    rows = [json.loads(line) for line in (tiny_data / "validation.jsonl").open()]
    classify = pipeline("text-classification", loaded, tokenizer=tokenizer)
    found = [
        model_config.label2id[each["label"]]
        for each in classify([r["text"] for r in rows])
    ]
    right = np.mean([one == row["label"] for one, row in zip(found, rows, strict=True)])
    assert right == pytest.approx(result["metrics"]["accuracy"])
    assert right > 0.3  # of six classes


@pytest.mark.processes
def test_the_merged_model(
    two_ranks: Done, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """The same run with --merge: transformers alone loads what computes the same."""
    merged = submit(
        tmp_path, *emotion(tiny_data, tiny_model), "--nodes", "2", "--merge"
    )
    folder = merged.run.model
    assert not (folder / "adapter_config.json").exists()
    assert merged.result["loss"] == two_ranks.result["loss"]
    assert "library_name: transformers" in (folder / "README.md").read_text()
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    adapter = AutoPeftModelForSequenceClassification.from_pretrained(
        two_ranks.run.model, num_labels=6
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.testing.assert_close(
        logits(model, tokenizer), logits(adapter, tokenizer), rtol=0, atol=1e-5
    )


@pytest.mark.extra("training")
def test_made_up_models_are_merged(tmp_path: Path) -> None:
    arguments = (
        "--task",
        "synthetic",
        "--max-steps",
        "3",
        "--use-dora",
        "--nodes",
        "1",
    )
    done = submit(tmp_path, *arguments, "--merge")
    assert (done.run.model / "model.safetensors").exists()
    refused = slurmft("submit", "--dry-run", "--lora", "4", imported=True)
    assert_two_lines(
        refused, "--lora needs a model, and --task synthetic makes up its own"
    )


@pytest.mark.extra("training")
def test_losses_do_not_depend_on_ranks_and_shares(
    tiny_data: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    sizes = [("--nodes", "1", "--gradient-accumulation-steps", "3"), ("--nodes", "3")]
    sizes.append(("--nodes", "3", "--shard", "full"))
    plain = ("--dropout", "0", "--lora-dropout", "0", "--epochs", "1")
    runs = [
        submit(tmp_path, *emotion(tiny_data, model), *plain, *each).run
        for each in sizes
    ]
    saved = [load_file(run.model / "adapter_model.safetensors") for run in runs]
    for run, weights in zip(runs, saved, strict=True):
        assert losses(run) == pytest.approx(losses(runs[0]), abs=1e-5)
        for name, tensor in saved[0].items():
            np.testing.assert_allclose(weights[name], tensor, atol=1e-3, err_msg=name)


@pytest.mark.extra("training")
def test_stopped_runs_end_as_if_they_had_not_been(
    two_ranks: Done, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """To the last bit; checkpoints hold adapters and heads alone."""
    arguments = (*LORA, *SIZES, *emotion(tiny_data, tiny_model), "--nodes", "2")
    job = Following(*arguments, "--runs-dir", str(tmp_path), imported=True)
    job.at_step(9)
    os.kill(one_rank(job.run), signal.SIGUSR2)
    await_resumes(job.run, 1)
    os.kill(one_rank(job.run), signal.SIGUSR2)
    code, text = job.end()
    assert code == 0, text
    assert len(records(job.run, "resume")) == 2
    assert losses(job.run) == losses(two_ranks.run)
    weights = [
        load_file(run.model / "adapter_model.safetensors")
        for run in (job.run, two_ranks.run)
    ]
    for name, tensor in weights[1].items():
        assert np.array_equal(weights[0][name], tensor), name

    best = two_ranks.run.checkpoints / two_ranks.run.checkpoint_names()[-1]
    saved = load_file(best / "model.safetensors")
    assert sum(t.size for t in saved.values()) == two_ranks.result["trained_parameters"]
    moments = load_file(best / "optimizer.safetensors")
    numbers = sum(t.size for name, t in moments.items() if name.endswith(".exp_avg"))
    assert numbers == two_ranks.result["trained_parameters"]


@pytest.mark.extra("training")
def test_the_best_adapters_are_kept(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """At a learning rate that ruins them, the first evaluation stays the best."""
    arguments = ("--early-stopping", "2", "--learning-rate", "0.02", "--epochs", "30")
    done = submit(tmp_path, *emotion(tiny_data, tiny_model), "--nodes", "1", *arguments)
    (stop,) = records(done.run, "early_stop")
    assert stop["evaluations"] == 2
    values = [r["metrics"]["accuracy"] for r in records(done.run, "epoch")]
    assert done.result["metrics"]["accuracy"] == max(values) > values[-1]
    best = done.run.checkpoints / done.run.checkpoint_names()[0]
    saved = load_file(best / "model.safetensors")
    head = load_file(done.run.model / "adapter_model.safetensors")
    assert np.array_equal(
        head["base_model.model.classifier.weight"],
        saved["classifier.modules_to_save.default.weight"],
    )


@pytest.fixture
def stopped(tmp_path: Path, tiny_data: Path) -> RunDir:
    """A run that stopped, of a model of its own."""
    model = write_model(tmp_path / "model")
    arguments = (
        *LORA,
        *SIZES,
        *emotion(tiny_data, model),
        "--no-requeue",
        "--nodes",
        "1",
    )
    job = Following(*arguments, "--runs-dir", str(tmp_path / "runs"), imported=True)
    job.until("step 5/")
    os.kill(rank_pids(job.run)[0], signal.SIGUSR2)
    assert job.end()[0] == 75
    return job.run


@pytest.mark.extra("training")
def test_other_adapters_than_the_checkpoint_s(stopped: RunDir) -> None:
    values = json.loads(stopped.config.read_text())
    values["program"]["settings"]["lora"] = 8
    write_json(stopped.config, values)
    done = slurmft("resume", str(stopped.path), "--follow", imported=True)
    assert done.code != 0
    assert "has LoRA adapters of r=4, this run 8" in done.out + done.err
    assert "put the run's config.json back" in done.out + done.err


@pytest.mark.extra("training")
def test_another_base_model_than_the_checkpoint_s(stopped: RunDir) -> None:
    folder = Path(TrainConfig.of(stopped.load_config().program).model or "")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.base_model.encoder.layer[0].output.dense.weight[0, 0] += 1
    model.base_model.save_pretrained(folder)
    done = slurmft("resume", str(stopped.path), "--follow", imported=True)
    assert done.code != 0
    assert "its frozen weights are others" in done.out + done.err
    assert "bring --model back" in done.out + done.err


def test_a_checkpoint_of_whole_weights_is_refused() -> None:
    adapter = Adapter(make("Bert"), config())
    freezing.check_same("c", adapter.facts, adapter.facts)
    freezing.check_same("c", None, None)
    with pytest.raises(UsageError, match=r"c has LoRA adapters of r=None, this run 4"):
        freezing.check_same("c", None, adapter.facts)
    with pytest.raises(UsageError, match=r"c has LoRA adapters of r=4, this run None"):
        freezing.check_same("c", adapter.facts, None)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora": 0}, "--lora 0 must be between 1 and"),
        (
            {"lora": 4, "lora_dropout": 1.0},
            "--lora-dropout 1.0 must be 0 or more and below 1",
        ),
        ({"use_dora": True}, "--use-dora needs --lora RANK"),
        ({"lora_targets": "query"}, "--lora-targets query needs --lora RANK"),
        ({"merge": True}, "--merge needs --lora RANK"),
        (
            {"lora": 4, "merge": True, "load_in_4bit": True},
            "cannot be used with --load-in-4bit",
        ),
        (
            {"lora": 4, "merge": True, "shard": "full"},
            "--shard full cannot be used with --merge",
        ),
        (
            {"lora": 4, "load_in_4bit": True, "shard": "node"},
            "cannot be used with --load-in-4bit",
        ),
    ],
)
def test_options_that_cannot_be_right(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**{"lora": None} | values)


def test_targets() -> None:
    found = trained(adapted("Bert", lora_targets="query,output.dense"))
    names = {
        name.partition(".lora_")[0].split(".", 4)[-1]
        for name in found
        if "lora_" in name
    }
    assert names == {"attention.self.query", "attention.output.dense", "output.dense"}
    for wrong in ("q_proj", "query,classifier", "LayerNorm"):
        name = wrong.rpartition(",")[2]
        with pytest.raises(UsageError, match=f"has no linear module '{name}'") as error:
            adapted("Bert", lora_targets=wrong)
        assert error.value.hint == "it has query, key, value, dense"


def test_a_recipe_s_learning_rate_is_that_of_adapters() -> None:
    recipe = RECIPES["emotion"]["learning_rate"]
    assert config().learning_rate == 10 * recipe
    assert config(lora=None).learning_rate == recipe
    assert config(learning_rate=1e-4).learning_rate == 1e-4


@pytest.mark.processes
@pytest.mark.parametrize(
    ("package", "option", "given"),
    [("peft", "--lora", ()), ("bitsandbytes", "--load-in-4bit", ("--load-in-4bit",))],
)
def test_a_package_that_is_not_installed(
    package: str,
    option: str,
    given: tuple[str, ...],
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    """At submission, which imports no torch."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        f"util.find_spec = lambda name, *more: None if name == {package!r} else find(name, *more)\n"
        "import sys\nsys.modules['torch'] = None\n"
    )
    done = slurmft(
        *(
            "submit",
            "--dry-run",
            "--lora",
            "4",
            *given,
            *emotion(tiny_data, tiny_model),
        ),
        env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert_two_lines(done, f"{option} needs packages that are not installed: {package}")
    assert f"pip install {package}" in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_four_bits_need_a_gpu() -> None:
    assert lora.quantization(config()) == {}
    with pytest.raises(UsageError, match="--load-in-4bit needs a GPU"):
        lora.quantization(config(load_in_4bit=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "class lib:\n    formatted_error = 'CUDA 13.0 not found'",
            "CUDA 13.0 not found",
        ),
        (
            "raise OSError('libcudart.so.12: cannot open')",
            "libcudart.so.12: cannot open",
        ),
    ],
)
def test_bitsandbytes_of_another_build(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cextension.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("bitsandbytes", "bitsandbytes.cextension"):
        monkeypatch.setitem(sys.modules, name, None)  # is put back at the end
        del sys.modules[name]
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "is_available", lambda: True)
    with pytest.raises(
        UsageError, match=f"bitsandbytes does not work here: .*{words}"
    ) as error:
        lora.quantization(config(load_in_4bit=True))
    assert f"torch {torch.__version__}" in str(error.value.hint)
