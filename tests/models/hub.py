"""A model hub on this machine: the part of the protocol that a download uses, from a folder of repositories.

    with serve({"owner/name": {"main": folder, "step1": folder}}) as endpoint: ...

`missing`, `gated` and unknown revisions answer as the real hub does.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

Repositories = Mapping[str, Mapping[str, Path]]


@contextmanager
def serve(repositories: Repositories, gated: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of a hub that has these repositories, each a folder a revision."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, body: bool) -> None:
            parts = unquote(self.path.split("?")[0]).strip("/").split("/")
            name = "/".join(parts[:2])
            if len(parts) < 5 or parts[2] != "resolve":
                return self.refuse(404, "EntryNotFound")
            if name in gated:
                return self.refuse(403, "GatedRepo")
            if name not in repositories:
                return self.refuse(401, "RepoNotFound")
            commits = {commit_of(name, r): folder for r, folder in repositories[name].items()}
            folder = repositories[name].get(parts[3]) or commits.get(parts[3])
            if folder is None:
                return self.refuse(404, "RevisionNotFound")
            file = folder.joinpath(*parts[4:])
            if not file.is_file():
                return self.refuse(404, "EntryNotFound")
            data = file.read_bytes()
            commit = parts[3] if parts[3] in commits else commit_of(name, parts[3])
            self.send_response(200)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def commit_of(name: str, revision: str) -> str:
    """40 hex digits, another for each revision."""
    return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
