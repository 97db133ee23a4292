"""Loads model, tokenizer and data as a run does: `python -m slurmft.train.prefetch JSON`.

Its downloads show their progress, and stay in the caches.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmft.core.errors import Exit, run_main
from slurmft.core.hub import NotOnHubError, hub_cache, is_local, leave_out_kernels
from slurmft.core.text import counted, in_bytes
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.own_task import facts


def main(argv: list[str]) -> int:
    leave_out_kernels()
    try:
        return _load(argv)
    except NotOnHubError as error:
        raise error.while_fetching() from error


def _load(argv: list[str]) -> int:
    config = TrainConfig.resolve(**json.loads(argv[0]))
    task: Any = tasks.get(config)
    lines = []
    if config.model is not None:
        facts_of_model = _load_model(task, config.model)
        lines.append(f"{config.model}: {facts_of_model}")
    main, *mixed = config.sources()
    splits = facts(config.task).splits
    if main.data is not None:
        lines.append(_counts(main, splits))
    for source in mixed:
        lines.append(_counts(source, facts(source.task).splits[:1]))
    # slurmft fetch starts this twice: to download, then offline, to see that all is there.
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        for line in lines:
            print(line, flush=True)
    return Exit.OK


def _counts(source: TrainConfig, splits: Sequence[str]) -> str:
    """Loads splits of a source; returns how many rows they have."""
    task: Any = tasks.get(source)
    counts = []
    for split in splits:
        rows = task.rows(split)
        counts.append(f"{split} {counted(len(rows), 'row')}")
    all_counts = ", ".join(counts)
    return f"{source.data}: {all_counts}"


def _load_model(task: Any, name: str) -> str:
    """Loads tokenizer and model; returns how large the model is, and where."""
    from transformers import AutoModel

    task.tokenizer()
    model = task.pretrained(AutoModel)
    count = sum(parameter.numel() for parameter in model.parameters())
    millions = count / 1e6
    # huggingface_hub names the folders of its cache so.
    folder_name = name.replace("/", "--")
    folder = hub_cache() / f"models--{folder_name}"
    if is_local(name):
        folder = Path(name)
    size_bytes = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():  # snapshots are links to the files
            size_bytes += path.stat().st_size
    return f"{millions:,.1f}M parameters, {in_bytes(size_bytes)} in {folder}"


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
