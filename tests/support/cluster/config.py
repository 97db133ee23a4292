"""What the cluster is: a frozen description, its paths, and the daemons' configuration files."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.network import (
    LOGIN,
    LOGIN_ADDRESS,
    MARIADB_PORT,
    SLURMCTLD_PORT,
    SLURMD_PORT,
    SLURMDBD_PORT,
    address,
)

DEFAULT_ROOT = Path("/tmp/slurmft-cluster")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster's shape and rules. Everything in it is private to `root`."""

    root: Path = DEFAULT_ROOT
    nodes: int = 4
    cpus_per_node: int = 4
    """Declared to Slurm, whatever the machine has."""
    memory_mb: int = 4000
    """Declared for each node; jobs may ask for it, nothing enforces it."""
    grace_time_s: int = 20
    """From a preempted batch job's first SIGTERM to its end; 0 leaves it KillWait."""
    kill_wait_s: int = 10
    slurmd_timeout_s: int = 15
    """Silence after which slurmctld calls a node DOWN and requeues its jobs."""
    requeue_delay_s: int = 5
    """Slurm's cred_expire: how long a requeued job waits before it may start (default 120)."""
    extra_conf: tuple[str, ...] = ()
    """More lines of slurm.conf, such as SlurmctldParameters=preempt_send_user_signal."""

    @property
    def hosts(self) -> list[str]:
        """The node names, n1 to nN."""
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    @property
    def slurm_conf(self) -> Path:
        """The one file a client needs to know; slurmdbd.conf must lie beside it."""
        return self.root / "etc" / "slurm.conf"

    @property
    def logs(self) -> Path:
        """Where every daemon logs."""
        return self.root / "log"

    @property
    def data(self) -> Path:
        """MariaDB's files."""
        return self.root / "mariadb"

    @property
    def munge_key(self) -> Path:
        """The secret shared by all hosts."""
        return self.root / "munge" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """One munged serves all hosts: a socket file knows no network namespace."""
        return self.root / "munge" / "munge.socket"

    def save(self) -> None:
        """Writes the description for a later process, see `load`."""
        fields = dataclasses.asdict(self) | {"root": str(self.root)}
        (self.root / "site.json").write_text(json.dumps(fields, indent=1) + "\n")

    @staticmethod
    def load(root: Path) -> Site | None:
        """Reads the description of the cluster at `root`, None when there is none."""
        try:
            fields = json.loads((root / "site.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        fields |= {"root": root, "extra_conf": tuple(fields["extra_conf"])}
        return Site(**fields)


def write(site: Site) -> None:
    """Writes folders, key and configuration files."""
    password = secrets.token_hex(16)
    folders = ["etc", "log", "munge", "mariadb", "state", "run"]
    for name in [*folders, *(f"spool/{host}" for host in site.hosts)]:
        (site.root / name).mkdir(parents=True, mode=0o755)
    _secret(site.munge_key, os.urandom(128))
    _secret(
        site.slurm_conf.with_name("slurmdbd.conf"),
        slurmdbd_conf(site, password).encode(),
    )
    _secret(site.root / "etc" / "init.sql", init_sql(password).encode())
    site.slurm_conf.write_text(slurm_conf(site))
    # We use no cgroups. The default (autodetect) ends slurmd where none are mounted, and with
    # cgroup v2 it asks systemd for a scope; v1 touches nothing until it is used.
    (site.root / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _secret(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def init_sql(password: str) -> str:
    """Returns what MariaDB executes when it starts."""
    return (
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
        f"CREATE OR REPLACE USER slurm@'%' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO slurm@'%';\n"
    )


def slurmdbd_conf(site: Site, password: str) -> str:
    """Returns slurmdbd.conf."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={site.munge_socket}
DbdHost={LOGIN}
DbdAddr={LOGIN_ADDRESS}
DbdPort={SLURMDBD_PORT}
SlurmUser=root
PidFile={site.root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={MARIADB_PORT}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""


def slurm_conf(site: Site) -> str:
    """Returns slurm.conf."""
    parts = [
        _control(site),
        _timing(site),
        _scheduling(),
        _accounting(site),
        _nodes(site),
    ]
    return "\n".join([*parts, *site.extra_conf]) + "\n"


def _control(site: Site) -> str:
    return f"""\
ClusterName=slurmft
SlurmctldHost={LOGIN}({LOGIN_ADDRESS})
SlurmctldPort={SLURMCTLD_PORT}
SlurmdPort={SLURMD_PORT}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits.
AuthInfo=socket={site.munge_socket},cred_expire={site.requeue_delay_s}
StateSaveLocation={site.root}/state
SlurmdSpoolDir={site.root}/spool/%n
SlurmctldPidFile={site.root}/run/slurmctld.pid
SlurmdPidFile={site.root}/run/slurmd-%n.pid
SlurmdLogFile={site.logs}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
"""


def _timing(site: Site) -> str:
    return f"""\
SlurmdTimeout={site.slurmd_timeout_s}
SlurmctldTimeout=30
KillWait={site.kill_wait_s}
MessageTimeout=5
BatchStartTimeout=15
TCPTimeout=2
InactiveLimit=20
CompleteWait=0
MinJobAge=300
UnkillableStepTimeout=60
"""


def _scheduling() -> str:
    return """\
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


def _accounting(site: Site) -> str:
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={LOGIN}
AccountingStoragePort={SLURMDBD_PORT}
# With munge this "password" is a socket; AuthInfo is not used towards slurmdbd.
AccountingStoragePass={site.munge_socket}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
"""


def _nodes(site: Site) -> str:
    shape = f"CPUs={site.cpus_per_node} Boards=1 SocketsPerBoard=1"
    shape += f" CoresPerSocket={site.cpus_per_node} ThreadsPerCore=1 RealMemory={site.memory_mb}"
    lines = [
        f"NodeName={h} NodeAddr={address(h)} {shape} State=UNKNOWN" for h in site.hosts
    ]
    lines += [
        f"PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE "
        f"GraceTime={site.grace_time_s} DefaultTime=10 MaxTime=60 State=UP",
        "PartitionName=urgent Nodes=ALL Default=NO PriorityTier=10 PreemptMode=OFF "
        "DefaultTime=10 MaxTime=60 State=UP",
    ]
    return "\n".join(lines)
