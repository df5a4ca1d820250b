"""The frozen reference of the KL penalty on the tiny model, and the identity of the directory it may come from."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.algorithm.grpo import build_objective
from posttrain.algorithm.primitives.objective import ModelContext, Objective
from posttrain.config import GRPOConfig, HFModelConfig, NativePolicyBuildSpec, OptimizerConfig
from posttrain.config.grpo import GRPORefConfig
from posttrain.data.packer import PolicyBatch
from posttrain.errors import ConfigError, ModelError
from posttrain.model.native import tiny
from posttrain.model.policy import CausalPolicy
from posttrain.model.reference import FrozenReference, build_reference, refuse_live_dropout
from posttrain.records import TrainGroup
from posttrain.runtime.artifact_identity import artifact_identity, directory_problem
from posttrain.trainer.core import Batching, Trainer
from tests.builders import FP32, engine, exact_policy, ragged_groups, requests, tiny_policy, train_groups

TINY = NativePolicyBuildSpec(builder="posttrain.model.native.tiny.build", model_id="tiny")


class Counted(FrozenReference):
    """Remembers the batches it scored."""

    def __init__(self) -> None:
        super().__init__(temperature=1.0, dtype="float32")
        self.batches: list[PolicyBatch] = []

    def __call__(self, batch: PolicyBatch) -> torch.Tensor:
        self.batches.append(batch)
        return super().__call__(batch)


def reference(model_dir: Path | None = None, *, config: HFModelConfig | NativePolicyBuildSpec = TINY) -> tuple[Counted, CausalPolicy]:
    twin = CausalPolicy(build_reference(config, None if model_dir is None else str(model_dir), precision=FP32), precision=FP32)
    twin.module.train()  # attaching must end it
    made = Counted()
    made.attach(twin)
    return made, twin


def rl_of(*, mini_batch: int = 0, **knobs: object) -> GRPOConfig:
    return GRPOConfig(
        objective_builder="unused",
        batch_per_replica=16,
        mini_batch_per_replica=mini_batch,
        certified_deterministic_forward=mini_batch > 0,
        kl_beta=0.1,
        ref=GRPORefConfig(build_ref=True),
        **knobs,  # type: ignore[arg-type]
    )


def objective(scorer: Counted, rl: GRPOConfig) -> Objective:
    return build_objective(rl, ModelContext("tiny", 6, scorer))


def trainer(policy: CausalPolicy, scorer: Counted, *, rl: GRPOConfig | None = None, lr: float = 1e-2, micro_batch: int = 4) -> Trainer:
    rl = rl or rl_of()
    return Trainer(OptimizerConfig(lr=lr), policy=policy, objective=objective(scorer, rl), batching=Batching(rl.mini_batch, micro_batch))


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def saved(folder: Path, **sizes: object) -> Path:
    """A tiny model of other weights on disk."""
    built = tiny.build(dict(sizes), dtype="float32")
    built.module.save_pretrained(folder)  # type: ignore[operator]
    built.tokenizer.save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("pack", [True, False])
def test_the_divergence_is_exactly_zero_before_the_first_step_and_grows_after_it(pack: bool) -> None:
    policy = tiny_policy(pack=pack)
    groups = ragged_groups(policy)
    twin = tiny_policy(pack=pack)
    scorer = Counted()
    scorer.attach(twin)
    run = trainer(policy, scorer)
    first = run.train_step(groups).metrics
    assert first["train/kl_mean"].value == 0.0 and first["train/kl_max"].value == 0.0
    assert first["train/kl_beta"].value == pytest.approx(0.1)
    second = run.train_step(groups).metrics
    assert second["train/kl_mean"].value > 1e-6 and second["train/kl_max"].value >= second["train/kl_mean"].value


def test_training_changes_no_bit_of_the_reference() -> None:
    policy = tiny_policy()
    scorer, twin = reference()
    before = weights(twin.module)
    run = trainer(policy, scorer)
    for _ in range(3):
        assert run.train_step(ragged_groups(policy)).rejection is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in twin.module.state_dict().items())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in policy.module.named_parameters())
    assert not twin.module.training and not any(p.requires_grad or p.grad is not None for p in twin.module.parameters())


def test_the_logged_divergence_is_the_mean_k3_of_the_trained_tokens() -> None:
    policy, (scorer, twin) = tiny_policy(seed=3), reference()
    groups = ragged_groups(policy)
    reported = trainer(policy, scorer, micro_batch=16, lr=0.0).train_step(groups).metrics
    (batch,) = scorer.batches
    with torch.no_grad():
        ours = policy.score(batch, temperature=1.0, dtype=torch.float64).logprobs
        its = twin.score(batch, temperature=1.0, dtype=torch.float64).logprobs
    z = (its - ours).clamp(-20, 20)
    k3 = (z.exp() - z - 1)[batch.loss_mask]
    assert reported["train/kl_mean"].value == pytest.approx(float(k3.mean()), rel=1e-3)
    assert reported["train/kl_max"].value == pytest.approx(float(k3.max()), rel=1e-3)


def test_the_penalty_pulls_back_towards_the_reference() -> None:
    policy, (scorer, _) = tiny_policy(seed=3), reference()
    tied = [TrainGroup(g.scored, (0.0,) * len(g.advantages), g.loss_masks) for g in ragged_groups(policy)]
    run = trainer(policy, scorer, lr=1e-3)
    divergences = [run.train_step(tied).metrics["train/kl_mean"].value for _ in range(6)]
    assert divergences[-1] < 0.9 * divergences[0], "groups without an advantage still have a KL gradient"


@pytest.mark.parametrize(("mini_batch", "micro_batch"), [(0, 4), (8, 4), (8, 8), (4, 2)])
def test_only_batches_that_are_trained_on_are_scored(mini_batch: int, micro_batch: int) -> None:
    policy, (scorer, _) = tiny_policy(), reference()
    groups = ragged_groups(policy)
    run = trainer(policy, scorer, rl=rl_of(mini_batch=mini_batch), micro_batch=micro_batch)
    run.train_step(groups)
    # neither the pass ahead of several steps nor its noise probe reads the reference
    assert len(scorer.batches) == 16 // micro_batch
    assert len({key for batch in scorer.batches for key in batch.keys}) == 16
    if mini_batch:
        assert all(batch.old_logprobs is not None for batch in scorer.batches)


def test_scores_have_no_graph_and_belong_to_the_tempered_distribution() -> None:
    policy, (scorer, twin) = tiny_policy(), reference()
    trainer(policy, scorer, micro_batch=16, lr=0.0).train_step(ragged_groups(policy))
    tempered = FrozenReference(temperature=0.5, dtype="float64")
    tempered.attach(twin)
    scores = tempered(scorer.batches[0])
    assert not scores.requires_grad and scores.dtype == torch.float64
    expected = twin.score(scorer.batches[0], temperature=0.5, dtype=torch.float64).logprobs
    assert torch.equal(scores, expected) and not torch.allclose(scores, scorer(scorer.batches[0]).double(), atol=0.1)


def test_a_reference_without_its_network_is_refused() -> None:
    policy = tiny_policy()
    with pytest.raises(ModelError, match="before its network was attached"):
        trainer(policy, Counted()).train_step(ragged_groups(policy))


# ----------------------------------------------------------------------------------------------------- another checkpoint


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_another_directory_anchors_the_run_to_its_weights(kind: str, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", seed=5)
    config = TINY if kind == "native" else HFModelConfig(name_or_path=str(saved(tmp_path / "own")))
    policy = tiny_policy()
    own, _ = reference(config=config)
    scorer, twin = reference(other, config=config)
    # the rotary buffers come from the configuration; everything that is stored comes from the directory
    stored = load_file(other / "model.safetensors")
    assert all(torch.equal(twin.module.state_dict()[name], tensor) for name, tensor in stored.items())
    groups = train_groups(engine(policy).generate(requests(policy, prompts=2, group_size=8, max_tokens=6)))
    assert trainer(policy, own).train_step(groups).metrics["train/kl_mean"].value == 0.0
    assert trainer(tiny_policy(), scorer).train_step(groups).metrics["train/kl_mean"].value > 0.1


def test_weights_of_another_shape_are_refused_by_the_key(tmp_path: Path) -> None:
    other = saved(tmp_path / "wide", hidden_size=128)
    with pytest.raises(ModelError, match=r"rl\.ref\.model_dir=.*wide.*does not fit the model"):
        build_reference(TINY, str(other), precision=FP32)


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_missing_and_unknown_tensors_are_named(change: str, tmp_path: Path) -> None:
    file = saved(tmp_path / "other") / "model.safetensors"
    stored = load_file(file)
    if change == "missing":
        del stored["model.norm.weight"]
    else:
        stored["model.extra"] = torch.zeros(2)
    save_file(stored, file)
    named = {"missing": r"1 missing tensors \['model.norm.weight'\]", "unknown": r"1 unknown ones \['model.extra'\]"}[change]
    with pytest.raises(ModelError, match=named):
        build_reference(TINY, str(file.parent), precision=FP32)


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_a_directory_that_cannot_be_loaded_is_refused_by_its_own_key(kind: str, tmp_path: Path) -> None:
    config = TINY if kind == "native" else HFModelConfig(name_or_path=str(saved(tmp_path / "own")))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "training_args.bin").write_bytes(b"no weights at all")
    with pytest.raises(ModelError, match=r"rl\.ref\.model_dir=.*broken"):
        build_reference(config, str(broken), precision=FP32)


# ---------------------------------------------------------------------------------------------------------------- dropout


def gpt2(**rates: float) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, **{**off, **rates}))


def test_a_dropout_layer_is_refused_with_its_rate() -> None:
    with pytest.raises(ConfigError, match=r"rl\.ref\.build_ref=True.*transformer\.drop=0\.25") as caught:
        refuse_live_dropout(gpt2(embd_pdrop=0.25))
    assert caught.value.violations[0].key == "rl.ref.build_ref"


def test_a_functional_dropout_rate_is_refused_by_its_name() -> None:
    module = tiny_policy().module
    module.config.attention_dropout = 0.125
    assert not any(isinstance(layer, torch.nn.Dropout) for layer in module.modules())
    with pytest.raises(ConfigError, match=r"config\.attention_dropout=0\.125"):
        refuse_live_dropout(module)


@pytest.mark.parametrize("make", [gpt2, lambda: tiny_policy().module, lambda: exact_policy().module])
def test_a_policy_without_live_dropout_passes(make: object) -> None:
    refuse_live_dropout(make())  # type: ignore[operator]


# --------------------------------------------------------------------------------------------------------------- identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tmp_path / "reference"
    (base / "nested").mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(bytes(range(256)) * 10)
    (base / "nested" / "more.json").write_text("[]")
    return base


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "nested/more.json"])
@pytest.mark.parametrize("position", [0, -1])
def test_one_flipped_bit_is_another_artifact(folder: Path, file: str, position: int) -> None:
    before = artifact_identity(str(folder))
    flip(folder / file, position)
    assert artifact_identity(str(folder)) != before
    flip(folder / file, position)
    assert artifact_identity(str(folder)) == before


def test_names_count_and_times_do_not(folder: Path) -> None:
    before = artifact_identity(str(folder))
    assert before.startswith("sha256:") and len(before) == len("sha256:") + 64
    for file in folder.rglob("*"):
        os.utime(file, (1, 1))
    assert artifact_identity(str(folder)) == before
    moved = shutil.copytree(folder, folder.parent / "elsewhere")
    assert artifact_identity(str(moved)) == before
    (moved / "config.json").rename(moved / "config2.json")
    assert artifact_identity(str(moved)) != before


def test_added_removed_and_exchanged_files_count(folder: Path) -> None:
    seen: Sequence[str] = [artifact_identity(str(folder))]
    (folder / "empty.txt").touch()
    seen = [*seen, artifact_identity(str(folder))]
    (folder / "config.json").unlink()
    seen = [*seen, artifact_identity(str(folder))]
    (folder / "empty.txt").write_text("[]")
    (folder / "nested" / "more.json").write_text("")
    seen = [*seen, artifact_identity(str(folder))]
    assert len(set(seen)) == 4


def test_a_file_longer_than_one_read_is_read_to_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = artifact_identity(str(folder))
    monkeypatch.setattr("posttrain.runtime.artifact_identity._READ_BYTES", 7)
    assert artifact_identity(str(folder)) == whole
    flip(folder / "model.safetensors", 1234)
    assert artifact_identity(str(folder)) != whole


def test_linked_files_count_by_what_they_hold(folder: Path) -> None:
    linked = folder.parent / "linked"
    (linked / "nested").mkdir(parents=True)
    for file in ("config.json", "model.safetensors", "nested/more.json"):
        (linked / file).symlink_to(folder / file)
    assert artifact_identity(str(linked)) == artifact_identity(str(folder))


def test_the_artifact_is_part_of_what_defines_the_loss() -> None:
    plain = build_objective(rl_of(), ModelContext("tiny", 6, Counted()))
    anchored = build_objective(rl_of(), ModelContext("tiny", 6, Counted(), "sha256:abc"))
    assert "reference_artifact" not in plain.identity
    assert dict(anchored.identity) == {**plain.identity, "reference_artifact": "sha256:abc"}


def test_what_is_wrong_with_a_directory(folder: Path) -> None:
    assert directory_problem(str(folder)) is None
    assert directory_problem(str(folder / "missing")) == "is not a directory"
    assert directory_problem(str(folder / "config.json")) == "is not a directory"
    problem = directory_problem(str(folder / "nested"))
    assert problem == "holds no weight file (.safetensors, .bin, .gguf)"


def test_tiny_divergences_are_not_lost_to_rounding() -> None:
    policy, (scorer, _) = tiny_policy(), reference()
    groups = ragged_groups(policy)
    run = trainer(policy, scorer, lr=1e-6)
    run.train_step(groups)
    small = run.train_step(groups).metrics["train/kl_mean"].value
    assert math.isfinite(small) and small >= 0.0
