"""A mixture of experts in this process: experts arrive under their checkpoint names and are packed again."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_vllm_support import engine, perturb, prompt_logprobs, request, save, tiny_model, vllm_marks

from posttrain.errors import WeightSyncError
from posttrain.model.converter import hf_named_weights
from posttrain.weight_sync.host import HostCopySync

pytestmark = vllm_marks

IDS = list(range(40, 84))


def test_experts_follow_the_trainer_only_if_their_kernels_are_renewed(tmp_path: Path) -> None:
    model = tiny_model("moe", tied=False)
    # Without rollout.max_model_len the engine takes the model's own limit, as far as the KV cache holds it.
    served = engine(save(model, tmp_path))
    assert served.max_model_len == 512
    sync = HostCopySync(
        lambda: hf_named_weights(model), served, dtype="float32", probe=lambda ids: prompt_logprobs(model, ids), probe_ids=IDS
    )
    try:
        metrics = sync.publish(0, verify=True).metrics
        # All but the experts can be shown, and those stand behind the probe.
        sizes = {name: tensor.numel() for name, tensor in hf_named_weights(model)}
        shown = sum(size for name, size in sizes.items() if ".experts." not in name)
        assert metrics["sync/verified_gib_frac"].value == pytest.approx(shown / sum(sizes.values()))
        for version in (1, 2):
            perturb(model, seed=version)
            assert sync.publish(version, verify=True).metrics["sync/probe_gap"].value < 1e-4

        # The trap is silent where vLLM need not pad the experts (a multiple of 32); elsewhere the load fails loudly.
        served.skip = frozenset({"posttrain_forget_moe_kernels"})
        with pytest.raises(WeightSyncError, match="does not compute what the trainer computes"):
            sync.publish(3, verify=True)
        assert served.weight_version is None
        served.skip = frozenset()
        assert sync.publish(4, verify=True).metrics["sync/probe_gap"].value < 1e-4

        served.flip = "model.layers.1.mlp.experts.2.up_proj.weight"
        with pytest.raises(WeightSyncError, match="does not compute what the trainer computes"):
            sync.publish(5, verify=True)
        served.flip, served.drop = None, "model.layers.1.mlp.experts.2.up_proj.weight"
        with pytest.raises(WeightSyncError, match=r"missing model.layers.1.mlp.experts.2.up_proj.weight \[64, 64\]"):
            sync.publish(6, verify=True)
        served.drop = None
        sync.publish(7, verify=True)
        completion = served.generate([request(IDS, seed=3)])[0].completions[0]
        expected = prompt_logprobs(model, IDS + list(completion.token_ids))[len(IDS) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-3)
        assert completion.weight_version == 7
    finally:
        served.close()
