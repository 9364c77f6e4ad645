"""Save and resume: the checkpoints of a run, which of them stay, and where they are stored."""

from typing import TYPE_CHECKING

from zae.lazy import load as _load
from zae.lazy import missing_name as _missing_name

if TYPE_CHECKING:
    from zae.addons.state_manager.addon import StateManagerAddon
    from zae.addons.state_manager.checkpointer import Checkpointer
    from zae.addons.state_manager.remote import FsspecCheckpointer

__all__ = ["Checkpointer", "FsspecCheckpointer", "StateManagerAddon"]

_HOMES = {"Checkpointer": "checkpointer", "FsspecCheckpointer": "remote", "StateManagerAddon": "addon"}


def __getattr__(name: str) -> object:
    """Import a class when it is first asked for."""
    if name not in _HOMES:
        raise _missing_name("zae.addons.state_manager", name, __all__)
    value = globals()[name] = _load(f"zae.addons.state_manager.{_HOMES[name]}", name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
