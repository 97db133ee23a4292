"""`slurmft run`: programs that know nothing of slurmft, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import slurmft as api
from slurmft.core import fingerprint
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.node.watchdog import process_state
from slurmft.programs import submission
from slurmft.programs.description import OwnProgram
from slurmft.runs.rundir import RunDir
from tests.conftest import HOSTILE, Done, assert_two_lines, slurmft
from tests.support import PATIENCE_S, until
from tests.support.own_programs import COUNTS, PLACES, write

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run(*words: str, follow: bool = True, imported: bool = True) -> Done:
    """Runs a program; `imported`: slurmft's own processes are forked, as their imports are not what
    is tested. The program itself always starts anew."""
    flags = ("--follow",) if follow else ()
    return slurmft("run", "--cluster", "local", *flags, *words, imported=imported)


def lines_of(run: RunDir, rank: int) -> list[str]:
    """What a rank printed, without stamps."""
    text = run.rank_log(rank).read_text(errors="replace")
    return [line.partition(" ")[2] for line in text.split("\n")[:-1]]


@pytest.mark.parametrize(
    ("flags", "world", "local_world"),
    [
        (("--nodes", "2", "--nproc-per-node", "2"), 4, 2),
        (("--nodes", "2", "--nproc-per-node", "2", "--per", "process"), 4, 2),
        (("--nodes", "2", "--nproc-per-node", "2", "--per", "node"), 2, 1),
    ],
)
def test_places(
    here: Path, flags: tuple[str, ...], world: int, local_world: int
) -> None:
    write(here, "places.py", PLACES)
    done = run(*flags, "--", "places.py")
    assert done.code == 0, done.err
    found = [lines_of(done.run, rank)[-1].split() for rank in range(world)]
    assert [int(place[0]) for place in found] == list(range(world))
    assert [int(place[1]) for place in found] == list(range(local_world)) * (
        world // local_world
    )
    assert {(place[2], place[3]) for place in found} == {(str(world), str(local_world))}
    assert len({(place[4], place[5]) for place in found}) == 1
    assert " ".join(found[0]) in done.out  # followed


def test_module_and_its_arguments(here: Path) -> None:
    (here / "package").mkdir()
    write(here / "package", "__init__.py", "")
    write(here / "package", "train.py", "import sys; print(sys.argv[1:])")
    arguments = ["--text", "a 'b' \"c\" $HOME", "--", "{latest}"]
    done = run("--", "-m", "package.train", *arguments, imported=False)
    assert done.code == 0, done.err
    assert str(arguments) in done.out
    assert done.run.path.name.startswith("package.train-")


def stop_once(done: RunDir) -> None:
    """As `scancel --signal` or a preemption would: every node's task gets the signal."""
    log = done.rank_log(0)
    until(lambda: log.exists() and "did 7" in log.read_text(), every_s=0.02)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"slurmft.node.task" in words and str(done.path).encode() in words:
            os.kill(int(path.parent.name), signal.SIGTERM)


@pytest.mark.parametrize(
    "given",
    [
        "SIGTERM",
        pytest.param("SIGUSR1", marks=pytest.mark.extra("programs")),
        pytest.param("none", marks=pytest.mark.extra("programs")),
    ],
)
def test_stop_and_resume(here: Path, given: str) -> None:
    """What handles the signal ends with 0 and has saved; what does not dies of it, and starts from
    the checkpoint before."""
    write(here, "count.py", COUNTS)
    name = "SIGTERM" if given == "none" else given
    started = run(
        *(
            "--nodes",
            "2",
            "--checkpoint-dir",
            "out",
            "--resume-args",
            "--resume {latest}",
        ),
        *("--result-file", "out/result.json", "--stop-signal", name),
        *("--", "count.py", "--out", "out", "--on", given, "--steps", "40"),
        follow=False,
    )
    assert started.code == 0, started.err
    stop_once(started.run)
    done = slurmft("follow", str(started.run.path))
    assert done.code == 0, done.err
    said = lines_of(started.run, 0)
    starts = [int(line.split()[-1]) for line in said if line.startswith("starts after")]
    assert starts[0] == 0
    before = [int(line.split()[1]) for line in said[: said.index(f"starts after {starts[1]}")]
              if line.startswith("did")]  # fmt: skip
    saved = before[-1] // 5 * 5  # or the one before, where it was killed within a save
    assert starts[1] in (
        {saved, max(5, saved - 5)} if given == "none" else {before[-1]}
    )
    assert f"the program gets {name}" in "\n".join(said)
    states = [state.state for state in started.run.history()]
    assert states == [
        "submitted",
        "running",
        "stopping",
        "requeued",
        "running",
        "finished",
    ]
    result = started.run.read_result()
    assert result is not None
    assert result["metrics"] == {"score": 0.5}
    assert "score 0.5000" in slurmft("list", "--runs-dir", "runs").out


def test_result_of_a_program_that_diverged(here: Path) -> None:
    text = "open('r.json', 'w').write('{\"loss\": NaN, \"perplexity\": 1e25, \"n\": true}')\n"
    write(here, "diverges.py", text)
    done = run("--result-file", "r.json", "--per", "process", "--", "diverges.py")
    assert done.code == 0, done.err
    assert done.result["metrics"] == {"loss": None, "perplexity": 1e25}
    assert re.search(r"loss +nan\n +perplexity +1\.0000e\+25\n", done.out), done.out
    assert "1.0000e+25" in slurmft("list", "--runs-dir", "runs").out


def test_finished_in_spite_of_the_signal(here: Path) -> None:
    """With --finished-file, an exit code of 0 after the signal is an end."""
    text = (
        "import pathlib, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
        "print('did 7')\ntime.sleep(3); pathlib.Path('done').touch()\n"
    )
    write(here, "late.py", text)
    started = run("--finished-file", "done", "--", "late.py", follow=False)
    stop_once(started.run)
    assert slurmft("follow", str(started.run.path)).code == 0
    assert [s.state for s in started.run.history()].count("running") == 1


def test_outputs_of_a_run_that_has_not_ended_are_refused(here: Path) -> None:
    """Each run would resume from the other's checkpoints, and take the other's result."""
    write(here, "wait.py", "import time\ntime.sleep(60)\n")
    (here / "link").symlink_to("out")

    def submitted(**outputs: str) -> api.Run:
        return api.run("wait.py", cluster="local", per="process", **outputs)

    first = submitted(checkpoint_dir="out", result_file="result.json")
    sharing: list[dict[str, str]] = [
        {"checkpoint_dir": "link/"},
        {"finished_file": "other/../result.json"},
        {"result_file": str(here / "result.json")},
        # Each would take the other's folder for a checkpoint.
        {"checkpoint_dir": "out/seed-2"},
        {"checkpoint_dir": "."},
    ]
    for outputs in sharing:
        with pytest.raises(UsageError, match=f"{first.path.name}', which is"):
            submitted(**outputs)
    first.cancel()
    until(lambda: first.state == "cancelled")
    second = submitted(checkpoint_dir="out")
    # The run that resumes does not stand in its own way; what has taken its place does.
    with pytest.raises(UsageError, match=f"{second.path.name}', which is"):
        first.resume()
    second.cancel()
    until(lambda: second.state == "cancelled")
    first.resume()
    first.cancel()


def test_outputs_that_another_run_has_written_since_are_refused(here: Path) -> None:
    """A run that resumed would continue the other's training, and take its result."""
    text = (
        "import pathlib, sys\n"
        "pathlib.Path('out').mkdir(exist_ok=True)\n"
        "for name in sys.argv[1:]: pathlib.Path(name).write_text('1')\n"
        "sys.exit(3)\n"
    )
    write(here, "writes.py", text)

    def failed(*written: str) -> api.Run:
        flags = {"cluster": "local", "per": "process"}
        outputs = {"checkpoint_dir": "out", "result_file": "result.json"}
        run = api.run("writes.py", *written, **flags, **outputs)
        until(lambda: run.state == "failed")
        return run

    first = failed("out/step-1.pt", "result.json")
    second = failed()
    first.resume()
    until(lambda: first.state == "failed")
    for name in ("out/step-1.pt", "result.json"):
        second = failed(name)
        with pytest.raises(UsageError) as refusal:
            first.resume()
        message = refusal.value.message
        assert message.startswith(repr(str(here / name))), message
        assert repr(second.path.name) in message
        (here / name).rename(here / "moved")
    first.resume()
    until(lambda: first.state == "failed")


def test_two_submissions_at_once_with_the_same_outputs(here: Path) -> None:
    """Neither run is there when the other one is checked."""
    write(here, "wait.py", "import time\ntime.sleep(60)\n")
    flags = ("--per", "process", "--checkpoint-dir", "out", "--", "wait.py")
    with ThreadPoolExecutor(3) as pool:
        tries = [pool.submit(run, *flags, follow=False, imported=False) for _ in "123"]
    codes = sorted(each.result().code for each in tries)
    assert codes == [0, 2, 2], [each.result().err for each in tries]
    [path] = Path("runs").glob("*")
    assert not list(Path("runs").glob(".outputs-*"))
    slurmft("cancel", str(path))


def test_outputs_of_what_no_job_writes_and_of_others(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission that was killed is a warning: nothing would ever end it. What somebody else has
    written into the folder of runs is none."""
    write(here, "wait.py", "import time\ntime.sleep(60)\n")

    def submit() -> None:
        run = api.run("wait.py", cluster="local", per="process", checkpoint_dir="out")
        run.cancel()
        until(lambda: run.state == "cancelled")

    submit()
    [path] = Path("runs").iterdir()
    killed = RunDir.create(RunDir(path).load_own_config())
    killed.set_state("submitted")
    name = killed.path.name
    with pytest.warns(SlurmftWarning, match=f"also that of the run '{name}'"):
        submit()
    monkeypatch.setattr(RunDir, "is_own", lambda self: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        submit()


def test_attached(here: Path) -> None:
    """A program that attaches is asked, and not signalled; its records are there."""
    text = """\
import time
import slurmft
with slurmft.attach() as job:
    latest = job.latest_checkpoint()
    first = int((latest / "n").read_text()) + 1 if latest else 1
    for n in range(first, 61):
        time.sleep(0.1)
        job.step(n, total=60, loss=1 / n)
        print("did", n)
        if job.should_stop():
            with job.checkpoint(n) as folder:
                if folder:
                    (folder / "n").write_text(str(n))
            break
    else:
        job.result(score=1.0)
"""
    write(here, "attached.py", text)
    started = run("--per", "node", "--", "attached.py", follow=False)
    stop_once(started.run)
    done = slurmft("follow", str(started.run.path))
    assert done.code == 0, done.err
    steps = [r["step"] for r in map(json.loads, started.run.records.read_text().splitlines())
             if r["event"] == "step"]  # fmt: skip
    assert steps == list(range(1, 61))  # none was done again
    assert started.run.attempt_number() == 2


def test_failure_is_told_once(here: Path) -> None:
    """A typo ends the run at once: it is not started again, and its traceback is shown."""
    write(here, "wrong.py", "import sys\nprint('began', flush=True)\nprnt('x')\n")
    done = run("--nodes", "2", "--", "wrong.py")
    assert done.code == 1
    assert "NameError: name 'prnt' is not defined" in done.err
    # Beside the other lines of rank 0, and not again below them.
    assert (done.out + done.err).count('wrong.py", line 3') == 1
    assert sum(line == "began" for line in lines_of(done.run, 0)) == 1


def test_exit_code_is_the_programs(here: Path) -> None:
    done = run("--per", "node", "--", "bash", "-c", "echo some words; exit 3")
    assert done.code == 3
    assert "exit code 3; last line: 'some words'" in done.err
    done = run("--per", "node", "--", "bash", "-c", "exit 4")
    assert "exit code 4; it has printed nothing" in done.err


def test_starter_that_is_not_torchrun_is_not_called_so(here: Path) -> None:
    text = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(9)\n"
    write(here, "kills.py", text)
    done = run("--per", "node", "--max-requeues", "0", "--", "kills.py")
    assert done.code == 1
    assert "error: the process that starts the program ended with exit code" in done.err


def test_nothing_is_left_behind(here: Path) -> None:
    done = run("--per", "node", "--", "bash", "-c", "sleep 4711 & echo $!")
    assert done.code == 0, done.err
    left = int(lines_of(done.run, 0)[-1])
    until(lambda: process_state(left) in ("gone", "Z"))


NAP = """
import os
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "SECONDS"])
"""


@pytest.mark.parametrize("code", [0, 1])
def test_what_a_program_has_started_ends_with_it(here: Path, code: int) -> None:
    """As under a scheduler: also what has a session of its own, and whose parent has ended."""
    seconds = str(98_700 + code)
    write(here, "nap.py", NAP.replace("SECONDS", seconds))
    start = "import subprocess, sys\nnap = [sys.executable, 'nap.py']\n"
    start += "subprocess.run(nap, start_new_session=True)\nprint('has started one')\n"
    write(here, "leaves.py", f"{start}sys.exit({code})\n")
    done = run("--max-requeues", "0", "--max-restarts", "0", "--", "leaves.py")
    assert done.code == code, done.err
    assert "has started one" in lines_of(done.run, 0)
    until(lambda: not sleeping(seconds), lambda: sleeping(seconds))


def sleeping(seconds: str) -> list[Path]:
    """The processes `sleep SECONDS`."""
    line = f"sleep\0{seconds}\0"
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_text() == line:
                found.append(path)
    return found


def test_one_process_fails_others_end(here: Path) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(4)\ntime.sleep(1000)\n"
    write(here, "one.py", text)
    done = run("--per", "process", "--nproc-per-node", "2", "--", "one.py")
    assert done.code == 4


def test_nodes_that_have_finished_start_again_with_others(here: Path) -> None:
    """Where a rank dies after those of the other node have ended: at once, and not after the 300 s
    for which a torchrun of torch's waits there."""
    text = (
        "import os, pathlib, time\n"
        "died = pathlib.Path('died')\n"
        "if os.environ['RANK'] == '0' and not died.exists():\n"
        "    while not pathlib.Path('ended').exists(): time.sleep(0.1)\n"
        "    died.touch()\n"
        "    os.kill(os.getpid(), 9)\n"
        "pathlib.Path('ended').touch()\n"
    )
    write(here, "last.py", text)
    started_at = time.monotonic()
    done = run("--nodes", "2", "--nproc-per-node", "1", "--", "last.py")
    assert done.code == 0, done.err
    assert time.monotonic() - started_at < 300
    starts = [done.run.rank_log(rank).read_text().count("attempt 1") for rank in (0, 1)]
    assert starts == [2, 2]
    assert done.run.attempt_number() == 1


def test_killed_rank_is_started_again(here: Path) -> None:
    """By torchrun, within the job; it resumes from what it has written."""
    text = COUNTS.replace("print('did', step)", "").replace(
        "    if stop:\n        sys.exit(0)",
        "    if step == 12 and not asked.resume: os.kill(os.getpid(), 9)",
    )
    write(here, "dies.py", text)
    done = run(
        *("--checkpoint-dir", "out", "--resume-args", "--resume {latest}"),
        *("--", "dies.py", "--out", "out"),
    )
    assert done.code == 0, done.err
    starts = [line for line in lines_of(done.run, 0) if line.startswith("starts after")]
    assert starts == ["starts after 0", "starts after 10"]
    assert done.run.attempt_number() == 1


def test_silence_is_a_hang(here: Path) -> None:
    """Stacks of the Python that is silent are kept."""
    write(
        here, "hangs.py", "import time\nprint('began', flush=True)\ntime.sleep(1000)\n"
    )
    done = run("--hang-timeout-s", "3", "--max-requeues", "0", "--", "hangs.py")
    assert done.code != 0
    assert "hangs: no output for" in done.err
    assert 'hangs.py", line 3' in done.run.stacks(0).read_text()


HANGS_IN_STEP = """
import time, sys, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000))
for step in range(6):
    print("step", step, flush=True)
    if step == 4 and rank == 3:
        time.sleep(1000)
    model(torch.ones(4, 1000)).sum().backward()
"""


def test_the_collective_that_hangs_has_a_name(here: Path) -> None:
    """The rank that does not come is named, and not one of those that wait."""
    write(here, "ddp.py", HANGS_IN_STEP)
    flags = ("--nodes", "2", "--nproc-per-node", "2", "--max-requeues", "0")
    # Also the longest silence before the first step, in which torch is imported.
    done = run(*flags, "--hang-timeout-s", "45", "--", "ddp.py")
    assert done.code != 0
    said = re.search(
        r"the job hangs: rank 3 on \S+ has not come to all-reduce \d+ of 3.8 MiB "
        r"\(backward, ddp.py:11\); 3 ranks have waited \S+ \S+; rank 3 is at ddp.py:10",
        done.err,
    )
    assert said is not None, done.err
    status = slurmft("status", str(done.run.path), "--json")
    assert said[0] in json.loads(status.out)["failures"][-1]["message"]
    assert said[0] in slurmft("logs", str(done.run.path)).out


def test_progress_bars_and_bytes(here: Path) -> None:
    """A bar is in the log, but not each of its states; what is no text harms nothing."""
    text = """
import sys, time
for n in range(2000):
    sys.stderr.write(f"\\r{n:5}/2000 of the bar")
sys.stderr.write("\\n")
sys.stdout.buffer.write(bytes(range(256)) * 2000)
print("\\nwindows\\r\\nlast", end="")
"""
    write(here, "bar.py", text)
    done = run("--", "bar.py")
    assert done.code == 0, done.err
    log = done.run.rank_log(0).read_bytes()
    assert b" 1999/2000 of the bar" in log
    assert log.count(b"of the bar") < 10
    assert lines_of(done.run, 0)[-2:] == ["windows", "last"]


def test_dry_run(here: Path) -> None:
    write(here, "train.py", "")
    done = run("--dry-run", "--", "train.py", "--x", "1", follow=False)
    assert done.code == 0
    assert "train.py' --x 1\n  where " in done.out
    assert f"in {here}" in done.out
    assert "train.py" in done.out
    assert "--x 1" in done.out
    assert not (here / "runs").exists()
    done = run(
        "--dry-run", "--integrate", "transformers", "--", "train.py", follow=False
    )
    assert "-m slurmft.plugins.integrations transformers" in done.out


def test_code_is_that_of_the_submission(here: Path) -> None:
    """Of a script and of a module, with what they import; files that they open are those of the
    folder, and a change of one that an argument names is told."""
    (here / "package").mkdir()
    write(here / "package", "__init__.py", "")
    for name in ("helper.py", "package/helper.py"):
        write(here, name, "WORD = 'old'\n")
    text = "import sys\nfrom {} import WORD\nprint('word', WORD, open(sys.argv[1]).read())\n"
    write(here, "train.py", text.format("helper"))
    write(here, "package/train.py", text.format("package.helper"))
    write(here, "data.txt", "before")
    waits = ("--setup", "while [ ! -e go ]; do sleep 0.1; done")
    runs = [
        run(*waits, "--", *words, "data.txt", follow=False, imported=False).run
        for words in (["train.py"], ["-m", "package.train"])
    ]
    strict = run(
        *waits, "--strict", "--", "train.py", "data.txt", follow=False, imported=False
    ).run
    changed = run(
        *waits, "--", "train.py", "data.txt", follow=False, imported=False
    ).run
    frozen = changed.code / "helper.py"
    frozen.chmod(0o644)
    frozen.write_text("raise SystemExit('changed')")
    for path in here.rglob("helper.py"):
        if runs[0].path.parent not in path.parents:
            path.write_text("raise SystemExit('new')")
    write(here, "data.txt", "after, and longer")
    write(here, "go", "")
    for each in runs:
        done = slurmft("follow", str(each.path))
        assert done.code == 0, done.err
        assert "word old after, and longer" in done.out
        shown = slurmft("status", str(each.path)).out
        assert "changed since submission: data.txt" in shown
        assert " files, as it was at submission" in shown
    refused = slurmft("follow", str(strict.path))
    assert refused.code != 0
    assert "--strict" in refused.err
    assert "data.txt" in refused.err
    problem = f"the frozen code was changed since the submission: {str(frozen)!r}"
    for command in ("follow", "resume"):
        refused = slurmft(command, str(changed.path))
        assert refused.code == 1
        assert problem in refused.err


def test_arguments_stay_as_they_are(here: Path) -> None:
    """Also one that is the folder of the module, or the script itself."""
    text = "import sys; print(sys.argv[1:])"
    for name in ("train.py", "module.py"):
        write(here, name, text)
    for words in (["-m", "module", str(here)], ["train.py", str(here / "train.py")]):
        done = run("--", *words)
        assert done.code == 0, done.err
        assert str(words[-1:]) in done.out


def test_result_has_the_ranks_of_the_last_start(here: Path) -> None:
    """Those of earlier ones, which were more, have left their logs."""
    text = "import os, sys; sys.exit(os.environ['WORLD_SIZE'] == '2')"
    write(here, "train.py", text)
    size = ("--nodes", "2", "--nproc-per-node", "1")
    failed = run("--per", "process", *size, "--", "train.py")
    assert failed.code == 1
    assert failed.run.rank_log(1).exists()
    resumed = api.Run(str(failed.run.path)).resume(nodes=1)
    assert resumed.wait(PATIENCE_S)["world_size"] == 1


def test_result_file_of_a_program_that_attaches(here: Path) -> None:
    """Its library may report a result, too: both are there, the library's first."""
    text = """\
import slurmft
with slurmft.attach() as job:
    open("r", "w").write('{"x": 1.5, "y": 2}')
    job.result(train_loss=0.5, x=1)
"""
    write(here, "train.py", text)
    done = run("--nproc-per-node", "1", "--result-file", "r", "--", "train.py")
    assert done.code == 0, done.err
    assert done.result["metrics"] == {"train_loss": 0.5, "x": 1.5, "y": 2}
    assert done.result["primary_metric"] == "train_loss"


def test_from_python(here: Path) -> None:
    write(
        here,
        "train.py",
        "import json, sys; json.dump({'x': float(sys.argv[1])}, open('r', 'w'))",
    )
    run = api.run("train.py", "2.5", cluster="local", result_file="r")
    assert run.wait(PATIENCE_S)["metrics"] == {"x": 2.5}
    assert run.config.submission.command.startswith(
        "slurmft.run('train.py', '2.5', cluster="
    )
    with pytest.raises(UsageError, match="stop_sgnal"):
        api.run("train.py", stop_sgnal="TERM")


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--nodes", "2"), "no -- before the program"),
        (("train.py", "--epochs", "3"), "no -- before the program 'train.py'"),
        (("--nodse", "2", "train.py"), "--nodse"),
        (("--",), "no program after --"),
        (("--", "nowhere.py"), "no such program: 'nowhere.py'"),
        (("--", "nowhere"), "no such program: 'nowhere'"),
        (("--", "here"), "'here' is not on the PATH, but in this folder"),
        (("--", "./here"), "'./here' is not executable"),
        (("--", "-m"), "no module after -m"),
        (("--per", "torchrun", "--", "true"), "'true' is none"),
        (("--integrate", "transformers", "--", "true"), "is for Python programs"),
        (("--per", "rank", "--", "true"), "'rank'"),
        (("--stop-signal", "TREM", "--", "true"), "--stop-signal TREM"),
        (("--resume-args", "{latest}", "--", "true"), "needs --checkpoint-dir DIR"),
        (
            ("--resume-args", "--resume={latest}", "--", "true"),
            "--resume-args --resume={latest} needs --checkpoint-dir DIR",
        ),
        (("--sbatch", "--no-requeue", "--", "true"), "--sbatch"),
    ],
)
def test_bad_input(here: Path, words: tuple[str, ...], fact: str) -> None:
    write(here, "here", "no program")
    assert_two_lines(run(*words, follow=False), fact)
    assert not (here / "runs").exists()


@pytest.mark.parametrize("script", ["trian.py", "code/trian.py", "gone/train.py"])
def test_script_that_is_not_there(here: Path, script: str) -> None:
    """The nearest one in its folder is named, where there is one."""
    write(here, "train.py", "")
    (here / "code").mkdir()
    write(here, "code/train.py", "")
    done = run("--", script, follow=False)
    assert_two_lines(done, f"no such program: {script!r}")
    meant = script.replace("trian", "train")
    hint = f"hint: did you mean {meant}?"
    if "gone" in script:
        hint = "hint: give its path"
    assert hint in done.err


def test_argument_that_is_not_utf_8(here: Path) -> None:
    done = run("--", "true", "a\udcffb", follow=False, imported=False)
    assert_two_lines(done, "not UTF-8")
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.py", "--epochs", "3"], "-- train.py --epochs 3"),
        (
            ["--nodes", "2", "--exclusive", "-m", "pack.train", "--lr=1"],
            "--nodes 2 --exclusive -- -m pack.train --lr=1",
        ),
        (
            ["--resume-args", "--from={latest}", "--nodes=2", "train.py"],
            "'--resume-args=--from={latest}' --nodes=2 -- train.py",
        ),
    ],
)
def test_line_with_the_separator_is_shown(words: list[str], line: str) -> None:
    refused = slurmft("run", *words, imported=True)
    assert refused.err.splitlines()[-1] == f"hint: slurmft run {line}"


def test_half_written_checkpoints_are_passed_over(here: Path) -> None:
    def made(name: str, *files: str) -> Path:
        (here / "out" / name).mkdir(parents=True)
        for file in files:
            (here / "out" / name / file).touch()
        time.sleep(0.02)
        return here / "out" / name

    def newest(**more: Any) -> Path | None:
        return own(**more).newest_checkpoint()

    def own(**more: Any) -> OwnProgram:
        return OwnProgram(
            argv=("x",), file="x", folder=str(here), checkpoint_dir="out", **more
        )

    assert newest() is None
    old = made("checkpoint-900", "model", "rng_0", "rng_1")
    since_ns = own().marked().since_ns
    assert newest(since_ns=since_ns) is None  # of another run
    first = made("checkpoint-10", "model", "rng_0", "rng_1")
    made("runs", "events.1")  # logs
    made("tmp-checkpoint-15", "model", "rng_0")
    second = made("checkpoint-20", "model", "rng_0")  # of fewer ranks
    assert newest(since_ns=since_ns) == second
    made("checkpoint-30", "rng_0")
    assert newest(since_ns=since_ns) == second
    assert old.exists()
    assert first.exists()


def test_files_have_the_umask_of_the_user(here: Path) -> None:
    """Those that a program writes, attached or not; what is in the run directory is private by
    its folder."""
    for name, text in {
        "plain.py": "open('plain', 'w')",
        "attached.py": "import slurmft\nwith slurmft.attach():\n    open('attached', 'w')",
    }.items():
        write(here, name, text)
        before = os.umask(0o027)
        try:
            done = run("--", name, imported=False)
        finally:
            os.umask(before)
        assert done.code == 0, done.err
        assert (here / name.removesuffix(".py")).stat().st_mode & 0o777 == 0o640
        assert done.run.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("is_git", [True, False])
def test_what_a_program_writes_is_no_code(here: Path, is_git: bool) -> None:
    """Else a second submission would be refused: its checkpoints are too large to be copied."""
    write(here, "train.py", "")
    if is_git:
        subprocess.run(["git", "init", "-q"], cwd=here, check=True)
    flags = ("--dry-run", "--snapshot-limit-mb", "1")
    for name in ("snapshot.pt", "out/step-1/model"):
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(2**21))
        folder = "." if name == "snapshot.pt" else "out"
        done = run(*flags, "--checkpoint-dir", folder, "--", "train.py", follow=False)
        assert done.code == 0, done.err
        assert ", 1 file" in done.out
        refused = run(*flags, "--", "train.py", follow=False)
        assert "is too large to be copied" in refused.err
        path.unlink()


def test_code_and_folders_among_arguments_are_compared(here: Path) -> None:
    """Not the program's own file, nor a folder in which it writes."""
    for name in ("train.py", "conf.py", "data/a.txt", "out/step-1.pt"):
        (here / name).parent.mkdir(exist_ok=True)
        write(here, name, "x = 1")
    words = [
        "train.py",
        "conf.py",
        "--data=data",
        "--out",
        "out",
        str(here),
        "train.py",
    ]
    config = submission.configure(words, {"checkpoint_dir": "out"}, {})
    assert set(config.program.inputs) == {str(here / "conf.py"), str(here / "data")}
    write(here, "conf.py", "x = 20")
    write(here, "data/b.txt", "more")
    changed = fingerprint.changes(config)
    assert changed.keys() - {"slurmft"} == {str(here / "conf.py"), str(here / "data")}
    # Once it runs, it may write into a folder.
    changed = fingerprint.changes(config, has_run=True)
    assert changed.keys() - {"slurmft"} == {str(here / "conf.py")}


def test_first_line_of_a_message_is_shown(here: Path) -> None:
    """As that of torch.load, which ends with advice; also with the prefix of torch's ranks."""
    text = """\
import sys
def load():
    lines = ["the file is cut off", "", "  see: the docs", "Check the documentation"]
    raise RuntimeError("\\n".join(lines))
try:
    load()
except RuntimeError:
    import traceback
    for line in traceback.format_exc().splitlines():
        print("[rank0]: " + line, file=sys.stderr)
    print("bye", file=sys.stderr)
sys.exit(1)
"""
    write(here, "train.py", text)
    done = run("--", "train.py")
    assert done.code == 1
    assert "error: RuntimeError: the file is cut off (exit code 1)" in done.err
    assert "Check the documentation" in done.err  # of the traceback


def test_what_a_stranger_writes_into_the_store_ends_an_attempt(here: Path) -> None:
    """Not the run, also where the program keeps no checkpoint."""
    text = """\
import os
import torch.distributed as dist
from torch.distributed import TCPStore
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
store.set("word", "1")
if os.environ["SLURMFT_ATTEMPT"] == "1":
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stranger = TCPStore(*address)
    for key in stranger.list_keys():
        stranger.set(key.removeprefix("/"), "of a stranger")
print(store.get("word"))
"""
    write(here, "train.py", text)
    done = run("--", "train.py")
    assert done.code == 0, done.err
    states = [each.state for each in done.run.history()]
    assert states.count("requeued") == 1
    (failure, *_) = done.run.all_failures()
    assert "somebody else has written into this job's store" in failure.message
    assert "nothing of it was used; the next start" in str(failure.hint)


def test_time_of_a_program_that_attaches_is_that_of_all_attempts(here: Path) -> None:
    text = """\
import os, time
import slurmft
with slurmft.attach() as job:
    if not job.latest_checkpoint():
        time.sleep(4)
        with job.checkpoint(1) as folder:
            (folder / "x").touch()
        os._exit(75)
    job.result(score=1.0)
"""
    write(here, "train.py", text)
    done = run("--", "train.py")
    assert done.code == 0, done.err
    result = done.run.read_result()
    assert result is not None
    assert result["attempts"] == 2
    starts = [each.time for each in done.run.history() if each.state == "running"]
    assert result["wall_s"] > starts[1] - starts[0] > 4


JOINS = """\
import os, pathlib
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
values = [None, None]
dist.all_gather_object(values, {"rank": dist.get_rank()})
store = _get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
pathlib.Path(f"secret-{dist.get_rank()}").write_text(os.environ.get("SLURMFT_STORE_SECRET", ""))
print(type(store).__name__, one.item(), values)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ((), "SealedStore"),
        (("--per", "process"), "SealedStore"),
        (("--open-rendezvous",), "TCPStore"),
    ],
)
def test_store_of_the_process_group_is_sealed(
    here: Path, flags: tuple[str, ...], kind: str
) -> None:
    """And the secret is written nowhere."""
    write(here, "joins.py", JOINS)
    done = run("--nodes", "2", "--nproc-per-node", "1", *flags, "--", "joins.py")
    assert done.code == 0, done.err
    expected = f"{kind} 2.0 [{{'rank': 0}}, {{'rank': 1}}]"
    assert [lines_of(done.run, rank)[-1] for rank in (0, 1)] == [expected] * 2
    secret, other = [(here / f"secret-{rank}").read_text() for rank in (0, 1)]
    assert secret == other
    assert len(secret) == (64 if kind == "SealedStore" else 0)
    if secret:
        assert secret not in done.out + done.err
        for path in done.run.path.rglob("*"):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path
