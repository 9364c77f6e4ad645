"""The option ``model_init`` of HuggingFaceAddon: a function that makes the model, of a trial in a search."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["ModelInit"]

_PLACES = ("save_path", "jsonl_path", "log_dir", "ledger_path")
"""Options that are files and folders; each trial has them in its own folder."""


@dataclass(frozen=True)
class ModelInit:
    """A ``model_init``, and the options of the trainer that it was given to."""

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(repr=False)
    trial: Any = None

    def __call__(self) -> Any:
        """Return a new model; the function may take the trial, which is None outside of a search."""
        takes_one = any(p.default is p.empty for p in inspect.signature(self.function).parameters.values())
        return self.function(self.trial) if takes_one else self.function()

    def trainer_of(self, kind: type) -> Callable[[Any, dict[str, Any], Path], Any]:
        """Return what makes the trainer of a trial; ``kind`` has PruningAddon."""
        return partial(_make_trainer, kind, self)


def _make_trainer(kind: type, model_init: ModelInit, trial: Any, params: dict[str, Any], folder: Path) -> Any:
    """Return a trainer with the options of another one, the parameters of a trial of optuna, and its folder."""
    options = {**model_init.options, **params, "model_init": replace(model_init, trial=trial), "optuna_trial": trial}
    for name in _PLACES:
        if options.get(name) is not None:
            options[name] = folder / Path(options[name]).name
    return kind(**options)
