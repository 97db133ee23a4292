"""How fast does one GPU train the published benchmark? DistilBERT, batch 256, fp16.

    python results/benchmarks/gpu_throughput.py PEAK_TFLOPS   # dense fp16, by its maker: H200 989

It runs `slurmft submit --recipe mn4-benchmark` on this machine, and takes the throughput from the
run's own result, without its first steps. The published figure of one V100 is 1,364 samples/s.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness import parser, result, save, submit

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
    save("gpu_throughput", {"gpu": gpus[0].name, "peak_tflops": peak_tflops, "runs": found})


def run(folder: Path, mode: str, peak_tflops: float) -> dict[str, float]:
    """Throughput and model FLOPs utilisation of one run."""
    found = result(
        submit(
            folder,
            *("--cluster", "local", "--recipe", "mn4-benchmark", "--precision", "fp16"),
            *("--nproc-per-node", "1", "--batching", mode),
            timeout_s=900,
        )
    )
    samples, tokens = found["train_samples_per_s"], found["train_tokens_per_s"]
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
    arguments = parser(__doc__)
    arguments.add_argument("peak_tflops", type=float, metavar="PEAK_TFLOPS")
    main(arguments.parse_args().peak_tflops)
