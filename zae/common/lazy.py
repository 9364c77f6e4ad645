"""Import public names at their first use, and modules by their old names.

`import zae` runs this module, which imports only the standard library: ``python -m zae --help`` answers at once.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["MOVED", "keep_old_names", "load"]

MOVED = {
    "zae.addon_state": "zae.loop.addon_state",
    "zae.addons.fused": "zae.compiling.fused",
    "zae.addons.graphs": "zae.compiling.graphs",
    "zae.addons.guard": "zae.sinks.worker",
    "zae.addons.redact": "zae.sinks.redact",
    "zae.addons.replica": "zae.launch.ddp",
    "zae.addons.sinks": "zae.sinks.base",
    "zae.addons.trial": "zae.compiling.benchmark",
    "zae.bar": "zae.display.terminal",
    "zae.checkpoint_size": "zae.preview.checkpoint_size",
    "zae.checks": "zae.common.argument_checks",
    "zae.collisions": "zae.composition.collisions",
    "zae.columns": "zae.storage.encoding",
    "zae.compose": "zae.composition.metaclass",
    "zae.contract": "zae.composition.class_checks",
    "zae.crash": "zae.saving.crash",
    "zae.data_state": "zae.data.loader_state",
    "zae.device": "zae.common.device",
    "zae.diff": "zae.cli.diff",
    "zae.direct": "zae.composition.binding",
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
    "zae.locks": "zae.saving.locks",
    "zae.manifest": "zae.storage.manifest",
    "zae.names": "zae.storage.names",
    "zae.nonfinite": "zae.loop.nonfinite",
    "zae.optim": "zae.common.optim",
    "zae.optimizer_modes": "zae.common.optimizer_modes",
    "zae.optimizer_state": "zae.common.optimizer_state",
    "zae.options": "zae.composition.options",
    "zae.plain_names": "zae.common.model_weights",
    "zae.plan": "zae.preview.plan",
    "zae.progress": "zae.loop.progress",
    "zae.ranks": "zae.launch.rank_process",
    "zae.records": "zae.loop.history",
    "zae.redeal": "zae.data.reshard",
    "zae.resume": "zae.saving.resume",
    "zae.retention": "zae.saving.retention",
    "zae.rng": "zae.common.random_state",
    "zae.saver": "zae.saving.saver",
    "zae.scheduling": "zae.loop.optimization",
    "zae.seams": "zae.composition.introspect",
    "zae.session": "zae.loop.run",
    "zae.settings": "zae.common.optimizer_checks",
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
"""The modules of the flat layout, and where they are now."""


def load(module: str, name: str) -> object:
    """Import a module and return one of its names."""
    collects = gc.isenabled()
    gc.disable()  # Modules stay: a collection would look at every object of torch for nothing, which takes 0.1 s.
    try:
        return getattr(import_module(module), name)
    except ImportError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ImportError(f"cannot import {name!r}: {module} failed with {problem}", name=module) from error
    finally:
        if collects:
            gc.enable()


class _OldNames:
    """Find and load modules by the names in `MOVED`; Python tries it after all other finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module that has moved; None for any other name."""
        return ModuleSpec(name, _OldNames) if name in MOVED else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Let Python create the module that `exec_module` replaces."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Warn, and import the moved module instead."""
        import warnings

        old = module.__name__
        warnings.warn(f"{old} is now {MOVED[old]}; import that", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(MOVED[old])


def keep_old_names() -> None:
    """Let modules be imported by their old names, with a warning."""
    sys.meta_path.append(_OldNames)
