"""LoRA: the base stays what it was, only adapters train and are saved, and what an engine gets is what the trainer computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.checkpoint.initial import is_adapter_save, load_initial_weights
from posttrain.checkpoint.manifest import Manifest, records_of
from posttrain.checkpoint.tensors import model_state, optimizer_state, restore_model, save, stage
from posttrain.config import HFModelConfig, OptimizerConfig
from posttrain.config.model import LoraConfig
from posttrain.errors import CheckpointError, ConfigError, ModelError
from posttrain.model.converter import hf_named_weights
from posttrain.model.lora import add_adapters, base_name, base_tensors, is_adapter, lora_of
from posttrain.model.policy import CausalPolicy
from posttrain.model.reference import refuse_live_dropout
from posttrain.trainer.core import Batching, Trainer
from posttrain.trainer.saved import TrainerState
from posttrain.weight_sync.digest import tensor_digest
from posttrain.weight_sync.shared import SharedSync
from tests.builders import engine, exact_policy, objective, ragged_groups, requests, tiny_policy

pytest.importorskip("peft")

LORA = LoraConfig(rank=3, alpha=6.0)
PROBE = list(range(5, 25))


def adapted(policy: CausalPolicy | None = None, lora: LoraConfig = LORA) -> CausalPolicy:
    policy = policy or tiny_policy()
    torch.manual_seed(0)
    add_adapters(policy.module, lora)
    return policy


def trained(policy: CausalPolicy, *, name: str = "adamw", steps: int = 2) -> Trainer:
    config = OptimizerConfig(name=name, lr=1e-2)
    trainer = Trainer(config, policy=policy, objective=objective(batch_per_replica=16), batching=Batching(16, 8))
    groups = ragged_groups(policy)
    for _ in range(steps):
        assert trainer.train_step(groups).rejection is None
    policy.module.eval()
    return trainer


def base_digests(policy: CausalPolicy) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in base_tensors(policy.module).items()}


def test_adapters_begin_as_the_identity() -> None:
    policy = tiny_policy()
    before = policy.score_prompt(PROBE)
    assert adapted(policy).score_prompt(PROBE) == before
    assert policy.check_packing(PROBE, tolerance=1e-3) < 1e-4 and policy.packs


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_moves_the_adapters_and_not_one_bit_of_the_base(name: str) -> None:
    policy = adapted()
    digests, before = base_digests(policy), policy.score_prompt(PROBE)
    adapters = {n: p.detach().clone() for n, p in policy.module.named_parameters() if is_adapter(n)}
    trainer = trained(policy, name=name)
    assert base_digests(policy) == digests
    assert policy.score_prompt(PROBE) != before
    now = dict(policy.module.named_parameters())
    assert all(not torch.equal(now[n], tensor) for n, tensor in adapters.items())
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(now[n]) for n in adapters}


def test_the_gradient_of_an_adapter_is_that_of_the_merged_weight() -> None:
    """dL/dB = scale dL/dW A^T, in float64 on a GPT-2, whose layers are transposed."""
    lora = LoraConfig(rank=2, alpha=5.0, target_modules=["attn.c_attn"])
    policy, plain = adapted(exact_policy(), lora), exact_policy()
    seen: dict[str, torch.Tensor] = {}
    groups = ragged_groups(plain)
    for one in (policy, plain):
        loss = objective(batch_per_replica=16, logprob_dtype="float64")
        trainer = Trainer(OptimizerConfig(lr=0.0), policy=one, objective=loss, batching=Batching(16, 16))
        gradients: dict[str, torch.Tensor] = {}
        names = {id(parameter): name for name, parameter in one.module.named_parameters()}
        trainer.optimizer.register_step_pre_hook(
            lambda optimizer, *_, into=gradients, of=names: into.update(
                {of[id(p)]: p.grad.clone() for group in optimizer.param_groups for p in group["params"]}
            )
        )
        trainer.train_step(groups)
        seen |= gradients
    layer = "transformer.h.0.attn.c_attn"
    a = dict(policy.module.named_parameters())[f"{layer}.lora_A.default.weight"].detach()
    expected = 5.0 / 2 * seen[f"{layer}.weight"].T @ a.T
    assert float(expected.norm()) > 1e-4
    assert torch.allclose(seen[f"{layer}.lora_B.default.weight"], expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("build", [tiny_policy, exact_policy])
def test_merged_weights_under_base_names_compute_what_the_adapters_compute(build: object) -> None:
    assert callable(build)
    policy = adapted(build())
    trained(policy)
    plain: CausalPolicy = build()
    digests = base_digests(policy)
    merged = dict(hf_named_weights(policy.module))
    expected = {name: tensor.clone() for name, tensor in hf_named_weights(plain.module)}
    assert {name: tensor.shape for name, tensor in merged.items()} == {name: tensor.shape for name, tensor in expected.items()}
    plain.module.load_state_dict(merged, strict=False)
    exact = next(plain.module.parameters()).dtype == torch.float64
    gap = max(abs(a - b) for a, b in zip(plain.score_prompt(PROBE), policy.score_prompt(PROBE), strict=True))
    assert gap < (1e-6 if exact else 1e-4)
    assert base_digests(policy) == digests, "merging must not touch the base"
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, expected[name])}
    assert changed == {base_name(name) for name, _ in policy.module.named_parameters() if name.endswith("base_layer.weight")}


def test_the_sampler_runs_on_the_adapters_themselves() -> None:
    policy = adapted()
    sampler = engine(policy)
    wanted = requests(policy, prompts=2, group_size=4, max_tokens=6)
    before = sampler.generate(wanted)
    trained(policy, steps=4)
    sync = SharedSync(sampler, policy=policy.module, sampler=sampler.policy.module)
    assert sync.publish(4, verify=True).metrics["sync/verified_gib_frac"].value == 1
    after = sampler.generate(wanted)
    assert [c.token_ids for g in after for c in g.completions] != [c.token_ids for g in before for c in g.completions]


def test_a_checkpoint_holds_adapters_only_and_restoring_twice_adapts_once(tmp_path: Path) -> None:
    policy = adapted()
    trainer = trained(policy)
    expected = policy.score_prompt(PROBE)
    state = model_state(policy.module)
    assert state and all(is_adapter(name) for name in state)
    moments = {name.removeprefix("state.").rpartition(".")[0] for name in optimizer_state(policy.module, trainer.optimizer)}
    assert {name for name in moments if "lora" not in name} == set()
    tensors = TrainerState(policy.module, trainer.optimizer)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert tensors.state_bytes(["model"]) == size and tensors.state_bytes(["optimizer"]) == 2 * size
    save(stage(state), tmp_path / "model")
    again = tiny_policy()
    torch.manual_seed(99)
    add_adapters(again.module, LORA)
    for _ in range(2):
        restore_model(again.module, tmp_path / "model")
        assert again.score_prompt(PROBE) == expected
    with pytest.raises(ModelError, match="has adapters already"):
        add_adapters(again.module, LORA)
    assert again.score_prompt(PROBE) == expected


def saved_run(folder: Path, policy: CausalPolicy) -> str:
    """A checkpoint as `rl.init_from` reads it."""
    save(stage(model_state(policy.module)), folder / "model")
    Manifest(1, 1, ("model",), "regular", "provenance.1.json", records_of(folder)).write(folder)
    return str(folder)


def test_a_run_may_start_from_full_weights_or_from_adapters(tmp_path: Path) -> None:
    full = tiny_policy(seed=5)
    source = saved_run(tmp_path / "full", full)
    policy = adapted()
    load_initial_weights(policy.module, source, skip=[])
    assert not is_adapter_save(source) and policy.score_prompt(PROBE) == full.score_prompt(PROBE)
    trained(policy)
    adapters = saved_run(tmp_path / "adapters", policy)
    again = adapted(tiny_policy(seed=5))
    load_initial_weights(again.module, adapters, skip=[])
    assert is_adapter_save(adapters) and again.score_prompt(PROBE) == policy.score_prompt(PROBE)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_initial_weights(tiny_policy().module, adapters, skip=[])
    with pytest.raises(CheckpointError, match="does not fit"):
        load_initial_weights(adapted(lora=LoraConfig(rank=2)).module, adapters, skip=[])


def test_dropout_is_live_in_training_only() -> None:
    policy = adapted(lora=LoraConfig(rank=3, dropout=0.5))
    trained(policy)
    assert policy.score_prompt(PROBE) == policy.score_prompt(PROBE)
    with pytest.raises(ConfigError, match="live dropout"):
        refuse_live_dropout(policy.module)


def test_targets_are_ends_of_names() -> None:
    policy = adapted(lora=LoraConfig(rank=2, target_modules=["q_proj", "mlp.down_proj"]))
    layers = {base_name(name).partition(".lora_")[0] for name, _ in policy.module.named_parameters() if is_adapter(name)}
    assert layers and all(name.endswith(("self_attn.q_proj", "mlp.down_proj")) for name in layers)
    everything = adapted()
    named = {name.partition(".lora_")[0] for name, _ in everything.module.named_parameters() if is_adapter(name)}
    assert len(named) == 7 * everything.module.config.num_hidden_layers


@pytest.mark.parametrize("target", ["proj_q", "lm_head", "embed_tokens"])
def test_a_target_that_is_no_hidden_linear_layer_is_refused(target: str) -> None:
    policy = tiny_policy(tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=rf"model\.lora\.target_modules='{target}'.*this model has"):
        add_adapters(policy.module, LoraConfig(rank=2, target_modules=["q_proj", target]))


def test_train_keys_select_among_adapters() -> None:
    policy = adapted()
    config = OptimizerConfig(lr=1e-2, train_keys=["lora_B"])
    trainer = Trainer(config, policy=policy, objective=objective(batch_per_replica=16), batching=Batching(16, 16))
    names = {name for name, parameter in policy.module.named_parameters() if parameter.requires_grad}
    assert names and all(".lora_B." in name for name in names)
    assert len(trainer.optimizer.param_groups[0]["params"]) == len(names)
    with pytest.raises(ConfigError, match="matches none of the adapters'"):
        Trainer(OptimizerConfig(train_keys=["norm"]), policy=policy, objective=objective(), batching=Batching(16, 16))


def test_rank_zero_asks_for_no_adapters() -> None:
    assert lora_of(HFModelConfig(name_or_path="x")) is None
    assert lora_of(HFModelConfig(name_or_path="x", lora=LORA)) is LORA
