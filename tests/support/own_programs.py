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
