"""An engine in its own process, started from random weights: the same rules hold across the border, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Timer

import psutil
import pytest
from test_vllm_support import engine, prompt_logprobs, request, save, tiny_model, vllm_marks

from posttrain.errors import RolloutError, WeightSyncError
from posttrain.model.converter import hf_named_weights
from posttrain.weight_sync.host import HostCopySync

pytestmark = vllm_marks

IDS = list(range(40, 84))


def test_a_separate_process_serves_what_is_published_dies_loudly_and_leaves_nothing(tmp_path: Path) -> None:
    segments = set(os.listdir("/dev/shm"))
    model = tiny_model("llama", tied=False)
    served = engine(save(model, tmp_path), process="separate", load_format="dummy")
    assert served._processes is not None
    pids = served._processes.pids
    assert len(pids) >= 2 and os.getpid() not in pids
    sync = HostCopySync(
        lambda: hf_named_weights(model),
        served,
        dtype="float32",
        probe=lambda ids: prompt_logprobs(model, ids),
        probe_ids=IDS,
        bucket_bytes=60_000,
    )
    try:
        with pytest.raises(RolloutError, match="no weight version is committed"):
            served.generate([request(IDS)])
        metrics = sync.publish(0, verify=True).metrics
        assert metrics["sync/verified_gib_frac"].value == 1.0 and metrics["sync/probe_gap"].value < 1e-4
        group = served.generate([request(IDS, group_size=3, seed=2)])[0]
        for completion in group.completions:
            expected = prompt_logprobs(model, IDS + list(completion.token_ids))[len(IDS) - 1 :]
            assert completion.logprobs == pytest.approx(expected, abs=1e-3)

        served.flip = "model.layers.0.mlp.up_proj.weight"
        with pytest.raises(WeightSyncError, match=r"other bytes than the trainer sent: model.layers.0.mlp.up_proj.weight"):
            sync.publish(1, verify=True)
        served.flip, served.drop = None, "model.norm.weight"
        with pytest.raises(WeightSyncError, match=r"missing model.norm.weight \[64\]"):
            sync.publish(2, verify=False)
        served.drop = None
        sync.publish(3, verify=True)
        assert [c.token_ids for c in served.generate([request(IDS, group_size=3, seed=2)])[0].completions] == [
            c.token_ids for c in group.completions
        ]

        # Killed while a caller waits: without its own watch this client of vLLM would wait for ever.
        Timer(1.0, os.kill, (pids[0], signal.SIGKILL)).start()
        with pytest.raises(RolloutError, match=r"the vLLM engine failed while sampling: (EngineDead|ZMQ)Error.*start a new engine"):
            served.generate([request(IDS, group_size=16, seed=seed, max_tokens=400) for seed in range(8)])
        assert served.weight_version is None
        with pytest.raises(WeightSyncError, match="cannot be used for"):
            sync.publish(4, verify=False)
    finally:
        served.close()
        served.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert set(os.listdir("/dev/shm")) <= segments
