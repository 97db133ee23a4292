"""The baseline of first_step.py: the shortest script that trains the same model under torchrun.

Plain DistributedDataParallel, AutoTokenizer, AutoModel, the data from a .jsonl file; no Accelerate,
no datasets, no evaluation, and no text tokenized that its few steps do not need (slurmft tokenizes
all). Prints the time at which its first optimizer step was done. first_step.py starts it:

    torchrun first_step_baseline.py TRAIN.jsonl MODEL_DIR BATCH_SIZE
"""

from __future__ import annotations

import json
import time
from typing import Any

from harness import parser

STEPS = 3


def main(data: str, model_folder: str, batch_size: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    dist.init_process_group("gloo")
    with open(data) as file:
        rows = [json.loads(line) for line in file][
            : STEPS * batch_size * dist.get_world_size()
        ]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=128)
    samples = [
        {"input_ids": ids, "labels": row["label"]}
        for ids, row in zip(encoded["input_ids"], rows, strict=True)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(
        model_folder, num_labels=6
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=5e-4)
    loader: Any = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampler=DistributedSampler(samples),  # type: ignore[arg-type]
        collate_fn=lambda batch: tokenizer.pad(batch, return_tensors="pt"),
    )
    for step, batch in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and dist.get_rank() == 0:
            print(
                f"first step done {time.time():.3f} loss {loss.item():.4f}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("data", metavar="TRAIN.jsonl")
    arguments.add_argument("model_folder", metavar="MODEL_DIR")
    arguments.add_argument("batch_size", type=int)
    main(**vars(arguments.parse_args()))
