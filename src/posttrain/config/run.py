"""The part of `rl.*` that every algorithm shares: lifecycle, optimizer, precision, checkpoints, held-out validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from posttrain.config.base import bounded, choice
from posttrain.config.data import PromptEnvConfig
from posttrain.errors import Violation

COMPONENTS = ("model", "optimizer", "training_state")


@dataclass
class OptimizerConfig:
    """The optimizer and what happens to a gradient before it is applied."""

    name: str = choice("adamw", "fusedadam", "muon")
    """`adamw` keeps its moments in `master_dtype`; `fusedadam` is Transformer Engine's AdamW with float32 master weights and
    moments of its own, for weights stored in bfloat16 on a GPU; `muon` orthogonalises the update of every hidden matrix and gives
    everything else to AdamW."""
    lr: float = bounded(1e-6, ge=0.0)
    """Learning rate, the peak of a schedule; 0 computes everything and moves nothing."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of Adam's first and second moment, each in [0, 1); with `muon`, of the parameters that AdamW takes."""
    eps: float = bounded(1e-8, gt=0.0)
    """Adam's denominator floor. Once sqrt(v) falls below it the update is (lr / eps) * m: its size follows lr / eps, not lr. With
    `muon`, of the parameters that AdamW takes: an orthogonalised update has no floor."""
    weight_decay: float = bounded(0.0, ge=0.0)
    """Decoupled decay p <- p - lr * weight_decay * p, applied to every trained parameter by every optimizer."""
    grad_clip_norm: float = bounded(0.0, ge=0.0)
    """Clip the global gradient norm to this before an applied update; 0 does not clip."""
    force_finite_grads: bool = True
    """Reject the whole window when a gradient is not finite. A non-finite loss always rejects it."""
    train_keys: list[str] = field(default_factory=list[str])
    """Train only parameters whose name contains one of these; empty trains all. Nothing matching is an error. With LoRA the
    parameters are the adapters'."""
    lr_schedule: str = choice("constant", "linear", "cosine")
    """How the rate goes on after the warm-up: it stays, or falls towards 0, which it would reach one update after the last of
    `max_steps * n_mini`. It advances on applied updates only."""
    warmup_steps: int = bounded(0, ge=0)
    """Applied updates over which the rate rises linearly, from lr / warmup_steps to lr; 0 starts at lr."""
    muon_momentum: float = bounded(0.95, ge=0.0, lt=1.0)
    """b of Muon's buffer m <- b * m + g, whose direction is g + b * m (Nesterov)."""
    muon_ns_steps: int = bounded(5, ge=1)
    """Newton-Schulz iterations of one orthogonalisation."""
    muon_rms_match: float = bounded(0.2, gt=0.0)
    """Muon's step is lr * muon_rms_match * sqrt(max(rows, cols)) times the orthogonalised direction: at 0.2 its entries have about
    the size of AdamW's (arXiv 2502.16982). A start for tuning lr, no equivalence."""

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

    kind: str = choice("local", "object")
    """`local` saves into the run directory, `object` into an object store behind the S3 protocol. Credentials come from the
    environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or a profile), never from here."""
    url: str = ""
    """s3://bucket/prefix of the object store; a run saves below it under its place in job.output_root, group/name."""
    endpoint_url: str = ""
    """Address of the server; empty takes AWS_ENDPOINT_URL, else Amazon's."""


@dataclass
class UploadConfig:
    """Background archive of a local primary store."""

    url: str = ""
    """s3://bucket/prefix; empty archives nothing. Saves are copied in the background, laid out as `checkpoint_store` does."""
    endpoint_url: str = ""
    """Address of the server; empty takes AWS_ENDPOINT_URL, else Amazon's."""


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
    save_checkpoint: bool = False
    """Save after every evaluation."""
    checkpoint_components: list[str] = field(default_factory=lambda: list(COMPONENTS))
    """What such a save holds; see `rl.checkpoint_components`."""


@dataclass
class RunConfig:
    """What every training entry shares."""

    objective_builder: str = MISSING
    """Dotted path of a module-level `(rl, model_context) -> Objective`; every algorithm yaml names its own."""
    max_steps: int = bounded(1000, ge=1)
    """Collected batches. Each commits `n_mini` optimizer steps; validation and checkpoint names count those."""
    seed: int = 0
    """Run seed: process RNGs and the order of the prompt source."""
    deterministic: bool = False
    """Bit-reproducible kernels at the price of throughput. On a GPU the launch environment must hold CUBLAS_WORKSPACE_CONFIG and
    PYTHONHASHSEED: both are read before the program could set them."""
    grad_accum: int = 1
    """Optimizer-step cadence; GRPO refuses anything but 1 (use `micro_batch_per_replica`)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    data: PromptEnvConfig = field(default_factory=PromptEnvConfig)
    save_every: int = bounded(0, ge=0)
    """Collected batches between checkpoints, and one at the end; 0 saves only when the run is asked to end early."""
    resume: str = "auto"
    """`auto` continues from the latest checkpoint of the same job.name where there is one, `off` starts again (the earlier run is
    moved aside), and the name of a checkpoint (iter_000000120) continues from that one."""
    run_ts: str = ""
    """Name of one attempt below job.name, for several runs of the same job side by side; empty needs none."""
    checkpoint_format: str = choice("dcp")
    """torch's distributed checkpoint: a save of n ranks loads on any other number."""
    checkpoint_components: list[str] = field(default_factory=lambda: list(COMPONENTS))
    """What regular and final saves hold. Only all three can be resumed from; any other selection goes to checkpoint_artifacts/."""
    checkpoint_store: CheckpointStoreConfig = field(default_factory=CheckpointStoreConfig)
    save_async: bool = False
    """Copy the state and write it in the background while training goes on."""
    save_before_s: float = bounded(0.0, ge=0.0)
    """Wall-clock seconds after which the run must have ended: it saves and exits in time (exit code 75). 0 is no limit."""
    keep_optim_last: int | None = bounded(None, ge=0)
    """Newest checkpoints that keep their optimizer and training state; older ones keep the model alone. 0 keeps all; null is 1 with
    a local store and 0 with an object store, from which nothing is removed."""
    keep_model_last: int = bounded(0, ge=0)
    """Newest checkpoints that are kept at all; 0 keeps all."""
    upload: UploadConfig = field(default_factory=UploadConfig)
    init_from: str = ""
    """Start from these weights: a checkpoint directory (.../iter_000000120) or a run directory, whose latest one is taken."""
    init_keys_to_skip_loading: list[str] = field(default_factory=list[str])
    """Tensor names that only the source of `init_from` has and that may be left out; any other one is an error."""


@dataclass
class HFRunConfig(RunConfig):
    """The precision block of policies that transformers or a native builder made."""

    param_dtype: str = choice("", "float32", "bfloat16", "float16")
    """Compute dtype; empty inherits `model.dtype`."""
    master_dtype: str = choice("", "float32", "bfloat16", "float16")
    """Storage dtype of parameters and optimizer moments; empty inherits the resolved `param_dtype`."""
    reduce_dtype: str = choice("", "float32", "bfloat16", "float16")
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
    reduce: str = "float32"


def resolve_precision(rl: HFRunConfig, model_dtype: str, fsdp_reduce_dtype: str = "float32") -> Precision:
    """`model.dtype` -> param -> master -> transfer, and `model.fsdp_reduce_dtype` -> reduce, each overridable."""
    param = rl.param_dtype or model_dtype
    master = rl.master_dtype or param
    autocast = rl.mixed_precision_mode == "autocast"
    return Precision(param, master, rl.transfer_dtype or master, autocast, rl.reduce_dtype or fsdp_reduce_dtype)


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
    if rl.reduce_dtype and not sharded:
        yield Violation(
            "rl.reduce_dtype", rl.reduce_dtype, "is never read: one rank reduces no gradients", "drop it, or set grid.ranks above 1"
        )


def resolved_dtype(value: Any) -> Any:
    """The torch dtype of one of the dtype names used in the config (torch is imported here only)."""
    import torch

    return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[value]
