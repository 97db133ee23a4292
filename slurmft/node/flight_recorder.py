"""torch's Flight Recorder in a rank: which collectives it has called, and which have not ended.

The main thread of a rank that hangs is in a call of C++, so another thread answers the watchdog of
the node. It waits in `open`, without the GIL, and costs nothing until it is asked. The standard
library alone, of any Python from 3.9 on: it runs in programs of the user's own.
"""

# Annotations are not evaluated: an older Python lacks some of their syntax.
from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

MODULE = "torch.distributed.distributed_c10d"
"""The module of torch whose `init_process_group` sets up the ranks' process group."""
_FOLDER = "SLURMFT_NODE_FOLDER"
"""As heartbeat.FOLDER, whose module older Pythons cannot import."""
_SIZE = "TORCH_FR_BUFFER_SIZE"
# The name before torch 2.8; it is still read.
_OLD_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_DEFAULT_SIZE = 2000
_DUMP = "TORCH_FR_DUMP_TEMP_FILE"
# The name before torch 2.8; it is still read.
_OLD_DUMP = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_MOST_CALLS = 100
"""Calls that have ended, of those that a rank writes."""
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""torch's functions, without stacks: the first stack takes seconds, in which torch imports its
compiler. NCCL has a recorder of its own, all other backends share one."""
_NO_DESCRIPTIONS = ("", "undefined", "default_pg")

_answer_files: list[str] = []
"""The file of this process, if it answers."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that turn the recorder on, where the user has not decided otherwise."""
    if _OLD_SIZE in environment or _SIZE in environment:
        return {}
    recorder_variables = {_SIZE: str(_DEFAULT_SIZE)}
    home = environment.get("HOME")
    if home and _DUMP not in environment and _OLD_DUMP not in environment:
        # Where newer torch writes what a rank has recorded when NCCL gives up. Older torch writes
        # to /tmp/nccl_trace_rank_0, also through a link that another user has put there.
        cache = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
        recorder_variables[_OLD_DUMP] = f"{cache}/torch/comm_lib_trace_rank_"
    return recorder_variables


# --- in a rank ------------------------------------------------------------------------------------


def serve_after_init(module: ModuleType) -> None:
    """Has this process answer as soon as its program sets up a process group."""
    initialize: Callable[..., Any] = module.__dict__["init_process_group"]

    def init_process_group(*arguments: Any, **named: Any) -> Any:
        result = initialize(*arguments, **named)
        serve()
        return result

    init_process_group.__doc__ = initialize.__doc__
    module.__dict__["init_process_group"] = init_process_group


def serve() -> None:
    """Has a thread answer the watchdog of this node, if there is one, until the process ends."""
    folder = os.environ.get(_FOLDER)
    distributed = sys.modules.get("torch.distributed")
    if not folder or distributed is None or _answer_files:
        return
    # A child of a rank that sets up a group for itself is no rank of the job.
    if distributed.get_world_size() == 1:
        return
    rank = distributed.get_rank()
    request = _request_file(folder, rank)
    answer = answer_file(folder, rank)
    try:
        # Both may be there, of the process that this rank had before a restart.
        with contextlib.suppress(FileExistsError):
            os.mkfifo(request, 0o600)
        _write(answer, None)
    except OSError:  # no room, or the task of the node has ended: nobody will ask
        return
    _answer_files.append(answer)
    threading.Thread(
        target=_answer_requests, args=(request, answer), daemon=True
    ).start()
    atexit.register(_note_failure, os.getpid())


def _answer_requests(request: str, answer: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            # Waits until the watchdog opens the FIFO, and reads until it closes it.
            with open(request, "rb") as fifo:
                fifo.read()
            _write(answer, recorded())


def _note_failure(pid: int) -> None:
    """Writes the calls of a program that ends by an exception: it may have lost a peer."""
    # A forked process has inherited this call.
    if pid == os.getpid() and getattr(sys, "last_value", None) is not None:
        note_lost_peer()


def note_lost_peer() -> None:
    """Writes the calls of a rank that has lost another one, and ends."""
    for answer in _answer_files:
        with contextlib.suppress(OSError):
            _write(answer, recorded(lost_peer=True))


def _write(answer: str, calls: dict[str, Any] | None) -> None:
    # None, too: whoever has asked waits no longer.
    with open(f"{answer}.new", "w", encoding="utf-8") as file:
        json.dump(calls, file)
    os.replace(f"{answer}.new", answer)


def recorded(lost_peer: bool = False) -> dict[str, Any] | None:
    """Returns what `run_files.Calls` describes; None where torch has no recorder, or another
    one."""
    try:
        return _calls(lost_peer)
    # torch's functions are private, and those of another version may differ in any way.
    except Exception:
        return None


def _calls(lost_peer: bool) -> dict[str, Any] | None:
    # Not imported: a process that has not imported them is no rank.
    dist = sys.modules["torch.distributed"]
    functions = sys.modules["torch._C._distributed_c10d"]
    entries: list[dict[str, Any]] = []
    has_recorder = False
    # A ring that is full has lost the oldest calls.
    is_full = False
    size = int(os.environ.get(_SIZE) or os.environ.get(_OLD_SIZE) or _DEFAULT_SIZE)
    for name in _DUMPS:
        dump = getattr(functions, name, None)
        if dump is not None:
            # All calls, and not only those that have not ended. An empty ring has no entries.
            ring = json.loads(dump(True, False)).get("entries", [])
            has_recorder = size > 0
            is_full = is_full or len(ring) >= size
            entries += ring
    if not has_recorder:
        return None
    world = dist.distributed_c10d._world
    ranks_of = {}
    for group, ranks in world.pg_group_ranks.items():
        # Groups that this rank is no member of have no name here.
        ranks_of[world.pg_names.get(group)] = sorted(ranks)
    groups: dict[str, dict[str, Any]] = {}
    calls: list[dict[str, Any]] = []
    idle_s = None
    for entry in entries:
        seconds = _seconds_since(entry)
        if idle_s is None or seconds < idle_s:
            idle_s = seconds
        # Sends and receives concern two ranks, which count them by themselves.
        if entry["is_p2p"]:
            continue
        call = _call(entry)
        calls.append(call)
        name, description = entry["process_group"]
        group_facts = groups.setdefault(call["group"], {"last": 0})
        group_facts["ranks"] = ranks_of.get(name, [])
        group_facts["last"] = max(group_facts["last"], call["number"])
        if description not in _NO_DESCRIPTIONS:
            group_facts["description"] = description
    ended = [call for call in calls if not call["waits"]][-_MOST_CALLS:]
    kept = ended + [call for call in calls if call["waits"]]
    return {
        "world_size": dist.get_world_size(),
        "lost_peer": lost_peer,
        "is_full": is_full,
        "where": "" if lost_peer else _where(),
        "groups": groups,
        "calls": kept,
        "idle_s": idle_s,
    }


def _call(entry: dict[str, Any]) -> dict[str, Any]:
    backend, _, operation = entry["profiling_name"].partition(":")
    sizes = (
        _bytes(entry["input_sizes"], entry["input_dtypes"]),
        _bytes(entry["output_sizes"], entry["output_dtypes"]),
    )
    name, _ = entry["process_group"]
    return {
        # A group may have a backend for CPUs, and one for GPUs: each counts its calls.
        "group": f"{backend}:{name}",
        "number": entry["collective_seq_id"],
        "operation": operation,
        "bytes": max(sizes),
        "waits": not entry["retired"],
        "seconds": _seconds_since(entry),
        # On a GPU, torch runs the backward pass in threads of its own.
        "is_backward": entry.get("thread_name", "").startswith("pt_autograd"),
    }


def _seconds_since(entry: dict[str, Any]) -> float:
    created_at: float = entry["time_created_ns"] / 1e9
    return max(0.0, time.time() - created_at)


def _bytes(sizes: list[list[int]], types: list[str]) -> int:
    torch = sys.modules["torch"]
    total = 0
    for position, shape in enumerate(sizes):
        # The types of several tensors may be given once.
        name = types[min(position, len(types) - 1)].lower()
        element_type = getattr(torch, _TYPES.get(name, name), None)
        # 0: a type that this table does not know.
        count = getattr(element_type, "itemsize", 0)
        for length in shape:
            count *= length
        total += count
    return total


# Names of C++ that are not those of Python in lower case.
_TYPES = {"byte": "uint8", "char": "int8"}


def _where() -> str:
    """Returns where the main thread of this process is: "backward, train.py:24"."""
    main_thread = threading.main_thread().ident
    frame = sys._current_frames().get(main_thread or 0)
    is_backward = False
    place = ""
    # From the innermost on: the first that is of no library is the program's.
    while frame is not None:
        path = frame.f_code.co_filename
        is_backward = is_backward or frame.f_code.co_name == "_engine_run_backward"
        is_library = "-packages/" in path or path.startswith(("<", *_LIBRARIES))
        if not place and not is_library:
            place = f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ", ".join(filter(None, ["backward" * is_backward, place]))


_LIBRARIES = (
    # Python's own, and slurmft's.
    os.path.dirname(os.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)

# --- on its node ----------------------------------------------------------------------------------


def _request_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"ask-calls-{rank}")


def answer_file(folder: str, rank: int) -> str:
    """Returns the file into which a rank writes its calls."""
    return os.path.join(folder, f"calls-{rank}.json")


def ask(folder: str, rank: int) -> bool:
    """Asks a rank for its calls; returns whether a process of it is there that may answer."""
    request = _request_file(folder, rank)
    try:
        descriptor = os.open(request, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        # Its process is gone, or has no process group.
        return False
    os.close(descriptor)
    return True
