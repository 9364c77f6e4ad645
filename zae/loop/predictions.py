"""The predictions of all samples: tensors in memory, or one file that is written batch by batch."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zae.checkpoint.ckpt_files import write_ckpt
from zae.checkpoint.filesystem import make_directory, not_saved, replace_file
from zae.checkpoint.tensor_bytes import byte_count, byte_view, dense
from zae.checkpoint.tensor_files import format_of, write_safetensors
from zae.errors import ConfigError, StepError
from zae.metrics.reductions import is_typed
from zae.values.describe import describe_value

__all__ = ["Predictions"]

_INSTEAD = "or call inference(loader), which returns what each step returned"


class Predictions:
    """What ``predict_step`` returns for all samples, added batch by batch.

    Parameters
    ----------
    path : str or Path, optional
        The file to write. Until all is known, the rows are in files without a name in the same folder, so that memory
        holds one batch; None keeps them in memory.
    writes : bool
        Whether this process writes the file.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, writes: bool = True) -> None:
        self.path = None if path is None else Path(os.path.abspath(os.path.expanduser(path)))
        self.writes = writes
        self._columns: dict[str, _Column] = {}
        if self.path is None:
            return
        self._is_array = self.path.suffix.lower() == ".npy"
        try:
            if not self._is_array:
                format_of(self.path)
        except ConfigError:
            raise ConfigError(
                f"path={str(path)!r} has no suffix of a file of predictions; write .npy, .safetensors or .pt"
            ) from None
        if writes:
            make_directory(self.path.parent)

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for column in self._columns.values():
            column.close()

    def add(self, size: int | None, values: Mapping[str, Any]) -> None:
        """Add the rows of a batch with so many samples; numbers of the batch are left out."""
        rows = _rows_of(size, values)
        if not self._columns:
            self._begin(rows)
        if rows.keys() != self._columns.keys():
            raise StepError(
                f"predict_step returned {', '.join(rows)} for a batch and {', '.join(self._columns)} for the first; "
                f"return the same entries for each, {_INSTEAD}"
            )
        try:
            for name, tensor in rows.items():
                self._columns[name].add(tensor)
        except OSError as error:
            assert self.path is not None
            raise not_saved(self.path, error, byte_count(*rows.values())) from error

    def finish(self) -> dict[str, Tensor] | Path:
        """Return the tensors by name, or write the file, which is whole or absent, and return its path."""
        if self.path is None or not self.writes:
            return self.path or {name: column.whole() for name, column in self._columns.items()}
        tensors = {name: column.whole() for name, column in self._columns.items()}
        if self._is_array:
            (array,) = tensors.values()
            writer = partial(_write_array, array)
        else:
            write = write_safetensors if format_of(self.path) == "safetensors" else write_ckpt
            writer = partial(write, tensors=tensors)
        replace_file(self.path, writer, byte_count(*tensors.values()))
        return self.path

    def _begin(self, rows: Mapping[str, Tensor]) -> None:
        """Make a column for each entry of the first batch."""
        if self.path is not None and self._is_array:
            if len(rows) > 1:
                raise StepError(
                    f"{self.path}: an .npy file holds one array, and predict_step returned {', '.join(rows)}; return "
                    "one of them, or write .safetensors or .pt"
                )
            (first,) = rows.values()
            if first.dtype.is_floating_point and first.dtype not in (torch.float64, torch.float32, torch.float16):
                raise StepError(f"{self.path}: NumPy has no {first.dtype}; return .float(), or write .safetensors")
        folder = None if self.path is None else self.path.parent
        self._columns = {name: _Column(name, first, folder, self.writes) for name, first in rows.items()}


class _Column:
    """One entry for all samples: tensors in memory, or their bytes in a file."""

    def __init__(self, name: str, first: Tensor, folder: Path | None, writes: bool) -> None:
        self._name = name
        self._form = _form_of(first)
        self._count = 0
        self._is_kept = folder is None
        self._parts: list[Tensor] = []
        self._file: IO[bytes] | None = None
        if folder is not None and writes:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def add(self, rows: Tensor) -> None:
        """Add the rows of a batch."""
        form = _form_of(rows)
        if form != self._form:
            raise StepError(
                f"{self._name!r} of predict_step has rows of {_form_in_words(form)} in a batch and of "
                f"{_form_in_words(self._form)} in the first one; pad or convert them, {_INSTEAD}"
            )
        self._count += len(rows)
        if self._file is not None:
            self._file.write(byte_view(dense(rows, self._name)))
        elif self._is_kept:
            self._parts.append(rows)

    def whole(self) -> Tensor:
        """Return all rows; rows in the file are read when they are used."""
        if self._file is None:
            return torch.cat(self._parts)
        self._file.flush()
        dtype, row_shape = self._form
        shape = (self._count, *row_shape)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(np.memmap(self._file, np.uint8, "r+")).view(dtype).view(shape)

    def close(self) -> None:
        """Free the room of the file."""
        if self._file is not None:
            self._file.close()


def _rows_of(size: int | None, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the entries that have a row for each sample; refuse what is neither such an entry nor a number."""
    rows: dict[str, Tensor] = {}
    for name, value in values.items():
        is_array = isinstance(value, np.ndarray) and value.dtype != object
        tensor = torch.from_numpy(value) if is_array else value
        is_number = isinstance(tensor, (int, float, np.number)) or (isinstance(tensor, Tensor) and not tensor.dim())
        if is_number or is_typed(tensor):
            continue
        if not isinstance(tensor, Tensor) or (size is not None and len(tensor) != size):
            expected = "" if size is None else f" for a batch of {size} samples"
            raise StepError(
                f"predict_step returned {name!r}, {describe_value(value)},{expected}; predict takes tensors with one "
                f"row for each sample: leave it out, {_INSTEAD}"
            )
        rows[name] = tensor
    if not rows:
        raise StepError(
            f"predict_step returned no tensor with a row for each sample, only {', '.join(values) or 'nothing'}; write "
            "def predict_step(self, batch): return {'output': self.model(batch[0])}"
        )
    return rows


_Form: TypeAlias = "tuple[torch.dtype, tuple[int, ...]]"


def _form_of(rows: Tensor) -> _Form:
    """Return the type of rows, and the shape of one row."""
    return rows.dtype, tuple(rows.shape[1:])


def _form_in_words(form: _Form) -> str:
    dtype, shape = form
    return f"shape {shape} and {dtype}"


def _write_array(tensor: Tensor, write: Callable[[Any], object]) -> None:
    """Write a tensor as NumPy's format."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(tensor.numpy()))
    write(head.getvalue())
    write(byte_view(tensor))
