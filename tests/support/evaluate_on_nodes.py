"""What evaluate gives in four processes, two on each of two nodes: `evaluate_on_nodes.py PLAN`.

The plan is JSON: the two folders that are one cache, and cases. evaluate is imported once, and each
case forked from that: importing takes 8 s. Prints a JSON line for each case: process 0's answer.

Processes wait for each other for its "timeout_s"; else for a minute, or where this is in vain, 3 s.

With "node" in the plan it is one of two real nodes, 0 or 1, and has two of the four processes. It
says "ready", and waits for a line on stdin before each case, so that both begin at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

from slurmft import locks

PROCESSES, SAMPLES = 4, 1000
TRAPS = ("flock", "bare lockf")


def accuracy(**kwargs: Any) -> Any:
    """An accuracy metric; a local class, no hub."""
    import datasets
    import evaluate

    features = datasets.Features(
        {n: datasets.Value("int64") for n in ("predictions", "references")}
    )

    class Accuracy(evaluate.Metric):  # type: ignore[misc]
        def _info(self) -> Any:
            return evaluate.MetricInfo(
                description="", citation="", inputs_description="", features=features
            )

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            pairs = list(zip(predictions, references, strict=True))
            return {
                "samples": len(pairs),
                "accuracy": sum(a == b for a, b in pairs) / len(pairs),
            }

    return Accuracy(**kwargs)


def use_locks(kind: str) -> None:
    """flock as it is; "bare lockf", the replacement that many sites make; or the shim."""
    if kind == "bare lockf":
        import filelock

        bare = types.SimpleNamespace(**vars(fcntl))
        bare.flock = fcntl.lockf
        vars(sys.modules[filelock.UnixFileLock.__module__])["fcntl"] = bare
    elif kind != "flock":
        locks.install(kind)


def process(number: int, cache: str, case: str, timeout_s: float) -> Any:
    """One of the four: its share of the predictions, of which a quarter are wrong."""
    metric = accuracy(
        num_process=PROCESSES, process_id=number, cache_dir=cache, experiment_id=case,
        timeout=timeout_s,
    )  # fmt: skip
    labels = list(range(SAMPLES))
    predictions = [x if x % 4 else -1 for x in labels]
    metric.add_batch(
        predictions=predictions[number::PROCESSES], references=labels[number::PROCESSES]
    )
    # the others are there before it looks for them
    time.sleep(0.3 if number == 0 else 0)
    return metric.compute()


def two_metrics(cache: str) -> list[float]:
    """Two metric objects of one process, with the same (the default) experiment id."""
    one, two = (accuracy(cache_dir=cache) for _ in range(2))
    one.add_batch(predictions=[1, 1], references=[1, 1])
    two.add_batch(predictions=[1, 0], references=[1, 1])
    return [m.compute()["accuracy"] for m in (one, two)]


def threads(cache: str) -> int:
    """How many of four threads are ever inside one lock at once."""
    import filelock

    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(30):
            with filelock.FileLock(Path(cache) / "threads.lock", poll_interval=0.001):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                inside -= 1

    crowd = [threading.Thread(target=work) for _ in range(4)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    return most


def in_child(kind: str, work: Any) -> tuple[int, int]:
    """Forks; the child writes its answer into a pipe. Returns its pid and the pipe's end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        use_locks(kind)
        answer = work()
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def answer_of(child: tuple[int, int]) -> Any:
    with open(child[1], "rb") as file:
        text = file.read()
    os.waitpid(child[0], 0)
    return json.loads(text) if text else None


def main(plan: dict[str, Any]) -> None:
    import evaluate  # noqa: F401

    caches, node = plan["caches"], plan.get("node")
    numbers = [n for n in range(PROCESSES) if node in (None, n % 2)]
    for number, (what, kind) in enumerate(plan["cases"]):
        timeout_s = plan.get("timeout_s", 3 if kind in TRAPS else 60)
        if node is not None:
            print("ready", flush=True)
            sys.stdin.readline()
        if what == "four processes":
            children = [
                in_child(
                    kind,
                    lambda n=n, c=f"case{number}", t=timeout_s: process(
                        n, caches[n % 2], c, t
                    ),
                )
                for n in numbers
            ]
        else:
            work = {"two metrics": two_metrics, "threads": threads}[what]
            cache = f"{caches[0]}/{number}"
            os.mkdir(cache)
            children = [in_child(kind, lambda w=work, c=cache: w(c))]
        answers = [answer_of(child) for child in children]
        print(json.dumps([what, kind, answers[0]]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
