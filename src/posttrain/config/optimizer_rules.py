"""Rules of the optimizer, its schedule and the adapters: which settings need which, and which nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.base import default_of
from posttrain.config.grpo import GRPOConfig
from posttrain.config.model import HFModelConfig, LoraConfig, NativePolicyBuildSpec
from posttrain.config.root import RootConfig
from posttrain.config.run import OptimizerConfig, resolve_precision
from posttrain.errors import Violation

PATH = "rl.optimizer"


def optimizer_violations(root: RootConfig) -> Iterator[Violation]:
    """Everything the optimizer and LoRA can be refused for without a look at the model or the machine."""
    rl, model = root.rl, root.model
    yield from _unread_muon(rl.optimizer)
    if isinstance(rl, GRPOConfig):
        yield from _schedule_violations(rl.optimizer, total=total_steps(rl))
        if rl.optimizer.name == "muon" and isinstance(model, HFModelConfig | NativePolicyBuildSpec):
            master = resolve_precision(rl, model.dtype).master
            if master != "float32":
                yield Violation(
                    f"{PATH}.name",
                    "muon",
                    f"needs parameters stored in float32, and the resolved rl.master_dtype is {master}",
                    "set rl.master_dtype=float32 (with rl.param_dtype=bfloat16 rl.mixed_precision_mode=autocast to compute in bfloat16)",
                )
    if isinstance(model, HFModelConfig):
        yield from _lora_violations(model.lora)


def optimizer_cautions(root: RootConfig) -> Iterator[str]:
    """Settings of the optimizer that are honoured and deserve a word at the start."""
    rl = root.rl
    if not isinstance(rl, GRPOConfig):
        return
    total, warmup = total_steps(rl), rl.optimizer.warmup_steps
    if rl.optimizer.lr_schedule == "constant" and warmup > total:
        yield f"{PATH}.warmup_steps={warmup}: the run ends after {total} optimizer steps, before the rate reaches {PATH}.lr"


def total_steps(rl: GRPOConfig) -> int:
    """Optimizer steps of a whole run, which is the length of a schedule."""
    return rl.max_steps * rl.n_mini


def _unread_muon(optimizer: OptimizerConfig) -> Iterator[Violation]:
    if optimizer.name == "muon":
        return
    for name, spec in OptimizerConfig.__dataclass_fields__.items():
        value = getattr(optimizer, name)
        if name.startswith("muon_") and value != default_of(spec):
            rule = f"is never read with {PATH}.name={optimizer.name}"
            yield Violation(f"{PATH}.{name}", value, rule, f"set {PATH}.name=muon, or drop it")


def _schedule_violations(optimizer: OptimizerConfig, *, total: int) -> Iterator[Violation]:
    if optimizer.lr_schedule != "constant" and optimizer.warmup_steps >= total:
        yield Violation(
            f"{PATH}.warmup_steps",
            optimizer.warmup_steps,
            f"leaves nothing of the {total} optimizer steps (rl.max_steps * n_mini) for lr_schedule={optimizer.lr_schedule} to fall",
            f"set it below {total}, or {PATH}.lr_schedule=constant",
        )


def _lora_violations(lora: LoraConfig) -> Iterator[Violation]:
    if lora.rank > 0:
        return
    for name, spec in LoraConfig.__dataclass_fields__.items():
        value = getattr(lora, name)
        if name != "rank" and value != default_of(spec):
            yield Violation(f"model.lora.{name}", value, "is never read while model.lora.rank=0", "set model.lora.rank, or drop it")
