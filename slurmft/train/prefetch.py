"""Loads model, tokenizer and data as a run does: `python -m
slurmft.train.prefetch JSON`; its downloads show their progress, and stay in the caches."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from slurmft.core.errors import Exit, run_main
from slurmft.core.hub import hub_cache, is_local
from slurmft.core.text import in_bytes
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.own_task import facts


def size(name: str) -> str:
    """What a model takes in the hub's cache, or its folder."""
    folder = Path(name) if is_local(name) else hub_cache() / f"models--{name.replace('/', '--')}"
    files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return f", {in_bytes(sum(p.stat().st_size for p in files))} in {folder}"


def main(argv: list[str]) -> int:
    from transformers import AutoModel

    config = TrainConfig.resolve(**json.loads(argv[0]))
    task: Any = tasks.get(config)
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    loaded = []
    if config.model is not None:
        task.tokenizer()
        model = task.pretrained(AutoModel)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        loaded.append((config.model, f"{millions:,.1f}M parameters{size(config.model)}"))
    if config.data is not None:
        splits = [f"{s} {len(task.rows(s)):,} rows" for s in facts(config.task).splits]
        loaded.append((config.data, ", ".join(splits)))
    for name, text in loaded if offline else ():
        print(f"{name}: {text}", flush=True)
    return Exit.OK


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
