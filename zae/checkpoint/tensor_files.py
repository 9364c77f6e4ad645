"""Files of tensors by their formats, and safetensors, the one that is written by default.

Writers call a function with buffers, and `zae.checkpoint.filesystem` owns the file behind it. The library safetensors
reads its files, each tensor straight into its own memory, so that a file is read once and held once. What is added
here: ties, the hash, and limits on hostile headers, which are checked before the library sees them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zae.checkpoint.ckpt_files import read_ckpt
from zae.checkpoint.hashed_files import Input, open_input, read_whole
from zae.checkpoint.json_text import strict_json
from zae.checkpoint.names import MODEL_FILES
from zae.checkpoint.tensor_bytes import AXES_LIMIT, DTYPE_NAMES, byte_view, dense, separate
from zae.errors import CheckpointDamaged, CheckpointError, ConfigError

if TYPE_CHECKING:
    from zae.checkpoint.manifest import FileEntry, Manifest

__all__ = [
    "SUFFIXES",
    "format_of",
    "iterate_safetensors",
    "load_safetensors",
    "parse_format",
    "read_model",
    "read_safetensors",
    "write_safetensors",
]


HEADER_LIMIT = 64 << 20
"""The largest safetensors header that is written or read, in bytes: some 400,000 tensors."""

_FORMATS = {"safetensors": "safetensors", "safetensor": "safetensors", "ckpt": "ckpt"}
SUFFIXES = {**{f".{name}": kind for name, kind in _FORMATS.items()}, ".pt": "ckpt", ".pth": "ckpt"}
_TIES = "zae.tied"
_LENGTH = 8  # The file begins with the length of the header, little endian.
_PADDING = 1 << 16  # White space outside of the header's text: some tools align tensors to a page.


def read_model(directory: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read and verify the model's file of a checkpoint."""
    name = MODEL_FILES[manifest["model_format"]]
    path, entry = directory / name, manifest["files"][name]
    if name == MODEL_FILES["safetensors"]:
        return load_safetensors(path, entry)
    return read_ckpt(read_whole(path, size=entry["size"], sha256=entry["sha256"]), str(path))


def load_safetensors(path: Path, entry: FileEntry | None = None) -> dict[str, Tensor]:
    """Read a safetensors file in one pass, and verify it if there is an entry of a manifest."""
    with open_input(path, size=entry and entry["size"]) as source:
        try:
            tensors, _ = read_safetensors(source)
        except CheckpointDamaged:
            if entry is not None:  # A file that was changed is reported as such, not by what the change broke.
                source.finish(entry["sha256"])
            raise
        if entry is not None:
            source.finish(entry["sha256"])
    return tensors


def parse_format(name: str) -> str:
    """Return "safetensors" or "ckpt" for the name of a format, with or without a leading dot."""
    format_name = _FORMATS.get(str(name).removeprefix("."))
    if format_name is None:
        raise ConfigError(f"unknown model format {name!r}; write 'safetensors' or 'ckpt'")
    return format_name


def format_of(path: PurePath) -> str:
    """Return the format that the suffix of a file stands for."""
    format_name = SUFFIXES.get(path.suffix.lower())
    if format_name is None:
        *others, last = SUFFIXES
        raise ConfigError(f"{path}: unknown suffix {path.suffix!r} for weights; write {', '.join(others)} or {last}")
    return format_name


# ---------------------------------------------------------------------------------------------------- safetensors


def write_safetensors(
    write: Callable[[Any], object],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as one safetensors file, tied ones once: ``tied`` has them where they were taken out already.

    `write` is called with one buffer after the other, and may keep them; each tensor is brought to the CPU when its
    turn comes. Ties are notes in the header, as ``safetensors.torch.save_model`` writes them.

    The library's writers do not fit: ``serialize`` holds all tensors a second time; ``serialize_file`` needs all of
    them on the CPU at once, does not hash (the file would have to be read again), does not wait for the disk, reports a
    full disk without its error number, and orders notes differently each time.
    """
    separate_tensors = tensors
    if tied is None:
        separate_tensors, tied = separate(tensors)
    for name, tensor in separate_tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name!r} is of {tensor.dtype}, which safetensors cannot hold; save it as .ckpt, or convert it"
            )
    notes = {**tied, "format": "pt", **(metadata or {})}
    if tied:
        notes[_TIES] = json.dumps(tied)  # Another note may look like a tie by chance; this one does not.
    # The largest elements first, so that each tensor starts at a multiple of its element size.
    order = [name for _, name in sorted((-tensor.element_size(), name) for name, tensor in separate_tensors.items())]
    header: dict[str, Any] = {"__metadata__": notes}
    end = 0
    for name in order:
        begin, end = end, end + separate_tensors[name].numel() * separate_tensors[name].element_size()
        entry = {
            "dtype": DTYPE_NAMES[separate_tensors[name].dtype],
            "shape": list(separate_tensors[name].shape),
            "data_offsets": [begin, end],
        }
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"{len(separate_tensors)} tensors need a header of {len(text)} bytes; the limit is {HEADER_LIMIT}"
        )
    write(len(text).to_bytes(_LENGTH, "little") + text)
    for name in order:
        write(byte_view(dense(separate_tensors[name], name)))


def read_safetensors(source: Input) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read one safetensors file that may be hostile, and hash all that is read."""
    try:
        notes = _check_header(source)
        # By default the tensors would be views of the mapped file: cutting the file would then end the process, and a
        # removed file would keep its place on the disk. They would be made on torch's default device.
        with torch.device("cpu"), safe_open(source.path, framework="pt", backend="pread") as file:
            tensors: dict[str, Tensor] = file.get_tensors()
            order = file.offset_keys()
        for name in order:
            source.skip(byte_view(tensors[name]))
        tied = _ties(notes, tensors, str(source.path))
        tensors.update({alias: tensors[name] for alias, name in tied.items()})
    # Whatever the library, torch and Python raise for a hostile number is damage, too.
    except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError, AttributeError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"{source.path}: not a whole safetensors file ({str(error)[:200]}).") from error
    hidden = {"__metadata__", _TIES, *tied}
    return tensors, {key: note for key, note in notes.items() if key not in hidden}


def iterate_safetensors(path: Path, entry: FileEntry) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file without ties, one at a time, and verify the file at its end."""
    with open_input(path, size=entry["size"]) as source:
        try:
            _check_header(source)
            with safe_open(path, framework="pt", backend="pread") as file:
                for name in file.offset_keys():
                    with torch.device("cpu"):
                        tensor = file.get_tensor(name)
                    source.skip(byte_view(tensor))
                    yield name, tensor
                    del tensor  # Before the next one is read.
        except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError, AttributeError) as error:
            source.finish(entry["sha256"])  # A file that was changed is reported as such.
            raise CheckpointDamaged(f"{path}: not a whole safetensors file ({str(error)[:200]}).") from error
        source.finish(entry["sha256"])


def _check_header(source: Input) -> dict[str, str]:
    """Refuse a header that would cost the library time or memory, or that two readers could read differently."""
    if source.size < _LENGTH:
        raise ValueError(f"{source.size} bytes are less than the {_LENGTH} that it begins with")
    opening = bytearray(_LENGTH)
    source.fill(memoryview(opening))
    length = int.from_bytes(opening, "little")
    if length > min(HEADER_LIMIT, source.size - _LENGTH):
        raise ValueError(
            f"its header claims {length} bytes; the file has {source.size}, and the limit is {HEADER_LIMIT}"
        )
    text = bytearray(length)
    source.fill(memoryview(text))
    if len(text.translate(None, b" \n\t\r")) < (length - _PADDING) // 2:  # Its size is no measure of what is in it.
        raise ValueError("its header is mostly white space")
    header = strict_json(bytes(text), str(source.path))
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise ValueError("the metadata of the header is not text")
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"its header describes {name!r:.80} by other entries than dtype, shape and data_offsets")
        if not isinstance(entry["shape"], list) or len(entry["shape"]) > AXES_LIMIT:
            raise ValueError(f"{name!r:.80} has a shape that is not a list of at most {AXES_LIMIT} numbers")
    return notes


def _ties(notes: Mapping[str, str], tensors: Mapping[str, Tensor], where: str) -> dict[str, str]:
    """Return the ties that the notes name: our own entry, else the convention of safetensors.torch.save_model."""
    if _TIES not in notes:
        return {key: note for key, note in notes.items() if key not in tensors and key != "format" and note in tensors}
    tied = strict_json(notes[_TIES].encode(), where)
    for alias, name in tied.items() if isinstance(tied, dict) else [("", tied)]:
        if alias in tensors or not isinstance(name, str) or name not in tensors:
            raise ValueError(f"{alias!r:.80} is tied to {name!r:.80}, which is not in the file")
    return cast("dict[str, str]", tied)
