"""A class without the add-ons of some layers."""

from __future__ import annotations

from typing import Any

from kit import faults, hand
from zae import AddOnBase
from zae.addons import EMAAddon, MultiGPUAddon
from zae.compose.introspect import add_ons_of
from zae.compose.leave_out import leave_out


class HalvingLogger(AddOnBase):
    """Halve the gradients."""

    layer = "observe"

    def unscale(self) -> None:
        super().unscale()
        for parameter in self.parameters:
            parameter.grad.mul_(0.5)


class Derived(faults.Task.add_on(HalvingLogger, MultiGPUAddon)):  # type: ignore[misc]
    """A task with add-ons in itself."""


def weights(cls: Any) -> list[Any]:
    trainer = faults.build(cls)
    trainer.run(1, hand.loader())
    return [each.detach().tolist() for each in trainer.unwrap().parameters()]


def test_add_ons_of_the_task_itself_are_left_out() -> None:
    """The class trains as the one that never had them; a second call leaves out more."""
    composed = Derived.add_on(EMAAddon)
    bare = leave_out(composed, ("observe", "parallel"))
    assert [each.__name__ for each in add_ons_of(bare)] == ["EMAAddon"]
    assert add_ons_of(leave_out(bare, [EMAAddon.layer])) == []
    assert add_ons_of(composed) != add_ons_of(bare)
    assert weights(bare) == weights(faults.Task.add_on(EMAAddon))
    assert weights(composed) != weights(bare)


def test_a_class_without_them_is_returned_as_it_is() -> None:
    assert leave_out(Derived, ["model"]) is Derived
