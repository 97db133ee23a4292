"""How much memory does a rank need with --shard full, against DDP? A BERT of 400M random weights,
fp32, 4 texts of 64 tokens a rank and step, on this machine. Its vocabulary is small: of a large one
DDP would leave out what the texts have not.

    python results/benchmarks/sharding_memory.py ddp            # 6 minutes, 16 GB of memory
    python results/benchmarks/sharding_memory.py sharded        # 10 minutes, 12 GB of memory

DDP runs on two ranks: four would need 27 GB, and what a rank needs does not depend on their number.
It is killed before its evaluation, after which the main rank would hold a copy of the model. The
sharded run goes on to its end: evaluation, checkpoint and the saved model are in its peak.

Of every rank, the peak of its own memory (RssAnon of /proc/PID/status, every 50 ms).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import REPOSITORY, load, parser, save

STEPS, LENGTH, BATCH = 2, 64, 4
BYTES_OF_A_PARAMETER = 16
"""Weight, gradient, and AdamW's two moments."""


def main(which: str, layers: int) -> None:
    before = load("sharding_memory")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = write(folder, layers)
        if which == "ddp":
            found = measure(folder, ranks=2, flags=(), until=f"step {STEPS}/")
        else:
            found = measure(folder, ranks=4, flags=("--shard", "full"), until=None)
    same = before.get("parameters") == parameters
    peaks: dict[str, list[float]] = (before["peak_mib"] if same else {}) | {
        which: found
    }
    facts: dict[str, Any] = {"parameters": parameters, "peak_mib": peaks}
    if len(peaks) == 2:
        state = BYTES_OF_A_PARAMETER * parameters / 2**20
        # activations, buffers of gradients to send, libraries
        rest = min(peaks["ddp"]) - state
        facts |= {
            "share_mib": state / 4,
            "activations_and_process_mib": rest,
            "sharded_over_ddp": max(peaks["sharded"]) / min(peaks["ddp"]),
            "sharded_over_share_and_rest": max(peaks["sharded"]) / (state / 4 + rest),
        }
    print(facts)
    save("sharding_memory", facts)


def write(folder: Path, layers: int) -> int:
    """A model of random weights and texts for it; returns its parameters."""
    from transformers import BertConfig, BertForSequenceClassification

    from tests.support.models import write_emotion, write_model

    write_model(folder / "model")
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096,
        num_labels=6, vocab_size=256,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    model.save_pretrained(folder / "model")
    write_emotion(folder / "data", train=STEPS * 4 * BATCH, validation=2 * BATCH)
    for path in (folder / "data").glob("*.jsonl"):
        text = re.sub(
            r'"text": "[^"]*"', '"text": "' + "word1 " * LENGTH + '"', path.read_text()
        )
        path.write_text(text)
    return sum(p.numel() for p in model.parameters())


def measure(
    folder: Path, ranks: int, flags: tuple[str, ...], until: str | None
) -> list[float]:
    """Peaks of all ranks in MiB. The run is killed when it says `until`."""
    command = [
        *(sys.executable, "-m", "slurmft", "submit", "--follow", "--cluster", "local"),
        *(
            "--runs-dir",
            str(folder / "runs"),
            "--nproc-per-node",
            str(ranks),
            "--no-requeue",
        ),
        *(
            "--task",
            "emotion",
            "--data",
            str(folder / "data"),
            "--model",
            str(folder / "model"),
        ),
        *("--precision", "fp32", "--batch-size", str(BATCH), "--max-steps", str(STEPS)),
        *("--log-every", "1", "--max-restarts", "0", "--epochs", str(STEPS), *flags),
        *("--max-length", str(LENGTH), "--eval-batch-size", str(BATCH)),
    ]
    log = folder / "log"
    with open(log, "w") as file:
        run = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )
    peaks: dict[int, float] = {}
    while run.poll() is None:
        for pid in pids(str(folder / "runs")):
            peaks[pid] = max(peaks.get(pid, 0.0), own_mib(pid))
        if until and until in log.read_text():
            for pid in peaks:
                os.kill(pid, signal.SIGKILL)
            until = None
        time.sleep(0.05)
    text = log.read_text()
    assert len(peaks) == ranks, text
    assert run.returncode == 0 or "SIGKILL" in text, text
    return sorted(peaks.values())


def pids(word: str) -> list[int]:
    """Ranks of the run in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "slurmft.train.rank" in line and word in line and "torchrun" not in line:
            found.append(int(path.parent.name))
    return found


def own_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 2**10
    except (OSError, IndexError):
        return 0.0


if __name__ == "__main__":
    arguments: Any = parser(__doc__)
    arguments.add_argument("which", choices=("ddp", "sharded"))
    arguments.add_argument("--layers", type=int, default=32)
    given = arguments.parse_args()
    main(given.which, given.layers)
