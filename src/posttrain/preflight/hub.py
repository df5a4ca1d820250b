"""Hugging Face data sets: what can be said without the `datasets` library and without a network."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.config import PromptEnvConfig
from posttrain.data.build import declared_columns
from posttrain.data.columns import renamed_names
from posttrain.data.huggingface import parquet_files
from posttrain.errors import DataError, Violation
from posttrain.preflight.facts import SourceFacts
from posttrain.preflight.installed import Installed

SHIPPED_MAPS = "posttrain.data.maps."
"""Row maps known to make conversations; those of users may make anything."""


def huggingface_facts(path: str, data: PromptEnvConfig, *, installed: Installed) -> tuple[list[Violation], SourceFacts | None]:
    """Refuse a missing library, a directory without the split, and columns that the files of a directory lack."""
    key = f"{path}.name"
    if not installed("datasets"):
        rule = "needs the datasets library, which is not installed"
        return [Violation(key, data.name, rule, "pip install 'posttrain[datasets]'")], None
    conversation = (f"{path}.items_fn", f"{data.items_fn} makes conversations") if data.items_fn.startswith(SHIPPED_MAPS) else None
    facts = SourceFacts(declared_columns(data), complete=False, conversation=conversation)
    if not Path(data.name).is_dir():
        if data.name.startswith(("/", "./", "../", "~")):
            return [Violation(key, data.name, "is not a directory", f"set {key} to a directory of parquet files or a hub id")], None
        return [], facts
    try:
        files = parquet_files(Path(data.name), subset=data.subset, split=data.split)
    except DataError as error:
        on_split = str(error).startswith("data.split")
        text = str(error).partition(": ")[2]
        rule, _, remedy = text.partition("; ")
        broken = (f"{path}.split", data.split) if on_split else (key, data.name)
        return [Violation(*broken, rule, remedy.replace("data.split", f"{path}.split") or "check the path")], None
    unreadable = [str(file) for file in files if not os.access(file, os.R_OK)]
    if unreadable:
        return [Violation(key, data.name, f"holds {unreadable[0]}, which is not readable", "correct its permissions")], None
    if data.items_fn:
        return [], facts  # the map may make any column
    return _parquet_facts(path, data, files[0])


def _parquet_facts(path: str, data: PromptEnvConfig, file: Path) -> tuple[list[Violation], SourceFacts | None]:
    """Judge the columns of the first file by its schema."""
    from pyarrow import ArrowException, types
    from pyarrow.parquet import read_schema

    try:
        schema = read_schema(file)
    except (OSError, ArrowException) as error:
        return [Violation(f"{path}.name", data.name, f"holds {file.name}, which is no parquet file ({error})", "replace the file")], None
    found = [
        Violation(f"{path}.{name}", column, f"is no column of {file}: it has {', '.join(schema.names)}", f"correct {path}.{name}")
        for name, column in (("prompt_column", data.prompt_column), ("response_column", data.response_column))
        if column and column not in schema.names
    ]
    if found or not data.prompt_column:
        return found, None
    kind = schema.field(data.prompt_column).type
    conversation = (f"{path}.prompt_column", f"column {data.prompt_column!r} holds lists") if types.is_list(kind) else None
    names = renamed_names(frozenset(schema.names), prompt_column=data.prompt_column, response_column=data.response_column)
    return [], SourceFacts(names, complete=True, conversation=conversation)
