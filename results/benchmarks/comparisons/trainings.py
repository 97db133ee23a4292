"""Losses of every step of one epoch, by `slurmft submit`, and by Trainer and its kin.

Ours are packed wherever a model packs, the references are padded. Both start from the same saved
model, head included, and see the samples in the same order: fp32, no dropout, AdamW with weight
decay, warm-up, linear decay, clipped gradients. 100 samples make 12 steps of 8, and one of 4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import records, submit

from comparisons.table import Row, check, largest

BATCH = 8
SAMPLES = {"train": 100, "validation": 24}
MAX_LENGTH = 32
STRIDE = 8
"""Tokens that windows of SQuAD share."""
LOSS = 2e-5
"""Limit of differences of losses."""

TRAINER = "transformers' Trainer"
TWO = "two processes"


# --- both sides -----------------------------------------------------------------------------------


def by_slurmft(
    folder: Path, task: str, data: Path, model: Path, *flags: str, processes: int = 1
) -> Path:
    """Trains one epoch with a global batch of `BATCH`; returns the run directory."""
    from tests.support import prepared

    flags = ("--task", task, "--data", str(data), "--model", str(model), *flags)
    if "--batch-size" not in flags:
        flags += ("--batch-size", str(BATCH // processes))
    if "--lr-schedule" not in flags:
        flags += ("--lr-schedule", "linear")
    return submit(
        folder / "runs", "--cluster", "local", "--nodes", str(processes), *flags,
        *("--precision", "fp32", "--epochs", "1", "--log-every", "1", "--dropout", "0"),
        *("--learning-rate", "3e-3", "--warmup-ratio", "0.1", "--weight-decay", "0.01"),
        *("--max-length", str(MAX_LENGTH), "--save", "last"),
        command=prepared.command("slurmft"),
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "step")]


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    """The settings of `by_slurmft` as arguments of a Trainer."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": 3e-3,
        "warmup_steps": 0.1,
        "weight_decay": 0.01,
        "lr_scheduler_type": "linear",
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return kind(**(settings | more))


def losses_of(trainer: Any) -> list[float]:
    """Trains; returns the loss of each step, which is the sum of those of its batches."""
    from transformers import PrinterCallback

    values: list[float] = []
    training_step = trainer.training_step

    def recorded(*given: Any, **more: Any) -> Any:
        loss = training_step(*given, **more)
        values.append(float(loss))
        return loss

    trainer.training_step = recorded
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    count = trainer.args.gradient_accumulation_steps
    return [sum(values[i : i + count]) for i in range(0, len(values), count)]


def by_trainer(
    folder: Path, model: Any, samples: Sequence[Any], collator: Any, **more: Any
) -> list[float]:
    """Returns the losses of transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(
        model,
        arguments(TrainingArguments, folder, **more),
        train_dataset=in_order(samples),
        data_collator=collator,
    )
    return losses_of(trainer)


def in_order(samples: Sequence[Any]) -> list[Any]:
    """Returns samples in the order of the first epoch of a run."""
    from slurmft.train.data.stream import epoch_order

    return [samples[i] for i in epoch_order(len(samples), seed=42, epoch=0)]


def read_rows(data: Path, split: str = "train") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / f"{split}.jsonl").open()]


def bert(folder: Path, head: str, **more: Any) -> Path:
    """Saves a small BERT with a head, and without dropout."""
    import torch
    import transformers

    from tests.support.models import write_model

    write_model(folder, spread=0.3)
    torch.manual_seed(1)
    kind = getattr(transformers, f"AutoModelFor{head}")
    model = kind.from_pretrained(
        folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more
    )
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, head: str) -> tuple[Any, Any]:
    """Returns a saved model and its tokenizer, by transformers."""
    import transformers

    kind = getattr(transformers, f"AutoModelFor{head}")
    return (
        kind.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


# --- classes --------------------------------------------------------------------------------------


def class_samples(data: Path, tokenizer: Any) -> list[dict[str, Any]]:
    samples = []
    for row in read_rows(data):
        encoded = tokenizer(row["text"], truncation=True, max_length=MAX_LENGTH)
        samples.append({**encoded, "labels": row["label"]})
    return samples


@check("trainings", LOSS)
def classes(folder: Path) -> Iterator[Row]:
    from transformers import DataCollatorWithPadding

    from tests.support.models import write_pairs

    data = write_pairs(folder / "data", ("text", None), 3, SAMPLES)
    saved = bert(folder / "model", "SequenceClassification", num_labels=3)

    def expected(**more: Any) -> list[float]:
        model, tokenizer = loaded(saved, "SequenceClassification")
        samples = class_samples(data, tokenizer)
        collator = DataCollatorWithPadding(tokenizer)
        return by_trainer(folder, model, samples, collator, **more)

    def row(name: str, reference: list[float], *flags: str, processes: int = 1) -> Row:
        run = by_slurmft(
            folder, "text-classification", data, saved, *flags, processes=processes
        )
        return Row(name, TRAINER, largest(losses(run), reference))

    plain = expected()
    yield row("classes", plain)
    yield row(f"classes, {TWO}", plain, processes=2)
    yield row(f"classes, {TWO}, `--shard full`", plain, "--shard", "full", processes=2)
    smoothed = expected(label_smoothing_factor=0.1)
    yield row("classes, `--label-smoothing 0.1`", smoothed, "--label-smoothing", "0.1")
    unclipped = expected(lr_scheduler_type="cosine", max_grad_norm=0.0)
    flags = ("--lr-schedule", "cosine", "--max-grad-norm", "0")
    yield row("classes, cosine schedule, gradients not clipped", unclipped, *flags)


@check("trainings", LOSS)
def mixtures(folder: Path) -> Iterator[Row]:
    """A third of each epoch is of another source, which is too small and repeated."""
    from datasets import Dataset, concatenate_datasets
    from transformers import DataCollatorWithPadding

    from slurmft.train.data.stream import mixed_rows
    from tests.support.models import write_pairs

    data = write_pairs(folder / "data", ("text", None), 3, SAMPLES)
    sizes = {"train": 30}
    other = write_pairs(folder / "other", ("text", None), 3, sizes)
    saved = bert(folder / "model", "SequenceClassification", num_labels=3)
    model, tokenizer = loaded(saved, "SequenceClassification")
    sources = [
        Dataset.from_list(class_samples(each, tokenizer)) for each in (data, other)
    ]
    rows = mixed_rows([100, 30], [100, 50], seed=42, epoch=0)
    samples = list(concatenate_datasets(sources).select(rows))
    expected = by_trainer(folder, model, samples, DataCollatorWithPadding(tokenizer))
    # Of 150 rows a third are 50.
    flags = ("--mix", f"{other}:0.333333333333")
    for processes, name in (
        (1, "classes, two sources"),
        (2, f"classes, two sources, {TWO}"),
    ):
        run = by_slurmft(
            folder, "text-classification", data, saved, *flags, processes=processes
        )
        yield Row(
            name, "Trainer, on concatenate_datasets", largest(losses(run), expected)
        )


@check("trainings", LOSS, "peft")
def adapters(folder: Path) -> Iterator[Row]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import DataCollatorWithPadding

    from tests.support.models import write_pairs

    data = write_pairs(folder / "data", ("text", None), 3, SAMPLES)
    saved = bert(folder / "model", "SequenceClassification", num_labels=3)
    model, tokenizer = loaded(saved, "SequenceClassification")
    torch.manual_seed(42)  # adapters begin as the run's do
    config = LoraConfig(
        task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear"
    )
    expected = by_trainer(
        folder,
        get_peft_model(model, config),
        class_samples(data, tokenizer),
        DataCollatorWithPadding(tokenizer),
        label_names=["labels"],
    )
    for name, processes in (("LoRA", 1), (f"LoRA, {TWO}", 2)):
        run = by_slurmft(
            folder, "text-classification", data, saved, "--lora", "4", processes=processes
        )  # fmt: skip
        yield Row(name, "PEFT with Trainer", largest(losses(run), expected))


# --- words and questions --------------------------------------------------------------------------


@check("trainings", LOSS)
def words(folder: Path) -> Iterator[Row]:
    from transformers import DataCollatorForTokenClassification

    from tests.support.models import write_words

    data = write_words(folder / "data", **SAMPLES)
    saved = bert(folder / "model", "TokenClassification", num_labels=7)
    run = by_slurmft(folder, "token-classification", data, saved)
    ids = json.loads((run / "model/config.json").read_text())["label2id"]
    model, tokenizer = loaded(saved, "TokenClassification")
    samples = []
    for row in read_rows(data):
        samples.append(
            tagged(tokenizer, row["tokens"], [ids[tag] for tag in row["tags"]])
        )
    collator = DataCollatorForTokenClassification(tokenizer)
    expected = by_trainer(folder, model, samples, collator)
    yield Row("tokens", TRAINER, largest(losses(run), expected))
    # Batches of two differ much in their number of words.
    flags = ("--batch-size", "2", "--gradient-accumulation-steps", "2")
    run = by_slurmft(folder, "token-classification", data, saved, *flags, processes=2)
    name = f"tokens, {TWO}, two micro-steps"
    yield Row(name, f"{TRAINER}, all in one batch", largest(losses(run), expected))


def tagged(tokenizer: Any, tokens: list[str], labels: list[int]) -> dict[str, Any]:
    """Returns a text whose words' first tokens have labels, as transformers' run_ner.py."""
    encoded = tokenizer(
        tokens, is_split_into_words=True, truncation=True, max_length=MAX_LENGTH
    )
    labels_of_tokens = []
    previous = None
    for word in encoded.word_ids():
        if word is None or word == previous:
            labels_of_tokens.append(-100)
        else:
            labels_of_tokens.append(labels[word])
        previous = word
    return {**encoded, "labels": labels_of_tokens}


@check("trainings", LOSS)
def questions(folder: Path) -> Iterator[Row]:
    from transformers import DataCollatorWithPadding

    from tests.support.models import write_squad

    data = write_squad(folder / "data", 100, 24)
    saved = bert(folder / "model", "QuestionAnswering")
    model, tokenizer = loaded(saved, "QuestionAnswering")
    samples = [window for row in read_rows(data) for window in windows(tokenizer, row)]
    # One by one: transformers takes padding for places where an answer may be.
    expected = by_trainer(
        folder, model, samples, DataCollatorWithPadding(tokenizer),
        per_device_train_batch_size=1, gradient_accumulation_steps=BATCH,
    )  # fmt: skip
    run = by_slurmft(folder, "squad", data, saved, "--doc-stride", str(STRIDE))
    reference = f"{TRAINER}, windows one by one"
    yield Row("squad", reference, largest(losses(run), expected))


def windows(tokenizer: Any, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the windows of a question with their answers, as transformers' run_qa.py; which marks
    answers that end with their window one token late."""
    encoded = tokenizer(
        row["question"].lstrip(), row["context"], truncation="only_second",
        max_length=MAX_LENGTH, stride=STRIDE, return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )  # fmt: skip
    begin = row["answers"]["answer_start"][0]
    end = begin + len(row["answers"]["text"][0])
    for number, ids in enumerate(encoded["input_ids"]):
        texts = encoded.sequence_ids(number)
        offsets = encoded["offset_mapping"][number]
        first = texts.index(1)
        last = len(texts) - 1 - texts[::-1].index(1)
        start_position = end_position = 0
        if offsets[first][0] <= begin and offsets[last][1] >= end:
            starts = [i for i in range(first, last + 1) if offsets[i][0] <= begin]
            start_position = starts[-1]
            while offsets[last][1] >= end:
                last -= 1
            end_position = last + 1
        yield {
            "input_ids": ids,
            "token_type_ids": encoded["token_type_ids"][number],
            "attention_mask": encoded["attention_mask"][number],
            "start_positions": start_position,
            "end_positions": end_position,
        }


# --- texts ----------------------------------------------------------------------------------------


@check("trainings", LOSS)
def sequences(folder: Path) -> Iterator[Row]:
    from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

    from tests.support.models import write_copies, write_seq2seq_model

    data = write_copies(folder / "data", **SAMPLES)
    saved = write_seq2seq_model(folder / "model", "bart")
    none = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    AutoModelForSeq2SeqLM.from_pretrained(saved, **none).save_pretrained(saved)
    model, tokenizer = loaded(saved, "Seq2SeqLM")
    samples = []
    for row in read_rows(data):
        encoded = tokenizer(row["text"], truncation=True, max_length=MAX_LENGTH)
        labels = tokenizer(text_target=row["summary"])["input_ids"]
        samples.append({**encoded, "labels": labels})
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    expected = by_trainer(folder, model, samples, collator)
    flags = ["--max-target-length", "8"]
    run = by_slurmft(folder, "seq2seq", data, saved, *flags)
    yield Row("seq2seq", TRAINER, largest(losses(run), expected))
    flags += ["--batch-size", "2", "--gradient-accumulation-steps", "2"]
    run = by_slurmft(folder, "seq2seq", data, saved, *flags, processes=2)
    name = f"seq2seq, {TWO}, two micro-steps"
    yield Row(name, f"{TRAINER}, all in one batch", largest(losses(run), expected))


@check("trainings", LOSS)
def blocks(folder: Path) -> Iterator[Row]:
    from transformers import DataCollatorForSeq2Seq

    from tests.support.models import write_decoder, write_documents

    data = write_documents(folder / "data", train=60, validation=8)
    saved = write_decoder(folder / "model")
    _, tokenizer = loaded(saved, "CausalLM")
    # Padding is masked, and has no labels.
    tokenizer.pad_token = tokenizer.eos_token
    tokens: list[int] = []
    for row in read_rows(data):
        tokens += [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
    samples = [
        {
            "input_ids": tokens[start : start + MAX_LENGTH],
            "attention_mask": [1] * len(tokens[start : start + MAX_LENGTH]),
            "labels": tokens[start : start + MAX_LENGTH],
        }
        for start in range(0, len(tokens), MAX_LENGTH)
    ]
    collator = DataCollatorForSeq2Seq(tokenizer)

    def expected(**more: Any) -> list[float]:
        model, _ = loaded(saved, "CausalLM")
        return by_trainer(folder, model, samples, collator, **more)

    run = by_slurmft(folder, "causal-lm", data, saved)
    yield Row("causal-lm", TRAINER, largest(losses(run), expected()))
    flags = ("--batch-size", "2", "--gradient-accumulation-steps", "4")
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    run = by_slurmft(folder, "causal-lm", data, saved, *flags)
    difference = largest(losses(run), expected(**sizes))
    yield Row("causal-lm, four micro-steps", f"{TRAINER}, four micro-steps", difference)


LEARNT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|assistant|> {% generation %}{{ m.content }}<|end|>\n{% endgeneration %}"
    "{% else %}<|{{ m.role }}|> {{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes what the template of `write_decoder` does, with the marks by which TRL finds turns."""


@check("trainings", LOSS, "trl")
def chats(folder: Path) -> Iterator[Row]:
    from tests.support.models import write_chats, write_decoder

    data = write_chats(folder / "data", **SAMPLES)
    saved = write_decoder(folder / "model")
    run = by_slurmft(folder, "sft", data, saved)
    expected = by_trl(folder, saved, read_rows(data))
    yield Row("sft", "TRL's SFTTrainer", largest(losses(run), expected))
    flags = ("--batch-size", "2", "--gradient-accumulation-steps", "2")
    run = by_slurmft(folder, "sft", data, saved, *flags, processes=2)
    name = f"sft, {TWO}, two micro-steps"
    reference = "TRL's SFTTrainer, all in one batch"
    yield Row(name, reference, largest(losses(run), expected))


def by_trl(folder: Path, saved: Path, rows: Iterable[dict[str, Any]]) -> list[float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = loaded(saved, "CausalLM")
    tokenizer.pad_token = "<unk>"
    tokenizer.chat_template = LEARNT_TEMPLATE
    settings = {"assistant_only_loss": True, "max_length": MAX_LENGTH}
    trainer = SFTTrainer(
        model,
        arguments(SFTConfig, folder, gradient_checkpointing=False, **settings),
        train_dataset=Dataset.from_list(in_order(list(rows))),
        processing_class=tokenizer,
    )
    return losses_of(trainer)
