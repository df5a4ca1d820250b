"""`rl.optimizer.name=fusedadam`: refused without its machine; the update itself needs one."""

from __future__ import annotations

import pytest
import torch

from posttrain.config import OptimizerConfig
from posttrain.errors import ConfigError
from posttrain.trainer.optim import build_optimizer

CONFIG = OptimizerConfig(name="fusedadam", lr=1e-4, weight_decay=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rl\.optimizer\.name='fusedadam': needs a GPU.*transformer-engine"):
        build_optimizer(CONFIG, torch.nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bf16_weights_follow_float32_masters() -> None:
    """Updates below bf16's resolution add up in the masters: after 200 steps the weights are those of float32 AdamW, rounded."""
    pytest.importorskip("transformer_engine.pytorch")
    torch.manual_seed(0)
    low = torch.nn.Linear(64, 64, device="cuda").bfloat16()
    exact = torch.nn.Linear(64, 64, device="cuda")
    exact.load_state_dict({name: tensor.float() for name, tensor in low.state_dict().items()})
    optimizer = build_optimizer(CONFIG, low)
    plain = torch.optim.AdamW(exact.parameters(), lr=1e-4, weight_decay=0.1)
    for _ in range(200):
        for a, b in zip(low.parameters(), exact.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.float()
        optimizer.step()
        plain.step()
    for a, b in zip(low.parameters(), exact.parameters(), strict=True):
        state = optimizer.state[a]
        assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq", "master_param")} == {torch.float32}
        assert torch.allclose(state["master_param"], b, atol=1e-5)
        assert torch.equal(a, state["master_param"].bfloat16())
