"""A file of JSON lines with a copy in any file system of fsspec: object storage, memory, another host."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zae.common.argument_checks import check_url
from zae.sinks.base import JSONLSink, RunInfo

__all__ = ["RemoteJSONLSink"]

_log = logging.getLogger("zae")


class RemoteJSONLSink(JSONLSink):
    """A file of JSON lines that is uploaded whole each minute, before each checkpoint, and when the run ends.

    Object storage cannot append to a file. A store that refuses the file costs one warning; the next upload has what
    it lacks. A resumed run downloads a copy that is longer than the local file, as on another machine. A new run
    renames what is there.

    Parameters
    ----------
    path : Path
        The local file.
    url : str
        The copy: ``s3://bucket/run/log.jsonl``.

    Attributes
    ----------
    seconds : float
        How long a record may wait for an upload.

    Raises
    ------
    ConfigError
        The URL has an unknown protocol, or the package of its file system is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import fsspec
    >>> from zae.sinks.base import RunInfo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sink = RemoteJSONLSink(Path(folder, "log.jsonl"), "memory://example/log.jsonl")
    ...     sink.open(RunInfo(id="0123456789abcdef"))
    ...     sink.write({"train/loss": 0.5}, 1)
    ...     sink.close(False)
    >>> len(fsspec.filesystem("memory").cat("/example/log.jsonl").splitlines())
    2
    """

    seconds = 60.0

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(path)
        self.url = url
        self._files, self._at = check_url("jsonl_url", url)
        self._uploaded_at = time.monotonic()
        self._is_behind = False  # The copy is, as the last upload has failed.

    def open(self, info: RunInfo) -> None:
        """Fetch the file of a run that continues elsewhere, or rename the copy of another run."""
        if not info.continued:
            self._try("renamed", self._move_aside)
        else:
            self._try("downloaded", self._download)
        super().open(info)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append a line, and upload the file if that was not done for a while."""
        super().write(metrics, step)
        if time.monotonic() >= self._uploaded_at + self.seconds:
            self._try("uploaded", self._upload)

    def flush(self) -> None:
        """Wait until the lines are on the disk, and upload them."""
        super().flush()
        self._try("uploaded", self._upload)

    def close(self, failed: bool) -> None:
        """Close the file, and upload it."""
        super().close(failed)
        self._try("uploaded", self._upload)

    def _try(self, what: str, function: Any) -> None:
        """Call a function of the store; an error is a warning, once until the store has worked again."""
        try:
            function()
            self._is_behind = False
        except Exception as error:  # Each file system raises its own.
            if not self._is_behind:
                text = f"{type(error).__name__}: {error}"
                _log.warning("%s could not be %s (%s); the records are in %s", self.url, what, text, self.path)
            self._is_behind = True

    def _upload(self) -> None:
        self._uploaded_at = time.monotonic()
        if self.path.exists():  # Not before the first record.
            self._files.makedirs(self._at.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(self.path), self._at)

    def _download(self) -> None:
        """Take the copy if it is longer: another machine has continued the run."""
        here = self.path.stat().st_size if self.path.exists() else -1
        if not self._files.exists(self._at) or self._files.size(self._at) <= here:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staging = self.path.with_name(f".{self.path.name}-{secrets.token_hex(8)}")
        try:
            self._files.get_file(self._at, str(staging))
            os.replace(staging, self.path)
        finally:
            staging.unlink(missing_ok=True)

    def _move_aside(self) -> None:
        """Rename the copy of another run to ``name.1.jsonl``."""
        if not self._files.exists(self._at):
            return
        folder, _, name = self._at.rpartition("/")
        stem, suffix = os.path.splitext(name)
        names = (f"{folder}/{stem}.{number}{suffix}" for number in itertools.count(1))
        self._files.mv(self._at, next(name for name in names if not self._files.exists(name)))
