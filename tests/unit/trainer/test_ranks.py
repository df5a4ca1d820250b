"""Several ranks against one process: real processes, gloo, FSDP2, a tiny model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM
from posttrain.config import GRPOConfig, Precision, RootConfig
from posttrain.data.packer import pack, samples_of
from posttrain.errors import TrainingError
from posttrain.model.lora import merged_parameters
from posttrain.model.policy import CausalPolicy
from posttrain.model.protocol import BuiltModel
from posttrain.records import StepResult, TrainGroup
from posttrain.trainer.assemble import Assembled, Restored, assemble, objective_of, reference_of
from posttrain.trainer.core import Batching, Trainer
from posttrain.trainer.group import Followers, GroupWeights, LeadState, LeadTrainer
from posttrain.trainer.ranks import Ranks
from posttrain.trainer.recorder import ScoreRecorder
from tests.builders import ragged_groups, tiny_policy
from tests.rank_objectives import BROKEN, NOT_FINITE
from tests.trees import root_of

COMMON = (
    "experiment=tiny",
    "rl.objective_builder=tests.rank_objectives.build",
    "rl.batch_per_replica=15",
    "rl.group_size=5",
    "rl.micro_batch_per_replica=3",
    "rl.optimizer.lr=0",
    "rollout.max_tokens=6",
)
"""Micro-batches of 3, 3, 3, 1 and of 3, 2: uneven parts, and once a rank without any."""


@dataclass(frozen=True)
class Run:
    """A policy and what trains it, on one rank or on several."""

    parts: Assembled
    followers: Followers | None = None

    def train(self, groups: list[TrainGroup]) -> StepResult:
        return self.parts.trainer.train_step(groups)

    def weights(self) -> dict[str, torch.Tensor]:
        if self.followers is None:
            return {name: tensor.clone() for name, tensor in merged_parameters(self.parts.policy.module)}
        return {name: tensor.clone() for name, tensor in GroupWeights(self.followers, self.parts.policy).plain()}

    def save(self, folder: Path) -> None:
        self.parts.tensors.write(self.parts.tensors.staged(("model", "optimizer")), folder)


@contextmanager
def run_of(*overrides: str, restored: Restored | None = None, root: RootConfig | None = None) -> Iterator[Run]:
    root = root or root_of(*COMMON, *overrides)
    rl: Any = root.rl
    assert isinstance(rl, GRPOConfig)
    reference = reference_of(rl)
    objective = objective_of(rl, root, reference)
    torch.manual_seed(rl.seed)
    if root.grid.ranks == 1:
        yield Run(assemble(root, rl, objective=objective, reference=reference, restored=restored))
        return
    model: Any = root.model
    with Followers(root, parallelism=model.parallelism, restored=restored) as followers:
        ranks = followers.join()
        with followers.building():
            parts = assemble(
                root,
                rl,
                objective=objective,
                reference=reference,
                ranks=ranks,
                restored=restored,
                make_trainer=lambda *a, **k: LeadTrainer(*a, followers=followers, **k),
                make_state=lambda *a: LeadState(*a, followers=followers),
            )
        yield Run(parts, followers)
    assert not any(psutil.pid_exists(pid) for pid in followers.processes)


def groups() -> list[TrainGroup]:
    """15 completions of 3 prompts, of different lengths, one empty; the last group ties, so that a micro-batch skips its backward."""
    made = ragged_groups(tiny_policy(), prompts=3, group_size=5)
    made[2] = replace(made[2], advantages=(0.0,) * 5)
    return made


def marked(value: float) -> list[TrainGroup]:
    """The last sample of the first micro-batch, which the last rank trains, carries a mark."""
    made = groups()
    made[0] = replace(made[0], advantages=(*made[0].advantages[:2], value, *made[0].advantages[3:]))
    return made


def gradient(saved: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """The gradient of the first step from the saved first moments, read in one process."""
    with run_of(*overrides) as single:
        single.parts.tensors.restore(saved / "model", saved / "optimizer")
        names = {parameter: name for name, parameter in single.parts.policy.module.named_parameters()}
        state = single.parts.trainer.optimizer.state
        return {name: state[parameter]["exp_avg"].float() / 0.1 for parameter, name in names.items()}


def error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    flat, against = (torch.cat([values[name].double().flatten() for name in sorted(one)]) for values in (one, other))
    return float((flat - against).norm() / against.norm())


@dataclass(frozen=True)
class Single:
    result: StepResult
    saved: Path
    gradient: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Single:
    folder = tmp_path_factory.mktemp("single")
    with run_of() as run:
        result = run.train(groups())
        run.save(folder)
    return Single(result, folder, gradient(folder))


def comparable(result: StepResult) -> dict[str, float]:
    return {name: metric.value for name, metric in result.metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp_shard", "dp_replicate"])
def test_two_ranks_do_what_one_process_does(mesh: str, single: Single, tmp_path: Path) -> None:
    with run_of("grid.ranks=2", f"model.parallelism.{mesh}=2") as run:
        result = run.train(groups())
        # one denominator, one gradient, whatever the split: compared through the saved moments, which one process reads
        run.save(tmp_path / "two")
        difference = error(gradient(tmp_path / "two"), single.gradient)
        print(f"{mesh}: relative difference of the gradient {difference:.2e}")
        assert difference <= 1e-6
        ours, theirs = comparable(result), comparable(single.result)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            tolerance = 1e-5 if "gap" in name or name == "train/loss" else 1e-6
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=tolerance), name
        assert result.token_logprobs.keys() == single.result.token_logprobs.keys()
        for key, values in single.result.token_logprobs.items():
            assert result.token_logprobs[key] == pytest.approx(values, abs=1e-5)
        # a loss that is not finite on the last rank rejects the window on all: the weights stay equal everywhere
        before = run.weights()
        rejected = run.train(marked(NOT_FINITE))
        assert rejected.rejection == "the loss of micro-batch 0 is nan" and rejected.model_step == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in run.weights().items())
        assert run.train(groups()).model_step == 2
        # an exception on the last rank ends everything with that exception
        started = time.monotonic()
        with pytest.raises(TrainingError, match=r"(?s)rank 1 failed during train_step:.*this objective breaks on a marked sample"):
            run.train(marked(BROKEN))
        assert time.monotonic() - started < 20


@pytest.mark.slow
def test_a_checkpoint_moves_between_one_and_two_ranks(single: Single, tmp_path: Path) -> None:
    state = {"model_step": 1, "probed": False}
    restored = Restored(single.saved / "model", single.saved / "optimizer", state)
    with run_of("grid.ranks=2", "model.parallelism.dp_shard=2", restored=restored) as run:
        assert run.parts.trainer.model_step == 1
        with run_of(restored=restored) as alone:
            expected = alone.weights()
        got = run.weights()
        assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
        run.save(tmp_path / "again")
    back = gradient(tmp_path / "again")
    assert all(torch.equal(back[name], single.gradient[name]) for name in back)


@pytest.mark.slow
def test_bfloat16_compute_with_float32_master_differs_by_what_bfloat16_explains(single: Single, tmp_path: Path) -> None:
    precision = ("rl.param_dtype=bfloat16", "rl.master_dtype=float32", "rl.reduce_dtype=float32")
    with run_of("grid.ranks=2", "model.parallelism.dp_shard=2", *precision) as run:
        run.train(groups())
        run.save(tmp_path / "two")
        assert all(tensor.dtype == torch.float32 for tensor in run.weights().values())
    difference = error(gradient(tmp_path / "two"), single.gradient)
    unexplained = error(gradient(tmp_path / "two"), by_hand_in_bfloat16())
    print(f"bfloat16: relative difference of the gradient {difference:.2e}, of which not explained by rounding {unexplained:.2e}")
    assert 1e-3 < difference < 0.1 and unexplained <= 1e-5


def by_hand_in_bfloat16() -> dict[str, torch.Tensor]:
    """Both ranks' parts one after the other, on weights rounded to bfloat16, with gradients summed in float32."""
    policy = tiny_policy(precision=Precision("bfloat16", "bfloat16", "bfloat16", False))
    for parameter in policy.module.parameters():  # the rotary frequencies stay float32, as FSDP leaves them
        parameter.data = parameter.data.to(torch.bfloat16)
    root: Any = root_of(*COMMON)
    objective = objective_of(root.rl, root, None)
    total, weight = {name: torch.zeros(p.shape) for name, p in policy.module.named_parameters()}, 0.0
    for rank in range(2):
        trainer = Trainer(
            root.rl.optimizer, policy=policy, objective=objective, batching=Batching.of(root.rl), total_steps=3, ranks=Ranks(rank, 2)
        )
        for part in trainer._micro_batches(samples_of(groups())):
            if part.idle:
                continue
            recorder = ScoreRecorder(policy)
            loss, metrics = objective.fn(recorder, part.batch)
            share = metrics[OBJECTIVE_WEIGHT_SUM].value
            weight += share
            policy.module.train()
            recorder.backward(loss * share)
            for name, parameter in policy.module.named_parameters():
                if parameter.grad is not None:
                    total[name] += parameter.grad.float()
                parameter.grad = None
    return {name: tensor / weight for name, tensor in total.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("rl.mixed_precision_mode=autocast", "rl.param_dtype=bfloat16", "rl.master_dtype=float32")])
def test_the_reference_and_the_frozen_old_policy_are_sharded_too(mode: tuple[str, ...]) -> None:
    knobs = (
        "rl.kl_beta=0.1",
        "rl.ref.build_ref=true",
        "rl.mini_batch_per_replica=5",
        "rl.micro_batch_per_replica=5",
        "rl.certified_deterministic_forward=true",
        "rl.optimizer.lr=1e-3",
        "rl.optimizer.grad_clip_norm=0.5",
        *mode,
    )
    with run_of(*knobs) as alone:
        expected = comparable(alone.train(groups()))
    with run_of(*knobs, "grid.ranks=2", "model.parallelism.dp_shard=2") as run:
        got = comparable(run.train(groups()))
    assert got["optim/applied_steps"] == 3 and got["train/kl_mean"] > 0 and got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=5e-2 if mode else 1e-3, abs=2e-2 if mode else 1e-4), name


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_its_name(single: Single) -> None:
    with run_of("grid.ranks=2", "model.parallelism.dp_shard=2") as run:
        assert run.followers is not None
        run.train(groups())
        os.kill(run.followers.processes[0], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TrainingError, match=r"rank 1 \(process \d+\) was killed by signal SIGKILL during train_step"):
            run.train(groups())
        assert time.monotonic() - started < 20


def tied_directory(folder: Path) -> Path:
    """A model whose head is its embedding, in several files."""
    from transformers import LlamaForCausalLM

    built = tiny_policy()
    config = built.module.config
    config.tie_word_embeddings = True
    torch.manual_seed(3)
    module = LlamaForCausalLM(config)
    module.save_pretrained(folder, max_shard_size="100KB")
    built.tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.slow
def test_ranks_read_only_their_own_rows_and_recompute_activations(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder = tied_directory(tmp_path / "model")
    hf = ("model=hf", f"model.name_or_path={folder}", "model.dtype=float32", "model.gradient_checkpointing=true")
    with run_of(*hf) as alone:
        alone.train(groups())
        alone.save(tmp_path / "one")
        scores = alone.parts.policy.score_prompt(alone.parts.probe)
        optimizer = alone.parts.trainer.optimizer
        moments = [optimizer.state[p]["exp_avg"].clone() for p in alone.parts.policy.module.parameters()]
    with run_of(*hf, "grid.ranks=2", "model.parallelism.dp_shard=2") as run:
        assert run.followers is not None
        assert run.parts.policy.module.config.tie_word_embeddings
        weights = run.weights()
        own = sum(parameter.to_local().numel() for parameter in run.parts.policy.module.parameters())
        total = sum(parameter.numel() for parameter in run.parts.policy.module.parameters())
        assert own <= 0.51 * total
        dense: dict[str, Any] = dict(LlamaForCausalLM.from_pretrained(folder).named_parameters(remove_duplicate=False))
        assert weights.keys() == dense.keys() and all(torch.equal(weights[name], dense[name]) for name in dense)
        group = GroupWeights(run.followers, run.parts.policy)
        assert group.score_prompt(run.parts.probe) == pytest.approx(scores, abs=1e-5)
        run.train(groups())
        run.save(tmp_path / "two")
    with run_of(*hf) as alone:
        alone.parts.tensors.restore(tmp_path / "two/model", tmp_path / "two/optimizer")
        optimizer = alone.parts.trainer.optimizer
        for parameter, expected in zip(alone.parts.policy.module.parameters(), moments, strict=True):
            assert float((optimizer.state[parameter]["exp_avg"] - expected).norm() / expected.norm().clamp(min=1e-12)) <= 1e-5


def test_recomputed_activations_give_the_same_gradient(single: Single) -> None:
    def moments(checkpointing: bool) -> list[torch.Tensor]:
        policy = tiny_policy()
        if checkpointing:
            policy.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        built = BuiltModel(policy.module, policy.tokenizer, None)
        policy = CausalPolicy(built, precision=policy.precision)
        policy.module.train()
        scores = policy.score(pack(samples_of(groups()), pad_id=0), temperature=1.0, dtype=torch.float32)
        scores.logprobs.sum().backward()
        return [parameter.grad.clone() for parameter in policy.module.parameters() if parameter.grad is not None]

    for plain, recomputed in zip(moments(False), moments(True), strict=True):
        assert torch.equal(plain, recomputed)
