"""Does Intel's extension for PyTorch make a step on a CPU faster?

    python results/benchmarks/ipex.py DATA_DIR      # torch 2.8 with its extension (extra xeon)

One process with --ipex and one without, of a thread each, make steps of the 22M-parameter encoder
in turn: batches packed with fused layers, packed with the layers of transformers, and padded to
their longest text. CPU seconds of each step, so that ratios hold on a busy machine, too. DATA_DIR
holds train.jsonl and validation.jsonl of emotion.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import Steps, encoder, job_environment, make_run, parser, save

WARM_UP, PACKAGE = 3, "intel-extension-for-pytorch"
FORMS = ("fused", "packed", "padded")


def worker(folder: Path, data: str, precision: str, batch_size: int, ipex: str) -> None:
    """Makes one step for each line that it reads, of the form that the line names."""
    forms = {}
    for form in FORMS:
        batching = "dynamic" if form == "padded" else "packed"
        path = make_run(
            folder / form, task="emotion", data=data, model=str(encoder()), batching=batching,
            precision=precision, batch_size=batch_size, ipex=bool(ipex),
        )  # fmt: skip
        forms[form] = Steps(path)
    packing = forms["packed"].learner.loaded.packing
    assert packing is not None
    packing.layers = []
    for line in sys.stdin:
        began = time.process_time()
        loss = float(forms[line.strip()].step())
        answer = {"cpu_s": time.process_time() - began, "loss": loss}
        print(f"answer {json.dumps(answer)}", flush=True)
    os._exit(0)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "worker", str(folder), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | job_environment() | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def step(process: subprocess.Popen[str], form: str) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(form, file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith("answer "):
            answer: dict[str, Any] = json.loads(line.removeprefix("answer "))
            return answer
    raise SystemExit("error: the process has ended")


def main(data: Path, precision: str, batch_size: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        common = (str(data.resolve()), precision, str(batch_size))
        processes = {
            "with": start(Path(name) / "with", *common, "yes"),
            "without": start(Path(name) / "without", *common, ""),
        }
        cpu_s: dict[str, dict[str, list[float]]] = {}
        losses: dict[str, dict[str, list[float]]] = {}
        for number in range(WARM_UP + steps):
            for form in FORMS:
                for which in list(processes)[:: -1 if number % 2 else 1]:
                    answer = step(processes[which], form)
                    losses.setdefault(form, {}).setdefault(which, [])
                    losses[form][which].append(answer["loss"])
                    if number >= WARM_UP:
                        times = cpu_s.setdefault(form, {}).setdefault(which, [])
                        times.append(answer["cpu_s"])
        for process in processes.values():
            process.kill()
    gains = {}
    for form, each in cpu_s.items():
        pairs = zip(each["without"], each["with"], strict=True)
        ratios = sorted(without / with_it for without, with_it in pairs)
        gains[form] = statistics.median(ratios)
        middle = [round(ratios[len(ratios) * k // 4], 3) for k in (1, 2, 3)]
        print(f"{form}: without over with it, quartiles {middle}")
    save(f"ipex_{precision}", {
        "batch_size": batch_size, "steps": steps, "extension": version(PACKAGE),
        "gain": gains, "cpu_s": cpu_s, "losses": losses,
    })  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        place, source, rounding, count, *rest = sys.argv[2:]
        worker(Path(place), source, rounding, int(count), rest[0])
    arguments = parser(__doc__)
    arguments.add_argument("data", type=Path, metavar="DATA_DIR")
    arguments.add_argument("--precision", default="bf16")
    arguments.add_argument("--batch-size", type=int, default=32)
    arguments.add_argument("--steps", type=int, default=24)
    main(**vars(arguments.parse_args()))
