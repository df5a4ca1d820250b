"""The part of `rl.*` that every algorithm shares: lifecycle, optimizer, precision, checkpoints, held-out validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from posttrain.config.base import bounded, choice, pending
from posttrain.config.data import PromptEnvConfig
from posttrain.errors import Violation

COMPONENTS = ("model", "optimizer", "training_state")


@dataclass
class OptimizerConfig:
    """The optimizer and what happens to a gradient before it is applied."""

    name: str = choice("adamw", "fusedadam", "muon", pending=True)
    lr: float = bounded(1e-6, ge=0.0)
    """Learning rate; 0 computes everything and moves nothing."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of the first and second moment, each in [0, 1)."""
    eps: float = bounded(1e-8, gt=0.0)
    """Adam's denominator floor. Once sqrt(v) falls below it the update is (lr / eps) * m: its size follows lr / eps, not lr."""
    weight_decay: float = bounded(0.0, ge=0.0)
    """Decoupled decay, applied to every trained parameter."""
    grad_clip_norm: float = bounded(0.0, ge=0.0)
    """Clip the global gradient norm to this before an applied update; 0 does not clip."""
    force_finite_grads: bool = True
    """Reject the whole window when a gradient is not finite. A non-finite loss always rejects it."""
    train_keys: list[str] = field(default_factory=list[str])
    """Train only parameters whose name contains one of these; empty trains all. Nothing matching is an error."""
    lr_schedule: str = choice("constant", "linear", "cosine", pending=True)
    warmup_steps: int = pending(0)
    """Applied updates over which the learning rate rises linearly."""
    muon_momentum: float = pending(0.95)
    muon_ns_steps: int = pending(5)
    muon_rms_match: float = pending(0.2)

    def violations(self, path: str) -> Iterator[Violation]:
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield Violation(f"{path}.betas", list(self.betas), "must be two numbers in [0, 1)", "e.g. [0.9, 0.999]")


@dataclass
class RefConfig:
    """A frozen reference policy."""

    build_ref: bool = False
    """Build a second, frozen copy of the policy from the same base weights, whatever the policy is resumed from."""
    update_every: int = bounded(0, ge=0)
    """0 keeps the reference frozen."""


@dataclass
class CheckpointStoreConfig:
    """The primary store of resumable checkpoints."""

    kind: str = choice("local", "object", pending=True)
    url: str = pending("")
    """s3://bucket/prefix of the object store."""


@dataclass
class UploadConfig:
    """Background archive of a local primary store."""

    url: str = pending("")
    """s3://bucket/prefix; empty archives nothing."""


@dataclass
class ValidationConfig:
    """Held-out evaluation during training, counted in model steps."""

    every: int = bounded(0, ge=0)
    """Evaluate whenever this many more model steps are committed; 0 evaluates only at the start and the end."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    num_prompts: int = bounded(0, ge=0)
    """Held-out prompts, the first ones of the source; 0 switches validation off."""
    samples_per_prompt: int = bounded(1, ge=1)
    temperature: float = bounded(0.0, ge=0.0)
    """0 is greedy."""
    top_p: float = bounded(1.0, gt=0.0, le=1.0)
    top_k: int = bounded(0, ge=0)
    repetition_penalty: float = bounded(1.0, gt=0.0)
    max_tokens: int | None = bounded(None, ge=1)
    """Completion budget; null takes `rollout.max_tokens`."""
    seed: int = 0
    """Orders a generated held-out source and seeds sampling above temperature 0; the same in every evaluation of a run."""
    reward: str = ""
    """Provider key; empty takes `rl.reward`."""
    data: PromptEnvConfig = field(default_factory=lambda: PromptEnvConfig(split="held_out"))
    save_checkpoint: bool = pending(False)
    checkpoint_components: list[str] = pending(lambda: list(COMPONENTS))


@dataclass
class RunConfig:
    """What every training entry shares."""

    objective_builder: str = MISSING
    """Dotted path of a module-level `(rl, model_context) -> Objective`; every algorithm yaml names its own."""
    max_steps: int = bounded(1000, ge=1)
    """Collected batches. Each commits `n_mini` optimizer steps; validation and checkpoint names count those."""
    seed: int = 0
    """Run seed: process RNGs and the order of the prompt source."""
    deterministic: bool = pending(False)
    """Bit-reproducible kernels at the price of throughput."""
    grad_accum: int = 1
    """Optimizer-step cadence; GRPO refuses anything but 1 (use `micro_batch_per_replica`)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    data: PromptEnvConfig = field(default_factory=PromptEnvConfig)
    save_every: int = pending(0)
    """Collected batches between checkpoints; 0 saves none on the way."""
    resume: str = choice("auto", "off", pending=True)
    run_ts: str = pending("")
    checkpoint_format: str = choice("dcp", pending=True)
    checkpoint_components: list[str] = pending(lambda: list(COMPONENTS))
    checkpoint_store: CheckpointStoreConfig = field(default_factory=CheckpointStoreConfig)
    save_async: bool = pending(False)
    keep_optim_last: int | None = pending(None)
    keep_model_last: int = pending(0)
    upload: UploadConfig = field(default_factory=UploadConfig)
    init_from: str = pending("")
    init_keys_to_skip_loading: list[str] = pending(list)


@dataclass
class HFRunConfig(RunConfig):
    """The precision block of policies that transformers or a native builder made."""

    param_dtype: str = choice("", "float32", "bfloat16", "float16")
    """Compute dtype; empty inherits `model.dtype`."""
    master_dtype: str = choice("", "float32", "bfloat16", "float16")
    """Storage dtype of parameters and optimizer moments; empty inherits the resolved `param_dtype`."""
    reduce_dtype: str = choice("", "float32", "bfloat16", "float16", pending=True)
    """Gradient all-reduce dtype; empty inherits `model.fsdp_reduce_dtype`."""
    transfer_dtype: str = choice("", "float32", "bfloat16", "float16")
    """Dtype of weights on their way to the engine; empty inherits the resolved `master_dtype`."""
    mixed_precision_mode: str = choice("", "fsdp", "autocast")
    """How `param_dtype` reaches the forward. `fsdp` (the meaning of empty) casts sharded parameters; `autocast` keeps them in
    `master_dtype` and casts per operation."""


@dataclass(frozen=True)
class Precision:
    """The precision block with its inheritance resolved."""

    param: str
    master: str
    transfer: str
    autocast: bool


def resolve_precision(rl: HFRunConfig, model_dtype: str) -> Precision:
    """`model.dtype` -> param -> master -> transfer, each overridable."""
    param = rl.param_dtype or model_dtype
    master = rl.master_dtype or param
    return Precision(param, master, rl.transfer_dtype or master, rl.mixed_precision_mode == "autocast")


def precision_violations(rl: HFRunConfig, model_dtype: str, sharded: bool) -> Iterator[Violation]:
    """Refusals of the precision block; `sharded` says whether an FSDP wrap will exist."""
    precision = resolve_precision(rl, model_dtype)
    if precision.autocast and precision.param == "float16":
        yield Violation(
            "rl.param_dtype", "float16", "cannot train under mixed_precision_mode=autocast: there is no gradient scaler", "use bfloat16"
        )
    if not precision.autocast and not sharded and precision.param != precision.master:
        key = "rl.master_dtype" if rl.master_dtype else "rl.param_dtype"
        yield Violation(
            key,
            getattr(rl, key.removeprefix("rl.")),
            f"mixed_precision_mode=fsdp computes in param_dtype={precision.param} from master_dtype={precision.master} only through an "
            "FSDP wrap, and one rank has none",
            "set rl.mixed_precision_mode=autocast or make both dtypes equal",
        )


def resolved_dtype(value: Any) -> Any:
    """The torch dtype of one of the dtype names used in the config (torch is imported here only)."""
    import torch

    return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[value]
