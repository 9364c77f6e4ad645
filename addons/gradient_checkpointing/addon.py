"""Gradient checkpointing: keep less for the backward, and compute it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zae.addon import AddOnBase, Description
from zae.addons.gradient_checkpointing.recompute import MATMULS, operation_of, recompute
from zae.distributed.blocks import choose_outermost, describe_blocks, parse_blocks
from zae.errors import ConfigError
from zae.model.forwards import find_own_checkpointing

__all__ = ["GradientCheckpointingAddon"]

_OPERATION: type = type(torch.ops.aten.mm.default)


class GradientCheckpointingAddon(AddOnBase):
    """Keep only the inputs of chosen modules for the backward, which computes their forward again: less memory.

    A step takes about a third longer where all layers are computed again. Weights are bitwise the same with and without
    it: the second forward has the random numbers and the buffers of the first. What a module changes elsewhere, such as
    a counter in an attribute, it changes twice: do not choose it. Evaluations are unchanged.

    Parameters
    ----------
    checkpoint_modules : str, type, list of them, or callable
        The modules: classes, names of classes or of modules, or a function of name and module; in ``"layers.*"`` the
        star is one part of a name. By default those that a ``ModuleList``, ``ModuleDict`` or ``Sequential`` repeats;
        ``plan()`` shows them.
    checkpoint_keep : "matmuls", sequence of str, or callable
        What is kept of these modules nevertheless: "matmuls" are the results of matrix products, convolutions and
        attention, which take longest to compute again; others are given by name, ``["aten.mm.default"]``, or by a
        policy for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. By default nothing.

    Raises
    ------
    ConfigError
        No module is meant, or the model checkpoints itself.
    StepError
        A module changes an input in place.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import GradientCheckpointingAddon
    >>> from zae.testing import PlainTask
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)) for _ in range(3)]
    >>> model, batches = torch.nn.Sequential(*blocks, torch.nn.Linear(2, 1)), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> trainer = PlainTask.add_on(GradientCheckpointingAddon)(model, "cpu", optimizer=torch.optim.SGD)
    >>> trainer.plan(1, batches).notes
    ['computed again in the backward: 3 of Sequential (0 to 2)']
    >>> trainer.run(1, batches)["step"]
    1
    """

    layer = "model"
    traits = ("recomputes_activations",)
    process_attributes = {"_undo_checkpointing": None}
    excludes = {
        "hooks_forwards": "its hooks find the parameters of a module by its forward; leave GradientCheckpointingAddon "
        "out, and call torch.utils.checkpoint in the forward of the model",
    }

    replicated_options = {
        "checkpoint_modules": "wrap_model",
        "checkpoint_keep": "wrap_model",
    }

    def __init__(self, *args: Any, checkpoint_modules: Any = None, checkpoint_keep: Any = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoint_modules = parse_blocks(checkpoint_modules, "checkpoint_modules")
        self.checkpoint_keep = _parse_keep(checkpoint_keep)
        self._undo_checkpointing: Callable[[], None] | None = None

    def checkpointed(self) -> Mapping[str, nn.Module]:
        """Return the modules that are computed again, by name.

        Returns
        -------
        dict of str to Module
            The outermost ones: a module in another one is computed again with it.
        """
        model = self.unwrap()
        if checkpointing := find_own_checkpointing(model):
            raise ConfigError(
                f"{checkpointing} checkpoints itself already; call its gradient_checkpointing_disable(), or leave "
                "GradientCheckpointingAddon out"
            )
        return choose_outermost(model, self.checkpoint_modules, "checkpoint_modules", "checkpointed")

    def changed_modules(self, how: str) -> Mapping[str, Any]:
        """Add the modules that are computed again."""
        changed = super().changed_modules(how)
        return {**changed, **self.checkpointed()} if how == "recomputed" else changed

    def wrap_model(self, model: nn.Module) -> Any:
        """Let the modules compute their forward again in the backward, before an engine wraps them."""
        wrapped = super().wrap_model(model)
        self._restore_forwards()
        if self.mode == "train":
            self._undo_checkpointing = recompute(self.checkpointed(), self.checkpoint_keep)
        return wrapped

    def teardown(self) -> None:
        """Restore the forwards of the modules."""
        try:
            super().teardown()
        finally:
            self._restore_forwards()

    def describe(self) -> list[Description]:
        """Name the modules that are computed again."""

        def blocks(plan: Any) -> str:
            keep = self.checkpoint_keep
            policy = "what a policy keeps" if callable(keep) else f"{len(keep)} operations"
            return describe_blocks(self.checkpointed()) + (f", but for {policy}" if keep else "")

        return [*super().describe(), Description("computed again in the backward", blocks, where="backward")]

    def _restore_forwards(self) -> None:
        undo = self._undo_checkpointing
        self._undo_checkpointing = None
        if undo is not None:
            undo()


def _parse_keep(value: Any) -> Any:
    """Return the operations to keep as a tuple of names, or a policy."""
    if value is None or (callable(value) and not isinstance(value, (type, _OPERATION))):
        return () if value is None else value
    if isinstance(value, str) and value == "matmuls":
        return MATMULS
    names = tuple(map(str, value if isinstance(value, (list, tuple, set)) else (value,)))
    for name in names:
        try:
            is_operation = isinstance(operation_of(name), _OPERATION)
        except AttributeError:
            is_operation = False
        if not is_operation:
            raise ConfigError(
                f"checkpoint_keep={value!r:.80}: {name!r} is not an operation of torch; write 'matmuls', names such as "
                "['aten.mm.default'], or a policy"
            )
    return names
