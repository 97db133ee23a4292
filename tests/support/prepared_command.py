"""The command that stands for `python -m MODULE ...` where a server runs it, see prepared.py:
`python -IS prepared_command.py SOCKET MODULE ...`. It imports little: it starts for every run."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from typing import NoReturn

NO_ANSWER = 70


def ask(path: str, module: str, argv: list[str]) -> NoReturn:
    """Hands over environment, folder, streams and signals; ends as the command does."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(path)
    asked = {
        "command": ["-m", module, *argv],
        "env": dict(os.environ),
        "folder": os.getcwd(),
    }
    # larger than a packet may be
    with open(os.memfd_create("request"), "w+b") as request:
        request.write(json.dumps(asked).encode())
        request.seek(0)
        fds = array.array("i", [0, 1, 2, request.fileno()])
        server.sendmsg([b"run"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: server.send(str(number).encode()))
    code = int(server.recv(100) or NO_ANSWER)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2], sys.argv[3:])
