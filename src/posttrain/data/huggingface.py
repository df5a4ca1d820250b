"""Corpora from the Hugging Face `datasets` library: a hub data set, or a local directory of parquet files.

A directory may be laid out like a hub repository: `train.parquet`, `train-00000-of-00002.parquet`, `train/*.parquet`, or any
of these under a folder named like `data.subset`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.data.columns import renamed, renamed_names, row_problem
from posttrain.data.source import Row
from posttrain.errors import DataError

RowMap = Callable[[dict[str, Any]], dict[str, Any]]

_SHARD = re.compile(r"[-_.]\d+(-of-\d+)?$")
_SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval", "held_out"})


class HuggingFaceCorpus:
    """Random access to the rows of one split; the row map and the renaming are applied when a row is drawn."""

    def __init__(
        self,
        name: str,
        *,
        split: str,
        prompt_column: str,
        response_column: str = "",
        subset: str = "",
        items_fn: RowMap | None = None,
    ) -> None:
        self._where = f"data set {name!r}{f' ({subset})' if subset else ''}, split {split!r}"
        self._split, self._items_fn = split, items_fn
        self._prompt_column, self._response_column = prompt_column, response_column
        self._rows = _load(name, subset=subset, split=split, where=self._where)
        if not len(self._rows):
            raise DataError(f"{self._where}: holds no rows; choose another split")
        self.columns = renamed_names(frozenset(self._checked(0)), prompt_column=prompt_column, response_column=response_column)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return renamed(
            self._checked(index), key=f"{self._split}:{index}", prompt_column=self._prompt_column, response_column=self._response_column
        )

    def _checked(self, index: int) -> Mapping[str, Any]:
        row: Any = dict(self._rows[index])
        if self._items_fn is not None:
            try:
                row = self._items_fn(row)
            except Exception as error:
                raise DataError(
                    f"{self._where}, row {index}: data.items_fn raised {type(error).__name__}: {error}; fix the function"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{self._where}, row {index}: data.items_fn must return a dict, got {type(row).__name__}; fix the function")
        problem = row_problem(row, prompt_column=self._prompt_column, response_column=self._response_column)
        if problem is not None:
            raise DataError(f"{self._where}, row {index}: {problem}")
        return row


def parquet_files(directory: Path, *, subset: str = "", split: str) -> list[Path]:
    """The parquet files of one split, sorted. A directory whose names speak of no split at all is the train split."""
    root = directory / subset if subset and (directory / subset).is_dir() else directory
    files = sorted(path for path in root.rglob("*.parquet") if path.is_file())
    if not files:
        raise DataError(f"data.name={str(directory)!r}: holds no .parquet files, it must; check the path")
    labels = {path: _labels(path.relative_to(root)) for path in files}
    chosen = [path for path in files if split in labels[path]]
    if chosen:
        return chosen
    if split == "train" and not any(labels[path] & _SPLIT_NAMES for path in files):
        return files
    found = ", ".join(str(path.relative_to(directory)) for path in files[:8])
    raise DataError(f"data.split={split!r}: no file of {str(directory)!r} belongs to it; set data.split to one of the files found: {found}")


def _labels(relative: Path) -> set[str]:
    return {*relative.parts[:-1], _SHARD.sub("", relative.stem)}


def _load(name: str, *, subset: str, split: str, where: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"{where}: needs the datasets library ({error}); pip install 'posttrain[datasets]'") from error
    directory = Path(name)
    try:
        if directory.is_dir():
            files = parquet_files(directory, subset=subset, split=split)
            return load_dataset("parquet", data_files={split: [str(path) for path in files]}, split=split)
        return load_dataset(name, subset or None, split=split)
    except DataError:
        raise
    except Exception as error:
        # The library raises some twenty types here, for a missing name, subset or split and for an unreachable hub alike.
        raise DataError(
            f"{where}: cannot be loaded: {type(error).__name__}: {error}; check data.name, data.subset, data.split and the network"
        ) from error
