"""`tracker.*`: what a person sees. Local files are the truth; outside services are best effort."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.base import bounded, choice


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = choice("disabled", "offline", "online")
    """`offline` writes a local copy that `wandb sync` uploads later."""
    project: str = "posttrain"
    entity: str | None = None
    tags: list[str] = field(default_factory=list[str])


@dataclass
class TrackerConfig:
    """Console, samples, report and outside trackers."""

    console: str = choice("auto", "live", "plain", "quiet")
    """`auto` draws a live panel on a terminal and prints plain lines elsewhere."""
    samples_every: int = bounded(1, ge=0)
    """Write `samples/` every so many collected batches; 0 writes none."""
    samples_max_groups: int = bounded(64, ge=1)
    """Groups written per step."""
    report: bool = True
    """Write `report.html` at the end (and after an interrupt)."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
