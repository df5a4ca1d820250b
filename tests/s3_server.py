"""A real S3-protocol server on loopback, and a proxy before it that fails as servers do."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest

BUCKET = "posttrain-test"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test-key-id", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}

Verdict = int | str | None
"""An HTTP status to answer with, "cut" to close the connection midway, or None to pass the request on."""


SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
sys.stdin.read()
server.stop()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """An empty bucket; yields the server's address. CREDENTIALS are in the environment meanwhile.

    The server is a process of its own: its web framework leaves objects in the interpreter that vLLM trips over when it looks
    through loaded modules.
    """
    start = [sys.executable, "-c", SERVE]
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        for key, value in CREDENTIALS.items():
            patch.setenv(key, value)
        assert server.stdin is not None and server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            assert address, "the S3 server did not start"
            client = boto3.client("s3", endpoint_url=address)
            client.create_bucket(Bucket=BUCKET)
            yield address
            client.close()
        finally:
            server.stdin.close()  # it ends with its input
            server.wait(timeout=30)


@dataclass
class Proxy:
    """Passes requests on, unless `judge` says otherwise."""

    address: str
    judge: Callable[[str, str], Verdict] = lambda method, path: None
    """Called with method and path; replaced by tests at any time."""
    requests: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


@contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """A proxy before a server."""
    there = urlsplit(target)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            with lock:
                proxy.requests.append((self.command, self.path))
                verdict = proxy.judge(self.command, self.path)
            length = int(self.headers.get("Content-Length") or 0)
            if verdict == "cut":
                self.rfile.read(length // 2)
                self.close_connection = True
                return
            body = self.rfile.read(length)
            if isinstance(verdict, int):
                error = b"<Error><Code>InternalError</Code><Message>We encountered an internal error</Message></Error>"
                self._answer(verdict, {"Content-Type": "application/xml"}, b"" if self.command == "HEAD" else error)
                return
            connection = http.client.HTTPConnection(there.hostname or "", there.port)
            headers = {key: value for key, value in self.headers.items() if key.lower() != "expect"}
            connection.request(self.command, self.path, body or None, headers)
            response = connection.getresponse()
            content = response.read()
            self._answer(response.status, dict(response.getheaders()), content)
            connection.close()

        def _answer(self, status: int, headers: dict[str, Any], body: bytes) -> None:
            self.send_response_only(status)
            for key, value in headers.items():
                if key.lower() not in ("transfer-encoding", "connection") and not (key.lower() == "content-length" and body):
                    self.send_header(key, value)
            if body or not any(key.lower() == "content-length" for key in headers):
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
