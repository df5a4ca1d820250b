"""The reward catalog: built-ins, custom catalogs, and refusals."""

from __future__ import annotations

import sys
import types
from types import MappingProxyType

import pytest

from posttrain.errors import ConfigError, RewardError
from posttrain.reward.catalog import build_provider, describe, known_rewards
from posttrain.reward.pointwise import map_candidates
from posttrain.runtime.dotted import import_dotted


class Brevity:
    """Group-native: the shortest completion gets 1."""

    name = "brevity"
    needs = frozenset({"prompt", "level"})
    identity = MappingProxyType({"revision": 1})
    closed = 0

    def score(self, group):
        raise AssertionError("never scored here")

    def close(self):
        Brevity.closed += 1


def length():
    return map_candidates(lambda candidate: len(candidate.completion), name="length", needs=(), identity={})


def explodes():
    raise OSError("no server")


CATALOGS = {
    "good": lambda: {"brevity": Brevity(), "length": length, "by_class": Brevity},
    "overrides": lambda: {"math": Brevity(), "fine": length},
    "not_a_mapping": lambda: [Brevity()],
    "raises": explodes,
    "lacking": lambda: {"bad": object()},
    "exploding_entry": lambda: {"bad": explodes},
}


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = types.ModuleType("catalogs_under_test")
    for name, function in CATALOGS.items():
        function.__qualname__ = name
        setattr(module, name, function)
    module.number = 3
    module.anonymous = lambda: {}
    module.Brevity = Brevity
    monkeypatch.setitem(sys.modules, "catalogs_under_test", module)


def path(name):
    return f"catalogs_under_test.{name}"


def test_known_names():
    assert known_rewards() == ("arithmetic", "exact", "math", "reasoning_gym")
    assert known_rewards(catalog_path=path("good"))[4:] == ("brevity", "length", "by_class")


def test_custom_providers_and_factories(group):
    assert isinstance(build_provider("brevity", catalog_path=path("good"), timeout_s=1.0), Brevity)
    built = build_provider("length", catalog_path=path("good"), timeout_s=1.0)
    assert [score.total for score in built.score(group("a", "abc"))] == [1.0, 3.0]
    assert build_provider("arithmetic", catalog_path=path("good"), timeout_s=1.0).name == "arithmetic"


def test_custom_needs_are_read_from_the_provider_which_is_closed_again():
    before = Brevity.closed
    assert describe("brevity", catalog_path=path("good")).needs == {"prompt", "level"}
    assert Brevity.closed == before + 1


def test_unknown_reward_names_the_nearest_and_the_known():
    with pytest.raises(
        ConfigError, match=r"rl.reward='arithmetik': is not in the reward catalog \(known: arithmetic, exact, .*'arithmetic'\?"
    ):
        build_provider("arithmetik", timeout_s=1.0)
    with pytest.raises(ConfigError, match="did you mean 'brevity'"):
        describe("brevty", catalog_path=path("good"))


@pytest.mark.parametrize(
    ("name", "catalog", "error", "message"),
    [
        ("fine", "overrides", ConfigError, "cannot override the built-in 'math'; give it another name"),
        ("exact", "overrides", ConfigError, "cannot override the built-in 'math'"),
        ("x", "not_a_mapping", ConfigError, "must return a mapping from reward name to provider"),
        ("x", "number", ConfigError, "must name a function without arguments, got int"),
        ("x", "raises", RewardError, "the factory raised OSError: no server"),
        ("bad", "lacking", RewardError, "object is not a provider, it lacks name, needs, identity, score, close"),
        ("bad", "exploding_entry", RewardError, "reward 'bad': its factory raised OSError: no server"),
        ("by_class", "good", RewardError, "the provider calls itself 'brevity', the names must agree"),
    ],
)
def test_refusals(name, catalog, error, message):
    with pytest.raises(error, match=message):
        build_provider(name, catalog_path=path(catalog), timeout_s=1.0)
    with pytest.raises(error, match=message):
        describe(name, catalog_path=path(catalog))


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("", "is not a dotted path"),
        ("catalogs_under_test", "is not a dotted path"),
        ("a b.c", "is not a dotted path"),
        ("posttrain.reward.catalog", "is a module: the path must name something inside it"),
        ("no_such_package_here.thing", "there is no module 'no_such_package_here'; install it or put its folder on PYTHONPATH"),
        ("posttrain.rewards.thing", "'posttrain' has no attribute 'rewards'"),
        ("catalogs_under_test.absent", "'catalogs_under_test' has no attribute 'absent'"),
        ("catalogs_under_test.anonymous", "names a lambda or a nested function"),
        ("catalogs_under_test.<lambda>", "names a lambda or a nested function"),
    ],
)
def test_dotted_path_refusals(dotted, message):
    with pytest.raises(ConfigError, match=message):
        import_dotted(dotted)


def test_dotted_path_finds_attributes_of_attributes():
    assert import_dotted("catalogs_under_test.Brevity.score") is Brevity.score
    assert import_dotted("posttrain.reward.catalog.describe") is describe


def test_dotted_path_tells_a_broken_module_from_a_missing_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more_here.py").write_text("import no_such_library_at_all\n")
    (tmp_path / "broken_here.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="importing 'needs_more_here' failed: No module named 'no_such_library_at_all'; install"):
        import_dotted("needs_more_here.thing")
    with pytest.raises(ConfigError, match=r"importing 'broken_here' failed: ZeroDivisionError: .*; fix the module"):
        import_dotted("broken_here.thing")
