"""How a checkpoint gets to the disk: directly, or in the background from a copy; then what it replaces is removed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from zae.checkpoint.encoding import PLAIN
from zae.checkpoint.folder import Group, Share, plan_share, sweep, write_share
from zae.checkpoint.tensor_bytes import DTYPES, byte_view, view_key
from zae.checkpoint.tensor_files import parse_format
from zae.common.device import can_copy_async
from zae.common.strides import axes_in_memory, copy_with_strides, strides_to_save
from zae.common.walk import is_sharded
from zae.errors import CheckpointError, ConfigError, NonFiniteError
from zae.loop.nonfinite import bad_parameters

__all__ = ["Job", "Saver", "Snapshots", "check_moment", "format_for"]

_log = logging.getLogger("zae")
_PIECE = 1 << 19  # Bytes that a thread copies at a time; less than that is copied directly.
_Buffer: TypeAlias = tuple[Tensor, memoryview]  # With its bytes, which take time to get.
_Spare: TypeAlias = dict[Any, list[_Buffer]]
_THREADS = 4  # More do not copy faster: they wait for the memory.


class Snapshots:
    """Copies states to the host, into memory that is reused for the next one.

    New memory costs as much as the copy itself, so that the memory of the last snapshot is kept.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Any, _Buffer]] = []
        self._pieces: deque[tuple[memoryview, memoryview]] = deque()

    def take(self, state: Any) -> Any:
        """Return a copy of nested dicts, lists and tuples of tensors and plain values; tied tensors stay tied."""
        spare: _Spare = {}
        for kind, buffer in self._buffers:
            spare.setdefault(kind, []).append(buffer)
        self._buffers = []
        self._pieces.clear()
        copied = self._copy(state, spare, {})
        _copy_pieces(self._pieces)
        for device in {device for (*_, device), _ in self._buffers if device is not None}:
            torch.accelerator.synchronize(device)  # It need not be the current one.
        return copied

    def _copy(self, value: Any, spare: _Spare, copies: dict[Any, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), spare, copies)
        if type(value) is dict and PLAIN.issuperset(map(type, value.values())):
            return value.copy()  # A record; a long run has many of them, and their values are immutable.
        if isinstance(value, dict):
            made = {key: self._copy(each, spare, copies) for key, each in value.items()}
            return made if type(value) is dict else _like(value, made)
        if type(value) in (list, tuple):
            return type(value)(self._copy(each, spare, copies) for each in value)
        if type(value) is deque:
            return deque((self._copy(each, spare, copies) for each in value), value.maxlen)
        return value.copy() if hasattr(value, "dtype") and hasattr(value, "copy") else value

    def _tensor(self, value: Tensor, spare: _Spare, copies: dict[Any, Tensor]) -> Tensor:
        key = view_key(value)
        if key is None or type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return value.clone()
        if key not in copies and (strides := strides_to_save(value)) is not None:
            axes = axes_in_memory(value)
            if axes is None:
                copies[key] = copy_with_strides(value.to("cpu"), strides)
            else:  # What is contiguous in the order of memory is copied as any other tensor.
                flat = self._tensor(value.permute(axes).view(-1), spare, copies)
                copies[key] = flat.as_strided(value.shape, strides)
        if key not in copies:
            device = value.device if can_copy_async(value.device) else None
            kind, pinned = (value.dtype, value.shape, device), device is not None
            if buffers := spare.get(kind):
                buffer = buffers.pop()
            else:
                memory = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pinned)
                buffer = memory, byte_view(memory)
            if value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg():
                self._plan(buffer[1], byte_view(value))  # torch would synchronise its threads for each tensor.
            else:
                buffer[0].copy_(value, non_blocking=pinned)
            copies[key] = buffer[0]
            self._buffers.append((kind, buffer))
        return copies[key]

    def _plan(self, target: memoryview, source: memoryview) -> None:
        """Copy a small tensor directly, and split a large one into pieces for several threads."""
        if len(source) < _PIECE:
            target[:] = source
            return
        for start in range(0, len(source), _PIECE):
            self._pieces.append((target[start : start + _PIECE], source[start : start + _PIECE]))


def _copy_pieces(pieces: deque[tuple[memoryview, memoryview]]) -> None:
    """Copy memory in a few threads, each of which takes the next piece: one thread is slower than the memory."""
    count = min(len(pieces), torch.get_num_threads(), _THREADS)
    others = [threading.Thread(target=_copy_some, args=(pieces,), daemon=True) for _ in range(count - 1)]
    for other in others:
        other.start()
    try:
        _copy_some(pieces)
    finally:  # If it is interrupted, no piece may be copied later into the memory of the next state.
        pieces.clear()
        for other in others:
            other.join()


def _copy_some(pieces: deque[tuple[memoryview, memoryview]]) -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # It releases the interpreter lock.


def _like(value: Any, made: dict[Any, Any]) -> Any:
    """Return a dict of the same class, which the encoder distinguishes."""
    copy = value.copy()
    for key, each in made.items():
        copy[key] = each
    return copy


class Job(NamedTuple):
    """One checkpoint to write: its state, what it replaces once it is whole, and the weights that must be finite.

    Where the weights lie in parts on several ranks, all of them write it together: `divide` then replaces the state by
    the share of this rank.
    """

    target: Path
    state: Mapping[str, Any]
    model_format: str
    about: Mapping[str, Any]
    replaces: Sequence[Path]
    trained: Collection[str]
    group: Group = Group()
    share: Share | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank writes the parts that it holds, or the stages."""
        held = [] if self.share is not None else [*self.state["model"].values()]
        in_stages = self.model_format == "sharded" and any(each.is_meta for each in held)
        return self.share is not None or in_stages or any(map(is_sharded, held))

    def divide(self) -> Job:
        """Divide what there is to write among the ranks, which all call it, if the weights lie in parts."""
        if self.is_sharded:
            return self._replace(state={}, share=self._plan("sharded", self.group))
        kind = "safetensors" if self.model_format == "sharded" else self.model_format
        return self._replace(model_format=kind, group=Group())

    def _plan(self, model_format: str, group: Group) -> Share:
        rest = {key: value for key, value in self.state.items() if key != "model"}
        return plan_share(self.target, self.state["model"], rest, self.about, model_format=model_format, group=group)

    def copy(self, snapshots: Snapshots) -> Job:
        """Return the same with copies of the tensors, so that training may change them."""
        if self.share is None:
            return self._replace(state=snapshots.take(self.state))
        return self._replace(share=self.share._replace(files=snapshots.take(self.share.files)))

    def write_folder(self, directory: Path | None = None) -> Path:
        """Write it as a folder that is whole or absent, at its target or elsewhere; read it back if it replaces others.

        A folder elsewhere is brought to another storage, which verifies what it has.
        """
        reads_back = directory is None and bool(self.replaces)
        directory = directory or self.target
        # A whole state is encoded here, in the thread that writes.
        share = self._plan(self.model_format, self.group) if self.share is None else self.share
        check = partial(self._check, share.weights())
        write_share(directory, share, self.group, check, reads_back)
        if self.group.rank == 0:
            sweep(directory.parent)
        return directory

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        """Refuse weights that are not finite."""
        names = {key: key.rpartition("@")[0] for key in weights}
        held = {key: each for key, each in weights.items() if names[key] in self.trained}
        if bad := {names[key] for key in bad_parameters(held)}:
            raise NonFiniteError(
                f"{self.target} was not saved: the parameter {sorted(bad)[0]} contains NaN or infinite values"
                + (f", and {len(bad) - 1} others do" if len(bad) > 1 else "")
                + "; resume from an older checkpoint with a lower learning rate or gradient_clip=1.0"
            )


def format_for(model: nn.Module, save_format: str) -> str:
    """Return the name of a format that can hold the weights of a model; errors name the option."""
    try:
        kind = "sharded" if save_format == "sharded" else parse_format(save_format)
    except ConfigError as error:
        raise ConfigError(f"save_format={save_format!r}: {error}") from None
    for name, tensor in model.state_dict().items() if kind != "ckpt" else ():
        if isinstance(tensor, Tensor) and tensor.dtype not in DTYPES.values():
            raise ConfigError(
                f"save_format={save_format!r} cannot hold {tensor.dtype}, the dtype of {name!r}; "
                + ("" if tensor.is_quantized else "write save_format='ckpt', or ")
                + "convert the model"
            )
    return kind


def check_moment(target: Path, is_evaluating: bool, in_step: bool) -> None:
    """Refuse to save within an evaluation, and warn within a step."""
    if is_evaluating:
        raise CheckpointError(
            f"{target} was not saved: an evaluation is running, with other weights and random numbers than "
            "training; call save_state() in on_epoch_end(), which comes after the validation"
        )
    if in_step:
        _log.warning(
            "%s is saved in the middle of a step, so that what resumes from it is not exact; call save_state() in "
            "checkpoint() or in on_epoch_end()", target,
        )  # fmt: skip


class Saver:
    """Writes checkpoints, one at a time."""

    def __init__(self, background: bool) -> None:
        self.background = background
        self.is_pending = False  # Whether some rank may not know yet what became of the last save.
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_failed = self._is_sharded = False  # Of the last save.

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return {"background": self.background}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["background"])  # type: ignore[misc]

    def begin(self) -> None:
        """Note, on every rank, that one of them is about to save."""
        self.is_pending, self._has_failed = self.background, False

    def save(self, job: Job, write: Callable[[Job], None]) -> None:
        """Write a checkpoint, or begin to."""
        self.wait()
        job = job.divide()
        if not self.background:
            self._write(job, write)
            self._raise_error()
            return
        copied, self._is_sharded = job.copy(self._snapshots), job.is_sharded
        # Not a daemon: a script that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._write, args=(copied, write), name="zae-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._raise_error()

    def has_ended(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Return whether nothing is being written, by all of the ranks that write; all call it."""
        ended = self._thread is None or not self._thread.is_alive()
        return all(gather(ended)) if self._is_sharded else ended

    @property
    def outcome(self) -> tuple[bool, bool]:
        """Whether the last save is still being written, and whether it has failed."""
        return self._thread is not None, self._has_failed

    def learn_of_failure(self, is_pending: bool, has_failed: bool) -> bool:
        """Take the outcome of rank 0; return whether that save has failed and this rank has not known it."""
        known, self.is_pending, self._has_failed = self._has_failed, is_pending, has_failed
        return has_failed and not known

    def _write(self, job: Job, write: Callable[[Job], None]) -> None:
        try:
            write(job)
        except BaseException as error:
            self._error = error

    def _raise_error(self) -> None:
        """Raise what the last save, which has ended, failed with."""
        self._thread, error, self._error, self._is_sharded = None, self._error, None, False
        if error is not None:
            self._has_failed = True
            raise error
