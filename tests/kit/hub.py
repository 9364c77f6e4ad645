"""A server on this machine that speaks the few requests by which ``huggingface_hub`` uploads a folder."""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Hub"]


class Hub:
    """The repositories of a hub: what was committed, in order, and the tokens that came with the requests.

    ``fails`` is how many of the next commits are refused; ``gate``, cleared, makes commits wait until it is set.
    """

    def __init__(self) -> None:
        self.commits: list[dict[str, Any]] = []
        self.made: list[dict[str, Any]] = []
        self.unknown: list[Any] = []
        self.tokens: set[str | None] = set()
        self.fails, self.gate = 0, threading.Event()
        self.arrived = threading.Semaphore(0)
        self.gate.set()

    def __enter__(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.tokens.add(self.headers.get("Authorization"))
                status, answer = hub.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Answer a request."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.made.append(asked)
            owner = asked.get("organization") or "someone"
            return 200, {"url": f"{self.url}/{owner}/{asked['name']}", "id": f"{owner}/{asked['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        if (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path)) is None:
            self.unknown.append((path, body))
            return 404, {"error": path}
        self.arrived.release()
        self.gate.wait(120)
        if self.fails:
            self.fails -= 1
            return 403, {"error": "the disk of the hub is full"}
        lines = [json.loads(line) for line in body.splitlines()]
        summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        self.commits.append({"repo": found[1], "revision": found[2], "message": summary, "files": files})
        oid = f"{len(self.commits):040x}"
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{found[1]}/commit/{oid}"}
