"""How long do metric and broadcast take? 131,072 predictions, accuracy, 1 to 16 processes on this
machine (gloo). And what do metrics cost an evaluation?

    python results/benchmarks/metric_phase.py                # six minutes
    python results/benchmarks/metric_phase.py throughput     # only: what metrics cost

Three ways, in turn, in the same processes; seconds from predictions on every rank to a metric that
every rank knows, medians of the rounds, as the main rank sees them:

- published: every rank stores all gathered predictions into its own evaluate file; the main rank
  computes over all files. Storing is not counted, as it was not in the published figures.
- files: every rank stores its own predictions into its evaluate file; storing counts.
- memory: one gather, scikit-learn, one broadcast (the default); the gather counts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import (
    MEASURED,
    Steps,
    confidence,
    make_run,
    parser,
    pyplot,
    save,
    torchrun,
)

SAMPLES, CLASSES, STORED_AT_ONCE = 131_072, 6, 256
PROCESSES, ROUNDS = (1, 2, 4, 8, 16), 5
EVALUATION_PAIRS = 20


def main(part: str | None) -> None:
    if part != "throughput":
        rows = [in_processes(size) for size in PROCESSES]
        print(table(rows))
        save("metric_phase", {"samples": SAMPLES, "rounds": ROUNDS, "rows": rows})
        plot(rows)
    save("metric_throughput", throughput())


# --- the phase ------------------------------------------------------------------------------------


def in_processes(size: int) -> dict[str, Any]:
    """Forks so many ranks of this process, which has imported all that they need (8 s each)."""
    import datasets  # noqa: F401
    import evaluate  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch  # noqa: F401

    from slurmft.job import process_group  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        children = [fork(rank, size, Path(folder)) for rank in range(size)]
        codes = [os.waitpid(pid, 0)[1] for pid in children]
        if any(codes):
            raise SystemExit(f"a rank of {size} failed")
        found: dict[str, Any] = json.loads((Path(folder) / "times.json").read_text())
    medians = {name: statistics.median(times) for name, times in found.items()}
    print(size, {k: round(v, 4) for k, v in medians.items()}, flush=True)
    return {"processes": size, "median_s": medians, "all_s": found}


def fork(rank: int, size: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_000 + size)}
    code = 1
    try:
        run_rank(folder)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def run_rank(folder: Path) -> None:
    import torch

    from slurmft import locks
    from slurmft.job import process_group

    torch.set_num_threads(1)
    locks.install("lockf")
    world = process_group.init("gloo")
    phase = Phase(world, folder)
    times: dict[str, list[float]] = {"published": [], "files": [], "memory": []}
    for number in range(ROUNDS + 1):
        for name, seconds in times.items():
            took = getattr(phase, name)()
            if number:  # the first round warms up
                seconds.append(took)
    if world.is_main:
        (folder / "times.json").write_text(json.dumps(times))
    world.on_some(False, lambda: None)
    process_group.leave()


class Phase:
    """One rank, with its share of the predictions and, for the published way, all of them."""

    def __init__(self, world: Any, folder: Path) -> None:
        import numpy as np

        draw = np.random.default_rng(0)
        self.world, self.folder, self.number = world, folder, 0
        self.labels = draw.integers(CLASSES, size=SAMPLES)
        self.predictions = draw.integers(CLASSES, size=SAMPLES)
        self.expected = float((self.labels == self.predictions).mean())
        self.sizes = [len(part) for part in np.array_split(range(SAMPLES), world.size)]
        first = sum(self.sizes[: world.rank])
        self.mine = slice(first, first + self.sizes[world.rank])

    def compute(self, predictions: Any, labels: Any) -> dict[str, float]:
        from slurmft.train.tasks.metrics import SCORES

        return {"accuracy": SCORES["accuracy"](predictions, labels)}

    def begin_together(self) -> None:
        """All ranks go on at one time of the clock. After a barrier they would come out of it one
        by one, for 10 ms where 16 share two cores."""
        at = self.world.share_object(time.time() + 0.15)
        time.sleep(max(0.0, at - time.time()))

    def share(self, work: Callable[[], dict[str, float]]) -> float:
        """Seconds until the metric is known everywhere."""
        began = time.perf_counter()
        found = self.world.on_main(work)
        took = time.perf_counter() - began
        assert abs(found["accuracy"] - self.expected) < 1e-12
        return took

    def evaluate_metric(self, name: str) -> Any:
        """An `evaluate.Metric` of our own, whose files every rank sees: those of the hub are out of
        a compute node's reach."""
        import datasets
        import evaluate

        compute = self.compute
        columns = {n: datasets.Value("int64") for n in ("predictions", "references")}

        class Metric(evaluate.Metric):  # type: ignore[misc]
            def _info(self) -> Any:
                return evaluate.MetricInfo(
                    description="accuracy",
                    citation="",
                    inputs_description="",
                    features=datasets.Features(columns),
                    format="numpy",
                )

            def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
                return compute(predictions, references)

        return Metric(
            num_process=self.world.size,
            process_id=self.world.rank,
            experiment_id=name,
            cache_dir=str(self.folder),
        )

    def published(self) -> float:
        self.number += 1
        metric = self.evaluate_metric(f"published-{self.number}")
        step = STORED_AT_ONCE * self.world.size  # a batch of every rank, gathered
        for start in range(0, SAMPLES, step):
            batch = slice(start, start + step)
            metric.add_batch(
                predictions=self.predictions[batch], references=self.labels[batch]
            )
        if not self.world.is_main:
            metric.compute()  # gives the main rank its file; not timed
        self.begin_together()
        return self.share(metric.compute)

    def files(self) -> float:
        self.begin_together()
        began = time.perf_counter()
        self.number += 1
        metric = self.evaluate_metric(f"files-{self.number}")
        metric.add_batch(
            predictions=self.predictions[self.mine], references=self.labels[self.mine]
        )
        found = metric.compute()  # on the main rank
        return time.perf_counter() - began + self.share(lambda: found)

    def memory(self) -> float:
        from slurmft.train.loop import evaluator

        self.begin_together()
        began = time.perf_counter()
        whole = evaluator.gather(self.world, self.predictions[self.mine], self.sizes)
        gather_s = time.perf_counter() - began
        return gather_s + self.share(lambda: self.compute(whole, self.labels))


# --- what metrics cost an evaluation --------------------------------------------------------------


def throughput() -> dict[str, Any]:
    """Evaluations with metrics against predictions alone, in turn, by two ranks."""
    with tempfile.TemporaryDirectory() as name:
        run = make_run(Path(name), epochs=100, batch_size=12)
        torchrun(2, __file__, "rank", str(run), env={"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads((Path(name) / "measured.json").read_text())
    print(json.dumps({k: v for k, v in found.items() if k != "pairs_s"}))
    return found


def throughput_rank(run: Path) -> None:
    import numpy as np

    steps = Steps(run)
    world = steps.world
    evaluator = steps.trainer.evaluator
    train = steps.setup.data.train
    # As many samples as the published evaluation has for each of 16 GPUs.
    data = dataclasses.replace(steps.setup.data, validation=train, sizes=())
    parts = np.array_split(np.arange(len(train)), world.size)
    boundary = steps.trainer.checkpointing.stop_or_save

    def alone() -> None:
        evaluator._predicted = []
        evaluator.predict_part(data, parts[world.rank], len(parts[0]), boundary)
        world.on_some(False, lambda: None)

    def with_metrics() -> None:
        evaluator._predicted = []
        evaluator.measure(data, boundary)
        world.on_some(False, lambda: None)

    def seconds(work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    seconds(alone), seconds(with_metrics)
    pairs = []
    for number in range(EVALUATION_PAIRS):
        order = (alone, with_metrics) if number % 2 else (with_metrics, alone)
        took = {work: seconds(work) for work in order}
        pairs.append((took[alone], took[with_metrics]))
    shares = [100 * a / b for a, b in pairs]
    if world.is_main:
        found = {
            "samples": len(train),
            "throughput_percent": statistics.median(shares),
            "throughput_percent_95": confidence(shares),
            "evaluation_s": statistics.median(a for a, _ in pairs),
            "pairs_s": pairs,
        }
        (run.parent / "measured.json").write_text(json.dumps(found))
    steps.leave()
    os._exit(0)


# --- what is shown --------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| processes | published | files | memory | published / memory |",
        "|" + "---|" * 5,
    ]
    for row in rows:
        by = row["median_s"]
        cells = [
            f"{1000 * by[name]:.1f} ms" for name in ("published", "files", "memory")
        ]
        ratio = by["published"] / by["memory"]
        lines.append(f"| {row['processes']} | {' | '.join(cells)} | {ratio:.0f} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]]) -> None:
    """Seconds against processes, as measured/metric_phase.svg."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(6, 4))
    sizes = [row["processes"] for row in rows]
    for name in ("published", "files", "memory"):
        axes.plot(sizes, [row["median_s"][name] for row in rows], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("processes")
    axes.set_ylabel("metric and broadcast, seconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(MEASURED / "metric_phase.svg")
    print(f"written: {MEASURED / 'metric_phase.svg'}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        throughput_rank(Path(sys.argv[2]))
    arguments = parser(__doc__)
    arguments.add_argument("part", nargs="?", choices=["throughput"])
    main(arguments.parse_args().part)
