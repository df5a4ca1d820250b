"""Random ragged batches for the objective tests: the same numbers as lists for the slow reference and as packed tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.algorithm.annotators.group import GroupAnnotator
from posttrain.algorithm.grpo import build_objective
from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM, ModelContext, Objective, Reduction
from posttrain.config.grpo import GRPOConfig
from posttrain.data.packer import PolicyBatch, TrainSample, micro_batches, pack, samples_of
from posttrain.model.protocol import PolicyModel, TokenScores
from posttrain.records import Advantage, Completion, Prompt, RolloutGroup, Score, ScoredGroup, Sum, TopTokens
from tests.unit.algorithm import reference

VOCAB = 9
MAX_TOKENS = 11
TOP_K = 4
PROMPTS = ((3, 1, 2), (5,), (7, 7, 0, 2, 8))
PROMPT_OF = (0, 0, 0, 1, 1, 2, 2, 2)
EMPTY, TRUNCATED, MASKED = 1, 3, 4
"""One sequence without a token, one cut at the budget that the annotator leaves out, one whose tokens are all masked."""
ADVANTAGES = (1.3, 0.9, -0.8, 0.7, 1.1, -1.7, 0.0, 0.6)
LOSS_TYPES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-fixed")

LogitsOf = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
"""(prompt ids, completion ids) -> float64 [T, V]."""


@dataclass(frozen=True)
class Ragged:
    """Eight sequences of three prompts. Log-probabilities are of a second policy each, so that no two can be confused."""

    logits: list[torch.Tensor]
    """Leaves."""
    labels: list[list[int]]
    masks: list[list[bool]]
    advantages: list[Advantage]
    perturbed: list[list[float]]
    """Of the cached old policy."""
    sampled: list[list[float]]
    anchor: list[list[float]]
    """Of the frozen reference."""
    head_ids: list[list[list[int]]]
    head_logprobs: list[list[list[float]]]
    samples: list[TrainSample]

    def batches(
        self, *, old: str = "current", anchor: bool = False, count: int = 8, tokens: int = 0, chosen: Sequence[int] | None = None
    ) -> list[PolicyBatch]:
        """The chosen sequences (all by default), packed by the trainer's own code.

        Args:
            old: `perturbed` attaches the cached old policy; `current` and `sampler` attach nothing.
            anchor: attach the frozen reference.
        """
        samples = self.samples if chosen is None else [self.samples[index] for index in chosen]
        return [self._packed(chunk, old=old, anchor=anchor) for chunk in micro_batches(samples, count=count, tokens=tokens)]

    def _packed(self, chunk: Sequence[TrainSample], *, old: str, anchor: bool) -> PolicyBatch:
        batch = pack(chunk, pad_id=0, dtype=torch.float64)
        owners = [self.samples.index(sample) for sample in chunk]

        def flat(values: list[list[float]]) -> torch.Tensor:
            return torch.tensor([value for owner in owners for value in values[owner]], dtype=torch.float64)

        if old == "perturbed":
            batch = batch.with_old_logprobs(flat(self.perturbed))
        return batch.with_reference_logprobs(flat(self.anchor)) if anchor else batch

    def expected(self, *, old: str = "current", centering: str | None = None, **how: object) -> tuple[float, list[torch.Tensor]]:
        """The slow reference on this batch."""
        olds = {"current": None, "perturbed": self.perturbed, "sampler": self.sampled}[old]
        centred = None
        if centering is not None:
            centred = reference.Centering(centering, 1.5, 0.6, 2.0, self.sampled, self.head_ids, self.head_logprobs)
        return reference.reference_loss(
            self.logits,
            self.labels,
            self.masks,
            self.advantages,
            olds,
            max_tokens=MAX_TOKENS,
            anchor_logprobs=self.anchor,
            centering=centred,
            **how,  # type: ignore[arg-type]
        )


def ragged(*, seed: int = 0, temperature: float = 1.0, logits_of: LogitsOf | None = None, per_token: bool = False) -> Ragged:
    """Lengths and masks are random, the last sequence is the longest possible.

    Old policies lie on both sides of every bound, the dual clip's included; the reference lies up to six nats away.

    Args:
        temperature: at which the second policies' log-probabilities are taken.
        logits_of: of a real policy; None draws free logits.
        per_token: most sequences get an advantage per token, one keeps a single number.
    """
    draw, torch_draw = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [draw.randint(2, MAX_TOKENS - 1) for _ in ADVANTAGES]
    lengths[EMPTY], lengths[-1] = 0, MAX_TOKENS
    labels = [[draw.randrange(VOCAB) for _ in range(n)] for n in lengths]
    if logits_of is None:
        logits = [torch.randn(n, VOCAB, generator=torch_draw, dtype=torch.float64) * 1.5 for n in lengths]
    else:
        logits = [logits_of(PROMPTS[owner], ids) for owner, ids in zip(PROMPT_OF, labels, strict=True)]
    logits = [rows.detach().requires_grad_() for rows in logits]

    def near(offsets: Sequence[float]) -> list[list[float]]:
        return [
            [reference.token_logprob(rows[t].detach(), ids[t], temperature).item() + draw.choice(offsets) for t in range(len(rows))]
            for rows, ids in zip(logits, labels, strict=True)
        ]

    perturbed = near((-1.6, -0.3, -0.05, 0.1, 0.5))
    anchor = near((-6.0, -1.5, -0.1, 0.2, 0.9, 1.1, 3.0))
    sampler = [
        torch.log_softmax(rows.detach() / temperature + 0.4 * torch.randn(rows.shape, generator=torch_draw, dtype=torch.float64), -1)
        for rows in logits
    ]
    heads = [rows.topk(TOP_K, -1) for rows in sampler]
    head_logprobs = [head.values.float() for head in heads]
    sampled = [[rows[t, ids[t]].item() for t in range(len(rows))] for rows, ids in zip(sampler, labels, strict=True)]
    completions = [
        Completion(
            tuple(labels[i]),
            tuple(sampled[i]),
            "length" if i == TRUNCATED else "stop",
            0,
            "",
            TopTokens(np.asarray(heads[i].indices, dtype=np.int32), np.asarray(head_logprobs[i])),
        )
        for i in range(len(lengths))
    ]
    advantages: list[Advantage] = list(ADVANTAGES)
    if per_token:
        advantages = [a if i == 2 else tuple(a + draw.uniform(-1, 1) for _ in range(lengths[i])) for i, a in enumerate(ADVANTAGES)]
    masks = [[i != MASKED and (t == 0 or draw.random() < 0.8) for t in range(n)] for i, n in enumerate(lengths)]
    samples = _annotated(completions, advantages, masks)
    return Ragged(
        logits=logits,
        labels=labels,
        masks=[list(sample.loss_mask) for sample in samples],
        advantages=advantages,
        perturbed=perturbed,
        sampled=sampled,
        anchor=anchor,
        head_ids=[head.indices.tolist() for head in heads],
        head_logprobs=[rows.tolist() for rows in head_logprobs],
        samples=samples,
    )


def _annotated(completions: list[Completion], advantages: list[Advantage], masks: list[list[bool]]) -> list[TrainSample]:
    """Samples from the real annotator, which drops the truncated completion, with the random masks on top."""
    samples: list[TrainSample] = []
    for prompt, ids in enumerate(PROMPTS):
        members = [i for i, owner in enumerate(PROMPT_OF) if owner == prompt]
        rollout = RolloutGroup(Prompt(f"p{prompt}", "", "", ids), tuple(completions[i] for i in members))
        scored = ScoredGroup(rollout, tuple(Score(0.0) for _ in members), 0.0)
        annotator = GroupAnnotator(lambda _, members=members: [advantages[i] for i in members], mask_truncated=True)
        for i, sample in zip(members, samples_of([annotator(scored)]), strict=True):
            both = tuple(a and b for a, b in zip(sample.loss_mask, masks[i], strict=True))
            samples.append(TrainSample(sample.prompt, sample.index, sample.completion, sample.advantage, both))
    return samples


class TablePolicy:
    """A policy whose logits are the batch's own leaves."""

    def __init__(self, ragged: Ragged) -> None:
        owners = [(sample.prompt.id, sample.index) for sample in ragged.samples]
        self._logits = dict(zip(owners, ragged.logits, strict=True))

    def score(self, batch: PolicyBatch, *, temperature: float, dtype: torch.dtype, top_ids: torch.Tensor | None = None) -> TokenScores:
        logits = torch.cat([self._logits[key] for key in batch.keys]) / temperature
        logp = torch.log_softmax(logits.to(dtype), dim=-1)
        entropy = -(logp.exp() * logp).sum(-1).detach().float()
        return TokenScores(logp.gather(1, batch.labels[:, None])[:, 0], entropy, None if top_ids is None else logp.gather(1, top_ids))


def objective_of(**rl: object) -> Objective:
    """The objective of a float64 configuration; `centering` names the weight of score centering."""
    centering = rl.pop("centering", None)
    config = GRPOConfig(**{"logprob_dtype": "float64", **rl})  # type: ignore[arg-type]
    if centering is not None:
        how = config.score_centering
        how.enabled, how.compose, how.tis_clip, how.mis_low, how.mis_high, how.top_k = True, str(centering), 1.5, 0.6, 2.0, TOP_K
    return build_objective(config, ModelContext("table", MAX_TOKENS, reference_scorer=lambda batch: batch.reference_logprobs))


def combined(objective: Objective, policy: PolicyModel, batches: Sequence[PolicyBatch]) -> tuple[float, float]:
    """(loss, weight) over micro-batches as a trainer combines them; gradients of the numerator are left on the leaves, to be
    divided by the weight."""
    numerator, weight = 0.0, 0.0
    for batch in batches:
        loss, metrics = objective.fn(policy, batch)
        assert loss.shape == ()
        objective.metric_adapter(metrics)
        share = 1.0
        if objective.reduction is Reduction.TOKEN_SUM:
            reported = metrics[OBJECTIVE_WEIGHT_SUM]
            assert isinstance(reported, Sum)
            share = reported.total
        (loss * share).backward()
        numerator, weight = numerator + loss.item() * share, weight + share
    return numerator / weight, weight


def table_result(objective: Objective, case: Ragged, batches: Sequence[PolicyBatch]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients in the logits."""
    loss, weight = combined(objective, TablePolicy(case), batches)
    found = [torch.zeros_like(rows) if rows.grad is None else rows.grad / weight for rows in case.logits]
    for rows in case.logits:
        rows.grad = None
    return loss, found


def distance(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative to the norm of the whole gradient."""
    a, b = (torch.cat([rows.flatten() for rows in side]) for side in (actual, expected))
    return ((a - b).norm() / b.norm()).item()
