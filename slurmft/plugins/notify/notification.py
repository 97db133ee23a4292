"""Tells the user what becomes of a run: its end, a failure, a hang, a requeue without progress.

Every change of a run's state starts a process that sends the message, by apprise or a command of
the user's; nothing waits for it but the end of a batch script, for seconds. It is sent once: the
first process that claims it, in the run directory, sends it. Where the nodes do not reach the
outside, whoever follows or waits for the run sends it.
"""

import contextlib
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from slurmft.core import descent, interpreter, permissions, process, removal
from slurmft.core.credentials import is_private, kind_in, redact
from slurmft.core.errors import SlurmftError, UsageError, one_line
from slurmft.core.files import write_text
from slurmft.core.filesystem import absolute
from slurmft.core.run_files import FINAL_STATES, Transition
from slurmft.core.text import duration
from slurmft.core.trusted import Door, NotOwnError
from slurmft.plugins.notify.options import NotifyOptions
from slurmft.runs.records import latest, warn
from slurmft.runs.rundir import RunDir
from slurmft.show.progress import metrics_words

URLS = Door(
    "the file of URLs",
    "the path of `--notify file:`",
    "where the messages about a run are sent; it may hold secrets",
)
SEND_S = 15
"""What sending may take, all in all."""
_MOST_ANSWER_BYTES = 512 * 2**20
"""Memory for what a service answers: an answer may have no end, and the job needs its memory."""
_CLAIM = re.compile(r"\d+")
"""Names of claims: the numbers of messages."""
LATER_S = 20
"""How long the login side leaves it to the job itself: longer than the job's own try takes."""


# --- what the user asks for -----------------------------------------------------------------------


def check(options: NotifyOptions) -> None:
    """Raises UsageError where messages cannot be sent as a job asks for."""
    if options.notify and find_spec("apprise") is None:
        raise UsageError("--notify needs apprise", 'pip install "slurmft[notify]"')
    for target in options.notify:
        if target.startswith(("file:", "env:")):
            _urls(target)
        elif _is_secret(target):
            raise UsageError(
                f"--notify {target.partition(':')[0]}:...: the URL holds a secret, which must not "
                "be on a command line",
                "write it to a file of yours: chmod 600 FILE, --notify file:FILE; or a variable: "
                "--notify env:NAME",
            )


def _is_secret(url: str) -> bool:
    """Returns whether a URL of apprise's holds a secret, as far as apprise and its words tell."""
    import apprise  # 0.2 s

    service = apprise.Apprise.instantiate(url)
    if service is None:
        raise UsageError(
            f"--notify {url.partition('://')[0]}...: apprise knows no such URL",
            "see https://appriseit.com; or file:PATH, env:NAME",
        )
    # apprise masks what it takes for a secret; our own patterns count as well.
    is_masked = service.url(privacy=True) != service.url(privacy=False)
    if is_masked or kind_in(url) is not None:
        return True
    _, _, parameters = url.partition("?")
    return is_private(parameters)


def _urls(target: str) -> list[str]:
    """Returns the URLs that a value of --notify names: itself, or those of its file or variable."""
    kind, _, name = target.partition(":")
    match kind:
        case "env":
            text = os.environ.get(name, "")
        case "file":
            text = _read_private(absolute(name), target)
        case _:
            return [target]
    lines = [line.strip() for line in text.splitlines()]
    urls = []
    for line in lines:
        if line and not line.startswith("#"):
            urls.append(line)
    if not urls:
        raise UsageError(
            f"--notify {target}: there are no URLs", "a URL of apprise's in each line"
        )
    return urls


def _read_private(path: Path, target: str) -> str:
    """Reads a file that nobody else can read; UsageError where others can."""
    try:
        return URLS.read_private(path).decode("utf-8")
    except NotOwnError as error:
        raise UsageError(f"--notify: {error.message}", error.hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--notify {target}: {one_line(error)}", "a file of URLs"
        ) from None


# --- when it is sent ------------------------------------------------------------------------------


Sending: TypeAlias = "subprocess.Popen[bytes] | None"
"""The process that sends a message, if there is one."""


def start(run: RunDir, later: bool = False) -> Sending:
    """Starts to send the message for the last state of a run.

    Args:
        later: on the login side, which sends only what the job itself has not.

    Returns:
        The process that sends it; None where there is nothing to send, or nobody asks for it.
    """
    # Whatever is wrong with the run, its end must not fail for a message.
    with contextlib.suppress(SlurmftError, OSError, LookupError):
        options = run.load_own_config().job.options_of(NotifyOptions)
        history = run.history()
        is_news = history[-1].state in (*FINAL_STATES, "requeued")
        if is_news and (options.notify or options.notify_command):
            number = len(history) - 1
            delay_s = LATER_S if later else 0
            command = interpreter.module(
                __name__, str(run.path), str(number), str(delay_s)
            )
            # A session of its own: Ctrl-C in the terminal is not meant for it.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    return None


def finish(sending: Sending) -> None:
    """Waits for a message, where the end of this process would end its process."""
    if sending is not None:
        try:
            sending.wait(SEND_S + 2)
        except subprocess.TimeoutExpired:
            process.end(sending)


# --- what is sent ---------------------------------------------------------------------------------


def message(run: RunDir, number: int) -> tuple[str, str] | None:
    """Returns title and text for an entry of a run's history; None where it is not worth a
    message."""
    history = run.history()
    title = _title(run, history, number)
    if title is None:
        return None
    lines = [line for line in _lines(run, history, number) if line]
    text = "\n".join(lines)
    return f"slurmft: {run.path.name}: {title}", text


def _title(run: RunDir, history: list[Transition], number: int) -> str | None:
    """Returns what has happened; None where an attempt ended that has left a new checkpoint."""
    entry = history[number]
    if entry.state != "requeued":
        return entry.state
    if " hangs: " in entry.reason:  # as the supervisor words it
        return f"hang, {entry.word}"
    # A requeue at the time limit is routine; one that gained nothing will repeat itself.
    starts = []
    for each in history[:number]:
        if each.state == "running":
            starts.append(each.checkpoint)
    if starts and starts[-1] != run.newest_checkpoint():
        return None
    return f"{entry.word} without progress"


def _lines(run: RunDir, history: list[Transition], number: int) -> Iterator[str]:
    """Yields the lines of the message for an entry of a run's history."""
    entry = history[number]
    yield redact(entry.reason)
    if entry.state in ("failed", "requeued"):
        failure = run.root_failure()
        if failure and failure.hint:
            yield f"hint: {redact(failure.hint)}"
    config = run.load_config()
    settings = config.program.settings
    names = []
    for key in ("task", "model"):
        if settings.get(key):
            names.append(str(settings[key]))
    # A program of the user's own has neither task nor model.
    program = ", ".join(names) or config.program.name
    yield f"run: {program}, {config.job.node_range} node(s)"
    job = run.read_job()
    if job is None:  # submitted by nobody, as on Kubernetes
        yield "job: ? ()"
    else:
        place = " ".join(word for word in (job.cluster, job.where) if word)
        yield f"job: {job.id} ({place})"
    metrics = None
    if entry.state == "finished":
        result = run.read_result() or {}
        metrics = result.get("metrics")
    if not metrics:
        metrics = latest(run.path).metrics  # of the last evaluation
    if metrics:
        yield f"metrics: {metrics_words(metrics)}"
    # The entry may not be the newest: the sender starts some seconds after it was written.
    history_until_then = history[: number + 1]
    attempts = sum(1 for each in history_until_then if each.state == "running")
    elapsed_s = entry.time - history[0].time
    yield f"time: {duration(elapsed_s)} since submission, {attempts} attempt(s)"
    command = _NEXT[entry.state]
    path = shlex.quote(str(run.path))
    yield f"next: slurmft {command} {path}"


_NEXT = {
    "finished": "report",
    "failed": "logs",
    "cancelled": "resume",
    "requeued": "status",
}
"""State -> the command that says more."""


def send(run: RunDir, number: int) -> None:
    """Sends the message for an entry of a run's history, if nobody else does or did.

    What goes wrong becomes a warning of the run.
    """
    title_and_text = message(run, number)
    claim = descent.through(run.notifications) / str(number)
    if title_and_text is None or not _claim(claim):
        return

    def failed(error: Exception) -> None:
        removal.discard(claim, _CLAIM)  # somebody else may have more luck
        warn(run.records, redact(f"no notification was sent: {one_line(error)}"))

    try:
        options = run.load_own_config().job.options_of(NotifyOptions)
        with _ending_in_time(failed):
            _send(options, run, *title_and_text)
        write_text(claim, "sent")
    except Exception as error:  # of any library: the run must not know
        failed(error)


@contextlib.contextmanager
def _ending_in_time(too_late: Callable[[Exception], None]) -> Iterator[None]:
    """Ends this process where the block takes too long, after a call of `too_late`.

    An exception would not do: apprise takes any for a failure of one service and goes on with the
    next, and its threads would keep the process until a service that answers without end has ended.
    """

    def end(*_: object) -> None:
        too_late(TimeoutError(f"it took longer than {SEND_S} s"))
        # The command of the user, too, which has a session of its own.
        process.end_descendants()
        os._exit(1)

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SEND_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _claim(path: Path) -> bool:
    """Claims a message for this process; returns False where another one has it."""
    with contextlib.suppress(FileNotFoundError):
        facts = path.stat()
        # A process that was killed has left its claim, empty.
        if not facts.st_size and time.time() - facts.st_mtime > 2 * SEND_S:
            removal.remove(path, _CLAIM)
    try:
        path.parent.mkdir(exist_ok=True)
        path.touch(exist_ok=False)
    except OSError:  # another process was first, or the run cannot be written
        return False
    return True


def _send(options: NotifyOptions, run: RunDir, title: str, text: str) -> None:
    """Sends a message by all ways that the job names; SlurmftError where one fails."""
    outcomes = []
    for target in options.notify:
        for url in _urls(target):
            outcomes.append(_send_by_apprise(url, title, text))
    if options.notify_command:
        outcomes.append(_send_by_command(options.notify_command, run, title, text))
    # After all of them were tried: one that fails must not keep the others from it.
    problems = [outcome for outcome in outcomes if outcome]
    if problems:
        raise SlurmftError("; ".join(problems))


def _send_by_apprise(url: str, title: str, text: str) -> str:
    """Sends a message to a URL; returns what went wrong, "" for nothing."""
    import apprise

    # Where a redirect leads, nobody has named: it would get headers with secrets, and a GET, for
    # which most of them ask, has no message.
    asset = apprise.AppriseAsset(http_redirects=False)
    service = apprise.Apprise(asset=asset)
    with _little_memory():
        if service.add(url) and service.notify(text, title):
            return ""
    scheme, _, _ = url.partition("://")  # the rest may hold a secret
    return f"{scheme}:// did not take it"


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Limits the memory that this process can take in the block, beyond what it has."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most_bytes = process.data_bytes() + _MOST_ANSWER_BYTES
    for limit in (before, hard):
        if limit != resource.RLIM_INFINITY:
            most_bytes = min(most_bytes, limit)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _send_by_command(command: str, run: RunDir, title: str, text: str) -> str:
    """Gives a message to the user's command; returns what went wrong, "" for nothing."""
    environment = {"SLURMFT_TITLE": title, "SLURMFT_RUN": str(run.path)}
    done = process.run(
        ["bash", "-c", command],
        SEND_S,
        text=f"{title}\n{text}\n",
        env=os.environ | environment,
    )
    if not done.returncode:
        return ""
    lines = done.stderr.splitlines() or [""]
    return f"--notify-command: exit code {done.returncode} {lines[-1]}".strip()


def main(path: str, number: str, later_s: str) -> None:
    time.sleep(float(later_s))
    # What the command of the user has started ends with it, where it takes too long.
    process.adopt_orphans()
    run = RunDir.open(path)
    permissions.settle(run.join().job.share_with_group)
    send(run, int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
