"""One policy over several ranks with FSDP2: every layer, and then the rest, is split over `dp_shard` ranks and repeated over
`dp_replicate`. A model is built without its weights and each rank reads only its own rows, so that no rank ever holds a whole copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.config.model import HFModelConfig
from posttrain.config.run import Precision, resolved_dtype
from posttrain.errors import ModelError
from posttrain.model.policy import CausalPolicy
from posttrain.model.protocol import BuiltModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Which file of a checkpoint directory holds which tensor."""

    directory: Path
    files: dict[str, str]

    @classmethod
    def find(cls, directory: Path) -> TensorFiles | None:
        """None where the weights are not in safetensors."""
        from safetensors import safe_open

        if (directory / INDEX).is_file():
            return cls(directory, dict(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]))
        if (directory / SINGLE).is_file():
            with safe_open(directory / SINGLE, framework="pt") as opened:
                return cls(directory, dict.fromkeys(opened.keys(), SINGLE))
        return None


def build_without_weights(config: HFModelConfig, *, precision: Precision) -> tuple[BuiltModel, TensorFiles] | None:
    """The module with its parameters on the meta device and its buffers computed, and where its weights are.

    Returns:
        None where the checkpoint's tensors are not the module's parameters one to one (fused experts, other file formats): such
        a model has to be built whole.

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from posttrain.model.sources import materialize

    source = materialize(config.name_or_path)
    common: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    try:
        directory = Path(source) if Path(source).is_dir() else _download(source)
        files = TensorFiles.find(directory)
        if files is None:
            return None
        tokenizer = AutoTokenizer.from_pretrained(directory, **common)
        settings = AutoConfig.from_pretrained(directory, **common)
        with _parameters_on_meta():
            module = AutoModelForCausalLM.from_config(
                settings, dtype=resolved_dtype(precision.master), attn_implementation=config.attn_implementation, **common
            )
        if (directory / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.name_or_path={config.name_or_path!r} cannot be loaded: {error}") from error
    if _missing(module, files):
        return None
    return BuiltModel(module.eval(), tokenizer, directory), files


def shard(policy: CausalPolicy, mesh: Any, *, precision: Precision) -> None:
    """Split the policy's parameters over the mesh, in place. Parameters that do not train must be frozen before.

    Gradients are summed over ranks, never averaged: the trainer divides once, by the weight of all ranks.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    compute = precision.master if precision.autocast else precision.param
    mixed = MixedPrecisionPolicy(
        param_dtype=resolved_dtype(compute) if compute != precision.master else None,
        reduce_dtype=resolved_dtype(precision.reduce) if precision.reduce != compute else None,
    )
    module = policy.module
    for layer in policy.layers():
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    # the root too gives its whole parameters back after a forward: a forward without a backward must leave shards behind
    fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    policy.enter_through_wrap()


def load_shards(module: torch.nn.Module, files: TensorFiles, mesh: Any) -> None:
    """Give a sharded module on the meta device memory, and read this rank's rows of every tensor."""
    from safetensors import safe_open

    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    rank, size = mesh["dp_shard"].get_local_rank(), mesh["dp_shard"].size()
    by_file: dict[str, list[tuple[str, Any]]] = {}
    for name, parameter in module.named_parameters():
        by_file.setdefault(files.files[_stored_name(module, name, files)], []).append((name, parameter))
    with torch.no_grad():
        for file, members in by_file.items():
            with safe_open(files.directory / file, framework="pt") as opened:
                for name, parameter in members:
                    stored = opened.get_slice(_stored_name(module, name, files))
                    shape = tuple(stored.get_shape())
                    if shape != tuple(parameter.shape):
                        raise ModelError(f"{files.directory / file}: {name} is {list(shape)}, the model needs {list(parameter.shape)}")
                    local = parameter.to_local()
                    rows = -(-shape[0] // size)
                    first = min(rank * rows, shape[0])
                    last = min(first + rows, shape[0])
                    if last - first != (local.shape[0] if local.numel() else 0):
                        raise ModelError(f"{name}: this rank holds {local.shape[0]} rows, not {first}..{last} of {shape[0]}")
                    if last > first:
                        local.copy_(stored[first:last])


def _stored_name(module: torch.nn.Module, name: str, files: TensorFiles) -> str:
    """A tied tensor may be stored under its other name."""
    if name in files.files:
        return name
    wanted = module.get_parameter(name)
    for other, parameter in module.named_parameters(remove_duplicate=False):
        if parameter is wanted and other in files.files:
            return other
    return name


def _missing(module: torch.nn.Module, files: TensorFiles) -> list[str]:
    """Parameters that no file holds, and tensors that no parameter takes (buffers aside)."""
    stored = set(files.files)
    lacking = [name for name, _ in module.named_parameters() if _stored_name(module, name, files) not in stored]
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)} | {name for name, _ in module.named_buffers()}
    persistent = [name for name, _ in module.named_buffers() if name in module.state_dict()]
    return [*lacking, *(stored - known), *persistent]


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters registered meanwhile take no memory; buffers, which no checkpoint stores, are computed as always."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
