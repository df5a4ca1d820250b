"""The resolved experiments as text; run this file to rewrite `golden/` after a change that is meant to alter them."""

from __future__ import annotations

from pathlib import Path

import yaml
from omegaconf import OmegaConf

from posttrain.config import resolve
from posttrain.config.compose import compose
from posttrain.config.locate import conf_dir

GOLDEN = Path(__file__).parent / "golden"


def experiments() -> list[str]:
    return sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


def resolved_text(experiment: str) -> str:
    """Every key of the resolved tree, in schema order."""
    root = resolve(compose([f"experiment={experiment}"]))
    plain = OmegaConf.to_container(OmegaConf.structured(root), resolve=True)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=140)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for stale in GOLDEN.glob("*.yaml"):
        stale.unlink()
    for name in experiments():
        (GOLDEN / f"{name}.yaml").write_text(resolved_text(name), encoding="utf-8")
        print(f"wrote golden/{name}.yaml")
