"""Call ``train_step`` or ``test_step`` on a batch, and read what it returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from zae.common.argument_checks import as_mapping

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["call_step"]


def call_step(trainer: Trainer, step: Callable[[Any], Any], batch: Any) -> Mapping[str, Any]:
    """Call a step of the present mode on a batch that is on the device, and return its output as a mapping."""
    with trainer.forward_context():
        out = step(batch)
    return out if type(out) is dict else as_mapping(trainer, out, batch)
