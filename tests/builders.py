"""Small real objects for tests: a tiny model, prompts, groups with chosen rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.algorithm.annotators.group import GroupAnnotator, GroupRelative
from posttrain.algorithm.grpo import build_objective
from posttrain.algorithm.primitives.objective import ModelContext, Objective
from posttrain.config import GRPOConfig, HFRolloutConfig, Precision
from posttrain.model.native import tiny
from posttrain.model.policy import CausalPolicy
from posttrain.model.protocol import BuiltModel
from posttrain.records import Completion, Prompt, RolloutGroup, RolloutRequest, SamplingParams, Score, ScoredGroup, TrainGroup
from posttrain.rollout.hf_engine import HFEngine

FP32 = Precision("float32", "float32", "float32", False)


def tiny_policy(*, dtype: torch.dtype = torch.float32, pack: bool = True, precision: Precision = FP32, **sizes: object) -> CausalPolicy:
    """The seeded tiny model; float64 for exactness tests."""
    built = tiny.build(dict(sizes), dtype="float32")
    built.module.to(dtype).eval()
    return CausalPolicy(built, precision=precision, pack=pack)


def exact_policy() -> CausalPolicy:
    """A small GPT-2 in float64. Llama's norms and rotary embeddings compute in float32 whatever the weights are, which would
    hide every difference below 1e-8."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tiny.byte_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = GPT2LMHeadModel(config).double().eval()
    return CausalPolicy(BuiltModel(module, tokenizer, None), precision=FP32)


def prompt(policy: CausalPolicy, number: int, text: str) -> Prompt:
    return Prompt(f"p{number}", text, text, tuple(policy.tokenizer.encode(text, add_special_tokens=False)))


def requests(policy: CausalPolicy, *, prompts: int, group_size: int, max_tokens: int, temperature: float = 1.0) -> list[RolloutRequest]:
    """Prompts of different lengths."""
    sampling = SamplingParams(max_tokens, temperature)
    return [RolloutRequest(prompt(policy, i, f"{'x' * (3 * i)}{i}+{i}="), group_size, sampling, seed=100 + i) for i in range(prompts)]


def engine(policy: CausalPolicy, *, max_batch: int = 0) -> HFEngine:
    made = HFEngine(HFRolloutConfig(max_batch=max_batch), policy=policy)
    made.commit(0)
    return made


def train_groups(rollouts: Sequence[RolloutGroup], *, seed: int = 0) -> list[TrainGroup]:
    """Groups with random 0/1 rewards; the first two completions of each group always differ."""
    generator = torch.Generator().manual_seed(seed)
    groups: list[TrainGroup] = []
    for rollout in rollouts:
        rewards = torch.randint(0, 2, (len(rollout.completions),), generator=generator).tolist()
        rewards[:2] = [1, 0]
        scored = ScoredGroup(rollout, tuple(Score(float(reward)) for reward in rewards), spread=1.0)
        groups.append(GroupAnnotator(GroupRelative(False))(scored))
    return groups


def ragged_groups(policy: CausalPolicy, *, prompts: int = 2, group_size: int = 8, max_tokens: int = 6) -> list[TrainGroup]:
    """Sampled groups, cut to different lengths; one completion is empty."""
    rollouts = engine(policy).generate(requests(policy, prompts=prompts, group_size=group_size, max_tokens=max_tokens))
    cut: list[RolloutGroup] = []
    for g, rollout in enumerate(rollouts):
        completions = [
            Completion(c.token_ids[:n], c.logprobs[:n], "length", 0, c.text)
            for i, c in enumerate(rollout.completions)
            for n in [max(0, len(c.token_ids) - (i + g) % (max_tokens + 1))]
        ]
        cut.append(RolloutGroup(rollout.prompt, tuple(completions)))
    return train_groups(cut)


def objective(**knobs: object) -> Objective:
    rl = GRPOConfig(objective_builder="unused", **knobs)  # type: ignore[arg-type]
    return build_objective(rl, ModelContext("tiny", 6))
