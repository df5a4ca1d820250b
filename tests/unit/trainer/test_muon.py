"""Muon: the iteration against a plain reference, which parameters take which route, shards, and its place in the trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.checkpoint.tensors import optimizer_state, restore_optimizer, save, stage
from posttrain.config import OptimizerConfig
from posttrain.errors import ConfigError
from posttrain.trainer.core import Batching, Trainer
from posttrain.trainer.optim import build_optimizer, select_trainable
from posttrain.trainer.optim.muon import Halves, build_muon, newton_schulz, routes
from tests.builders import exact_policy, objective, ragged_groups, tiny_policy
from tests.unit.trainer.muon_ranks import Net, gradients, run_ranks

CONFIG = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1, muon_momentum=0.9, muon_rms_match=0.3, betas=[0.8, 0.95], eps=1e-6)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def reference_orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Straight from Keller Jordan's text, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.double() / matrix.double().norm()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + b * gram @ wide + c * gram @ gram @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def matrix_with(singular: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    left, _ = torch.linalg.qr(torch.randn(rows, len(singular), generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(cols, len(singular), generator=generator, dtype=torch.float64))
    return left @ torch.diag(singular.double()) @ right.T


@pytest.mark.parametrize(("rows", "cols"), [(32, 32), (48, 24), (24, 48)])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_singular_values_end_in_the_band_and_singular_vectors_stay(rows: int, cols: int, scale: float) -> None:
    singular = torch.logspace(-1.5, 0, 24) * scale
    matrix = matrix_with(singular, rows, cols)
    result = newton_schulz(matrix, steps=5)
    values = torch.linalg.svdvals(result)[:24]
    assert float(values.min()) > 0.6 and float(values.max()) < 1.25
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left[:, :24].T @ result @ right[:24].T
    assert float((turned - torch.diag(turned.diagonal())).abs().max()) < 1e-9


def test_the_iteration_is_the_reference_and_stacks_are_matrices_side_by_side() -> None:
    torch.manual_seed(0)
    stack = torch.randn(3, 20, 12)
    result = newton_schulz(stack, steps=4)
    for one, expected in zip(result, stack, strict=True):
        assert torch.allclose(one.double(), reference_orthogonal(expected, 4), atol=2e-5)
    assert torch.equal(newton_schulz(torch.zeros(4, 3), steps=5), torch.zeros(4, 3))


def test_five_updates_are_those_of_a_float64_reference() -> None:
    """Momentum, Nesterov, scale and decay of the matrices, and torch's own AdamW on the rest."""
    net = Net()
    optimizer = build_muon(CONFIG, net)
    expected = {name: parameter.detach().double() for name, parameter in net.named_parameters()}
    buffers = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    twin = copy.deepcopy(net)
    others = [parameter for name, parameter in twin.named_parameters() if name not in routes(twin).matrices]
    adamw = torch.optim.AdamW(others, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(5):
        gradients(net, step)
        gradients(twin, step)
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            buffers[name] = 0.9 * buffers[name] + parameter.grad.double()
            direction = parameter.grad.double() + 0.9 * buffers[name]
            expected[name] *= 1 - 0.02 * 0.1
            expected[name] -= 0.02 * updates(name, direction)
        optimizer.step()
        adamw.step()
    plain = dict(twin.named_parameters())
    for name, parameter in net.named_parameters():
        target = expected[name] if name in routes(net).matrices else plain[name].double()
        assert torch.allclose(parameter.double(), target, atol=2e-6), name


def updates(name: str, direction: torch.Tensor) -> torch.Tensor:
    """muon_rms_match * sqrt(max(rows, cols)) * orthogonal factor, matrix by matrix."""

    def one(matrix: torch.Tensor) -> torch.Tensor:
        return 0.3 * sqrt(max(matrix.shape)) * reference_orthogonal(matrix, 5)

    if direction.ndim < 2:
        return torch.zeros_like(direction)
    if direction.ndim == 2:
        return one(direction)
    if name.endswith("gate_up_proj"):
        return torch.stack([torch.cat([one(half) for half in matrix.chunk(2, 0)]) for matrix in direction])
    return torch.stack([one(matrix) for matrix in direction])


def llama() -> torch.nn.Module:
    return tiny_policy().module


def qwen() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SIZES, intermediate_size=48, tie_word_embeddings=False))


def phi() -> torch.nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SIZES, intermediate_size=48, pad_token_id=None))


def qwen_experts() -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24))


def gpt_oss_experts() -> torch.nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {**SIZES, "pad_token_id": None}
    return GptOssForCausalLM(GptOssConfig(**sizes, head_dim=16, num_local_experts=4, num_experts_per_tok=2, intermediate_size=24))


ATTENTION = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


@pytest.mark.parametrize(
    ("build", "endings", "halves"),
    [
        (llama, (*ATTENTION, *MLP), Halves.NONE),
        (qwen, (*ATTENTION, *MLP), Halves.NONE),
        (phi, ("o_proj.weight", "down_proj.weight"), Halves.NONE),
        (qwen_experts, (*ATTENTION, "experts.gate_up_proj", "experts.down_proj"), Halves.ROWS),
        (gpt_oss_experts, (*ATTENTION, "experts.gate_up_proj", "experts.down_proj"), Halves.ALTERNATING_COLS),
    ],
)
def test_hidden_matrices_and_declared_stacks_take_muon(
    build: Callable[[], torch.nn.Module], endings: tuple[str, ...], halves: Halves
) -> None:
    """Not embeddings, heads (tied in the Llama), routers, norms, biases, or the fused projections of Phi."""
    module = build()
    found = routes(module).matrices
    assert set(found) == {name for name, _ in module.named_parameters() if name.endswith(endings)}
    assert {kind for name, kind in found.items() if name.endswith("gate_up_proj")} <= {halves}
    assert {kind for name, kind in found.items() if not name.endswith("gate_up_proj")} == {Halves.NONE}


def test_gpt2_has_no_matrix_for_muon_and_is_refused() -> None:
    """Its hidden layers are transposed convolutions, its head is tied to the embedding."""
    module = exact_policy().module.float()
    assert routes(module).matrices == {}
    with pytest.raises(ConfigError, match=r"none of the \d+ trained parameters is one"):
        build_muon(OptimizerConfig(name="muon"), module)


def test_halves_of_every_layout_are_gate_and_up() -> None:
    gate, up = torch.full((2, 3, 4), 1.0), torch.full((2, 3, 4), 2.0)
    layouts = {
        Halves.ROWS: torch.cat([gate, up], 1),
        Halves.COLS: torch.cat([gate, up], 2),
        Halves.ALTERNATING_COLS: torch.stack([gate, up], 3).flatten(2),
    }
    for halves, fused in layouts.items():
        first, second = halves.split(fused)
        assert torch.equal(first, gate) and torch.equal(second, up)


def test_low_precision_storage_is_refused() -> None:
    module = tiny_policy(dtype=torch.bfloat16).module
    with pytest.raises(ConfigError, match="stored in float32"):
        build_muon(OptimizerConfig(name="muon"), module)


def test_train_keys_leave_the_others_alone() -> None:
    policy = tiny_policy()
    before = {name: parameter.detach().clone() for name, parameter in policy.module.named_parameters()}
    config = OptimizerConfig(name="muon", lr=1e-2, train_keys=["q_proj", "norm"])
    trainer = Trainer(config, policy=policy, objective=objective(batch_per_replica=16), batching=Batching(16, 16))
    assert trainer.train_step(ragged_groups(policy)).rejection is None
    moved = {name for name, parameter in policy.module.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if "q_proj" in name or "norm" in name}


def test_state_goes_through_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    straight, resumed = Net(), Net()
    one = build_muon(CONFIG, straight)
    for step in range(2):
        gradients(straight, step)
        one.step()
    one.zero_grad()
    save(stage(optimizer_state(straight, one)), tmp_path)
    resumed.load_state_dict(straight.state_dict())
    two = build_muon(CONFIG, resumed)
    restore_optimizer(resumed, two, tmp_path)
    for step in range(2, 4):
        for net, optimizer in ((straight, one), (resumed, two)):
            gradients(net, step)
            optimizer.step()
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_every_optimizer_moves_the_same_parameters() -> None:
    for name in ("adamw", "muon"):
        net = Net()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        select_trainable(net, [])
        optimizer = build_optimizer(OptimizerConfig(name=name, lr=1e-2), net)
        gradients(net, 0)
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one(tmp_path: Path) -> None:
    """Dense matrices are gathered, expert stacks are not; the gradients are equal, so nothing but rounding may differ."""
    net = Net()
    optimizer = build_muon(CONFIG, net)
    for step in range(3):
        gradients(net, step)
        optimizer.step()
    shown = run_ranks(tmp_path, CONFIG, steps=3)
    assert shown["gathered"] == 2 * 3  # two dense matrices in each of three steps, never a stack
    for name, parameter in net.named_parameters():
        assert float((shown["parameters"][name] - parameter.detach()).abs().max()) <= 1e-6, name
    assert set(shown["state"]) == set(optimizer_state(net, optimizer))
