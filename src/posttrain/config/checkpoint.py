"""Rules of the checkpoint lifecycle: what a selection may name, and which settings need which."""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.config.run import COMPONENTS, RunConfig
from posttrain.errors import Violation

RESUME = re.compile(r"auto|off|iter_\d{9}")

_BUCKET_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[^\s?#]*))?")
_ENDPOINT = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")


def split_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of s3://bucket/prefix, a url that the rules below let pass."""
    match = _BUCKET_URL.fullmatch(url)
    assert match is not None, url
    return match["bucket"], (match["prefix"] or "").strip("/")


def checkpoint_violations(path: str, rl: RunConfig) -> Iterator[Violation]:
    """Everything the checkpoint fields of one `rl` node can be refused for."""
    yield from _component_violations(f"{path}.checkpoint_components", rl.checkpoint_components)
    yield from _component_violations(f"{path}.validation.checkpoint_components", rl.validation.checkpoint_components)
    if not rl.validation.save_checkpoint and rl.validation.checkpoint_components != list(COMPONENTS):
        rule = f"is read only with {path}.validation.save_checkpoint=true"
        yield Violation(f"{path}.validation.checkpoint_components", list(rl.validation.checkpoint_components), rule, "set it, or drop this")
    if rl.validation.save_checkpoint and not rl.validation.num_prompts:
        rule = f"saves after evaluations, and {path}.validation.num_prompts=0 makes none"
        yield Violation(f"{path}.validation.save_checkpoint", True, rule, f"set {path}.validation.num_prompts")
    if not RESUME.fullmatch(rl.resume):
        yield Violation(f"{path}.resume", rl.resume, "must be auto, off or the name of a checkpoint", "e.g. auto, or iter_000000120")
    if "/" in rl.run_ts or rl.run_ts in (".", ".."):
        yield Violation(f"{path}.run_ts", rl.run_ts, "must be a plain directory name", "e.g. a date such as 2026-01-31T12-00")
    if rl.init_keys_to_skip_loading and not rl.init_from:
        rule = f"is read only with {path}.init_from"
        yield Violation(f"{path}.init_keys_to_skip_loading", list(rl.init_keys_to_skip_loading), rule, f"set {path}.init_from")
    yield from _store_violations(path, rl)
    if not (rl.save_every or rl.validation.save_checkpoint):
        for name, off in (
            ("save_async", False),
            ("keep_model_last", 0),
            ("keep_optim_last", None),
            ("checkpoint_components", [*COMPONENTS]),
        ):
            value = getattr(rl, name)
            if value != off:
                yield Violation(
                    f"{path}.{name}", value, f"is read only where the run saves: {path}.save_every is 0", f"set {path}.save_every"
                )


def _component_violations(key: str, chosen: list[str]) -> Iterator[Violation]:
    known = ", ".join(COMPONENTS)
    if not chosen:
        yield Violation(key, [], f"must name at least one of {known}", "leave it out to save everything")
    for name in dict.fromkeys(chosen):
        if name not in COMPONENTS:
            yield Violation(key, name, f"must be one of {known}", "correct the name")
        elif chosen.count(name) > 1:
            yield Violation(key, list(chosen), f"names {name!r} twice", "name it once")


def _store_violations(path: str, rl: RunConfig) -> Iterator[Violation]:
    """Which store, which archive, and what they exclude."""
    store, upload = rl.checkpoint_store, rl.upload
    for key, config in ((f"{path}.checkpoint_store", store), (f"{path}.upload", upload)):
        if config.url and not _BUCKET_URL.fullmatch(config.url):
            yield Violation(f"{key}.url", config.url, "must be s3://bucket/prefix, without credentials", "e.g. s3://my-bucket/runs")
        if config.endpoint_url and not _ENDPOINT.fullmatch(config.endpoint_url):
            rule = "must be the http(s) address of a server, without credentials"
            yield Violation(f"{key}.endpoint_url", config.endpoint_url, rule, "e.g. https://s3.example.org:9000")
        if config.endpoint_url and not config.url:
            yield Violation(f"{key}.endpoint_url", config.endpoint_url, f"is read only with {key}.url", f"set {key}.url, or drop this")
    if store.kind == "local" and store.url:
        rule = f"is read only with {path}.checkpoint_store.kind=object"
        yield Violation(f"{path}.checkpoint_store.url", store.url, rule, f"set it, or {path}.upload.url to archive a local store")
    if store.kind != "object":
        return
    if not store.url:
        rule = f"needs {path}.checkpoint_store.url"
        yield Violation(f"{path}.checkpoint_store.kind", store.kind, rule, f"set {path}.checkpoint_store.url=s3://bucket/prefix")
    if upload.url:
        rule = f"archives a local store, and {path}.checkpoint_store.kind=object saves to an object store already"
        yield Violation(f"{path}.upload.url", upload.url, rule, f"drop {path}.upload.url, or set {path}.checkpoint_store.kind=local")
    for name in ("keep_optim_last", "keep_model_last"):
        value = getattr(rl, name)
        if value:
            rule = f"would remove saves, and nothing is removed from an object store ({path}.checkpoint_store.kind=object)"
            yield Violation(f"{path}.{name}", value, rule, f"drop {path}.{name}; let the bucket expire old objects instead")
