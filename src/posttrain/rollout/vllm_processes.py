"""The processes and shared memory of an engine that does not live in this process: nothing may outlive `close`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

GRACE_S = 10.0
"""How long processes may take to end by themselves before they are killed."""


class EngineProcesses:
    """Everything below the engine's core process, as of the moment the engine was ready."""

    def __init__(self, llm: Any) -> None:
        import psutil

        cores = [psutil.Process(process.pid) for process in llm.llm_engine.engine_core.resources.engine_manager.processes]
        self._processes = [*cores, *(child for core in cores for child in core.children(recursive=True))]
        self._segments = {segment for process in self._processes for segment in _mapped_segments(process)}

    @property
    def pids(self) -> list[int]:
        """The core first."""
        return [process.pid for process in self._processes]

    def reap(self) -> None:
        """Wait for every process, kill what does not end, and remove the shared memory a killed one could not remove."""
        import psutil

        _, alive = psutil.wait_procs(self._processes, timeout=GRACE_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=GRACE_S)
        for segment in self._segments:
            segment.unlink(missing_ok=True)


def _mapped_segments(process: Any) -> set[Path]:
    """POSIX shared memory of Python's making that the process has mapped."""
    return {Path(mapping.path) for mapping in process.memory_maps() if os.path.basename(mapping.path).startswith("psm_")}
