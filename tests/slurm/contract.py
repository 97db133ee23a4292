"""What slurmft relies on of Slurm's commands. The real Slurm and the fake one (tests/support/
fake_slurm) pass the same tests: test_contract.py and test_contract_real.py."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from slurmft.cluster.slurm.commands import (
    Grant,
    Partition,
    parse_grant,
    parse_partitions,
)
from slurmft.cluster.slurm.sbatch_options import directives
from tests.support import until

FORMAT = "--format=%i|%T|%r"
SLEEPS = '#!/bin/sh\nsleep "$1"\nexit "${2:-0}"\n'
AWAITS_GO = '#!/bin/sh\nuntil [ -e "$1/go" ]; do sleep 0.2; done\n'
QUIET = "--output=/dev/null"


class Slurm(Protocol):
    """A cluster, real or fake."""

    @property
    def hosts(self) -> list[str]: ...

    def run(
        self, argv: Sequence[str], *, check: bool = True, cwd: Path | str | None = None
    ) -> subprocess.CompletedProcess[str]: ...


@dataclass
class Site:
    """A Slurm, and a folder with a script that sleeps and then ends with an exit code."""

    slurm: Slurm
    folder: Path

    @property
    def sleeps(self) -> str:
        return str(self.folder / "sleeps.sh")

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def submit(self, *words: str) -> str:
        """Returns the id of a new job."""
        command = ["sbatch", "--parsable", *words]
        if not any(word.startswith("--output") for word in words):
            command.insert(2, QUIET)
        return self.slurm.run(command, cwd=self.folder).stdout.strip()

    def output(self, *command: str) -> str:
        return self.slurm.run(list(command)).stdout

    def refusal(self, *command: str) -> tuple[int, str]:
        """Returns the exit code and stderr of a command that fails and prints nothing else."""
        done = self.slurm.run(list(command), check=False, cwd=self.folder)
        assert done.stdout == ""
        return done.returncode, done.stderr

    def queued(self, job: str, *options: str) -> list[str]:
        """Returns the lines of squeue for a job: id, state, reason."""
        return self.output(
            "squeue", "-h", f"--jobs={job}", *options, FORMAT
        ).splitlines()

    def await_queued(self, job: str, line: str, *options: str) -> None:
        until(
            lambda: line in self.queued(job, *options),
            lambda: self.queued(job, *options),
        )

    def await_running(self, job: str) -> None:
        self.await_queued(job, f"{job}|RUNNING|None")

    def await_end(self, job: str) -> None:
        """Waits until the controller lists a job no longer among those that wait or run."""
        until(lambda: not self.queued(job), lambda: self.queued(job))

    def accounted(
        self, job: str, fields: str = "State,ExitCode", *options: str
    ) -> list[str]:
        return self.output(
            "sacct", "-nPX", *options, f"-j{job}", f"--format={fields}"
        ).splitlines()

    def await_accounted(
        self, job: str, *lines: str, options: tuple[str, ...] = ()
    ) -> None:
        def rows() -> list[str]:
            return self.accounted(job, "State,ExitCode", *options)

        until(lambda: rows() == list(lines), rows)

    def facts(self, job: str) -> str:
        return self.output("scontrol", "show", "job", job)


def partitions_of(site: Site) -> list[Partition]:
    text = site.output("sinfo", "--noheader", "--format=%R|%a|%l|%D|%c")
    return parse_partitions(text)


def first_line(path: Path) -> str:
    """Waits for the first whole line of a file that a job writes."""
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text().splitlines()[0]


@dataclass
class Submitted:
    """Jobs that are submitted together, each for one of the tests."""

    succeeds: str
    fails: str
    is_killed: str
    array: str
    too_many_nodes: str
    too_much_time: str
    is_held: str
    begins_later: str
    after_success: str
    after_failure: str
    after_failure_or_never: str
    after_any: str
    comes_after_nothing: str


@pytest.fixture(scope="module")
def jobs(site: Site) -> Submitted:
    sleeps = site.sleeps
    succeeds = site.submit(sleeps, "0")
    fails = site.submit("--no-requeue", sleeps, "0", "7")
    return Submitted(
        succeeds=succeeds,
        fails=fails,
        is_killed=site.submit(site.write("kills.sh", "#!/bin/sh\nkill -KILL $$\n")),
        array=site.submit(
            "--array=0-3%2", site.write("array.sh", AWAITS_GO), str(site.folder)
        ),
        too_many_nodes=site.submit("--nodes=5", sleeps, "0"),
        too_much_time=site.submit("--time=10:00:00", sleeps, "0"),
        is_held=site.submit("--hold", sleeps, "0"),
        begins_later=site.submit("--begin=now+1hour", sleeps, "0"),
        after_success=site.submit(f"--dependency=afterok:{succeeds}", sleeps, "0"),
        after_failure=site.submit(
            f"--dependency=afterok:{fails}", "--kill-on-invalid-dep=yes", sleeps, "0"
        ),
        after_failure_or_never=site.submit(
            f"--dependency=afterok:{fails}", sleeps, "0"
        ),
        after_any=site.submit(f"--dependency=afterany:{succeeds}:{fails}", sleeps, "0"),
        comes_after_nothing=site.submit("--dependency=afterok:99999", sleeps, "0"),
    )


class Contract:
    """The tests; where one waits, the jobs of others go on meanwhile."""

    # --- what sbatch refuses ----------------------------------------------------------------------

    def test_partition_that_is_not_there(self, site: Site) -> None:
        code, text = site.refusal("sbatch", "--partition=gpu", site.sleeps)
        assert code == 1
        assert text == (
            "sbatch: error: invalid partition specified: gpu\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
        )

    def test_option_that_is_not_known(self, site: Site) -> None:
        code, text = site.refusal("sbatch", "--nosuchoption=1", site.sleeps)
        assert code == 255
        assert text.startswith("sbatch: unrecognized option '--nosuchoption=1'\n")

    def test_time_that_is_none(self, site: Site) -> None:
        found = site.refusal("sbatch", "--time=soon", site.sleeps)
        assert found == (255, "sbatch: error: Invalid --time specification\n")

    def test_memory_that_no_node_has(self, site: Site) -> None:
        code, text = site.refusal("sbatch", "--mem=99G", site.sleeps)
        assert code == 1
        assert text.startswith(
            "sbatch: error: Memory specification can not be satisfied\n"
        )
        assert text.endswith("failed: Requested node configuration is not available\n")

    def test_node_that_is_not_there(self, site: Site) -> None:
        code, text = site.refusal("sbatch", "--nodelist=nowhere", site.sleeps)
        assert (code, text) == (
            1, "sbatch: error: Batch job submission failed: Invalid node name specified\n",
        )  # fmt: skip

    def test_array_that_is_too_large(self, site: Site) -> None:
        code, text = site.refusal("sbatch", "--array=0-2000", site.sleeps)
        assert code == 1
        assert "Invalid job array specification" in text

    def test_script_that_is_none(self, site: Site) -> None:
        code, text = site.refusal("sbatch", "nowhere.sh")
        assert (code, text) == (1, "sbatch: error: Unable to open file nowhere.sh\n")
        code, text = site.refusal("sbatch", site.write("no-script", "sleep 1\n"))
        assert code == 1
        assert text.startswith("sbatch: error: This does not look like a batch script.")

    # --- jobs that nobody knows -------------------------------------------------------------------

    def test_job_that_is_not_known(self, site: Site) -> None:
        unknown = (1, "slurm_load_jobs error: Invalid job id specified\n")
        assert site.refusal("squeue", "--jobs=999", FORMAT) == unknown
        assert site.refusal("scontrol", "show", "job", "999") == unknown
        refused = (1, "Invalid job id specified for job 999\n")
        assert site.refusal("scontrol", "requeue", "999") == refused
        assert site.refusal("scontrol", "update", "JobId=999", "Comment=x") == refused

    def test_what_is_silent_about_unknown_jobs(self, site: Site) -> None:
        assert site.output("squeue", "-h", "--jobs=998,999", FORMAT) == ""
        assert site.output("sacct", "-nPX", "--jobs=999", "--format=JobID") == ""
        assert site.output("scancel", "999") == ""

    def test_keyword_of_scontrol(self, site: Site) -> None:
        assert site.refusal("scontrol", "bogus") == (1, "invalid keyword: bogus\n")

    # --- the cluster ------------------------------------------------------------------------------

    def test_partitions(self, site: Site) -> None:
        shown = site.output("sinfo", "--noheader", "--format=%R|%a|%l|%D|%c")
        assert shown == "batch|up|1:00:00|4|4\nurgent|up|1:00:00|4|4\n"
        sizes = ("sinfo", "--noheader", "--exact", "--format=%D|%m", "-pbatch")
        assert site.output(*sizes) == "4|4000\n"
        assert site.output(*sizes, f"--nodes={site.slurm.hosts[1]}") == "1|4000\n"

    def test_cpus_that_a_job_would_get(self, site: Site) -> None:
        command = ["sbatch", "--test-only", "--nodes=2", "--ntasks-per-node=1"]
        for options, cpus in (
            ((), 2),
            (("--cpus-per-task=3",), 6),
            (("--exclusive", "--mem=0"), 8),
        ):
            words = [*command, *options, "--wrap", "true"]
            text = site.slurm.run(words).stderr
            assert parse_grant(text, partitions_of(site)) == Grant(
                cpus=cpus, cpus_per_node=4
            )

    def test_version_and_settings(self, site: Site) -> None:
        assert re.fullmatch(
            r"slurm[\w-]* \d+\.\d+\.\d+\n", site.output("sinfo", "--version")
        )
        settings = site.output("scontrol", "show", "config")
        assert re.search(r"^ClusterName +=", settings, re.MULTILINE)
        assert re.search(r"^MaxArraySize +=", settings, re.MULTILINE)

    def test_host_lists(self, site: Site) -> None:
        lists = {
            "n[1-3],m2": ["n1", "n2", "n3", "m2"],
            "n7,m[01-03,8]": ["n7", "m01", "m02", "m03", "m8"],
            "rack[1-2]-node[3-4]": [
                "rack1-node3",
                "rack1-node4",
                "rack2-node3",
                "rack2-node4",
            ],
        }
        for hostlist, hosts in lists.items():
            assert (
                site.output("scontrol", "show", "hostnames", hostlist).split() == hosts
            )

    def test_limits_of_a_user(self, site: Site) -> None:
        fields = "format=Account,QOS,MaxJobs"
        shown = site.output("sacctmgr", "-nP", "show", "assoc", "user=root", fields)
        assert shown == "root|normal|\n"

    # --- jobs that end ----------------------------------------------------------------------------

    def test_ends(self, site: Site, jobs: Submitted) -> None:
        site.await_accounted(jobs.succeeds, "COMPLETED|0:0")
        site.await_accounted(jobs.fails, "FAILED|7:0")
        site.await_accounted(jobs.is_killed, "FAILED|0:9")

    def test_controller_knows_jobs_that_have_ended(
        self, site: Site, jobs: Submitted
    ) -> None:
        site.await_end(jobs.fails)
        assert site.queued(jobs.fails) == []
        line = f"{jobs.fails}|FAILED|NonZeroExitCode"
        assert site.queued(jobs.fails, "--states=all") == [line]
        facts = site.facts(jobs.fails)
        assert f"JobId={jobs.fails} JobName=sleeps.sh\n" in facts
        assert " ExitCode=7:0\n" in facts
        assert "Requeue=0 Restarts=0 " in facts

    def test_steps_in_accounting(self, site: Site, jobs: Submitted) -> None:
        site.await_accounted(jobs.fails, "FAILED|7:0")
        shown = site.output(
            "sacct", "-nP", f"-j{jobs.fails}", "--format=JobID,State,ExitCode"
        )
        assert shown == f"{jobs.fails}|FAILED|7:0\n{jobs.fails}.batch|FAILED|7:0\n"

    def test_wait_has_the_jobs_exit_code(self, site: Site) -> None:
        command = ["sbatch", "--wait", QUIET, site.sleeps, "0", "9"]
        done = site.slurm.run(command, check=False)
        assert done.returncode == 9
        assert re.fullmatch(r"Submitted batch job \d+\n", done.stdout)

    # --- jobs that wait ---------------------------------------------------------------------------

    def test_reasons_to_wait(self, site: Site, jobs: Submitted) -> None:
        for job, reason in (
            (jobs.too_many_nodes, "PartitionNodeLimit"),
            (jobs.too_much_time, "PartitionTimeLimit"),
            (jobs.is_held, "JobHeldUser"),
            (jobs.begins_later, "BeginTime"),
        ):
            site.await_queued(job, f"{job}|PENDING|{reason}")

    def test_when_a_job_may_start(self, site: Site, jobs: Submitted) -> None:
        shown = site.output(
            "squeue", "-h", f"-j{jobs.begins_later}", "--format=%S"
        ).strip()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", shown)
        shown = site.output(
            "squeue", "-h", f"-j{jobs.is_held}", "--format=%S|%P|%D|%l|%N"
        )
        assert shown == "N/A|batch|1|10:00|\n"

    def test_dependencies(self, site: Site, jobs: Submitted) -> None:
        site.await_accounted(jobs.after_success, "COMPLETED|0:0")
        site.await_accounted(jobs.after_any, "COMPLETED|0:0")
        site.await_accounted(jobs.comes_after_nothing, "COMPLETED|0:0")
        never = "DependencyNeverSatisfied"
        waits = jobs.after_failure_or_never
        site.await_queued(waits, f"{waits}|PENDING|{never}")
        ended = jobs.after_failure
        site.await_queued(ended, f"{ended}|CANCELLED|{never}", "--states=all")

    def test_release(self, site: Site, jobs: Submitted) -> None:
        site.await_queued(jobs.is_held, f"{jobs.is_held}|PENDING|JobHeldUser")
        site.output("scontrol", "release", jobs.is_held)
        site.await_accounted(jobs.is_held, "COMPLETED|0:0")

    def test_job_that_is_cancelled_before_its_start(
        self, site: Site, jobs: Submitted
    ) -> None:
        job = jobs.too_many_nodes
        site.output("scancel", job)
        site.await_queued(job, f"{job}|CANCELLED|PartitionNodeLimit", "--states=all")
        assert site.queued(job) == []

    def test_comment_and_excluded_nodes(self, site: Site, jobs: Submitted) -> None:
        job, host = jobs.begins_later, site.slurm.hosts[1]
        site.output("scontrol", "update", f"JobId={job}", "Comment=one word = two")
        site.output("scontrol", "update", f"JobId={job}", f"ExcNodeList={host}")
        assert "   Comment=one word = two \n" in site.facts(job)
        assert f" ExcNodeList={host}\n" in site.facts(job)

    def test_requeue_of_a_job_that_waits(self, site: Site, jobs: Submitted) -> None:
        refused = site.refusal("scontrol", "requeue", jobs.begins_later)
        assert refused == (1, f"Job is pending execution for job {jobs.begins_later}\n")

    # --- arrays -----------------------------------------------------------------------------------

    def test_array(self, site: Site, jobs: Submitted) -> None:
        """Two of its tasks run at a time; those that wait are one line, or one each."""
        array = jobs.array
        site.await_queued(array, f"{array}_[2-3%2]|PENDING|JobArrayTaskLimit")
        site.await_queued(array, f"{array}_1|RUNNING|None")
        each = site.queued(array, "--array")
        assert f"{array}_2|PENDING|JobArrayTaskLimit" in each
        assert f"{array}_3|PENDING|JobArrayTaskLimit" in each
        site.output("scancel", f"{array}_3")
        (site.folder / "go").touch()
        site.await_end(array)
        rows = (f"{array}_0|COMPLETED", f"{array}_1|COMPLETED", f"{array}_2|COMPLETED")
        until(lambda: set(rows) <= set(site.accounted(array, "JobID,State")))

    def test_array_that_is_cancelled_while_it_waits(self, site: Site) -> None:
        array = site.submit("--hold", "--array=0-3%2", site.sleeps, "9")
        site.output("scancel", array)
        until(lambda: not site.queued(array))
        line = f"{array}_[0-3%2]|CANCELLED by 0"
        until(lambda: site.accounted(array, "JobID,State") == [line])

    # --- jobs that run ----------------------------------------------------------------------------

    def test_job_that_runs(self, site: Site) -> None:
        hosts = site.slurm.hosts
        job = site.submit(
            "--nodes=2", f"--nodelist={hosts[0]},{hosts[1]}", site.sleeps, "60"
        )
        site.await_running(job)
        names = site.output("squeue", "-h", f"-j{job}", "--format=%N").strip()
        assert names.endswith("[1-2]")
        assert site.output("scontrol", "show", "hostnames", names).split() == hosts[:2]
        command = site.output("squeue", "-h", f"-j{job}", "--format=%o").strip()
        assert command == f"{site.sleeps} 60"
        until(lambda: "RUNNING|0:0" in site.accounted(job))
        site.output("scancel", job)
        site.await_end(job)
        site.await_accounted(job, "CANCELLED by 0|0:0")
        assert "JobState=CANCELLED Reason=None" in site.facts(job)
        assert "ExitCode=0:15" in site.facts(job)

    def test_script_of_a_cancelled_job(self, site: Site) -> None:
        """It has some seconds, in which accounting learns who has cancelled the job."""
        report = site.folder / "report"
        # Other tests run at the same time, and sleep, too.
        sleep = f"sleep 60.{os.getpid()}{time.monotonic_ns()}"
        text = f"""#!/bin/bash
trap : TERM
srun {sleep}
squeue -h -j $SLURM_JOB_ID --format=%T >> {report}
for second in 1 2 3 4 5 6 7 8; do
  sacct -nPX -j $SLURM_JOB_ID --format=State | grep CANCELLED >> {report} && break
  sleep 1
done
"""
        job = site.submit(site.write("cancelled.sh", text))
        site.await_running(job)
        until(lambda: sleep in site.output("ps", "-eo", "args"))
        site.output("scancel", job)
        site.await_end(job)
        assert report.read_text() == "COMPLETING\nCANCELLED by 0\n"

    def test_requeue(self, site: Site) -> None:
        log = site.folder / "starts"
        text = f'#!/bin/sh\necho "${{SLURM_RESTART_COUNT-none}}" >> {log}\nsleep 60\n'
        job = site.submit("--mem=1000", site.write("starts.sh", text))
        site.await_running(job)
        until(lambda: log.exists())
        more_memory = ("scontrol", "update", f"JobId={job}", "MinMemoryNode=1500")
        refused = site.refusal(*more_memory)
        assert refused == (1, f"Job is no longer pending execution for job {job}\n")
        site.output("scontrol", "requeue", job)
        site.output(*more_memory)
        site.await_queued(job, f"{job}|PENDING|BeginTime")
        assert " MinMemoryNode=1500M " in site.facts(job)
        site.await_running(job)
        assert "Restarts=1 " in site.facts(job)
        until(lambda: log.read_text() == "none\n1\n", log.read_text)
        site.await_accounted(
            job, "REQUEUED|0:0", "RUNNING|0:0", options=("--duplicates",)
        )
        site.output("scancel", job)
        site.await_end(job)

    def test_range_of_nodes(self, site: Site) -> None:
        """A job takes as many nodes of its range as are free at each start; the fewest, if it
        says how many tasks a node has."""
        host = site.slurm.hosts[0]
        other = site.submit("--exclusive", f"--nodelist={host}", site.sleeps, "600")
        site.await_running(other)
        log = site.folder / "sizes"
        text = f"""#!/bin/sh
echo "$SLURM_JOB_NUM_NODES of $(srun hostname | wc -l)" >> {log}
sleep 600
"""
        script = site.write("range.sh", text)
        options = ("--nodes=2-4", "--exclusive")
        job = site.submit(*options, "--ntasks-per-node=1", script)
        until(log.exists)
        until(lambda: log.read_text() == "2 of 2\n", log.read_text)
        site.output("scancel", job)
        site.await_end(job)
        log.write_text("")
        job = site.submit(*options, script)
        until(lambda: log.read_text() == "3 of 3\n", log.read_text)
        site.output("scancel", other)
        site.await_end(other)
        site.output("scontrol", "requeue", job)
        until(lambda: log.read_text() == "3 of 3\n4 of 4\n", log.read_text)
        site.output("scancel", job)
        site.await_end(job)

    def test_signals(self, site: Site) -> None:
        """To the steps, or to the batch script alone."""
        step = f"""trap 'echo step >> {site.folder}/signals' USR2; echo > {site.folder}/ready
until grep -q batch {site.folder}/signals; do sleep 0.1; done"""
        site.write("step.sh", step)
        text = f"""#!/bin/bash
trap 'echo batch >> {site.folder}/signals' HUP
srun bash {site.folder}/step.sh &
wait; wait; wait
"""
        job = site.submit(site.write("signals.sh", text))
        log = site.folder / "signals"
        until((site.folder / "ready").exists)
        site.output("scancel", "--signal=USR2", job)
        until(lambda: log.exists() and log.read_text() == "step\n", log.exists)
        site.output("scancel", "--batch", "--signal=HUP", job)
        until(lambda: log.read_text() == "step\nbatch\n", log.read_text)
        site.await_accounted(job, "COMPLETED|0:0")

    def test_steps(self, site: Site) -> None:
        """srun's tasks: their places, their files, and the exit code of the worst.

        Two tasks that fail at once must not end each other: whose exit is seen first is chance.
        """
        text = f"""#!/bin/bash
srun --open-mode=append --output {site.folder}/%j_%t.log bash -c \
'echo $SLURM_PROCID $SLURM_NODEID $SLURM_LOCALID $SLURM_NTASKS $SLURMD_NODENAME'
srun bash -c 'exit $((3 + SLURM_PROCID))'
echo $?
srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 1 ] && kill -KILL $$; exec sleep 50'
echo $?
"""
        hosts = site.slurm.hosts
        job = site.submit(
            "--nodes=2", "--ntasks-per-node=1", f"--nodelist={hosts[0]},{hosts[1]}",
            f"--output={site.folder}/steps-%j.log", site.write("steps.sh", text),
        )  # fmt: skip
        site.await_accounted(job, "COMPLETED|0:0")
        for rank in (0, 1):
            line = first_line(site.folder / f"{job}_{rank}.log")
            assert line == f"{rank} {rank} 0 2 {hosts[rank]}"
        log = (site.folder / f"steps-{job}.log").read_text()
        codes = [line for line in log.splitlines() if line.isdigit()]
        assert codes[0] == "4"
        # of the killed one, or of the one ended after it
        assert codes[1] in ("137", "143")
        assert re.search(
            r"^srun: error: \S+: task 1: Exited with exit code 4$", log, re.MULTILINE
        )

    def test_environment_of_a_job(self, site: Site) -> None:
        names = [
            "JOB_ID",
            "JOB_NAME",
            "JOB_NUM_NODES",
            "JOB_PARTITION",
            "CPUS_PER_TASK",
        ]
        names += ["ARRAY_JOB_ID", "ARRAY_TASK_ID", "CLUSTER_NAME"]
        words = " ".join(f"$SLURM_{name}" for name in names)
        text = (
            f"#!/bin/bash\n#SBATCH --job-name=inside\n#SBATCH --time=3\necho {words}\n"
        )
        array = site.submit(
            "--array=5", "--cpus-per-task=2", "--job-name=outside", "--partition=urgent",
            f"--output={site.folder}/environment", site.write("environment.sh", text),
        )  # fmt: skip
        line = first_line(site.folder / "environment")
        assert line == f"{array} outside 1 urgent 2 {array} 5 slurmft"

    def test_how_long_a_job_has(self, site: Site) -> None:
        times = [("--time=7", r"[67]:\d\d"), ("--time=60", r"(1:00|59):\d\d")]
        for limit, left in times:
            job = site.submit("--partition=urgent", limit, site.sleeps, "60")
            site.await_running(job)
            text = site.output("squeue", "-h", f"--jobs={job}", "--format=%L|%e")
            assert re.fullmatch(rf"{left}\|[\d-]+T[\d:]+", text.strip())
            site.output("scancel", job)

    def test_quotes_and_backslashes_in_lines(self, site: Site) -> None:
        """A value that `directives` writes is what Slurm has."""
        comment = 'it\'s "a \\b" #c $d \\\\ \\'
        lines = "\n".join(directives([("comment", comment), ("time", "3")]))
        script = site.write("quotes.sh", f"#!/bin/sh\n{lines}\n")
        job = site.output("sbatch", "--parsable", "--hold", script).strip()
        assert f"Comment={comment} " in site.facts(job)
        site.output("scancel", job)

    def test_variables_of_sbatch(self, site: Site) -> None:
        """They are stronger than the script's lines, and weaker than options."""
        script = site.write(
            "lines.sh", "#!/bin/sh\n#SBATCH --time=3\n#SBATCH --comment=x\n"
        )
        env = "SBATCH_TIMELIMIT=4 SBATCH_PARTITION=urgent SBATCH_NO_REQUEUE=1"
        line = f"{env} sbatch --parsable --hold --partition=batch --requeue {script}"
        job = site.output("bash", "-c", line).strip()
        facts = site.facts(job)
        for fact in (
            "TimeLimit=00:04:00",
            "Partition=batch ",
            "Comment=x ",
            "Requeue=1 ",
        ):
            assert fact in facts
        site.output("scancel", job)

    def test_signal_before_the_time_limit(self, site: Site) -> None:
        """Slurm looks twice a minute at most: of a minute's limit, a signal of 50 s is early."""
        step = f"trap 'echo told > {site.folder}/told; exit 3' USR2; while :; do sleep 0.1; done"
        text = f"#!/bin/bash\nsrun bash {site.write('waits.sh', step)}\n"
        job = site.submit("--time=1", "--signal=USR2@55", site.write("limit.sh", text))
        site.await_accounted(job, "FAILED|3:0")
        assert (site.folder / "told").exists()

    def test_preemption(self, site: Site) -> None:
        """A job of a higher partition that finds no node has others requeued, who are told by
        SIGTERM."""
        step = f"trap 'echo told > {site.folder}/preempted; exit 0' TERM; "
        step += f"echo >> {site.folder}/trapped; while :; do sleep 0.1; done"
        step_file = site.write("preempted.sh", step)
        text = "#!/bin/bash\ntrap : TERM\n"
        text += f"[ -e {site.folder}/preempted ] || srun bash {step_file}\n"
        low = site.submit("--nodes=4", "--exclusive", site.write("low.sh", text))
        site.await_running(low)
        until(lambda: "RUNNING|0:0" in site.accounted(low))
        # Before its trap, the signal would kill a task without a word.
        trapped = site.folder / "trapped"
        until(lambda: trapped.exists() and len(trapped.read_text()) == 4)
        high = site.submit(
            "--partition=urgent", "--nodes=4", "--exclusive", site.sleeps, "0"
        )
        site.await_accounted(high, "COMPLETED|0:0")
        site.await_end(low)
        assert (site.folder / "preempted").exists()
