"""A web server on the loopback interface that serves files and, on request, misbehaves."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """What one request meets instead of a plain answer.

    status: answered instead of the file. after: bytes of the body sent before `then` happens: "close" cuts the
    connection, "hang" sends nothing more until the server stops, "drip" sends a byte every 0.05 s.
    no_length: the body ends by closing the connection, its length is not announced. keep_headers: for a status.
    """

    status: int = 200
    after: int | None = None
    then: str = "close"
    no_length: bool = False
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class FaultyServer:
    """files: body by URL path. faults: by URL path, used up one per request. always: by URL path, for each request."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    ranges: bool = True
    requests: list[tuple[str, str, dict]] = field(default_factory=list)  # method, path, headers
    stopped: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]

    def answer(self, method: str, path: str, headers: dict, body: bytes) -> tuple[int, dict, bytes] | None:
        """(status, headers, body) of a page that is not a file; a subclass may give some."""
        return None

    @contextmanager
    def running(self) -> Iterator[FaultyServer]:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stopped.set()  # lets hanging answers go
            server.shutdown()
            server.server_close()
            thread.join(10)


def _handler(site: FaultyServer) -> type:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            self.respond("GET")

        def do_HEAD(self):
            self.respond("HEAD")

        def do_POST(self):
            self.respond("POST")

        def respond(self, method: str) -> None:
            path = self.path
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            site.requests.append((method, path, dict(self.headers)))
            queue = site.faults.get(path, [])
            fault = queue.pop(0) if queue else site.always.get(path, Fault())
            if fault.status != 200:
                return self.send(fault.status, dict(fault.headers), b"no")
            page = site.answer(method, path, dict(self.headers), sent)
            if page is not None:
                return self.send(page[0], page[1], b"" if method == "HEAD" else page[2])
            body = site.files.get(path.split("?")[0])
            if body is None:
                return self.send(404, {}, b"not here")
            total = len(body)
            status, extra = 200, {}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted and site.ranges:
                first = int(wanted[1])
                if first >= total:
                    return self.send(416, {"Content-Range": f"bytes */{total}"}, b"")
                last = min(int(wanted[2] or total - 1), total - 1)
                body = body[first : last + 1]
                status, extra = 206, {"Content-Range": f"bytes {first}-{last}/{total}"}
            if method == "HEAD":
                return self.send(status, extra | {"Content-Length": str(len(body))}, b"")
            return self.send(status, extra, body, fault)

        def send(self, status: int, headers: dict, body: bytes, fault: Fault = Fault()) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if "Content-Length" not in headers and not fault.no_length:
                self.send_header("Content-Length", str(len(body)))
            if fault.no_length or fault.after is not None:
                self.close_connection = True
                self.send_header("Connection", "close")
            self.end_headers()
            try:
                if fault.after is None:
                    self.wfile.write(body)
                    return
                self.wfile.write(body[: fault.after])
                self.wfile.flush()
                if fault.then == "hang":
                    site.stopped.wait(60)
                elif fault.then == "drip":
                    for k in range(fault.after, len(body)):
                        if site.stopped.wait(0.05):
                            break
                        self.wfile.write(body[k : k + 1])
                        self.wfile.flush()
            except OSError:
                pass  # the client has gone

    return Handler
