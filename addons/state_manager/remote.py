"""Checkpoints in any file system of fsspec: object storage, memory, another host."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from zae.addons.state_manager.checkpointer import Checkpointer, Content, WeightFolder, step_of_weights
from zae.addons.state_manager.saver import Job
from zae.checkpoint.filesystem import CURE, MANIFEST, is_known, make_directory, put_file, stage
from zae.checkpoint.folder import load_checkpoint, sweep
from zae.checkpoint.manifest import MANIFEST_LIMIT, Manifest, parse, read_manifest
from zae.common.argument_checks import check_url
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound

__all__ = ["FsspecCheckpointer"]

_log = logging.getLogger("zae")
_UPLOAD = re.compile(r"((step|crash)-\d{8,18})\.(\d{1,9})")
_PIECE = 1 << 22  # Bytes that are read at a time to be hashed.


class FsspecCheckpointer(Checkpointer):
    """Stores checkpoints under a URL of fsspec: ``s3://``, ``gs://``, ``az://``, ``sftp://``, ``file://``.

    A checkpoint is a folder ``step-00000012.1`` with the files of a plain checkpoint. They are written to a temporary
    folder in ``save_path`` and uploaded, the manifest last: without it there is no checkpoint. A checkpoint of the same
    name is uploaded beside the old one, as ``step-00000012.2``, and then the old one is removed. What was uploaded is
    read back and compared before others are removed. No file is changed or renamed, which object storage cannot do at
    once.

    Files of ``save_weights_every`` are uploaded in the same way, each of them whole or absent.

    Paths in ``save_path`` name the checkpoints, as in ``resume="runs/a/step-00000012"``. The lock of the run is on the
    local disk: do not start two runs with one URL on two machines. A store that fails does what a full disk does.

    Parameters
    ----------
    *args : object
        Those of `Checkpointer`.
    url : str
        The folder of the checkpoints.
    storage_options : mapping
        Options of the file system, such as ``{"anon": True}`` for ``s3://``.
    **kwargs : object
        Those of `Checkpointer`.

    Raises
    ------
    ConfigError
        The URL has an unknown protocol, or the package of its file system is not installed.

    Examples
    --------
    >>> import tempfile, torch
    >>> from zae import Trainer
    >>> from zae.addons import StateManagerAddon
    >>> from zae.addons.state_manager.remote import FsspecCheckpointer
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> def train(n_epoch):
    ...     with tempfile.TemporaryDirectory() as folder:  # Another machine has another one.
    ...         trainer = Task.add_on(StateManagerAddon)(
    ...             lambda: torch.nn.Linear(2, 1), "cpu", optimizer=torch.optim.SGD, save_path=folder, resume="auto",
    ...             checkpointer=FsspecCheckpointer.at("memory://example/run"))
    ...         return trainer.run(n_epoch, [torch.ones(8, 2)] * 5)
    >>> train(1)["step"], train(3)["step"]
    (5, 15)
    """

    formats = ("safetensors", "ckpt")

    def __init__(self, *args: Any, url: str, storage_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url = url
        self.files, root = check_url("url", url, **(storage_options or {}))
        self.root = root.rstrip("/")
        self.weights.storage = _RemoteWeights(self)
        self._strays: set[tuple[str, int]] = set()  # Uploads that were not removed, or not read back; 0: all.

    @classmethod
    def at(cls, url: str, **storage_options: Any) -> partial[FsspecCheckpointer]:
        """Return what the option ``checkpointer`` takes.

        Parameters
        ----------
        url : str
            The folder of the checkpoints.
        **storage_options : object
            Options of the file system.

        Returns
        -------
        functools.partial
            It makes the checkpointer.
        """
        return partial(cls, url=url, storage_options=storage_options)

    def shown(self, path: Path) -> str:
        """Return a checkpoint in the store, or the folder of them, by its URL."""
        if path == self.folder:
            return self.url
        return f"{self.url.rstrip('/')}/{path.name}" if path.parent == self.folder else super().shown(path)

    # ------------------------------------------------------------------------------------------------- reading

    def list_saved(self, folder: Path, kind: str = "step") -> list[Path]:
        """List the checkpoints whose manifest was uploaded; those of another folder are on the local disk."""
        if os.path.abspath(folder) != str(self.folder):
            return super().list_saved(folder, kind)
        names = {name for name, uploads in self._uploads().items() if any(map(self._is_complete, uploads.values()))}
        return [self.folder / name for name in sorted(names, reverse=True) if name.startswith(f"{kind}-")]

    def load(self, path: Path, allow_partial: Collection[str] = (), held: Any = None) -> Content:
        """Download a checkpoint, verify it and read it."""
        if not self._is_here(path):
            return super().load(path, allow_partial, held or {})
        with self.scratch(path.name) as local:
            local.mkdir()
            self.download(path, local)
            return load_checkpoint(local, allow_partial=allow_partial, held=held or dict[str, Tensor]())

    def download(self, path: Path, local: Path) -> None:
        """Copy the files of a checkpoint into an existing folder, without verifying them.

        Parameters
        ----------
        path : Path
            The checkpoint.
        local : Path
            The folder.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged
            There is no such checkpoint, or its manifest cannot be read.
        """
        place, manifest, text = self._newest(path)
        (local / MANIFEST).write_bytes(text)
        for name in manifest["files"]:
            with self.reaching(f"{name} of {path.name} was not loaded"), contextlib.suppress(FileNotFoundError):
                self.files.get_file(f"{place}/{name}", str(local / name))

    def unfinished(self) -> list[str]:
        """List the uploads without a manifest, which the next run removes."""
        uploads = self._uploads().items()
        return sorted(f"{name}.{number}" for name, found in uploads for number, files in found.items()
                      if not self._is_complete(files))  # fmt: skip

    def load_manifest(self, path: Path) -> Manifest:
        """Download the manifest of a checkpoint alone."""
        return self._newest(path)[1] if self._is_here(path) else super().load_manifest(path)

    def _newest(self, path: Path) -> tuple[str, Manifest, bytes]:
        """Return the place and manifest of the newest upload of a checkpoint, leaving out cut manifests."""
        uploads, damage = self._uploads(path.name).get(path.name, {}), None
        for number in sorted(uploads, reverse=True):
            place = f"{self.root}/{path.name}.{number}"
            try:
                with self.reaching(f"{path.name} was not loaded"), contextlib.suppress(FileNotFoundError):
                    text = self.files.cat_file(f"{place}/{MANIFEST}", end=MANIFEST_LIMIT + 1)
                    return place, parse(text, f"{place}/{MANIFEST}"), text
            except CheckpointDamaged as error:
                damage = error
        raise damage or CheckpointNotFound(f"there is no checkpoint {path.name} in {self.url}")

    def _uploads(self, name: str = "") -> dict[str, dict[int, set[str]]]:
        """Return the files of each upload, by the name of the checkpoint and the number of the upload."""
        found: dict[str, dict[int, set[str]]] = {}
        for folder in self.entries():
            match = _UPLOAD.fullmatch(folder)
            if match and name in ("", match[1]) and (files := {*filter(is_known, self.entries(folder))}):
                found.setdefault(match[1], {})[int(match[3])] = files
        return found

    def entries(self, folder: str = "") -> list[str]:
        """List the names in the folder of the URL, or in one below it; a missing one is empty.

        Parameters
        ----------
        folder : str
            The name of the one below it.

        Returns
        -------
        list of str
            Names of files and folders.

        Raises
        ------
        CheckpointError
            The store has not answered. (fsspec's `find` would leave out the folders that it cannot list.)
        """
        with self.reaching("its checkpoints were not listed"), contextlib.suppress(FileNotFoundError):
            self.files.invalidate_cache()
            listed = self.files.ls(f"{self.root}/{folder}".rstrip("/"), detail=False)
            return [each.rstrip("/").rpartition("/")[2] for each in listed]
        return []

    @staticmethod
    def _is_complete(files: Collection[str]) -> bool:
        return MANIFEST in files

    # ------------------------------------------------------------------------------------------------- writing

    def open(self, step: int, overwrite: bool) -> None:
        """Lock the folder, refuse the checkpoints of another run, and remove uploads that were interrupted."""
        super().open(step, overwrite)
        for name, uploads in self._uploads().items():
            self._clean_up(name, [number for number, files in uploads.items() if not self._is_complete(files)])

    def store(self, job: Job) -> None:
        """Write a checkpoint to a temporary folder and upload it, the manifest last."""
        if not self._is_here(job.target):
            super().store(job)
            return
        name = job.target.name
        with self.scratch(name) as local:
            job._replace(replaces=()).write_folder(local)
            earlier = self._uploads(name).get(name, {})
            number = self._free_number(name, earlier)
            place, manifest = f"{self.root}/{name}.{number}", read_manifest(local)
            try:
                with self.reaching(f"{name} was not saved"):
                    self.files.makedirs(place, exist_ok=True)
                    for file in (*manifest["files"], MANIFEST):
                        self.files.put_file(str(local / file), f"{place}/{file}")
            except CheckpointError:
                with contextlib.suppress(CheckpointError):  # The first error is the one to report.
                    self._remove_upload(name, number)
                raise
            if job.replaces or earlier:
                self._strays.add((name, number))
                self._verify(place, manifest, (local / MANIFEST).read_bytes())
                self._strays.discard((name, number))
        self._clean_up(name, sorted(earlier))
        self._strays = {stray for stray in self._strays if stray[0] != name}
        for other, stray in sorted(self._strays):
            with contextlib.suppress(CheckpointError):  # It was reported the first time.
                self._remove_upload(other, stray) if stray else self.remove(self.folder / other)

    def _free_number(self, name: str, listed: Collection[int]) -> int:
        """Return a number that no upload of a checkpoint has, also where the store lists a new one late."""
        number = 1 + max(listed, default=0)
        with self.reaching(f"{name} was not saved"), contextlib.suppress(FileNotFoundError):
            while True:
                self.files.info(f"{self.root}/{name}.{number}/{MANIFEST}")
                number += 1
        return number

    def remove(self, path: Path) -> None:
        """Remove the uploads of a checkpoint, the newest last, of each the manifest first."""
        if not self._is_here(path):
            super().remove(path)
            return
        self._strays.add((path.name, 0))
        uploads = self._uploads(path.name).get(path.name, {})
        self._strays.discard((path.name, 0))
        if not uploads:
            raise CheckpointNotFound(f"there is no checkpoint {path.name} in {self.url}")
        for number in sorted(uploads):
            self._remove_upload(path.name, number)

    def _clean_up(self, name: str, numbers: Collection[int]) -> None:
        """Remove uploads that nobody needs; those that stay cost space, not the run."""
        for number in numbers:
            try:
                self._remove_upload(name, number)
            except CheckpointError as error:
                _log.warning("%s", error)

    def _remove_upload(self, name: str, number: int) -> None:
        """Remove the files of an upload; what a user has put beside them stays."""
        folder = f"{name}.{number}"
        self._strays.add((name, number))
        files = {*filter(is_known, self.entries(folder))} - {MANIFEST}
        with self.reaching(f"{name} was not removed"):
            for file in (MANIFEST, *sorted(files)):
                with contextlib.suppress(FileNotFoundError):
                    self.files.rm_file(f"{self.root}/{folder}/{file}")
        self._strays.discard((name, number))
        # It may not be empty, and a store may have no folders.
        with contextlib.suppress(CheckpointError), self.reaching(f"{folder} was not removed"):
            self.files.rmdir(f"{self.root}/{folder}")

    def _verify(self, place: str, manifest: Manifest, text: bytes) -> None:
        """Read what was uploaded and compare its hashes with the manifest."""
        expected = {name: entry["sha256"] for name, entry in manifest["files"].items()}
        for name, sha256 in {**expected, MANIFEST: hashlib.sha256(text).hexdigest()}.items():
            found = hashlib.sha256()
            with self.reaching(f"{place}/{name} was not read back"), self.files.open(f"{place}/{name}", "rb") as file:
                while piece := file.read(_PIECE):
                    found.update(piece)
            if found.hexdigest() != sha256:
                raise CheckpointDamaged(f"{place}/{name}: changed while it was uploaded. {CURE}")

    # ------------------------------------------------------------------------------------------------- helpers

    def _is_here(self, path: Path) -> bool:
        """Return whether a path names a checkpoint under the URL."""
        return os.path.dirname(os.path.abspath(path)) == str(self.folder)

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
    def reaching(self, what: str) -> Iterator[None]:
        """Name the URL in an error of the file system, and take no numbers from the random stream of training.

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
        except CheckpointError:
            raise
        except Exception as error:  # The clients of object storage have their own errors.
            raised = CheckpointError(f"{self.url}: {what}: {type(error).__name__}: {error}")
            raised.errno = getattr(error, "errno", None) or errno.EIO
            raise raised from error
        finally:
            if threading.current_thread() is threading.main_thread():
                random.setstate(stream)


class _RemoteWeights(WeightFolder):
    """Files of weights under the URL of a checkpointer."""

    def __init__(self, store: FsspecCheckpointer) -> None:
        super().__init__(store.folder)
        self.store = store

    def list_saved(self) -> list[Path]:
        """List the files by their step."""
        return sorted(self.folder / name for name in self.store.entries() if step_of_weights(name))

    def save(self, path: Path, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save a file to a temporary folder, and upload it from rank 0."""
        with self.store.scratch(path.name) as local:
            save_model(local / path.name)
            if not is_main:
                return
            with self.store.reaching(f"{path.name} was not saved"):
                self.store.files.makedirs(self.store.root, exist_ok=True)
                put_file(self.store.files, local / path.name, f"{self.store.root}/{path.name}")

    def remove(self, path: Path) -> None:
        """Remove a file; one that stays costs space, not the run."""
        try:
            with self.store.reaching(f"{path.name} was not removed"), contextlib.suppress(FileNotFoundError):
                self.store.files.rm_file(f"{self.store.root}/{path.name}")
        except CheckpointError as error:
            _log.warning("%s", error)
