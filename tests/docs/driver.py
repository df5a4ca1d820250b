"""Executes posttrain command lines one after the other in this process, so that the imports are paid for once.

Reads a JSON list of argument lists from stdin; the last line of stdout is a JSON object: arguments -> code and output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path


def main() -> None:
    programs: list[list[str]] = json.load(sys.stdin)
    if any("./my-model" in argument for program in programs for argument in program):
        from posttrain.model.native import tiny

        directory = tiny.build({}, dtype="float32").directory
        assert directory is not None
        shutil.copytree(directory, "my-model")
    results = {json.dumps(program): execute(program) for program in programs}
    print(json.dumps(results))


def execute(program: list[str]) -> dict[str, object]:
    from posttrain.app import main as posttrain

    sys.argv = ["posttrain", *program]
    output = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            posttrain(program)
        except SystemExit as exit:
            code = exit.code or 0
    here = f"{Path.cwd()}{os.sep}"
    return {"code": code, "output": output.getvalue().replace(here, "")}


main()
