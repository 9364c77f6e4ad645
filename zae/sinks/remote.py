"""A file of JSON lines with a copy in any file system of fsspec: object storage, memory, another host."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from zae.common.argument_checks import check_url
from zae.sinks.base import JSONLSink, RunInfo
from zae.storage.filesystem import put_file

__all__ = ["RemoteJSONLSink"]

_log = logging.getLogger("zae")


class RemoteJSONLSink(JSONLSink):
    """A file of JSON lines that is uploaded whole each minute, before each checkpoint, and when the run ends.

    Object storage cannot append to a file. A store that refuses the file costs one warning; the next upload has what
    it lacks. A record waits for a slow store for a third of ``logger_timeout`` at most, and the upload continues. A
    resumed run waits nearly all of it, and downloads a copy that is longer than the local file, as on another machine.
    A new run renames what is there, and so does a resumed one whose download has failed.

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
        self._is_taken = False  # The copy is that of this run: an upload may replace it.
        self._wait = 0.0  # Seconds for an answer of the store.
        self._call: Future[Any] | None = None  # The last one to the store.

    def open(self, info: RunInfo) -> None:
        """Fetch the file of a run that continues elsewhere, or rename the copy of another run."""
        self._wait = 0.8 * info.timeout  # It is given up after that time.
        if not info.continued:
            self._is_taken = self._try("renamed", partial(self._ask, self._move_aside))
        else:
            self._is_taken = self._try("downloaded", self._download)
        self._wait = info.timeout / 3  # `close` waits twice.
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
        if self._call is not None:
            wait([self._call], self._wait)
        self._try("uploaded", self._upload)

    def _try(self, what: str, function: Callable[[], object]) -> bool:
        """Call a function and return whether it worked; an error is a warning, once until the store works again."""
        try:
            function()
            self._is_behind = False
        except Exception as error:  # Each file system raises its own.
            if not self._is_behind:
                text = f"{type(error).__name__}: {error}"
                _log.warning("%s could not be %s (%s); the records are in %s", self.url, what, text, self.path)
            self._is_behind = True
        return not self._is_behind

    def _ask(self, function: Callable[[], Any]) -> Any:
        """Call a function of the store, and wait for it for a while: a slow store must not keep records waiting."""
        if self._call is not None and not self._call.done():
            raise TimeoutError("the call before has not returned")
        call = self._call = Future[Any]()

        def work() -> None:
            try:
                call.set_result(function())
            except BaseException as error:
                call.set_exception(error)

        # A daemon: a client that blocks forever does not keep the process from ending.
        threading.Thread(target=work, name="zae-jsonl-url", daemon=True).start()
        try:
            return call.result(self._wait)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._wait:.3g} s") from None

    def _hidden(self) -> Path:
        return self.path.with_name(f".{self.path.name}-{secrets.token_hex(8)}")

    def _upload(self) -> None:
        """Upload a copy of the file as it is now."""
        self._uploaded_at = time.monotonic()
        if not self.path.exists():  # Not before the first record.
            return
        staging = self._hidden()
        try:
            shutil.copyfile(self.path, staging)
            self._ask(partial(self._put, staging))
        finally:
            self._discard(staging)

    def _put(self, staging: Path) -> None:
        if not self._is_taken:  # What was not reached as the run began is not replaced.
            self._move_aside()
            self._is_taken = True
        self._files.makedirs(self._at.rpartition("/")[0], exist_ok=True)
        put_file(self._files, staging, self._at)

    def _download(self) -> None:
        """Take the copy if it is longer: another machine has continued the run."""
        here = self.path.stat().st_size if self.path.exists() else -1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staging = self._hidden()
        try:
            if self._ask(partial(self._fetch, staging, here)):
                os.replace(staging, self.path)
        finally:
            self._discard(staging)

    def _fetch(self, staging: Path, size: int) -> bool:
        """Download the copy if it is longer than a size."""
        found = self._size(self._at)
        if found is None or found <= size:
            return False
        self._files.get_file(self._at, str(staging))
        return True

    def _discard(self, staging: Path) -> None:
        """Remove a hidden file once the store does not use it any more."""
        if self._call is not None:
            self._call.add_done_callback(lambda _: staging.unlink(missing_ok=True))

    def _size(self, path: str) -> int | None:
        """Return the size of a file of the store; None if it is missing: fsspec's `exists` hides a failure."""
        self._files.invalidate_cache()
        try:
            return int(self._files.info(path)["size"])
        except FileNotFoundError:
            return None

    def _move_aside(self) -> None:
        """Rename the copy of another run to ``name.1.jsonl``."""
        if self._size(self._at) is None:
            return
        folder, _, name = self._at.rpartition("/")
        stem, suffix = os.path.splitext(name)
        names = (f"{folder}/{stem}.{number}{suffix}" for number in itertools.count(1))
        self._files.mv(self._at, next(name for name in names if self._size(name) is None))
