"""Messages of real runs on this machine, to a server of this machine's."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slurmft.plugins.notify import notification
from slurmft.plugins.notify.options import NotifyOptions
from slurmft.runs.rundir import RunDir
from tests.conftest import Done, assert_two_lines, records, slurmft
from tests.support import PATIENCE_S, until
from tests.support.made_runs import write_run
from tests.support.own_programs import write

pytestmark = pytest.mark.processes

STEPS = """\
import sys, time, slurmft
with slurmft.attach() as job:
    for step in range(1, 6):
        job.step(step, total=5, loss=1 / step)
        time.sleep(0.1)
    if sys.argv[1] == "hang":
        time.sleep(600)
    if sys.argv[1] == "fail":
        raise ValueError("no such class: 7")
    job.result(accuracy=0.75)
"""
SECRET = "t0psecretpath"


class Server:
    """What was posted to it."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.status, self.pause_s = 200, 0.0
        self.answer: Iterable[bytes] = ()
        self.block_pause_s = 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(server.pause_s)
                server.got.append(json.loads(body))
                self.send_response(server.status)
                self.send_header("Location", f"{self.path}/elsewhere")
                self.end_headers()
                with suppress(OSError):  # who reads it may end
                    for block in server.answer:
                        self.wfile.write(block)
                        time.sleep(server.block_pause_s)

            def log_message(self, format: str, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"json://127.0.0.1:{self.http.server_port}/{SECRET}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def await_messages(self, count: int) -> list[dict[str, Any]]:
        until(lambda: len(self.got) >= count, lambda: self.got)
        return self.got


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()


@pytest.fixture
def where(server: Server, tmp_path: Path) -> str:
    """A file with the server's URL, which only its user can read."""
    file = tmp_path / "notify urls"
    file.write_text(f"# mine\n{server.url}\n")
    file.chmod(0o600)
    return f"file:{file}"


def run(
    tmp_path: Path, how: str, *flags: str, env: dict[str, str] | None = None
) -> Done:
    program = write(tmp_path, "steps.py", STEPS)
    return slurmft(
        *(
            "run",
            "--runs-dir",
            str(tmp_path / "runs"),
            "--cluster",
            "local",
            "--follow",
        ),
        *(*flags, "--", str(program), how),
        env=env,
    )


def test_the_end_is_told_once(server: Server, where: str, tmp_path: Path) -> None:
    done = run(tmp_path, "end", "--notify", where)
    assert done.code == 0, done.err
    (message,) = server.await_messages(1)
    assert message["title"] == f"slurmft: {done.run.path.name}: finished"
    assert "metrics: accuracy 0.75" in message["message"]
    assert f"next: slurmft report {done.run.path}" in message["message"]
    assert slurmft("follow", str(done.run.path)).code == 0
    notification.send(done.run, len(done.run.history()) - 1)  # as the login side, later
    assert len(server.got) == 1
    assert not any(SECRET in text for text in texts(done.run))


def test_a_failure_begins_with_its_cause(
    server: Server, where: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    done = run(
        tmp_path, "fail", "--notify", where, "--notify-command", f"cat > '{told}'"
    )
    assert done.code == 1
    (message,) = server.await_messages(1)
    assert message["title"].endswith(": failed")
    assert message["message"].startswith("ValueError: no such class: 7 (rank 0")
    until(lambda: told.exists() and told.read_text())
    assert told.read_text().splitlines()[0] == message["title"]


@pytest.mark.extra("notify")
def test_a_hang_and_its_requeue(server: Server, tmp_path: Path) -> None:
    """The second ends the run: by then it made no progress twice."""
    flags = ("--notify", "env:TELL", "--hang-timeout-s", "2", "--max-requeues", "1")
    done = run(tmp_path, "hang", *flags, env={"TELL": server.url})
    assert done.code != 0
    first, second = server.await_messages(2)
    assert first["title"].endswith(": hang, restarting")
    assert "rank 0 hangs: no step for" in first["message"].splitlines()[0]
    assert second["title"].endswith(": failed")
    assert len(server.got) == 2
    assert not any(SECRET in text for text in texts(done.run))


@pytest.mark.extra("notify")
@pytest.mark.parametrize("trouble", ["refused", "slow", "no server"])
def test_no_run_suffers(
    server: Server, where: str, tmp_path: Path, trouble: str
) -> None:
    if trouble == "refused":
        server.status = 500
    elif trouble == "slow":
        server.pause_s = 1000
    else:
        server.http.server_close()
    done = run(tmp_path, "end", "--notify", where)
    assert done.code == 0, done.err
    until(lambda: records(done.run, "warning"))
    warnings = records(done.run, "warning")
    assert warnings[-1]["text"].startswith("no notification was sent: ")
    assert not any(SECRET in text for text in texts(done.run))


@pytest.mark.extra("notify")
def test_answer_without_end(server: Server, tmp_path: Path) -> None:
    """The process that sends ends, whatever the services do: nobody waits for it on a login
    node."""
    server.answer = itertools.repeat(b"x")
    server.block_pause_s = 0.1
    urls = tmp_path / "urls"
    urls.write_text(f"{server.url}\n{server.url}\n")
    urls.chmod(0o600)
    made = write_run(tmp_path / "run")
    # Not before: each change of its state would send a message.
    config = json.loads(made.config.read_text())
    config["job"]["notify"] = [f"file:{urls}"]
    made.config.write_text(json.dumps(config))
    number = len(made.history()) - 1
    module = "slurmft.plugins.notify.notification"
    # apprise before: to import it takes some of the time.
    code = f"import apprise, {module} as module; module.SEND_S = 2; "
    code += f"module.main({str(made.path)!r}, '{number}', '0')"
    subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S / 2)
    (warning,) = records(made, "warning")
    assert warning["text"] == "no notification was sent: it took longer than 2 s"
    assert not made.notifications.exists() or not list(made.notifications.iterdir())


def test_what_a_service_answers_is_neither_followed_nor_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification, "_MOST_ANSWER_BYTES", 64 * 2**20)
    refused = "json:// did not take it"
    # A busy machine has its time: apprise waits 4 s by itself.
    url = f"{server.url}?cto={PATIENCE_S}&rto={PATIENCE_S}"
    assert notification._send_by_apprise(url, "title", "text") == ""
    server.status = 307
    assert notification._send_by_apprise(url, "title", "text") == refused
    assert len(server.got) == 2
    server.status = 200
    server.answer = itertools.repeat(b"x" * 2**20, 256)
    assert notification._send_by_apprise(url, "title", "text") == refused


def test_mistakes(tmp_path: Path, where: str) -> None:
    secret = "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    refused = run(tmp_path, "end", "--notify", secret)
    assert_two_lines(refused, "the URL holds a secret")
    assert "TIiajkdnlazkcOXrIdevi7FQ" not in refused.err
    assert_two_lines(
        run(tmp_path, "end", "--notify", "json://me:pa55word@host"), "credentials"
    )
    assert_two_lines(run(tmp_path, "end", "--notify", "foo://x"), "no such URL")
    assert_two_lines(run(tmp_path, "end", "--notify", "env:NONE"), "no URLs")
    assert_two_lines(run(tmp_path, "end", "--notify", "file:/none"), "No such file")
    os.chmod(where.removeprefix("file:"), 0o644)
    assert_two_lines(
        run(tmp_path, "end", "--notify", where), "is open to others (mode 0644)"
    )
    link = tmp_path / "of-others"
    os.chmod(where.removeprefix("file:"), 0o600)
    os.link(where.removeprefix("file:"), link)
    assert_two_lines(run(tmp_path, "end", "--notify", f"file:{link}"), "has 2 names")
    assert not (tmp_path / "runs").exists()


def test_a_plain_url_may_be_typed() -> None:
    notification.check(NotifyOptions(notify=("json://localhost:8080/runs",)))


def texts(run: RunDir) -> list[str]:
    """All files of a run."""
    return [p.read_text(errors="replace") for p in run.path.rglob("*") if p.is_file()]
