"""A small Hugging Face hub on a loopback port: what it has, whom it refuses, how it breaks off.

It lists a model (`api/models/…?blobs=True`) and gives its files (`…/resolve/COMMIT/FILE`); those
that Git LFS would hold come from another host name, as from the hub's CDN.
"""

import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

import oled_moe.hub

COMMIT = "c0ffee" + "0" * 34


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one reply that has bytes of a file."""

    status: int = 0
    # Sent and then the connection ends, or waits until `FakeHub.released`.
    cut_at: int | None = None
    is_stalled: bool = False
    flip_at: int | None = None
    is_range_ignored: bool = False
    tail: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request for bytes of a file."""

    name: str
    range: str | None
    token: str | None
    is_cdn: bool


class FakeHub:
    """One model; `faults[name]` are those of its next replies, the last one of all further ones."""

    def __init__(self, files: dict[str, bytes], model: str = "some/tiny") -> None:
        self.model = model
        self.files = files
        self.commit = COMMIT
        self.revisions = ("main", "v1")
        self.token: str | None = None
        self.is_gated = False
        # Status and headers of what is answered instead of the listing, one after another.
        self.listing_faults: list[tuple[int, dict[str, str]]] = []
        self.listing: dict[str, Any] | None = None
        self.faults: dict[str, list[Fault]] = {}
        self.asked: list[Asked] = []
        self.num_listings = 0
        self.released = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked_of(self, name: str) -> list[str | None]:
        """The ranges that were asked of a file's bytes."""
        return [a.range for a in self.asked if a.name == name and a.is_cdn == is_large(name)]

    def siblings(self) -> list[dict[str, Any]]:
        return [sibling(name, content) for name, content in self.files.items()]


def is_large(name: str) -> bool:
    """Whether Git LFS holds it."""
    return name.endswith((".safetensors", ".bin"))


def git_checksum(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def checksum(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if is_large(name) else git_checksum(content)


def sibling(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "rfilename": name,
        "size": len(content),
        "blobId": git_checksum(content),
    }
    if is_large(name):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 130}
    return entry


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def leave_settings(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Forget the settings and the token of whoever runs the tests; ask again without pauses."""
    for name in [name for name in os.environ if name.startswith(("OLED_MOE_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NO_PROXY", "*")
    # huggingface_hub reads its settings once, when it is first imported.
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(oled_moe.hub, "_PAUSES_S", (0.0, 0.0, 0.0))


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    """Wait for what a process is about to do."""
    deadline_s = time.monotonic() + 120
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.01)


@contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    hub = FakeHub(files)

    class Handler(_Handler):
        _hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    _hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        hub, path = self._hub, unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            self._list(path.removeprefix("/api/models/"))
        elif path.startswith("/cdn/"):
            self._send_file(path.removeprefix("/cdn/"), is_cdn=True)
        elif path.startswith(
            (f"/{hub.model}/resolve/{hub.commit}/", f"/{hub.model}/resolve/main/")
        ):
            name = path.rsplit("/", 1)[1]
            if hub.is_gated:
                self._refuse(403 if self._token else 401, {"X-Error-Code": "GatedRepo"})
            elif name not in hub.files:
                self._refuse(404, {"X-Error-Code": "EntryNotFound"})
            elif is_large(name):
                hub.asked.append(Asked(name, self.headers["Range"], self._token, False))
                at = f"http://localhost:{hub.port}/cdn/{name}"
                self._refuse(302, {"Location": at, **self._facts(name)})
            else:
                self._send_file(name, is_cdn=False)
        else:
            self._refuse(404, {})

    # huggingface_hub's own downloads begin so.
    do_HEAD = do_GET

    def _facts(self, name: str) -> dict[str, str]:
        content = self._hub.files[name]
        facts = {"ETag": f'"{checksum(name, content)}"', "X-Repo-Commit": self._hub.commit}
        if is_large(name):
            facts |= {"X-Linked-Etag": facts["ETag"], "X-Linked-Size": str(len(content))}
        return facts

    @property
    def _token(self) -> str | None:
        return (self.headers["Authorization"] or "").removeprefix("Bearer ") or None

    def _refuse(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _list(self, what: str) -> None:
        hub = self._hub
        hub.num_listings += 1
        name, _, revision = what.partition("/revision/")
        if hub.listing_faults:
            self._refuse(*hub.listing_faults.pop(0))
        elif hub.token is not None and self._token != hub.token:
            message = "Invalid username or password."
            self._refuse(401, {"X-Error-Message": message})
        elif name != hub.model:
            # As the hub does: a stranger cannot tell a private model from none.
            status = 404 if self._token else 401
            self._refuse(status, {"X-Error-Code": "RepoNotFound"})
        elif revision not in (*hub.revisions, hub.commit):
            self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            listing = hub.listing or {"id": name, "sha": hub.commit, "siblings": hub.siblings()}
            body = json.dumps(listing).encode()
            self._refuse(200, {"Content-Type": "application/json"}, body)

    def _send_file(self, name: str, *, is_cdn: bool) -> None:
        hub = self._hub
        hub.asked.append(Asked(name, self.headers["Range"], self._token, is_cdn))
        content = bytearray(hub.files[name])
        fault = self._next_fault(name)
        if fault.status:
            self._refuse(fault.status, fault.headers)
            return
        if fault.flip_at is not None:
            content[fault.flip_at] ^= 1
        start = 0
        if self.headers["Range"] and not fault.is_range_ignored:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        end = len(content) if fault.cut_at is None else max(start, fault.cut_at)
        if start and start >= len(content):
            self._refuse(416, {"Content-Range": f"bytes */{len(content)}"})
            return
        self.send_response(206 if start else 200)
        if start:
            at = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", at)
        for header, value in self._facts(name).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content) + len(fault.tail) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[start:end] + fault.tail)
        if fault.cut_at is not None:
            self.wfile.flush()
            if fault.is_stalled:
                hub.released.wait(240)
            self.close_connection = True

    def _next_fault(self, name: str) -> Fault:
        faults = self._hub.faults.get(name, [])
        if not faults:
            return Fault()
        return faults.pop(0) if len(faults) > 1 else faults[0]
