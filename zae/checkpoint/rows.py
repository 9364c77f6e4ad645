"""Lists of rows that only grow, the history of a run, in files that the checkpoints of the run share.

A list is cut at fixed places: pieces of 32,768 rows, then of 2,048 and of 128, each one file, and what remains, fewer
than 128 rows, is in state.json. The files of a list of 2,300 rows::

    valid_history-0-2048.json
    valid_history-2048-2176.json

A piece never changes once its rows are there. A checkpoint gets a hard link to the file of the checkpoint before, or
where the disk has no links the same bytes again, and so it is whole wherever it is copied to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zae.checkpoint.encoding import decode, encode
from zae.checkpoint.hashed_files import REMEDY
from zae.checkpoint.json_text import json_text, read_json
from zae.checkpoint.manifest import FileEntry, Manifest
from zae.checkpoint.names import PIECE
from zae.errors import CheckpointDamaged

__all__ = ["Piece", "Pieces", "add_rows"]

SIZES = (1 << 15, 1 << 11, 1 << 7)
"""The rows of a piece: of the smaller ones there are at most 15 each, so that a long list has few files."""


class Piece(NamedTuple):
    """The text of a piece, its entry in a manifest, and the checkpoint that has the file already."""

    text: bytes
    entry: FileEntry
    source: Path | None = None


def _spans(count: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each piece of a list of this length, and the row after its last."""
    start = 0
    for size in SIZES:
        while start + size <= count:
            yield start, start + size
            start += size


class Pieces:
    """The pieces of the lists of one run; the text of each is made once.

    Attributes
    ----------
    source : Path or None
        The checkpoint that was written last: it has the files of all pieces that were made by then.
    """

    def __init__(self) -> None:
        self.source: Path | None = None
        self._known: dict[str, tuple[tuple[Any, Any], Piece]] = {}  # With the first and the last row of each.

    def __reduce__(self) -> tuple[type[Pieces], tuple[()]]:
        """Make them anew in a copy, which may be in another process."""
        return Pieces, ()

    def split(
        self, lists: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> tuple[dict[str, Piece], dict[str, list[dict[str, Any]]]]:
        """Return the pieces of these lists by the names of their files, and the rows that remain of each list."""
        pieces = {}
        known_pieces = {}
        loose_rows = {}
        for key, rows in lists.items():
            end = 0
            for start, end in _spans(len(rows)):
                name = f"{key}-{start}-{end}.json"
                ends = rows[start], rows[end - 1]
                known = self._known.get(name)
                if known is not None and known[0][0] is ends[0] and known[0][1] is ends[1]:
                    piece = known[1]._replace(source=self.source)
                else:  # New, or of other rows: a state was loaded, or a script has removed some.
                    text = json_text(Path(name), encode([dict(row) for row in rows[start:end]])[0])
                    piece = Piece(text, FileEntry(size=len(text), sha256=hashlib.sha256(text).hexdigest()))
                known_pieces[name] = ends, piece
                pieces[name] = piece
            loose_rows[key] = [dict(row) for row in rows[end:]]
        self._known = known_pieces
        return pieces, loose_rows


def add_rows(state: dict[Any, Any], directory: Path, manifest: Manifest, allow_partial: Collection[str] = ()) -> None:
    """Read and verify the pieces of a checkpoint, and put their rows before those that its state has."""
    pieces: dict[str, list[tuple[int, int, str]]] = {}
    for name in manifest["files"]:
        if match := PIECE.fullmatch(name):
            pieces.setdefault(match[1], []).append((int(match[2]), int(match[3]), name))
    for key, spans in pieces.items():
        rows: list[Any] = []
        end = 0
        for start, stop, name in sorted(spans):
            try:
                rows += _read_piece(directory / name, manifest["files"][name], stop - start)
                if start != end:
                    raise CheckpointDamaged(f"{directory}: the rows {end} to {start} of {key} are missing. {REMEDY}")
            except CheckpointDamaged:
                if name not in allow_partial:
                    raise
            end = stop
        records = state.get("records")
        if not isinstance(records, dict) or not isinstance(records.get(key), list):
            raise CheckpointDamaged(f"{directory}: has files of {key}, which its state has not. {REMEDY}")
        records[key] = rows + records[key]


def _read_piece(path: Path, entry: FileEntry, count: int) -> list[Any]:
    """Return the rows of a piece."""
    rows = decode(read_json(path, entry), {}, where=str(path))
    if not isinstance(rows, list) or len(rows) != count:
        raise CheckpointDamaged(f"{path}: is not a list of {count} rows. {REMEDY}")
    return rows
