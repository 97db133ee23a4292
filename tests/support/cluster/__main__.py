"""The test cluster by hand: python -m tests.support.cluster up 4."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.config import DEFAULT_ROOT
from tests.support.cluster.system import ClusterError

EXAMPLES = """\
examples:
  python -m tests.support.cluster up 4            four nodes, n1 to n4
  eval "$(python -m tests.support.cluster env)"   then srun, sbatch, squeue work in this shell
  srun -N4 --time=1 hostname
  python -m tests.support.cluster status          nodes, queue, last jobs
  python -m tests.support.cluster down            ends all processes, removes the network
"""


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    shape = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m tests.support.cluster",
        description="A real Slurm of several nodes on this machine, for tests. Needs root.",
        epilog=EXAMPLES,
        formatter_class=shape,
    )
    top.add_argument(
        "--root", type=Path, default=DEFAULT_ROOT, help="its folder (%(default)s)"
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser(
        "up", help="start it; replaces one that no test session is using"
    )
    up.add_argument("nodes", type=int, nargs="?", default=4, help="nodes (%(default)s)")
    up.add_argument("--cpus", type=int, default=4, help="CPUs per node (%(default)s)")
    up.add_argument(
        "--grace", type=int, default=20, help="preemption grace, s (%(default)s)"
    )
    up.add_argument(
        "--conf", action="append", default=[], help="one more line of slurm.conf"
    )
    commands.add_parser("down", help="end it")
    commands.add_parser("status", help="show nodes, queue and last jobs")
    commands.add_parser("env", help="print the export lines for eval")
    return top


def up(args: argparse.Namespace) -> None:
    """Starts the cluster and says what to type next."""
    start = time.monotonic()
    cluster = Cluster(
        args.nodes, args.cpus, args.root, grace_time_s=args.grace, extra_conf=args.conf
    )
    cluster.up()
    root = "" if args.root == DEFAULT_ROOT else f" --root {shlex.quote(str(args.root))}"
    print(
        f"up after {time.monotonic() - start:.1f} s: {' '.join(cluster.hosts)}; next:\n"
    )
    print(f'  eval "$(python -m tests.support.cluster{root} env)"')
    print(f"  srun -N{args.nodes} --time=1 hostname")
    print(f"  python -m tests.support.cluster{root} status")
    print(f"  python -m tests.support.cluster{root} down\n")
    print(f"logs: {cluster.site.logs}")
    print("nobody holds it now: the next `up`, or tests on Slurm, replace it")


def down(args: argparse.Namespace) -> None:
    """Ends the cluster."""
    cluster = Cluster(root=args.root)
    cluster.down()
    print(f"down; the logs stay in {cluster.site.logs}")


def status(args: argparse.Namespace) -> None:
    """Shows nodes, queue, and the last hour's jobs."""
    cluster = Cluster.attach(args.root)
    columns = "jobid,jobname,partition,nnodes,state,exitcode,elapsed"
    jobs = ["sacct", "-X", "-S", "now-1hour", f"--format={columns}"]
    for argv in (["sinfo"], ["squeue"], jobs):
        print(f"$ {shlex.join(argv)}\n{cluster.run(argv).stdout}")


def env(args: argparse.Namespace) -> None:
    """Prints what a shell needs."""
    for name, value in Cluster.attach(args.root).env.items():
        print(f"export {name}={shlex.quote(value)}")


def main() -> int:
    """Runs one command."""
    args = parser().parse_args()
    command = {"up": up, "down": down, "status": status, "env": env}[args.command]
    try:
        command(args)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
