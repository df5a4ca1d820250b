"""Where the shipped configuration is."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The shipped conf/: inside the package when installed from a wheel, beside src/ when editable."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package.parents[1] / "conf", package / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"posttrain's conf/ is not installed beside {package}")
