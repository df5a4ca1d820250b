"""The built wheel carries everything a run needs and works from any directory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_wheel_runs_without_the_source_tree(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(tmp_path), "--quiet"]
    subprocess.run(build, check=True, timeout=240, capture_output=True)
    (wheel,) = tmp_path.glob("posttrain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    shipped = {f"posttrain/conf/{path.relative_to(ROOT / 'conf').as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert shipped <= names
    assert {"posttrain/track/report_template.html", "posttrain/track/report.css", "posttrain/track/report.js"} <= names

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # -S -I would drop the environment's packages too: the wheel only has to come first, ahead of the editable install
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = "import posttrain, sys; sys.stdout.write(posttrain.__file__)"
    located = subprocess.run([sys.executable, "-c", where], env=environment, cwd=elsewhere, capture_output=True, text=True, check=True)
    assert located.stdout.startswith(str(tmp_path / "site"))
    command = [sys.executable, "-m", "posttrain", "experiment=tiny", "rl.max_steps=1"]
    done = subprocess.run(command, env=environment, cwd=elsewhere, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (elsewhere / "outputs/posttrain/tiny/report.html").is_file()
