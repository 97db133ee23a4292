"""The cluster: start it, stop it, run commands on it, break it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from tests.support import PATIENCE_S
from tests.support.cluster import config, lock, network, node, system
from tests.support.cluster.config import DEFAULT_ROOT, Site
from tests.support.cluster.system import ClusterError

SOCKET_MAX = 107
"""Bytes in a Unix socket's path, in Linux."""

PLAIN_PATH = re.compile(r"[\w./+-]+", re.ASCII)
"""What slurm.conf, AuthInfo and MariaDB's options take without quoting."""


class Cluster(system.LoginHost):
    """A Slurm of N nodes in network namespaces. One at a time on a machine.

    The daemons outlive the Python process; `down` or the next `up` ends them, whatever their root,
    unless the process that started them by `with Cluster()` is still in there.
    """

    def __init__(
        self,
        nodes: int = 4,
        cpus_per_node: int = 4,
        root: Path = DEFAULT_ROOT,
        *,
        grace_time_s: int = 20,
        requeue_delay_s: int = 5,
        extra_conf: Sequence[str] = (),
    ) -> None:
        if not (1 <= nodes <= 200 and cpus_per_node >= 1):
            raise ClusterError(
                f"{nodes} nodes of {cpus_per_node} CPUs\nhint: 1 to 200, 1 or more"
            )
        if not PLAIN_PATH.fullmatch(str(root)):
            raise ClusterError(
                f"root {str(root)!r}\nhint: only letters, digits and _ . / + -"
            )
        self.site = Site(
            root=Path(root).resolve(),
            nodes=nodes,
            cpus_per_node=cpus_per_node,
            grace_time_s=grace_time_s,
            requeue_delay_s=requeue_delay_s,
            extra_conf=tuple(extra_conf),
        )
        self._session = contextlib.ExitStack()
        """Holds the machine's lock, from __enter__ to __exit__."""

    @classmethod
    def attach(cls, root: Path = DEFAULT_ROOT) -> Cluster:
        """Returns the cluster that an earlier process started at `root`.

        Raises:
            ClusterError: there is none.
        """
        system.require()
        site = Site.load(Path(root).resolve())
        if site is None or not system.marked("slurmctld"):
            raise ClusterError(
                f"no cluster runs at {root}\nhint: python -m tests.support.cluster up 4"
            )
        cluster = cls(root=root)
        cluster.site = site
        return cluster

    def __enter__(self) -> Cluster:
        system.require()
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock.held(lock.SESSION))
            self._up()
            self._session = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._session:
            self._tear_down()

    @property
    def hosts(self) -> list[str]:
        """The node names, n1 to nN."""
        return self.site.hosts

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.site.slurm_conf)}

    # Up and down.

    def up(self) -> None:
        """Starts everything; returns when every node is idle and accounting answers.

        Raises:
            ClusterError: with the ends of the daemons' logs, and nothing is left running; or a
                living session has the cluster, and nothing was touched.
        """
        system.require()
        with lock.held(lock.UP):
            self._up()

    def down(self) -> None:
        """Ends all processes and removes the network, of whoever started it; the logs stay.

        Raises:
            ClusterError: a living session has the cluster.
        """
        system.require()
        with lock.held(lock.DOWN):
            self._tear_down()

    def _up(self) -> None:
        self._tear_down()
        self._make_folders()
        try:
            self._start()
        except BaseException as error:
            self._tear_down()
            if isinstance(error, ClusterError):
                raise ClusterError(f"{error}\n{self._tails()}") from error
            raise

    def _tear_down(self) -> None:
        # Jobs write to disk and keep namespaces alive, so processes go first.
        system.kill_until_gone(
            lambda: system.marked() | system.inside(network.namespaces())
        )
        network.destroy()

    def _make_folders(self) -> None:
        root, ours = self.site.root, self.site.root / "site.json"
        if root.exists() and any(root.iterdir()) and not ours.exists():
            raise ClusterError(
                f"{root} is no cluster's folder\nhint: give an empty or new root"
            )
        if len(os.fsencode(self.site.munge_socket)) > SOCKET_MAX:
            raise ClusterError(
                f"{root} is too long for socket names\nhint: a shorter root"
            )
        root.mkdir(parents=True, mode=0o755, exist_ok=True)
        # Whenever we are killed, the folder is either empty or holds the file that says "ours".
        self.site.save()
        for old in root.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
            elif old != ours:
                old.unlink()
        config.write(self.site)

    def _start(self) -> None:
        self._install_database()
        self._start_munged()
        self._start_database()
        network.create(self.hosts)
        node.share_mounts()
        for host in self.hosts:
            self._start_node(host)
        system.wait_until(
            "mariadbd listens", lambda: system.listening(network.MARIADB_PORT)
        )
        self._start_slurm("slurmdbd", network.SLURMDBD_PORT)
        self.run(["sacctmgr", "-i", "add", "cluster", "slurmft"])
        self._start_slurm("slurmctld", network.SLURMCTLD_PORT)
        self._start_slurmds()
        system.wait_until("slurmctld registered with slurmdbd", self._accounted)

    def _install_database(self) -> None:
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={self.site.data}"]
        quiet = [
            "--user=root",
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
        ]
        system.sh(*install, *quiet, *_innodb(), timeout=PATIENCE_S)

    def _start_munged(self) -> None:
        run, socket = self.site.root / "run", self.site.munge_socket
        files = {"key-file": self.site.munge_key, "socket": socket}
        files |= {"pid-file": run / "munged.pid", "seed-file": run / "munged.seed"}
        options = [f"--{name}={path}" for name, path in files.items()]
        # --force: a folder of root that others may write to (a CI workspace) is only a warning.
        self._spawn("munged", ["munged", "--foreground", "--force", *options])
        system.wait_until("munged's socket", socket.exists)

    def _start_database(self) -> None:
        files = {
            "datadir": self.site.data,
            "socket": self.site.root / "run" / "mariadb.socket",
        }
        files |= {"pid-file": self.site.root / "run" / "mariadb.pid"}
        files |= {"init-file": self.site.root / "etc" / "init.sql"}
        options = [f"--{name}={path}" for name, path in files.items()]
        local = [
            f"--port={network.MARIADB_PORT}",
            "--bind-address=127.0.0.1",
            "--user=root",
        ]
        argv = [
            "mariadbd",
            "--no-defaults",
            *options,
            *local,
            "--skip-name-resolve",
            *_innodb(),
        ]
        self._spawn("mariadbd", argv)

    def _start_slurm(self, daemon: str, port: int) -> None:
        # Both daemons refuse to start on a machine that has not the configured host name.
        pid = self._spawn(daemon, network.as_host(network.LOGIN, [daemon, "-D"]))

        def ready() -> bool:
            if system.ended(pid):
                raise ClusterError(f"{daemon} ended at once")
            return system.listening(port)

        system.wait_until(f"{daemon} listens", ready)

    def _start_slurmds(self) -> None:
        pids = {host: self._spawn_slurmd(host) for host in self.hosts}

        def ready() -> bool:
            if dead := [host for host, pid in pids.items() if system.ended(pid)]:
                raise ClusterError(f"slurmd ended at once on {' '.join(dead)}")
            return self._all_idle()

        system.wait_until("all nodes idle", ready, PATIENCE_S + 2 * len(self.hosts))

    def _start_node(self, host: str) -> None:
        self._spawn(node.mark(host), node.first_command(host))
        system.wait_until(f"{host} is up", lambda: node.is_up(host))

    def _spawn_slurmd(self, host: str, shown: tuple[Path, Path] | None = None) -> int:
        slurmd = ["slurmd", "-D", "-N", host]
        if shown is not None:
            bind = 'mount --bind "$0" "$1" && shift && exec "$@"'
            slurmd = [
                "unshare",
                "--mount",
                "bash",
                "-c",
                bind,
                *map(str, shown),
                *slurmd,
            ]
        if not node.is_up(host):  # its power was cut
            self._start_node(host)
        first_process = min(system.marked(node.mark(host)))
        # What the one before has forked may be on the way to its own program, with this port open.
        system.wait_until(
            f"nobody on {host} listens on slurmd's port",
            lambda: not system.listening(network.SLURMD_PORT, first_process),
        )
        argv = node.inside_command(host, slurmd)
        return self._spawn(f"slurmd-{host}", argv, log=f"slurmd-{host}.out")

    def _spawn(self, name: str, argv: Sequence[str], log: str | None = None) -> int:
        return system.spawn(
            argv, name, self.site.logs / (log or f"{name}.log"), self.env
        )

    def _accounted(self) -> bool:
        # slurmctld's address in the database: from then on, jobs reach sacct at once.
        shown = self.run(
            ["sacctmgr", "-nP", "show", "cluster", "format=controlhost"], check=False
        )
        return (
            bool(shown.stdout.strip())
            and self.run(["sacct"], check=False).returncode == 0
        )

    def _tails(self, lines: int = 12) -> str:
        parts = []
        for log in sorted(self.site.logs.iterdir()):
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            # slurmd says everything twice; what it said before it opened its log is in .out only.
            if tail and not (log.suffix == ".out" and log.with_suffix(".log").exists()):
                parts.append(f"--- {log}\n" + "\n".join(tail))
        parts.append(f"hint: read the whole logs in {self.site.logs}; then `up` again")
        return "\n".join(parts)

    # Use.

    def _command(self, argv: Sequence[str], on: str | None) -> Sequence[str]:
        return network.as_host(self._host(on) if on else network.LOGIN, argv)

    def node_states(self) -> dict[str, str]:
        """Returns sinfo's word for every node; a `*` at its end means that it does not answer."""
        shown = self.run(["sinfo", "-hN", "-p", "batch", "-o", "%N %T"]).stdout
        return dict(line.split() for line in shown.splitlines())

    def wait_state(self, host: str, state: str, timeout_s: float = PATIENCE_S) -> None:
        """Waits until sinfo calls the node so, for example "idle" or "down*"."""
        self._host(host)
        what = f"{host} is {state}"
        system.wait_until(
            what, lambda: self.node_states().get(host) == state, timeout_s
        )

    def wait_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until no job is queued and every node is idle."""

        def quiet() -> bool:
            return not self.run(["squeue", "-h"]).stdout.strip() and self._all_idle()

        try:
            system.wait_until("no job queued, all nodes idle", quiet, timeout_s)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self._situation()}") from None

    def _situation(self) -> str:
        """The queue, the nodes with the reasons of their states, and the ends of all logs."""
        commands = (
            ["squeue", "-o", "%i %T %r %N"],
            ["sinfo", "-N", "-o", "%N %T %E"],
        )
        parts = [self.run(command, check=False).stdout for command in commands]
        return "\n".join([*parts, self._tails()])

    def accounting(
        self, job: str, fields: str, *options: str, starts: int = 1
    ) -> list[list[str]]:
        """The rows of sacct for a job that has ended, once accounting knows of the end, and of all
        its starts: it learns of a job up to 5 s later."""
        rows: list[list[str]] = []

        def ended() -> bool:
            asked = [
                "sacct",
                "-nPX",
                *options,
                f"--jobs={job}",
                f"--format=End,{fields}",
            ]
            lines = self.run(asked).stdout.splitlines()
            rows[:] = [line.split("|") for line in lines]
            return len(rows) == starts and all(row[0] != "Unknown" for row in rows)

        system.wait_until(f"accounting knows how job {job} ended", ended)
        return [row[1:] for row in rows]

    def _all_idle(self) -> bool:
        states = self.node_states()
        return sorted(states) == sorted(self.hosts) and set(states.values()) == {"idle"}

    def processes(self, host: str) -> list[tuple[int, str]]:
        """Lists what runs on the node but slurmd: pid and command line. Empty on an idle node."""
        found = []
        for pid in sorted(system.inside([network.namespace(self._host(host))])):
            argv = system.argv_of(pid)
            if argv and argv[0] != "slurmd" and not node.is_of_the_node(argv):
                found.append((pid, " ".join(argv)))
        return found

    def _host(self, host: str) -> str:
        if host not in self.hosts:
            raise ClusterError(f"no node {host!r}\nhint: {' '.join(self.hosts)}")
        return host

    # Faults.

    def start_slurmd(self, host: str) -> None:
        """Starts the node's slurmd and returns at once; see `wait_state`."""
        self._spawn_slurmd(self._host(host))

    def kill_slurmd(self, host: str) -> None:
        """Kills the node's slurmd alone, as a crash would; its jobs run on."""
        system.kill_until_gone(lambda: self.slurmd(host))

    def slurmd(self, host: str) -> set[int]:
        """Returns the processes of the node's slurmd: all of a job there descend from them."""
        here = system.inside([network.namespace(self._host(host))])
        return {pid for pid in here if system.argv_of(pid)[:1] == ["slurmd"]}

    def kill_host(self, host: str) -> None:
        """Kills all that runs on the node, as a power cut would."""
        system.kill_until_gone(
            lambda: system.inside([network.namespace(self._host(host))])
        )

    def link(self, host: str, up: bool) -> None:
        """Pulls the node's network cable, or plugs it in again.

        slurmctld asks a DOWN node at every 20th ping only (100 s here); SIGHUP makes slurmd
        register by itself, as an administrator would.
        """
        network.set_link(self._host(host), up)
        for pid in self.slurmd(host) if up else ():
            os.kill(pid, signal.SIGHUP)

    @contextlib.contextmanager
    def showing(self, folders: Sequence[Path], path: Path) -> Iterator[None]:
        """Shows the nodes different folders, one each in turn, under one path."""
        try:
            self._show(folders, path)
            yield
        finally:
            self._show([], path)

    def _show(self, folders: Sequence[Path], path: Path) -> None:
        """Restarts every slurmd: what it starts sees what it sees."""
        for number, host in enumerate(self.hosts):
            self.kill_slurmd(host)
            self._spawn_slurmd(
                host, (folders[number % len(folders)], path) if folders else None
            )
        start = ["srun", f"--nodes={len(self.hosts)}", "true"]
        system.wait_until(
            "nodes run tasks", lambda: self.run(start, check=False).returncode == 0
        )

    def shape(self, rate: str | None, *hosts: str) -> None:
        """Limits nodes' network in both directions, for example to "1gbit"; without hosts, all."""
        for host in hosts or self.hosts:
            network.shape(self._host(host), rate)

    @contextlib.contextmanager
    def slow(self, host: str, rate: str) -> Iterator[None]:
        """Limits a node's network for the block."""
        try:
            self.shape(rate, host)
            yield
        finally:
            self.shape(None, host)

    @contextlib.contextmanager
    def closed_ports(self, host: str) -> Iterator[None]:
        """Keeps a node from all ports of others that a rendezvous may take, for the block."""
        try:
            network.close_rendezvous_ports(self._host(host))
            yield
        finally:
            network.open_ports(self._host(host))

    def restart_slurmctld(self, away_s: float = 0) -> None:
        """Stops slurmctld in order, starts it again after some seconds and waits until it answers;
        jobs run on."""
        system.kill_until_gone(lambda: system.marked("slurmctld"), sig=signal.SIGTERM)
        time.sleep(away_s)
        self._start_slurm("slurmctld", network.SLURMCTLD_PORT)
        ping = ["scontrol", "ping"]
        system.wait_until(
            "slurmctld answers", lambda: self.run(ping, check=False).returncode == 0
        )


def _innodb() -> list[str]:
    """Small files and no flushing: the database lives for minutes and may be lost."""
    return [
        "--innodb-log-file-size=8M",
        "--innodb-buffer-pool-size=32M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-flush-method=nosync",
        "--loose-innodb-doublewrite=0",
    ]
