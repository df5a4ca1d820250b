"""`rl.optimizer.name=muon`: momentum whose direction is orthogonalised by Newton-Schulz (Keller Jordan 2024; scaling by Moonlight,
arXiv 2502.16982), for the matrices of hidden layers; AdamW for everything else. One optimizer holds both routes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import sqrt
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from posttrain.config.run import OptimizerConfig
from posttrain.errors import ConfigError, Violation

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: a steep slope at 0 at the price of singular values that end between about 0.7 and 1.2, not at 1."""

NO_HIDDEN_MATRIX = re.compile(
    r"^(gate|router|.*_router|router_.*|shared_expert_gate"  # routers
    r"|.*qkv.*|query_key_value|c_attn|kv_proj|kv_[ab]_proj.*|gate_up.*|.*gate_and_up.*|w13"  # several matrices in one
    r"|in_proj.*|x_proj|input_linear|to_kv"
    r"|lm_head|embed_out|.*_head|score|classifier)$",
    re.IGNORECASE,
)
"""Linear layers, by a part of their path, that AdamW takes: orthogonalising a fusion would mix the matrices it is made of."""


class Halves(Enum):
    """How a stack of fused expert projections [E, rows, cols] holds gate and up."""

    NONE = "one matrix an expert"
    ROWS = "gate above up"
    COLS = "gate beside up"
    ALTERNATING_COLS = "gate and up in turn, column by column"

    def split(self, stack: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the matrices to orthogonalise separately."""
        if self is Halves.ROWS:
            return stack.chunk(2, -2)
        if self is Halves.COLS:
            return stack.chunk(2, -1)
        if self is Halves.ALTERNATING_COLS:
            return stack[..., ::2], stack[..., 1::2]
        return (stack,)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which parameters Muon takes, by name; AdamW takes the others."""

    matrices: dict[str, Halves]


def routes(module: torch.nn.Module) -> Routes:
    """Hidden `nn.Linear` weights, and the stacks of expert modules that declare their layout.

    A module declares it as transformers' `use_experts_implementation` does: attributes `has_gate`, `is_concatenated` and
    `is_transposed`, with parameters `gate_up_proj` or `up_proj`, and `down_proj`, of three dimensions.
    """
    outside = {id(child.weight) for child in module.modules() if isinstance(child, torch.nn.Embedding)}  # tied heads too
    get_head: Callable[[], Any] | None = getattr(module, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if head is not None:
        outside.add(id(head.weight))
    found: dict[str, Halves] = {}
    for path, child in module.named_modules():
        if isinstance(child, torch.nn.Linear):
            named = any(NO_HIDDEN_MATRIX.match(part) for part in path.split("."))
            if child.weight.ndim == 2 and id(child.weight) not in outside and not named:
                found[f"{path}.weight" if path else "weight"] = Halves.NONE
        else:
            found |= {f"{path}.{name}" if path else name: halves for name, halves in _declared_stacks(child)}
    return Routes(found)


def _declared_stacks(child: torch.nn.Module) -> Iterator[tuple[str, Halves]]:
    declared = vars(child)
    if not {"has_gate", "is_concatenated", "is_transposed"} <= declared.keys():
        return
    fused = Halves.NONE
    if declared["has_gate"]:
        fused = Halves.COLS if declared["is_transposed"] else Halves.ROWS
        if not declared["is_concatenated"]:
            if not declared["is_transposed"]:
                return  # alternating rows: no model has them, and a guess would mix gate with up
            fused = Halves.ALTERNATING_COLS
    for name, halves in (("gate_up_proj", fused), ("up_proj", Halves.NONE), ("down_proj", Halves.NONE)):
        parameter = child._parameters.get(name)
        if parameter is not None and parameter.ndim == 3:
            yield name, halves


def newton_schulz(matrices: torch.Tensor, *, steps: int) -> torch.Tensor:
    """The orthogonal factor of every matrix, approximately: singular values go to about 1, singular vectors stay.

    Args:
        matrices: [..., rows, cols], of any scale; a zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / norm.clamp(min=torch.finfo(torch.float32).tiny)).to(matrices.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon and its auxiliary AdamW as one optimizer, whose state is keyed like any other's.

    A sharded matrix is gathered (in bfloat16 on a GPU) and orthogonalised whole on every rank. A stack sharded along its expert
    axis consists of complete matrices and is orthogonalised where it is.
    """

    def __init__(
        self, matrices: Sequence[tuple[torch.nn.Parameter, Halves]], others: Sequence[torch.nn.Parameter], *, config: OptimizerConfig
    ):
        self._halves = {id(parameter): halves for parameter, halves in matrices}
        beta1, beta2 = config.betas
        muon = {"momentum": config.muon_momentum, "ns_steps": config.muon_ns_steps, "rms_match": config.muon_rms_match}
        adam = {"betas": (beta1, beta2), "eps": config.eps, "fused": True}
        groups: list[dict[str, Any]] = [{"params": [parameter for parameter, _ in matrices], **muon}, {"params": list(others), **adam}]
        super().__init__([group for group in groups if group["params"]], {"lr": config.lr, "weight_decay": config.weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if "ns_steps" in group:
                for parameter in parameters:
                    self._orthogonal_step(parameter, group)
            else:
                self._adam_step(parameters, group)
        return loss

    def _orthogonal_step(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        direction = gradient.add(momentum, alpha=group["momentum"])
        update = _over_shards(direction, lambda whole: self._update_of(whole, self._halves[id(parameter)], group))
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    @staticmethod
    def _update_of(direction: torch.Tensor, halves: Halves, group: dict[str, Any]) -> torch.Tensor:
        update = torch.empty_like(direction)
        for source, target in zip(halves.split(direction), halves.split(update), strict=True):
            scale = group["rms_match"] * sqrt(max(source.shape[-2:]))
            target.copy_(newton_schulz(source, steps=group["ns_steps"]) * scale)
        return update

    def _adam_step(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        if not parameters:
            return
        beta1, beta2 = group["betas"]
        adamw(
            list(parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def build_muon(config: OptimizerConfig, module: torch.nn.Module) -> Muon:
    """Muon over the trainable parameters of a module.

    Raises:
        ConfigError: none of them is a hidden matrix, or they are not stored in float32.
    """
    found = routes(module).matrices
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    matrices = [(parameter, found[name]) for name, parameter in trained if name in found]
    if not matrices:
        rule = f"orthogonalises hidden linear layers, and none of the {len(trained)} trained parameters is one"
        raise ConfigError([Violation("rl.optimizer.name", "muon", rule, "set rl.optimizer.name=adamw, or widen rl.optimizer.train_keys")])
    low = sorted({str(parameter.dtype) for _, parameter in trained if parameter.dtype in (torch.bfloat16, torch.float16)})
    if low:
        rule = f"needs parameters stored in float32, and these are {', '.join(low)}"
        raise ConfigError([Violation("rl.optimizer.name", "muon", rule, "set rl.master_dtype=float32")])
    return Muon(matrices, [parameter for name, parameter in trained if name not in found], config=config)


def _over_shards(direction: torch.Tensor, update_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`update_of` the whole direction, laid out like the direction."""
    dtype = torch.bfloat16 if direction.is_cuda else direction.dtype
    if not isinstance(direction, DTensor):
        return update_of(direction.to(dtype)).to(direction.dtype)
    mesh, placements = direction.device_mesh, direction.placements
    if direction.ndim == 3 and all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
        local = update_of(direction.to_local().to(dtype)).to(direction.dtype)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=direction.shape, stride=direction.stride())
    gathered = cast("DTensor", direction.to(dtype)).full_tensor()
    whole = update_of(gathered).to(direction.dtype)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
