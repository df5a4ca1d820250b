"""Every prompt source a run will open."""

from __future__ import annotations

from posttrain.config import PromptEnvConfig, RunConfig
from posttrain.config.rules import repeated_prompts
from posttrain.errors import Violation
from posttrain.preflight.facts import SourceFacts
from posttrain.preflight.generated import arithmetic_facts, reasoning_gym_facts
from posttrain.preflight.hub import huggingface_facts
from posttrain.preflight.installed import Installed
from posttrain.preflight.jsonl import jsonl_facts


def inspect_sources(rl: RunConfig, *, installed: Installed) -> tuple[list[Violation], dict[str, SourceFacts]]:
    """Violations of the sources in use, and facts by config path of those that can be opened."""
    used = {"rl.data": rl.data}
    if rl.validation.num_prompts > 0:
        used["rl.validation.data"] = rl.validation.data
    found: list[Violation] = []
    facts: dict[str, SourceFacts] = {}
    for path, data in used.items():
        violations, known = _inspect(path, data, installed=installed)
        found += violations
        if known is not None:
            facts[path] = known
    held_out = facts.get("rl.validation.data")
    if held_out is not None and held_out.rows is not None:
        found += repeated_prompts(rl.validation.num_prompts, available=held_out.rows)
    return found, facts


def _inspect(path: str, data: PromptEnvConfig, *, installed: Installed) -> tuple[list[Violation], SourceFacts | None]:
    if data.kind == "jsonl":
        return jsonl_facts(path, data)
    if data.kind == "huggingface":
        return huggingface_facts(path, data, installed=installed)
    if data.kind == "reasoning_gym":
        return reasoning_gym_facts(path, data, installed=installed)
    return arithmetic_facts(path, data)
