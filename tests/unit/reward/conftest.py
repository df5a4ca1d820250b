from __future__ import annotations

from collections.abc import Mapping

import pytest

from posttrain.records import Completion, Prompt, RolloutGroup


def make_group(*texts: str, reference: object = None, prompt_id: str = "p1@0", representations: Mapping[str, object] | None = None):
    prompt = Prompt(id=prompt_id, content="ask", text="<ask>", token_ids=(1,), reference=reference, representations=representations or {})
    return RolloutGroup(prompt, tuple(Completion((7,), (-0.5,), "stop", 0, text) for text in texts))


@pytest.fixture
def group():
    return make_group
