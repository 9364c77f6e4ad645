"""Add-ons with one fault each in what they keep, hold and count, and what `check_addon` has to say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kit.faulty_addons import GoodAddon
from zae import AddOnBase, replaces


class PopsAddon(GoodAddon):
    """Take its entry out of the caller's state."""

    @replaces
    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.count = state.pop("GoodAddon")
        super(GoodAddon, self).load_state_dict(state, strict)


class AliasesAddon(AddOnBase):
    """Count in the very tensor that was loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = torch.zeros(1)

    def optimizer_step(self) -> bool:
        self.count += 1
        return super().optimizer_step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "AliasesAddon": self.count}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.count, rest = self.take(state, "AliasesAddon", strict)
        super().load_state_dict(rest, strict)


class WrongKeyAddon(AddOnBase):
    """Save under a name that is not its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        super().load_state_dict(self.take(state, "count", strict)[1], strict)


class UnsavableAddon(GoodAddon):
    """Save what only pickle can."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "UnsavableAddon": Path("runs")}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        super().load_state_dict(self.take(state, "UnsavableAddon", strict)[1], strict)


class ForgetsBestAddon(AddOnBase):
    """Keep a best value, and leave it out of checkpoints."""

    layer = "control"
    unsaved_attributes = ("lowest",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lowest = float("inf")

    def check_better(self, metrics: Any) -> bool:
        self.lowest = min(self.lowest, metrics["loss"])
        return super().check_better(metrics)


class DeclaresUnsetAddon(AddOnBase):
    """Declare state that it never sets."""

    state_attributes = ("seen",)


class MainOnlyAddon(AddOnBase):
    """Wait for the other ranks on rank 0 alone."""

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.is_main:
            self.barrier()


class SeedsAddon(AddOnBase):
    """Seed the streams of training."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        torch.manual_seed(3)


class NeverRunsAddon(AddOnBase):
    """Override a hook that a run on one process without a failed step has no use for."""

    layer = "observe"

    def on_exception(self, error: BaseException) -> None:
        super().on_exception(error)


class MisspeltAddon(AddOnBase):
    """Name a hook as nothing calls it."""

    layer = "observe"

    def epoch_finished(self) -> None:
        self.stop("one is enough")


FAULTS: list[tuple[Any, str, str, str]] = [
    (
        PopsAddon,
        "state",
        "changes the state that it was loaded from: state\\['GoodAddon'\\]",
        r"self.take\(state, 'PopsAddon', strict\)",
    ),
    (AliasesAddon, "state", "changes the state that it was loaded from: state\\['AliasesAddon'\\]", "copy what"),
    (WrongKeyAddon, "state", "saves its state under 'count'", "'WrongKeyAddon': ..."),
    (UnsavableAddon, "state", "has a state that no checkpoint can contain: .*Path", "return numbers, text, tensors"),
    (ForgetsBestAddon, "resume", "keeps undeclared state: self.lowest is .* and ", "add it to state_dict"),
    (
        DeclaresUnsetAddon,
        "state",
        "declares the state attribute 'seen', which it has not set",
        "set self.seen in __init",
    ),
    (MainOnlyAddon, "ranks", "calls a collective on some ranks only: rank 0 calls reduce or barrier, .*", "every rank"),
    (NeverRunsAddon, "super", "has hooks of which none ran .*: on_exception", "by a run of your own"),
    (MisspeltAddon, "super", "overrides no hook, so that the loop never calls it: epoch_finished", "misspelt"),
    (SeedsAddon, "random", "draws from the global random stream 'torch'", "draw from self.generator"),
]
"""Each with the check that finds it, and what the message says of the fault and of its remedy."""
