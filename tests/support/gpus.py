"""A torch that sees GPUs where there are none: what is asked of it is noted."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch


class FakeGpus:
    """What `torch.accelerator` and the module of its device answer on a node with GPUs."""

    def __init__(
        self, count: int, *, kind: str = "cuda", uuid: str = "GPU-a", says: str = ""
    ) -> None:
        """`says`: what CUDA warns of when it is asked first, such as an old driver."""
        self.count, self.kind, self.uuid, self.says = count, kind, uuid, says
        self.asked: list[str] = []

    def install(self, patch: Callable[[Any, str, Any], None]) -> None:
        """`patch`: `setattr`, or a fixture's."""
        for name in ("is_available", "device_count", "current_accelerator"):
            patch(torch.accelerator, name, getattr(self, f"_{name}"))
        module = types.SimpleNamespace(
            set_device=lambda device: self.asked.append(f"set_device {device}"),
            get_device_properties=lambda index: types.SimpleNamespace(uuid=self.uuid),
            get_device_name=lambda device: f"a GPU, {device}",
        )
        real = torch.get_device_module
        patch(
            torch,
            "get_device_module",
            lambda device: real(device) if str(device) == "cpu" else module,
        )

    def _is_available(self) -> bool:
        self.asked.append("is_available")
        if self.says:
            warnings.warn(self.says, stacklevel=1)
        return self.count > 0

    def _device_count(self) -> int:
        return self.count

    def _current_accelerator(self) -> torch.device | None:
        return torch.device(self.kind) if self.count else None
