"""Process-wide settings of the test run."""

from __future__ import annotations

import os

# Idle OpenMP threads that spin starve every other process of a small machine; read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
