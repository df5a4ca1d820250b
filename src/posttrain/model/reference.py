"""The frozen reference of the KL penalty: a second, gradient-free instance of the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.config.model import HFModelConfig, ModelConfig, NativePolicyBuildSpec
from posttrain.config.run import Precision, resolved_dtype
from posttrain.data.packer import PolicyBatch
from posttrain.errors import ConfigError, ModelError, Violation
from posttrain.model.build import build_model
from posttrain.model.policy import CausalPolicy
from posttrain.model.protocol import BuiltModel

OTHER_HEADS = ("classifier_", "summary_")
"""Rates of heads that a language model does not have; GPT-2's and GPT-NeoX's are above zero by default."""


class FrozenReference:
    """A `ReferenceScorer`: log-probabilities of a batch's labels under weights that never change. The objective is defined
    before any model is loaded, so the network is attached later."""

    def __init__(self, *, temperature: float, dtype: str) -> None:
        self._policy: CausalPolicy | None = None
        self._temperature, self._dtype = temperature, resolved_dtype(dtype)

    def attach(self, policy: CausalPolicy) -> None:
        """Freeze `policy` and score with it."""
        policy.module.eval().requires_grad_(False)
        self._policy = policy

    @torch.no_grad()
    def __call__(self, batch: PolicyBatch) -> torch.Tensor:
        if self._policy is None:
            raise ModelError("the frozen reference was asked for scores before its network was attached")
        return self._policy.score(batch, temperature=self._temperature, dtype=self._dtype).logprobs


def build_reference(config: ModelConfig, model_dir: str | None, *, precision: Precision) -> BuiltModel:
    """Built by the policy's own builder from the policy's own base weights, or from `model_dir` instead.

    Raises:
        ModelError: the directory cannot be read, or its weights do not fit the model.
    """
    if model_dir is None:
        return build_model(config, precision=precision)
    if isinstance(config, HFModelConfig):
        try:
            return build_model(replace(config, name_or_path=model_dir), precision=precision)
        except ModelError as error:
            raise ModelError(f"rl.ref.model_dir={model_dir!r} cannot be built: {error}") from error
    built = build_model(config, precision=precision)
    if isinstance(config, NativePolicyBuildSpec):
        _load_weights(built.module, Path(model_dir))
    return built


def refuse_live_dropout(module: Any) -> None:
    """The reference scores in evaluation mode and the policy trains in training mode: with dropout their log-ratio would be a
    dropout mask.

    Raises:
        ConfigError: a dropout layer or a dropout rate of the model's config is above zero.
    """
    live = {name: layer.p for name, layer in module.named_modules() if isinstance(layer, torch.nn.Dropout) and layer.p > 0}
    for name, value in vars(module.config.get_text_config()).items():
        if name.startswith(OTHER_HEADS):
            continue
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value > 0:
            live.setdefault(f"config.{name}", value)
    if live:
        named = ", ".join(f"{name}={rate:g}" for name, rate in list(live.items())[:4])
        raise ConfigError(
            [
                Violation(
                    "rl.ref.build_ref",
                    True,
                    f"needs a policy without live dropout, and this one has {named}",
                    "set the model's dropout rates to 0, or rl.kl_beta=0 rl.ref.build_ref=false",
                )
            ]
        )


def _load_weights(module: torch.nn.Module, folder: Path) -> None:
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.iterdir()):
        try:
            if file.suffix == ".safetensors":
                weights |= load_file(file)
            elif file.suffix == ".bin":
                weights |= torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # each format has errors of its own
            raise ModelError(f"rl.ref.model_dir={str(folder)!r}: {file.name} cannot be read: {error}") from error
    tied = set(getattr(module, "_tied_weights_keys", None) or ())
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ModelError(f"rl.ref.model_dir={str(folder)!r} does not fit the model: {error}") from error
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise ModelError(
            f"rl.ref.model_dir={str(folder)!r} does not fit the model: {len(missing)} missing tensors {missing[:3]}, "
            f"{len(unexpected)} unknown ones {unexpected[:3]}"
        )
