"""The part of a weight update that runs beside vLLM's model, in whatever process that lives.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls the methods through `LLM.collective_rpc`. Methods
return problems instead of raising them: an exception loses its type on the way out of an engine process. Written against
vLLM 0.32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.rollout.vllm_readback import readable_weights
from posttrain.weight_sync.digest import dtype_name, tensor_digest
from posttrain.weight_sync.inventory import Inventory
from posttrain.weight_sync.protocol import TensorSpec

WireTensor = tuple[str, str, Sequence[int], bytes]
"""(name, dtype, shape, bytes): plain types only, so that no pickle crosses the process border."""


class _Update:
    """One update under way."""

    def __init__(self, manifest: dict[str, TensorSpec], parameters: set[str]) -> None:
        self.manifest = manifest
        self.inventory = Inventory(manifest)
        self.unloaded = parameters
        """Parameters of vLLM's model that no received tensor has reached yet."""


class WeightUpdateExtension:
    """Receives checkpoint tensors into a live vLLM model."""

    model_runner: Any
    vllm_config: Any
    """Both are the worker's own."""
    posttrain_update: _Update | None = None
    posttrain_shapes: dict[str, TensorSpec] | None = None

    def posttrain_forget_moe_kernels(self) -> int:
        """Make the next load of each MoE layer a first load, and return how many there are.

        On a repeated load vLLM's CPU backend skips the packing of experts and feeds plain weights to kernels that expect packed
        ones: wrong numbers, no error. On other platforms the kernels read the parameters and must stay (CUDA graphs hold them).
        """
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return 0
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        methods = [getattr(layer, "quant_method", None) for layer in self._posttrain_model().modules()]
        experts = [method for method in methods if isinstance(method, UnquantizedFusedMoEMethod)]
        for method in experts:
            method.moe_kernel = None
        return len(experts)

    def posttrain_begin(self, manifest: Sequence[tuple[str, Sequence[int], str]]) -> None:
        """Put every layer into its loading state."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self._posttrain_model()
        self._posttrain_abandon(model)
        specs = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in manifest}
        # Tied parameters are listed once here, as long as the model is in its serving state.
        self.posttrain_update = _Update(specs, {name for name, _ in model.named_parameters()})
        self.posttrain_shapes = None
        with self._posttrain_context():
            initialize_layerwise_reload(model)

    def posttrain_receive_tensors(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load a bucket that lives in this process."""
        update = self._posttrain_under_way()
        known = [
            (name, tensor)
            for name, tensor in bucket
            if update.inventory.accept(name, TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype)))
        ]
        with self._posttrain_context():
            loaded: set[str] = self.model_runner.get_model().load_weights(iter(known))
        update.unloaded -= loaded

    def posttrain_receive_bytes(self, bucket: Sequence[WireTensor]) -> None:
        """Load a bucket that came from another process."""
        # frombuffer wants writable memory, and the layers keep the tensors until they are complete.
        self.posttrain_receive_tensors(
            [
                (name, torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(tuple(shape)))
                for name, dtype, shape, data in bucket
            ]
        )

    def posttrain_install(self) -> list[str]:
        """Leave the loading state; returns what is wrong, in which case the update stays unfinished."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        update = self._posttrain_under_way()
        model = self._posttrain_model()
        problems = update.inventory.problems()
        if not problems:
            problems = [f"the engine's {name} received nothing" for name in sorted(update.unloaded)]
            problems += [f"the engine's {name} received only a part" for name in _incomplete_linears(model)]
        if problems:
            return problems
        with self._posttrain_context():
            finalize_layerwise_reload(model, self.model_runner.model_config)
        self.posttrain_update, self.posttrain_shapes = None, update.manifest
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        return []

    def posttrain_repack_tied_head(self) -> int:
        """Pack the head of a model with tied embeddings again, and return how many heads that were.

        vLLM's CPU backend multiplies with a packed copy of the head which a load of the embeddings does not touch: the copy
        would stay at the old weights, without an error. Elsewhere the head reads the embedding's own storage.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return 0
        modules = list(self._posttrain_model().modules())
        embeddings = {
            id(module.weight) for module in modules if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        }
        heads = [module for module in modules if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings]
        for head in heads:
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
        return len(heads)

    def posttrain_digests(self) -> dict[str, str]:
        """Digests of all installed tensors that the model can show."""
        if self.posttrain_shapes is None:
            return {}
        return {
            name: tensor_digest(tensor)
            for name, tensor in readable_weights(self._posttrain_model())
            if self.posttrain_shapes.get(name) == TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))
        }

    def _posttrain_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()

    @contextmanager
    def _posttrain_context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        # vLLM warns about every layer that only has derived buffers (rotary embeddings); what matters is checked here.
        reload_log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level = reload_log.level
        reload_log.setLevel(logging.ERROR)
        try:
            with torch.no_grad(), set_current_vllm_config(self.vllm_config):
                yield
        finally:
            reload_log.setLevel(level)

    def _posttrain_under_way(self) -> _Update:
        if self.posttrain_update is None:
            raise RuntimeError("no weight update is under way in this worker")
        return self.posttrain_update

    def _posttrain_abandon(self, model: torch.nn.Module) -> None:
        """Drop what an unfinished update buffered, so that its tensors cannot mix with those of the next one."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

        if self.posttrain_update is None:
            return
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        with self._posttrain_context():
            finalize_layerwise_reload(model, self.model_runner.model_config)
        self.posttrain_update = None


def _incomplete_linears(model: torch.nn.Module) -> list[str]:
    """Linear layers that got some of their elements but not all, such as a fused qkv without its v.

    vLLM would complete them with uninitialized memory. Embeddings are exempt: their padding rows are never loaded.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    incomplete: list[str] = []
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            info = get_layerwise_info(layer)
            if info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0):
                incomplete.append(name)
    return incomplete
