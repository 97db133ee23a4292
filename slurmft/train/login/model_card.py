"""The model card of a run: the README.md of its model's folder, as the hub reads it.

The metadata and the card are those of huggingface_hub. The template is ours: most of the hub's own
would read "More Information Needed", and it has no table of settings.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.files import write_text
from slurmft.core.hub import is_local
from slurmft.core.options import options
from slurmft.runs.rundir import RunDir
from slurmft.train import mix_spec
from slurmft.train.config import TrainConfig
from slurmft.train.task_facts import TASKS

FILE = "README.md"
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
_SETTINGS = [
    name
    for name, each in options(TrainConfig).items()
    # A card is public: it names no path. What a task of the user's own gets may hold one.
    if each.affects_result and each.path is None and not each.is_repeatable
]
"""Options that the card shows."""
_CHOSEN = (*_SETTINGS, "global_batch_size", "backend")
"""Settings that a run may choose for itself: its result has the value that it used."""
_PACKAGES = (
    "slurmft",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "tokenizers",
)
_GLUE = "nyu-mll/glue"
_METRICS = {
    "f1": ("f1", "F1"),
    "f1_macro": ("f1", "Macro F1"),
    "f1_micro": ("f1", "Micro F1"),
    "squad_f1": ("f1", "F1"),
    "squad_exact_match": ("exact_match", "Exact match"),
    "subset_accuracy": ("accuracy", "Subset accuracy"),
    "token_accuracy": ("accuracy", "Token accuracy"),
    "pearson": ("pearsonr", "Pearson"),
    "spearman": ("spearmanr", "Spearman"),
    "rouge1": ("rouge", "ROUGE-1"),
    "rouge2": ("rouge", "ROUGE-2"),
    "rougeL": ("rouge", "ROUGE-L"),
    "loss": ("loss", "Loss"),
    "accuracy_at_1": ("accuracy", "Accuracy@1"),
    "mrr_at_10": ("mrr", "MRR@10"),
}
"""Metric -> its type on the hub, and the name that the hub shows; others have their own names."""

# Code that loads the model, with a blank for an example of its input.
_LOAD_MODEL = """\
from transformers import pipeline

model = pipeline("{pipeline}", "FOLDER or USER/NAME")
model({example})"""
# An adapter's files do not say which labels its head has.
_LOAD_ADAPTER = """\
from transformers import AutoConfig, {auto_class}, pipeline

config = AutoConfig.from_pretrained("FOLDER or USER/NAME", subfolder="config")
adapted = {auto_class}.from_pretrained("FOLDER or USER/NAME", config=config)
model = pipeline("{pipeline}", adapted, tokenizer="FOLDER or USER/NAME")
model({example})"""
_AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}
"""Pipeline -> class of a model whose head has labels."""
_GENERATE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

model = AutoModelForSeq2SeqLM.from_pretrained("FOLDER or USER/NAME")
tokenizer = AutoTokenizer.from_pretrained("FOLDER or USER/NAME")
generation = GenerationConfig.from_pretrained("FOLDER or USER/NAME"{subfolder})
inputs = tokenizer("{prefix}a text", return_tensors="pt")
tokens = model.generate(**inputs, generation_config=generation)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""
# transformers 5 has no pipeline for it.
_ANSWER = """\
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

model = AutoModelForQuestionAnswering.from_pretrained("FOLDER or USER/NAME")
tokenizer = AutoTokenizer.from_pretrained("FOLDER or USER/NAME")
inputs = tokenizer("a question", "a context", return_tensors="pt")
output = model(**inputs)
first, last = output.start_logits.argmax(), output.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))"""
_EMBED = """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER or USER/NAME")
vectors = model.encode(["a text", "another text"])
print(model.similarity(vectors, vectors))"""
_RERANK = """\
from sentence_transformers import CrossEncoder

model = CrossEncoder("FOLDER or USER/NAME")
print(model.predict([("a question", "a text"), ("a question", "another text")]))"""
# CrossEncoder loads no adapter.
_RERANK_BY_ADAPTER = """\
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

config = AutoConfig.from_pretrained("FOLDER or USER/NAME", subfolder="config")
model = AutoModelForSequenceClassification.from_pretrained(
    "FOLDER or USER/NAME", config=config
)
tokenizer = AutoTokenizer.from_pretrained("FOLDER or USER/NAME")
questions, texts = ["a question", "a question"], ["a text", "another text"]
inputs = tokenizer(questions, texts, padding=True, truncation=True, return_tensors="pt")
print(model(**inputs).logits.sigmoid().squeeze(-1))"""
# transformers loads adapters without the magnitudes of DoRA.
_LOAD_BY_PEFT = """\
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, {auto_class}

config = AutoConfig.from_pretrained("FOLDER or USER/NAME", subfolder="config")
base = PeftConfig.from_pretrained("FOLDER or USER/NAME").base_model_name_or_path
model = {auto_class}.from_pretrained(base, config=config)
model = PeftModel.from_pretrained(model, "FOLDER or USER/NAME")"""
_CLASSES_OF_TASKS = {
    "embeddings": "AutoModel",
    "reranker": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
_CLASSES_OF_PIPELINES = _AUTO_CLASSES | {
    "question-answering": "AutoModelForQuestionAnswering",
    "text-generation": "AutoModelForCausalLM",
}
_CODE = {"embeddings": _EMBED, "reranker": _RERANK}
"""By task, where sentence-transformers loads the model."""
_EXAMPLES = {
    "multi-label": '"a text", top_k=None',
    "token-classification": '"a text", aggregation_strategy="simple"',
    "text-generation": '"Once upon a time"',
    "sft": '[{"role": "user", "content": "..."}]',
}
"""By task or, where a task has none, by pipeline."""


def write(run: RunDir, result: Mapping[str, Any]) -> None:
    """Writes the card of a finished run into its model's folder. OSError where it cannot."""
    environment = run.read_environment()
    versions = {name: str(each) for name, each in environment.versions.items()}
    train = TrainConfig.of(run.load_config().program)
    write_text(run.model / FILE, text(train, result, versions, run.path.name))


def exists(run: RunDir) -> bool:
    """Returns whether the model's folder has a card, be it a hand-written one."""
    return (run.model / FILE).is_file()


def text(
    train: TrainConfig,
    result: Mapping[str, Any],
    versions: Mapping[str, str],
    name: str,
) -> str:
    """Returns the card: metadata, results, settings. It has no paths and no hosts.

    Args:
        result: contents of the run's result.json.
        versions: package -> version.
        name: name of the run.
    """
    from huggingface_hub import ModelCard  # 0.2 s

    packages = []
    for package in _PACKAGES:
        if package in versions:
            packages.append(f"{package} {versions[package]}")
    method = "fine-tuned"
    if train.lora:
        method = "adapted by LoRA"
    results = {metric: _number(value) for metric, value in result["metrics"].items()}
    card = ModelCard.from_template(
        _metadata(train, result, name),
        template_path=str(_TEMPLATE),
        title=name,
        source=_public_name(train.model) or "A model of random weights",
        method=method,
        data=_data(train),
        task=train.task,
        results=results,
        speed=_speed(result),
        code=_code(train, result),
        settings=_settings(train, result),
        changed=fingerprint.words(result.get("changed_since_submission") or {}),
        versions=", ".join(packages),
    )
    return f"{card}\n"  # Jinja takes a template's last line break away


def _settings(train: TrainConfig, result: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that change the result of a training, as a table shows them."""
    settings = {}
    # What is not set says nothing: most options of LoRA, in a run without it.
    for name in _SETTINGS:
        value = getattr(train, name)
        # `is False`, because a weight decay of 0 is a setting.
        if value is not None and value is not False:
            settings[name] = _number(value)
    # What was done counts more than what was asked for.
    for name in _CHOSEN:
        # What this training has not chosen stands there without a value.
        if result.get(name) is not None:
            settings[name] = _number(result[name])
    return settings


def _speed(result: Mapping[str, Any]) -> str:
    parts = (
        f"{result['steps']:,} optimizer steps in {result['wall_s']:,.0f} s",
        f"on {result['nodes']} node(s) with {result['world_size']} process(es);",
        f"{result['train_samples_per_s']:,.1f} training samples/s;",
        f"the last loss was {_number(result['loss'])}.",
    )
    return " ".join(parts)


def _code(train: TrainConfig, result: Mapping[str, Any]) -> str:
    """Returns Python code that loads the model and uses it."""
    code = _code_of_task(train, result)
    # The code of seq2seq has the words in its text.
    if train.source_prefix and train.task != "seq2seq":
        remark = f"# Each text begins with {train.source_prefix!r}, as in training."
        code = f"{remark}\n{code}"
    return code


def _code_of_task(train: TrainConfig, result: Mapping[str, Any]) -> str:
    if train.use_dora and train.saves_adapter:
        auto_class = _CLASSES_OF_TASKS.get(train.task)
        if auto_class is None:
            pipeline = _pipeline(train, result)
            auto_class = _CLASSES_OF_PIPELINES.get(pipeline, "AutoModel")
        return _LOAD_BY_PEFT.format(auto_class=auto_class)
    if train.task == "reranker" and train.saves_adapter:
        return _RERANK_BY_ADAPTER
    if train.task in _CODE:
        return _CODE[train.task]
    if train.task == "seq2seq":
        subfolder = ""
        if train.saves_adapter:
            subfolder = ', subfolder="config"'
        return _GENERATE.format(prefix=train.source_prefix or "", subfolder=subfolder)
    pipeline = _pipeline(train, result)
    if pipeline == "question-answering":
        return _ANSWER
    example = _EXAMPLES.get(train.task) or _EXAMPLES.get(pipeline, '"a text"')
    if train.saves_adapter and pipeline in _AUTO_CLASSES:
        auto_class = _AUTO_CLASSES[pipeline]
        return _LOAD_ADAPTER.format(
            pipeline=pipeline, example=example, auto_class=auto_class
        )
    return _LOAD_MODEL.format(pipeline=pipeline, example=example)


def _metadata(train: TrainConfig, result: Mapping[str, Any], name: str) -> Any:
    """Returns the card's metadata, a ModelCardData."""
    from huggingface_hub import ModelCardData

    library = "transformers"
    if train.task in TASKS:
        library = TASKS[train.task].library
    relation = "finetune"
    if train.saves_adapter:
        library = "peft"
        relation = "adapter"
    base_model: dict[str, Any] = {}
    # A folder is of no use to who reads the card.
    if train.model and not is_local(train.model):
        base_model = {"base_model": train.model, "base_model_relation": relation}
    # The first tag is the one that transformers' Trainer gives to its cards.
    tags = ["generated_from_trainer", "slurmft"]
    if train.lora:
        tags.append("lora")
    sources = [source.data for source in train.sources()]
    datasets = [name for name in sources if name and not is_local(name)]
    evaluations = _evaluations(train, result)
    # Each type once: F1 and its macro average are of one.
    metric_types = [evaluation.metric_type for evaluation in evaluations]
    return ModelCardData(
        model_name=name,
        library_name=library,
        pipeline_tag=_pipeline(train, result),
        tags=tags,
        datasets=datasets or None,
        metrics=list(dict.fromkeys(metric_types)),
        eval_results=evaluations or None,
        **base_model,
    )


def _evaluations(train: TrainConfig, result: Mapping[str, Any]) -> list[Any]:
    """Returns an EvalResult for each metric that has a value."""
    from huggingface_hub import EvalResult

    pipeline = _pipeline(train, result)
    data = _public_name(train.data) or "generated data"
    config = None
    # on the hub one data set, and its tasks are configurations of it
    if train.data == _GLUE:
        config = train.task
    evaluations = []
    for name, value in result["metrics"].items():
        # One that is undefined, as a correlation with predictions that are all equal.
        if value is None or not math.isfinite(value):
            continue
        metric = name.removeprefix("test_")
        split = "validation"
        if metric != name:
            split = "test"
        plain_name = metric.replace("_", " ")
        metric_type, metric_name = _METRICS.get(metric, (metric, plain_name))
        evaluations.append(
            EvalResult(
                task_type=pipeline,
                task_name=pipeline.replace("-", " ").title(),
                dataset_type=data,
                dataset_name=data,
                dataset_config=config,
                dataset_split=split,
                metric_type=metric_type,
                metric_name=metric_name,
                metric_value=value,
            )
        )
    return evaluations


def _pipeline(train: TrainConfig, result: Mapping[str, Any]) -> str:
    """Returns the hub's name of the task.

    That of a task of the user's own is in the result: nothing of a run is imported to push it.
    """
    task_facts = TASKS.get(train.task)
    if task_facts is None:
        return str(result["pipeline"])
    return task_facts.pipeline or str(train.preset)


def _data(train: TrainConfig) -> str:
    """Returns the names of the sources of training data, and what part of an epoch each is."""
    if not train.mix:
        return _public_name(train.data) or "generated data"
    parts = mix_spec.in_words(train.mixed, [None] * (1 + len(train.mix)))
    texts = []
    for source, part in zip(train.sources(), parts, strict=True):
        texts.append(f"{_public_name(source.data)} ({part})")
    return ", ".join(texts)


def _public_name(source: str | None) -> str | None:
    """Returns a hub id as it is, and the last part of a folder's path."""
    if source and is_local(source):
        return os.path.basename(source)
    return source


def _number(value: Any) -> str:
    """Returns a value as a table shows it."""
    if value is None:
        return "n/a"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "n/a"
    # Small ones, such as learning rates, have no digits among the first four decimals.
    if abs(value) < 1e-3:
        return f"{value:.4g}"
    return f"{value:.4f}"
