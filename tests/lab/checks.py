"""What is checked on every file system: each check returns what it found, as JSON.

Nothing is asserted here: tests/lab/test_labs.py says what must agree, tests/lab/tables.py how it
is told.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

from slurmft.plugins.examine import lock_probe
from slurmft.plugins.examine import locks as doctor_locks
from slurmft.plugins.examine.agents import AgentError
from slurmft.plugins.examine.site import Site, agent_command
from tests.lab.bench import Bench, Remote
from tests.lab.hosts import python
from tests.lab.labs import Client
from tests.locks.test_lockfs import KINDS, LOCK
from tests.support import evaluate_on_nodes

Found = dict[str, Any]

RELEASE_S = 20.0
"""How long the lock of a dead process may stay before it counts as staying."""
LOCK_LOSS_S = 400.0
"""How long the lock of a client without network is waited for."""
EVALUATE_S = 60.0
"""How long processes of evaluate wait for each other: machines that are translated are slow."""
MIB = 48
"""Size of a checkpoint."""


# --- a. locks -------------------------------------------------------------------------------------


def check_locks(bench: Bench) -> Found:
    """What holds between the clients, and what `slurmft doctor locks` says of it."""
    folder = bench.folder("locks")
    holds = {kind: _holds(bench.lab.clients, folder, kind) for kind in KINDS}
    measured = measure(bench.lab.clients, folder)
    try:
        choice = measured.choice()
    except lock_probe.ProbeError as error:
        choice = f"error: {error.message}"
    return {
        "file_system": str(measured.file_system.type),
        "holds": holds,
        "probe": measured.as_dict().get("findings"),
        "choice": choice,
        "table": doctor_locks.table(measured),
    }


def measure(clients: Sequence[Client], folder: Path) -> doctor_locks.Measurement:
    """`slurmft doctor locks` on the clients."""
    commands = {
        c.name: c.command(["env", *python()[1:3], *agent_command()]) for c in clients
    }
    hosts = {name: name for name in commands}
    site = Site(hosts=hosts, commands=commands, env={}, job_id="lab", simulated=False)
    return doctor_locks.measure(site, len(hosts), folder)


def _holds(clients: Sequence[Client], folder: Path, kind: str) -> Found:
    """A process of one client has a lock; what one of the other gets."""
    path = folder / f"direct-{kind}"
    with _process(clients[0], path, kind, "hold") as first:
        said = _line(first)
        if said != "locked":
            return {"error": _last_line(first) or said}
        beside = _try(clients[0], path, kind)
        between = _try(clients[1], path, kind)
        back = None
        if between == "busy":
            assert first.stdin is not None
            first.stdin.close()
            back = _freed_after(clients[1], path, kind)
    found: Found = {
        "on_node": beside == "busy",
        "between_nodes": between == "busy",
        "exit_s": back,
    }
    if between == "busy":
        other = folder / f"killed-{kind}"
        with _process(clients[0], other, kind, "hold") as first:
            _line(first)
            first.kill()
            found["kill_s"] = _freed_after(clients[1], other, kind)
    elif between != "locked":
        found["error"] = between
    return found


@contextlib.contextmanager
def _process(
    client: Client, path: Path, kind: str, way: str
) -> Iterator[subprocess.Popen[str]]:
    """A process on a client that locks by nothing but the system call."""
    argv = ["python3", "-I", "-S", "-c", LOCK, str(path), kind, way]
    with subprocess.Popen(
        client.command(argv), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return (process.stderr.read().strip().splitlines() or [""])[-1]


def _try(client: Client, path: Path, kind: str) -> str:
    with _process(client, path, kind, "try") as process:
        return _line(process) or _last_line(process)


def _freed_after(client: Client, path: Path, kind: str) -> float | None:
    """Seconds until a client can have a lock; None: it stays."""
    began = time.monotonic()
    while time.monotonic() - began < RELEASE_S:
        if _try(client, path, kind) == "locked":
            return round(time.monotonic() - began, 1)
        time.sleep(0.1)
    return None


# --- b. the traps of evaluate and of the hub's cache ----------------------------------------------


def check_traps(bench: Bench) -> Found:
    """Four processes of evaluate, and two nodes that want one file of the hub: with flock, as the
    libraries do by themselves; with the shim where nothing was measured; and where it was."""
    folder, clients = bench.folder("traps"), bench.lab.clients
    kinds = {"flock": "flock", "unmeasured": "auto"}
    with contextlib.suppress(lock_probe.ProbeError):
        kinds["measured"] = str(measure(clients, folder).choice())
    answers = _evaluate(clients, folder / "evaluate", list(kinds.values()))
    return {
        "kinds": kinds,
        "right": {"samples": evaluate_on_nodes.SAMPLES, "accuracy": 0.75},
        "evaluate": dict(zip(kinds, answers, strict=True)),
        "hub": {
            name: _hub(clients, folder / f"hub-{name}", kind)
            for name, kind in kinds.items()
        },
    }


def _evaluate(
    clients: Sequence[Client], cache: Path, kinds: Sequence[str]
) -> list[Any]:
    """What process 0 gets, for each kind of lock."""
    cases = [("four processes", kind) for kind in kinds]
    plan = {"caches": [str(cache)] * 2, "cases": cases, "timeout_s": EVALUATE_S}
    commands = [
        python(
            "-m", "tests.support.evaluate_on_nodes", json.dumps(plan | {"node": node})
        )
        for node in (0, 1)
    ]
    return [lines[0][2] for lines in _together(clients, commands, len(kinds))]


def _hub(clients: Sequence[Client], home: Path, kind: str) -> Found:
    """How often the file was fetched, and what went wrong."""
    command = python("-m", "tests.lab.hub_on_node", kind, str(home))
    answers = next(_together(clients, [command] * 2, 1))
    problems = [answer["problem"] for answer in answers if answer["problem"]]
    return {
        "fetched": sum(answer["fetched"] for answer in answers),
        "problems": problems,
    }


def _together(
    clients: Sequence[Client], commands: Sequence[Sequence[str]], rounds: int
) -> Iterator[list[Any]]:
    """Runs a program on each client that says "ready", waits for a line, and answers with JSON."""
    with contextlib.ExitStack() as stack:
        processes = []
        for client, command in zip(clients, commands, strict=True):
            process = stack.enter_context(
                subprocess.Popen(
                    client.command(command), text=True, stderr=subprocess.DEVNULL,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            processes.append(process)
        for _ in range(rounds):
            for process in processes:
                while (said := _line(process)) != "ready":
                    assert process.poll() is None or said, (
                        "it ended before it was ready"
                    )
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            yield [json.loads(_line(process)) for process in processes]


# --- c. names, contents, and when they are seen ---------------------------------------------------


def check_renames(bench: Bench, seconds: float = 30.0) -> Found:
    """A file that is replaced four times a second, as the other client sees it, read as by any
    program, and as by slurmft."""
    path = str(bench.folder("renames") / "file.json")
    writer = bench.remote(0)
    writer.call("replace", path=path, seconds=0.1)
    reading = {
        name: bench.remote(1).start(
            "read_all_along", path=path, seconds=seconds, patient=patient
        )
        for name, patient in (("plain", False), ("slurmft", True))
    }
    found: Found = {"writes": writer.call("replace", path=path, seconds=seconds)}
    return found | {
        name: future.result(2 * seconds + 30) for name, future in reading.items()
    }


def check_exclusive(bench: Bench) -> Found:
    """Both clients create the same 200 names at once; how many were won by both, or by none."""
    folder = bench.folder("exclusive")
    found = {}
    for kind in ("O_EXCL", "mkdir", "symlink"):
        # both are there before one begins
        remotes = [bench.remote(number) for number in (0, 1)]
        asked: Found = {"folder": str(folder), "count": 200, "start": 0.2, "kind": kind}
        tasks = [remote.start("exclusive", **asked) for remote in remotes]
        try:
            won = [set(task.result(90)) for task in tasks]
            found[kind] = {"both": len(won[0] & won[1]), "none": 200 - len(won[0] | won[1]),
                           "shares": [len(w) for w in won]}  # fmt: skip
        except AgentError as error:
            found[kind] = {"error": error.message}
    return found


def check_visibility(bench: Bench, times: int = 20) -> Found:
    """Seconds until the other client sees what one wrote, "new" as a program reads it and "looked
    for" as slurmft awaits it; and for writing a small file."""
    folder = bench.folder("visible")
    writer, reader = bench.remote(0), bench.remote(1)

    def seen(what: str, number: int) -> float:
        path = str(
            folder / (what if what in ("changed", "appended") else f"{what}-{number}")
        )
        text = f"{what} {number}\n"
        if what == "listed":
            waiting = reader.start(
                "await_listed", path=path, within_s=90, timeout_s=100
            )
        elif what == "looked for":
            waiting = reader.start("await_file", path=path, within_s=90, timeout_s=100)
        else:
            asked = {"path": path, "text": text, "within_s": 90}
            waiting = reader.start("await_content", timeout_s=100, **asked)
        time.sleep(0.2)  # it has looked, and its caches are warm
        began = time.monotonic()
        writer.call(
            "append" if what == "appended" else "write_text", path=path, text=text
        )
        wrote = time.monotonic()
        if what == "new":
            writes.append(round(wrote - began, 4))
        if not waiting.result(110):
            raise AgentError(f"a file {what} was not seen in 90 s")
        return max(0.0, time.monotonic() - wrote)

    writes: list[float] = []
    found: Found = {"write": writes}
    for what in ("new", "looked for", "listed", "changed", "appended"):
        found[what] = []
        try:
            if what in ("changed", "appended"):
                writer.call("create", path=str(folder / what))
            for number in range(times):
                found[what].append(round(seen(what, number), 4))
                if sum(found[what]) > 60:
                    break
        except (AgentError, NotYet) as error:
            found[what] = f"error: {error}"
    return found


# --- d. the server goes down while a checkpoint is written ----------------------------------------


def check_restart(bench: Bench, down_s: float = 5.0) -> Found:
    """The server crashes, and is up again after some seconds."""
    run = _run_folder(bench)
    writer, reader = bench.remote(0), bench.remote(1)
    first = writer.call("write_checkpoint", run=run, step=1, mib=4)
    writing = writer.start(
        "write_checkpoint", timeout_s=180, run=run, step=2, mib=MIB, pause_s=0.05
    )
    time.sleep(1.0)
    half = bench.remote(0).call("leftovers", run=run)
    bench.lab.stop_server()
    time.sleep(down_s)
    bench.lab.start_server()
    up = time.monotonic()
    wrote = _answer(writing, 180)
    found = {"first": first, "midway": bool(half), "writer": wrote}
    found["seen"] = _patiently(reader, "checkpoints", run=run)
    found["seen_after_s"] = round(time.monotonic() - up, 1)
    found["again"] = _written_again(bench, run, 3)
    return found


def check_run(bench: Bench, down_s: float = 5.0) -> Found:
    """The server crashes while a run trains and somebody follows it."""
    runs = bench.lab.folder / "runs"
    for folder in (bench.lab.folder, runs):  # MooseFS's is open to all
        bench.remote(0).call("make_folder", path=str(folder), mode=0o755)
    flags = [
        "--nodes=1",
        "--nproc-per-node=1",
        "--cpus-per-task=1",
        f"--runs-dir={runs}",
    ]
    flags += [
        "--batch-size=2",
        "--max-steps=60",
        "--log-every=1",
        "--checkpoint-every-steps=5",
    ]
    command = python("-m", "slurmft", "submit", "--cluster=local", "--follow", *flags)
    with subprocess.Popen(
        bench.lab.clients[0].command(command), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            said: list[str] = []
            while "step 13/" not in (said or [""])[-1]:
                line = _line(process)
                assert line or process.poll() is None, said
                said.append(line)
            bench.lab.stop_server()
            time.sleep(down_s)
            bench.lab.start_server()
            said += process.communicate(timeout=500)[0].splitlines()
        finally:
            process.kill()
    steps = [
        int(found[1]) for line in said if (found := re.search(r"step (\d+)/60", line))
    ]
    done = any(line.startswith("model and records: ") for line in said)
    return {
        "exit": process.returncode,
        "finished": done,
        "steps_lost": len(steps) - len(set(steps)),
        "words": [
            line for line in said if line.startswith(("warning", "error", "hint"))
        ],
    }


def _run_folder(bench: Bench) -> str:
    path = bench.folder("run")
    bench.remote(0).call("make_folder", path=str(path / "checkpoints"))
    return str(path)


def _answer(future: Future[Any], timeout_s: float) -> Found:
    try:
        answer = future.result(timeout_s)
        return dict(answer)
    except (AgentError, NotYet) as error:
        return {"seconds": timeout_s, "error": f"hangs: {error}"}


def _written_again(bench: Bench, run: str, step: int) -> str:
    """Whether the client can write a checkpoint again, within a minute; else the last error."""
    remote, deadline = bench.remote(0), time.monotonic() + 60
    while True:
        found = _answer(remote.start("write_checkpoint", run=run, step=step, mib=4), 60)
        if found["error"] is None:
            return "written"
        if time.monotonic() > deadline:
            return str(found["error"])
        time.sleep(0.5)


def _patiently(remote: Remote, operation: str, **arguments: Any) -> Any:
    """As slurmft reads after a hiccup: again, for a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return remote.call(operation, timeout_s=30, **arguments)
        except AgentError as error:
            if time.monotonic() > deadline:
                return f"error: {error.message}"
            time.sleep(0.5)


# --- e. a full quota ------------------------------------------------------------------------------


def check_quota(bench: Bench) -> Found:
    """A checkpoint of 48 MiB where 16 are free; then there is room again. Written slowly: CephFS
    counts with a delay."""
    path = bench.lab.folder / "quota" / "run"
    maker = bench.remote(0)
    maker.call("make_folder", path=str(path / "checkpoints"), mode=0o777)
    run = str(path)
    writer = bench.remote(0)
    try:
        bench.lab.set_quota(16 * 2**20)
    except NotImplementedError as error:
        return {"not shown": str(error)}
    try:
        found: Found = {
            "small": writer.call("write_checkpoint", run=run, step=1, mib=4)
        }
        large = {"run": run, "step": 2, "mib": MIB, "pause_s": 0.1}
        found["full"] = writer.call("write_checkpoint", timeout_s=200, **large)
        found["leftovers"] = maker.call("leftovers", run=run)
        found["seen"] = bench.remote(1).call("checkpoints", run=run)
    finally:
        bench.lab.set_quota(None)
    found["again"] = writer.call(
        "write_checkpoint", run=run, step=3, mib=MIB, timeout_s=200
    )
    return found


# --- f. a client loses its network ----------------------------------------------------------------


def check_cut(bench: Bench) -> Found:
    """A client that writes a checkpoint and holds a lock is cut off, and comes back."""
    kind = str(measure(bench.lab.clients, bench.folder("cut-locks")).choice())
    run, lock = _run_folder(bench), str(bench.folder("cut") / "lock")
    writer, holder, other = bench.remote(0), bench.remote(0), bench.remote(1)
    found: Found = {
        "primitive": kind,
        "taken": holder.call("take", path=lock, primitive=kind),
    }
    long_s = LOCK_LOSS_S + 100
    writing = writer.start(
        "write_checkpoint", timeout_s=long_s, run=run, step=1, mib=MIB, pause_s=0.05
    )
    time.sleep(1.0)
    began = time.monotonic()
    bench.lab.clients[0].cut()
    try:
        wait = {"path": lock, "primitive": kind, "within_s": LOCK_LOSS_S}
        said = other.start("take_when_free", timeout_s=LOCK_LOSS_S + 30, **wait)
        found["other"] = said.result(LOCK_LOSS_S + 40)
        found["freed_after_s"] = round(time.monotonic() - began)
        found["writer_ended"] = writing.done()
    except (AgentError, NotYet) as error:
        found["other"] = f"hangs: {error}"
    finally:
        bench.lab.clients[0].restore()
    back = time.monotonic()
    found["writer"] = _answer(writing, 90)
    found["writer_back_s"] = round(time.monotonic() - back, 1)
    found["holder"] = _said(holder, "use_held", path=lock)
    found["unlock"] = _said(holder, "give_up", path=lock, primitive=kind)
    found["seen"] = _patiently(other, "checkpoints", run=run)
    found["again"] = _written_again(bench, run, 2)
    return found


def _said(remote: Remote, operation: str, **arguments: Any) -> str:
    try:
        return str(remote.call(operation, timeout_s=30, **arguments))
    except AgentError as error:
        return f"hangs: {error.message}"


CHECKS: dict[str, Callable[[Bench], Found]] = {
    "locks": check_locks,
    "traps": check_traps,
    "renames": check_renames,
    "exclusive": check_exclusive,
    "visibility": check_visibility,
    "restart": check_restart,
    "run": check_run,
    "quota": check_quota,
    "cut": check_cut,
}
