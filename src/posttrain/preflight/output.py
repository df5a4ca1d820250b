"""Whether the run directory can be made and written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from posttrain.config import JobConfig
from posttrain.errors import Violation


def output_violations(job: JobConfig) -> Iterator[Violation]:
    """Refuse a run directory that leads through a file or whose nearest existing parent takes no new entry."""
    root = Path(job.output_root)
    parts = {"job.output_root": (job.output_root, root), "job.group": (job.group, root / job.group)}
    parts["job.name"] = (job.name, root / job.group / job.name)
    for key, (value, path) in parts.items():
        nearest = _nearest_existing(path)
        if not nearest.is_dir():
            yield Violation(key, value, f"leads through {nearest}, which is a file", f"set {key} to a place that can become a directory")
            return
    nearest = _nearest_existing(root / job.group / job.name)
    why = _cannot_create_in(nearest)
    if why is not None:
        rule = f"is not writable: nothing can be created in {nearest} ({why})"
        yield Violation("job.output_root", job.output_root, rule, "set job.output_root to a directory you may write")


def _nearest_existing(path: Path) -> Path:
    for candidate in (path, *path.parents):
        try:
            if candidate.exists() or candidate.is_symlink():
                return candidate
        except OSError:  # a parent that may not even be searched
            continue
    return Path()


def _cannot_create_in(directory: Path) -> str | None:
    """Why nothing can be created in a directory. Permission bits alone miss read-only and virtual file systems, so it tries."""
    if not os.access(directory, os.W_OK | os.X_OK):
        return "permission denied"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".posttrain-check-", dir=directory))
    except OSError as error:
        return error.strerror or str(error)
    return None
