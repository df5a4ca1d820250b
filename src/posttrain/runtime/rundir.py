"""The run directory: a fresh place for every run, the resolved configuration, and what the objective really is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posttrain.runtime.provenance import collect, write_provenance

if TYPE_CHECKING:
    from posttrain.algorithm.primitives.objective import Objective
    from posttrain.config.root import RootConfig


def claim(run_dir: Path) -> Path | None:
    """Make `run_dir` an empty directory; an earlier run of the same name is moved aside to `<name>.<n>`, never overwritten.

    Returns:
        Where the earlier run went, or None when there was none.
    """
    moved: Path | None = None
    if run_dir.is_dir() and any(run_dir.iterdir()):
        number = 1
        while (moved := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        run_dir.rename(moved)
    run_dir.mkdir(parents=True, exist_ok=True)
    return moved


def write_run_files(run_dir: Path, *, plain_config: Mapping[str, Any], objective: Objective, root: RootConfig) -> Path:
    """`config_resolved.yaml` (reload with `posttrain --config-dir RUN --config-name config_resolved`) and provenance.

    Returns:
        The provenance file of this attempt.
    """
    provenance = collect(root)
    effective = {"reduction": objective.reduction.name, "old_logp_cache": objective.old_logp_cache, **dict(objective.identity)}
    written = write_provenance(run_dir, provenance)
    text = yaml.safe_dump(
        {**plain_config, "effective_objective": effective, "provenance": provenance}, sort_keys=False, allow_unicode=True, width=140
    )
    header = "# Written by a run. Load it again with: posttrain --config-dir <this directory> --config-name config_resolved\n"
    (run_dir / "config_resolved.yaml").write_text(header + text, encoding="utf-8")
    return written


def reloadable(plain_config: dict[str, Any], *, root: RootConfig) -> dict[str, Any]:
    """The resolved values behind a defaults list that makes the tree typed again when it is loaded."""
    from posttrain.config.store import schema_of

    defaults: list[Any] = ["/schema/root@_here_"]
    defaults += [f"{schema}@{name}" for name in plain_config if (schema := schema_of(getattr(root, name))) is not None]
    defaults += ["_self_", {"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    # the place of a run follows job.* as in conf/config.yaml, so that overriding job.* moves a reloaded run
    place = {
        "run": {"dir": "${job.output_root}/${job.group}/${job.name}"},
        "output_subdir": None,
        "job": {"name": "posttrain", "chdir": False},
    }
    return {"defaults": defaults, "hydra": place, **plain_config}


def describe_objective(objective: Objective) -> str:
    """One line: every value that defines the loss."""
    values = " ".join(f"{key}={value}" for key, value in objective.identity.items())
    return f"{values} reduction={objective.reduction.value}"
