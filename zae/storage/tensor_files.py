"""Tensors as the bytes of a file, and back: safetensors, and the zip file of ``torch.save``.

Writers call a function with buffers, and `zae.storage.files` owns the file behind it. The library safetensors reads its
files: each tensor straight into its own memory, so a file is read once and held once. What is here beside it: limits on
hostile headers, which are looked at before the library is, ties, and the hash.
"""

from __future__ import annotations

import io
import json
import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zae.errors import CheckpointDamaged, CheckpointError
from zae.storage.hashed_io import Input
from zae.storage.strict_json import strict_json

__all__ = [
    "DTYPES",
    "byte_count",
    "byte_view",
    "dense",
    "from_bytes",
    "moved",
    "read_ckpt",
    "read_safetensors",
    "read_trusted",
    "separate",
    "view_key",
    "write_ckpt",
    "write_safetensors",
]

HEADER_LIMIT = 64 << 20
"""The largest safetensors header that is written or read, in bytes: some 400,000 tensors."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
    }.items()
    if hasattr(torch, torch_name)  # an older torch lacks some
}
"""The dtypes that safetensors holds, by their names in its header."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TIES = "zae.tied"
_AXES = 1024  # torch takes time with the square of their number
_LENGTH = 8  # the header's length, little endian, opens the file
_KEYS = frozenset({"str", "int", "bool", "float", "None", "bytes_or_str"})  # what a dict in a pickle may have as keys
_ORDERED = "collections OrderedDict"
_PADDING = 1 << 16  # the most white space in a header that is not within its text: some tools align tensors to a page


def view_key(tensor: Tensor) -> tuple[object, ...] | None:
    """Say which view of which memory a tensor is; two that give the same are one tensor.

    Parameters
    ----------
    tensor : Tensor
        Any tensor.

    Returns
    -------
    tuple or None
        None where the question has no answer: an empty tensor, or one without memory of its own.

    Examples
    --------
    >>> weight = torch.ones(2, 3)
    >>> view_key(weight) == view_key(weight.detach()), view_key(weight) == view_key(weight.t())
    (True, False)
    """
    try:
        pointer = tensor.untyped_storage().data_ptr()
        if not pointer or not tensor.numel():
            return None
        place = (str(tensor.device), pointer, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
    except (RuntimeError, NotImplementedError, ValueError):
        return None


def dense(tensor: Tensor, name: str) -> Tensor:
    """Return a plain contiguous tensor on the CPU with the same values; the tensor itself where it is one.

    Parameters
    ----------
    tensor : Tensor
        A dense tensor on any device.
    name : str
        What to call it in a message.

    Returns
    -------
    Tensor
        Detached; it shares memory with `tensor` where that is possible.

    Raises
    ------
    CheckpointError
        The tensor has no bytes of its own: sparse, quantized, on the meta device, or distributed.

    Examples
    --------
    >>> dense(torch.ones(2, 3).t(), "weight").is_contiguous()
    True
    >>> dense(torch.ones(2, device="meta"), "weight")
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointError: weight is a Tensor on meta (torch.strided), which has no bytes to store; \
store the dense tensor that it stands for
    """
    try:
        host = tensor.detach()
        if host.layout is torch.strided and not host.is_quantized and not host.is_meta:
            host = host.to("cpu").resolve_conj().resolve_neg().contiguous()
            # A tensor that wraps others (DTensor) says so only when asked for its memory.
            if host.untyped_storage().data_ptr() or not host.numel():
                return host
    except (RuntimeError, NotImplementedError, ValueError):
        pass
    where = f"on {tensor.device} ({tensor.layout})"
    raise CheckpointError(
        f"{name} is a {type(tensor).__name__} {where}, which has no bytes to store; "
        "store the dense tensor that it stands for"
    )


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor without a copy.

    Parameters
    ----------
    tensor : Tensor
        As `dense` returns it.

    Returns
    -------
    memoryview
        Of single bytes; it keeps the memory alive. Writing to it writes to the tensor.

    Examples
    --------
    >>> bytes(byte_view(torch.tensor([1, 2], dtype=torch.int16)))
    b'\\x01\\x00\\x02\\x00'
    """
    size = tensor.element_size()
    count = tensor.numel() * size
    if not count:
        return memoryview(bytearray())
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (count,), (1,))
    return flat.numpy().data


def from_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of this dtype and shape over the memory of a tensor of bytes.

    Parameters
    ----------
    data : Tensor
        uint8, contiguous, from the start of its memory.
    dtype : torch.dtype
        Any.
    shape : tuple of int
        It must take up exactly the bytes given.

    Returns
    -------
    Tensor
        Shares memory with `data`.

    Raises
    ------
    ValueError
        The shape takes another number of bytes.

    Examples
    --------
    >>> from_bytes(torch.tensor([1, 0, 2, 0], dtype=torch.uint8), torch.int16, (2,))
    tensor([1, 2], dtype=torch.int16)
    """
    made = torch.empty(0, dtype=dtype, device="cpu")
    # set_ would enlarge the memory to fit, and what it adds is not initialised.
    if len(shape) > _AXES or data.dtype is not torch.uint8 or math.prod(shape) * made.element_size() != data.numel():
        raise ValueError(f"{data.numel()} values of {data.dtype} are no tensor of shape {shape!s:.80} and {dtype}")
    if not data.numel():
        return torch.empty(shape, dtype=dtype, device="cpu")
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return made.set_(data.untyped_storage(), 0, shape, strides)


def separate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split named tensors into those to write and the names that are ties to one of them.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        A model's state.

    Returns
    -------
    kept : dict of str to Tensor
        Of several names for one identical view, the first.
    tied : dict of str to str
        Each further name, and the name kept for it. Views that overlap without being identical are
        no ties; each is written by itself.

    Raises
    ------
    CheckpointError
        A value is no tensor, or a name is no text that a file can hold.

    Examples
    --------
    >>> shared = torch.ones(2)
    >>> kept, tied = separate({"embed.weight": shared, "head.weight": shared, "row": shared[:1]})
    >>> list(kept), tied
    (['embed.weight', 'row'], {'head.weight': 'embed.weight'})
    """
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__" or not name.isprintable():
            raise CheckpointError(f"the model's state has the key {name!r:.80}, which no file can hold; rename it")
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"the model's state holds a {type(tensor).__name__} at {name!r}, where a tensor belongs; "
                "return a tensor from get_extra_state(), or leave it out of the model's state"
            )
        key = view_key(tensor)
        first = name if key is None else seen.setdefault(key, name)
        if first == name:
            kept[name] = tensor
        else:
            tied[name] = first
    return kept, tied


def write_safetensors(
    write: Callable[[Any], object], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as one safetensors file; tied ones once.

    The library's own writers are not used. ``serialize`` holds all tensors a second time. ``serialize_file`` needs all
    of them on the host at once, hashes nothing (the file would have to be read again), reports a full disk without its
    error number, waits for no disk, and writes notes in another order each time: equal states give different files.

    Parameters
    ----------
    write : callable
        Takes one buffer after the other; it may keep them.
    tensors : mapping of str to Tensor
        Dense tensors on any device; each is brought to the CPU when its turn comes.
    metadata : mapping of str to str, optional
        Text to put into the header. Ties are added to it: name to name, as ``safetensors.torch.save_model`` does.

    Raises
    ------
    CheckpointError
        A tensor's dtype is not in `DTYPES`, it has no bytes to store, or the header is too large.

    Examples
    --------
    >>> stream = io.BytesIO()
    >>> write_safetensors(stream.write, {"bias": torch.zeros(2)})
    >>> stream.getvalue()[8:]
    b'{"__metadata__":{"format":"pt"},"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00'
    """
    kept, tied = separate(tensors)
    for name, tensor in kept.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                f"{name!r} is of {tensor.dtype}, which safetensors cannot hold; save it as .ckpt, or convert it"
            )
    notes = {**tied, "format": "pt", **(metadata or {})}
    if tied:
        notes[_TIES] = json.dumps(tied)  # a note's key and value may look like a tie by chance; this one does not
    # The largest elements first: each tensor then starts at a multiple of its element's size.
    order = sorted(kept, key=lambda name: (-kept[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": notes}
    end = 0
    for name in order:
        begin, end = end, end + kept[name].numel() * kept[name].element_size()
        entry = {"dtype": _NAMES[kept[name].dtype], "shape": list(kept[name].shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"{len(kept)} tensors need a header of {len(text)} bytes; the limit is {HEADER_LIMIT}")
    write(len(text).to_bytes(_LENGTH, "little") + text)
    for name in order:
        write(byte_view(dense(kept[name], name)))


def read_safetensors(source: Input) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read one safetensors file that may be hostile.

    Parameters
    ----------
    source : Input
        The open file, at its beginning. All that is read of it is hashed.

    Returns
    -------
    tensors : dict of str to Tensor
        On the CPU, each with memory of its own. Tied names give the same tensor.
    metadata : dict of str to str
        The notes of the header, without the ties.

    Raises
    ------
    CheckpointDamaged
        The header is missing, is too large, or does not describe exactly the bytes that follow it.

    Examples
    --------
    >>> import tempfile
    >>> from zae.storage.hashed_io import opened
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "model.safetensors")
    ...     with open(path, "wb") as file:
    ...         write_safetensors(file.write, {"bias": torch.zeros(2)}, {"step": "3"})
    ...     with opened(path) as source:
    ...         read_safetensors(source)
    ({'bias': tensor([0., 0.])}, {'format': 'pt', 'step': '3'})
    """
    try:
        notes = _check_header(source)
        # With its default backend the tensors would be views of the mapped file: a file that is cut then ends the
        # process, and one that is removed keeps its place on the disk. It makes them on torch's default device.
        with torch.device("cpu"), safe_open(source.path, framework="pt", backend="pread") as file:
            tensors: dict[str, Tensor] = file.get_tensors()
            order = file.offset_keys()
        for name in order:
            source.skip(byte_view(tensors[name]))
        tied = _ties(notes, tensors, str(source.path))
        tensors.update({alias: tensors[name] for alias, name in tied.items()})
    # What the library, torch and Python make of a hostile number is damage, too.
    except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError, AttributeError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"{source.path}: not a whole safetensors file ({str(error)[:200]}).") from error
    hidden = {"__metadata__", _TIES, *tied}
    return tensors, {key: note for key, note in notes.items() if key not in hidden}


def write_ckpt(write: Callable[[Any], object], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as ``torch.save`` does, as a plain dict on the CPU that ``weights_only=True`` loads.

    Parameters
    ----------
    write : callable
        Takes one buffer after the other; it may keep them.
    tensors : mapping of str to Tensor
        Dense tensors on any device. Tied ones are stored once and are tied again after loading.

    Raises
    ------
    CheckpointError
        A tensor has no bytes to store.

    Examples
    --------
    >>> stream = io.BytesIO()
    >>> write_ckpt(stream.write, {"bias": torch.zeros(2)})
    >>> torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    {'bias': tensor([0., 0.])}
    """
    kept, tied = separate(tensors)
    made: dict[str, Tensor] = {}
    for name, tensor in kept.items():
        host = dense(tensor, name)
        # torch.save writes the whole memory behind a view: a view that is less than that gets its own.
        whole = host.untyped_storage().nbytes() == host.numel() * host.element_size()
        made[name] = host if whole else host.clone()
    sink = _Sink(write, {host.data_ptr(): byte_view(host) for host in made.values()})
    torch.save({name: made[tied.get(name, name)] for name in tensors}, cast("IO[bytes]", sink))


def read_ckpt(data: bytes | bytearray, where: str) -> dict[str, Tensor]:
    """Read what ``torch.save`` wrote, without running any code that it may hold.

    Parameters
    ----------
    data : bytes or bytearray
        The whole file.
    where : str
        The file, for messages.

    Returns
    -------
    dict of str to Tensor
        On the CPU.

    Raises
    ------
    CheckpointDamaged
        No zip file of torch's, one that needs code to be read, or one that holds no plain dict of tensors.

    Examples
    --------
    >>> read_ckpt(b"cos\\nsystem\\n", "model.ckpt")
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointDamaged: model.ckpt: not loaded: contains code, or is cut short \
(a bare pickle, or no zip file of torch.save). Get the weights as .safetensors, or as .ckpt with a dict of tensors.
    """
    try:
        _refuse_odd_pickle(_refuse_odd_zip(data))
        made = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # torch answers a hostile file with nearly any exception; none of them may reach the caller as it is.
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:160]
        raise CheckpointDamaged(
            f"{where}: not loaded: contains code, or is cut short ({reason}). "
            "Get the weights as .safetensors, or as .ckpt with a dict of tensors."
        ) from error
    if isinstance(made, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in made.items()):
        return dict(made)
    found = f"a dict with the keys {list(made)[:5]!r:.120}" if isinstance(made, dict) else f"a {type(made).__name__}"
    raise CheckpointDamaged(f"{where}: holds {found}, not a dict of tensors by name. Store the model's state alone.")


def read_trusted(path: Path) -> dict[str, Tensor]:
    """Read what ``torch.save`` wrote, and run whatever code it holds.

    Parameters
    ----------
    path : Path
        A file that is trusted.

    Returns
    -------
    dict of str to Tensor
        The state of a model: of a module that was saved whole, or of a dict of tensors.

    Raises
    ------
    CheckpointDamaged
        It holds something else.
    """
    made = torch.load(path, map_location="cpu", weights_only=False)
    made = made.state_dict() if isinstance(made, nn.Module) else made
    if isinstance(made, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in made.items()):
        return dict(made)
    raise CheckpointDamaged(f"{path}: holds a {type(made).__name__}, no module and no dict of tensors by name")


def byte_count(*tensors: Tensor) -> int:
    """Return how many bytes tensors take, each counted for itself.

    Parameters
    ----------
    *tensors : Tensor
        Of any device.

    Returns
    -------
    int
        A file of them is a little larger.

    Examples
    --------
    >>> byte_count(torch.zeros(2, 3), torch.zeros(1, dtype=torch.bool))
    25
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def moved(tensors: Mapping[str, Tensor], device: str | torch.device) -> dict[str, Tensor]:
    """Return tensors on a device; those that are one stay one.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        By name.
    device : str or torch.device
        Where to.

    Returns
    -------
    dict of str to Tensor
        The tensors themselves where they are there already.

    Examples
    --------
    >>> shared = torch.ones(2)
    >>> made = moved({"a": shared, "b": shared}, "cpu")
    >>> made["a"] is made["b"]
    True
    """
    made = {id(tensor): tensor.to(device) for tensor in tensors.values()}
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


class _Sink(io.RawIOBase):
    """The file that torch.save believes it writes to."""

    def __init__(self, write: Callable[[Any], object], owned: Mapping[int, memoryview]) -> None:
        self._write = write
        self._owned = owned

    def writable(self) -> bool:
        """Say yes, as torch asks."""
        return True

    def write(self, data: Any) -> int:
        """Pass a buffer on: the tensor that it shows, or else a copy, for torch may reuse the memory after this."""
        view = memoryview(data).cast("B")
        tensor = self._owned.get(np.frombuffer(view, np.uint8).ctypes.data) if view else None
        self._write(tensor if tensor is not None and len(tensor) == len(view) else bytes(view))
        return len(view)


def _check_header(source: Input) -> dict[str, str]:
    """Refuse a header that would cost the library time or memory, or that two readers could read in two ways."""
    if source.size < _LENGTH:
        raise ValueError(f"{source.size} bytes are less than the {_LENGTH} that open one")
    opening = bytearray(_LENGTH)
    source.fill(memoryview(opening))
    length = int.from_bytes(opening, "little")
    if length > min(HEADER_LIMIT, source.size - _LENGTH):
        raise ValueError(
            f"its header claims {length} bytes; the file has {source.size}, and the limit is {HEADER_LIMIT}"
        )
    text = bytearray(length)
    source.fill(memoryview(text))
    header = strict_json(bytes(text), str(source.path), spaces=_PADDING)
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise ValueError("the metadata of the header is not text")
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"its header describes {name!r:.80} in another way than dtype, shape and data_offsets")
        if not isinstance(entry["shape"], list) or len(entry["shape"]) > _AXES:
            raise ValueError(f"{name!r:.80} has a shape that is not a list of at most {_AXES} numbers")
    return notes


def _ties(notes: Mapping[str, str], tensors: Mapping[str, Tensor], where: str) -> dict[str, str]:
    """Return the ties that the notes name: our own entry, else the convention of safetensors.torch.save_model."""
    if _TIES not in notes:
        return {key: note for key, note in notes.items() if key not in tensors and key != "format" and note in tensors}
    tied = strict_json(notes[_TIES].encode(), where)
    for alias, name in tied.items() if isinstance(tied, dict) else [("", tied)]:
        if alias in tensors or not isinstance(name, str) or name not in tensors:
            raise ValueError(f"{alias!r:.80} is tied to {name!r:.80}, which the file does not hold")
    return cast("dict[str, str]", tied)


def _refuse_odd_zip(data: bytes | bytearray) -> bytes:
    """Return the pickle in a zip file, and refuse what torch.save does not write: other formats, TorchScript, bombs."""
    if data[:4] != b"PK\x03\x04":
        raise ValueError("a bare pickle, or no zip file of torch.save")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("a compressed zip file, which torch.save does not write")
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("a zip file that claims more than it holds")
        if any("/code/" in entry.filename or entry.filename.endswith("constants.pkl") for entry in entries):
            raise ValueError("a TorchScript archive, which is a program")
        pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{len(pickles)} pickles of tensors, where there must be one")
        return archive.read(pickles[0])


def _refuse_odd_pickle(data: bytes) -> None:
    """Refuse a pickle that costs more time than its size: torch's interpreter is slow, and keys of a dict may collide.

    The stack is followed as pickletools describes each operation, with the kinds of values in place of values.
    """
    stack: list[str] = []
    marks: list[int] = []
    memo: dict[Any, str] = {}
    calls = 0
    for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
        name, before = operation.name, operation.stack_before
        if count > 2000 + 0.4 * len(data) or calls > 1000 + len(data) / 40:
            raise ValueError("more operations than a dict of tensors takes")
        if name == "MARK":
            marks.append(len(stack))
            continue
        has_mark = pickletools.markobject in before
        start = marks.pop() if has_mark else len(stack) - len(before)
        taken = stack[start:]
        del stack[start - (before.index(pickletools.markobject) if has_mark else 0) :]
        if name in ("SETITEM", "SETITEMS") and not _KEYS.issuperset(taken[1::2] if name == "SETITEM" else taken[::2]):
            raise ValueError("a dict with keys that are neither text nor small numbers")
        if name in ("REDUCE", "NEWOBJ"):
            calls += 1
            if taken[0] == _ORDERED and taken[1] != "EMPTY_TUPLE":
                raise ValueError("a dict that is not filled as torch.save does")
        if name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif operation.stack_after:
            stack.append(_kind_of(name, operation.stack_after[0].name, argument))


def _kind_of(operation: str, made: str, argument: Any) -> str:
    """Return what an operation of a pickle puts on the stack: the kind of a value, or the name of a function."""
    if operation in ("GLOBAL", "STACK_GLOBAL", "INST"):
        if argument != _ORDERED and not str(argument).startswith(("torch ", "torch.")):
            raise ValueError(f"it names {str(argument)[:80]!r}, which weights do not need")
        return str(argument)
    if made == "int" and not -(2**63) <= argument < 2**63:
        return "a large number"
    return operation if operation == "EMPTY_TUPLE" else made
