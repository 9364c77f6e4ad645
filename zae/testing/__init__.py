"""The kit that checks an add-on: `check_addon` trains with it and names each fault and its remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from zae import random_state
from zae.addon import AddOnBase
from zae.compose.introspect import is_add_on
from zae.errors import AddOnError
from zae.testing import checks
from zae.testing.kit import AddOnFault, Kit, PlainTask, in_new_folder
from zae.trainer import Trainer

__all__ = ["CHECKS", "AddOnFault", "PlainTask", "check_addon"]

CHECKS: dict[str, Callable[[Kit], Iterator[str]]] = checks.ALL
"""Every check, by the name that ``allow`` takes, in the order in which they run."""


def check_addon(
    add_on: Any,
    *,
    task: type[Trainer] = PlainTask,
    model: Callable[[], nn.Module] | None = None,
    batches: Callable[[], Any] | None = None,
    beside: Sequence[Any] = (),
    allow: Collection[str] = (),
    transient: Collection[str] = (),
    **options: Any,
) -> None:
    """Check an add-on by training with it; one call in your own tests.

    It trains a small model on the CPU, about fifteen times for two epochs of six steps, each time in a new folder. The
    random streams of the process stay as they were.

    ========== ==================================================================================================
    check      what it finds
    ========== ==================================================================================================
    class      an override of the loop itself; no docstring
    pickle     a trainer that cannot be sent to another process
    super      an override that does not call ``super()`` once; see `zae.replaces` and `zae.repeats`; hooks of which
               none ran
    clip       gradients larger than ``gradient_clip`` that reach the optimizer
    mode       steps that run while the model is in the wrong mode
    random     numbers drawn from training's random streams
    exception  exceptions that are swallowed or replaced; threads, hooks and settings left after one
    state      a state that no checkpoint can contain, and one that is changed by loading it
    resume     what a resumed run loses: an attribute that no state has, another end
    ranks      files that every rank writes, and a collective that only some ranks call
    ========== ==================================================================================================

    Parameters
    ----------
    add_on : type
        The add-on.
    task : type, optional
        The trainer class to use, instead of one that learns a squared error.
    model, batches : callable, optional
        Make the model and a list of a few batches for ``task``.
    beside : sequence of type
        Further add-ons of the trainer: those that it requires, and others to try it with.
    allow : collection of str
        Names of checks to skip.
    transient : collection of str
        Attributes that change in a run and that a resumed run does not need.
    **options
        Options of the add-on. Write relative paths: each run has a new working folder.

    Raises
    ------
    AddOnFault
        With every fault that was found, and its remedy.

    Examples
    --------
    >>> from zae import AddOnBase
    >>> from zae.testing import check_addon
    >>> class HalveAddon(AddOnBase):
    ...     "Halve every gradient."
    ...     layer = "loop"
    ...     def clip(self):
    ...         for parameter in self.parameters:
    ...             parameter.grad.div_(2)
    ...         super().clip()
    >>> check_addon(HalveAddon, allow=["pickle"])  # Made in a doctest, it cannot be found by its name.
    """
    unknown = set(allow) - CHECKS.keys()
    if unknown:
        raise AddOnError(f"allow has {sorted(unknown)}; the checks are {', '.join(CHECKS)}")
    if not (is_add_on(add_on) and issubclass(add_on, AddOnBase)):
        raise AddOnFault(f"{add_on!r} is not an add-on; write class MyAddon(AddOnBase)")
    kit = Kit(add_on, options, task, model, batches, beside, transient)
    with random_state.isolated():
        faults = _faults(kit, allow)
    if faults:
        lines = "".join(f"\n  {index}. {fault}" for index, fault in enumerate(faults, start=1))
        raise AddOnFault(f"{kit.name} has {len(faults)} fault{'s' * (len(faults) > 1)}:{lines}")


def _faults(kit: Kit, allow: Collection[str]) -> list[str]:
    """Run the checks; return the text of each fault, with the name of the check."""
    faults: list[str] = []
    broken: dict[str, list[str]] = {}
    for name, check in CHECKS.items():
        if name in allow:
            continue
        try:
            with in_new_folder():
                faults.extend(f"{text} [{name}]" for text in check(kit))
        except Exception as error:
            broken.setdefault(f"raises {type(error).__name__}: {error}", []).append(name)
    return faults + [f"{error} [{', '.join(names)}]" for error, names in broken.items()]
