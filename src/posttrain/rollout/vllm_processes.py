"""The processes and shared memory of an engine that does not live in this process: nothing may outlive `close`."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from threading import Thread
from typing import Any

GRACE_S = 10.0
"""How long processes may take to end by themselves before they are killed."""


class EngineProcesses:
    """Everything below the engine's core process, as of the moment the engine was ready."""

    def __init__(self, llm: Any) -> None:
        import psutil

        client = llm.llm_engine.engine_core
        managed = client.resources.engine_manager.processes
        # Not the client itself, which could then never be collected.
        waiters = (client.resources, client.outputs_queue, client.utility_results)
        Thread(target=_wake_at_death, args=([process.sentinel for process in managed], *waiters), daemon=True).start()
        self._reader: Thread = client.output_queue_thread
        self._sockets: Any = client.ctx
        cores = [psutil.Process(process.pid) for process in managed]
        self._processes = [*cores, *(child for core in cores for child in core.children(recursive=True))]
        self._segments = {segment for process in self._processes for segment in _mapped_segments(process)}

    @property
    def pids(self) -> list[int]:
        """The core first."""
        return [process.pid for process in self._processes]

    def reap(self) -> None:
        """After the client's shutdown: wait for every process, kill what does not end, close the sockets, and remove the shared
        memory that a killed process could not remove."""
        import psutil

        _, alive = psutil.wait_procs(self._processes, timeout=GRACE_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=GRACE_S)
        # The reader owns one of the sockets and closes it when the client shuts down.
        self._reader.join(GRACE_S)
        self._sockets.destroy(linger=0)
        for segment in self._segments:
            segment.unlink(missing_ok=True)


def _mapped_segments(process: Any) -> set[Path]:
    """POSIX shared memory of Python's making that the process has mapped."""
    return {Path(mapping.path) for mapping in process.memory_maps() if os.path.basename(mapping.path).startswith("psm_")}


def _wake_at_death(sentinels: Sequence[int], resources: Any, outputs: queue.Queue[Any], calls: dict[int, Future[Any]]) -> None:
    """Once a core process has ended, let every caller that waits for it fail.

    vLLM's synchronous client marks the engine as dead then, but leaves a caller that already waits for an answer waiting.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    connection.wait(list(sentinels))
    resources.engine_dead = True  # first: from here on nobody starts to wait
    outputs.put_nowait(EngineDeadError())
    for call in list(calls.values()):
        with suppress(InvalidStateError):
            call.set_exception(EngineDeadError())
