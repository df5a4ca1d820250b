"""The metric reference is complete, and the committed page is the one it generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from posttrain.track.reference import METRICS, describe, metrics_page

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
LINE_KEYS = {"step", "model_step", "time_s"}


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == metrics_page(), "write posttrain.track.reference.metrics_page() to docs/metrics.md"


def test_the_page_lists_every_key_once_under_its_area() -> None:
    page = metrics_page()
    area = ""
    listed: list[str] = []
    for line in page.splitlines():
        if line.startswith("## "):
            area = line.removeprefix("## ")
        if line.startswith("| `"):
            key, unit, better, meaning = (cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|"))
            assert key.strip("`").startswith(f"{area}/")
            doc = METRICS[key.strip("`")]
            assert (unit, meaning) == (doc.unit, doc.meaning.replace("|", "¦"))
            assert better == {"up": "higher", "down": "lower", "none": ""}[doc.better]
            listed.append(key.strip("`"))
    assert listed == list(METRICS) and page.count("\n## ") == len({key.partition("/")[0] for key in METRICS})


def test_exact_entries_win_over_patterns_and_the_longest_pattern_over_others() -> None:
    assert describe("sync/gib") is METRICS["sync/gib"] and describe("sync/other") is METRICS["sync/*"]
    assert describe("reward/part/right") is METRICS["reward/part/*"]
    assert describe("nothing/like_it") is None


def test_the_shipped_objective_and_the_reward_service_report_nothing_undocumented() -> None:
    from posttrain.algorithm.grpo import METRIC_ADAPTER

    assert all(describe(name) is not None for name in METRIC_ADAPTER.names.values())


REUSE = (
    "rl.mini_batch_per_replica=16 rl.certified_deterministic_forward=true rl.kl_beta=0.1 rl.ref.build_ref=true rl.kl_coeff_clamp=5 "
    "rl.min_informative_groups_frac=1 rl.dynamic_sampling_on_budget_exhausted=proceed rl.dynamic_sampling_max_extra_rollouts=1"
)
CENTRED = "rl.score_centering.enabled=true rl.score_centering.top_k=16"


def lines_of_a_run(folder: Path, name: str, *arguments: str) -> list[dict[str, float]]:
    program = ["experiment=tiny", "tracker.report=false", "tracker.samples_every=0", "rl.max_steps=2", f"job.name={name}", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "posttrain", *program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "GOMP_SPINCOUNT": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (folder / f"outputs/posttrain/{name}/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    return lines


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """A run over two optimizer steps a batch with a reference and dynamic sampling, and a centred one."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: lines_of_a_run(folder, name, *given.split()) for name, given in (("reuse", REUSE), ("centred", CENTRED))}


@pytest.mark.slow
def test_every_metric_of_a_real_run_is_documented_and_every_entry_can_occur(runs: dict[str, list[dict[str, float]]]) -> None:
    written = {key for lines in runs.values() for line in lines for key in line} - LINE_KEYS
    assert {key for key in written if describe(key) is None} == set()
    by_name = {key for key in written if key in METRICS or key.startswith("time/")}
    assert written - by_name == set(), "these keys are only described by a pattern"
    # What these runs cannot show: parts of a reward, and the probe of an engine with weights of its own.
    elsewhere = {"reward/part/*", "sync/probe_gap", "sync/*"}
    never = {name for name in METRICS if not any(fnmatchcase(key, name) for key in written)}
    assert never <= elsewhere, never - elsewhere


@pytest.mark.slow
def test_keys_said_to_be_conditional_are(runs: dict[str, list[dict[str, float]]]) -> None:
    def having(name: str, key: str) -> list[bool]:
        return [key in line for line in runs[name]]

    assert having("reuse", "train/first_ratio_absdev") == [True, False] and having("centred", "train/first_ratio_absdev") == [False, False]
    conditional = {
        "reuse": {key for key in METRICS if key.startswith(("train/kl_", "train/grpo_dynamic_sampling_"))},
        "centred": {key for key in METRICS if key.startswith("train/sc_")},
    }
    for name, keys in conditional.items():
        other = "centred" if name == "reuse" else "reuse"
        assert len(keys) >= 5 and all(all(having(name, key)) and not any(having(other, key)) for key in keys)


@pytest.mark.slow
def test_the_batch_and_everything_sampled_are_told_apart(runs: dict[str, list[dict[str, float]]]) -> None:
    line = runs["reuse"][0]
    assert line["train/grpo_dynamic_sampling_dropped_groups"] == 4 and line["train/valid_sequence_count"] == 32
    assert line["rollout/tokens"] > line["train/valid_token_count"]
    assert line["train/zero_spread_frac"] == 1 - line["train/informative_groups"] / 4 != line["reward/zero_spread_frac"]
    line = runs["centred"][0]
    assert line["train/zero_spread_frac"] == line["reward/zero_spread_frac"]
