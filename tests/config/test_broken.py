"""Broken configurations through the real program: refused in seconds, the key and the rule in one message, torch never imported."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from posttrain.model.native.byte_tokenizer import byte_level_tokenizer
from posttrain.preflight import inspect_overrides

BUDGET_S = 3.0
"""CPU seconds of one refusal; wall time would measure the neighbours on a shared machine."""

PROGRAM = """\
import os, sys
for name in os.environ["HIDDEN"].split():
    sys.modules[name] = None
from posttrain.app import main
code = 0
try:
    main(["check", *sys.argv[1:]])
except SystemExit as exit:
    code = exit.code
heavy = [name for name in ("torch", "transformers", "vllm", "datasets", "wandb") if sys.modules.get(name)]
if heavy:
    print("imported", *heavy)
    code = 99
sys.exit(code)
"""


@dataclass(frozen=True)
class Broken:
    """One configuration that must not start."""

    overrides: str
    expected: dict[str, str]
    """Fragment of the rule by key."""
    hidden: str = ""
    """Packages to pretend away."""
    environment: dict[str, str] = field(default_factory=dict)


CASES = {
    "unknown_key": Broken("rl.sed=1", {"rl.sed": "is not a key of GRPOConfig; did you mean 'seed'?"}),
    "unknown_key_with_plus": Broken("+rl.foo=3", {"rl.foo": "is not a key of GRPOConfig"}),
    "unknown_key_with_two_pluses": Broken("++rl.optimizer.learning_rate=1", {"rl.optimizer.learning_rate": "not a key of OptimizerConfig"}),
    "unknown_top_level": Broken("modle=tiny", {"modle": "did you mean 'model'?"}),
    "retired_objective": Broken("rl.objective=clipped", {"rl.objective": "is not a key of GRPOConfig"}),
    "retired_objective_mode": Broken("rl.objective_mode=direct", {"rl.objective_mode": "is not a key of GRPOConfig"}),
    "key_of_another_engine": Broken("rollout.max_num_seqs=4", {"rollout.max_num_seqs": "set rollout=vllm"}),
    "text_for_integer": Broken("rl.max_steps=abc", {"rl.max_steps": "must be an integer"}),
    "fraction_for_integer": Broken("rl.group_size=2.5", {"rl.group_size": "must be an integer"}),
    "text_for_number": Broken("rl.optimizer.lr=fast", {"rl.optimizer.lr": "must be a number"}),
    "text_for_boolean": Broken("rl.data.shuffle=maybe", {"rl.data.shuffle": "must be true or false"}),
    "number_for_list": Broken("rl.optimizer.betas=0.9", {"rl.optimizer.betas": "must be a list of numbers"}),
    "null_for_integer": Broken("rl.seed=null", {"rl.seed": "must be an integer"}),
    "value_for_section": Broken("rl.optimizer=adamw", {"rl.optimizer": "is a section (OptimizerConfig)"}),
    "unknown_option": Broken("algorithm=ppo", {"algorithm": "known: dapo, dr_grpo, grpo, gspo, legacy_pg"}),
    "unknown_experiment": Broken("experiment=tinny", {"experiment": "did you mean 'tiny'?"}),
    "no_equals_sign": Broken("rl.seed", {"rl.seed": "must read KEY=VALUE"}),
    "open_bracket": Broken("rl.optimizer.betas=[0.9", {"rl.optimizer.betas": "has an unbalanced bracket"}),
    "open_quote": Broken("rl.data.path='abc", {"rl.data.path": "has an unbalanced quote"}),
    "sweep_in_one_run": Broken("rl.seed=1,2", {"rl.seed": "add -m"}),
    "lost_interpolation": Broken("rl.seed=${nope}", {"rl.seed": "'nope' not found"}),
    "mandatory_value": Broken("model=hf", {"model.name_or_path": "has no value"}),
    "choice": Broken("rl.loss_type=token_mean", {"rl.loss_type": "did you mean 'token-mean'?"}),
    "bound": Broken("rollout.top_p=1.5", {"rollout.top_p": "must be <= 1.0"}),
    "not_finite": Broken("rl.optimizer.eps=nan", {"rl.optimizer.eps": "must be a finite number"}),
    "pending": Broken("algorithm=grpo rl.routing_replay=rollout", {"rl.routing_replay": "is not available yet"}),
    "group_does_not_divide_batch": Broken(
        "rl.batch_per_replica=30 rl.group_size=8", {"rl.batch_per_replica": "must be a positive multiple of rl.group_size=8"}
    ),
    "mini_does_not_divide_batch": Broken(
        "algorithm=grpo rl.certified_deterministic_forward=true rl.mini_batch_per_replica=12",
        {"rl.mini_batch_per_replica": "must divide rl.batch_per_replica=32"},
    ),
    "grad_accum": Broken("rl.grad_accum=2", {"rl.grad_accum": "use rl.micro_batch_per_replica"}),
    "legacy_pg_with_clip": Broken("rl.epsilon_low=0.1", {"rl.epsilon_low": "is never read by grpo_surrogate=legacy_pg"}),
    "kl_without_reference": Broken("algorithm=grpo rl.kl_beta=0.1", {"rl.kl_beta": "needs a frozen reference"}),
    "reference_without_weights": Broken(
        "algorithm=grpo rl.kl_beta=0.1 rl.ref.build_ref=true rl.ref.model_dir={tmp}", {"rl.ref.model_dir": "holds no weight file"}
    ),
    "reference_nowhere": Broken(
        "algorithm=grpo rl.kl_beta=0.1 rl.ref.build_ref=true rl.ref.model_dir={tmp}/none", {"rl.ref.model_dir": "is not a directory"}
    ),
    "unbounded_kl_clamp": Broken(
        "algorithm=grpo rl.kl_beta=0.1 rl.ref.build_ref=true rl.kl_coeff_clamp=20", {"rl.kl_coeff_clamp": "must be < 20"}
    ),
    "gspo_with_dual_clip": Broken("algorithm=gspo rl.lower_bound_ratio=3", {"rl.lower_bound_ratio": "must be 0 with rl.importance"}),
    "gspo_uncertified": Broken(
        "algorithm=gspo rl.certified_deterministic_forward=false", {"rl.certified_deterministic_forward": "cached over n_mini=4"}
    ),
    "dr_grpo_with_wide_epsilon": Broken("algorithm=dr_grpo rl.optimizer.eps=1e-6", {"rl.optimizer.eps": "is not the step size"}),
    "both_recipe_guards": Broken(
        "algorithm=dr_grpo rl.optimizer.eps=1e-6 rl.min_informative_groups=1",
        {"rl.optimizer.eps": "recipe_guard_severity=error", "rl.min_informative_groups": "recipe_guard_severity=error"},
    ),
    "dapo_with_two_quotas": Broken("algorithm=dapo rl.min_informative_groups=2", {"rl.min_informative_groups": "both set the quota"}),
    "refill_without_quota": Broken(
        "algorithm=grpo rl.dynamic_sampling_refill_dispatch=whole_budget",
        {"rl.dynamic_sampling_refill_dispatch": "is read only while a quota"},
    ),
    "quota_not_finite": Broken("algorithm=grpo rl.min_informative_groups_frac=nan", {"rl.min_informative_groups_frac": "must be a finite"}),
    "centering_with_mini_batches": Broken(
        "algorithm=grpo rl.score_centering.enabled=true rl.mini_batch_per_replica=16 rl.certified_deterministic_forward=true",
        {"rl.score_centering.enabled": "needs one optimizer step per batch"},
    ),
    "inert_centering": Broken("algorithm=grpo rl.score_centering.compose=tis", {"rl.score_centering.compose": "is read only with"}),
    "token_budget_below_one_sample": Broken(
        "algorithm=grpo rl.micro_batch_tokens=64 rl.data.max_prompt_tokens=40", {"rl.micro_batch_tokens": "must hold one sample"}
    ),
    "estimator_module": Broken(
        "algorithm=grpo rl.advantage_estimator=no_module.estimate", {"rl.advantage_estimator": "'no_module' was not found"}
    ),
    "estimator_and_unbiased": Broken(
        "algorithm=dr_grpo rl.advantage_estimator=posttrain.algorithm.grpo.build_objective",
        {"rl.unbiased_advantage": "computes the advantages"},
    ),
    "empty_batch": Broken("algorithm=grpo rl.batch_per_replica=0", {"rl.batch_per_replica": "must be a positive multiple"}),
    "raw_logprobs_tempered": Broken(
        "algorithm=grpo rl.use_rollout_logprobs_for_loss=true rl.temperature=0.5 rollout.temperature=0.5",
        {"rl.use_rollout_logprobs_for_loss": "needs rollout.temperature=rl.temperature=1.0"},
    ),
    "negative_alarm": Broken("tracker.alarms.logprob_gap=-1", {"tracker.alarms.logprob_gap": "must be >= 0"}),
    "greedy_groups": Broken("rollout.temperature=0", {"rollout.temperature": "grouped rollout needs >= 0.01"}),
    "warped_sampling": Broken("rollout.top_k=50", {"rollout.top_k": "on-policy"}),
    "ray_grid": Broken("grid=colocated", {"grid.backend": "is not available yet"}),
    "missing_file": Broken("data=jsonl rl.data.path={tmp}/none.jsonl", {"rl.data.path": "does not exist"}),
    "no_file": Broken("data=jsonl", {"rl.data.path": ""}),
    "directory_for_file": Broken("data=jsonl rl.data.path={tmp}", {"rl.data.path": "is a directory"}),
    "empty_file": Broken("data=jsonl rl.data.path={tmp}/empty.jsonl", {"rl.data.path": "holds no rows"}),
    "malformed_line": Broken("data=jsonl rl.data.path={tmp}/malformed.jsonl", {"rl.data.path": "line 3 is not JSON"}),
    "missing_prompt_column": Broken(
        "data=jsonl rl.data.path={tmp}/good.jsonl rl.data.prompt_column=question",
        {"rl.data.prompt_column": "has no prompt column 'question'"},
    ),
    "missing_response_column": Broken(
        "data=jsonl rl.data.path={tmp}/good.jsonl rl.data.response_column=label",
        {"rl.data.response_column": "has no response column 'label'"},
    ),
    "missing_reward_column": Broken(
        "data=jsonl rl.data.path={tmp}/good.jsonl rl.data.response_column=''", {"rl.reward": "reads column 'reference'"}
    ),
    "no_chat_template": Broken(
        "model=hf model.name_or_path={tmp}/untemplated data=jsonl rl.data.path={tmp}/chat.jsonl",
        {"model.name_or_path": "its tokenizer has no chat template"},
    ),
    "no_chat_template_arithmetic": Broken(
        "model=hf model.name_or_path={tmp}/untemplated", {"model.name_or_path": "its tokenizer has no chat template"}
    ),
    "prompt_exceeds_context": Broken(
        "data=jsonl rl.data.path={tmp}/long.jsonl rollout.max_tokens=100",
        {"rl.data.path": "line 2 is a prompt of 450 tokens, which with rollout.max_tokens=100 exceeds 512"},
    ),
    "completion_exceeds_context": Broken("rollout.max_tokens=512", {"rollout.max_tokens": "leaves no room for a prompt in 512 tokens"}),
    "prompt_limit_exceeds_context": Broken(
        "rl.data.max_prompt_tokens=300 rollout.max_tokens=300", {"rl.data.max_prompt_tokens": "plus rollout.max_tokens=300 exceeds 512"}
    ),
    "engine_shorter_than_prompt": Broken(
        "rollout=vllm rollout.max_model_len=38 rollout.max_tokens=20", {"rl.data.arithmetic.template": "exceeds 38 tokens"}
    ),
    "engine_longer_than_model": Broken("rollout=vllm rollout.max_model_len=4096", {"rollout.max_model_len": "must be <= 512"}),
    "missing_model": Broken("model=hf model.name_or_path={tmp}/nowhere", {"model.name_or_path": "is no directory on this machine"}),
    "model_without_config": Broken("model=hf model.name_or_path={tmp}", {"model.name_or_path": "without config.json"}),
    "missing_model_package": Broken(
        "model=hf model.name_or_path=package:no_such_package/x.gguf", {"model.name_or_path": "'no_such_package' is not installed"}
    ),
    "hub_model_offline": Broken(
        "model=hf model.name_or_path=nobody/nothing", {"model.name_or_path": "not in the hub cache"}, environment={"HF_HUB_OFFLINE": "1"}
    ),
    "tiny_setting": Broken("model.model_config.hiden_size=8", {"model.model_config.hiden_size": "is no setting of the tiny builder"}),
    "vllm_missing": Broken("rollout=vllm", {"rollout": "needs vLLM, which is not installed"}, hidden="vllm"),
    "wandb_missing": Broken("tracker=wandb", {"tracker.wandb.mode": "needs wandb"}, hidden="wandb"),
    "datasets_missing": Broken("data=gsm8k", {"rl.data.name": "needs the datasets library"}, hidden="datasets"),
    "reasoning_gym_missing": Broken(
        "data=reasoning_gym", {"rl.data.reasoning_gym.dataset": "needs the reasoning-gym library"}, hidden="reasoning_gym"
    ),
    "math_missing": Broken("rl.reward=math", {"rl.reward": "needs the math_verify library"}, hidden="math_verify"),
    "reasoning_gym_name": Broken(
        "data=reasoning_gym rl.data.reasoning_gym.dataset=chain_sums", {"rl.data.reasoning_gym.dataset": "did you mean 'chain_sum'?"}
    ),
    "unknown_reward": Broken("rl.reward=arithmatic", {"rl.reward": "did you mean 'arithmetic'?"}),
    "validation_reward": Broken(
        "rl.validation.num_prompts=4 rl.validation.reward=nope", {"rl.validation.reward": "is not in the reward catalog"}
    ),
    "validation_file": Broken(
        "rl.validation.num_prompts=4 rl.validation.data.path={tmp}/none.jsonl rl.validation.data.prompt_column=prompt "
        "rl.validation.data.response_column=answer",
        {"rl.validation.data.path": "does not exist"},
    ),
    "objective_module": Broken("rl.objective_builder=no_module.build", {"rl.objective_builder": "'no_module' was not found"}),
    "objective_name": Broken(
        "rl.objective_builder=posttrain.algorithm.grpo.build_objektive", {"rl.objective_builder": "did you mean 'build_objective'?"}
    ),
    "objective_lambda": Broken('rl.objective_builder="my.module.<lambda>"', {"rl.objective_builder": "names a lambda"}),
    "catalog_module": Broken("rl.reward_provider_catalog=no_module.catalog", {"rl.reward_provider_catalog": "'no_module' was not found"}),
    "builder_module": Broken("model.builder=tiny", {"model.builder": "must be a dotted path"}),
    "output_through_file": Broken("job.output_root={tmp}/good.jsonl/runs", {"job.output_root": "which is a file"}),
    "output_unwritable": Broken("job.output_root=/proc/nowhere", {"job.output_root": "is not writable"}),
    "run_name": Broken("job.name=a/b", {"job.name": "must be one directory name"}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Broken and good inputs on disk."""
    tmp = tmp_path_factory.mktemp("broken")
    good = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(4)]
    (tmp / "good.jsonl").write_text("\n".join(good) + "\n")
    (tmp / "empty.jsonl").write_text("\n\n")
    (tmp / "malformed.jsonl").write_text("\n".join([good[0], good[1], '{"prompt": "x"', good[2]]) + "\n")
    (tmp / "long.jsonl").write_text("\n".join([good[0], json.dumps({"prompt": "a" * 450, "answer": "b"})]) + "\n")
    (tmp / "chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}) + "\n")
    model = tmp / "untemplated"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 2048}))
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    byte_level_tokenizer().save(str(model / "tokenizer.json"))
    return tmp


def check(arguments: list[str], *, hidden: str = "", environment: dict[str, str] | None = None) -> tuple[int, str, float]:
    """Exit code, standard error and CPU seconds of `posttrain check`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = {**os.environ, "HIDDEN": hidden, **(environment or {})}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, env=variables, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert not done.stdout, done.stdout
    return done.returncode, done.stderr, seconds


def arguments_of(case: Broken, tmp: Path) -> list[str]:
    return [part.replace("{tmp}", str(tmp)) for part in case.overrides.split()]


@pytest.mark.parametrize("name", CASES)
def test_check_refuses(name: str, files: Path) -> None:
    case = CASES[name]
    code, message, seconds = check(arguments_of(case, files), hidden=case.hidden, environment=case.environment)
    assert code == 2, message
    assert "Traceback" not in message
    assert message.startswith("posttrain: the configuration breaks ")
    for key, rule in case.expected.items():
        lines = [line for line in message.splitlines() if line.startswith(f"  {key}=")]
        assert lines, f"{key} is not in the message:\n{message}"
        assert any(rule in line for line in lines), f"{rule!r} is not in the message:\n{message}"
        assert all("; " in line for line in lines), "a violation ends with what to do about it"
    assert seconds <= BUDGET_S


def test_there_are_at_least_thirty() -> None:
    assert len(CASES) >= 30


def test_check_lists_every_violation_in_one_message() -> None:
    broken = ["rl.sed=1", "rl.max_steps=abc", "algorithm=ppo", "rl.group_size=7", "rollout.top_k=50", "job.name=a/b"]
    code, message, seconds = check([*broken, "rl.optimizer.betas=[0.9"])
    assert code == 2
    assert message.startswith("posttrain: the configuration breaks 7 rules:")
    for key in ("rl.sed", "rl.max_steps", "algorithm", "rl.batch_per_replica", "rollout.top_k", "job.name", "rl.optimizer.betas"):
        assert f"\n  {key}=" in message
    assert seconds <= BUDGET_S


def test_one_call_reports_the_configuration_and_the_world_it_would_run_in(files: Path) -> None:
    broken = [
        "data=jsonl",
        f"rl.data.path={files}/none.jsonl",
        "rl.group_size=7",
        "rl.reward=nope",
        "rollout=vllm",
        "rl.sed=1",
        f"job.output_root={files}/good.jsonl",
    ]
    root, found = inspect_overrides(broken, installed=lambda package: package != "vllm")
    assert root is None
    keys = {violation.key for violation in found}
    assert keys == {"rl.data.path", "rl.batch_per_replica", "rl.reward", "rollout", "rl.sed", "job.output_root"}


def test_check_of_a_good_configuration_imports_nothing_heavy() -> None:
    sizes = ["algorithm=grpo", "rl.batch_per_replica=16", "rl.group_size=4", "rl.micro_batch_per_replica=8"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *sizes], capture_output=True, text=True, env={**os.environ, "HIDDEN": ""}, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imported" not in done.stdout
    assert "4 prompts x 4 completions = 16 per step -> 1 optimizer step of 2 micro-batches x 8" in done.stdout


def test_check_leaves_nothing_behind(tmp_path: Path) -> None:
    root, found = inspect_overrides(["experiment=tiny", f"job.output_root={tmp_path}/a/b"])
    assert (root is not None, found) == (True, [])
    assert list(tmp_path.iterdir()) == []
