"""Checks a resolved configuration against the world it would run in: files, packages, models, rewards.

Owns everything that can be refused without building anything. Imports neither torch nor an engine; nothing is downloaded and
nothing is left on disk.
"""

from posttrain.preflight.inspection import inspect, inspect_overrides
from posttrain.preflight.plan import plan

__all__ = ["inspect", "inspect_overrides", "plan"]
