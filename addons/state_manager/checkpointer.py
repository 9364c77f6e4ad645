"""Where the checkpoints of a run are stored: as folders on the local disk, or in a storage of another kind."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from zae.addons.state_manager.crash import crashes_in
from zae.checkpoint.filesystem import make_directory, stage
from zae.checkpoint.folder import list_checkpoints, remove_checkpoint, sweep
from zae.checkpoint.manifest import Manifest, read_manifest
from zae.checkpoint.names import MANIFEST, has_checkpoint_name
from zae.checkpoint.reader import load_checkpoint
from zae.checkpoint.writer import SavePlan, write
from zae.errors import CheckpointError, CheckpointNotFound, ConfigError

__all__ = ["Checkpointer", "Content", "FolderCheckpointer", "make_checkpointer", "step_of_weights", "weight_files"]

_log = logging.getLogger("zae")

Content: TypeAlias = "tuple[Manifest, dict[str, Tensor], dict[Any, Any]]"
"""What a checkpoint contains: its manifest, the weights, and the rest of the state."""

_NONE: Mapping[str, Tensor] = MappingProxyType({})
_WEIGHTS = re.compile(r"weights-(\d{8,18})\.(?:safetensors|ckpt)")


class Checkpointer:
    """Stores the checkpoints of one run; derive from it for another kind of storage, and override four methods.

    A checkpoint has a name, ``step-00000012`` or for the state of a failed run ``crash-00000012``, and is a few files:
    what they contain, and which checkpoints stay, is not the business of this class. It is given as the option
    ``checkpointer`` of `StateManagerAddon`, which calls it with ``save_path``:

    - `names` and `get` read. Every rank calls them.
    - `put` and `delete` write. Rank 0 calls them, or after an exception the rank that failed; with ``save_async`` in a
      thread, one call at a time.

    They keep three promises, at whatever instant the process is killed:

    - A checkpoint is whole or absent: `names` leaves out what `put` has not finished.
    - While `put` replaces a checkpoint of the same name, `get` brings back the old one or the new one.
    - When `put` returns, `get` can bring the checkpoint back. Only then `delete` is called for older ones.

    An OSError, or another error that a client of a storage raises, becomes a `CheckpointError` that names the place:
    the run ends with it, or with ``on_save_error="warn"`` goes on after a failed save. What `get` brings back is
    compared with its hashes.

    Parameters
    ----------
    folder : Path
        The option ``save_path``, a local folder: for the checkpoints, or for temporary files and the lock of the run.

    Attributes
    ----------
    formats : tuple of str
        Of a class: the values of ``save_format`` that it can store.
    place : str
        What errors call the storage.

    Examples
    --------
    In short; docs/extending/checkpoint_storage.md has it with damaged files, and flushed to the disk.

    >>> import pathlib, shutil, tempfile, torch
    >>> from zae import Trainer
    >>> from zae.addons import StateManagerAddon
    >>> from zae.addons.state_manager import Checkpointer
    >>> class ZipCheckpointer(Checkpointer):
    ...     def names(self):
    ...         return [path.stem for path in self.folder.glob("*.zip")]
    ...     def put(self, name, folder):
    ...         hidden = shutil.make_archive(str(self.folder / f".{name}"), "zip", folder)
    ...         pathlib.Path(hidden).rename(self.folder / f"{name}.zip")  # At once: it is whole, or absent.
    ...     def get(self, name, folder, files=None):
    ...         shutil.unpack_archive(self.folder / f"{name}.zip", folder)
    ...     def delete(self, name):
    ...         (self.folder / f"{name}.zip").unlink()
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> def train(folder, n_epoch):
    ...     trainer = Task.add_on(StateManagerAddon)(
    ...         lambda: torch.nn.Linear(2, 1), "cpu", optimizer=torch.optim.SGD, save_path=folder, resume="auto",
    ...         checkpointer=ZipCheckpointer)
    ...     return trainer.run(n_epoch, [torch.ones(8, 2)] * 5)["step"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(folder, 1), train(folder, 3), sorted(path.name for path in pathlib.Path(folder).iterdir())
    (5, 15, ['step-00000010.zip', 'step-00000015.zip'])
    """

    formats: ClassVar[tuple[str, ...]] = ("safetensors", "ckpt")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = str(folder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r})"

    # ------------------------------------------------------------------------------------ what a class overrides

    def names(self) -> Collection[str]:
        """List the checkpoints that are whole, in any order.

        Returns
        -------
        collection of str
            Their names. Other names in it are left out.
        """
        raise ConfigError(f"{type(self).__name__} has no method names(self); write one that lists checkpoints")

    def put(self, name: str, folder: Path) -> None:
        """Store a checkpoint, whole or absent; one of the same name is replaced.

        Parameters
        ----------
        name : str
            Its name.
        folder : Path
            A local folder with its files, which is removed afterwards. The manifest is ``manifest.json``.
        """
        raise ConfigError(f"{type(self).__name__} has no method put(self, name, folder); write one that stores")

    def get(self, name: str, folder: Path, files: Collection[str] | None = None) -> None:
        """Bring the files of a checkpoint back.

        Parameters
        ----------
        name : str
            Its name.
        folder : Path
            An empty local folder, to write them to.
        files : collection of str, optional
            The names of the files that are needed; None is all of them. More may be written.

        Raises
        ------
        FileNotFoundError
            There is no such checkpoint.
        CheckpointDamaged
            What is stored is not what `put` has stored. A resume then takes the checkpoint before.
        """
        raise ConfigError(
            f"{type(self).__name__} has no method get(self, name, folder, files=None); write one that brings back"
        )

    def delete(self, name: str) -> None:
        """Remove a checkpoint; when this is interrupted, what is left of it is not in `names`.

        Parameters
        ----------
        name : str
            Its name.

        Raises
        ------
        FileNotFoundError
            It is gone already, which is not an error for the run.
        """
        raise ConfigError(f"{type(self).__name__} has no method delete(self, name); write one that removes")

    def begin(self) -> None:
        """Remove what killed processes have left, as a run begins; rank 0 calls it. By default, nothing."""

    # ----------------------------------------------------------------------- what a run calls, with paths in `folder`

    def list_saved(self, folder: Path, kind: str = "step") -> list[Path]:
        """List the checkpoints in a folder, the highest step first, without reading them.

        Parameters
        ----------
        folder : Path
            That of this run, whose checkpoints are in the storage; or another one, on the local disk.
        kind : {"step", "crash"}
            Whether to list checkpoints, or the states of failed runs.

        Returns
        -------
        list of Path
            Paths in the folder, at which nothing needs to exist.
        """
        if not self._is_here(folder / kind):
            return list_checkpoints(folder) if kind == "step" else crashes_in(folder)
        make_directory(self.folder)
        with self.reaching("its checkpoints were not listed"):
            names = [name for name in self.names() if has_checkpoint_name(name) and name.startswith(f"{kind}-")]
        return [self.folder / name for name in sorted(names, reverse=True)]

    def load(
        self, path: Path, allow_partial: Collection[str] = (), local_shards: Mapping[str, Tensor] = _NONE
    ) -> Content:
        """Read a whole checkpoint and verify its hashes.

        Parameters
        ----------
        path : Path
            The checkpoint.
        allow_partial : collection of str
            Files that may be missing or damaged.
        local_shards : mapping
            With "sharded", the tensors of which this rank needs its part only.

        Returns
        -------
        manifest, model, state : tuple
            What `zae.checkpoint.reader.load_checkpoint` returns for a folder.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
            It is absent, it is not what was stored, or a newer zae wrote it.
        """
        with self._at_hand(path) as local:
            return load_checkpoint(local, allow_partial=allow_partial, local_shards=local_shards)

    def load_manifest(self, path: Path) -> Manifest:
        """Read the manifest of a checkpoint alone.

        Parameters
        ----------
        path : Path
            The checkpoint.

        Returns
        -------
        Manifest
            Its content.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged
            As for `load`.
        """
        with self._at_hand(path, [MANIFEST]) as local:
            return read_manifest(local)

    def store(self, plan: SavePlan, reads_back: bool = False) -> None:
        """Write a checkpoint, whole or absent.

        Parameters
        ----------
        plan : SavePlan
            What to write: ``plan.target`` is its path.
        reads_back : bool
            Whether a folder is read again when it is written, because it replaces others. Another storage verifies what
            it has.

        Raises
        ------
        CheckpointError
            It was not written; ``errno`` is set if the storage refused, so that ``on_save_error="warn"`` applies.
        """
        if not self._is_here(plan.target):
            write(plan, reads_back=reads_back)
            return
        name = plan.target.name
        with self.scratch(name) as local:
            write(plan, place=local)
            with self.reaching(f"{name} was not saved"):
                self.put(name, local)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint.

        Parameters
        ----------
        path : Path
            The checkpoint.

        Raises
        ------
        CheckpointNotFound
            It is not there, which is not an error for the run.
        CheckpointError
            It could not be removed; the run warns and continues.
        """
        if not self._is_here(path):
            remove_checkpoint(path)
            return
        with self.reaching(f"{path.name} was not removed"), self._expecting(path.name):
            self.delete(path.name)

    def shown(self, path: Path) -> str:
        """Return a checkpoint or folder as it is shown: relative to the present folder where it lies in it.

        Parameters
        ----------
        path : Path
            The checkpoint, or the folder of the run.

        Returns
        -------
        str
            Its place.
        """
        with contextlib.suppress(OSError):  # The present folder may be gone.
            if Path.cwd() in path.parents:
                return str(path.relative_to(Path.cwd()))
        return str(path)

    # ---------------------------------------------------------------- files of weights alone, for save_weights_every

    def list_weights(self) -> list[Path]:
        """List the files of weights alone, by their step.

        Returns
        -------
        list of Path
            Paths in the folder of the run.
        """
        return weight_files(self.folder)

    def store_weights(self, path: Path, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save a file of weights, whole or absent; every rank calls it.

        Parameters
        ----------
        path : Path
            Its path.
        save_model : callable
            Writes it to a local path; every rank calls it.
        is_main : bool
            Whether this is rank 0, which stores it.
        """
        save_model(path)

    def remove_weights(self, path: Path) -> None:
        """Remove a file of weights.

        Parameters
        ----------
        path : Path
            Its path.
        """
        path.unlink(missing_ok=True)

    # ---------------------------------------------------------------------------------------------------- helpers

    def _is_here(self, path: Path) -> bool:
        """Return whether a path names a checkpoint of the storage, and not a folder elsewhere on the local disk."""
        return os.path.dirname(os.path.abspath(path)) == os.path.abspath(self.folder)

    @contextlib.contextmanager
    def _at_hand(self, path: Path, files: Collection[str] | None = None) -> Iterator[Path]:
        """Yield the folder of a checkpoint; of one in the storage, a temporary folder with its files."""
        if not self._is_here(path):
            yield path
            return
        with self.scratch(path.name) as local:
            local.mkdir()
            with self.reaching(f"{path.name} was not loaded"), self._expecting(path.name):
                self.get(path.name, local, files)
            yield local

    @contextlib.contextmanager
    def _expecting(self, name: str) -> Iterator[None]:
        """Say that a checkpoint is not there."""
        try:
            yield
        except FileNotFoundError:
            raise CheckpointNotFound(f"there is no checkpoint {name} in {self.place}") from None

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Yield a hidden path in ``save_path``, and remove what was written there; the next save does so after a kill.

        Parameters
        ----------
        name : str
            The name of a checkpoint, or of a file.

        Yields
        ------
        Path
            Nothing is there yet.
        """
        make_directory(self.folder)
        sweep(self.folder)
        with stage(self.folder / name, 0) as local:
            try:
                yield local
            finally:
                shutil.rmtree(local, ignore_errors=True)

    @contextlib.contextmanager
    def reaching(self, operation: str) -> Iterator[None]:
        """Name the place in an error of the storage, and take no numbers from the random stream of training.

        A client waits for a random time before it tries again. In the thread of ``save_async=True`` the stream is not
        put back, because training may draw from it meanwhile.

        Parameters
        ----------
        what : str
            What has failed.

        Raises
        ------
        CheckpointError
            With the ``errno`` of the system, as for a disk.
        """
        stream = random.getstate()
        try:
            yield
        except (CheckpointError, ConfigError):
            raise
        except Exception as error:  # The clients of object storage have their own errors.
            raised = CheckpointError(f"{self.place}: {operation}: {type(error).__name__}: {error}")
            raised.errno = getattr(error, "errno", None) or errno.EIO
            raise raised from error
        finally:
            if threading.current_thread() is threading.main_thread():
                random.setstate(stream)


class FolderCheckpointer(Checkpointer):
    """Stores each checkpoint as a folder under ``save_path``; each is written and read in its place."""

    formats = ("safetensors", "ckpt", "sharded")  # With the last one, every rank calls `store`.

    def _is_here(self, path: Path) -> bool:
        return False  # All are folders on the local disk, also those that a killed save has moved aside.


def make_checkpointer(checkpointer: Callable[[Path], Any], folder: Path) -> Checkpointer:
    """Call the option ``checkpointer``."""
    instance = checkpointer(folder)
    if not isinstance(instance, Checkpointer):
        raise ConfigError(
            f"checkpointer returned a {type(instance).__name__}; give a class derived from "
            "zae.addons.state_manager.Checkpointer, or a functools.partial of one"
        )
    return instance


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights in the folder of a run, by their step."""
    return sorted(path for path in folder.glob("weights-*") if _WEIGHTS.fullmatch(path.name))


def step_of_weights(name: str) -> int:
    """Return the step in the name of a file of weights; 0 for another name."""
    match = _WEIGHTS.fullmatch(name)
    return int(match[1]) if match else 0
