"""What a step computes on the device: the same as padded, in every precision, without a wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurmft.train.data.tables import TokenTable
from slurmft.train.engine import packing
from slurmft.train.tasks.base import set_dropout

SIZES = {
    "vocab_size": 200, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "DistilBert": {
        "vocab_size": 200,
        "dim": 128,
        "n_layers": 3,
        "n_heads": 2,
        "hidden_dim": 256,
    },
    "Llama": SIZES | {"num_key_value_heads": 1},
    "ModernBert": SIZES | {"local_attention": 8},
}
LENGTHS = [*range(3, 60, 2), 100, 100]


def make(name: str, device: torch.device) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**MODELS[name], num_labels=3)
    set_dropout(config, 0.0)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForSequenceClassification")(config).to(device)


def gradients(
    model: Any, inputs: dict[str, torch.Tensor], kind: torch.dtype
) -> torch.Tensor:
    """All of them, one after the other, in fp64."""
    device = model.device
    labels = torch.arange(len(LENGTHS), device=device) % 3
    model.zero_grad()
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    with torch.autocast(device.type, kind, enabled=kind is not torch.float32):
        logits = model(**inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.float().view(-1, 3), labels)
    torch.autograd.backward(loss)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.double().flatten() for grad in grads])


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_packed_gradients_are_the_padded_ones(
    name: str, kind: torch.dtype, gpu: torch.device
) -> None:
    """In reduced precision nearly: where a ReLU of the head is near 0, rounding decides about a
    sample's whole gradient of it."""
    draw = np.random.default_rng(0)
    table = TokenTable.build(
        [draw.integers(3, 200, n) for n in LENGTHS], [0] * len(LENGTHS)
    )
    order = np.arange(len(LENGTHS))
    padded, packed = table.batch(order, 0), table.packed(order)
    model = make(name, torch.device("cpu"))
    found = packing.pack(model)  # tried on a CPU, as before a run moves its model
    assert isinstance(found, packing.Packing), found
    exact = gradients(model.to(gpu), padded.inputs, torch.float32)
    found.expect(packed.lengths, gpu)
    ours = gradients(model, packed.inputs, kind)
    difference = float((ours - exact).norm() / exact.norm())
    assert difference < (1e-4 if kind is torch.float32 else 0.1)


@pytest.fixture
def steps(tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A training on the device whose steps a test takes itself: DistilBERT of six layers."""
    from harness import Steps, make_run, one_rank

    for name, value in one_rank().items():
        monkeypatch.setenv(name, value)
    path = make_run(
        tmp_path,
        task="synthetic",
        preset="paper",
        batch_size=256,
        precision="bf16",
        batching="packed",
    )
    made = Steps(path)
    assert made.world.device == gpu
    yield made
    made.leave()


def test_a_step_does_not_wait_for_the_device(steps: Any) -> None:
    for _ in range(3):
        steps.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            steps.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_of_a_step(steps: Any) -> None:
    """Of six layers, forwards, backwards and AdamW: 348 on an H200. Which products are computed in
    two parts is up to the device."""
    from harness import is_kernel

    for _ in range(3):
        steps.step()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        steps.step()
        torch.cuda.synchronize()
    kernels = sum(map(is_kernel, found.events() or []))
    print(f"{kernels} kernels")
    assert 0 < kernels <= 370


def test_memory_stays_flat(steps: Any) -> None:
    """Over 2,000 steps of uneven lengths."""
    for _ in range(200):
        steps.step()
    before = torch.cuda.memory_reserved()
    for _ in range(1800):
        steps.step()
    assert torch.cuda.memory_reserved() <= 1.1 * before
