"""Checkpoints in any file system of fsspec: object storage, memory, another host."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zae.addons.state_manager.checkpointer import Checkpointer, step_of_weights
from zae.arguments.paths import check_url
from zae.checkpoint.hashed_files import REMEDY
from zae.checkpoint.manifest import MANIFEST_LIMIT, Manifest, parse, read_manifest
from zae.checkpoint.names import MANIFEST, is_known
from zae.errors import CheckpointDamaged, CheckpointError, ConfigError

__all__ = ["FsspecCheckpointer"]

_log = logging.getLogger("zae")
_UPLOAD = re.compile(r"((step|crash)-\d{8,18})\.(\d{1,9})")
_READ_BYTES = 1 << 22  # Bytes that are read at a time to be hashed.


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
    folder : Path
        That of `Checkpointer`.
    url : str
        The folder of the checkpoints.
    storage_options : mapping
        Options of the file system, such as ``{"anon": True}`` for ``s3://``.

    Raises
    ------
    ConfigError
        The URL has an unknown protocol, or the package of its file system is not installed. As a run begins: its bucket
        does not exist.

    Examples
    --------
    >>> import tempfile, torch
    >>> from zae import Trainer
    >>> from zae.addons import StateManagerAddon
    >>> from zae.addons.state_manager import FsspecCheckpointer
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

    def __init__(self, folder: Path, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(folder)
        self.url = self.place = url
        self.files, root = check_url("url", url, **(storage_options or {}))
        self.root = root.rstrip("/")
        # Empty where paths begin with a slash: there are folders, and no buckets.
        self.bucket = self.root.partition("/")[0]
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

    def names(self) -> list[str]:
        """List the checkpoints of which the manifest was uploaded."""
        return [name for name, uploads in self._uploads().items() if any(map(self._is_complete, uploads.values()))]

    def get(self, name: str, folder: Path, files: Collection[str] | None = None) -> None:
        """Download the files of a checkpoint."""
        place, manifest, text = self._newest(name)
        (folder / MANIFEST).write_bytes(text)
        for file in manifest["files"]:
            if files is None or file in files:
                # A file that is gone is damage, which the hashes show.
                with self.reaching(f"{file} of {name} was not loaded"), contextlib.suppress(FileNotFoundError):
                    self.files.get_file(f"{place}/{file}", str(folder / file))

    def unfinished(self) -> list[str]:
        """List the uploads without a manifest, which the next run removes."""
        names = []
        for name, uploads in self._uploads().items():
            names += [f"{name}.{number}" for number, files in uploads.items() if not self._is_complete(files)]
        return sorted(names)

    def _newest(self, name: str) -> tuple[str, Manifest, bytes]:
        """Return the place and manifest of the newest upload of a checkpoint, leaving out cut manifests."""
        uploads = self._uploads(name).get(name, {})
        damage = None
        for number in sorted(uploads, reverse=True):
            place = f"{self.root}/{name}.{number}"
            try:
                with self.reaching(f"{name} was not loaded"), contextlib.suppress(FileNotFoundError):
                    text = self.files.cat_file(f"{place}/{MANIFEST}", end=MANIFEST_LIMIT + 1)
                    return place, parse(text, f"{place}/{MANIFEST}"), text
            except CheckpointDamaged as error:
                damage = error
        raise damage or FileNotFoundError(name)

    def _uploads(self, name: str = "") -> dict[str, dict[int, set[str]]]:
        """Return the files of each upload, by the name of the checkpoint and the number of the upload."""
        uploads: dict[str, dict[int, set[str]]] = {}
        for folder in self.entries():
            match = _UPLOAD.fullmatch(folder)
            if match and name in ("", match[1]) and (files := {*filter(is_known, self.entries(folder))}):
                uploads.setdefault(match[1], {})[int(match[3])] = files
        return uploads

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
            places = self.files.ls(f"{self.root}/{folder}".rstrip("/"), detail=False)
            return [place.rstrip("/").rpartition("/")[2] for place in places]
        return []

    @staticmethod
    def _is_complete(files: Collection[str]) -> bool:
        return MANIFEST in files

    # ------------------------------------------------------------------------------------------------- writing

    def begin(self) -> None:
        """Refuse a bucket that does not exist, and remove uploads that were interrupted."""
        if self.bucket and not self.entries() and self._lacks_bucket():
            raise ConfigError(
                f"url={self.url!r}: there is no bucket {self.bucket!r}; correct the URL, or create the bucket first"
            )
        for name, uploads in self._uploads().items():
            self._clean_up(name, [number for number, files in uploads.items() if not self._is_complete(files)])

    def _lacks_bucket(self) -> bool:
        """Return whether the store says that there is no such bucket, and not only that it may not be looked at."""
        with self.reaching("its bucket was not looked up"):
            if self.files.exists(self.bucket):  # An empty bucket too, which some clients do not list.
                return False
            try:
                self.files.ls(self.bucket, detail=False)
            except FileNotFoundError:
                return True
            except (OSError, NotImplementedError):  # Rights may be given for the folder of the run alone.
                return False
        return False

    def _make_folder(self, place: str) -> None:
        """Make a folder; object storage needs none, and would make a bucket that was removed."""
        if not self.bucket:
            self.files.makedirs(place, exist_ok=True)

    def put(self, name: str, folder: Path) -> None:
        """Upload a checkpoint, the manifest last, read it back, and remove earlier uploads of it."""
        earlier = self._uploads(name).get(name, {})
        number = self._free_number(name, earlier)
        place = f"{self.root}/{name}.{number}"
        manifest = read_manifest(folder)
        try:
            with self.reaching(f"{name} was not saved"):
                self._make_folder(place)
                for file in (*manifest["files"], MANIFEST):
                    self.files.put_file(str(folder / file), f"{place}/{file}")
        except CheckpointError:
            with contextlib.suppress(CheckpointError):  # The first error is the one to report.
                self._remove_upload(name, number)
            raise
        self._strays.add((name, number))
        self._verify(place, manifest, (folder / MANIFEST).read_bytes())
        self._strays.discard((name, number))
        self._clean_up(name, sorted(earlier))
        self._remove_strays(name)

    def _remove_strays(self, saved: str) -> None:
        """Try again to remove uploads that have stayed, but for those of the checkpoint that was just saved."""
        self._strays = {stray for stray in self._strays if stray[0] != saved}
        for name, number in sorted(self._strays):
            with contextlib.suppress(CheckpointError, FileNotFoundError):  # It was reported the first time.
                if number:
                    self._remove_upload(name, number)
                else:
                    self.delete(name)

    def _free_number(self, name: str, listed: Collection[int]) -> int:
        """Return a number that no upload of a checkpoint has, also where the store lists a new one late."""
        number = 1 + max(listed, default=0)
        with self.reaching(f"{name} was not saved"), contextlib.suppress(FileNotFoundError):
            while True:
                self.files.info(f"{self.root}/{name}.{number}/{MANIFEST}")
                number += 1
        return number

    def delete(self, name: str) -> None:
        """Remove the uploads of a checkpoint, the newest last, of each the manifest first."""
        self._strays.add((name, 0))
        uploads = self._uploads(name).get(name, {})
        self._strays.discard((name, 0))
        if not uploads:
            raise FileNotFoundError(name)
        for number in sorted(uploads):
            self._remove_upload(name, number)

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
            digest = hashlib.sha256()
            with self.reaching(f"{place}/{name} was not read back"), self.files.open(f"{place}/{name}", "rb") as file:
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
            if digest.hexdigest() != sha256:
                raise CheckpointDamaged(f"{place}/{name}: changed while it was uploaded. {REMEDY}")

    # ---------------------------------------------------------------------------------- files of weights alone

    def list_weights(self) -> list[Path]:
        """List the files of weights under the URL."""
        return sorted(self.folder / name for name in self.entries() if step_of_weights(name))

    def store_weights(self, path: Path, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save a file to a temporary folder, and upload it from rank 0."""
        with self.scratch(path.name) as local:
            save_model(local / path.name)
            if not is_main:
                return
            with self.reaching(f"{path.name} was not saved"):
                self._make_folder(self.root)
                _put_file(self.files, local / path.name, f"{self.root}/{path.name}")

    def remove_weights(self, path: Path) -> None:
        """Remove a file; one that stays costs space, not the run."""
        try:
            with self.reaching(f"{path.name} was not removed"), contextlib.suppress(FileNotFoundError):
                self.files.rm_file(f"{self.root}/{path.name}")
        except CheckpointError as error:
            _log.warning("%s", error)


def _put_file(files: Any, source: Path, place: str) -> None:
    """Copy a file into a file system of fsspec, whole or absent: an object is, and elsewhere what is renamed."""
    from fsspec import AbstractFileSystem

    if type(files).mv is AbstractFileSystem.mv:  # There is no rename: it copies.
        files.put_file(str(source), place)
        return
    folder, _, name = place.rpartition("/")
    hidden = f"{folder}/.{name}.part"
    try:
        files.put_file(str(source), hidden)
        files.mv(hidden, place)
    except Exception:
        with contextlib.suppress(Exception):  # The first error is the one to report.
            files.rm_file(hidden)
        raise
