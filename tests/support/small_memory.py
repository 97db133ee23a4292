"""A task of the user's own on a device with little memory, which is made up."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.models import write_model

SMALL_MEMORY = """

class Small(Stars):
    @dataclass
    class Options(Stars.Options):
        train_rows: int = 99
        evaluate_rows: int = 99
        rank: int = -1  # the one that has so little memory; -1: all
        after: int = 0  # batches that fit, whatever their size
        row_mib: int = 0  # memory of the host that each row takes
        saves: int = 0  # 1: the first save of the model does not fit

    batches = 0

    def model(self, data):
        import pathlib
        import torch

        model = super().model(data)
        mark = pathlib.Path("saved")
        save = model.save_pretrained

        def save_pretrained(*arguments, **named):
            if self.options.saves and not mark.exists():
                mark.touch()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return save(*arguments, **named)

        model.save_pretrained = save_pretrained
        return model

    def loss(self, output, batch):
        import os
        import torch

        self.batches += 1
        limit = self.options.evaluate_rows
        if torch.is_grad_enabled():
            limit = self.options.train_rows
        is_small = self.options.rank in (-1, int(os.environ["RANK"]))
        is_due = self.batches > self.options.after
        if is_small and is_due:
            self.held = bytearray(self.options.row_mib * len(batch.targets["labels"]) << 20)
        if is_small and is_due and len(batch.targets["labels"]) > limit:
            if not torch.is_grad_enabled():
                torch.empty(2**50)  # more than the kernel gives to any process
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().loss(output, batch)
"""
"""Is added to the documentation's task: it raises torch's error for batches of more rows."""


def write_model_without_dropout(folder: Path) -> None:
    """Writes a model whose losses do not depend on how many samples are computed at a time."""
    config_file = write_model(folder) / "config.json"
    config = json.loads(config_file.read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config_file.write_text(json.dumps(config))
