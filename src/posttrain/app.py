"""The console program: compose, resolve, check, run. Everything heavy is imported only when it is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from posttrain.checkpoint.lifecycle import ResumePoint
    from posttrain.config.root import RootConfig
    from posttrain.errors import Violation

VERBS = ("check", "doctor", "report", "reproduce", "export")
REFUSED = 2
"""Exit code of a configuration that must not start."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of `posttrain`; exits the process with 0, 1 (a run failed), 2 (refused), 75 (asked to end early: saved, to be continued
    with the same command) or 130 (interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(flag in arguments for flag in ("--help", "-h")):
        from posttrain.help import help_text

        print(help_text(arguments), end="")
        return
    verb = arguments[0] if arguments else ""
    if "--validate-manifest" in arguments:
        verb, arguments = "check", ["check", *(argument for argument in arguments if argument != "--validate-manifest")]
    if verb == "check":
        sys.exit(_check(arguments[1:]))
    if verb == "doctor":
        from posttrain.doctor import doctor

        sys.exit(doctor())
    if verb == "report":
        sys.exit(_report(arguments[1:]))
    if verb == "reproduce":
        sys.exit(_reproduce(arguments[1:]))
    if verb == "export":
        from posttrain.checkpoint.export import main as export_main

        sys.exit(export_main(arguments[1:]))
    if verb.isalpha():
        sys.exit(_unknown_verb(verb))
    try:
        _hydra(arguments)
    except KeyboardInterrupt:
        print("posttrain: interrupted; metrics and samples of the finished steps are written", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _check(arguments: Sequence[str]) -> int:
    """Compose and check without running; prints the plan of every job or every violation."""
    from hydra._internal.utils import get_args_parser

    from posttrain.preflight import plan

    flags = get_args_parser().parse_args(list(arguments))
    plans: list[str] = []
    for overrides in _jobs(flags):
        root, found = _inspect_one(overrides, flags)
        if root is None:
            return _refuse(found)
        plans.append("\n".join(plan(root)))
    print("\n\n".join(plans))
    return 0


def _unknown_verb(verb: str) -> int:
    from posttrain.config.base import nearest

    print(
        f"posttrain: {verb!r} is no command; {nearest(verb, list(VERBS))} Training takes GROUP=OPTION and KEY=VALUE",
        file=sys.stderr,
    )
    return REFUSED


def _inspect_one(overrides: Sequence[str], flags: Any) -> tuple[RootConfig | None, list[Violation]]:
    from posttrain.preflight import inspect_overrides

    return inspect_overrides(overrides, config_dir=flags.config_dir, config_name=flags.config_name or "config")


def _refuse(found: Sequence[Violation]) -> int:
    from posttrain.errors import ConfigError

    print(f"posttrain: {ConfigError(list(found))}", file=sys.stderr)
    return REFUSED


def _report(arguments: Sequence[str]) -> int:
    from posttrain.errors import ReportError
    from posttrain.track import write_report

    if len(arguments) != 1:
        print("usage: posttrain report RUN_DIR", file=sys.stderr)
        return REFUSED
    try:
        print(write_report(Path(arguments[0])))
    except ReportError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _reproduce(arguments: Sequence[str]) -> int:
    from posttrain.errors import ReportError
    from posttrain.runtime.reproduce import reproduce

    if len(arguments) != 1:
        print("usage: posttrain reproduce RUN_DIR", file=sys.stderr)
        return REFUSED
    try:
        return reproduce(Path(arguments[0]))
    except ReportError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return REFUSED


def _hydra(arguments: list[str]) -> None:
    """Hand over to Hydra: runs, sweeps, `--cfg`, `--info`, completion."""
    import hydra
    from hydra._internal.utils import get_args_parser

    from posttrain.config.locate import conf_dir
    from posttrain.config.store import register

    flags = get_args_parser().parse_args(arguments)
    if not (flags.info or flags.shell_completion or flags.hydra_help):
        for overrides in _jobs(flags):
            _require(overrides, flags)
    register()
    sys.argv = [sys.argv[0], *arguments]
    # Idle OpenMP threads spin by default and starve an engine or reward process on the same cores; read at torch's import.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(run)()


def _jobs(flags: Any) -> list[list[str]]:
    """The overrides of every job that will run: one, or the members of a sweep."""
    if not flags.multirun:
        return [flags.overrides]
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(flags.overrides)
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException:
        return []  # not a sweep of the basic sweeper: Hydra explains
    return [[override for override in job if not override.lstrip("+").startswith("hydra")] for batch in batches for job in batch]


def _require(overrides: Sequence[str], flags: Any) -> None:
    """Exit before anything starts when a job is refused. `--cfg` shows a configuration for another machine too, so only the
    rules of the tree itself apply to it, and missing values are what it is there to show."""
    if flags.cfg:
        from posttrain.config.compose import compose_checked

        _, found = compose_checked(overrides, config_dir=flags.config_dir, config_name=flags.config_name or "config")
        found = [violation for violation in found if violation.value != "???"]
    else:
        _, found = _inspect_one(overrides, flags)
    if found:
        sys.exit(_refuse(found))


def run(composed: DictConfig) -> float | None:
    """One job, as Hydra's task function; module-level so that launchers can pickle it by reference.

    Returns:
        The last held-out score, the objective of sweeps.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException
    from omegaconf import OmegaConf

    from posttrain.config import resolve
    from posttrain.errors import ConfigError, EmergencyStop, PosttrainError
    from posttrain.preflight import inspect
    from posttrain.runtime.rundir import claim, reloadable
    from posttrain.runtime.stop import SAVED_EXIT

    try:
        root = resolve(composed)
        found = inspect(root)
        if found:
            raise ConfigError(found)
        run_dir = Path(HydraConfig.get().runtime.output_dir) / root.rl.run_ts
        resume = _resume_point(run_dir, root)
        if resume is None:
            moved = claim(run_dir)
            if moved is not None:
                print(f"an earlier run of this name was moved to {moved}")
        elif resume.manifest.step >= root.rl.max_steps:
            print(
                f"this run is finished: {resume.folder} was saved after step {resume.manifest.step} of {root.rl.max_steps}; to go on "
                "raise rl.max_steps, to start again set rl.resume=off or another job.name"
            )
            _archive_leftovers(run_dir, root)
            return resume.training_state["score"]
        from posttrain.loop.launch import launch

        container = OmegaConf.to_container(OmegaConf.structured(root), resolve=True)
        assert isinstance(container, dict)
        plain = {str(key): value for key, value in container.items()}
        return launch(root, run_dir=run_dir, plain_config=reloadable(plain, root=root), resume=resume)
    except EmergencyStop as stopped:
        print(f"posttrain: {stopped}", file=sys.stderr)
        sys.exit(SAVED_EXIT)
    except PosttrainError as error:
        raise CompactHydraException(f"posttrain: {error}") from error


def _resume_point(run_dir: Path, root: RootConfig) -> ResumePoint | None:
    """Where this run continues; None when it starts. Reading and verifying a checkpoint needs no torch."""
    from posttrain.checkpoint.lifecycle import find_resume_point
    from posttrain.checkpoint.store import primary_store

    return find_resume_point(run_dir, root.rl.resume, primary_store(root, run_dir))


def _archive_leftovers(run_dir: Path, root: RootConfig) -> None:
    """Upload what the finished run could not."""
    from posttrain.checkpoint.lifecycle import archive_leftovers
    from posttrain.checkpoint.store import archive_store

    archive = archive_store(root, run_dir)
    if archive is not None:
        archive_leftovers(run_dir, archive, announce=print)
