"""Activation offloading: keep what the backward needs in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import nn

from zae.addon import AddOnBase, Description
from zae.addons.activation_offload.offload import HostStorage, offload
from zae.arguments import CountOrZero
from zae.distributed.blocks import choose_outermost, describe_blocks, parse_blocks
from zae.errors import ConfigError
from zae.model.forwards import find_own_checkpointing

__all__ = ["ActivationOffloadAddon"]

_log = logging.getLogger("zae")


class ActivationOffloadAddon(AddOnBase):
    """Keep saved activations of chosen modules in host memory: less memory on the device.

    The forward copies saved tensors to pinned memory, and the backward copies them back, in the order of the
    computation: the device does not compute meanwhile, and the host does not wait. Weights are bitwise the same with
    and without it. Parameters and buffers stay on the device. Nothing is offloaded of compiled modules, nor of those
    within a call of ``torch.utils.checkpoint`` of your own: offload a module around the call instead.

    **The gain has not been measured on a real device**; the copies are tested on an emulated one.

    Parameters
    ----------
    offload_modules : str, type, list of them, or callable
        The modules: classes, names of classes or of modules, or a function of name and module; in ``"layers.*"`` the
        star is one part of a name. By default those that a ``ModuleList``, ``ModuleDict`` or ``Sequential`` repeats;
        ``plan()`` shows them.
    offload_min_bytes : int
        Smaller tensors stay on the device.
    offload_pinned : bool
        Whether the copies are in pinned memory, each rounded up by torch to a power of two. Without it the host waits
        for each copy, and can swap them.

    Raises
    ------
    ConfigError
        No module is meant, or what would be offloaded is computed again by a module around it.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import ActivationOffloadAddon
    >>> from zae.testing import PlainTask
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(3)]
    >>> model, batches = torch.nn.Sequential(*blocks, torch.nn.Linear(2, 1)), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> trainer = PlainTask.add_on(ActivationOffloadAddon)(model, "cpu", optimizer=torch.optim.SGD)
    >>> print(trainer.plan(1, batches).notes[0])
    kept on the host until the backward: 3 of Sequential (0 to 2)
    >>> trainer.run(1, batches)["step"]
    1
    """

    layer = "model"
    outside = ("recomputes_activations",)  # So that the inputs of what is computed again are offloaded.
    process_attributes = {"_undo_offload": None}
    excludes = {
        "hooks_forwards": "its hooks find the parameters of a module by its forward; leave ActivationOffloadAddon out, "
        "or train with FSDPAddon",
    }

    def __init__(
        self,
        *args: Any,
        offload_modules: Any = None,
        offload_min_bytes: CountOrZero = 1024,
        offload_pinned: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.offload_modules = parse_blocks(offload_modules, "offload_modules")
        self.offload_min_bytes = offload_min_bytes
        self.offload_pinned = offload_pinned
        self._undo_offload: Callable[[], None] | None = None

    def offloaded(self) -> Mapping[str, nn.Module]:
        """Return the modules whose saved tensors are offloaded, by name.

        Returns
        -------
        dict of str to Module
            The outermost ones: what a module in another one saves is offloaded with it.
        """
        model = self.unwrap()
        modules = choose_outermost(model, self.offload_modules, "offload_modules", "offloaded")
        if checkpointing := find_own_checkpointing(model):
            raise ConfigError(
                f"{checkpointing} checkpoints its layers itself, within which nothing is to be offloaded; call its "
                "gradient_checkpointing_disable(), and add GradientCheckpointingAddon"
            )
        recomputed = self.changed_modules("recomputed")
        for name in modules:
            around = [prefix for prefix in recomputed if name.startswith(f"{prefix}.")]
            if around:
                raise ConfigError(
                    f"offload_modules: {name} is in {around[0]}, which is computed again: nothing of {name} is kept "
                    f"to be offloaded. Name {around[0]}, whose inputs are kept, or a module around it"
                )
        return modules

    def wrap_model(self, model: nn.Module) -> Any:
        """Let the modules save on the host, around what computes them again and before an engine wraps them."""
        self._restore_saving()
        wrapped = super().wrap_model(model)
        if self.mode == "train":
            blocks = self.offloaded()
            reason = self._why_idle()
            if not reason:
                storage = HostStorage(self.device, self.offload_min_bytes, self.offload_pinned)
                self._undo_offload = offload(blocks, storage)
            elif self.is_main:
                _warn(reason)
        return wrapped

    def teardown(self) -> None:
        """Restore the forwards of the modules."""
        self._restore_saving()
        super().teardown()

    def describe(self) -> list[Description]:
        """Name the modules, and tell why nothing is offloaded."""
        return [
            *super().describe(),
            Description("kept on the host until the backward", self._describe_offloaded, where="backward"),
            Description("ActivationOffloadAddon does nothing", lambda plan: self._why_idle() or None, where="backward"),
        ]

    def _describe_offloaded(self, plan: Any) -> str:
        return describe_blocks(self.offloaded())

    def _why_idle(self) -> str:
        """Return why nothing is offloaded; empty on a device with a memory of its own."""
        if self.device.type != "cpu":
            return ""
        return f"what {self.device} saves for the backward is in the memory of the host already"

    def _restore_saving(self) -> None:
        undo = self._undo_offload
        self._undo_offload = None
        if undo is not None:
            undo()


@cache  # One warning for each process.
def _warn(reason: str) -> None:
    _log.warning("ActivationOffloadAddon does nothing: %s", reason)
