"""How many small faults do the quick tests find?

    python -m tests.support.faults_found [--seed N] [--each N] [--limit-s N] [MODULE ...]

Puts one fault after the other into a copy of the checkout: a comparison turned, a branch negated, a
result lost. Which ones is drawn by the seed. For each, it runs the test files of the module until
one test fails, and prints what nobody noticed. Tests that take far longer than without a fault have
noticed, too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import CHECKOUT

TESTS_OF = {
    "slurmft/runs/attempts.py": [
        "tests/runs/test_attempts.py", "tests/cluster/test_batch_script.py",
    ],
    "slurmft/job/checkpoints.py": [
        "tests/job/test_checkpoints.py", "tests/train/test_checkpoint.py",
    ],
    "slurmft/cluster/slurm/commands.py": [
        "tests/cluster/test_commands.py", "tests/slurm/test_waiting.py",
        "tests/slurm/test_commands.py",
    ],
    "slurmft/node/rendezvous.py": [
        "tests/node/test_rendezvous.py", "tests/node/test_peers.py", "tests/core/test_security.py",
    ],
    "slurmft/train/loop/trainer.py": [
        "tests/train/test_trainer.py", "tests/train/test_resume.py", "tests/train/test_optim.py",
    ],
    "slurmft/core/config.py": ["tests/core/test_config.py", "tests/cli/test_commands.py"],
    "slurmft/node/hardware.py": ["tests/node/test_profiles.py"],
    "slurmft/train/engine/fused_layers.py": ["tests/train/test_fused_layers.py"],
    "slurmft/runs/rundir.py": [
        "tests/runs/test_rundir.py", "tests/runs/test_scan.py", "tests/cli/test_life.py",
    ],
    "slurmft/job/job.py": ["tests/job/test_job.py", "tests/job/test_checkpoints.py"],
    "slurmft/train/engine/packing.py": ["tests/train/test_packing.py"],
    "slurmft/locks/__init__.py": ["tests/locks/test_locks.py"],
}  # fmt: skip
"""Module -> the test files that belong to it, the likeliest first."""

# How long the tests of a module may take without a fault: on a busy machine, long.
_WITHOUT_FAULT_S = 1200.0
# With a fault they hang if they take so many times longer, and at least so long.
_LONGER = 3.0
_LEAST_S = 240.0
_END_S = 60.0
_TURNED: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_FALSE = ("None", "False")


@dataclass(frozen=True)
class SmallFault:
    """A piece of a module's source, and what stands in its place."""

    module: str
    line: int
    kind: str
    old: str
    new: str
    start: int
    """The place of `old`, in bytes."""

    def applied(self, source: bytes) -> bytes:
        end = self.start + len(self.old.encode())
        return source[: self.start] + self.new.encode() + source[end:]

    def __str__(self) -> str:
        old = " ".join(self.old.split())
        return f"{self.module}:{self.line}: {self.kind}: {old[:60]}"


def possible(module: str, source: bytes) -> list[SmallFault]:
    """Returns all faults that a module could have, in the order of its lines."""
    lines = source.split(b"\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def fault(kind: str, node: ast.expr | ast.stmt, new: str) -> SmallFault:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return SmallFault(
            module, node.lineno, kind, source[start:end].decode(), new, start
        )

    found = []
    for node in _behaviour(ast.parse(source)):
        match node:
            case ast.Compare(ops=[operator]):
                left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
                new = f"({left}) {_TURNED[type(operator)]} ({right})"
                found.append(fault("a comparison turned", node, new))
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                found.append(
                    fault("a branch negated", test, f"(not ({ast.unparse(test)}))")
                )
            # None in place of False is no fault: callers ask for truth.
            case ast.Return(value=ast.expr() as value) if (
                ast.unparse(value) not in _FALSE
            ):
                found.append(fault("a result lost", node, "return None"))
            case ast.Expr(value=ast.Call()):
                found.append(fault("a call lost", node, "pass"))
    return sorted(found, key=lambda fault: (fault.start, fault.kind))


def _behaviour(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of what runs: not what only type checkers read, nor a module's own start."""
    for statement in tree.body:
        words = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
        if "TYPE_CHECKING" not in words and "__main__" not in words:
            yield from ast.walk(statement)


def drawn(module: str, source: bytes, count: int, seed: int) -> list[SmallFault]:
    """Returns `count` faults of a module, always the same for a seed."""
    candidates = possible(module, source)
    generator = random.Random(f"{seed} {module}")
    return sorted(
        generator.sample(candidates, min(count, len(candidates))),
        key=lambda fault: fault.start,
    )


def run_tests(checkout: Path, tests: list[str], limit_s: float) -> str:
    """Runs tests until one fails; returns "passed", "failed", or "late" at the time limit."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=quiet, stderr=quiet
    ) as pytest:
        try:
            code = pytest.wait(limit_s)
        except subprocess.TimeoutExpired:
            # As Ctrl-C: pytest ends what its tests have started.
            pytest.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.wait(_END_S)
            pytest.kill()
            return "late"
    return "failed" if code else "passed"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help="default: all twelve"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=5, help="faults of a module")
    parser.add_argument(
        "--limit-s", type=float, default=3600.0, help="stop after this time"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    found = total = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        ignored = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", "__pycache__")
        shutil.copytree(CHECKOUT, checkout, symlinks=True, ignore=ignored)
        for module in options.modules or TESTS_OF:
            path = checkout / module
            source = path.read_bytes()
            began = time.monotonic()
            outcome = run_tests(checkout, TESTS_OF[module], _WITHOUT_FAULT_S)
            if outcome != "passed":
                print(f"{module}: its tests without a fault: {outcome}", flush=True)
                continue
            limit_s = max(_LEAST_S, _LONGER * (time.monotonic() - began))
            for fault in drawn(module, source, options.each, options.seed):
                if time.monotonic() > deadline:
                    print(f"stopped after {options.limit_s:g} s")
                    break
                path.write_bytes(fault.applied(source))
                outcome = run_tests(checkout, TESTS_OF[module], limit_s)
                path.write_bytes(source)
                found += outcome != "passed"
                total += 1
                # One that is late may be read again: a busy machine is late, too.
                word = {"passed": "NOT FOUND", "failed": "found", "late": "late"}[
                    outcome
                ]
                print(f"{word:9} {fault}", flush=True)
    print(f"{found} of {total} faults found")


if __name__ == "__main__":
    main()
