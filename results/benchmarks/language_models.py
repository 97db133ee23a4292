"""How fast are language models against transformers' Trainer, and do both learn the same? A random
Llama of 30M parameters, one process, all cores, the same samples in the same order.

    python results/benchmarks/language_models.py causal-lm     # blocks of 512 tokens; 10 minutes
    python results/benchmarks/language_models.py sft           # uneven lengths; Trainer pads them
    python results/benchmarks/language_models.py losses        # of sft, in fp32; "blocks losses"
    python results/benchmarks/language_models.py memory        # of a vocabulary of 128,000 tokens

The text is Python's standard library (10 MB): its sources for causal-lm; for sft, each function
that has a docstring is asked for by that. The tokenizer, of 8,192 tokens, is trained on it. Every
case is a process of its own, in turn; a round has them all. Of every process, the time of the same
steps after the warm-up counts. The Trainer gets the samples as TRL makes them: blocks, or padded to
the longest of the batch, with labels of what is learnt alone.
"""

from __future__ import annotations

import ast
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import (
    Steps,
    call,
    make_run,
    one_rank,
    parser,
    peak_memory_mib,
    save,
    train_by_trainer,
)

ROUNDS, WARM_UP = 3, 2
TEXT_BYTES = 10_000_000
LLAMA = {
    "hidden_size": 512, "num_hidden_layers": 7, "num_attention_heads": 8,
    "intermediate_size": 1376, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What is trained."""

    task: str
    batch_size: int
    steps: int
    """That count."""
    precision: str = "bf16"
    vocabulary: int = 8192


WORK = {
    "causal-lm": Work("causal-lm", 8, 6),
    "sft": Work("sft", 16, 8),
    "losses": Work("sft", 8, 4, "fp32"),
    "blocks losses": Work("causal-lm", 2, 4, "fp32"),
    "memory": Work("causal-lm", 2, 1, vocabulary=128_000),
}


def main(name: str) -> None:
    found: dict[str, list[dict[str, Any]]] = {"slurmft": [], "Trainer": []}
    rounds = ROUNDS if name in ("causal-lm", "sft") else 1
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), WORK[name].vocabulary)
        for number in range(rounds):
            for program in list(found)[:: -1 if number % 2 else 1]:
                found[program].append(run(Path(folder), name, program))
                print(number, program, found[program][-1], flush=True)
    rates = {
        program: statistics.median(each["tokens_per_s"] for each in all_of)
        for program, all_of in found.items()
    }
    pairs = [
        zip(a["losses"], b["losses"], strict=True)
        for a, b in zip(*found.values(), strict=True)
    ]
    facts = {
        "ratio_of_medians": rates["slurmft"] / rates["Trainer"],
        "largest_difference_of_losses": max(
            abs(a - b) for pair in pairs for a, b in pair
        ),
    }
    print(json.dumps(facts, indent=1))
    values = {"runs": found, "median_tokens_per_s": rates, **facts}
    save(f"language_models_{name.replace(' ', '_').replace('-', '_')}", values)


def run(folder: Path, name: str, program: str) -> dict[str, Any]:
    """One case in a process of its own."""
    output = folder / "measured.json"
    environment = one_rank() | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    command = [
        sys.executable,
        __file__,
        "case",
        name,
        program,
        str(folder),
        str(output),
    ]
    call(*command, timeout_s=900, env=os.environ | environment)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


# --- data and model -------------------------------------------------------------------------------


def make(folder: Path, vocabulary: int) -> None:
    """Texts, conversations, tokenizer and model."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.support.models import CHAT_TEMPLATE, write_splits

    texts = list(sources())
    rows = [{"text": text} for text in texts]
    chats = [{"messages": chat} for text in texts for chat in conversations(text)]
    for name, own in (("causal-lm", rows), ("sft", chats)):
        write_splits(folder / name, {"train": own[16:], "validation": own[:16]})
    specials = ["<|end|>", "<|user|>", "<|assistant|>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=8192, special_tokens=specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        eos_token=specials[0],
        additional_special_tokens=specials[1:],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=vocabulary, bos_token_id=None, eos_token_id=0, **LLAMA
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")


def sources() -> Iterator[str]:
    """Of Python's standard library, its tests included."""
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or size > TEXT_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):  # tests of the parser
            continue
        size += len(text)
        yield text


def conversations(source: str) -> Iterator[list[dict[str, str]]]:
    """A docstring asks, its function answers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (asked := ast.get_docstring(node)):
            node.body = node.body[1:] or [ast.Pass()]
            yield [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": ast.unparse(node)},
            ]


# --- cases ----------------------------------------------------------------------------------------


def case(name: str, program: str, folder: Path, output: Path) -> None:
    import torch

    work = WORK[name]
    path = make_run(
        folder / "runs", task=work.task, data=str(folder / work.task),
        model=str(folder / "model"), precision=work.precision, batch_size=work.batch_size,
        max_length=512, learning_rate=1e-4, lr_schedule="constant", warmup_ratio=0.0, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    times, losses, tokens = {"slurmft": by_slurmft, "Trainer": by_trainer}[program](
        path, work
    )
    found = {
        "tokens_per_s": sum(tokens[WARM_UP:]) / (times[-1] - times[WARM_UP - 1]),
        "losses": losses,
        "peak_memory_mib": peak_memory_mib(),
    }
    output.write_text(json.dumps(found))
    os._exit(0)


def by_slurmft(path: Path, work: Work) -> tuple[list[float], list[float], list[int]]:
    """Clock times after every step, losses, and real tokens."""
    steps = Steps(path)
    times, losses, tokens = [], [], []
    for _ in range(WARM_UP + work.steps):
        before = steps.tokens
        losses.append(float(steps.step()))
        times.append(time.perf_counter())
        tokens.append(steps.tokens - before)
    return times, losses, tokens


def by_trainer(path: Path, work: Work) -> tuple[list[float], list[float], list[int]]:
    """The same by transformers' Trainer."""
    from transformers import DataCollatorForSeq2Seq

    from slurmft.runs.rundir import RunDir
    from slurmft.train import tasks
    from slurmft.train.config import TrainConfig
    from slurmft.train.data.stream import epoch_order
    from slurmft.train.data.tables import IGNORED
    from slurmft.train.tasks.causal_lm import Task

    config = TrainConfig.of(RunDir.open(path).load_config().program)
    maker = tasks.get(config)
    assert isinstance(maker, Task)
    data = maker.prepare()
    table, labels = data.train, data.train.token_labels
    assert labels is not None
    order = epoch_order(len(table), config.seed, 0)[
        : (WARM_UP + work.steps) * work.batch_size
    ]
    rows = [
        {
            "input_ids": table.tokens[start:end].tolist(),
            "attention_mask": [1] * int(end - start),
            # the model shifts them
            "labels": [IGNORED, *labels[start : end - 1].tolist()],
        }
        for start, end in zip(
            table.offsets[order], table.offsets[order + 1], strict=True
        )
    ]
    times, losses = train_by_trainer(
        maker.model(data), rows,
        DataCollatorForSeq2Seq(maker.tokenizer(), label_pad_token_id=IGNORED), path / "trainer",
        per_device_train_batch_size=work.batch_size, max_steps=WARM_UP + work.steps,
        learning_rate=1e-4, weight_decay=0.0, bf16=work.precision == "bf16",
    )  # fmt: skip
    sizes = [len(row["input_ids"]) for row in rows]
    size = work.batch_size
    return (
        times,
        list(map(float, losses)),
        [sum(sizes[i : i + size]) for i in range(0, len(sizes), size)],
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        case(sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
    arguments = parser(__doc__)
    arguments.add_argument("name", choices=WORK)
    main(arguments.parse_args().name)
