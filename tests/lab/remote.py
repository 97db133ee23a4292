"""Programs of a machine, run from here: `remote.py serve PORT KEY` there, `remote.py run` here.

A connection is a program: its input goes there and its output comes back in frames, and when the
connection ends, the program is killed. Of the standard library alone, and quick to start: in a
translated machine every import counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import IO

_HEAD = struct.Struct("!BI")
"""Stream and size of a frame: 0 is stdin, or the exit code; 1 and 2 are stdout and stderr."""
_OUTPUT_S = 1.0
"""How long output is awaited after the end: daemons keep it open."""
_LOST = 255


def serve(port: int, key: str) -> None:
    with socket.create_server(("", port), backlog=64) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(
                target=_run_program, args=(connection, key), daemon=True
            ).start()


def _run_program(connection: socket.socket, key: str) -> None:
    with connection, connection.makefile("rb") as frames:
        request = json.loads(frames.readline() or b"{}")
        if request.get("key") != key:
            return
        sending = threading.Lock()
        try:
            child = subprocess.Popen(
                request["argv"], bufsize=0, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            _send(connection, sending, 2, f"{error}\n".encode())
            _send(connection, sending, 0, b"127")
            return
        copies = [
            threading.Thread(
                target=_copy, args=(output, connection, sending, stream), daemon=True
            )
            for stream, output in ((1, child.stdout), (2, child.stderr))
        ]
        for thread in (
            *copies,
            threading.Thread(target=_feed, args=(frames, child), daemon=True),
        ):
            thread.start()
        code = child.wait()
        for thread in copies:
            thread.join(_OUTPUT_S)
        _send(connection, sending, 0, str(code if code >= 0 else 128 - code).encode())


def _feed(frames: IO[bytes], child: subprocess.Popen[bytes]) -> None:
    """Gives a program its input, until that or the connection ends."""
    assert child.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        while (frame := _receive(frames)) is not None:
            with contextlib.suppress(OSError):
                child.stdin.write(frame[1]) if frame[1] else child.stdin.close()
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def _copy(
    output: IO[bytes], connection: socket.socket, sending: threading.Lock, stream: int
) -> None:
    with contextlib.suppress(OSError):
        while text := output.read(65536):
            _send(connection, sending, stream, text)


def _send(
    connection: socket.socket, sending: threading.Lock, stream: int, text: bytes
) -> None:
    with sending, contextlib.suppress(OSError):
        connection.sendall(_HEAD.pack(stream, len(text)) + text)


def _receive(frames: IO[bytes]) -> tuple[int, bytes] | None:
    head = frames.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    stream, size = _HEAD.unpack(head)
    text = frames.read(size)
    return (stream, text) if len(text) == size else None


def run(port: int, key: str, argv: list[str]) -> int:
    """Runs a program there with the input and output of this process; returns its exit code."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        request = json.dumps({"key": key, "argv": argv}) + "\n"
        connection.sendall(request.encode())
        threading.Thread(target=_forward, args=(connection,), daemon=True).start()
        with connection.makefile("rb") as frames:
            while (frame := _receive(frames)) is not None:
                stream, text = frame
                if stream == 0:
                    return int(text)
                with contextlib.suppress(BrokenPipeError):
                    os.write(stream, text)
    return _LOST


def _forward(connection: socket.socket) -> None:
    sending = threading.Lock()
    while True:
        text = os.read(0, 65536)
        _send(connection, sending, 0, text)
        if not text:
            return


def main(role: str, port: str, key_file: str, *argv: str) -> None:
    with open(key_file) as file:
        key = file.read()
    if role == "serve":
        serve(int(port), key)
    try:
        code = run(int(port), key, list(argv))
    except OSError:
        code = _LOST
    os._exit(code)  # a thread still reads the input


if __name__ == "__main__":
    main(*sys.argv[1:])
