"""Copy batches to the device on a second stream, while the previous step is still running."""

from __future__ import annotations

import logging
from typing import Any

import torch

from zae.addon import AddOnBase, Description
from zae.data.loaders import describe, has_pinned_batches
from zae.device import can_copy_async, plain_tensors
from zae.trainer import Trainer

__all__ = ["PrefetchAddon"]

_log = logging.getLogger("zae")


class PrefetchAddon(AddOnBase):
    """Copy batches from pinned memory on a second stream, while the device computes.

    The copy of the next batch runs while the device still computes the previous step. No batch is drawn earlier than
    without this add-on, so that random numbers, checkpoints and results are the same.

    The gain is large only where a copy takes long compared with a step: with large batches, from a DataLoader with
    workers and ``pin_memory=True``. There is none where the host waits for each step, as with ``on_nonfinite="skip"``
    or float16. The add-on does nothing, and says so in ``plan()``, on the CPU, where a class overrides ``to_device``,
    and for a batch with an object that moves itself.

    **The gain has not been measured on a real device**, only the order of the copies on a simulated one.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import PrefetchAddon
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> trainer = PlainTask.add_on(PrefetchAddon)(model, "cpu", optimizer=torch.optim.SGD)
    >>> trainer.plan(1, batches).notes
    ['PrefetchAddon does nothing: cpu has no stream that copies beside the computation']
    >>> trainer.run(1, batches)["step"]
    1
    """

    layer = "loop"
    process_attributes = {"_side": None, "_has_warned": False}
    _why_not: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._side: torch.Stream | None = None
        self._why_not = ""  # Of the loader that was last wrapped for training.
        self._has_warned = False

    def setup(self) -> None:
        """Create the stream, where the device has streams."""
        super().setup()
        self._has_warned = False
        self._side = None if self._stands_aside() else torch.Stream(device=self.device)

    def teardown(self) -> None:
        """Drop the stream."""
        self._side = None
        super().teardown()

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Check whether batches of the loader can be copied on the second stream, and warn once if they cannot."""
        loader = super().wrap_loader(loader, training)
        if training:
            self._why_not = self._stands_aside() or _why_not(loader)
            if self._why_not and can_copy_async(self.device) and not self._has_warned:
                self._has_warned = True
                _log.warning("PrefetchAddon does nothing: %s", self._why_not)
        return loader

    def to_device(self, batch: Any) -> Any:
        """Copy on the second stream; what is computed from now on waits for it."""
        if self.mode == "train" and self._why_not:
            return super().to_device(batch)
        if self._side is None or not self.loader_position.pinned or plain_tensors(batch) is None:
            return super().to_device(batch)
        with self._side:
            moved = super().to_device(batch)
        computing = torch.accelerator.current_stream(self.device)
        computing.wait_stream(self._side)
        # The memory belongs to the second stream, which must not reuse it before the computation is done with it.
        for tensor in plain_tensors(moved) or ():
            tensor.record_stream(computing)
        return moved

    def describe(self) -> list[Description]:
        """Tell the reason, where it does nothing."""
        return [*super().describe(), Description("PrefetchAddon does nothing", self._why_no_prefetch, where="batches")]

    def _why_no_prefetch(self, plan: Any) -> str | None:
        """Return the reason, which may be known only when the loader of a plan was looked at."""
        return self._stands_aside() or self._why_not or None

    def _stands_aside(self) -> str:
        """Return why no batch can be copied on a second stream; empty if they can."""
        if not can_copy_async(self.device):
            return f"{self.device} has no stream that copies beside the computation"
        if not hasattr(torch.Stream, "__enter__"):
            return f"torch {torch.__version__} has no streams for all kinds of devices; use torch 2.7 or newer"
        inner = type(self).__mro__[type(self).__mro__.index(PrefetchAddon) + 1 :]
        owner = next(cls for cls in inner if "to_device" in cls.__dict__)
        # It may compute with tensors that the stream of the computation has yet to write.
        return "" if owner is Trainer else f"{owner.__name__}.to_device may do more than copy; do that in train_step"


def _why_not(loader: Any) -> str:
    """Return why batches of a loader cannot be copied at the same time as a step; empty if they can."""
    if has_pinned_batches(loader):
        return ""
    return (
        f"the loader ({describe(loader)}) does not return each batch in its own pinned memory; "
        "write DataLoader(..., num_workers=2, pin_memory=True)"
    )
