"""Which library sums gradients on CPUs, where `--backend auto` leaves it open: gloo or oneCCL.

Neither is faster everywhere: that depends on the network, the size of the gradient and its type.
Where all nodes have oneCCL's binding, they measure both before the ranks start, and the head
decides. Processes of their own measure: oneCCL may hang, or end its process.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from slurmft.core import interpreter, process
from slurmft.core.config import RunConfig
from slurmft.core.decode import decode_or_none, loads, read
from slurmft.core.files import write_json
from slurmft.core.program import Gradient, kind_of
from slurmft.core.text import by_host, shown
from slurmft.node import ccl
from slurmft.node.hardware import host_name
from slurmft.node.peers import CCL, FAILED, GLOO, MEASURE, says_lost_peer
from slurmft.node.preparation import training_environment, use_of_node
from slurmft.node.rendezvous import Rendezvous, reserved_descriptors
from slurmft.node.supervisor import Supervisor
from slurmft.runs.records import RecordWriter, warn

_OFFERS = "oneCCL"
"""Topic of reports: whether a node has it."""
_PROBLEMS = "oneCCL's problems"
"""Topic of reports: why it fails where it is measured."""
_PROBE = Path(__file__).with_name("backend_probe.py")
# faulthandler prints it where oneCCL does not answer.
_HANGS = "Timeout ("
# The largest message of torch's DDP.
_MESSAGE_BYTES = 25 * 2**20
# How long oneCCL may take, once gloo has been measured.
_CCL_S = 20
# How long processes may take to import torch, to meet and to measure gloo.
_START_S = 120
_POLL_S = 0.05
# How long the head waits for another node's problem, which may be the cause of its own.
_CAUSE_WAIT_S = 10
_DECIDED = (CCL, GLOO, FAILED)
_BYTES = {"float32": 4, "bfloat16": 2}
"""Type of numbers, as torch names it -> bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided, and by which times (collectives.json)."""

    backend: str
    """gloo or ccl."""
    hosts: list[str]
    numbers: int
    """How many numbers the gradient has."""
    dtype: str
    gloo_s: float | None = None
    """Seconds in which the gradient is summed."""
    ccl_s: float | None = None
    problem: str | None = None
    """Why there is no time of oneCCL."""

    def __str__(self) -> str:
        size_mb = self.numbers * _BYTES[self.dtype] / 1e6
        return (
            f"{self.backend}: a gradient of {size_mb:.3g} MB ({self.dtype}) takes "
            f"{self.gloo_s:.3g} s by gloo, {self.ccl_s:.3g} s by ccl"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """What a node says of itself."""

    host: str
    processes: int = 0
    """0: it computes on GPUs, or has no binding that can be used."""
    problem: str | None = None


def settle(
    supervisor: Supervisor, config: RunConfig, rendezvous: Rendezvous
) -> RunConfig:
    """Returns the configuration with the backend that is faster on CPUs, where --backend is auto.

    Every task of the job calls it. On GPUs, and where oneCCL is not to be had, auto stays.
    """
    is_open = config.job.backend == "auto" and kind_of(config.program).sums_gradients
    # Nodes that may come later could not be measured.
    is_complete = not rendezvous.elastic and len(rendezvous.hosts) == config.job.nodes
    if not is_open or not is_complete:
        return config
    with_ccl = replace(config, job=replace(config.job, backend="ccl"))
    if _Settlement(supervisor, with_ccl, rendezvous).backend(config) == "ccl":
        return with_ccl
    return config


class _Settlement:
    """One node's part in the decision."""

    def __init__(
        self, supervisor: Supervisor, config: RunConfig, rendezvous: Rendezvous
    ) -> None:
        self._supervisor = supervisor
        self._peers = supervisor.peers
        self._run = supervisor.run
        self._config = config
        """With oneCCL as the backend."""
        self._rendezvous = rendezvous
        self._kind = kind_of(config.program)
        self._host = host_name()

    def backend(self, config: RunConfig) -> str:
        """Returns gloo or ccl, the same on all nodes.

        Args:
            config: as the user has it.
        """
        offer = self._offer(config)
        if not self._rendezvous.is_head:
            return self._follow(offer)
        backend = "gloo"
        # Without an offer of its own, the head need not wait for the others.
        if offer.processes:
            backend = self._decide(offer)
        elif offer.problem:
            self._warn([offer])
        self._peers.tell(CCL if backend == "ccl" else GLOO)
        return backend

    def _offer(self, config: RunConfig) -> _Offer:
        binding = ccl.find(self._kind.python)
        if binding is None:
            return _Offer(host=self._host)
        if binding.mismatch:
            return _Offer(host=self._host, problem=binding.mismatch)
        profile = use_of_node(config, os.environ)
        if profile.name == "gpu":
            return _Offer(host=self._host)
        return _Offer(host=self._host, processes=profile.nproc)

    def _decide(self, offer: _Offer) -> str:
        """Decides as the head."""
        offers = [offer]
        others = len(self._rendezvous.hosts) - 1
        timeout_s = self._config.job.rdzv_timeout_s
        for _, facts in self._peers.reports(_OFFERS, others, timeout_s):
            other = decode_or_none(facts, _Offer)
            if other is not None:
                offers.append(other)
        if not all(each.processes for each in offers):
            self._warn(offers)
            return "gloo"
        # Ranks of nodes are numbered alike only where all nodes have as many.
        is_even = len({each.processes for each in offers}) == 1
        is_alone = len(self._rendezvous.hosts) * offer.processes == 1
        if len(offers) <= others or not is_even or is_alone:
            return "gloo"
        earlier = read(self._run.collectives, Decision)
        hosts = sorted(self._rendezvous.hosts)
        # Sums of the other library would round otherwise: a run keeps its own while it can.
        if earlier is not None and earlier.hosts == hosts:
            return earlier.backend
        self._peers.tell(MEASURE)
        decision = self._measure(offer.processes, hosts)
        self._record(decision)
        return decision.backend

    def _measure(self, processes: int, hosts: list[str]) -> Decision:
        """Measures as the head, together with the other nodes."""
        gradient = self._kind.gradient()
        decision = Decision(backend="gloo", hosts=hosts, **asdict(gradient))
        with contextlib.closing(self._start(processes, gradient)) as probes:
            while probes.are_running() and not self._supervisor.stop_signal:
                if self._peers.reports(_PROBLEMS, 1, _POLL_S):
                    break
            seconds = probes.seconds()
            problems = probes.problems()
        problem = self._cause(problems)
        decision = replace(
            decision, gloo_s=seconds.get("gloo"), ccl_s=seconds.get("ccl")
        )
        if decision.gloo_s is None or decision.ccl_s is None or problem:
            return replace(decision, problem=shown(problem or "", 300))
        # gloo where they are equal: it comes with torch.
        if decision.ccl_s < decision.gloo_s:
            return replace(decision, backend="ccl")
        return decision

    def _cause(self, problems: list[str]) -> str | None:
        """Returns the first of the problems, here and on other nodes, that is no effect of another;
        None: there are none."""
        deadline = time.monotonic() + _CAUSE_WAIT_S
        reports = self._peers.reports(_PROBLEMS, 1, 0)
        while True:
            known = [*problems, *(str(problem) for _, problem in reports)]
            causes = [problem for problem in known if not _is_effect(problem)]
            is_over = self._supervisor.stop_signal or time.monotonic() > deadline
            if causes or not known or is_over:
                return next(iter(causes or known), None)
            reports = self._peers.reports(_PROBLEMS, len(reports) + 1, _POLL_S)

    def _follow(self, offer: _Offer) -> str:
        """Takes part as another node than the head; returns the decision."""
        self._peers.report(_OFFERS, asdict(offer))
        # The head decides the same by this report: there is nothing to wait for.
        if not offer.processes:
            return "gloo"
        wait_s = self._config.job.rdzv_timeout_s
        # The decision comes first: both words may be there.
        word = self._peers.heard_any((*_DECIDED, MEASURE), wait_s)
        if word == MEASURE:
            word = self._measure_for_head(offer.processes)
        if word == CCL:
            return "ccl"
        return "gloo"

    def _measure_for_head(self, processes: int) -> str | None:
        """Measures until the head has decided; returns its word. None: the job is to stop."""
        word = None
        reported: set[str] = set()
        gradient = self._kind.gradient()
        with contextlib.closing(self._start(processes, gradient)) as probes:
            while word is None and not self._supervisor.stop_signal:
                word = self._peers.heard_any(_DECIDED, _POLL_S)
                for problem in probes.problems():
                    if problem not in reported:
                        reported.add(problem)
                        self._peers.report(_PROBLEMS, problem)
        return word

    def _start(self, processes: int, gradient: Gradient) -> "_Probes":
        """Starts the measurement on this node."""
        profile = use_of_node(self._config, os.environ)
        python = self._kind.python
        environment = training_environment(
            profile, self._rendezvous, os.environ, python
        )
        environment |= {
            "MASTER_ADDR": self._rendezvous.head,
            "MASTER_PORT": str(self._rendezvous.port),
            "WORLD_SIZE": str(processes * len(self._rendezvous.hosts)),
            "LOCAL_WORLD_SIZE": str(processes),
        }
        request = asdict(gradient) | {
            "message": _MESSAGE_BYTES // _BYTES[gradient.dtype],
            "module": ccl.MODULE,
            "ccl_s": _CCL_S,
        }
        probes = _Probes(self._host)
        for local_rank in range(processes):
            rank = self._rendezvous.node_rank * processes + local_rank
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            environment |= ccl.rank_variables(environment)
            cores: tuple[int, ...] = ()
            if profile.pinned:
                cores = profile.cores[local_rank]
            probes.add(python, request | {"cores": cores}, environment)
        return probes

    def _warn(self, offers: Sequence[_Offer]) -> None:
        """Records why oneCCL is not used, where some nodes have its binding."""
        facts = []
        for offer in offers:
            if not offer.processes:
                facts.append((offer.host, offer.problem or ccl.problem_of(None) or ""))
        warn(self._run.records, f"collectives use gloo; {by_host(facts)}")

    def _record(self, decision: Decision) -> None:
        if self._supervisor.stop_signal:  # it measured nothing to the end
            return
        with contextlib.suppress(OSError):  # a full disk ends no run
            write_json(self._run.collectives, asdict(decision))
            if decision.problem is None:
                event = {"event": "collectives", "text": str(decision)}
                RecordWriter(self._run.records).write(event)
        if decision.problem is not None:
            warn(
                self._run.records, f"collectives use gloo; ccl fails {decision.problem}"
            )


def _is_effect(problem: str) -> bool:
    """Returns whether a problem may be that another process is gone."""
    # C++ aborts, without a word that could be read, where a connection ends in a destructor.
    is_abort = signal.SIGABRT.name in problem
    return is_abort or says_lost_peer(problem)


class _Probes:
    """The processes of this node that measure."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._deadline = time.monotonic() + _START_S + _CCL_S
        self._files = contextlib.ExitStack()
        self._running: list[_Probe] = []

    def add(
        self, python: str, request: dict[str, Any], environment: dict[str, str]
    ) -> None:
        """Starts another one."""
        files = self._files
        # Files, not pipes: nobody reads while they run, and a full pipe would stop them.
        output = files.enter_context(process.unnamed_file())
        errors = files.enter_context(process.unnamed_file())
        # By its path: the program's Python may lack this package.
        command = interpreter.foreign_script(python, str(_PROBE), json.dumps(request))
        running = process.start(
            command,
            env=interpreter.library_environment(environment),
            stdout=output,
            stderr=errors,
            pass_fds=reserved_descriptors(environment),
        )
        self._running.append(_Probe(running, output, errors))

    def are_running(self) -> bool:
        """Returns whether some have still to end, and none has failed."""
        codes = [probe.process.poll() for probe in self._running]
        return None in codes and not self.problems()

    def problems(self) -> list[str]:
        """Returns why those that failed did."""
        problems = []
        for probe in self._running:
            problem = probe.problem(time.monotonic() > self._deadline)
            if problem is not None:
                problems.append(f"on {self._host}: {problem}")
        return problems

    def seconds(self) -> dict[str, float]:
        """Returns what the first one has measured, by library."""
        # The last line has the most.
        lines = _text(self._running[0].output).splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                return loads(line, dict[str, float])
        return {}

    def close(self) -> None:
        """Kills those that are left."""
        for probe in self._running:
            process.end(probe.process)
        pids = [probe.process.pid for probe in self._running]
        ccl.remove_shared_memory(pids, Path("/dev/shm"))
        self._files.close()


@dataclass(frozen=True, slots=True)
class _Probe:
    process: subprocess.Popen[bytes]
    output: BinaryIO
    errors: BinaryIO

    def problem(self, is_late: bool) -> str | None:
        """Returns why it failed; None: it has not."""
        code = self.process.poll()
        if code is None:
            if is_late:
                return f"it takes more than {_START_S + _CCL_S} s"
            return None
        if code == 0:
            return None
        if code < 0:
            return f"killed by {process.signal_name(-code)}"
        errors = _text(self.errors)
        if _HANGS in errors:
            return f"no answer within {_CCL_S} s"
        # Empty, where it printed nothing.
        last_line = errors.rstrip().rpartition("\n")[2]
        # torch puts the rank before each line.
        return re.sub(r"^\[rank\d+\]: ", "", last_line) or f"exit code {code}"


def _text(file: BinaryIO) -> str:
    # By its descriptor: the position of the file is the child's, too.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")
