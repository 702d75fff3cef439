"""A hub on this machine, for downloads: an HTTP server that plays huggingface.co for some repositories."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")


class Hub:
    """The repositories, and what was asked for. `cut_after` ends the connection of a large file after so many bytes."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = repositories
        self.cut_after: int | None = None
        self.damaged = False
        self.declared: dict[str, int] = {}
        """Sizes of files that differ from those of their contents."""
        self.ranges: list[str] = []
        """The ranges of the requests for large files; empty for a whole file."""
        self.sent = 0
        """Bytes of large files."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, folder: Path) -> dict[str, str]:
        """For a process that downloads from here into that folder."""
        proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        caches = {"HF_HUB_CACHE": str(folder / "hub"), "PALAVER_DATA": str(folder / "data")}
        return {**os.environ, **proxies, **own, **caches, "NO_PROXY": "127.0.0.1"}

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = request.path.partition("?")[0]
        if path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/").partition("/revision/")[0].partition("/tree/")[0]
            files = self.repositories.get(name)
            if files is None:
                self._send(request, 404, b"{}", {"x-error-code": "RepoNotFound"})
                return
            entries = [_entry(file, content, self.declared.get(file)) for file, content in files.items()]
            value = entries if "/tree/" in path else _info(name, entries)
            self._send(request, 200, json.dumps(value).encode(), {"content-type": "application/json"})
            return
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        file = rest.partition("/")[2]
        content = self.repositories.get(name, {}).get(file)
        if content is None:
            self._send(request, 404, b"", {"x-error-code": "EntryNotFound", "x-repo-commit": COMMIT})
            return
        self._send_file(request, file, content, with_body)

    def _send_file(self, request: BaseHTTPRequestHandler, file: str, content: bytes, with_body: bool) -> None:
        headers = {"etag": f'"{_digest(file, content)}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
        start = 0
        if asked := request.headers.get("range"):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        cut = None
        if with_body and file.endswith(LARGE):
            self.ranges.append(asked or "")
            cut = self.cut_after
            body = bytes(len(body)) if self.damaged else body
            self.sent += len(body) if cut is None else min(cut, len(body))
        self._send(request, 206 if start else 200, body, headers, with_body, cut)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        with_body: bool = True,
        cut: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            request.close_connection = True


@contextmanager
def running_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


def _digest(file: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if file.endswith(LARGE) else hashlib.sha1(content).hexdigest()


def _entry(file: str, content: bytes, declared: int | None) -> dict[str, object]:
    size = len(content) if declared is None else declared
    entry: dict[str, object] = {"type": "file", "path": file, "rfilename": file, "size": size}
    entry |= {"oid": hashlib.sha1(content).hexdigest(), "blobId": hashlib.sha1(content).hexdigest()}
    if file.endswith(LARGE):
        lfs = {"sha256": _digest(file, content), "oid": _digest(file, content), "size": size, "pointerSize": 1}
        entry["lfs"] = lfs
    return entry


def _info(name: str, entries: list[dict[str, object]]) -> dict[str, object]:
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": entries}
