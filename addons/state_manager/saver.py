"""How a checkpoint gets to the disk: directly, or in the background from a copy; then what it replaces is removed.

A state becomes files in memory first, in the thread that trains (`zae.checkpoint.writer.plan`). The copy for the
background is one of the tensors in these, and both are written alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from zae.checkpoint.tensor_bytes import DTYPES, byte_view
from zae.checkpoint.tensor_files import parse_format
from zae.checkpoint.writer import Files, SavePlan
from zae.device import can_copy_async
from zae.errors import CheckpointError, ConfigError, NonFiniteError
from zae.loop.nonfinite import bad_parameters
from zae.values.strides import view_key
from zae.values.walk import is_sharded

__all__ = ["Saver", "Snapshots", "check_moment", "format_for", "lies_in_parts", "refuse_nonfinite"]

_log = logging.getLogger("zae")
_Kind: TypeAlias = "tuple[torch.dtype, torch.Size, torch.device | None]"  # The device that its memory is pinned for.


class Snapshots:
    """Copies tensors to the host, into memory that is reused for the next ones.

    New memory costs as much as the copy itself, so that the memory of the last snapshot is kept.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[_Kind, Tensor]] = []  # Those of the last snapshot.

    def take(self, files: Files) -> Files:
        """Return the same files with copies of their tensors; tied tensors stay tied."""
        spare: dict[_Kind, list[Tensor]] = {}
        for kind, buffer in self._buffers:
            spare.setdefault(kind, []).append(buffer)
        self._buffers = []
        copies: dict[tuple[object, ...], Tensor] = {}
        copied: Files = {}
        for file, content in files.items():
            if isinstance(content, dict):
                content = {name: self._copy(tensor.detach(), spare, copies) for name, tensor in content.items()}
            copied[file] = content
        for device in {device for (*_, device), _ in self._buffers if device is not None}:
            torch.accelerator.synchronize(device)  # It need not be the current one.
        return copied

    def _copy(
        self, value: Tensor, spare: dict[_Kind, list[Tensor]], copies: dict[tuple[object, ...], Tensor]
    ) -> Tensor:
        key = view_key(value)
        if key is None or type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return value.clone()
        if key in copies:
            return copies[key]
        device = value.device if can_copy_async(value.device) else None
        kind = (value.dtype, value.shape, device)
        if spare.get(kind):
            buffer = spare[kind].pop()
        else:
            buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=device is not None)
        if value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg():
            byte_view(buffer)[:] = byte_view(value)  # torch would synchronise its threads for each tensor.
        else:
            buffer.copy_(value, non_blocking=device is not None)
        copies[key] = buffer
        self._buffers.append((kind, buffer))
        return buffer


def lies_in_parts(weights: Mapping[str, Tensor], model_format: str) -> bool:
    """Return whether each rank writes the tensors, or the parts of tensors, that it has; else one writes everything."""
    if any(map(is_sharded, weights.values())):
        return True
    # A stage of a pipeline has the weights of the other stages on the meta device.
    return model_format == "sharded" and any(weight.is_meta for weight in weights.values())


def refuse_nonfinite(target: Path, trained: Collection[str], weights: Mapping[str, Tensor]) -> None:
    """Refuse to save trained parameters that are not finite; the names of weights end with ``@`` and their offsets."""
    names = {key: key.rpartition("@")[0] for key in weights}
    parameters = {key: weight for key, weight in weights.items() if names[key] in trained}
    bad = sorted({names[key] for key in bad_parameters(parameters)})
    if bad:
        others = f", and {len(bad) - 1} others do" if len(bad) > 1 else ""
        raise NonFiniteError(
            f"{target} was not saved: the parameter {bad[0]} contains NaN or infinite values{others}; "
            "resume from an older checkpoint with a lower learning rate or gradient_clip=1.0"
        )


def format_for(model: nn.Module, save_format: str) -> str:
    """Return the name of a format that can hold the weights of a model; errors name the option."""
    try:
        kind = "sharded" if save_format == "sharded" else parse_format(save_format)
    except ConfigError as error:
        raise ConfigError(f"save_format={save_format!r}: {error}") from None
    if kind == "ckpt":
        return kind
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.dtype not in DTYPES.values():
            other = "" if tensor.is_quantized else "write save_format='ckpt', or "
            raise ConfigError(
                f"save_format={save_format!r} cannot hold {tensor.dtype}, the dtype of {name!r}; {other}convert the "
                "model"
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
            "checkpoint() or in on_epoch_end()",
            target,
        )


class Saver:
    """Writes checkpoints, one at a time."""

    def __init__(self, background: bool) -> None:
        self.background = background
        self.is_pending = False  # Whether some rank may not know yet what became of the last save.
        self._snapshots = Snapshots()
        self._future: Future[None] | None = None  # Of what a thread writes.
        self.has_failed = False  # Of the last save in the background.

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return {"background": self.background}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["background"])  # type: ignore[misc]

    def begin(self) -> None:
        """Note, on every rank, that one of them is about to save."""
        self.is_pending = self.background
        self.has_failed = False

    def save(self, plan: SavePlan, write: Callable[[SavePlan], None]) -> None:
        """Write a checkpoint, or begin to."""
        self.wait()
        if not self.background:
            write(plan)
            return
        copied = plan._replace(files=self._snapshots.take(plan.files))
        # A thread for each: one that waits for the next would be missing in a forked process. A script that ends waits.
        executor = ThreadPoolExecutor(1, "zae-save")
        self._future = executor.submit(write, copied)
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise what it failed with."""
        future = self._future
        if future is None:
            return
        error = future.exception()
        self._future = None
        if error is not None:
            self.has_failed = True
            raise error

    def has_ended(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Return whether nothing is being written, by any rank; all call it."""
        return all(gather(self._future is None or self._future.done()))

    def learn_of_failure(self, has_failed: bool) -> bool:
        """Take the outcome of rank 0; return whether that save has failed and this rank has not known it."""
        is_news = has_failed and not self.has_failed
        self.is_pending = False
        self.has_failed = has_failed
        return is_news
