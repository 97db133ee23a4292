"""Intel's extension for PyTorch (`--ipex`): refusals, and a training with the real package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmft.core.errors import UsageError
from slurmft.train.config import TrainConfig
from slurmft.train.login.configure import configure
from slurmft.train.parallel import choice
from tests.conftest import records, slurmft
from tests.support.models import write_emotion, write_model

PACKAGE = "intel-extension-for-pytorch"
IS_INSTALLED = importlib.util.find_spec("intel_extension_for_pytorch") is not None


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Has packages of these versions installed, and no other extension."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.8.0")
    with pytest.raises(UsageError, match=f"{PACKAGE}, which is not installed") as error:
        configure({"ipex": True})
    assert "slurmft help sites" in str(error.value.hint)
    # The image may have it: its ranks look.
    configure({"ipex": True, "container": "docker://debian:12"})


@pytest.mark.parametrize("release", ["2.13.0+cpu", "2.7.1", "2.80.0"])
def test_torch_of_another_release(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, torch=release, **{PACKAGE: "2.8.0"})
    with pytest.raises(UsageError) as error:
        configure({"ipex": True})
    assert f"{PACKAGE} 2.8.0 is not for torch {release}" in str(error.value)


@pytest.mark.parametrize(
    "options",
    [{"profile": "gpu"}, {"backend": "nccl"}, {"gpus_per_node": 4}],
    ids=str,
)
def test_not_on_gpus(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.8.0", **{PACKAGE: "2.8.0"})
    with pytest.raises(UsageError, match="--ipex is for CPUs"):
        configure({"ipex": True} | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"profile": "xeon", "gpus_per_node": 4},
        {"profile": "cpu"},
        {"backend": "ccl", "gpus_per_node": 4},
    ],
    ids=str,
)
def test_on_cpus(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.8.0+cpu", **{PACKAGE: "2.8.0"})
    assert configure({"ipex": True} | options).program.settings["ipex"]


def test_no_shares() -> None:
    with pytest.raises(UsageError, match="--ipex cannot be used with --shard full"):
        TrainConfig.resolve(ipex=True, shard="full")


def test_a_rank_looks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes decide whether they compute on GPUs, and containers have packages of their own."""
    config = TrainConfig.resolve(ipex=True)
    world: Any = SimpleNamespace(device=torch.device("cuda", 0), size=1)
    with pytest.raises(UsageError, match="--ipex is for CPUs"):
        choice.check(config, world, "bf16")
    install(monkeypatch, torch="2.8.0")
    world.device = torch.device("cpu")
    with pytest.raises(UsageError, match="not installed"):
        choice.check(config, world, "bf16")
    install(monkeypatch, torch="2.8.0", **{PACKAGE: "2.8.0"})
    choice.check(config, world, "bf16")


# --- with the real package ------------------------------------------------------------------------

real = pytest.mark.skipif(
    not IS_INSTALLED, reason=f"{PACKAGE} is not installed: bash .ci/xeon tests with it"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A small model and data, as flags."""
    folder = tmp_path_factory.mktemp("inputs")
    model = write_model(folder / "model", spread=0.3)
    data = write_emotion(folder / "data", train=64, validation=32)
    flags = ("--task", "emotion", "--model", str(model), "--data", str(data))
    return (*flags, "--batch-size", "8", "--epochs", "2", "--seed", "1")


def losses(folder: Path, *flags: str) -> list[float]:
    """Trains on two simulated nodes, and returns the loss of each step."""
    done = slurmft(
        *("submit", "--follow", "--cluster", "local", "--nodes", "2"),
        *("--runs-dir", str(folder), "--log-every", "1", *flags),
    )
    assert done.code == 0, done.err
    return [record["loss"] for record in records(done.run, "step")]


@real
@pytest.mark.processes
@pytest.mark.parametrize("batching", ["packed", "dynamic"])
@pytest.mark.parametrize(
    ("precision", "difference"), [("fp32", 1e-4), ("bf16", 2e-2)], ids=["fp32", "bf16"]
)
def test_losses_are_those_without_it(
    batching: str,
    precision: str,
    difference: float,
    inputs: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """Beside ccl, where its binding is installed; on gloo otherwise."""
    flags = (*inputs, "--batching", batching, "--precision", precision)
    without = losses(tmp_path / "without", *flags)
    with_it = losses(tmp_path / "with", *flags, "--ipex")
    assert with_it == pytest.approx(without, abs=difference)
    assert len(with_it) == 8


@real
@pytest.mark.processes
def test_its_kernels_are_called(inputs: tuple[str, ...], tmp_path: Path) -> None:
    """torch has no kernel of its own for a layer norm on CPUs, only a formula of other operators;
    a whole process, because an import of the extension changes this one."""
    script = tmp_path / "kernel.py"
    script.write_text(
        "import torch\n"
        "from slurmft.train import ipex\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))\n"
        "weights = {name: value.clone() for name, value in model.state_dict().items()}\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "before = has('aten::layer_norm', 'CPU')\n"
        "same_model, same_optimizer = ipex.optimize(model, optimizer)\n"
        "assert same_model is model and same_optimizer is optimizer\n"
        "assert has('aten::layer_norm', 'CPU') and not before\n"
        "assert all(model.state_dict()[k].equal(v) for k, v in weights.items())\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
