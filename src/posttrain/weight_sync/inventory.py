"""A receiver's book of what a publication must bring and what came."""

from __future__ import annotations

from posttrain.weight_sync.protocol import Manifest, TensorSpec


class Inventory:
    """Checks arriving tensors against a manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._missing = dict(manifest)
        self._problems: list[str] = []
        self._manifest = manifest

    def accept(self, name: str, spec: TensorSpec) -> bool:
        """Book one tensor; False means that it must not be loaded."""
        expected = self._manifest.get(name)
        if expected is None:
            self._problems.append(f"unexpected {name} {list(spec.shape)}")
            return False
        if self._missing.pop(name, None) is None:
            self._problems.append(f"{name} came twice")
            return False
        if spec != expected:
            self._problems.append(
                f"{name} is {spec.dtype}{list(spec.shape)} instead of {expected.dtype}{list(expected.shape)}",
            )
            return False
        return True

    def problems(self) -> list[str]:
        """One sentence for everything that is wrong; empty when the publication is complete."""
        return [*self._problems, *(f"missing {name} {list(spec.shape)}" for name, spec in self._missing.items())]


def summarize(problems: list[str], limit: int = 12) -> str:
    """The first problems in words, and how many more there are."""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more
