"""Training throughput of one GPU on the published benchmark: DistilBERT, batch 256, fp16.

    python results/gpu.py PEAK_TFLOPS        # the GPU's dense fp16 rate by its maker: H200 989

It runs `slurmft submit --recipe mn4-benchmark` on this machine, and takes the throughput from the
run's own result, without its first steps. The published figure of one V100 is 1,364 samples/s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import RESULTS, save

sys.path.insert(0, str(RESULTS.parent))

MODES = ("packed", "dynamic", "packed", "dynamic", "packed", "dynamic")
"""In turn."""

LAYERS, HIDDEN, WIDE = 6, 768, 3072
"""DistilBERT."""


def main(peak_tflops: float) -> None:
    from slurmft.node import hardware

    gpus = hardware.detect({}).gpus
    if not gpus:
        raise SystemExit("this machine shows no GPU: nothing was measured")
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            found[mode].append(run(Path(folder), mode, peak_tflops))
            print(mode, found[mode][-1], flush=True)
    save("gpu", {"gpu": gpus[0].name, "peak_tflops": peak_tflops, "runs": found})


def run(folder: Path, mode: str, peak_tflops: float) -> dict[str, float]:
    """Throughput and model FLOPs utilisation of one run."""
    command = [
        *(sys.executable, "-m", "slurmft", "submit", "--cluster", "local", "--follow"),
        *("--recipe", "mn4-benchmark", "--precision", "fp16", "--nproc-per-node", "1"),
        *("--batching", mode, "--runs-dir", str(folder)),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    line = next(x for x in done.stdout.splitlines() if x.startswith("run directory: "))
    path = Path(line.removeprefix("run directory: ")) / "result.json"
    result: dict[str, Any] = json.loads(path.read_text())
    samples, tokens = result["train_samples_per_s"], result["train_tokens_per_s"]
    flops = flops_per_token(tokens / samples) * tokens
    return {
        "samples_per_s": samples,
        "tokens_per_s": tokens,
        "utilisation": flops / (peak_tflops * 1e12),
    }


def flops_per_token(length: float) -> float:
    """Forward and backward, of real tokens alone: six for each weight of a linear layer, and twelve
    for each of a token's `length` attention scores and hidden value."""
    weights = LAYERS * (4 * HIDDEN**2 + 2 * HIDDEN * WIDE)
    return 6 * weights + 12 * LAYERS * HIDDEN * length


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(float(sys.argv[1]))
