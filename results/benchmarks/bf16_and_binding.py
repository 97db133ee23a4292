"""What do bf16, and binding to cores, gain on this CPU?

    python results/benchmarks/bf16_and_binding.py          # ten minutes

The 22M-parameter encoder; medians of the steps of each run, runs in turn. Two processes of a core
each, batch 16 a process, texts of a dozen tokens; and one process of two cores, batch 32, every
text padded to 64 tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Steps, encoder, make_emotion, make_run, parser, save, torchrun

ROUNDS, STEPS, WARM_UP = 3, 14, 4


@dataclass(frozen=True)
class Case:
    """One way to run a step."""

    name: str
    precision: str
    is_bound: bool = True
    processes: int = 2
    padded_to: int = 0
    """Tokens that every text is padded to; 0: batches are packed."""


CASES = [
    Case("fp32, bound", "fp32"),
    Case("fp32, not bound", "fp32", is_bound=False),
    Case("bf16, bound", "bf16"),
    Case("bf16, not bound", "bf16", is_bound=False),
    Case("fp32, 64 tokens", "fp32", processes=1, padded_to=64),
    Case("bf16, 64 tokens", "bf16", processes=1, padded_to=64),
]
CORES, GLOBAL_BATCH = 2, 32


def main() -> None:
    steps: dict[str, list[float]] = {case.name: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            for case in CASES[:: 1 if number % 2 else -1]:
                seconds = run(Path(folder) / f"{number}-{case.name}", case)
                steps[case.name].append(seconds)
                print(f"{number} {case.name} {1000 * seconds:.0f} ms", flush=True)
    medians = {name: statistics.median(times) for name, times in steps.items()}
    save("bf16_and_binding", {
        "steps_s": steps,
        "median_s": medians,
        "bf16_over_fp32": medians["fp32, bound"] / medians["bf16, bound"],
        "bf16_over_fp32_64_tokens": medians["fp32, 64 tokens"] / medians["bf16, 64 tokens"],
        "bound_over_not_fp32": medians["fp32, not bound"] / medians["fp32, bound"],
        "bound_over_not_bf16": medians["bf16, not bound"] / medians["bf16, bound"],
    })  # fmt: skip


def run(folder: Path, case: Case) -> float:
    """Seconds of a step: the median, of the slower rank."""
    folder.mkdir()
    padding = (
        {"batching": "padded", "max_length": case.padded_to} if case.padded_to else {}
    )
    path = make_run(
        folder / "runs",
        task="emotion",
        model=str(encoder()),
        data=str(make_emotion(folder / "data")),
        precision=case.precision,
        batch_size=GLOBAL_BATCH // case.processes,
        **padding,
    )
    environment = {"OMP_NUM_THREADS": str(CORES // case.processes)}
    if case.is_bound:
        environment |= {"SLURMFT_CORES": "0;1" if case.processes == 2 else "0-1"}
    torchrun(case.processes, __file__, "rank", str(path), env=environment)
    seconds: float = json.loads((path.parent / "step.json").read_text())
    return seconds


def rank(path: Path) -> None:
    from slurmft.node.profiles import bind_rank

    bind_rank(os.environ)
    steps = Steps(path)
    times = []
    for _ in range(STEPS):
        steps.world.sum([0.0])  # both ranks begin together
        began = time.perf_counter()
        steps.step()
        steps.world.sum([0.0])
        times.append(time.perf_counter() - began)
    median = max(steps.world.all_values(statistics.median(times[WARM_UP:])))
    if steps.world.is_main:
        (path.parent / "step.json").write_text(json.dumps(median))
    steps.leave()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]))
    parser(__doc__).parse_args()
    main()
