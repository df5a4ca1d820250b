"""The JSONL corpus: rows, renaming, and errors that name file and line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from posttrain.data.jsonl import JsonlCorpus, LineProblem, scan_jsonl
from posttrain.errors import DataError


@pytest.fixture
def write(tmp_path):
    def make(content: str | bytes):
        path = tmp_path / "tasks.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def test_rows_are_renamed_and_everything_else_passes_through(write):
    turns = [{"role": "user", "content": "2+2?"}]
    path = write(
        "\ufeff"
        + json.dumps({"q": "1+1?", "a": 2, "level": "x", "extra": None})
        + "\n\n   \n"
        + json.dumps({"q": turns, "a": "4", "level": "line\u2028separator"}, ensure_ascii=False)  # and no newline at the end
    )
    corpus = JsonlCorpus(path, prompt_column="q", response_column="a")
    assert len(corpus) == 2
    assert (corpus[0].key, corpus[0].prompt, corpus[0].reference) == ("tasks.jsonl:1", "1+1?", 2)
    assert corpus[0].representations == {"level": "x", "extra": None}
    assert (corpus[1].key, corpus[1].prompt, corpus[1].reference) == ("tasks.jsonl:4", tuple(turns), "4")
    assert corpus[1].representations == {"level": "line\u2028separator"}
    assert corpus.columns == {"prompt", "reference", "level"}  # `extra` is not in every row
    with pytest.raises(IndexError):
        corpus[2]


def test_without_response_column_there_is_no_reference(write):
    corpus = JsonlCorpus(write('{"prompt": "a", "a": 1}\n'), prompt_column="prompt")
    assert (corpus[0].reference, corpus[0].representations) == (None, {"a": 1})
    assert corpus.columns == {"prompt", "a"}


BAD_LINES = [
    (b"{", "is not JSON: Expecting property name"),
    (b"[1]", "must be an object with named columns, got list"),
    (b'{"x": 1}', "has no prompt column 'q'; its columns are 'x'"),
    (b'{"q": 5, "a": 1}', "column 'q' must hold a text or a list of chat turns, got int"),
    (b'{"q": null, "a": 1}', "got NoneType"),
    (b'{"q": [], "a": 1}', "column 'q' holds an empty conversation"),
    (b'{"q": [{"role": "user"}], "a": 1}', "column 'q', turn 0: must be {\"role\": <text>, \"content\": ...}, got {'role': 'user'}"),
    (b'{"q": [{"role": "user", "content": "x"}, {"role": 1, "content": "x"}], "a": 1}', "column 'q', turn 1"),
    (b'{"q": "x"}', "has no response column 'a'"),
    (b'{"q": "x", "a": null}', "column 'a' is null"),
    (b'{"q": "x", "a": 1, "prompt": "y"}', "has a column 'prompt' beside prompt_column='q'"),
    (b'{"q": "x", "a": 1, "reference": "y"}', "has a column 'reference' beside response_column='a'"),
    (b'{"q": "\xff", "a": 1}', "is not UTF-8 (byte 7 of the line)"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_every_error_names_file_and_line(write, line, message):
    path = write(b'{"q": "fine", "a": 0}\n\n' + line + b'\n{"q": "fine", "a": 0}\n')
    with pytest.raises(DataError) as raised:
        JsonlCorpus(path, prompt_column="q", response_column="a")
    assert str(raised.value).startswith(f"{path}:3: ") and message in str(raised.value)
    assert [problem.line for problem in scan_jsonl(path, prompt_column="q", response_column="a")] == [3]


def test_many_problems_are_listed_and_counted(write):
    path = write("[]\n" * 9)
    with pytest.raises(DataError) as raised:
        JsonlCorpus(path, prompt_column="q")
    lines = str(raised.value).splitlines()
    assert len(lines) == 6 and lines[4].startswith(f"{path}:5: ") and lines[5] == f"{path}: and 4 more lines with problems"
    assert len(list(scan_jsonl(path, prompt_column="q"))) == 9
    assert [problem.line for problem in scan_jsonl(path, prompt_column="q", limit_rows=2)] == [1, 2]


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_file_without_rows(write, content):
    path = write(content)
    with pytest.raises(DataError, match=r"tasks\.jsonl: holds no rows"):
        JsonlCorpus(path, prompt_column="q")
    assert list(scan_jsonl(path, prompt_column="q")) == [LineProblem(0, "holds no rows; write one JSON object per line")]


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"none.jsonl: cannot be read \(No such file or directory\); check data.path"):
        JsonlCorpus(tmp_path / "none.jsonl", prompt_column="q")
    (problem,) = scan_jsonl(tmp_path, prompt_column="q")
    assert problem == LineProblem(0, "cannot be read (Is a directory); check data.path")


def test_file_that_changes_under_the_run(write):
    path = write('{"q": "a"}\n{"q": "b"}\n')
    corpus = JsonlCorpus(path, prompt_column="q")
    path.write_text('{"q": "aaaa"}\n{"q": "b"}\n')
    with pytest.raises(DataError, match="changed since the run opened it"):
        corpus[1]
    os.remove(path)
    with pytest.raises(FileNotFoundError):
        corpus[1]


def test_scanning_imports_nothing_heavy():
    code = (
        "import sys, posttrain.data.build, posttrain.data.jsonl, posttrain.reward.catalog as c\n"
        "[c.describe(name) for name in c.known_rewards()]\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'reasoning_gym', 'math_verify', 'sympy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
