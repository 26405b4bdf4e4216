"""Fake llama-servers: programs that end, refuse or respond as a test requires."""

from __future__ import annotations

import sys
from pathlib import Path

#: Serves /health and what `answers` has: path -> status and JSON, or a text. ``/die`` aborts the
#: process.
_SERVING = """
import http.server, json, os, sys
answers = {answers!r}
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        if self.path == "/die":
            os.abort()
        size = int(self.headers.get("Content-Length", 0))
        self.rfile.read(size)
        status, body = answers.get(self.path, (404, {{"error": "no such path"}}))
        text = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_GET = do_POST = answer
    def log_message(self, *words):
        pass
words = sys.argv
port = int(words[words.index("--port") + 1])
print("{log}", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(folder: Path, body: str) -> Path:
    """Write a Python program and return its path."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable} -IS\n{body}", encoding="utf-8")
    path.chmod(0o755)
    return path


def ending(folder: Path, *lines: str, status: int = 1) -> Path:
    """Return a program that prints lines and ends."""
    return program(folder, f"print({chr(10).join(lines)!r})\nraise SystemExit({status})\n")


def serving(
    folder: Path, answers: dict[str, tuple[int, object]] | None = None, *, log: str = "ready"
) -> Path:
    """Return a program that serves answers: path -> status and JSON, or a text."""
    every = {"/health": (200, {"status": "ok"}), **(answers or {})}
    return program(folder, _SERVING.format(answers=every, log=log))


def gguf(folder: Path) -> Path:
    """Return a file that looks like a model."""
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF")
    return path
