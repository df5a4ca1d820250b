"""Numbers, durations and sparklines as people read them in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """Three significant digits at most, without trailing zeros: 0.42, 2e-05, 1234, 12.3k."""
    if value is None:
        return "n/a"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 10_000:
        return f"{value / 1e6:.3g}M" if size >= 1e6 else f"{value / 1e3:.3g}k"
    if size >= 100:
        return f"{value:.0f}"
    if size < 1e-3:
        return f"{value:.1g}" if f"{value:.1e}".split("e")[0].endswith(".0") else f"{value:.1e}"
    return f"{value:.3g}"


def fixed(value: float | None) -> str:
    """Two decimals, for columns that must not jump: rewards and accuracies."""
    return "n/a" if value is None else f"{value:.2f}"


def duration(seconds: float) -> str:
    """0.4s, 5.1s, 3m12s, 2h05m, 3d04h."""
    if seconds < 59.95:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The last `width` values between their own minimum and maximum; a flat series sits in the middle."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return _BLOCKS[3] * len(shown)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in shown)
