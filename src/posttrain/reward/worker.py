"""A child process that scores one candidate at a time and can be killed at a deadline.

Model outputs reach libraries that may loop or exhaust memory on them (`9**9**9` is enough), and such a computation cannot be
stopped from inside the process. The child runs `worker_main.py` by path: it imports neither posttrain nor torch nor the
program's main module. Requests are length-prefixed pickles on its standard input, answers are JSON lines on its standard
output.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from posttrain.errors import RewardError

WORKER_MAIN = Path(__file__).with_name("worker_main.py")


class WorkerFailure(Exception):
    """The worker gave no score for this request; the message is the reason, and the next request gets a working worker."""


class BoundedWorker:
    """Owns the child: started when first needed, killed at a missed deadline, started again for the next request."""

    def __init__(self, kind: str, *, timeout_s: float, command: Sequence[str] | None = None, start_timeout_s: float = 120.0) -> None:
        """`kind` is a scorer that `worker_main.py` knows; `command` replaces the program that is run for it."""
        self.kind = kind
        self.timeout_s = timeout_s
        # -P keeps the working directory, and whatever modules lie there, out of the child's path.
        self._command = list(command or (sys.executable, "-P", str(WORKER_MAIN), kind, str(timeout_s)))
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running child; None while there is none."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> None:
        """Wait until the child has imported its library and awaits a request; returns at once when it does already."""
        with self._lock:
            self._started()

    def call(self, request: object) -> float:
        """The score of one request; raises WorkerFailure when it took too long, raised, or killed the worker."""
        with self._lock:
            child = self._started()
            started = time.perf_counter()
            try:
                answer = child.ask(pickle.dumps(request), timeout_s=self.timeout_s)
            except TimeoutError:
                self._kill()
                raise WorkerFailure(f"timed out after {time.perf_counter() - started:.1f}s") from None
            except (OSError, EOFError, ValueError):
                code = self._kill()
                raise WorkerFailure(f"the {self.kind} worker died with exit code {code}") from None
            except BaseException:
                # An interrupt between question and answer: the next question would be given this one's answer.
                self._kill()
                raise
        if "error" in answer:
            raise WorkerFailure(str(answer["error"]))
        return float(answer["score"])

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _started(self) -> _Child:
        if self._child is not None and self._child.process.poll() is None:
            return self._child
        self._kill()
        child = self._child = _Child(self._command)
        try:
            child.read(self._start_timeout_s)
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            said = child.stderr_tail()
            code = self._kill()
            what = (
                f"did not start within {self._start_timeout_s:.0f}s" if isinstance(error, TimeoutError) else f"ended with exit code {code}"
            )
            raise RewardError(
                f"the {self.kind} reward worker {what} before its first request, it must start; install what it needs "
                f"(pip install 'posttrain[math,reasoning]'). It said: {said or 'nothing'}"
            ) from None
        return child

    def _kill(self) -> int | None:
        child, self._child = self._child, None
        return None if child is None else child.kill()


class _Child:
    """One life of the process and its pipes."""

    def __init__(self, command: list[str]) -> None:
        # A file, because nobody drains a pipe while the child computes.
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # Its own session, so that one signal reaches whatever the library may have spawned.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, bufsize=0, start_new_session=True
        )
        assert self.process.stdin is not None
        # A child that does not read must not be able to block the parent past the deadline.
        os.set_blocking(self.process.stdin.fileno(), False)
        self._pending = b""
        self._release = weakref.finalize(self, _end, self.process, self._stderr)

    def ask(self, payload: bytes, *, timeout_s: float) -> dict[str, Any]:
        """Send a request and read its answer, both within the deadline."""
        assert self.process.stdin is not None
        stdin, deadline = self.process.stdin.fileno(), time.perf_counter() + timeout_s
        message = memoryview(struct.pack("<Q", len(payload)) + payload)
        while message:
            if not _ready(stdin, select.POLLOUT, deadline - time.perf_counter()):
                raise TimeoutError
            message = message[os.write(stdin, message) :]
        return self.read(deadline - time.perf_counter())

    def read(self, timeout_s: float) -> dict[str, Any]:
        """The next line; raises TimeoutError, or EOFError when the child has ended."""
        assert self.process.stdout is not None
        stdout, deadline = self.process.stdout.fileno(), time.perf_counter() + timeout_s
        while b"\n" not in self._pending:
            if not _ready(stdout, select.POLLIN, deadline - time.perf_counter()):
                raise TimeoutError
            chunk = os.read(stdout, 65536)
            if not chunk:
                raise EOFError
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return json.loads(line)

    def stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-1500:].decode(errors="replace").strip()

    def kill(self) -> int | None:
        # A child that has closed its output is ending: its own exit code says why, the signal below would hide it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.stdout is not None and _ready(self.process.stdout.fileno(), select.POLLIN, 0.0):
                self.process.wait(timeout=1.0)
        self._release()
        return self.process.returncode


def _ready(descriptor: int, event: int, timeout_s: float) -> bool:
    """Whether the pipe can be used, or is broken, within the time."""
    poll = select.poll()  # select() refuses descriptors above 1023, which a process with many sockets reaches
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000.0))


def _end(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
    """Kill the process group and reap the child. A function of its own: a finalizer must not keep its object alive."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
