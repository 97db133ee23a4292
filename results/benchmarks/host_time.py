"""What does a training step cost the host, where a GPU computes?

    python results/benchmarks/host_time.py     # half a minute

DistilBERT of six layers on packed batches, by the code of a GPU, on a CPU that takes its place: so
narrow, and with attention that computes nothing, that little but the host's work is left. What the
driver takes to launch kernels is not in it. Kernels: operations that are no views, as PyTorch
dispatches them; those outside of the layers follow from models of six and three layers.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Steps, make_run, parser, save

WARM_UP, STEPS, SAMPLES = 20, 200, 8
NARROW = {"dim": 64, "hidden_dim": 128, "n_heads": 8}


def main() -> None:
    import pytest
    import torch

    from tests.support import flash_attention

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "forward", no_attention)
        patch.setattr(flash_attention, "backward", no_gradients)
        with (
            flash_attention.as_on_an_h100(patch),
            tempfile.TemporaryDirectory() as folder,
        ):
            six, three = (measured(Path(folder), layers) for layers in (6, 3))
    each = (six["kernels"] - three["kernels"]) / 3
    found = six | {"kernels_outside_of_layers": six["kernels"] - 6 * each}
    for name, value in found.items():
        print(f"{name:28}{value:10.2f}")
    save("host_time", found)
    os._exit(0)  # threads of the process group may not end in order


def no_attention(query: Any, *_: Any, **__: Any) -> Any:
    import torch

    nothing = torch.zeros(1, dtype=torch.int64)
    return (
        torch.zeros_like(query),
        torch.empty(0),
        nothing,
        torch.empty(0),
        torch.empty(0),
    )


def no_gradients(_: Any, *states: Any, **__: Any) -> Any:
    import torch

    return tuple(torch.zeros_like(each) for each in states[:3])


def measured(folder: Path, layers: int) -> dict[str, float]:
    """Medians of a step, and of its batch, which a thread makes; and kernels of a step."""
    from tests.train.test_gpu_layers import Kernels

    run = make_run(
        folder, task="synthetic", preset="paper", batch_size=SAMPLES, precision="bf16"
    )
    with narrow(layers):
        steps = Steps(run)
    for _ in range(WARM_UP):
        steps.step()
    assert steps.learner.loaded.packing is not None
    assert steps.learner.loaded.packing.gpu_layers is not None
    with Kernels() as kernels:
        steps.step()
    times = []
    for _ in range(STEPS):
        samples, began = steps.samples(), time.perf_counter()
        batches = steps.learner.micro_batches(samples)
        made = time.perf_counter()
        steps.learner.step(samples, batches)
        times.append((made - began, time.perf_counter() - made))
    batch_s, step_s = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "kernels": kernels.count.total(),
        "step_ms": 1e3 * step_s,
        "batch_ms": 1e3 * batch_s,
    }


@contextlib.contextmanager
def narrow(layers: int) -> Iterator[None]:
    """Makes the model narrow, and leaves its dropout torch's, as on a GPU."""
    import pytest
    import transformers

    from slurmft.train.engine import cpu

    own = transformers.DistilBertConfig.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        own(self, *args, **(named | NARROW | {"n_layers": layers}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.DistilBertConfig, "__init__", init)
        patch.setattr(cpu, "replace_dropout", lambda model: None)
        yield


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
