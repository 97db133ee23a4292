"""The model card of a run: the README.md of its model's folder, as the hub reads it."""

import os
from collections.abc import Mapping
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.files import write_text
from slurmft.core.hub import is_local
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.task_facts import TASKS

FILE = "README.md"
_ADAPTED = """\
from peft import AutoPeftModel
from transformers import AutoConfig, pipeline

config = AutoConfig.from_pretrained("FOLDER or USER/NAME", subfolder="config")
adapted = AutoPeftModel.from_pretrained("FOLDER or USER/NAME", id2label=config.id2label)
model = pipeline("{pipeline}", adapted, tokenizer="FOLDER or USER/NAME")
model({example})"""

_SETTINGS = (
    "recipe", "epochs", "max_steps", "batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_schedule", "warmup_steps", "warmup_ratio", "weight_decay", "max_grad_norm", "max_length",
    "max_target_length", "source_prefix", "num_beams", "doc_stride", "batching", "dropout", "seed",
    "early_stopping", "class_weights", "lora", "lora_alpha", "lora_dropout", "lora_targets",
    "use_rslora", "use_dora", "merge",
)  # fmt: skip
_USED = ("epochs", "precision", "global_batch_size", "backend", "optimizer", "learning_rate")
"""What a run chose for itself, or may have: as its result has it."""
_EXAMPLES = {
    "multi-label": '"a text", top_k=None',
    "token-classification": '"a text", aggregation_strategy="simple"',
    "question-answering": 'question="...", context="..."',
    "text-generation": '"Once upon a time"',
    "sft": '[{"role": "user", "content": "..."}]',
}
_USE = """from transformers import pipeline

model = pipeline("{pipeline}", "FOLDER or USER/NAME")
model({example})"""
_GENERATE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("FOLDER or USER/NAME")
tokenizer = AutoTokenizer.from_pretrained("FOLDER or USER/NAME")
tokens = model.generate(**tokenizer("{prefix}a text", return_tensors="pt"))
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""
_GLUE = "nyu-mll/glue"
_TYPES = {
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
    "eval_loss": ("loss", "Loss"),
}
"""What the hub calls a metric, and what it shows; others have their own names."""
_PACKAGES = ("slurmft", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers")


def write(run: RunDir, result: Mapping[str, Any]) -> None:
    """Writes the card of a finished run into its model's folder. OSError where it cannot."""
    versions = {name: str(each) for name, each in run.read_environment().versions.items()}
    train = TrainConfig.of(run.load_config().program)
    write_text(run.model / FILE, text(train, result, versions, run.path.name))


def text(
    train: TrainConfig, result: Mapping[str, Any], versions: Mapping[str, str], name: str
) -> str:
    """The card: metadata, and what a reader wants to know. No paths and no hosts. `versions` are of
    packages, `name` is the run's."""
    model, data = _name(train.model) or "A model of random weights", _name(train.data)
    pipeline = _pipeline(train, result)
    example = _EXAMPLES.get(train.task, _EXAMPLES.get(pipeline, '"a text"'))
    use = _GENERATE if train.task == "seq2seq" else _ADAPTED if train.saves_adapter else _USE
    how = "adapted by LoRA" if train.lora else "fine-tuned"
    settings = {k: getattr(train, k) for k in _SETTINGS if getattr(train, k) is not None}
    settings |= {k: result[k] for k in _USED if k in result}
    changed = fingerprint.words(result.get("changed_since_submission") or {})
    packages = ", ".join(f"{k} {versions[k]}" for k in _PACKAGES if k in versions)
    return f"""---
{_metadata(train, result, name).to_yaml()}
---

# {name}

{model}, {how} on {data or "generated data"} (task `{train.task}`) by slurmft.

## Results

{_table("metric of the validation data, or test_ data", result["metrics"])}

{result["steps"]:,} optimizer steps in {result["wall_s"]:,.0f} s on {result["nodes"]} node(s) with \
{result["world_size"]} process(es); {result["train_samples_per_s"]:,.1f} training samples/s; the \
last loss was {_shown(result["loss"])}.

## Use

```python
{use.format(pipeline=pipeline, example=example, prefix=train.source_prefix or "")}
```

## Training

{_table("setting", settings)}

{changed and f"Changed between submission and start: {changed}."}

Versions: {packages}.
"""


def _metadata(train: TrainConfig, result: Mapping[str, Any], name: str) -> Any:
    from huggingface_hub import EvalResult, ModelCardData  # 0.2 s

    metrics = {k: v for k, v in result["metrics"].items() if v is not None}
    task, data = _pipeline(train, result), _name(train.data) or "generated data"
    given: dict[str, Any] = {}
    if train.model and not is_local(train.model):
        relation = "adapter" if train.saves_adapter else "finetune"
        given = {"base_model": train.model, "base_model_relation": relation}
    kinds = {name: name.removeprefix("test_") for name in metrics}
    types = {n: _TYPES.get(k, (k, k.replace("_", " "))) for n, k in kinds.items()}
    return ModelCardData(
        model_name=name,
        library_name="peft" if train.saves_adapter else "transformers",
        pipeline_tag=task,
        tags=["generated_from_trainer", "slurmft"] + (["lora"] if train.lora else []),
        **given,
        datasets=[train.data] if train.data and not is_local(train.data) else None,
        metrics=list(dict.fromkeys(kind for kind, _ in types.values())),
        eval_results=[
            EvalResult(
                task_type=task,
                task_name=task.replace("-", " ").title(),
                dataset_type=data,
                dataset_name=data,
                dataset_config=train.task if train.data == _GLUE else None,
                dataset_split="test" if name.startswith("test_") else "validation",
                metric_type=kind,
                metric_name=words,
                metric_value=metrics[name],
            )
            for name, (kind, words) in types.items()
        ]
        or None,
    )


def _pipeline(train: TrainConfig, result: Mapping[str, Any]) -> str:
    """What the hub calls the task. Of an own one, by the result: nothing of a run is imported to
    push it."""
    own = TASKS.get(train.task)
    return own.pipeline or str(train.preset) if own else str(result["pipeline"])


def _name(source: str | None) -> str | None:
    """A hub id, or of a folder the last part."""
    return os.path.basename(source) if source and is_local(source) else source


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = (f"| {key} | {_shown(value)} |" for key, value in values.items())
    return "\n".join([f"| {title} | |", "|---|---|", *rows])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 else f"{value:.4f}"
    return "n/a" if value is None else str(value)


def exists(run: RunDir) -> bool:
    """Whether the model's folder has a card, be it a hand-written one."""
    return (run.model / FILE).is_file()
