"""Which entries of --checkpoint-dir are checkpoints, which are whole, and who chooses one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from slurmft.node import sealed
from slurmft.node.rendezvous import TakenPortError, first_line, free_ports
from slurmft.node.sealed import Channel
from slurmft.programs import checkpoints, file_ends, start_point, submission
from slurmft.programs.description import OwnProgram, in_words
from slurmft.programs.process import is_of_loading
from slurmft.programs.start_point import StartPoint
from slurmft.runs.rundir import RunDir
from tests.conftest import records
from tests.programs.test_own_program import here, lines_of, run
from tests.support import until
from tests.support.made_runs import write_run
from tests.support.own_programs import write

__all__ = ["here"]  # a fixture: each test has a folder of its own, and is in it


def own(folder: Path, **more: Any) -> OwnProgram:
    settings = {"checkpoint_dir": "out", "resume_args": "--resume {latest}"} | more
    return OwnProgram(argv=("x",), file="x", folder=str(folder), **settings)


def make(folder: Path, *names: str) -> None:
    """Writes files one after another, each a second later."""
    for second, name in enumerate(names, start=1000):
        path = folder / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        os.utime(path, (second, second))
        if path.parent.name != "out":
            os.utime(path.parent, (second, second))


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (["ckpt.pt"], "ckpt.pt"),  # nanoGPT
        (["snapshot.pt"], "snapshot.pt"),  # torchrun's example
        (["epoch=1.ckpt", "last.ckpt"], "last.ckpt"),  # Lightning
        (["epoch-3.pt", "metrics-3.json"], "epoch-3.pt"),
        (["epoch-3.pt", "log.txt", "plot.png"], "epoch-3.pt"),
        # Trainer, at its end
        (
            ["checkpoint-9/m.bin", "checkpoint-10/m.bin", "model.safetensors"],
            "checkpoint-10",
        ),
        (["runs/events.out.tfevents.1", "checkpoint-5/m"], "checkpoint-5"),
        (["global_step5/m", "latest"], "global_step5"),  # DeepSpeed
        (["latest/model", "runs/x"], "latest"),
        (["state-1.json", "state-2.json"], "state-2.json"),
        (["step_5.pt", "step_6.pt.tmp", "tmp_7.pt", ".step_8.pt"], "step_5.pt"),
        (
            ["temperature-0.7.pt", "template", "temp-8.pt", "temp9.pt"],
            "temperature-0.7.pt",
        ),
        (["step_5/m", "step_6.tmp/m", "7.orbax-checkpoint-tmp-1/m"], "step_5"),
        # A folder that is not whole, by the length of its file, hides no file.
        (["ckpt.pt", "checkpoint-5/model.safetensors"], "ckpt.pt"),
        (["latest/model", "ckpt.safetensors", "step-5/a.safetensors"], "latest"),
        (["step_4/m.bin", "ckpt.pt", "step_5/model.safetensors"], "step_4"),
        # Numbered folders of samples and logs beside the checkpoints.
        (["ckpt.pt", "samples-20/a.txt"], "ckpt.pt"),
        (["ckpt.pt", "logs-1/events.out.tfevents.1"], "ckpt.pt"),
        (["ckpt.pt", "version_0/hparams.yaml"], "ckpt.pt"),
        (["last.ckpt", "offline-run-2026_1-x/run-x.wandb"], "last.ckpt"),
        (["latest/model.pt", "samples-20/a.txt"], "latest"),
        # The weights of the newest are not there yet.
        (["step-1/m.pt", "ckpt.pt", "step-2/config.json"], "step-1"),
        # Files one level down.
        (["step_10/model/.metadata", "step_10/o", "step_20/model/x"], "step_10"),
        # A file that not every one has.
        (["s-1/m.pt", "s-2/m.pt", "s-2/eval", "s-3/m.pt"], "s-3"),
        (["s-1/m.pt", "s-1/is_best", "s-2/m.pt"], "s-2"),
        (
            ["s-1/m", "s-1/ok", "s-2/m", "s-3/m", "s-3/ok", "s-4/m"],
            "s-3",
        ),
        (["config.json", "log.txt", "latest", "runs/x", "events.out.tfevents.7"], None),
        ([], None),
    ],
)
def test_what_counts(tmp_path: Path, names: list[str], newest: str | None) -> None:
    make(tmp_path, *names)
    checkpoint = own(tmp_path).newest_checkpoint()
    assert (checkpoint and checkpoint.name) == newest


def test_ties_go_by_number_and_own_files_are_none(tmp_path: Path) -> None:
    make(tmp_path, "step-900.pt", "step-1000.pt", "done.bin")
    for path in (tmp_path / "out").iterdir():
        os.utime(path, (1000, 1000))
    program = own(tmp_path, finished_file="out/done.bin")
    newest = program.newest_checkpoint()
    assert newest is not None
    assert newest.name == "step-1000.pt"


def test_a_file_that_is_written_again_is_new(tmp_path: Path) -> None:
    """Also one in a folder, whose own time stays."""
    for name in ("ckpt.pt", "last/model"):
        make(tmp_path, name)
        program = own(tmp_path).marked()
        assert program.newest_checkpoint() is None  # of another run
        (tmp_path / "out" / name).write_text("more")
        newest = program.newest_checkpoint()
        assert newest == tmp_path / "out" / name.partition("/")[0]
        (tmp_path / "out" / name).unlink()


def test_channels_are_no_checkpoints(tmp_path: Path) -> None:
    """Opening a FIFO would wait for a writer for ever."""
    make(tmp_path, "step-5.pt", "last/model")
    out = tmp_path / "out"
    os.mkfifo(out / "step-6.pt")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(out):
        listener.bind("step-7.pt")
        assert own(tmp_path).newest_checkpoint() == out / "step-5.pt"
    (out / "step-5.pt").unlink()
    os.mkfifo(out / "last" / "requests")
    assert own(tmp_path).newest_checkpoint() == out / "last"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
@pytest.mark.parametrize("name", ["step-2.pt", "step-2/model"])
def test_of_other_users_is_none(tmp_path: Path, name: str) -> None:
    """In a folder of a group: a checkpoint is often a pickle, which executes what it likes."""
    make(tmp_path, name.replace("2", "1"), name)
    program = own(tmp_path)
    newest = program.newest_checkpoint()
    assert newest is not None
    os.chown(newest, 54321, -1)
    assert program.newest_checkpoint() == newest.with_name(
        newest.name.replace("2", "1")
    )
    os.chown(tmp_path / "out", 54321, -1)  # also in a folder of that user's
    assert program.newest_checkpoint() != newest
    job = write_run(tmp_path / "run")
    point = StartPoint(job, program, 0, lambda: False)
    assert point.choose() == program.newest_checkpoint()
    [warning] = records(job, "warning")
    assert f"the checkpoint {newest.name!r} is passed over: " in warning["text"]
    assert "belongs to another user (uid 54321)" in warning["text"]
    os.chown(newest, 0, -1)
    assert program.newest_checkpoint() == newest
    link = newest.with_name("step-3.pt")
    outside = tmp_path / "outside.pt"
    outside.write_text("x")
    os.chown(outside, 54321, -1)
    link.symlink_to(outside)
    assert program.newest_checkpoint() == newest
    link.unlink()
    if newest.is_dir():
        os.chown(newest / "model", 54321, -1)
        assert program.newest_checkpoint() != newest


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
@pytest.mark.parametrize("name", ["step-2.pt", "step-2/model.pt"])
@pytest.mark.parametrize(("mode", "group"), [(0o664, 54321), (0o646, 0)])
def test_that_others_may_write_is_none(
    tmp_path: Path, name: str, mode: int, group: int
) -> None:
    make(tmp_path, "step-1.pt", name)
    program = own(tmp_path)
    path = tmp_path / "out" / name
    os.chown(path, 0, group)
    path.chmod(mode)
    newest = tmp_path / "out" / name.partition("/")[0]
    job = write_run(tmp_path / "run")
    point = StartPoint(job, program, 0, lambda: False)
    assert point.choose() == tmp_path / "out" / "step-1.pt"
    [warning] = records(job, "warning")
    assert f"others can write {str(path)!r} (mode {mode:04o})" in warning["text"]
    assert f"chmod -R go-w {newest}" in warning["text"]
    path.chmod(0o644)
    assert program.newest_checkpoint() == newest


def save_torch(path: Path) -> None:
    torch.save({"weights": torch.ones(5000)}, path)


def save_safetensors(path: Path) -> None:
    save_file({"weights": torch.ones(5000)}, path)


def save_older_torch(path: Path) -> None:
    model = torch.nn.Linear(50, 100)
    state = {"model": model.state_dict(), "steps": torch.arange(9), "step": 3}
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_numpy(path: Path) -> None:
    with open(path, "wb") as file:
        numpy.savez(file, weights=numpy.ones(5000))


def save_array(path: Path) -> None:
    numpy.save(path, numpy.ones(5000))


@pytest.mark.parametrize("length", [0, 5, 200, 15000])
@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("model-{}.pt", save_torch),
        ("model-{}.safetensors", save_safetensors),
        ("model-{}.npz", save_numpy),
        ("model-{}.npy", save_array),
        ("model-{}.ckpt", save_older_torch),
        ("checkpoint-{}/pytorch_model.bin", save_torch),
        ("checkpoint-{}/model.safetensors", save_safetensors),
    ],
)
def test_cut_off(
    tmp_path: Path, name: str, save: Callable[[Path], None], length: int
) -> None:
    """The files are written by the libraries themselves, and cut as by a kill."""
    paths = [tmp_path / "out" / name.format(step) for step in (1, 2)]
    for second, path in enumerate(paths, start=1000):
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)
        os.utime(path, (second, second))
        if path.parent.name != "out":
            os.utime(path.parent, (second, second))
    entries = sorted((tmp_path / "out").iterdir())
    assert own(tmp_path).newest_checkpoint() == entries[1]
    os.truncate(paths[1], length)
    os.utime(paths[1], (1001, 1001))
    assert own(tmp_path).newest_checkpoint() == entries[0]
    os.truncate(paths[0], length)
    assert own(tmp_path).newest_checkpoint() is None


@pytest.mark.parametrize("name", ["step-{}.pkl", "step-{}.pt", "step-{}/model.bin"])
@pytest.mark.parametrize("length", [0, 9000])
def test_files_of_zeros_are_not_whole(tmp_path: Path, name: str, length: int) -> None:
    """As a crash of a node may leave them."""
    make(tmp_path, name.format(1), name.format(2))
    path = tmp_path / "out" / name.format(2)
    path.write_bytes(bytes(length))
    newest = own(tmp_path).newest_checkpoint()
    assert newest is not None
    assert "-1" in newest.name


@pytest.mark.parametrize("dtype", ["?", "i1", "f2", "c16", "U3", "S5", "M8[D]", "O"])
def test_arrays_of_every_type_are_whole(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.npy"
    numpy.save(path, numpy.zeros((3, 2), dtype))
    assert not file_ends.is_cut_off(path)
    os.truncate(path, path.stat().st_size - 1)
    # Of Python objects there is a pickle.
    assert file_ends.is_cut_off(path) == (dtype != "O")


def test_settle_waits_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    path.write_bytes(b"1")
    is_over = threading.Event()

    def write_on() -> None:
        with open(path, "ab", buffering=0) as file:
            for _ in range(25):
                is_over.wait(0.1)
                file.write(b"1")

    writer = threading.Thread(target=write_on)
    writer.start()
    checkpoints.settle(path)
    size = path.stat().st_size
    writer.join()
    assert size == path.stat().st_size == 26


def choose_on_ranks(
    monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, programs: list[OwnProgram]
) -> list[Path | None]:
    """Lets each rank of a job choose, all at a time."""
    [port] = free_ports(1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("WORLD_SIZE", str(len(programs)))
    chosen: dict[int, Path | None] = {}

    def choose(rank: int) -> None:
        point = StartPoint(run_dir, programs[rank], rank, lambda: False)
        chosen[rank] = point.choose()

    threads = [
        threading.Thread(target=choose, args=(rank,)) for rank in range(len(programs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [chosen[rank] for rank in range(len(programs))]


def test_all_ranks_start_from_the_choice_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those to which the file system does not show it yet, or shows another one."""
    monkeypatch.setattr(start_point, "_TIMEOUT_S", 5)
    views = [tmp_path / str(rank) for rank in range(3)]
    make(views[0], "step-1.pt", "step-2.pt")
    make(views[1], "step-1.pt")
    make(views[2], "step-1.pt", "step-2.pt", "step-3.pt")
    programs = [own(view) for view in views]
    job = write_run(tmp_path / "run")
    threading.Timer(1, make, (views[1], "step-1.pt", "step-2.pt")).start()
    names = [path and path.name for path in choose_on_ranks(monkeypatch, job, programs)]
    assert names == ["step-2.pt"] * 3
    programs[0] = own(tmp_path)  # rank 0 sees none
    assert choose_on_ranks(monkeypatch, job, programs) == [None] * 3


NO_ANSWERS = (
    *('"', "[]", "{}", '{"run": "run"}', "[" * 5000),
    '{"run": "other", "checkpoint": "step-1.pt"}',
    *(
        f'{{"run": "run", "checkpoint": {name}}}'
        for name in ('".."', '"."', '""', '"../out"', '"\\u0000"', "1", "[]")
    ),
)


def test_answers_that_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of another run may listen on the port, and one of another version."""
    monkeypatch.setattr(start_point, "_POLL_S", 0.01)
    make(tmp_path, "step-1.pt", "step-2.pt")
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def answer() -> None:
        """Answers the same rank, which asks again."""
        for text in (*NO_ANSWERS, '{"run": "run", "checkpoint": "step-1.pt"}'):
            connection, _ = server.accept()
            with connection:
                challenge = sealed.new_challenge()
                connection.sendall(f"{challenge}\n".encode())
                channel = Channel.accept("", challenge, first_line(connection, 5))
                connection.sendall(channel.seal(text))

    thread = threading.Thread(target=answer)
    thread.start()
    job = write_run(tmp_path / "run")
    checkpoint = StartPoint(job, own(tmp_path), 1, lambda: False).choose()
    assert checkpoint == tmp_path / "out" / "step-1.pt"
    thread.join()
    server.close()


def test_a_checkpoint_that_a_node_does_not_see_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a folder that each node has for itself: the program may load it on rank 0 alone."""
    monkeypatch.setattr(start_point, "_TIMEOUT_S", 1)
    views = [tmp_path / str(rank) for rank in range(2)]
    make(views[0], "step-1.pt")
    job = write_run(tmp_path / "run")
    chosen = choose_on_ranks(monkeypatch, job, [own(view) for view in views])
    assert [path and path.name for path in chosen] == ["step-1.pt"] * 2
    [warning] = records(job, "warning")
    assert "rank 1 does not see the checkpoint step-1.pt" in warning["text"]


def test_strangers_on_the_port_do_not_hold_up_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are silent, and others send half a line."""
    make(tmp_path, "step-1.pt")
    job = write_run(tmp_path / "run")
    [port] = free_ports(1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    points = [StartPoint(job, own(tmp_path), rank, lambda: False) for rank in range(2)]
    strangers: list[socket.socket] = []

    def connect() -> bool:
        with contextlib.suppress(OSError):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
        return bool(strangers)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(points[0].choose)
        until(connect)
        for _ in range(20):
            connect()
            strangers[-1].sendall(b"1")
        second = pool.submit(points[1].choose)
        assert first.result() == second.result() == tmp_path / "out" / "step-1.pt"
    assert not records(job, "warning")
    # It is the program's now, also without SO_REUSEADDR.
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
    for stranger in strangers:
        stranger.close()


def test_a_port_that_is_taken_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that choose for themselves may start from several checkpoints."""
    make(tmp_path, "step-1.pt")
    job = write_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        monkeypatch.setenv("MASTER_PORT", str(stranger.getsockname()[1]))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(TakenPortError, match="cannot listen on port"):
            StartPoint(job, own(tmp_path), 0, lambda: False).choose()


@pytest.mark.processes
@pytest.mark.parametrize("per", ["torchrun", "node"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_checkpoint_that_cannot_be_loaded_is_passed_over(
    here: Path, per: str, steps: int
) -> None:
    """Of a format that does not tell its length: the one before it is tried, else the program
    starts from its beginning."""
    text = f"""\
import os, pathlib, pickle, sys
out = pathlib.Path("out")
if len(sys.argv) > 1:
    print("loads", sys.argv[2])
    state = pickle.loads(pathlib.Path(sys.argv[2]).read_bytes())
    raise SystemExit(0)
if out.exists():
    print("loads nothing")
    raise SystemExit(0)
out.mkdir()
for step in range({2 - steps}, 2):
    path = out / f"step-{{step}}.pkl"
    path.write_bytes(pickle.dumps({{"step": step, "weights": list(range(100))}}))
    os.utime(path, (2e9 + step, 2e9 + step))
os.truncate(path, 50)
os.utime(path, (2e9 + 2, 2e9 + 2))
os.kill(os.getpid(), 9)
"""
    write(here, "train.py", text)
    done = run(
        *("--per", per, "--checkpoint-dir", "out"),
        *("--resume-args", "--resume {latest}", "--", "train.py"),
    )
    assert done.code == 0, done.err
    loads = [line for line in lines_of(done.run, 0) if line.startswith("loads")]
    names = [line.rpartition("/")[2] for line in loads]
    expected = ["step-1.pkl", "step-0.pkl"]
    if steps == 1:
        expected = ["step-1.pkl", "loads nothing"]
    assert names == expected
    warnings = [record["text"] for record in records(done.run, "warning")]
    assert any(
        "step-1.pkl" in text and "could not be loaded" in text for text in warnings
    )


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ('  File "t.py", line 105, in step\nValueError: no such shape', "10", False),
        ('  File "t.py", line 9\n    print(last_loss)\nKeyError: 1', "last", False),
        ("RuntimeError: CUDA out of memory: 12 GiB", "1", False),
        ("    for batch in train_loader:\nValueError: empty", "a.pt", False),
        ("    data = load_dataset(path)\nValueError: no network", "a.pt", False),
        ("    for x, y in zip(a, b):\nValueError: shapes", "a.pt", False),
        ("failed reading zip archive: no central directory", "a.pt", True),
        ("zipfile.BadZipFile: File is not a zip file", "a.pt", True),
        ("FileNotFoundError: [Errno 2] No such file: 'out/10/model'", "10", True),
        ("ValueError: '/data/out/last': no header", "last", True),
        ('    state = parse("ckpt.bin")\nValueError: bad magic', "ckpt.bin", True),
        ("    state = torch.load(path)\nKeyError: 'model'", "10", True),
        ("safetensors_rust.SafetensorError: header too large", "10", True),
    ],
)
def test_failures_to_load(text: str, name: str, expected: bool) -> None:
    """A checkpoint is passed over only for these; its name alone may be a number or a word."""
    assert is_of_loading(text, name) == expected


def test_passed_over_ones_are_not_taken(tmp_path: Path) -> None:
    make(tmp_path, "step-1.pt", "step-2.pt")
    program = own(tmp_path)
    old, new = reversed(program.checkpoints())
    assert program.newest_checkpoint([in_words(new)]) == old
    assert program.newest_checkpoint([in_words(new), in_words(old)]) is None


def test_a_dry_run_of_a_resume_shows_the_checkpoint(tmp_path: Path) -> None:
    """None of the files that were there before the run."""
    make(tmp_path, "step-1.pt")
    words = "--from {latest}"
    earlier = own(tmp_path, resume_args=words).marked()
    assert submission._command_line(earlier) == ("x",)
    make(tmp_path, "step-1.pt", "step-2.pt")
    newest = earlier.checkpoints()[0]
    assert submission._command_line(earlier) == ["x", "--from", str(newest)]


def test_resume_args_without_latest(tmp_path: Path) -> None:
    make(tmp_path, "ckpt.pt")
    program = own(tmp_path, resume_args="--init_from=resume")
    assert program.arguments(program.newest_checkpoint()) == ["x", "--init_from=resume"]
    assert program.arguments(None) == ["x"]
