"""The study of optuna in the folder of a search: open it, check whose it is, and draw its parameters."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zae.errors import AddOnRequirement, ConfigError

__all__ = ["NAME", "SeededSampler", "load_optuna", "open_study", "quiet", "repair", "seed_of"]

NAME = "search.journal"
"""The file with the records of optuna."""

_KEY = "zae"  # Of the settings, among the attributes of a study.


def load_optuna() -> Any:
    """Return the package; AddOnRequirement says how to install it."""
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise AddOnRequirement(
            f"a search needs the package optuna, which cannot be imported ({error}): pip install optuna"
        ) from error


def seed_of(*parts: Any) -> int:
    """Return a seed from 0 to 2**32 - 1 that depends on the parts alone."""
    return zlib.crc32(repr(parts).encode())


class SeededSampler:
    """Draw each parameter with a new sampler, whose seed depends on the trial and on the parameter's name.

    A search that was killed and is continued then draws what it would have drawn.

    Parameters
    ----------
    make : callable
        A class of optuna's samplers, or another function that takes ``seed``.
    seed : int
        Of the search.
    """

    def __init__(self, make: Callable[..., Any], seed: int) -> None:
        self._make = make
        self._seed = seed
        self._one = make(seed=seed_of(seed))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._one, name)

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
        """Draw the parameters that depend on each other."""
        fresh = self._make(seed=seed_of(self._seed, trial.number))
        fresh.infer_relative_search_space(study, trial)  # Some samplers keep what they find.
        return fresh.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        """Draw one parameter."""
        fresh = self._make(seed=seed_of(self._seed, trial.number, name))
        return fresh.sample_independent(study, trial, name, distribution)


@contextlib.contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Leave out what optuna logs of a study: a search has its own lines."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def repair(folder: Path) -> None:
    """Remove what a killed process left: the end of a line that it was writing, and its lock. No other may write."""
    path = folder / NAME
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    with contextlib.suppress(FileNotFoundError):
        (folder / f"{NAME}.lock").unlink()


def open_study(
    folder: Path, settings: dict[str, Any], sampler: Any = None, pruner: Any = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the study in a folder, its storage, and the settings that it began with.

    Raises
    ------
    ConfigError
        The folder has a search with other settings.
    """
    optuna = load_optuna()
    path = folder / NAME
    with quiet(optuna):
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        storage = optuna.storages.JournalStorage(backend)
        names = optuna.get_all_study_names(storage)
        if names:
            study = optuna.load_study(study_name=names[0], storage=storage)
        else:
            settings["directions"] = settings["directions"] or ["minimize"]  # Until a trainer says otherwise.
            study = optuna.create_study(study_name="search", storage=storage, directions=settings["directions"])
            if settings["seed"] is None:
                settings["seed"] = random.SystemRandom().randrange(2**31)
            study.set_user_attr(_KEY, settings)
        kept = study.user_attrs.get(_KEY)
        _check_same(folder, kept, settings)
        made = sampler if hasattr(sampler, "sample_independent") and not isinstance(sampler, type) else None
        made = made or SeededSampler(sampler or optuna.samplers.TPESampler, kept["seed"])
        study = optuna.load_study(study_name=study.study_name, storage=storage, sampler=made, pruner=pruner)
    return study, storage, kept


_OPEN = (("seed", None), ("directions", None))  # Not given: any will do.


def _check_same(folder: Path, kept: Any, settings: dict[str, Any]) -> None:
    """Raise ConfigError unless a study began with these settings; what is not given may be any."""
    if not isinstance(kept, dict):
        raise ConfigError(f"{folder / NAME} is a study of optuna that zae.search did not begin; choose another folder")
    wanted = json.loads(json.dumps(settings))
    differing = [name for name, value in wanted.items() if value != kept.get(name) and (name, value) not in _OPEN]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"folder={str(folder)!r} has another search: it began with {name}={kept.get(name)!r}, and this one has "
            f"{name}={wanted[name]!r}; choose another folder, or remove that one"
        )
