"""A Hugging Face hub of one model, on this machine: as much of its HTTP as from_pretrained uses,
and what uploads of a model need."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME = "team/tiny-bert"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of a folder as the model `NAME`, and counts what is fetched."""

    def __init__(self, folder: Path, pause_s: float = 0) -> None:
        self.folder, self.pause_s = folder, pause_s
        self.fetched: Counter[str] = Counter()
        self.repos: dict[str, bool] = {}
        """Repository that was made -> whether it is private."""
        self.uploaded: dict[str, bytes] = {}
        """Path -> content, of all commits."""
        self.tokens: set[str] = set()
        """That came with requests."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                if self.path.removeprefix("/api/models/") in hub.repos:
                    hub._describe(self)
                else:
                    hub._answer(self, body=True)

            def do_POST(self) -> None:
                hub._take(self)

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

    def _describe(self, request: BaseHTTPRequestHandler) -> None:
        """What `repo_info` asks for."""
        repo = request.path.removeprefix("/api/models/")
        found: dict[str, Any] = {
            "id": repo,
            "private": self.repos.get(repo),
            "sha": _COMMIT,
            "siblings": [],
        }
        self._send(request, 200, json.dumps(found).encode())

    def _take(self, request: BaseHTTPRequestHandler) -> None:
        """The calls of `create_repo` and `upload_folder`; only those with a token."""
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.tokens.add(token)
        code, answer = 200, dict[str, Any]()
        if not token:
            code, answer = 401, {"error": "Invalid username or password."}
        elif request.path == "/api/repos/create":
            code, answer = self._create(json.loads(body))
        elif "/preupload/" in request.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes: dict[str, Any] = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": path} | modes for path in paths]}
        elif "/commit/" in request.path:
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    value = entry["value"]
                    self.uploaded[value["path"]] = base64.b64decode(value["content"])
            repo = "/".join(request.path.split("/")[3:5])
            address = f"{self.url()}/{repo}/commit/{_COMMIT}"
            answer = {"commitUrl": address, "commitOid": _COMMIT, "success": True}
        elif request.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        else:
            code = 404
        self._send(request, code, json.dumps(answer).encode())

    def _create(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if repo in self.repos:
            return 409, {
                "url": f"{self.url()}/{repo}",
                "error": "You already created this model",
            }
        self.repos[repo] = asked.get("private") or asked.get("visibility") == "private"
        return 200, {"url": f"{self.url()}/{repo}", "id": repo, "name": repo}

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
