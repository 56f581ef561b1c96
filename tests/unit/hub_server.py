"""A stand-in of the Hub over HTTP: model repositories in folders, at one commit each."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
LARGE = ".safetensors"  # kept apart from the repository's own files, listed by SHA-256


class HubServer:
    """What is served, what is gated, and every request as (method, path, token)."""

    def __init__(self, repos: Mapping[str, Path], *, gated: tuple[str, ...] = ()):
        self.repos = dict(repos)
        self.gated = gated
        self.broken = False  # answers 503 to everything
        self.requests: list[tuple[str, str, str | None]] = []
        self.address = ""

    def asked_for(self, part: str) -> list[str]:
        return [path for _, path, _ in self.requests if part in path]


@contextmanager
def serving(server: HubServer) -> Iterator[HubServer]:
    """The server's thread while the block runs."""

    class Handler(_Handler):
        hub = server

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.address = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows what was asked, if it fails."""

    def _answer(self) -> None:
        path, token = unquote(urlsplit(self.path).path), self.headers.get("Authorization")
        self.hub.requests.append((self.command, path, token))
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        repo = "/".join(parts[2:4] if api else parts[:2])
        if self.hub.broken:
            self._send(503, b"")
        elif repo not in self.hub.repos:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif repo in self.hub.gated and token is None:
            self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        elif api:
            self._answer_api(self.hub.repos[repo], parts[4:])
        else:
            self._send_file(self.hub.repos[repo], parts[2:])

    def _answer_api(self, root: Path, rest: list[str]) -> None:
        """`revision/<r>` is the repository's listing, `tree/<r>/<folder>` one folder's."""
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            folder = root.joinpath(*rest[2:])
            found = [_listed(path, root) for path in sorted(folder.rglob("*")) if path.is_file()]
            self._send_json(found)
        else:
            names = [str(p.relative_to(root)) for p in sorted(root.rglob("*")) if p.is_file()]
            siblings = [{"rfilename": name} for name in names]
            self._send_json({"id": "a/b", "sha": COMMIT, "siblings": siblings, "tags": []})

    def _send_file(self, root: Path, rest: list[str]) -> None:
        """`resolve/<r>/<name>`."""
        if rest[1] not in ("main", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        path = root.joinpath(*rest[2:])
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        etag = digest if path.suffix == LARGE else digest[:40]
        self._send(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _listed(path: Path, root: Path) -> dict[str, object]:
    size, data = path.stat().st_size, path.read_bytes()
    found: dict[str, object] = {
        "type": "file",
        "path": str(path.relative_to(root)),
        "size": size,
        "oid": hashlib.sha1(data).hexdigest(),
    }
    if path.suffix == LARGE:
        sha256 = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
    return found
