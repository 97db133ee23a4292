"""The batch script of a job: its shell lines in a real bash, with stand-ins for the programs that
it calls; and what its commands do where the run directory takes nothing, or is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster.slurm import commands, first_node, srun_log
from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT, Failure
from slurmft.node import supervisor
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir
from tests.runs.test_hung_collective import call, of_rank, waiting
from tests.support import PATIENCE_S, until
from tests.support.small_disk import fill

pytestmark = pytest.mark.processes

PYTHON = """#!/bin/bash
# Cannot import as often as the file `broken` has lines.
[ -s "$STATE/broken" ] && sed -i 1d "$STATE/broken" && exec "$PYTHON" -S "$@"
echo "$4" >>"$STATE/calls"
case "$4" in
  begin) echo A=1 "SLURMFT_RUN_INODE=$(stat -c %i "$5" 2>/dev/null)"; exit "${BEGIN-0}" ;;
  end) echo "ended $6" >>"$STATE/calls"; exit "${END-$6}" ;;
esac
"""
SRUN = """#!/bin/bash
echo srun >>"$STATE/calls"
[ -n "$SAYS" ] && echo "$SAYS" >&2
[ -n "$BREAK" ] && printf '\\n\\n\\n\\n\\n' >"$STATE/broken"
[ -n "$WAIT" ] && while [ ! -e "$STATE/go" ]; do /bin/sleep 0.05; done
exit "${CODE-0}"
"""
NOTE = '#!/bin/bash\necho "${0##*/} $*" >>"$STATE/calls"\n'


WAITING_PYTHON = """#!/bin/bash
# Waits in one phase; the next attempt is to begin, unless the tasks were stopped.
echo "$4" >>"$STATE/calls"
if [ "$4" = "$PHASE" ]; then until [ -e "$STATE/go" ]; do /bin/sleep 0.05; done; fi
[ "$4" = begin ] && exit 0
echo "ended $6" >>"$STATE/calls"
[ "$6" = 75 ] && exit 75
exit 79
"""

CANNOT = "slurmft cannot be imported: ModuleNotFoundError: No module named 'slurmft'\n"


class Script:
    """The script of a job, and its stand-ins."""

    def __init__(self, folder: Path, **job: object) -> None:
        self.folder, tools = folder, folder / "bin"
        tools.mkdir()
        stubs = {"python": PYTHON, "srun": SRUN, "scontrol": NOTE, "sleep": NOTE}
        for name, text in stubs.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        config = JobConfig(runs_dir=str(folder), **job)  # type: ignore[arg-type]
        program = Program(kind="script", name="plain", module="plain")
        text = inside_text(
            RunConfig(program=program, job=config), RunDir(folder / "run")
        )
        self.text = text.replace(sys.executable, str(tools / "python"))
        self.env: dict[str, Any] = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "STATE": str(folder),
            "SLURM_JOB_ID": "7",
        }
        # one without packages
        self.env |= {"PYTHON": sys.executable, "PYTHONSAFEPATH": "1"}

    def start(self, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/bash", "-c", self.text], env=self.env | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, **variables: str) -> tuple[int, str]:
        """Exit code, and what it printed on stderr."""
        running = self.start(**variables)
        return running.wait(PATIENCE_S), running.communicate()[1]

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("code", [0, 9, 75])
def test_exit_code_is_that_of_the_end(tmp_path: Path, code: int) -> None:
    script = Script(tmp_path)
    assert script.run(CODE=str(code)) == (code, "")
    assert script.calls == ["begin", "srun", "end", f"ended {code}"]


def test_tasks_leave_their_code_and_an_end_that_is_killed_is_called_again(
    tmp_path: Path,
) -> None:
    script = Script(tmp_path)
    (tmp_path / "run").mkdir()
    assert script.run(CODE="3", END="137", SLURMFT_ATTEMPT="2")[0] == 137
    assert script.calls == ["begin", "srun", *(2 * ["end", "ended 3"])]
    ended = (tmp_path / "run" / "ended.json").read_text()
    assert json.loads(ended) == {"attempt": 2, "code": 3}


GAVE_UP = "srun: error: Timed out waiting for job step to complete"
"""The words of srun itself, of Slurm 22.05."""


@pytest.mark.parametrize(("says_before", "says", "code"), [
    ("", GAVE_UP, 143), (GAVE_UP, "", 0), ("", "srun: warning: x", 0),
])  # fmt: skip
def test_srun_that_gives_up_tasks_says_so_by_no_code(
    tmp_path: Path, says_before: str, says: str, code: int
) -> None:
    script = Script(tmp_path)
    log = srun_log.path(tmp_path / "run" / "submitit", "7")
    log.parent.mkdir(parents=True)
    log.write_text(f"attempt 1\n{says_before}\n")
    assert script.run(SAYS=says, SLURMFT_ATTEMPT="2")[0] == code
    assert script.calls == ["begin", "srun", "end", f"ended {code}"]
    ended = (tmp_path / "run" / "ended.json").read_text()
    assert json.loads(ended) == {"attempt": 2, "code": code}


def test_end_is_not_killed_by_a_stop(tmp_path: Path) -> None:
    script = Script(tmp_path)
    python = tmp_path / "bin" / "python"
    kill = 'end) kill -TERM $$; kill -USR2 $$; kill -INT $$; echo "ended'
    python.write_text(python.read_text().replace('end) echo "ended', kill))
    assert script.run() == (0, "")
    assert script.calls == ["begin", "srun", "end", "ended 0"]


@pytest.mark.parametrize("code", [2, 75])
def test_begin_that_refuses_or_requeues_ends_the_job_at_once(
    tmp_path: Path, code: int
) -> None:
    script = Script(tmp_path)
    assert script.run(BEGIN=str(code)) == (code, "")
    assert script.calls == ["begin"]


def test_no_trace_of_the_shell_shows_what_begin_prints(tmp_path: Path) -> None:
    """The secret of the attempt is in it."""
    script = Script(tmp_path, setup=("set -x",))
    running = script.start()
    out, err = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, out) == (0, "")
    assert "+ srun" in err
    assert "A=1" not in err


def test_upgrade_under_way_is_waited_for(tmp_path: Path) -> None:
    script = Script(tmp_path)
    (tmp_path / "broken").write_text("\n\n")
    assert script.run() == (0, CANNOT * 2)
    assert script.calls == ["sleep 10", "sleep 30", "begin", "srun", "end", "ended 0"]


def test_broken_upgrade_is_told_in_words(tmp_path: Path) -> None:
    """In the job's log, and by its comment: nothing can be recorded without the package."""
    script = Script(tmp_path)
    (tmp_path / "broken").write_text("\n" * 9)
    code, err = script.run(SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="2")
    assert code == 78
    why = "slurmft cannot be imported any more"
    hint = f"mend the environment of {tmp_path}/bin/python; then: slurmft resume {tmp_path}/run"
    assert err == f"{CANNOT * 4}error: {why}\nhint: {hint}\n"
    assert [call for call in script.calls if not call.startswith("sleep")] == [
        f"scontrol update JobId=6_2 Comment=slurmft: failed: {why}"
    ]


@pytest.mark.parametrize(
    ("code", "requeue", "requeued"),
    [("75", True, True), ("75", False, False), ("1", True, False)],
)
def test_upgrade_that_breaks_while_the_tasks_run(
    tmp_path: Path, code: str, requeue: bool, requeued: bool
) -> None:
    """What they have saved is requeued all the same."""
    script = Script(tmp_path, requeue=requeue)
    assert script.run(BREAK="yes", CODE=code)[0] == 78
    assert script.calls[:2] == ["begin", "srun"]
    assert ("scontrol requeue 7" in script.calls) == requeued


@pytest.mark.parametrize("sent", [signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM])
def test_signal_to_the_script_leaves_the_end_to_it(
    tmp_path: Path, sent: signal.Signals
) -> None:
    script = Script(tmp_path)
    running = script.start(WAIT="yes", CODE="75")
    until(lambda: "srun" in script.calls, every_s=0.02)
    running.send_signal(sent)
    (tmp_path / "go").touch()
    assert running.wait(PATIENCE_S) == 75
    assert script.calls == ["begin", "srun", "end", "ended 75"]
    running.communicate()


def test_begin_that_is_killed_is_called_again(tmp_path: Path) -> None:
    script = Script(tmp_path)
    python = tmp_path / "bin" / "python"
    begin = 'begin) [ $(grep -c begin "$STATE/calls") = 1 ] && exit 137; echo'
    python.write_text(python.read_text().replace("begin) echo", begin))
    assert script.run() == (0, "")
    assert script.calls == ["begin", "begin", "srun", "end", "ended 0"]


def test_attempts_on_the_same_nodes(tmp_path: Path) -> None:
    """Until one ends otherwise."""
    script = Script(tmp_path)
    python = tmp_path / "bin" / "python"
    ends = 'end) [ $(grep -c srun "$STATE/calls") = 3 ] && exit 7; exit 79; echo'
    python.write_text(python.read_text().replace("end) echo", ends))
    assert script.run(CODE="1") == (7, "")
    assert script.calls == ["begin", "srun", "end"] * 3


@pytest.mark.parametrize("phase", ["begin", "end"])
@pytest.mark.parametrize("sent", [signal.SIGUSR2, signal.SIGTERM])
def test_stop_between_two_attempts(
    tmp_path: Path, phase: str, sent: signal.Signals
) -> None:
    """No tasks get it: the job is requeued, and starts none."""
    script = Script(tmp_path)
    (tmp_path / "bin" / "python").write_text(WAITING_PYTHON)
    running = script.start(CODE="1", PHASE=phase)
    until(lambda: phase in script.calls, every_s=0.02)
    running.send_signal(sent)
    (tmp_path / "go").touch()
    assert running.wait(PATIENCE_S) == 75
    before = ["begin", "srun", "end", "ended 1"]
    if phase == "begin":
        before = ["begin"]
    assert script.calls == [*before, "end", "ended 75"]
    running.communicate()


# --- its commands ---------------------------------------------------------------------------------


class Slurm:
    """What was asked of Slurm's commands; the job runs."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses = False
        self.refuses_memory = False
        self.state = "RUNNING"
        """Of the job."""
        self.unwell = ""
        """Nodes that take no jobs, as sinfo writes them."""
        self.partitions = ""
        self.time_left = "1-00:00:00\n"

    def call(self, *command: str, timeout_s: float = 0) -> str:
        self.calls.append(" ".join(command))
        if command[0] == "squeue" and "--format=%L|%e" in command:
            return self.time_left
        if command[0] == "squeue":
            return f"{self.state}|None\n"
        if command[:3] == ("scontrol", "show", "hostnames"):
            return command[3].replace(",", "\n")
        if command[0] == "sinfo" and "--exact" in command:
            return "3|4000\n1|8000\n"
        if command[0] == "sinfo" and "--Node" in command:
            return self.unwell
        if command[0] == "sinfo":
            return self.partitions
        if self.refuses_memory and command[-1].startswith("MinMemoryNode"):
            raise SlurmftError("scontrol failed (exit 1): Requested node configuration")
        if self.refuses and command[:2] == ("scontrol", "requeue"):
            raise SlurmftError(
                "scontrol failed (exit 1): Requested operation not supported"
            )
        return ""

    def changes(self) -> list[str]:
        return [
            call
            for call in self.calls
            if call.startswith(("scontrol requeue", "scontrol up"))
        ]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    monkeypatch.setattr(commands, "call", made.call)
    monkeypatch.setattr(attempts, "_FILE_LAG_S", 0)
    monkeypatch.setattr(time, "sleep", lambda s: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv(ATTEMPT, "1")
    return made


Make = Callable[..., RunDir]


@pytest.fixture
def make(small_disk: Path) -> Make:
    def made(**job: object) -> RunDir:
        program = Program(kind="script", name="plain", module="plain")
        config = JobConfig(runs_dir=str(small_disk), **job)  # type: ignore[arg-type]
        run = RunDir.create(RunConfig(program=program, job=config))
        attempts.begin(run, ["n1"], "7")
        (run.checkpoints / "step-00000005").mkdir(parents=True)
        return run

    return made


def end(run: RunDir, code: int) -> int:
    return first_node.main(["end", str(run.path), str(code)])


def test_stop_on_a_full_disk_is_requeued(
    make: Make, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make()
    fill(run.path.parent)
    assert end(run, Exit.STOPPED) == Exit.STOPPED
    assert slurm.changes() == ["scontrol requeue 7"]
    assert run.get_state().state == "running"  # as it was: no half a file
    err = capsys.readouterr().err
    assert "requeued: stopped; the newest checkpoint is step-00000005" in err


def test_an_end_names_the_collective_that_hung(make: Make, slurm: Slurm) -> None:
    run = make()
    run.add(Failure("node n1", "rank 0 hangs", secondary=True, hang_s=61, attempt=1))
    for each in (waiting(0), waiting(1), waiting(2), of_rank(3, call(1203))):
        write_json(run.rank_calls(each.rank), each)
    end(run, Exit.FAILED)
    assert "rank 3 on n2 has not come to all-reduce 1,204" in run.get_state().reason


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (3, "failed")])
def test_end_on_a_full_disk_has_its_exit_code(
    make: Make, slurm: Slurm, code: int, state: str
) -> None:
    """The job itself keeps the words for `slurmft status`."""
    run = make()
    run.add(
        Failure.of("rank 0 on n1", SlurmftError("the loss is nan", code=3), attempt=1)
    )
    fill(run.path.parent)
    assert end(run, code) == code
    (note,) = slurm.changes()
    words = "the loss is nan (rank 0 on n1)" if code else ""
    assert note == f"scontrol update JobId=7 Comment=slurmft: {state}: {words}".rstrip()


def test_end_that_is_recorded_leaves_the_comment_alone(
    make: Make, slurm: Slurm
) -> None:
    run = make()
    assert end(run, 0) == 0
    assert slurm.changes() == []
    assert run.get_state().state == "finished"


def test_start_after_an_end_that_was_killed_ends_at_once(
    make: Make, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may start a job again whose run has finished, without a record of that."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    run = make()
    write_json(run.ended, {"attempt": 1, "code": 0})
    with pytest.raises(UsageError, match="is finished"):
        first_node.main(["begin", str(run.path)])
    assert run.get_state().state == "finished"
    assert run.attempt_number() == 1


def test_next_attempt_begins_on_the_same_nodes(make: Make, slurm: Slurm) -> None:
    run = make()
    assert end(run, 137) == commands.AGAIN
    assert slurm.changes() == []
    state = run.get_state()
    assert (state.state, state.in_allocation) == ("requeued", True)
    assert state.reason.endswith("; it starts again on the same nodes")
    attempts.begin(run, ["n1"], "7")
    # The job has started once.
    assert len(run.get_state().starts_since_submission()) == 1


@pytest.mark.parametrize(
    ("state", "time_left", "changes", "recorded"),
    [
        ("RUNNING", "9:59", [], "running"),
        # The stop came when there were no tasks; with a GraceTime, a preempted job still runs.
        ("RUNNING", "0:17", ["scontrol requeue 7"], "requeued"),
        ("PENDING", "9:59", [], "requeued"),
    ],
)
def test_job_that_is_taken_back_between_two_attempts(
    make: Make,
    slurm: Slurm,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    time_left: str,
    changes: list[str],
    recorded: str,
) -> None:
    """It begins none that nobody would stop, and whose steps would be lost."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    run = make()
    assert end(run, 137) == commands.AGAIN
    slurm.state = state
    slurm.time_left = f"{time_left}\n"
    code = first_node.main(["begin", str(run.path)])
    assert slurm.changes() == changes
    assert run.get_state().state == recorded
    has_begun = recorded == "running"
    assert run.attempt_number() == 1 + has_begun
    assert code == (Exit.OK if has_begun else Exit.STOPPED)


def test_job_that_slurm_has_queued_again_between_two_attempts(
    make: Make, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node died before the next attempt could begin: that is a requeue after all."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    run = make()
    assert end(run, 137) == commands.AGAIN
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert first_node.main(["begin", str(run.path)]) == Exit.OK
    assert len(run.get_state().starts_since_submission()) == 2


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (supervisor.TASK_FAILED, commands.AGAIN),
        ("the job received SIGTERM", Exit.STOPPED),
    ],
)
def test_tasks_that_srun_stopped_are_no_stop_of_the_job(
    make: Make, slurm: Slurm, reason: str, code: int
) -> None:
    """Theirs is the largest exit code of all tasks."""
    run = make()
    run.set_state("stopping", reason)
    assert end(run, Exit.STOPPED) == code


def bad_host(run: RunDir, slurm: Slurm) -> None:
    """It has failed twice, and the partition has others."""
    slurm.partitions = "all|up|infinite|3|8"
    for attempt in (0, 1):
        lost = SlurmftError("torchrun was killed by SIGKILL")
        run.add(Failure.of("node n1", lost, bad_host="n1", attempt=attempt))


def drained_host(run: RunDir, slurm: Slurm) -> None:
    slurm.unwell = "n1|drained|maintenance"


def no_progress(run: RunDir, slurm: Slurm) -> None:
    attempts.begin(run, ["n1"], "7", 1)
    attempts.begin(run, ["n1"], "7", 2)


def little_time(run: RunDir, slurm: Slurm) -> None:
    assert run.load_config().job.lead_s == 120
    slurm.time_left = "2:59\n"


def full_disk(run: RunDir, slurm: Slurm) -> None:
    fill(run.path.parent)
    os.environ[ATTEMPT] = str(attempts.begin(run, ["n1"], "7"))


@pytest.mark.parametrize(
    "hinder", [bad_host, drained_host, no_progress, little_time, full_disk]
)
def test_next_attempt_cannot_begin_on_the_same_nodes(
    make: Make,
    slurm: Slurm,
    monkeypatch: pytest.MonkeyPatch,
    hinder: Callable[[RunDir, Slurm], None],
) -> None:
    monkeypatch.setenv("SLURM_JOB_PARTITION", "all")
    run = make()
    hinder(run, slurm)
    assert end(run, 137) == Exit.STOPPED
    assert "scontrol requeue 7" in slurm.changes()


def memory_changes(slurm: Slurm) -> list[str]:
    prefix = "scontrol update JobId=7 MinMemoryNode="
    return [
        change.removeprefix(prefix)
        for change in slurm.changes()
        if change.startswith(prefix)
    ]


def fail_by_kernel(run: RunDir) -> None:
    error = SlurmftError("a rank was killed by SIGKILL: memory ran out")
    error.out_of_memory = True
    run.add(Failure.of("node n1", error, retry=True, attempt=1))


def fail_by_slurm(run: RunDir) -> None:
    run.submitit.mkdir(exist_ok=True)
    log = srun_log.path(run.submitit, "7")
    log.write_text("attempt 1\nsrun: error: n1: task 0: Out Of Memory\n")


@pytest.mark.parametrize("fail", [fail_by_kernel, fail_by_slurm])
@pytest.mark.parametrize(
    ("job", "raised"),
    [
        ({"mem": "2G"}, ["3072"]),
        ({"mem": "2000", "max_mem": "2500M"}, ["2500"]),
        ({"mem": "2G", "max_mem": "2G"}, []),
        # It has all, or the site's default.
        ({"mem": "0"}, []),
        ({}, []),
        # Three nodes have 4000 MiB, and one has more.
        ({"mem": "3G"}, ["4608"]),
        ({"mem": "3G", "nodes": 4}, ["4000"]),
        ({"mem": "4000", "nodes": 4}, []),
    ],
)
def test_memory_that_was_too_small_is_raised(
    make: Make,
    slurm: Slurm,
    fail: Callable[[RunDir], None],
    job: dict[str, object],
    raised: list[str],
) -> None:
    """After the requeue: of a running job Slurm does not change it."""
    run = make(**job)
    os.environ["SLURM_JOB_NODELIST"] = ",".join(
        ["n1", "n2", "n3", "n4"][: run.load_config().job.nodes]
    )
    fail(run)
    # What cannot have more need not wait in the queue for it.
    code = Exit.STOPPED if raised else commands.AGAIN
    assert end(run, 253) == code
    # The next start counts it, and takes less.
    (failure,) = run.all_failures()
    assert failure.out_of_memory
    assert slurm.changes()[:1] == (["scontrol requeue 7"] if raised else [])
    assert memory_changes(slurm) == raised
    last = run.get_state()
    assert [str(last.raised_mem_mib)] == (raised or ["None"])
    words = f"; --mem {job.get('mem')} was too small: now {last.raised_mem_mib} MiB"
    assert (words in last.reason) == bool(raised)


def test_memory_that_slurm_does_not_raise(make: Make, slurm: Slurm) -> None:
    """The next start takes less: nothing says that it has more."""
    slurm.refuses_memory = True
    run = make(mem="2G")
    fail_by_kernel(run)
    assert end(run, 1) == Exit.STOPPED
    state = run.get_state()
    assert (state.state, state.raised_mem_mib_since_submission) == ("requeued", None)
    assert "now 3072 MiB" not in state.reason
    assert state.raised_mem_mib_since(1) is None


def test_slurm_knows_why_a_rank_was_killed(make: Make, slurm: Slurm) -> None:
    """Counters of the kernel did not tell it."""
    run = make(mem="2G")
    error = SlurmftError("a rank was killed by SIGKILL (out of memory?)")
    run.add(Failure.of("node n1", error, retry=True, attempt=1))
    fail_by_slurm(run)
    assert end(run, 253) == Exit.STOPPED
    assert memory_changes(slurm) == ["3072"]


def test_memory_is_raised_once(make: Make, slurm: Slurm) -> None:
    run = make(mem="2G")
    fail_by_kernel(run)
    end(run, 1)
    attempts.begin(run, ["n1"], "7", restarts=1)
    fail_by_kernel(run)
    assert end(run, 1) == commands.AGAIN
    assert memory_changes(slurm) == ["3072"]
    assert run.get_state().raised_mem_mib is None
    assert run.get_state().raised_mem_mib_since_submission == 3072


def test_run_that_finished_after_memory_ran_out(make: Make, slurm: Slurm) -> None:
    """Slurm reports the death of a rank all the same, and no exit code."""
    run = make(mem="2G")
    fail_by_kernel(run)
    fail_by_slurm(run)
    write_json(run.result, {"metrics": {}})
    assert end(run, 253) == Exit.OK
    assert slurm.changes() == []
    assert run.get_state().state == "finished"


@pytest.mark.parametrize(
    ("marks", "state"),
    [([(1, 0)], "finished"), ([], "requeued"), ([(1, 1), (2, 0)], "requeued")],
    ids=["mark", "none", "others"],
)
def test_program_that_finished_after_memory_ran_out(
    make: Make, slurm: Slurm, marks: list[tuple[int, int]], state: str
) -> None:
    """It has no result: its task has left a mark."""
    run = make()
    fail_by_kernel(run)
    fail_by_slurm(run)
    for attempt, task in marks:
        run.ended_well(attempt, task).touch()
    end(run, 253)
    assert run.get_state().state == state


def test_other_failures_raise_no_memory(make: Make, slurm: Slurm) -> None:
    run = make(mem="2G")
    assert end(run, 137) == commands.AGAIN
    assert slurm.changes() == []


def test_refused_requeue_is_recorded(make: Make, slurm: Slurm) -> None:
    run = make()
    slurm.refuses = True
    with pytest.raises(SlurmftError, match="not supported"):
        end(run, Exit.STOPPED)
    assert run.get_state().state == "failed"
    assert "Slurm refuses to requeue" in run.get_state().reason


def test_disk_that_takes_no_record_requeues_no_job_for_ever(
    make: Make, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm counts the starts of a job that the run could not."""
    run = make(max_requeues=1)
    fill(run.path.parent)
    codes = []
    for restarts in range(1, 4):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        number = attempts.begin(run, ["n1"], "7", restarts)
        monkeypatch.setenv(ATTEMPT, str(number))
        assert number > 1
        codes.append(end(run, Exit.STOPPED))
    assert codes == [Exit.STOPPED, Exit.FAILED, Exit.FAILED]
    assert slurm.changes()[0] == "scontrol requeue 7"
    assert "no new checkpoint in 2 attempts (--max-requeues)" in slurm.changes()[1]


def test_run_that_is_gone_is_told_to_slurm(
    make: Make, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make()
    run.discard()
    assert end(run, Exit.STOPPED) == Exit.STOPPED
    (note,) = slurm.changes()
    why = f"the run cannot be read at its end: {str(run.path)!r} is not a run directory"
    assert note.startswith(f"scontrol update JobId=7 Comment=slurmft: failed: {why}")
    assert f"error: {why}" in capsys.readouterr().err
    assert end(run, 0) == Exit.FAILED


def test_stopped_run_that_cannot_be_read_is_requeued(make: Make, slurm: Slurm) -> None:
    """Its file system may be back for the next attempt, which ends if it is not."""
    run = make()
    run.config.rename(run.path / "aside")
    assert end(run, Exit.STOPPED) == Exit.STOPPED
    assert slurm.changes() == ["scontrol requeue 7"]
    assert end(run, 1) == 1
    assert len(slurm.changes()) == 2


def test_begin_without_a_run_is_an_error(make: Make, slurm: Slurm) -> None:
    run = make()
    run.discard()
    with pytest.raises(SlurmftError, match="is not a run directory"):
        first_node.main(["begin", str(run.path)])
    assert os.environ[ATTEMPT] == "1"
    assert slurm.changes() == []
