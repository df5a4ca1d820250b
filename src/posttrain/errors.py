"""Every error a user can meet, under one root.

Each class is also the standard type a caller would catch (`ValueError`, `RuntimeError`, ...), carries a complete message as
its only positional argument, and therefore survives pickling between processes.
"""

from __future__ import annotations

from dataclasses import dataclass


class PosttrainError(Exception):
    """Root of all errors raised on purpose by posttrain."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: what was given, what is required, and what to do about it."""

    key: str
    """Full dotted key, e.g. `rl.batch_per_replica`."""
    value: object
    """The offending value as the user gave it."""
    rule: str
    """What must hold, as a clause: "must be a positive multiple of rl.group_size=8"."""
    remedy: str
    """What to change, as an imperative: "set rl.batch_per_replica=32"."""

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.rule}; {self.remedy}"


class ConfigError(PosttrainError, ValueError):
    """A configuration that must not start. Lists every violation found, not only the first."""

    def __init__(self, violations: list[Violation] | tuple[Violation, ...] | str) -> None:
        super().__init__(violations)
        self.violations: tuple[Violation, ...] = () if isinstance(violations, str) else tuple(violations)
        self._text = violations if isinstance(violations, str) else ""

    def __str__(self) -> str:
        if not self.violations:
            return self._text
        count = len(self.violations)
        head = f"the configuration breaks {count} rule{'s' if count > 1 else ''}:"
        return "\n".join([head, *(f"  {violation}" for violation in self.violations)])


class DataError(PosttrainError, ValueError):
    """A prompt source that cannot deliver what its configuration promises; names file and line where there is one."""


class RewardError(PosttrainError, RuntimeError):
    """A reward provider that broke its contract (not a candidate it merely could not score)."""


class RolloutError(PosttrainError, RuntimeError):
    """An engine that cannot generate, or that was asked to before a weight version was committed."""


class WeightSyncError(PosttrainError, RuntimeError):
    """An engine whose weights are not, or cannot be proven to be, the trainer's."""


class ModelError(PosttrainError, RuntimeError):
    """A model that cannot be built or does not compute what posttrain needs from it."""


class TrainingError(PosttrainError, RuntimeError):
    """An optimizer window that was rejected, or an objective that broke its contract."""


class CheckpointError(PosttrainError, RuntimeError):
    """A save that could not be written, or a checkpoint that must not be loaded; names the file."""


class EmergencyStop(PosttrainError):
    """The run was asked to end early, saved everything, and can be continued."""


class ReportError(PosttrainError, ValueError):
    """A run directory that `posttrain report` cannot read."""
