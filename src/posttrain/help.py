"""The help text, made from conf/ without importing Hydra, whose own takes seconds once launcher plugins are installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_TEXT = """\
posttrain: reinforcement-learning post-training of language models, as one Hydra application

usage: posttrain [GROUP=OPTION | KEY=VALUE]...       train
       posttrain check [GROUP=OPTION | KEY=VALUE]... check everything and print the plan, run nothing
       posttrain doctor                              versions, devices, optional parts
       posttrain report RUN_DIR                      write RUN_DIR/report.html
       posttrain export RUN_DIR [--step N]           write a Hugging Face directory of a saved model
       posttrain reproduce RUN_DIR                   run the first step again and compare it digit by digit

examples:
  posttrain experiment=tiny                          the whole pipeline on a random model, in seconds
  posttrain experiment=quickstart                    teach SmolLM2-135M-Instruct to add
  posttrain algorithm=grpo model=hf model.name_or_path=DIR data=jsonl rl.data.path=FILE
  posttrain -m experiment=tiny rl.seed=0,1           a sweep

groups and their options:
{groups}
flags:
  -m, --multirun         one run for each combination of the values given
  --cfg job [-p KEY]     print the configuration these arguments give; --resolve works out interpolations
  --info defaults        which files it comes from
  --config-dir DIR       a directory of your own groups and presets
  -sc install=SHELL      completion: eval "$(posttrain -sc install=bash)"; also zsh and fish
  --hydra-help           everything else
"""


def help_text(arguments: Sequence[str]) -> str:
    """Groups, options and the first comment of each option's file; `--config-dir` adds the user's own."""
    from posttrain.config.locate import conf_dir

    directories = [conf_dir()]
    directories += [Path(arguments[i + 1]) for i, argument in enumerate(arguments[:-1]) if argument in ("--config-dir", "-cd")]
    groups: dict[str, dict[str, str]] = {}
    for directory in directories:
        for file in sorted(directory.glob("*/**/*.yaml")):
            groups.setdefault(file.parent.relative_to(directory).as_posix(), {})[file.stem] = _first_comment(file)
    lines: list[str] = []
    for group, options in groups.items():
        lines.append(f"  {group}=")
        width = max(len(option) for option in options)
        lines += [f"    {option:<{width}}  {text}".rstrip() for option, text in options.items()]
    return _TEXT.format(groups="\n".join(lines) + "\n")


def _first_comment(file: Path) -> str:
    """The first comment that is neither a package header nor the command that runs the file."""
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if line.startswith("#") and "@package" not in text and not text.startswith("posttrain "):
            return text
    return ""
