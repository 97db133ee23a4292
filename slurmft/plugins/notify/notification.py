"""Tells the user what becomes of a run: its end, a failure, a hang, a requeue without progress.

Every change of a run's state starts a process that sends the message, by apprise or a command of
the user's; nothing waits for it but the end of a batch script, for seconds. It is sent once: the
first process that claims it, in the run directory, sends it. Where the nodes do not reach the
outside, whoever follows or waits for the run sends it.
"""

import contextlib
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from slurmft.core import process
from slurmft.core.config import JobConfig
from slurmft.core.credentials import is_private, kind_in, redact
from slurmft.core.errors import SlurmftError, UsageError, one_line
from slurmft.core.filesystem import absolute
from slurmft.core.run_files import FINAL_STATES
from slurmft.core.text import duration
from slurmft.runs.records import latest, warn
from slurmft.runs.rundir import RunDir
from slurmft.show.progress import metrics_words

SEND_S = 15
"""What sending may take, all in all."""
LATER_S = 20
"""How long the login side leaves it to the job itself."""


# --- what the user asks for -----------------------------------------------------------------------


def check(job: JobConfig) -> None:
    """Checks that messages can be sent as a job asks for."""
    if job.notify and find_spec("apprise") is None:
        raise UsageError("--notify needs apprise", 'pip install "slurmft[notify]"')
    for given in job.notify:
        if given.startswith(("file:", "env:")):
            _urls(given)
        elif _is_secret(given):
            raise UsageError(
                f"--notify {given.partition(':')[0]}:...: the URL holds a secret, which must not "
                "be on a command line",
                "write it to a file of yours: chmod 600 FILE, --notify file:FILE; or a variable: "
                "--notify env:NAME",
            )


def _is_secret(url: str) -> bool:
    """Whether a URL of apprise's holds a secret, as far as apprise and its words tell."""
    import apprise  # 0.2 s

    found = apprise.Apprise.instantiate(url)
    if found is None:
        raise UsageError(
            f"--notify {url.partition('://')[0]}...: apprise knows no such URL",
            "see https://appriseit.com; or file:PATH, env:NAME",
        )
    is_masked = found.url(privacy=True) != found.url(privacy=False)
    return is_masked or kind_in(url) is not None or is_private(url.partition("?")[2])


def _urls(given: str) -> list[str]:
    """The URLs that an option names: its own, or those of its file, which nobody else can read, or
    of its variable."""
    kind, _, name = given.partition(":")
    if kind not in ("env", "file"):
        return [given]
    text = os.environ.get(name, "")
    if kind == "file":
        path = absolute(name)
        try:
            text, mode = path.read_text(encoding="utf-8"), path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--notify {given}: {one_line(error)}", "a file of URLs") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(
                f"--notify {given}: others can read the file", f"chmod 600 {shlex.quote(str(path))}"
            )
    lines = [line.strip() for line in text.splitlines()]
    if found := [line for line in lines if line and not line.startswith("#")]:
        return found
    raise UsageError(f"--notify {given}: there are no URLs", "a URL of apprise's in each line")


# --- when it is sent ------------------------------------------------------------------------------


Sending: TypeAlias = "subprocess.Popen[bytes] | None"
"""The process that sends a message, if there is one."""


def start(run: RunDir, later: bool = False) -> Sending:
    """Starts to send what the last state of a run is worth; None: nothing, or nobody asks. `later`:
    from the login side, which sends only what the job itself has not."""
    with contextlib.suppress(SlurmftError, OSError, LookupError):
        job, past = run.load_own_config().job, run.history()
        is_news = past[-1].state in (*FINAL_STATES, "requeued")
        if is_news and (job.notify or job.notify_command):
            words = [str(run.path), str(len(past) - 1), str(LATER_S * later)]
            nothing = subprocess.DEVNULL
            return subprocess.Popen(
                [sys.executable, "-m", __name__, *words],
                stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True,
            )  # fmt: skip
    return None


def finish(sending: Sending) -> None:
    """Waits for it, where the end of this process would end it."""
    if sending is not None:
        try:
            sending.wait(SEND_S + 2)
        except subprocess.TimeoutExpired:
            process.end(sending)


# --- what is sent ---------------------------------------------------------------------------------


def message(run: RunDir, number: int) -> tuple[str, str] | None:
    """Title and text for an entry of a run's history; None: it is not worth a message."""
    past = run.history()
    entry = past[number]
    title, state, reason = entry.state, entry.state, entry.reason
    if state == "requeued":
        hangs = " hangs: " in reason
        begun = [each.checkpoint for each in past[:number] if each.state == "running"]
        if not hangs and begun and begun[-1] != run.newest_checkpoint():
            return None  # the attempt that ended has left a new checkpoint
        title = "hang, requeued" if hangs else "requeued without progress"
    config, job = run.load_config(), run.read_job()
    result = run.read_result() if state == "finished" else None
    metrics = (result or {}).get("metrics") or latest(run.path)["metrics"]
    where = " ".join(filter(None, (job.cluster, job.where) if job else ()))
    what = filter(None, (config.program.settings.get("task"), config.program.settings.get("model")))
    starts = [each for each in past[: number + 1] if each.state == "running"]
    failure = run.root_failure() if state in ("failed", "requeued") else None
    rows = [
        redact(reason),
        f"hint: {redact(failure.hint)}" if failure and failure.hint else "",
        f"run: {', '.join(map(str, what)) or config.program.name}, {config.job.nodes} node(s)",
        f"job: {job.id if job else '?'} ({where})",
        f"metrics: {metrics_words(metrics)}" if metrics else "",
        f"time: {duration(entry.time - past[0].time)} since submission, {len(starts)} attempt(s)",
        f"next: slurmft {_NEXT[state]} {shlex.quote(str(run.path))}",
    ]
    return f"slurmft: {run.path.name}: {title}", "\n".join(filter(None, rows))


_NEXT = {"finished": "report", "failed": "logs", "cancelled": "resume", "requeued": "status"}


def send(run: RunDir, number: int) -> None:
    """Sends the message for an entry of a run's history, if nobody else does or did.

    What goes wrong becomes a warning of the run.
    """
    found = message(run, number)
    if found is None or not _claim(claim := run.notifications / str(number)):
        return
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(SEND_S)
    try:
        _send(run.load_own_config().job, run, *found)
        signal.alarm(0)
        claim.write_text("sent", encoding="utf-8")
    except Exception as error:  # of any library: the run must not know
        signal.alarm(0)
        claim.unlink(missing_ok=True)  # somebody else may have more luck
        warn(run.records, redact(f"no notification was sent: {one_line(error)}"))


def _too_late(*_: object) -> None:
    raise TimeoutError(f"it took longer than {SEND_S} s")


def _claim(path: Path) -> bool:
    """Whether it is for this process to send. One that was killed has left its claim, empty."""
    with contextlib.suppress(FileNotFoundError):
        about = path.stat()
        if not about.st_size and time.time() - about.st_mtime > 2 * SEND_S:
            path.unlink()
    try:
        path.parent.mkdir(exist_ok=True)
        path.touch(exist_ok=False)
    except OSError:  # another process was first, or the run cannot be written
        return False
    return True


def _send(job: JobConfig, run: RunDir, title: str, text: str) -> None:
    problems = []
    if job.notify:
        import apprise

        for url in [url for given in job.notify for url in _urls(given)]:
            service = apprise.Apprise()
            if not (service.add(url) and service.notify(text, title)):
                problems.append(f"{url.partition('://')[0]}:// did not take it")
    if job.notify_command:
        env = os.environ | {"SLURMFT_TITLE": title, "SLURMFT_RUN": str(run.path)}
        command = ["bash", "-c", job.notify_command]
        done = subprocess.run(
            command, input=f"{title}\n{text}\n", text=True, env=env, check=False,
            capture_output=True, timeout=SEND_S,
        )  # fmt: skip
        if done.returncode:
            words = (done.stderr.splitlines() or [""])[-1]
            problems.append(f"--notify-command: exit code {done.returncode} {words}".strip())
    if problems:
        raise SlurmftError("; ".join(problems))


def main(path: str, number: str, later_s: str) -> None:
    time.sleep(float(later_s))
    run = RunDir.open(path)
    run.settle_permissions()
    send(run, int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
