"""Pack documents of different lengths into rows, with what keeps attention, positions and loss within each document."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from zae.common.argument_checks import check_count
from zae.data.loaders import length_of
from zae.errors import ConfigError, LoaderError, kind_of

__all__ = ["PackedDataset", "cu_seqlens", "document_mask", "flex_mask", "pack", "packed_collate"]

IGNORED = -100
"""The label of a position without a target: the ``ignore_index`` of ``cross_entropy``."""


def pack(documents: Sequence[Any], length: int | None = None, *, pad_id: int = 0) -> dict[str, Tensor]:
    """Join documents into one row.

    Parameters
    ----------
    documents : sequence
        Each a sequence of token ids, or a mapping with "input_ids" and, for instance, "labels": entries of as many
        numbers as "input_ids" are joined as well.
    length : int, optional
        Pads the row to so many tokens. Padding is a document of its own, numbered -1, without targets.
    pad_id : int
        The token of the padding.

    Returns
    -------
    dict of str to Tensor
        One-dimensional: "input_ids"; "labels", as models of Transformers take them: position ``t`` is predicted from
        the ones before, so the first token of each document has -100, and a loss of one's own compares ``logits[:-1]``
        with ``labels[1:]``; "position_ids", which begin at 0 in each document; "document_ids", the number of the
        document of each token.

    Raises
    ------
    LoaderError
        If the documents are longer than ``length``, or an entry has another length than "input_ids".

    Examples
    --------
    >>> from zae.data import pack
    >>> row = pack([[5, 6, 7], [8, 9]], length=6)
    >>> for name, values in row.items():
    ...     print(name, values.tolist())
    input_ids [5, 6, 7, 8, 9, 0]
    labels [-100, 6, 7, -100, 9, -100]
    position_ids [0, 1, 2, 0, 1, 0]
    document_ids [0, 0, 0, 1, 1, -1]
    """
    parts = [_entries_of(document) for document in documents]
    sizes = [len(part["input_ids"]) for part in parts]
    for part in parts:
        if part.keys() != parts[0].keys():
            raise LoaderError(
                f"one document has the entries {', '.join(parts[0])}, and another one {', '.join(part)}; those of a "
                "row are joined, so give all documents the same ones"
            )
    filled = [part for part, size in zip(parts, sizes) if size] or parts[:1]  # An empty list has no type.
    row = {}
    for name in parts[0] if parts else ():
        row[name] = torch.cat([part[name] for part in filled])
    if not parts:
        row = _entries_of([])
    row["position_ids"] = torch.cat([torch.arange(size) for size in sizes]) if sizes else torch.arange(0)
    row["document_ids"] = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))
    if length is None:
        return row
    missing = length - len(row["input_ids"])
    if missing < 0:
        raise LoaderError(f"documents of {sizes} tokens, {sum(sizes)} in all, do not fit into a row of {length}")
    fills: dict[str, Any] = {"input_ids": pad_id, "labels": IGNORED, "document_ids": -1}
    padding = {name: torch.full((missing,), fills.get(name, 0), dtype=row[name].dtype) for name in row}
    padding["position_ids"] = torch.arange(missing)
    return {name: torch.cat([values, padding[name]]) for name, values in row.items()}


def _entries_of(document: Any) -> dict[str, Tensor]:
    """Return the entries of a document that are joined, with labels whose first one is ignored."""
    document = _check_document(document)
    entries = {name: _as_tensor(name, values) for name, values in document.items() if name != "attention_mask"}
    size = entries["input_ids"].shape
    if entries["input_ids"].is_floating_point() and size.numel():
        raise LoaderError("the input_ids of a document are floats; give token ids, which are whole numbers")
    entries["input_ids"] = entries["input_ids"].long()
    if not size:
        raise LoaderError(f"pack takes a list of documents, and found {document['input_ids']!r} in place of one")
    for name, values in entries.items():
        if values.ndim != 1 or values.shape != size:
            raise LoaderError(
                f"entry {name!r} of a document has shape {tuple(values.shape)}, and its input_ids {tuple(size)}; to be "
                "packed, each entry has one number for each token: take others out of the dataset's samples"
            )
    labels = entries.get("labels", entries["input_ids"]).long().clone()
    labels[:1] = IGNORED
    return {**entries, "labels": labels}


def _check_document(document: Any) -> Mapping[str, Any]:
    """Return a document by its entries; refuse one that is padded, or text."""
    if not isinstance(document, Mapping):
        document = {"input_ids": document}
    if "input_ids" not in document:
        raise LoaderError(f"a document has the entries {', '.join(map(str, document))} and no 'input_ids'")
    ids = document["input_ids"]
    mask = document.get("attention_mask")
    if isinstance(ids, str):
        raise LoaderError(f"a document is the text {ids!r:.40}; tokenize it: tokenizer(text)")
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise LoaderError(
            f"a document of {len(ids)} tokens is padded: its attention_mask has a 0, and packed padding would be "
            "trained on; tokenize with padding=False"
        )
    return document


def _as_tensor(name: str, values: Any) -> Tensor:
    """Return an entry of a document as a tensor."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise LoaderError(
            f"entry {name!r} of a document is {kind_of(values)}, not a list of numbers; to be packed, each has one "
            "number for each token: take others out of the dataset's samples"
        ) from None


def packed_collate(documents: Sequence[Any]) -> dict[str, Tensor]:
    """Join the documents of a batch into one row without padding: a ``collate_fn``.

    Parameters
    ----------
    documents : sequence
        As `pack` takes them.

    Returns
    -------
    dict of str to Tensor
        What `pack` returns, with a leading dimension of 1.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> from zae.data import packed_collate
    >>> loader = DataLoader([[5, 6, 7], [8, 9]], batch_size=2, collate_fn=packed_collate)
    >>> next(iter(loader))["position_ids"]
    tensor([[0, 1, 2, 0, 1]])
    """
    return {name: values[None] for name, values in pack(documents).items()}


class PackedDataset(Dataset[dict[str, Tensor]]):
    """A dataset of documents as rows of one length: each row has as many whole documents as fit.

    Documents are placed longest first, each into the fullest row that has room for it ("best fit decreasing"), so that
    few tokens are padding. The rows are a function of the lengths alone. They are indexed as any dataset is: shuffled
    by a DataLoader, shared by ranks, and resumed exactly.

    Parameters
    ----------
    dataset : Dataset
        Documents with ``__len__`` and ``__getitem__``, as `pack` takes them.
    length : int
        The tokens of a row.
    lengths : sequence of int, optional
        The tokens of each document; without them each document is read once now.
    pad_id : int
        The token of the padding.
    too_long : {"raise", "truncate", "split"}
        What is done with a document of more than ``length`` tokens: refuse it, use its beginning, or make several
        documents of it.

    Attributes
    ----------
    rows : list of list of (int, int, int)
        For each row, its documents: the index in ``dataset``, the first token and the end.
    padding : float
        The share of all tokens that are padding.

    Raises
    ------
    ConfigError
        If a document is too long, or the lengths do not fit the dataset.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> from zae.data import PackedDataset
    >>> packed = PackedDataset([[1, 2, 3], [4, 5, 6, 7], [8], [9, 10]], length=5)
    >>> len(packed), packed[0]["input_ids"].tolist(), packed[1]["input_ids"].tolist()
    (2, [4, 5, 6, 7, 8], [1, 2, 3, 9, 10])
    >>> next(iter(DataLoader(packed, batch_size=2)))["document_ids"].shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        lengths: Sequence[int] | None = None,
        pad_id: int = 0,
        too_long: str = "raise",
    ) -> None:
        if too_long not in ("raise", "truncate", "split"):
            raise ConfigError(f"too_long={too_long!r}; it must be 'raise', 'truncate' or 'split'")
        if length_of(dataset) is None or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"a PackedDataset reads documents by index, and this is {kind_of(dataset)}; give a dataset with "
                "__len__ and __getitem__, or, for a stream, collate_fn=packed_collate to its DataLoader"
            )
        if not isinstance(pad_id, (int, np.integer)) or isinstance(pad_id, bool):
            raise ConfigError(
                f"pad_id={pad_id!r}; it must be a token id. Where a tokenizer has no pad_token_id any token will do, "
                "because padding is not a target: pad_id=tokenizer.eos_token_id"
            )
        self.dataset = dataset
        self.length = check_count("length", length)
        self.pad_id = int(pad_id)
        self._too_long = too_long
        pieces: list[tuple[int, int, int]] = []
        for index, size in enumerate(_sizes_of(dataset, lengths)):
            pieces += self._pieces(index, size)
        self.rows = _best_fit(pieces, length)
        tokens = sum(end - start for _, start, end in pieces)
        self.padding = 1 - tokens / (len(self.rows) * length) if self.rows else 0.0

    def _pieces(self, index: int, size: int) -> list[tuple[int, int, int]]:
        """Return the parts of a document that are placed."""
        if size <= self.length or self._too_long == "truncate":
            return [(index, 0, min(size, self.length))] if size else []
        if self._too_long == "split":
            return [(index, start, min(start + self.length, size)) for start in range(0, size, self.length)]
        raise ConfigError(
            f"document {index} has {size} tokens, and a row {self.length}; write a larger length, "
            "too_long='truncate' or too_long='split'"
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        documents = []
        for which, start, end in self.rows[index]:
            entries = _entries_of(self.dataset[which])
            size = len(entries["input_ids"])
            if size < end or (size > end and self._too_long == "raise"):
                raise LoaderError(f"document {which} has {size} tokens, and had {end} when the dataset was packed")
            documents.append({name: values[start:end] for name, values in entries.items()})
        return pack(documents, self.length, pad_id=self.pad_id)


def _sizes_of(dataset: Any, lengths: Any) -> list[int]:
    """Return the number of tokens of each document."""
    if lengths is None:
        return [len(_check_document(dataset[index])["input_ids"]) for index in range(len(dataset))]
    sizes = np.asarray(lengths)
    if sizes.shape != (len(dataset),):
        raise ConfigError(f"lengths has {len(lengths)} entries, and the dataset {len(dataset)} documents")
    if sizes.size and (sizes.dtype.kind not in "iuf" or not (sizes >= 0).all() or (sizes != sizes.astype(int)).any()):
        raise ConfigError("lengths must be the number of tokens of each document, whole numbers of at least 0")
    return [int(size) for size in sizes.tolist()]


def _best_fit(pieces: list[tuple[int, int, int]], length: int) -> list[list[tuple[int, int, int]]]:
    """Place pieces, the longest first, each into the fullest row with room for it."""
    rows: list[list[tuple[int, int, int]]] = []
    rooms: list[int] = []  # The room that rows have, sorted, and the rows of each.
    with_room: dict[int, list[int]] = {}
    order: Any = np.argsort([start - end for _, start, end in pieces], kind="stable") if pieces else []
    for piece in (pieces[index] for index in order):
        size = piece[2] - piece[1]
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            row = len(rows)
            room = length
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
                del with_room[room]
        rows[row].append(piece)
        left = room - size
        if left not in with_room:
            bisect.insort(rooms, left)
        with_room.setdefault(left, []).append(row)
    return rows


# ------------------------------------------------------------------------------------- what attention is to be told


def document_mask(document_ids: Tensor, causal: bool = True) -> Tensor:
    """Return the mask with which each token attends to its own document.

    Parameters
    ----------
    document_ids : Tensor
        Of shape (rows, tokens), or (tokens,).
    causal : bool
        Whether a token attends to those before it and itself only.

    Returns
    -------
    Tensor
        True where a token attends: (rows, 1, tokens, tokens), the ``attn_mask`` of ``scaled_dot_product_attention``.

    Examples
    --------
    >>> import torch
    >>> from zae.data import document_mask
    >>> document_mask(torch.tensor([0, 0, 1]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    ids = document_ids if document_ids.ndim == 2 else document_ids[None]
    mask = ids[:, :, None] == ids[:, None, :]
    if causal:
        mask = mask & torch.ones(mask.shape[1:], dtype=torch.bool, device=mask.device).tril()
    return mask[:, None]


def flex_mask(document_ids: Tensor, causal: bool = True) -> Any:
    """Return the same as a ``BlockMask`` of ``torch.nn.attention.flex_attention``, which skips what is masked.

    Parameters
    ----------
    document_ids : Tensor
        Of shape (rows, tokens).
    causal : bool
        Whether a token attends to those before it and itself only.

    Returns
    -------
    BlockMask
        The ``block_mask`` of ``flex_attention``.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[row, query] == document_ids[row, key]
        return same & (query >= key) if causal else same

    rows, tokens = document_ids.shape
    return create_block_mask(attends, rows, None, tokens, tokens, device=str(document_ids.device))


def cu_seqlens(document_ids: Tensor) -> tuple[Tensor, int]:
    """Return where each document begins, for attention over sequences of different lengths (FlashAttention, varlen).

    Parameters
    ----------
    document_ids : Tensor
        Of shape (rows, tokens), or (tokens,); the tokens of all rows are one sequence.

    Returns
    -------
    (Tensor, int)
        The cumulative lengths, int32, from 0 to the number of tokens, and the longest length.

    Examples
    --------
    >>> import torch
    >>> from zae.data import cu_seqlens
    >>> cu_seqlens(torch.tensor([[0, 0, 1], [0, 0, -1]]))
    (tensor([0, 2, 3, 5, 6], dtype=torch.int32), 2)
    """
    ids = document_ids if document_ids.ndim == 2 else document_ids[None]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([ids.numel()])]).to(torch.int32)
    return ends, int(ends.diff().max()) if len(starts) else 0
