"""Run directories, seeds and provenance."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.config.compose import compose
from posttrain.config.resolve import resolve
from posttrain.runtime.provenance import collect, tree_digest, write_provenance
from posttrain.runtime.rundir import claim
from posttrain.runtime.seeding import derive_seed


def test_an_earlier_run_is_moved_aside_under_the_first_free_number(tmp_path: Path) -> None:
    run_dir = tmp_path / "group" / "name"
    assert claim(run_dir) is None and run_dir.is_dir()
    assert claim(run_dir) is None, "an empty directory is no run"
    for number in (1, 2):
        (run_dir / "metrics.jsonl").write_text(str(number))
        assert claim(run_dir) == run_dir.with_name(f"name.{number}")
        assert list(run_dir.iterdir()) == []
    assert [(tmp_path / "group" / f"name.{n}" / "metrics.jsonl").read_text() for n in (1, 2)] == ["1", "2"]


def test_seeds_are_fixed_for_ever_and_differ_by_purpose_and_id() -> None:
    # a literal, so that no change of the derivation goes unnoticed: it would change every run
    assert derive_seed(0, "rollout", 1, "a") == 509609801218102617
    seeds = {derive_seed(s, p, i) for s in (0, 1) for p in ("rollout", "held-out") for i in (1, "1", 12)}
    assert len(seeds) == 12 and all(0 <= seed < 2**63 for seed in seeds)


def test_provenance_names_code_data_and_packages(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    root = resolve(compose(["algorithm=grpo", "data=jsonl", f"rl.data.path={data}"]))
    record = collect(root)
    assert record["data"] == {"rl.data.path": "99a190d605ff2f2293897fcc97d966ab52d30975f7313d0601d05615d0089131"}
    assert record["packages"]["hydra-core"] == "1.3.8" and record["packages"]["torch"].startswith("2.13")
    first, second = (write_provenance(tmp_path, record) for _ in range(2))
    assert [first.name, second.name] == ["provenance.1.json", "provenance.2.json"]
    assert json.loads(first.read_text())["tree_sha256"] == record["tree_sha256"]


def test_the_tree_digest_follows_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = tree_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert tree_digest(tmp_path) != before
