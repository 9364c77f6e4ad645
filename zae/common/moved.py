"""Old names of modules: importing one warns, and returns the module from its new place."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "spec_of"]

MOVED = {
    "zae.addon_state": "zae.loop.addon_state",
    "zae.addons.fused": "zae.compiling.fused",
    "zae.addons.graphs": "zae.compiling.graphs",
    "zae.addons.guard": "zae.sinks.guard",
    "zae.addons.redact": "zae.sinks.redact",
    "zae.addons.replica": "zae.launch.ddp",
    "zae.addons.sinks": "zae.sinks.base",
    "zae.addons.trial": "zae.compiling.trial",
    "zae.bar": "zae.loop.progress",
    "zae.checkpoint_size": "zae.preview.checkpoint_size",
    "zae.checks": "zae.common.argument_checks",
    "zae.collisions": "zae.composition.collisions",
    "zae.columns": "zae.storage.encoding",
    "zae.compose": "zae.composition.metaclass",
    "zae.contexts": "zae.common.contexts",
    "zae.contract": "zae.composition.class_checks",
    "zae.crash": "zae.saving.crash",
    "zae.data_state": "zae.data.loader_state",
    "zae.device": "zae.common.device",
    "zae.diff": "zae.cli.diff",
    "zae.direct": "zae.loop.binding",
    "zae.doctor": "zae.cli.doctor",
    "zae.dry_run": "zae.preview.dry_run",
    "zae.encoding": "zae.storage.encoding",
    "zae.evaluation": "zae.loop.evaluation",
    "zae.explain": "zae.preview.explain",
    "zae.fast_data": "zae.data.gather",
    "zae.faults": "zae.loop.run",
    "zae.files": "zae.storage.checkpoint",
    "zae.fingerprint": "zae.sinks.fingerprint",
    "zae.folders": "zae.storage.names",
    "zae.hints": "zae.composition.foreign_names",
    "zae.launching": "zae.launch.spawn",
    "zae.lazy": "zae.common.lazy",
    "zae.loading": "zae.data.loaders",
    "zae.locks": "zae.storage.locks",
    "zae.manifest": "zae.storage.manifest",
    "zae.names": "zae.storage.names",
    "zae.nonfinite": "zae.loop.nonfinite",
    "zae.optim": "zae.common.optim",
    "zae.optimizer_modes": "zae.common.optimizer_modes",
    "zae.optimizer_state": "zae.common.optimizer_state",
    "zae.options": "zae.composition.options",
    "zae.plain_names": "zae.storage.plain_names",
    "zae.plan": "zae.preview.plan",
    "zae.progress": "zae.loop.progress",
    "zae.ranks": "zae.launch.rank_process",
    "zae.records": "zae.loop.history",
    "zae.redeal": "zae.data.reshard",
    "zae.resume": "zae.saving.resume",
    "zae.retention": "zae.saving.retention",
    "zae.rng": "zae.common.random_state",
    "zae.sanity": "zae.common.sanity",
    "zae.saver": "zae.saving.saver",
    "zae.scheduling": "zae.loop.scheduling",
    "zae.seams": "zae.composition.introspect",
    "zae.session": "zae.loop.run",
    "zae.settings": "zae.common.optimizer_settings",
    "zae.sharding": "zae.data.sharding",
    "zae.signals": "zae.saving.stop_signals",
    "zae.start_from": "zae.saving.start_from",
    "zae.states": "zae.loop.state",
    "zae.streams": "zae.storage.hashed_io",
    "zae.strict_json": "zae.storage.strict_json",
    "zae.tensors": "zae.storage.weights_file",
    "zae.travel": "zae.launch.transfer",
    "zae.trial": "zae.preview.dry_run",
    "zae.unsaved": "zae.saving.unsaved",
    "zae.walk": "zae.common.walk",
    "zae.workers": "zae.data.workers",
}


class _Loader:
    """Loads a module of `MOVED`."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Let Python make the module that is replaced next."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Put the moved module in place of the one that is being imported."""
        old = module.__name__
        warnings.warn(f"{old} is now {MOVED[old]}; import that", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(MOVED[old])


def spec_of(name: str) -> ModuleSpec | None:
    """Return the spec of a module that has moved, by its old name, and None for any other name."""
    return ModuleSpec(name, _Loader) if name in MOVED else None  # type: ignore[arg-type]
