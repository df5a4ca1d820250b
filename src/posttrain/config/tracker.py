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
class AlarmConfig:
    """Thresholds past which a run says so, once each time it happens. 0 switches an alarm off."""

    first_ratio: float = bounded(0.02, ge=0.0)
    """Mean |probability ratio - 1| of the first optimizer step of the run, where the policy is still the one that sampled."""
    logprob_gap: float = bounded(0.1, ge=0.0)
    """Mean |trainer - sampler| log-probability in nats: rounding explains a few hundredths in bfloat16, stale or wrong weights
    give more."""
    uninformative_steps: int = bounded(5, ge=0)
    """Consecutive steps without a single informative group."""
    memory_slope_mib: float = bounded(64.0, ge=0.0)
    """Growth of the process's resident memory per step in MiB, as a fit over the last 20 steps."""
    stop: bool = False
    """End the run when an alarm is raised; the metrics up to then are written."""


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
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
