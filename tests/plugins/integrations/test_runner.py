"""`python -m slurmft.plugins.integrations`: a script runs as Python itself would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.plugins.integrations import transformers
from slurmft.runs.rundir import RUN_DIR
from tests.support import CHECKOUT, PATIENCE_S

pytestmark = pytest.mark.extra("integrations")

SHOW = """
import sys, os
import beside
print(sys.argv, sys.path[0], __name__, __file__)
print(sys.modules["__main__"].__dict__ is globals(), "transformers" in sys.modules)
{then}
"""

CASES = {
    "ends": "",
    "exits": "sys.exit(7)",
    "exits with words": "sys.exit('no data')",
    "raises": "def f():\n    raise ValueError('no such label')\nf()",
    "raises while handling": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError(1)",
    "has an error of syntax": "x = = 1",
    "spawns": "if __name__ == '__main__':\n    import multiprocessing as m\n"
    "    pool = m.get_context('spawn').Pool(1)\n"
    "    print(pool.map(beside.double, [4]))\n"
    # Or it is killed with what it has not written yet.
    "    pool.close()\n    pool.join()",
}


def run(folder: Path, *command: str) -> tuple[int, str, str]:
    environment = {k: v for k, v in os.environ.items() if k != RUN_DIR}
    environment["PYTHONPATH"] = str(CHECKOUT)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("then", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("how", ["script", "link", "module"])
def test_as_without(tmp_path: Path, then: str, how: str) -> None:
    """The same output, traceback and exit code; and its library is not imported for it."""
    folder = tmp_path / "my scripts"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW.format(then=then))
    (folder / "beside.py").write_text("def double(n):\n    return 2 * n\n")
    (tmp_path / "link.py").symlink_to(folder / "show.py")
    program = {
        "script": ["my scripts/show.py"],
        "link": ["link.py"],
        "module": ["-m", "show"],
    }[how]
    place = folder if how == "module" else tmp_path
    if how != "module":  # as it is in argv
        program = [str(tmp_path / program[0])]
    expected = run(place, *program, "--lr", "1e-3", "-m", "a b")
    runner = ("-m", "slurmft.plugins.integrations", "transformers")
    found = run(place, *runner, *program, "--lr", "1e-3", "-m", "a b")
    if how == "module":  # Python itself shows runpy's frames there
        expected = (*expected[:2], without_runpy(expected[2]))
    assert found == expected


def without_runpy(trace: str) -> str:
    lines = trace.splitlines(keepends=True)
    return "".join(line for line in lines if "<frozen runpy>" not in line)


def test_callback_outside_of_a_job(tmp_path: Path) -> None:
    """A script that has the callback runs by itself, too."""
    (tmp_path / "script.py").write_text("""
import torch
from transformers import Trainer, TrainingArguments
from slurmft.plugins.integrations.transformers import SlurmftCallback

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        return {"loss": (self.factor * x).square().mean()}

trainer = Trainer(
    Line(), TrainingArguments("out", max_steps=3, use_cpu=True, report_to=[], save_steps=2),
    train_dataset=[{"x": torch.ones(1)}] * 8, callbacks=[SlurmftCallback()],
)
trainer.train()
print("step", trainer.state.global_step)
""")
    code, out, err = run(tmp_path, "script.py")
    assert (code, out.splitlines()[-1]) == (0, "step 3")
    assert err.count("slurmft: not in a job") == 1
    assert (tmp_path / "out" / "checkpoint-3").is_dir()


def test_a_folder_without_a_mark_is_no_checkpoint_of_a_training(tmp_path: Path) -> None:
    """As another Trainer leaves it: nothing resumes from it, and nothing removes it."""
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 5}')
    assert "by another run" in transformers._problem(checkpoint, "")
    transformers._remove(checkpoint, "")
    assert checkpoint.is_dir()
