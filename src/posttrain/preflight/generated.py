"""The sources that make their prompts: arithmetic and reasoning-gym."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from posttrain.config import PromptEnvConfig
from posttrain.config.base import nearest
from posttrain.data.arithmetic import COLUMNS as ARITHMETIC_COLUMNS
from posttrain.data.arithmetic import ArithmeticCorpus
from posttrain.data.reasoning_gym_source import COLUMNS as REASONING_COLUMNS
from posttrain.errors import DataError, Violation
from posttrain.preflight.facts import LongPrompt, PromptContent, SourceFacts
from posttrain.preflight.installed import Installed

COUNTED = 4096
"""Ranges up to so many problems are counted; larger ones cannot leave a split empty in practice."""


def arithmetic_facts(path: str, data: PromptEnvConfig) -> tuple[list[Violation], SourceFacts | None]:
    """Refuse a split without problems; the longest question stands for all."""
    node, key = data.arithmetic, f"{path}.arithmetic"
    count = node.high - node.low + 1
    if count < 1 or not node.operators or data.split not in ("train", "held_out") or any(op not in "+-*" for op in node.operators):
        return [], None  # refused by the node itself
    rows = None
    if count**2 * len(node.operators) <= COUNTED:
        try:
            rows = len(ArithmeticCorpus(node, split=data.split))
        except DataError:
            share = node.held_out_fraction
            rule = f"leaves split={data.split} without problems: none of {node.low}..{node.high} falls into it at held_out_fraction={share}"
            return [Violation(f"{key}.high", node.high, rule, f"widen the range or change {key}.held_out_fraction")], None
    widest = max((str(node.low), str(node.high)), key=len)
    text = node.template.replace("{a}", widest).replace("{op}", node.operators[0]).replace("{b}", widest)
    content: PromptContent = ({"role": "user", "content": text},) if node.chat else text
    conversation = (f"{key}.chat", f"{key}.chat=true asks in a user turn") if node.chat else None
    longest = (LongPrompt(f"{key}.template", node.template, f"the question {text[:60]!r}", content),)
    return [], SourceFacts(ARITHMETIC_COLUMNS, complete=True, conversation=conversation, longest=longest, rows=rows)


def reasoning_gym_facts(path: str, data: PromptEnvConfig, *, installed: Installed) -> tuple[list[Violation], SourceFacts | None]:
    """Refuse a missing library, an unknown data set, and parameters that the split decides."""
    node, key = data.reasoning_gym, f"{path}.reasoning_gym"
    if not installed("reasoning_gym"):
        rule = "needs the reasoning-gym library, which is not installed"
        return [Violation(f"{key}.dataset", node.dataset, rule, "pip install 'posttrain[reasoning]'")], None
    known = dataset_names()
    if known and node.dataset not in known:
        return [Violation(f"{key}.dataset", node.dataset, "is no data set of reasoning-gym", nearest(node.dataset, sorted(known)))], None
    owned = sorted({"seed", "size"} & node.config.keys())
    found = [
        Violation(f"{key}.config.{name}", node.config[name], "is decided by the split and the size", f"drop it; {key}.size sets the size")
        for name in owned
    ]
    conversation = (f"{key}.dataset", "reasoning-gym questions are asked in a user turn")
    # Whether a reference exists depends on the data set, which only the library itself can tell.
    return found, SourceFacts(REASONING_COLUMNS, complete=True, conversation=conversation, rows=node.size)


def dataset_names() -> frozenset[str]:
    """Names that reasoning-gym registers, read from its source text: importing it takes seconds. Empty when that fails."""
    spec = importlib.util.find_spec("reasoning_gym")
    names: set[str] = set()
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(location).rglob("*.py"):
            text = file.read_text(encoding="utf-8", errors="replace")
            if "register_dataset(" not in text:
                continue
            constants = dict(re.findall(r'^(\w+)\s*=\s*"([^"]+)"', text, re.MULTILINE))
            for literal, constant in re.findall(r'^\s*register_dataset\(\s*(?:"([^"]+)"|(\w+))', text, re.MULTILINE):
                names.add(literal or constants.get(constant, ""))
    return frozenset(names - {""})
