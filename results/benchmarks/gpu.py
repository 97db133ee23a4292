"""How fast is one GPU, against transformers' Trainer? Random weights, generated texts, bf16.

    python results/benchmarks/gpu.py                              # 40 minutes on one H100
    python results/benchmarks/gpu.py distilbert --batch-sizes 256 # one model; 3 minutes
    python results/benchmarks/gpu.py --try-out                    # tiny, on a CPU: does it work?

Models: distilbert (DistilBERT-base, 22 tokens a text in the mean), distilbert-128 (128 tokens each)
and modernbert (ModernBERT-base, 22). Every case is a process of its own, in turn; a round has them
all. slurmft's are whole runs of `slurmft submit`, by the records of their steps. Neither counts its
first 20 steps.
The Trainer has its own loader, pads to the longest text of batches that it groups by length, and
takes torch's attention; where flash-attn is installed, once more with that: transformers' way
without padding. Its clock is read with the device idle, after the warm-up and at the end. Besides:
what a checkpoint costs, and how long a run that is resumed takes to its first step.

Utilisation is that of the model's operations on real tokens, over what a product of two large
matrices reaches on this device. Of ten steps of slurmft a trace is summed up: kernels, waits of the
host, and the kernels that take longest.
"""

from __future__ import annotations

import collections
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import (
    Steps,
    call,
    is_kernel,
    make_run,
    one_rank,
    parser,
    records,
    result,
    save,
    submit,
    train_by_trainer,
)

MODELS = {
    "distilbert": "DistilBert",
    "distilbert-128": "DistilBert128",
    "modernbert": "ModernBert",
}
BATCH_SIZES = (64, 256, 1024)
ROUNDS, WARM_UP, TRACED = 3, 20, 10
SAMPLES = 60_000
"""That are trained, at most 400 steps of them."""

CASES = {
    "slurmft": ("slurmft", "packed"),
    "slurmft, padded": ("slurmft", "dynamic"),
    "Trainer, grouped by length": ("trainer", "sdpa"),
    "Trainer, flash-attn": ("trainer", "flash_attention_2"),
}
"""Name -> program, and its batching or attention."""

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::item",
)


def main(asked: Any) -> None:
    import torch

    if not (torch.cuda.is_available() or asked.try_out):
        raise SystemExit(
            "torch sees no GPU here: nothing was measured (--try-out on a CPU)"
        )
    cases = {
        n: c
        for n, c in CASES.items()
        if c[1] != "flash_attention_2" or find_spec(c[1][:10])
    }
    if left_out := CASES.keys() - cases.keys():
        print(f"flash-attn is not installed: not measured: {', '.join(left_out)}")
    peak = peak_tflop_per_s()
    print(f"products of matrices: {peak:.1f} TFLOP/s", flush=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.models:
            for size in asked.batch_sizes:
                runs: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
                for number in range(asked.rounds):
                    for name in list(cases)[:: -1 if number % 2 else 1]:
                        runs[name].append(
                            measure(Path(folder), model, size, name, asked)
                        )
                        print(model, size, name, runs[name][-1], flush=True)
                found[f"{model}, batch {size}"] = summary(runs, peak)
                show(found)
        model, size = asked.models[0], asked.batch_sizes[0]
        more = in_process(Path(folder), "trace", model, size, "packed", asked)
        more |= resumed(Path(folder), model, size, asked)
    print(json.dumps(more, indent=1))
    if asked.try_out:
        print("tried out: nothing is written")
        return
    device = torch.cuda.get_device_name()
    save("gpu", {"device": device, "peak_tflop_per_s": peak, "found": found, **more})


def summary(runs: dict[str, list[dict[str, float]]], peak: float) -> dict[str, Any]:
    """Medians of the rounds, and ratios of tokens/s to each of the Trainer's."""
    medians = {
        name: {key: statistics.median(each[key] for each in own) for key in own[0]}
        for name, own in runs.items()
    }
    for own in medians.values():
        own["utilisation"] = own["model_tflop_per_s"] / peak
    # few steps of grouped batches have long texts first
    rate = medians["slurmft"]["tokens_per_s"]
    ratios = {
        n: rate / m["tokens_per_s"]
        for n, m in medians.items()
        if n.startswith("Trainer")
    }
    return {"medians": medians, "ratios": ratios, "runs": runs}


def show(found: dict[str, Any]) -> None:
    """A table of what is known so far."""
    print(f"{'':48}{'samples/s':>10}{'tokens/s':>11}{'util.':>7}{'GiB':>6}")
    for where, each in found.items():
        for name, own in each["medians"].items():
            print(
                f"{where + ', ' + name:48}{own['samples_per_s']:10,.0f}{own['tokens_per_s']:11,.0f}"
                f"{own['utilisation']:7.1%}{own['peak_memory_bytes'] / 2**30:6.1f}"
            )
        print(
            "   ",
            ", ".join(f"{r:.2f} x {n}" for n, r in each["ratios"].items()),
            flush=True,
        )


def measure(
    folder: Path, model: str, size: int, name: str, asked: Any
) -> dict[str, float]:
    """One case."""
    program, how = CASES[name]
    if program == "trainer":
        return in_process(folder, program, model, size, how, asked)
    flags = [*flags_of(settings(model, size, asked)), "--batching", how]
    run = submit(folder / "runs", *flags, timeout_s=900, cwd=Path(__file__).parent)
    measured = result(run)
    warm = warm_ratio(run, measured, 2 if asked.try_out else WARM_UP)
    return {
        "samples_per_s": measured["train_samples_per_s"] * warm,
        "tokens_per_s": measured["train_tokens_per_s"] * warm,
        "model_tflop_per_s": measured["train_model_tflop_per_s"] * warm,
        "peak_memory_bytes": measured["peak_memory_bytes"][0],
        "evaluate_samples_per_s": measured["evaluate_samples_per_s"],
        "startup_s": measured["startup_s"],
    }


def warm_ratio(run: Path, measured: dict[str, Any], warm_up: int) -> float:
    """How many times as fast steps after the first `warm_up` are as all of them, first ones
    included."""
    # The last step of a window has its rate, by the clock of the device.
    windows = [each for each in records(run, "step") if "samples_per_s" in each]
    warm = [each["samples_per_s"] for each in windows if each["step"] > warm_up]
    return float(statistics.median(warm) / measured["train_samples_per_s"])


def flags_of(options: dict[str, Any]) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [*flags, "--cluster", "local", "--nproc-per-node", "1"]


def resumed(folder: Path, model: str, size: int, asked: Any) -> dict[str, float]:
    """Seconds to the first step of a run that was cancelled after its first checkpoint."""
    options = settings(model, size, asked) | {
        "checkpoint_every_steps": 5,
        "epochs": 1000,
    }
    del options["max_steps"]
    runs = folder / "resumed"
    command = [sys.executable, "-m", "slurmft"]
    call(
        *(*command, "submit", "--runs-dir", str(runs), *flags_of(options)),
        timeout_s=60, cwd=Path(__file__).parent,
    )  # fmt: skip
    while not list(runs.glob("*/checkpoints/step-*")):
        time.sleep(0.2)
    (run,) = (path for path in runs.iterdir() if (path / "records.jsonl").exists())
    call(*command, "cancel", str(run), timeout_s=120)
    call(*command, "follow", str(run), timeout_s=120, fails=True)  # until it is no more
    before = len(records(run, "step"))
    call(*command, "resume", str(run), timeout_s=60)
    while len(records(run, "step")) == before:
        time.sleep(0.2)
    call(*command, "cancel", str(run), timeout_s=120)
    call(*command, "follow", str(run), timeout_s=120, fails=True)
    first = [records(run, "step")[at]["time"] for at in (0, before)]
    history = json.loads((run / "state.json").read_text())["history"]
    began = [each["time"] for each in history if each["state"] == "running"]
    return {
        "cold_start_s": first[0] - began[0],
        "resumed_start_s": first[1] - began[-1],
    }


def in_process(
    folder: Path, what: str, model: str, size: int, how: str, asked: Any
) -> dict[str, Any]:
    """What a process of this script writes."""
    output = folder / "measured.json"
    words = ["--try-out"] if asked.try_out else []
    command = [
        sys.executable,
        __file__,
        "case",
        what,
        model,
        str(size),
        how,
        str(output),
        *words,
    ]
    call(
        *command, timeout_s=900, env=os.environ | one_rank(), cwd=Path(__file__).parent
    )
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def settings(model: str, size: int, asked: Any) -> dict[str, Any]:
    """Options of a run; the same for all."""
    steps = 12 if asked.try_out else min(400, SAMPLES // size)
    return {
        "task": f"gpu_models:{MODELS[model]}", "precision": "bf16", "batch_size": size,
        "eval_batch_size": 8 * size, "max_steps": steps, "learning_rate": 1e-5,
        "task_option": f"size={'tiny' if asked.try_out else 'whole'}",
    }  # fmt: skip


def peak_tflop_per_s() -> float:
    import torch

    from slurmft.plugins.examine.microbench import matmul_tflop_s

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return matmul_tflop_s(device, torch.bfloat16)


# --- in a process of its own ----------------------------------------------------------------------


def case(
    what: str, model: str, size: int, how: str, output: Path, try_out: bool
) -> None:
    asked = type("Asked", (), {"try_out": try_out})
    given = settings(model, size, asked)
    given["task_option"] = (given["task_option"],)
    path = make_run(output.parent / "cases", **given, batching="packed")
    found = {"trainer": by_trainer, "trace": trace}[what](path, how, given)
    output.write_text(json.dumps(found))
    os._exit(0)


def by_trainer(path: Path, attention: str, given: dict[str, Any]) -> dict[str, float]:
    """The same model on the same texts by transformers' Trainer."""
    import numpy as np
    import torch
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    from slurmft.runs.rundir import RunDir
    from slurmft.train import tasks
    from slurmft.train.config import TrainConfig
    from slurmft.train.engine.model_flops import ModelFlops
    from slurmft.train.loop.environment import peak_memory_bytes

    task = tasks.get(TrainConfig.of(RunDir.open(path).load_config().program))
    data = task.prepare()
    task.save_tokenizer(path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path / "tokenizer")
    model = task.model(data)
    model.config._attn_implementation = attention
    table, rows = data.train, []
    for i in range(len(table)):
        ids = table.tokens[table.offsets[i] : table.offsets[i + 1]].tolist()
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": [1] * len(ids),
                "labels": table.labels[i],
            }
        )
    sizes: list[Any] = []
    collate = DataCollatorWithPadding(tokenizer)

    def collated(batch: Any) -> Any:
        sizes.append([len(row["input_ids"]) for row in batch])
        return collate(batch)

    on_gpu = torch.cuda.is_available()
    times, _ = train_by_trainer(
        model, rows, collated, path / "trainer", warm_up=WARM_UP if on_gpu else 2,
        per_device_train_batch_size=given["batch_size"], max_steps=given["max_steps"],
        learning_rate=given["learning_rate"], bf16=True,
        train_sampling_strategy="group_by_length", dataloader_pin_memory=on_gpu,
    )  # fmt: skip
    begin = WARM_UP if on_gpu else 2
    seconds = times[-1] - times[begin - 1]
    counted = sizes[begin : given["max_steps"]]
    flops = ModelFlops.of(model)
    operations = sum(flops.of_batch(torch.tensor(lengths)) for lengths in counted)
    return {
        "samples_per_s": sum(map(len, counted)) / seconds,
        "tokens_per_s": float(np.sum(list(map(np.sum, counted)))) / seconds,
        "model_tflop_per_s": operations / seconds / 1e12,
        "peak_memory_bytes": peak_memory_bytes(model.device),
    }


def trace(path: Path, how: str, given: Any) -> dict[str, Any]:
    """What ten steps of slurmft do, by torch's profiler: of a step kernels and waits of the host,
    and of all the time the share of the kernels that take longest."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    steps = Steps(path)
    for _ in range(WARM_UP if on_gpu else 2):
        steps.step()
    kinds = (
        [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        if on_gpu
        else [ProfilerActivity.CPU]
    )
    with profile(activities=kinds) as recorded:
        began = time.perf_counter()
        for _ in range(TRACED):
            steps.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    times_s: collections.Counter[str] = collections.Counter()
    waits: collections.Counter[str] = collections.Counter()
    kernels = 0
    for event in recorded.events() or []:
        if is_kernel(event):
            kernels += 1
            times_s[event.name] += event.device_time_total / 1e6
        elif event.name in WAITS:
            waits[event.name] += 1
    cost_s = statistics.median(checkpoint_cost_s(steps) for _ in range(3))
    longest = {name: value / seconds for name, value in times_s.most_common(12)}
    return {
        "seconds_per_step": seconds / TRACED,
        "kernels_per_step": kernels / TRACED,
        "waits_per_step": {name: count / TRACED for name, count in waits.items()},
        "share_of_time_in_kernels": sum(times_s.values()) / seconds,
        "longest_kernels": longest,
        "checkpoint_cost_percent_of_a_minute": 100 * cost_s / 60,
    }


def checkpoint_cost_s(steps: Steps) -> float:
    """What a checkpoint adds to the time of the steps that it is written beside."""
    seconds = []
    for saves in (False, True):
        began = time.perf_counter()
        if saves:
            steps.trainer.checkpointing.save()
        for _ in range(50):
            loss = steps.step()
        float(loss)  # the device is done
        seconds.append(time.perf_counter() - began)
        steps.trainer.checkpointing.wait()
    return seconds[1] - seconds[0]


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        what, model, size, how, output = sys.argv[2:7]
        case(what, model, int(size), how, Path(output), "--try-out" in sys.argv)
    arguments = parser(__doc__)
    arguments.add_argument(
        "models", nargs="*", choices=[*MODELS, []], default=list(MODELS)
    )
    arguments.add_argument(
        "--batch-sizes", nargs="+", type=int, default=list(BATCH_SIZES)
    )
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument(
        "--try-out", action="store_true", help="tiny models, few steps"
    )
    main(arguments.parse_args())
