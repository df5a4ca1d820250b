"""One engine in this process: sampling is what transformers computes, and published weights are the ones that sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_vllm_support import (
    END,
    BreakableEngine,
    engine,
    log_softmax,
    perturb,
    prompt_logprobs,
    request,
    save,
    tiny_model,
    vllm_marks,
)

from posttrain.errors import RolloutError, WeightSyncError
from posttrain.model.converter import hf_named_weights
from posttrain.records import Completion, RolloutRequest, Sum
from posttrain.weight_sync.host import HostCopySync

pytestmark = vllm_marks

IDS = list(range(40, 84))


class Rig:
    """A trainer's model, the engine that follows it, and the transport between them."""

    def __init__(self, model: Any, served: BreakableEngine) -> None:
        self.model = model
        self.engine = served
        self.sent: Any = lambda: hf_named_weights(self.model)
        self.sync = HostCopySync(
            lambda: self.sent(),
            served,
            dtype="float32",
            probe=lambda ids: prompt_logprobs(self.model, ids),
            probe_ids=IDS,
            bucket_bytes=50_000,
        )
        self.version = 0

    def publish(self, *, verify: bool = True) -> Any:
        self.version += 1
        return self.sync.publish(self.version, verify=verify)

    def gap(self, ids: list[int] = IDS) -> float:
        return max(abs(a - b) for a, b in zip(prompt_logprobs(self.model, ids), self.engine.score(ids), strict=True))

    def repair(self) -> None:
        self.engine.skip, self.engine.drop, self.engine.flip = frozenset(), None, None
        self.sent = lambda: hf_named_weights(self.model)
        self.publish()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    model = tiny_model("llama", tied=True)
    torch_threads = torch.set_num_threads
    random_state = torch.get_rng_state()
    served = engine(save(model, tmp_path_factory.mktemp("tied")), max_model_len=128)
    assert torch.set_num_threads is torch_threads, "the engine switched off the trainer's thread control"
    assert torch.equal(torch.get_rng_state(), random_state), "the engine seeded the trainer's generator"
    with pytest.raises(RolloutError, match="no weight version is committed; publish"):
        served.generate([request(IDS)])
    built = Rig(model, served)
    built.publish()
    yield built
    served.close()
    served.close()
    with pytest.raises(RolloutError, match="closed"):
        served.generate([request(IDS)])


def only(rig: Rig, asked: RolloutRequest) -> Completion:
    return rig.engine.generate([asked])[0].completions[0]


def expected_logprobs(model: Any, asked: RolloutRequest, completion: Completion) -> list[float]:
    """The processed distribution by its definition: penalty, temperature, top-k, then top-p on what is left."""
    sampling, prompt = asked.sampling, list(asked.prompt.token_ids)
    expected = []
    for position, token in enumerate(completion.token_ids):
        context = prompt + list(completion.token_ids[:position])
        with torch.no_grad():
            logits = model(torch.tensor([context])).logits[0, -1].double()
        for seen in set(context):
            logits[seen] = logits[seen] / sampling.repetition_penalty if logits[seen] > 0 else logits[seen] * sampling.repetition_penalty
        logits = logits / sampling.temperature
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
        probabilities, order = logits.softmax(-1).sort(descending=True)
        before = probabilities.cumsum(-1) - probabilities
        logits[order[before >= sampling.top_p]] = -torch.inf
        assert logits[token] > -torch.inf, "a token outside the allowed set was drawn"
        expected.append(torch.log_softmax(logits, -1)[token].item())
    return expected


# ------------------------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.7},
        {"repetition_penalty": 1.4},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
    ids=["plain", "temperature", "top_k", "top_p", "repetition_penalty", "all"],
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled(rig: Rig, sampling: dict[str, float]) -> None:
    asked = request(IDS[:20], group_size=4, seed=11, **sampling)
    completions = rig.engine.generate([asked])[0].completions
    for completion in completions:
        assert completion.logprobs == pytest.approx(expected_logprobs(rig.model, asked, completion), abs=1e-3)
    assert len({completion.token_ids for completion in completions}) == 4


def test_greedy_is_the_argmax_of_transformers(rig: Rig) -> None:
    prompt = IDS[:30]
    completion = only(rig, request(prompt, temperature=0.0, max_tokens=24, group_size=1))
    table = log_softmax(rig.model, prompt + list(completion.token_ids))[len(prompt) - 1 : -1]
    assert list(completion.token_ids) == table.argmax(-1).tolist()
    assert completion.logprobs == pytest.approx(table.max(-1).values.tolist(), abs=1e-3)


def test_a_greedy_group_repeats_one_completion(rig: Rig) -> None:
    group = rig.engine.generate([request(IDS, temperature=0.0, group_size=3)])[0]
    assert len(group.completions) == 3 and len(set(group.completions)) == 1


def test_tokens_depend_on_seed_and_index_and_not_on_company(rig: Rig) -> None:
    asked = request(IDS, group_size=3, seed=5)
    other = request(IDS[:9], group_size=4, seed=6)
    alone = rig.engine.generate([asked])[0]
    together = rig.engine.generate([other, asked, request(IDS, group_size=3, seed=4)])
    assert [c.token_ids for c in together[1].completions] == [c.token_ids for c in alone.completions]
    assert rig.engine.generate([request(IDS, group_size=1, seed=5)])[0].completions[0].token_ids == alone.completions[0].token_ids
    # Neighbouring seeds share nothing: vLLM's own rule, seed + index, would.
    drawn = [c.token_ids for c in (*alone.completions, *together[2].completions)]
    assert len(set(drawn)) == 6
    assert together[0].prompt.token_ids == tuple(IDS[:9])


def test_the_end_token_is_part_of_a_stopped_completion_and_not_of_its_text(rig: Rig) -> None:
    groups = rig.engine.generate([request(IDS[:20], group_size=8, seed=seed, max_tokens=100, temperature=1.6) for seed in range(4)])
    completions = [completion for group in groups for completion in group.completions]
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert stopped and len(stopped) < len(completions)
    for completion in completions:
        assert (completion.token_ids[-1] == END) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) == 100 or completion.finish_reason == "stop"
        assert END not in completion.token_ids[:-1] and "<end>" not in completion.text and "<pad>" not in completion.text
    asked = request(IDS[:20], temperature=1.6)
    assert stopped[0].logprobs[-1] == pytest.approx(expected_logprobs(rig.model, asked, stopped[0])[-1], abs=1e-3)


def test_a_request_that_does_not_fit_is_refused_with_both_numbers(rig: Rig) -> None:
    with pytest.raises(RolloutError, match=r"has 44 tokens and rollout.max_tokens=85: together 129, more than .*max_model_len=128"):
        rig.engine.generate([request(IDS, max_tokens=85)])
    assert len(only(rig, request(IDS, max_tokens=84, temperature=0.0)).token_ids) <= 84


def test_a_temperature_that_vllm_would_rewrite_is_refused(rig: Rig) -> None:
    with pytest.raises(RolloutError, match=r"temperature=0.005.*below 0.01"):
        rig.engine.generate([request(IDS, temperature=0.005)])


def test_no_requests_are_no_groups(rig: Rig) -> None:
    assert rig.engine.generate([]) == []


def test_sampling_leaves_the_generators_of_the_trainer_alone(rig: Rig) -> None:
    before = torch.get_rng_state()
    rig.engine.generate([request(IDS, group_size=2), request(IDS, temperature=0.0)])
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------------------------- weights


def test_an_update_changes_what_is_sampled_to_what_transformers_computes(rig: Rig) -> None:
    asked = request(IDS, temperature=0.0, max_tokens=24)
    before = only(rig, asked)
    assert before.weight_version == rig.version
    perturb(rig.model, seed=rig.version)
    publication = rig.publish()
    after = only(rig, asked)
    assert after.weight_version == rig.version == publication.version == before.weight_version + 1
    assert after.token_ids != before.token_ids
    assert after.logprobs == pytest.approx(expected_logprobs(rig.model, request(IDS), after), abs=1e-3)


def test_verification_covers_every_byte_of_a_dense_model(rig: Rig) -> None:
    metrics = rig.publish().metrics
    assert metrics["sync/verified_tensors"] == Sum(len(list(hf_named_weights(rig.model))))
    assert metrics["sync/verified_gib_frac"].value == 1.0
    assert metrics["sync/probe_gap"].value < 1e-4
    assert metrics["sync/buckets"].value > 1


def test_nothing_is_sampled_between_begin_and_commit(rig: Rig) -> None:
    rig.engine.begin(99, {})
    assert rig.engine.weight_version is None
    with pytest.raises(RolloutError, match="no weight version is committed"):
        rig.engine.generate([request(IDS)])
    with pytest.raises(WeightSyncError, match="cannot commit version 99"):
        rig.engine.commit(99)
    with pytest.raises(WeightSyncError, match="no weights are installed"):
        rig.engine.score(IDS)
    rig.repair()


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.v_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_lost_tensor_is_refused_by_name(rig: Rig, name: str) -> None:
    perturb(rig.model, seed=1)
    rig.engine.drop = name
    with pytest.raises(WeightSyncError, match=f"incomplete.*missing {name}"):
        rig.publish(verify=False)
    assert rig.engine.weight_version is None
    rig.repair()
    assert rig.gap() < 1e-4


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("model.layers.1.self_attn.v_proj.weight", r"self_attn.qkv_proj received only a part"),
        ("model.layers.0.mlp.down_proj.weight", r"mlp.down_proj.weight received nothing"),
    ],
)
def test_a_tensor_that_the_trainer_never_announced_is_missed_by_the_engine(rig: Rig, name: str, complaint: str) -> None:
    sync = HostCopySync(
        lambda: ((known, tensor) for known, tensor in hf_named_weights(rig.model) if known != name),
        rig.engine,
        dtype="float32",
        probe=lambda ids: prompt_logprobs(rig.model, ids),
        probe_ids=IDS,
    )
    with pytest.raises(WeightSyncError, match=complaint):
        sync.publish(1, verify=False)
    assert rig.engine.weight_version is None
    rig.repair()


def test_unexpected_and_misshapen_tensors_are_refused_by_name(rig: Rig) -> None:
    first = rig.publish(verify=False)
    assert first.version == rig.version

    def wrong() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in hf_named_weights(rig.model):
            yield name, tensor[:-1] if name == "model.norm.weight" else tensor
        yield "model.layers.9.bonus", torch.zeros(2)

    rig.sent = wrong
    with pytest.raises(
        WeightSyncError, match=r"model.norm.weight is float32\[63\] instead of float32\[64\]; unexpected model.layers.9.bonus"
    ):
        rig.publish()
    assert rig.engine.weight_version is None
    rig.repair()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"])
def test_one_flipped_bit_fails_verification(rig: Rig, name: str) -> None:
    rig.engine.flip = name
    with pytest.raises(WeightSyncError, match=f"other bytes than the trainer sent: .*{name}"):
        rig.publish()
    assert rig.engine.weight_version is None
    rig.repair()


def test_a_trainer_that_moves_on_during_the_publication_fails_verification(rig: Rig) -> None:
    rig.publish()

    def moving() -> Iterator[tuple[str, torch.Tensor]]:
        yield from hf_named_weights(rig.model)
        with torch.no_grad():
            rig.model.model.norm.weight.add_(0.5)

    rig.sent = moving
    with pytest.raises(WeightSyncError):
        rig.publish()
    assert rig.engine.weight_version is None
    rig.repair()


def test_a_tied_head_goes_stale_without_being_packed_again(rig: Rig) -> None:
    """The trap: named_parameters() of a tied model has no head, and the engine keeps a packed copy of it."""
    rig.sent = lambda: rig.model.named_parameters()
    rig.sync._manifest = None
    perturb(rig.model, seed=7)
    rig.engine.skip = frozenset({"posttrain_repack_tied_head"})
    rig.publish(verify=False)
    assert rig.gap() > 0.1
    with pytest.raises(WeightSyncError, match="does not compute what the trainer computes"):
        rig.publish()
    rig.engine.skip = frozenset()
    rig.publish()
    assert rig.gap() < 1e-4
    rig.sync._manifest = None
    rig.repair()


def test_an_old_prefix_is_reused_unless_the_cache_is_dropped(rig: Rig) -> None:
    """The trap: keys and values of the old weights serve as the prefix of a request under the new ones."""
    prompt = (IDS * 3)[:100]
    asked = request(prompt, max_tokens=4)

    def gap() -> float:
        completion = only(rig, asked)
        expected = expected_logprobs(rig.model, asked, completion)
        return max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))

    assert gap() < 1e-3
    perturb(rig.model, seed=8)
    rig.engine.skip = frozenset({"drop_caches"})
    rig.publish()
    assert gap() > 0.01
    rig.engine.skip = frozenset()
    rig.publish()
    assert gap() < 1e-3
