"""How a checkpoint gets to the disk: at once, or in the background from a copy; then what it replaces is removed."""

from __future__ import annotations

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from zae.common.device import copies_by_itself
from zae.common.optimizer_state import check_optimizer_states
from zae.composition.metaclass import add_ons_of
from zae.errors import CheckpointError, CheckpointNotFound, ConfigError, NonFiniteError
from zae.loop.nonfinite import bad_parameters
from zae.storage.checkpoint import save_checkpoint
from zae.storage.encoding import PLAIN
from zae.storage.filesystem import remove_checkpoint
from zae.storage.manifest import verify
from zae.storage.plain_names import named_parameters
from zae.storage.tensor_bytes import DTYPES, byte_view, view_key
from zae.storage.weights_file import parse_format

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["Job", "Saver", "Snapshots", "format_for", "job_of"]

_log = logging.getLogger("zae")

_PIECE = 1 << 19  # Bytes that a thread copies at a time; less than that is copied at once.
_THREADS = 4  # More do not copy faster: the memory is at its end.


class Job(NamedTuple):
    """One checkpoint to be written, the ones to be removed once it is whole, and the weights that must be finite."""

    target: Path
    state: Mapping[str, Any]
    model_format: str
    about: Mapping[str, Any]
    replaces: Sequence[Path]
    trained: Collection[str]

    def write(self) -> None:
        """Write, read back, and only then remove."""
        weights = self.state["model"]
        rest = {key: value for key, value in self.state.items() if key != "model"}
        save_checkpoint(
            self.target, weights, rest, check=self._check, model_format=self.model_format, manifest_info=self.about
        )
        if not self.replaces:
            return
        verify(self.target)
        for path in self.replaces:
            try:
                remove_checkpoint(path)
            except CheckpointNotFound:  # Somebody made room by hand.
                continue
            except CheckpointError as error:  # A folder that stays costs space, not the run.
                _log.warning("%s", error)

    def _check(self) -> None:
        """Refuse weights that are not finite."""
        weights = self.state["model"]
        if bad := bad_parameters({name: weights[name] for name in self.trained if name in weights}):
            raise NonFiniteError(
                f"{self.target} was not saved: the parameter {sorted(bad)[0]} contains NaN or infinite values"
                + (f", and {len(bad) - 1} others do" if len(bad) > 1 else "")
                + "; go on from an older checkpoint, with a lower learning rate or gradient_clip=1.0"
            )


def job_of(
    trainer: Trainer,
    target: Path,
    state: Mapping[str, Any],
    kind: str,
    about: Mapping[str, Any],
    replaces: Sequence[Path],
) -> Job:
    """Return the job that writes a state of a trainer.

    Parameters
    ----------
    trainer : Trainer
        Whose state it is.
    target : Path
        Where the checkpoint is to stand.
    state : mapping
        What its ``state_dict`` returned.
    kind : str
        The format of the weights.
    about : mapping
        ``run_id``, ``world_size`` and ``info`` of the manifest.
    replaces : sequence of Path
        The checkpoints that are removed once this one is whole.

    Returns
    -------
    Job
        Nothing is written yet.

    Raises
    ------
    CheckpointError
        An evaluation is under way: weights and random streams are not those of training. Or the state of an optimizer
        would be another one after a resume.
    """
    _check_moment(trainer, target)
    check_optimizer_states(trainer.optimizers, state["optimizer"])
    progress = trainer.progress_checker
    composition = [add_on.__name__ for add_on in add_ons_of(type(trainer))]
    about = {"step": progress.step, "epoch": progress.epoch, "composition": composition, **about}
    trained = {name for name, each in named_parameters(trainer.unwrap()).items() if each.requires_grad}
    return Job(target, state, kind, about, replaces, trained)


def format_for(model: nn.Module, save_format: str) -> str:
    """Return the one name of a format that can hold the weights of a model; errors name the option.

    Parameters
    ----------
    model : Module
        Whose state is to be saved.
    save_format : str
        As it was given.

    Returns
    -------
    str
        "safetensors" or "ckpt".

    Raises
    ------
    ConfigError
        The format is unknown, or cannot hold a dtype: then with the tensor, and the format that can.

    Examples
    --------
    >>> format_for(torch.nn.Linear(2, 1, dtype=torch.complex128), "safetensors")
    Traceback (most recent call last):
    ...
    zae.errors.ConfigError: save_format='safetensors' cannot hold torch.complex128, the dtype of 'weight'; write \
save_format='ckpt', or convert the model
    """
    try:
        kind = parse_format(save_format)
    except ConfigError as error:
        raise ConfigError(f"save_format={save_format!r}: {error}") from None
    for name, tensor in model.state_dict().items() if kind == "safetensors" else ():
        if isinstance(tensor, Tensor) and tensor.dtype not in DTYPES.values():
            raise ConfigError(
                f"save_format={save_format!r} cannot hold {tensor.dtype}, the dtype of {name!r}; write "
                "save_format='ckpt', or convert the model"
            )
    return kind


def _check_moment(trainer: Trainer, target: Path) -> None:
    """Refuse a save within an evaluation, and say what one within a step is worth."""
    if trainer.loader_position.is_evaluating:
        raise CheckpointError(
            f"{target} was not saved: an evaluation is running, with other weights and random numbers than "
            "training; call save_state() in on_epoch_end(), which comes after the validation"
        )
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "run_batch" and frame.f_locals.get("self", frame.f_locals.get("trainer")) is trainer:
            _log.warning(
                "%s is saved in the middle of a step, so that what resumes from it is not exact; call save_state() in "
                "checkpoint() or in on_epoch_end()", target,
            )  # fmt: skip
            return
        frame = frame.f_back


class Saver:
    """Writes checkpoints, one at a time.

    Parameters
    ----------
    background : bool
        Whether `save` returns once the state is copied; a thread then writes it. A failure is raised by the next
        `save`, `wait` or `poll`.

    Attributes
    ----------
    is_open : bool
        Whether it is still to be told, to this rank too, what has become of the last save.

    Examples
    --------
    >>> Saver(background=True).wait()
    """

    def __init__(self, background: bool) -> None:
        self.background = background
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.is_open = self._failed = False

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return {"background": self.background}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["background"])  # type: ignore[misc]

    def begin(self, world_size: int) -> None:
        """Note, on every rank, that one of so many is going to save."""
        self.is_open, self._failed = self.background or world_size > 1, False

    def learns(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Tell whether the last save has failed where it was written, and this rank has not known; all ranks call it.

        Parameters
        ----------
        gather : callable
            That of the trainer.

        Returns
        -------
        bool
            Always False on the rank that writes.
        """
        self.is_open, failed = gather((self._thread is not None, self._failed))[0]
        known, self._failed = self._failed, failed
        return bool(failed and not known)

    def save(self, job: Job) -> None:
        """Write a checkpoint, or begin to."""
        self.wait()
        if not self.background:
            self._work(job)
            self.poll()
            return
        copied = job._replace(state=self._snapshots.take(job.state))
        # No daemon: a script that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._work, args=(copied,), name="zae-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self.poll()

    def poll(self) -> None:
        """Raise what the last save failed with, when it is over."""
        if self._thread is None or not self._thread.is_alive():
            self._thread, error, self._error = None, self._error, None
            if error is not None:
                self._failed = True
                raise error

    def _work(self, job: Job) -> None:
        try:
            job.write()
        except BaseException as error:
            self._error = error


class Snapshots:
    """Copies of states on the host, into memory that is used again for the next one.

    New memory costs as much as the copy itself, so that of the last snapshot is kept: a state is held twice.

    Examples
    --------
    >>> snapshots, weight = Snapshots(), torch.zeros(2)
    >>> state = snapshots.take({"model": {"a": weight, "b": weight}})
    >>> _ = weight.add_(1)
    >>> state["model"]["a"].tolist(), state["model"]["a"] is state["model"]["b"]
    ([0.0, 0.0], True)
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Any, Tensor]] = []
        self._pieces: deque[tuple[memoryview, memoryview]] = deque()

    def take(self, state: Any) -> Any:
        """Copy a state, which may change as soon as this has returned.

        Parameters
        ----------
        state : object
            Dicts, lists and tuples of tensors and plain values. What is one tensor stays one.

        Returns
        -------
        object
            Of the same structure, on the host.
        """
        spare: dict[Any, list[Tensor]] = {}
        for kind, buffer in self._buffers:
            spare.setdefault(kind, []).append(buffer)
        self._buffers = []
        self._pieces.clear()
        copied = self._copy(state, spare, {})
        _copy_pieces(self._pieces)
        for device in {device for (*_, device), _ in self._buffers if device is not None}:
            torch.accelerator.synchronize(device)  # It need not be the present one.
        return copied

    def _copy(self, value: Any, spare: dict[Any, list[Tensor]], copies: dict[Any, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), spare, copies)
        if type(value) is dict and PLAIN.issuperset(map(type, value.values())):
            return value.copy()  # A record: a long run has many of them, and nothing in them changes.
        if isinstance(value, dict):
            made = {key: self._copy(each, spare, copies) for key, each in value.items()}
            return made if type(value) is dict else _like(value, made)
        if type(value) in (list, tuple):
            return type(value)(self._copy(each, spare, copies) for each in value)
        return value.copy() if hasattr(value, "dtype") and hasattr(value, "copy") else value

    def _tensor(self, value: Tensor, spare: dict[Any, list[Tensor]], copies: dict[Any, Tensor]) -> Tensor:
        key = view_key(value)
        if key is None or type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return value.clone()
        if key not in copies:
            device = value.device if copies_by_itself(value.device) else None
            kind, pinned = (value.dtype, value.shape, device), device is not None
            buffers = spare.get(kind)
            buffer = buffers.pop() if buffers else torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            if value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg():
                self._plan(byte_view(buffer), byte_view(value))  # torch's threads would meet for each tensor.
            else:
                buffer.copy_(value, non_blocking=pinned)
            copies[key] = buffer
            self._buffers.append((kind, buffer))
        return copies[key]

    def _plan(self, target: memoryview, source: memoryview) -> None:
        """Copy a little at once, and leave much to several threads."""
        if len(source) < _PIECE:
            target[:] = source
            return
        for start in range(0, len(source), _PIECE):
            self._pieces.append((target[start : start + _PIECE], source[start : start + _PIECE]))


def _copy_pieces(pieces: deque[tuple[memoryview, memoryview]]) -> None:
    """Copy memory in a few threads, each of which takes the next piece: one alone is slower than the memory is."""
    count = min(len(pieces), torch.get_num_threads(), _THREADS)
    others = [threading.Thread(target=_copy_some, args=(pieces,), daemon=True) for _ in range(count - 1)]
    for other in others:
        other.start()
    try:
        _copy_some(pieces)
    finally:  # Interrupted, it leaves nothing behind that would be copied into what the next state is held in.
        pieces.clear()
        for other in others:
            other.join()


def _copy_some(pieces: deque[tuple[memoryview, memoryview]]) -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # It lets other threads run.


def _like(value: Any, made: dict[Any, Any]) -> Any:
    """A dict of the same class: what the encoder tells apart stays apart."""
    copy = value.copy()
    for key, each in made.items():
        copy[key] = each
    return copy
