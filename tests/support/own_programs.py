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
print("world size", arguments.world_size)
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
from accelerate.utils import DataLoaderConfiguration, set_seed
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
# As the example: else a resumed run has other orders in the epochs that it has not begun.
loading = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=loading)
print("world size", accelerator.num_processes)
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

SFT = """\
import dataclasses, json, time
from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

@dataclasses.dataclass
class Own:
    model_name_or_path: str
    train_file: str
    pause_s: float = 0.0

own, arguments = HfArgumentParser((Own, SFTConfig)).parse_args_into_dataclasses()
print("world size", arguments.world_size)
tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
tokenizer.pad_token = "<unk>"
data = Dataset.from_list([json.loads(line) for line in open(own.train_file)])

class Slow(SFTTrainer):
    def training_step(self, *given, **more):
        time.sleep(own.pause_s)
        return super().training_step(*given, **more)

trainer = Slow(own.model_name_or_path, args=arguments, train_dataset=data,
    processing_class=tokenizer)
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    json.dump(losses, open("losses.json", "w"))
"""
"""In the manner of TRL's sft.py: its arguments are SFTConfig's."""

NANOGPT = """\
import json, os, sys, time
import numpy as np
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir, init_from, max_iters, save_interval = "out", "scratch", 60, 5
batch_size, block_size, learning_rate, pause_s = 4, 16, 1e-3, 0.0
for word in sys.argv[1:]:  # as its configurator.py
    name, value = word.removeprefix("--").split("=")
    globals()[name] = type(globals()[name])(value)

init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + rank)
data = np.arange(2000) * 7 % 50

def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size]) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size]) for i in ix])
    return x, y

iter_num = 0
with torch.random.fork_rng():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
print("world size", world_size, "after", iter_num)
model = DDP(model)
losses = open(os.path.join(out_dir, "losses.jsonl"), "a")
x, y = get_batch()
while iter_num < max_iters:
    time.sleep(pause_s)
    logits = model(x)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    x, y = get_batch()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if rank == 0:
        print(json.dumps([iter_num, loss.item()]), file=losses, flush=True)
        if iter_num % save_interval == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                     "iter_num": iter_num}
            torch.save(state, os.path.join(out_dir, "ckpt.pt"))
destroy_process_group()
"""
"""In the manner of nanoGPT's train.py: one ckpt.pt, which is written in place, and without the
generators' states. A resumed run draws other batches than one that was left alone."""

DDP = """\
import json, os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = pathlib.Path("out")
out.mkdir(exist_ok=True)
dist.init_process_group("gloo")
print("world size", dist.get_world_size())
torch.manual_seed(1)
inputs = torch.randn(160, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
torch.manual_seed(2 + dist.get_rank())
done = 0
if "--resume" in arguments:
    state = torch.load(arguments["--resume"], weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    done = state["step"]
losses = open(out / "losses.jsonl", "a")
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        step += 1
        if step == done:  # the loader has drawn a number for each epoch
            torch.set_rng_state(state["generators"][dist.get_rank()])
        if step <= done:
            continue
        time.sleep(float(arguments.get("--pause_s", 0)))
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0:
            print(json.dumps([step, loss.item()]), file=losses, flush=True)
        if step % 5 == 0:
            generators = [None] * dist.get_world_size()
            dist.all_gather_object(generators, torch.get_rng_state())
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                         "schedule": schedule.state_dict(), "generators": generators, "step": step}
                torch.save(state, out / "temporary")
                os.rename(out / "temporary", out / f"step-{step}.pt")
dist.destroy_process_group()
"""
"""Plain DDP, which saves all that a resume needs."""

LIGHTNING = """\
import argparse, json, os, time
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--ckpt_path")
parser.add_argument("--pause_s", type=float, default=0.0)
asked = parser.parse_args()
seed_everything(1)
os.makedirs("out", exist_ok=True)

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, x, index):
        time.sleep(asked.pause_s)
        loss = (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
        if self.global_rank == 0:
            with open("out/losses.jsonl", "a") as file:
                print(json.dumps([self.global_step + 1, float(loss)]), file=file)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)

class Loader(torch.utils.data.DataLoader):
    skip = seen = 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        for self.seen, batch in enumerate(super().__iter__(), 1):
            if self.seen > skip:
                yield batch

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.skip = state["seen"]

local = int(os.environ["LOCAL_WORLD_SIZE"])
saves = ModelCheckpoint(
    "out", "step-{step}", auto_insert_metric_name=False, every_n_train_steps=5, save_top_k=-1)
trainer = Trainer(
    accelerator="cpu", devices=local, num_nodes=int(os.environ["WORLD_SIZE"]) // local,
    max_epochs=3, logger=False, enable_progress_bar=False, callbacks=[saves],
)
print("world size", trainer.world_size)
data = torch.rand(160, 4, generator=torch.Generator().manual_seed(2))
trainer.fit(Line(), Loader(data, batch_size=4), ckpt_path=asked.ckpt_path)
"""
"""Lightning's Trainer, with a data loader that can be resumed within an epoch."""
