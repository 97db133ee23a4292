"""The preflight: every node examines itself and its way to the next one, before programs start.

Each tells the head what it found, by the connection of the reachability check; the head compares
the nodes and decides for all. A bad node is named, and the job is requeued without it.
"""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slurmft.core import filesystem, process
from slurmft.core.config import RunConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.files import fits
from slurmft.core.run_files import Failure
from slurmft.core.text import shown, some
from slurmft.node.hardware import host_name, visible_gpus
from slurmft.node.peers import FAILED, PASSED, Peers
from slurmft.node.rendezvous import (
    HOSTS,
    LOCAL_NODE,
    Rendezvous,
    RendezvousError,
    answer_checks,
    check_reachable,
)
from slurmft.runs.records import RecordWriter
from slurmft.runs.rundir import RunDir

NODES = 8
"""From so many on it is worth its seconds, if nothing is said."""
_SLOW, _SKEW_S = 0.5, 30.0
"""Below this share of the median a node is slow; and clocks that differ by more break munge, and
the order in which failures are told."""
_QUERY_S, _MATMUL_S = 10.0, 60.0
_VERDICT_S = 30.0
"""What the head may take longer than the others."""
_REPORT = {
    "rank": int, "host": str, "time": float, "problems": [str], "tflop_s": (float, None),
    "cannot_reach": (str, None),
}  # fmt: skip
_ECC = "ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
_XIDS = {
    48: "double-bit ECC error", 64: "row remapping failed", 74: "NVLink error",
    79: "GPU has fallen off the bus", 95: "uncontained ECC error", 119: "GSP time-out",
}  # fmt: skip
"""NVIDIA's numbers of errors that no program makes by itself."""
_XID_AGE_S = 24 * 3600


def is_due(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Whether a job has one: simulated nodes are one machine."""
    asked, nodes = config.job.preflight, config.job.nodes
    return asked == "on" or (asked == "auto" and nodes >= NODES and LOCAL_NODE not in environment)


class Preflight:
    """This node's part. What it measures runs from the beginning, beside the reachability check."""

    def __init__(self, run: RunDir, rendezvous: Rendezvous) -> None:
        self._run, self._rendezvous, self._began = run, rendezvous, time.monotonic()
        gpus = visible_gpus(os.environ)
        vendor = gpus[0].vendor if gpus else None
        kind = ["gpu"] if gpus else []
        self._matmul = process.start(
            [sys.executable, "-m", "slurmft.plugins.examine.matmul", *kind],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._threads = ThreadPoolExecutor()
        self._looks = [self._threads.submit(look) for look in (_room, _too_few_gpus)]
        if vendor == "NVIDIA":
            self._looks += [self._threads.submit(look) for look in (_ecc, _xids)]

    def passes(self, peers: Peers, wait_s: float) -> bool:
        """Whether all nodes may go on; on the head, which waits so long for the others, a bad one
        is recorded. Every task calls it."""
        report = self._report(wait_s / 2)
        if not self._rendezvous.is_head:
            peers.report(report)
            heard = peers.heard_any((PASSED, FAILED), wait_s + _VERDICT_S)
            if heard is None:
                raise RendezvousError(f"{self._rendezvous.head} has not judged the preflight")
            return heard == PASSED
        reports = peers.reports(len(self._rendezvous.hosts) - 1, wait_s)
        now = time.time()
        found = [(now, report), *((when, r) for when, r in reports if fits(r, _REPORT))]
        names = os.environ.get(HOSTS, host_name()).split(",")
        bad = bad_nodes(found, names)
        for host, problem in bad.items():
            hint = "tell the site; `--preflight off` starts without this check"
            error = SlurmftError(f"preflight: {problem}", hint)
            self._run.add(Failure.of(f"node {host}", error, bad_host=host, exclude=True))
        seconds = time.monotonic() - self._began
        text = f"{len(names)} node(s) in {seconds:.1f} s, {speeds([r for _, r in found])}"
        text += f"; bad: {some(list(bad))}" if bad else ""
        with contextlib.suppress(OSError):  # a full disk ends no run
            RecordWriter(self._run.records).write(
                {"event": "preflight", "text": text, "seconds": seconds}
            )
        peers.tell(FAILED if bad else PASSED)
        return not bad

    def _report(self, wait_s: float) -> dict[str, Any]:
        unreached = self._unreached(wait_s)
        problems = [problem for look in self._looks for problem in look.result()]
        product = self._product()
        self._threads.shutdown()
        return {
            "rank": self._rendezvous.node_rank,
            "host": host_name(),
            "problems": problems + product["problems"],
            "tflop_s": min(product["tflop_s"], default=None),
            "cannot_reach": unreached,
            "time": time.time(),
        }

    def _unreached(self, wait_s: float) -> str | None:
        """Why this node cannot reach the next one of the ring, which may still be starting; None:
        it can. All have reached the head."""
        mine, hosts = self._rendezvous, self._rendezvous.hosts
        following = hosts[(mine.node_rank + 1) % len(hosts)]
        try:
            if not mine.is_head:
                answer_checks(mine.check_port, mine.id, mine.addresses())
            if following != mine.head:
                check_reachable(mine.host, following, mine.check_port, mine.id, wait_s)
        except RendezvousError as error:
            return error.message
        return None

    def _product(self) -> dict[str, Any]:
        """What `slurmft.plugins.examine.matmul` printed; nothing where torch is not imported in
        time: what it is read from may be slow."""
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
            found = json.loads(self._matmul.communicate(timeout=_MATMUL_S)[0])
            if fits(found, {"tflop_s": [float], "problems": [str]}):
                return dict(found)
        process.end(self._matmul)
        return {"tflop_s": [], "problems": []}


# --- what a node finds by itself ------------------------------------------------------------------


def _room() -> list[str]:
    """Whether programs can write temporary files."""
    places = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    rooms = [(place, filesystem.room(place).problem) for place in places if place.is_dir()]
    return [f"nothing can be written to {place}: {why}" for place, why in rooms if why]


def _too_few_gpus() -> list[str]:
    granted, there = os.environ.get("SLURM_GPUS_ON_NODE", ""), len(visible_gpus(os.environ))
    if granted.isdigit() and there < int(granted):
        return [f"{there} of the {granted} GPUs that Slurm has granted are there"]
    return []


def _ecc() -> list[str]:
    command = ["nvidia-smi", f"--query-gpu=index,{_ECC}", "--format=csv,noheader,nounits"]
    said = process.output(command, _QUERY_S)
    return ecc_problems(said) if said is not None else ["nvidia-smi fails, or does not answer"]


def ecc_problems(said: str) -> list[str]:
    """From nvidia-smi's lines "index, uncorrected errors, remapping pending, remapping failed"."""
    found = []
    for line in said.splitlines():
        index, errors, pending, failed, *_ = [*map(str.strip, line.split(",")), "", "", "", ""]
        if errors.isdigit() and int(errors):
            found.append(f"GPU {index} has {errors} uncorrected ECC error(s) since it was reset")
        found += [f"GPU {index} needs a reset: rows are to be remapped"] * (pending == "Yes")
        found += [f"GPU {index}: its memory cannot be remapped any more"] * (failed == "Yes")
    return found


def _xids() -> list[str]:
    return xid_problems(process.output(["dmesg", "--facility=kern"], _QUERY_S) or "")


def xid_problems(log: str, now_s: float | None = None) -> list[str]:
    """What the driver has told the kernel within a day, by lines of dmesg such as "[12345.67] NVRM:
    Xid (PCI:0000:17:00): 79, ..."; where a user may not read them, nothing. `now_s` counts from the
    system's start."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME) if now_s is None else now_s
    lines = re.findall(r"^\[\s*([\d.]+)\] NVRM: Xid \(PCI:(\S+?)\): (\d+)", log, re.MULTILINE)
    recent = {(bus, int(xid)) for when, bus, xid in lines if float(when) > now_s - _XID_AGE_S}
    return [f"GPU at {bus}: Xid {xid}, {_XIDS[xid]}" for bus, xid in sorted(recent) if xid in _XIDS]


# --- what the head finds --------------------------------------------------------------------------


def bad_nodes(
    reports: Sequence[tuple[float, Mapping[str, Any]]], names: Sequence[str]
) -> dict[str, str]:
    """The bad nodes of a job, named as Slurm names them, each with what is wrong with it: by the
    reports, and when they came, by the head's clock."""
    of_node = {report["rank"]: (when, report) for when, report in reports}
    found: dict[str, list[str]] = {name: [] for name in names}
    behind_s = {rank: when - r["time"] for rank, (when, r) in of_node.items()}
    middle_s = statistics.median(behind_s.values())
    measured = [r["tflop_s"] for _, r in of_node.values() if r["tflop_s"]]
    usual = statistics.median_high(measured) if measured else 0.0
    for rank, name in enumerate(names):
        if rank not in of_node:
            found[name].append("it has not reported in time")
            continue
        report = of_node[rank][1]
        found[name] += [shown(problem, 200) for problem in report["problems"]]
        speed, skew_s = report["tflop_s"], behind_s[rank] - middle_s
        if speed and speed < _SLOW * usual:
            found[name].append(f"it multiplies matrices at {speed / usual:.0%} of the others' pace")
        if abs(skew_s) > _SKEW_S:
            found[name].append(f"its clock is {abs(skew_s):.0f} s off")
    for rank, why in blamed_for_links({k: r["cannot_reach"] for k, (_, r) in of_node.items()}):
        found[names[rank]].append(shown(why, 200))
    return {name: "; ".join(problems) for name, problems in found.items() if problems}


def blamed_for_links(unreached: Mapping[int, str | None]) -> list[tuple[int, str]]:
    """Who is to blame where a node of the ring cannot reach the next one: the one that most of
    these pairs have in common; of a single pair the one that does not answer."""
    size = len(unreached)
    pairs = {(rank, (rank + 1) % size): why for rank, why in unreached.items() if why}
    found = []
    while pairs:
        counts = Counter(end for pair in pairs for end in pair)
        worst = max(counts, key=lambda end: (counts[end], any(end == goal for _, goal in pairs)))
        found.append((worst, next(why for pair, why in pairs.items() if worst in pair)))
        pairs = {pair: why for pair, why in pairs.items() if worst not in pair}
    return found


def speeds(reports: Sequence[Mapping[str, Any]]) -> str:
    found = [1000 * report["tflop_s"] for report in reports if report["tflop_s"]]
    if not found:
        return "speed unknown"
    return (
        f"products of matrices at {min(found):,.0f} to {max(found):,.0f} GFLOP/s a device or core"
    )
