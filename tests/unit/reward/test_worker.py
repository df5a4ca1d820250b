"""The bounded worker: deadlines, crashes, recovery, and nothing left behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from posttrain.errors import RewardError
from posttrain.reward.builtin import build_math
from posttrain.reward.worker import BoundedWorker, WorkerFailure

PROGRAM = Path(__file__).with_name("workers_under_test.py")


@pytest.fixture
def make(request):
    def start(*, timeout_s=10.0, marker=""):
        worker = BoundedWorker("test", timeout_s=timeout_s, command=[sys.executable, str(PROGRAM), str(timeout_s), str(marker)])
        request.addfinalizer(worker.close)
        return worker

    return start


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed grandchild is a zombie until whoever inherited it looks.
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def test_one_process_serves_many_requests(make):
    worker = make()
    assert worker.pid is None
    assert worker.call("abc") == 3.0
    pid = worker.pid
    assert [worker.call("x" * size) for size in (0, 5, 1_000_000)] == [0.0, 5.0, 1e6]
    assert worker.pid == pid
    worker.close()
    worker.close()
    assert worker.pid is None and not alive(pid)
    assert worker.call("ab") == 2.0  # and a closed worker starts again


def test_hung_request_is_killed_at_the_deadline_and_the_next_one_served(make):
    worker = make(timeout_s=0.5)
    worker.start()
    pid, started = worker.pid, time.perf_counter()
    with pytest.raises(WorkerFailure, match=r"^timed out after 0\.5s$"):
        worker.call("hang")
    assert 0.5 <= time.perf_counter() - started < 3.0
    assert not alive(pid)
    assert worker.call("abc") == 3.0 and worker.pid != pid


def test_the_whole_process_group_is_killed(make, tmp_path):
    marker = tmp_path / "pid"
    worker = make(timeout_s=2.0, marker=marker)
    with pytest.raises(WorkerFailure, match="timed out"):
        worker.call("hang with a child")
    child = int(marker.read_text())
    deadline = time.perf_counter() + 5.0
    while alive(child) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_request_larger_than_the_pipe_to_a_worker_that_does_not_read():
    worker = BoundedWorker("deaf", timeout_s=0.5, command=[sys.executable, "-c", "print('{}', flush=True); import time; time.sleep(600)"])
    try:
        with pytest.raises(WorkerFailure, match="timed out after"):
            worker.call("x" * 10_000_000)
    finally:
        worker.close()


@pytest.mark.parametrize(("request_", "code"), [("exit", 7), ("segfault", -11)])
def test_crash_is_a_failure_with_the_exit_code_and_the_next_request_is_served(make, request_, code):
    worker = make()
    with pytest.raises(WorkerFailure, match=f"^the test worker died with exit code {code}$"):
        worker.call(request_)
    assert worker.call("abc") == 3.0


def test_exception_in_the_worker_is_a_failure_and_the_worker_lives(make):
    worker = make()
    worker.start()
    pid = worker.pid
    with pytest.raises(WorkerFailure, match=r"^ValueError: cannot be scored$"):
        worker.call("raise")
    assert worker.pid == pid


def test_starting_does_not_count_against_the_deadline(make, monkeypatch):
    monkeypatch.setenv("WORKER_START_S", "1.5")
    worker = make(timeout_s=0.7)
    assert worker.call("abc") == 3.0


def test_worker_that_cannot_start_stops_the_run(make, monkeypatch):
    monkeypatch.setenv("WORKER_START", "broken")
    with pytest.raises(RewardError, match=r"the test reward worker ended with exit code 1 before its first request.*library is missing"):
        make().call("abc")
    worker = BoundedWorker("slow", timeout_s=1.0, start_timeout_s=0.3, command=[sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(RewardError, match="did not start within 0s"):
        worker.start()


def test_forgotten_worker_is_reaped(make):
    worker = BoundedWorker("test", timeout_s=5.0, command=[sys.executable, str(PROGRAM), "5"])
    worker.start()
    pid = worker.pid
    del worker
    assert not alive(pid)


def test_worker_program_imports_no_torch():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import worker_main as w; w.math_scorer(); w.reasoning_gym_scorer();"
        "print('{}') if not {'torch', 'posttrain', 'transformers'} & set(sys.modules) else sys.exit('heavy')"
    )
    folder = str(Path(sys.modules[BoundedWorker.__module__].__file__).parent)
    worker = BoundedWorker("test", timeout_s=5.0, command=[sys.executable, "-c", code, folder])
    worker.start()
    worker.close()


def test_math_expression_that_never_ends(group):
    """A real one: a power tower that exact arithmetic would expand."""
    provider = build_math(1.0)
    try:
        first, tower, last = provider.score(group("\\boxed{9}", "$9^{9^{9^{9^9}}}$", "\\boxed{8}", reference="9"))
        assert (first.total, first.failure) == (1.0, None)
        assert (tower.total, tower.failure) == (0.0, "timed out after 1.0s")
        assert (last.total, last.failure) == (0.0, None)
        assert first.time_s < 1.0 and last.time_s < 1.0  # importing math-verify, twice, is not in them
    finally:
        provider.close()


def test_math_worker_can_be_replaced(group, make):
    provider = build_math(1.0, worker=make(timeout_s=0.5))
    (score,) = provider.score(group("abc", reference="1"))
    assert score.total == 2.0  # the length of the request, a dictionary of two
