"""A Hugging Face hub of one model, on this machine: as much of its HTTP as from_pretrained uses."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "team/tiny-bert"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of a folder as the model `NAME`, and counts what is fetched."""

    def __init__(self, folder: Path, pause_s: float = 0) -> None:
        self.folder, self.pause_s = folder, pause_s
        self.fetched: Counter[str] = Counter()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def log_message(self, format: str, *values: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self._server.server_address[1]}"

    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        prefix = f"/{NAME}/resolve/main/"
        file = self.folder / request.path.removeprefix(prefix)
        if request.path == "/":
            self._send(request, 200, b"")
        elif not request.path.startswith(prefix) or not file.is_file():
            request.send_response(404)
            request.send_header("X-Error-Code", "EntryNotFound")
            request.send_header("X-Repo-Commit", _COMMIT)
            request.send_header("Content-Length", "0")
            request.end_headers()
        else:
            if body:
                self.fetched[file.name] += 1
            self._send(request, 200, file.read_bytes(), body)

    def _send(
        self, request: BaseHTTPRequestHandler, code: int, data: bytes, body: bool = True
    ) -> None:
        request.send_response(code)
        request.send_header("X-Repo-Commit", _COMMIT)
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if body and data:
            half = len(data) // 2
            request.wfile.write(data[:half])
            request.wfile.flush()
            time.sleep(self.pause_s)
            request.wfile.write(data[half:])
