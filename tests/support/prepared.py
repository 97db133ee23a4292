"""Jobs on this machine without the price of imports: one process has imported what ranks import,
and forks them.

`command` is what to start in place of `python -m slurmft`: a small process that has the server
fork the real one, hands on its own environment, folder, streams and signals, and ends as that does.
In there, and in all that is forked from it, `subprocess.Popen` of `python -m slurmft.MODULE` forks,
too: the tasks of the nodes, torchrun and ranks are processes as always, parent and child, with a
session, streams, environment and command line of their own, and run the same code; only no
interpreter starts, and nothing is imported anew. submitit, which starts the job's first process, is
left out.

Tests whose subject is how processes start, or what a library reads from the environment when it is
imported, take the real command.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from slurmft.core import descent, hub, process
from slurmft.train import rank
from tests.support import prepared_command, reaping

READ_AT_IMPORT = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "ACCELERATE_",
    "XDG_CACHE_HOME",
)
"""Variables that libraries have read when a command's environment comes."""

READ_WHEN_USED = ("HF_TOKEN", "ACCELERATE_USE_CPU", "HF_HUB_OFFLINE")
"""But for these. A node's task sets the latter two for torchrun; see `_go_offline` of the last."""

_STORES = (
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.rendezvous",
)
"""Where slurmft.node.torchrun replaces torch's store: ranks are forked from torchrun here."""

IMPORTED = (
    *("torch.distributed.run", *_STORES, "sklearn.metrics"),
    *(
        "transformers.models.bert.modeling_bert",
        "transformers.models.bert.tokenization_bert",
    ),
    *("slurmft.train.loop.trainer", "slurmft.cluster.local"),
)

COMMAND_LINE_BYTES = 4096
"""What the server's own command line leaves for those of its children."""


# --- the command ----------------------------------------------------------------------------------


def command(module: str) -> list[str]:
    """What to start in place of `python -m MODULE`."""
    return [
        sys.executable,
        "-IS",
        prepared_command.__file__,
        str(socket_path()),
        module,
    ]


def server_pid() -> int | None:
    """The process that forks commands, if it has been started."""
    return _server_pids[-1] if _server_pids else None


@functools.cache
def socket_path() -> Path:
    """Where this session's server listens. It starts when it is first wanted."""
    folder = Path(tempfile.mkdtemp(prefix="slurmft-prepared-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, log = folder / "socket", folder / "log"
    words = [
        sys.executable,
        "-m",
        "tests.support.prepared",
        str(path),
        "x" * COMMAND_LINE_BYTES,
    ]
    env = os.environ | {
        "HOME": str(folder),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    env.pop(reaping.MARK, None)  # it outlives the test that starts it
    with open(log, "wb") as file:
        server = process.start(
            words,
            death=signal.SIGTERM,
            env=env,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    _server_pids.append(server.pid)
    deadline = time.monotonic() + 120
    while not path.exists():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, (
            "the server takes more than two minutes to import"
        )
        time.sleep(0.02)
    return path


# --- the server -----------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Imports, then answers until it is killed; each command has a process that attends to it."""
    prepare()
    _adopt_orphans()
    # When the tests have ended, or were killed: what a fixture's training has forked would go on.
    signal.signal(signal.SIGTERM, _end)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path + ".new")
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.rename(path + ".new", path)
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            for signum in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            attend(client)
        client.close()


def _end(signum: int, frame: Any) -> NoReturn:
    reaping.kill_below(os.getpid())
    os._exit(0)


def prepare() -> None:
    """Imports what ranks import, and has what starts processes fork them."""
    for name in IMPORTED:
        importlib.import_module(name)
    _stores.update({name: vars(sys.modules[name])["TCPStore"] for name in _STORES})
    starts: Any = subprocess.Popen
    starts._execute_child = _fork_or_execute(starts._execute_child)
    vars(sys.modules["slurmft.cluster.local"])["start"] = _start_job
    vars(sys.modules["slurmft.train.rank"])["main"] = _forked_by_torchrun(rank.main)
    vars(inspect)["stack"] = _stack
    gc.collect()
    gc.freeze()  # or every child would write to, and so copy, all these pages


def _adopt_orphans() -> None:
    """Keeps below this process what it forks, so that tests find what they leave running."""
    set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _forked_by_torchrun(main: Any) -> Any:
    """A rank's main where torchrun has forked it (`slurmft.node.prefork`), not Popen."""

    def start(*arguments: str) -> None:
        _start_threads(
            int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
        )
        main(*arguments)

    return start


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    """torchrun asks for the stack again and again; for each frame, of which there are many here,
    Python's own would search all modules."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append(
            inspect.FrameInfo(
                frame, code.co_filename, frame.f_lineno, code.co_name, None, None
            )
        )
        frame = frame.f_back  # type: ignore[assignment]
    return found


def attend(client: socket.socket) -> NoReturn:
    """Runs one command; ends it where the one who asked is gone."""
    _, fds, _, _ = socket.recv_fds(client, 100, 4)
    with open(fds.pop()) as request:
        asked = json.load(request)
    pid = os.fork()
    if pid == 0:
        client.close()
        _become(asked["command"], asked["env"], fds, folder=asked["folder"])
    for fd in fds:
        os.close(fd)
    child = os.pidfd_open(pid)
    while child not in select.select([client.fileno(), child], [], [])[0]:
        os.kill(pid, int(client.recv(100) or signal.SIGKILL))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        client.send(str(status).encode())
    os._exit(0)


# --- processes that are forked as if they had been started ----------------------------------------


def _start_job(config: Any, run: Any, module: str, *arguments: str) -> str:
    """In place of submitit: the job's first process."""
    if config.job.setup:
        raise RuntimeError(
            "setup lines need a shell: start this job by the real command"
        )
    # of the job before, in a resume
    local = sys.modules["slurmft.cluster.local"]
    local.forget_processes(run)
    pid = os.fork()
    if pid:
        local.note_controller(run, pid)
        return str(pid)
    log = os.open(run.logs / "job.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    streams = [os.open(os.devnull, os.O_RDONLY), log, log]
    os.setsid()
    _become(
        ["-P", "-u", "-m", module, str(run.path), *arguments], dict(os.environ), streams
    )


def _fork_or_execute(execute: Any) -> Any:
    """Popen's own way to start a child, but for modules of slurmft and of the tests whose libraries
    would read the same variables as they have here."""
    parameters = inspect.signature(execute)

    def start(popen: Any, *rest: Any) -> None:
        given = parameters.bind(popen, *rest).arguments
        command = given["args"]
        env = dict(os.environ if given["env"] is None else given["env"])
        # What libraries read at their import has been read here.
        is_as_here = read_at_import(env) == _told
        if given["shell"] or not _is_ours(command) or not is_as_here:
            execute(popen, *rest)
            return
        popen.pid = os.fork()
        if popen.pid == 0:
            ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            streams = [number if fd == -1 else fd for number, fd in enumerate(ends)]
            if given["start_new_session"]:
                os.setsid()
            if given["preexec_fn"]:
                given["preexec_fn"]()
            _become(
                [*command[1:]],
                env,
                streams,
                folder=given["cwd"],
                keep=given["pass_fds"],
            )
        popen._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(given[name] for name in pipes))

    return start


def _is_ours(command: Any) -> bool:
    if isinstance(command, str | bytes) or command[0] != sys.executable:
        return False
    words = [word for word in command[1:5] if word not in ("-P", "-u")]
    return words[0] == "-m" and str(words[1]).startswith(("slurmft.", "tests."))


def _become(
    command: list[str],
    env: dict[str, str],
    streams: list[int],
    *,
    folder: Any = None,
    keep: Any = (),
) -> NoReturn:
    """Makes this process, which was just forked, what `python COMMAND` would be at its start, and
    runs its module."""
    code = 70
    try:
        _reset_signals()
        _take_streams(streams, set(keep), unbuffered="-u" in command)
        if folder is not None:
            os.chdir(folder)
        _write_command_line([sys.executable, *command])
        _take_environment(env)
        code = _run(command)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reset_signals() -> None:
    """Ignored signals stay ignored, as through an exec."""
    faulthandler.unregister(signal.SIGUSR1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(signum) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_streams(streams: list[int], keep: set[int], unbuffered: bool) -> None:
    """Standard streams, and no other file open but those to `keep`."""
    high = [os.dup(fd) for fd in streams]  # none may be overwritten before it is read
    while min(high) < 3:
        high = [os.dup(fd) for fd in high]
    for number, fd in enumerate(high):
        os.dup2(fd, number)
    last = 2
    for fd in sorted(keep):
        os.closerange(last + 1, fd)
        last = fd
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
    descent._held.clear()  # theirs are closed, too
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number, name, errors in (
        (1, "stdout", "strict"),
        (2, "stderr", "backslashreplace"),
    ):
        file = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        setattr(
            sys, name, io.TextIOWrapper(file, errors=errors, write_through=unbuffered)
        )
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr, unused-ignore]


def _write_command_line(argv: list[str]) -> None:
    """What ps and /proc show of this process."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
    text = "\0".join(argv).encode() + b"\0"
    ctypes.memmove(
        start, text[: end - start - 1].ljust(end - start, b"\0"), end - start
    )


def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that libraries read when they are imported."""
    found = {k: v for k, v in variables.items() if k.startswith(READ_AT_IMPORT)}
    return {k: v for k, v in found.items() if k not in READ_WHEN_USED}


def _take_environment(env: dict[str, str]) -> None:
    told = read_at_import(env)
    if told != _told:
        raise RuntimeError(
            f"variables that libraries read at their import are not as they were then: {told}, "
            f"{_told}; use the real command"
        )
    os.environ.clear()
    os.environ.update(env)
    first = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*first, *(entry for entry in _path if entry not in first)]
    if "RANK" in env:
        _start_threads(int(env.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    _go_offline(hub.is_hub_offline())
    for name, store in _stores.items():
        vars(sys.modules[name])["TCPStore"] = store


def _go_offline(offline: bool) -> None:
    """Sets what the libraries' modules have read from HF_HUB_OFFLINE."""
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            vars(sys.modules[module])["HF_HUB_OFFLINE"] = offline


def _start_threads(number: int) -> None:
    """torch starts its threads here, and a rank blocks stop signals before: none may take one."""
    import torch

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    torch.set_num_threads(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


_server_pids: list[int] = []
_path = list(sys.path)
_stores: dict[str, Any] = {}
_told = read_at_import(os.environ)


def _run(command: list[str]) -> int:
    """Returns the exit code, with Python's own words for what was raised."""
    atexit._clear()
    words = command[command.index("-m") + 1 :]
    sys.argv = ["-m", *words[1:]]
    try:
        if "." in words[0]:  # no package
            sys.modules.pop(words[0], None)  # or runpy warns of it
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
