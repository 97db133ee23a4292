"""Programs of users' own, as files: none of them knows slurmft, but where its name says so."""

from __future__ import annotations

from pathlib import Path

COUNTS = """\
import argparse, json, os, pathlib, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--resume", type=pathlib.Path)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--on", default="SIGTERM")
asked = parser.parse_args()
stop = []
if asked.on != "none":
    signal.signal(signal.Signals[asked.on], lambda *_: stop.append(1))
start = json.loads((asked.resume / "state.json").read_text())["step"] if asked.resume else 0
print("starts after", start)
def save(step):
    if os.environ["RANK"] == "0":
        folder = asked.out / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
for step in range(start + 1, asked.steps + 1):
    time.sleep(0.15)
    print("did", step)
    if step % 5 == 0 or stop:
        save(step)
    if stop:
        sys.exit(0)
if os.environ["RANK"] == "0":
    (asked.out / "result.json").write_text(json.dumps({"score": 0.5, "words": "none"}))
"""
"""Counts steps, saves each fifth one, and at a signal at once."""

PLACES = """\
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(*(os.environ[name] for name in names))
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


GLUE = """\
import dataclasses, json, sys, time
from datasets import Dataset
from transformers import (AutoModelForSequenceClassification, AutoTokenizer,
    DataCollatorWithPadding, HfArgumentParser, Trainer, TrainingArguments, set_seed)

@dataclasses.dataclass
class Own:
    model_name_or_path: str
    train_file: str
    pause_s: float = 0.0

own, arguments = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
set_seed(arguments.seed)
tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
model = AutoModelForSequenceClassification.from_pretrained(own.model_name_or_path, num_labels=6)
rows = [json.loads(line) for line in open(own.train_file)]
data = Dataset.from_list(rows).map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True)

class Slow(Trainer):
    def training_step(self, *given, **more):
        time.sleep(own.pause_s)
        return super().training_step(*given, **more)

trainer = Slow(model=model, args=arguments, train_dataset=data, processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer))
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    json.dump({"steps": len(losses), "last_loss": losses[-1]}, open("result.json", "w"))
    json.dump(losses, open("losses.json", "w"))
"""
"""In the manner of transformers' run_glue.py: its arguments are Trainer's."""

NLP = """\
import argparse, json, os, time
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--data")
parser.add_argument("--output_dir", default=".")
parser.add_argument("--checkpointing_steps", type=int)
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--pause_s", type=float, default=0.0)
asked = parser.parse_args()
accelerator = Accelerator(cpu=True)
set_seed(7)
tokenizer = AutoTokenizer.from_pretrained(asked.model)
rows = [json.loads(line) for line in open(asked.data)]
def collate(batch):
    found = tokenizer([row["text"] for row in batch], padding=True, return_tensors="pt")
    return found | {"labels": torch.tensor([int(row["label"]) for row in batch])}
loader = DataLoader(rows, shuffle=True, collate_fn=collate, batch_size=4)
model = AutoModelForSequenceClassification.from_pretrained(asked.model, num_labels=6)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = done = 0
if asked.resume_from_checkpoint:
    accelerator.load_state(asked.resume_from_checkpoint)
    done = int(os.path.basename(asked.resume_from_checkpoint).removeprefix("step_"))
losses = open(os.path.join(asked.output_dir, "losses.jsonl"), "a")
for epoch in range(asked.epochs):
    loader.set_epoch(epoch)
    if step + len(loader) <= done:
        step += len(loader)
        continue
    batches = accelerator.skip_first_batches(loader, done - step) if done > step else loader
    step = max(step, done)
    for batch in batches:
        time.sleep(asked.pause_s)
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if accelerator.is_main_process:
            print(json.dumps([step, loss.item()]), file=losses, flush=True)
        if step % asked.checkpointing_steps == 0:
            accelerator.save_state(os.path.join(asked.output_dir, f"step_{step}"))
"""
"""In the manner of Accelerate's complete_nlp_example.py."""

ATTACHES = """\
import json, os, sys, time
import torch
import slurmft

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
total, pause_s = int(sys.argv[1]), float(sys.argv[2])
with slurmft.attach() as job:
    first = 1
    if latest := job.latest_checkpoint():
        state = torch.load(latest / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        first = state["step"] + 1
    for n in range(first, total + 1):
        time.sleep(pause_s)
        x = torch.randn(4, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.step(n, total=total, loss=loss)
        if job.should_stop() or job.checkpoint_due():
            with job.checkpoint(n) as folder:
                if folder:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                "rng": torch.get_rng_state(), "step": n}, folder / "state.pt")
        if job.should_stop():
            break
    else:
        job.result(loss=loss.item())
"""
"""A program that attaches; its ranks do not communicate but to stop."""
