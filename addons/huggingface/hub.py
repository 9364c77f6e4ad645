"""Save a model as a folder for ``from_pretrained``, and upload such folders to the Hugging Face Hub.

``training_args.bin`` of Transformers is a pickle: to load it runs code, and it contains the token. Here the arguments
are ``training_args.json``, without tokens.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from zae.checkpoint.filesystem import make_directory, not_saved, replace_file
from zae.checkpoint.folder import is_whole
from zae.checkpoint.names import MANIFEST
from zae.checkpoint.tensor_bytes import byte_count
from zae.checkpoint.weights import save_weights
from zae.errors import CheckpointError, ConfigError, kind_of, printable
from zae.values.redact import redact

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "Push",
    "Uploader",
    "check_metadata",
    "has_file_suffix",
    "log_metrics",
    "model_exists",
    "save_folder",
    "save_metrics",
]

_log = logging.getLogger("zae")
STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
ARGUMENTS = "training_args.json"
METADATA = "zae.json"
WEIGHTS = "model.safetensors"
_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_FILES = re.compile(r"\.(safetensors|ckpt|pth?|bin|h5|onnx|pkl|pickle|npz|json|zip|tar|gz|msgpack)")
_REPOSITORY = re.compile(r"(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)  # As huggingface_hub checks it.
_SECONDS = 600.0  # How long an upload waits for a checkpoint that another thread writes.


# ------------------------------------------------------------------------------------------------- a folder


def has_file_suffix(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a file of weights: ``v1.5`` is a folder, and ``model.bin`` a file."""
    return _FILES.fullmatch(Path(path).suffix.lower()) is not None and not Path(path).is_dir()


def save_folder(
    folder: str | os.PathLike[str],
    model: nn.Module,
    weights: Mapping[str, Tensor],
    *,
    processing_class: Any = None,
    arguments: Any = None,
    metadata: Mapping[str, Any],
) -> Path:
    """Save a model as ``save_pretrained`` does, with its tokenizer, the arguments and the metadata.

    Each file is written under a hidden name and then renamed, the weights last; weights of an earlier save with another
    number of files are removed. A module without ``save_pretrained`` becomes ``model.safetensors``.
    """
    folder = make_directory(Path(os.path.abspath(os.path.expanduser(folder))))
    texts = {METADATA: json.dumps(redact(_plain(metadata)), indent=2)}
    if arguments is not None:
        texts[ARGUMENTS] = json.dumps(redact(_plain(_as_dict(arguments))), indent=2)
    try:
        with tempfile.TemporaryDirectory(prefix=".staging-", dir=folder) as staging_path:
            staging = Path(staging_path)
            with _without_bars():
                if (save := getattr(model, "save_pretrained", None)) is not None:
                    cast("Any", save)(staging, state_dict=dict(weights))
                else:
                    save_weights(staging / WEIGHTS, weights, {"format": "pt"})
                if processing_class is not None:
                    processing_class.save_pretrained(staging)
            for name, text in texts.items():
                (staging / name).write_text(text + "\n", encoding="utf-8")
            _move_files(staging, folder)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise not_saved(folder, error, byte_count(*weights.values())) from None
    return folder


def _move_files(staging: Path, folder: Path) -> None:
    """Rename what was staged to its place, and remove weights of an earlier save."""
    files = sorted((path for path in staging.rglob("*") if path.is_file()), key=lambda path: _is_weights(path.name))
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        target = folder / path.relative_to(staging)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    names = {path.name for path in files}
    for path in folder.iterdir():
        if _is_weights(path.name) and path.name not in names:
            path.unlink()


def _is_weights(name: str) -> bool:
    return _WEIGHTS.fullmatch(name) is not None


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep Transformers from drawing a bar for each file that it writes."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def model_exists(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder contains a whole model: of ``save_pretrained``, of PEFT, or a checkpoint of zae."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        return False
    if (folder / MANIFEST).is_file():
        return is_whole(folder)
    for prefix, config in {"model": "config.json", "adapter_model": "adapter_config.json"}.items():
        index = folder / f"{prefix}.safetensors.index.json"
        files = [f"{prefix}.safetensors"]
        if index.is_file():
            with contextlib.suppress(ValueError, OSError, KeyError, AttributeError):
                files = [*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()]
        if all((folder / name).is_file() for name in (config, *files)):
            return True
    return (folder / "config.json").is_file() and (folder / "pytorch_model.bin").is_file()


def describe_model(model: nn.Module, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a model: versions, its class, what it was made from, and the user's."""
    import transformers

    import zae

    base = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    for config in (getattr(model, "peft_config", None) or {}).values():
        base = getattr(config, "base_model_name_or_path", None) or base
    versions = {"zae_version": zae.__version__, "transformers_version": transformers.__version__}
    about = {"torch_version": torch.__version__, "model_class": type(model).__name__, "base_model": base}
    return {"library_name": "zae", **versions, **about, **metadata}


def check_repository(name: Any) -> None:
    """Refuse what the Hub takes for no name of a repository, before anything is trained."""
    is_text = isinstance(name, str) and _REPOSITORY.fullmatch(name) is not None
    if not is_text or "--" in name or ".." in name or name.endswith(".git"):
        raise ConfigError(
            f"hub_model_id={name!r} is no name of a repository; write 'name' or 'owner/name', each of letters, digits, "
            "'_', '-' and '.', without '--', '..' and '.git' at the end"
        )


def check_metadata(metadata: Any) -> None:
    """Refuse metadata that JSON cannot hold, before anything is written."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata={metadata!r:.60}; write a dict")
    _check_json("metadata", metadata or {})


def _check_json(place: str, value: Any) -> None:
    """Refuse a value, or one inside it, that JSON would change or cannot hold; an array's number is a number."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{place} has the key {key!r}, and JSON has text as keys; write {str(key)!r}")
            _check_json(f"{place}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(f"{place}[{index}]", item)
    else:
        plain = _number_of(value)
        is_kept = isinstance(plain, (str, int, float, type(None)))
        if not is_kept or (isinstance(plain, float) and not math.isfinite(plain)):
            raise ConfigError(
                f"{place} is {value!r:.60}, of {kind_of(value)}, which JSON cannot hold; give text, a number, True or "
                "False, None, or a list or dict of them, for instance str(value)"
            )


def _as_dict(arguments: Any) -> dict[str, Any]:
    """Return arguments as a dict; ``TrainingArguments.to_dict`` leaves its tokens out."""
    return dict(arguments if isinstance(arguments, Mapping) else arguments.to_dict())


def _number_of(value: Any) -> Any:
    """Return the number in an array of one; anything else as it is."""
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # An array of several numbers.
            return value.item()
    return value


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: what is not plain becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    value = _number_of(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


# ------------------------------------------------------------------------------------------------- metrics


def save_metrics(folder: Path, split: str, metrics: Mapping[str, Any], combined: bool) -> Path:
    """Write ``<split>_results.json``, and with ``combined`` add the metrics to ``all_results.json``."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"save_metrics({split!r}, ...) was given {type(metrics).__name__}; give the dict of evaluate()"
        )
    path = folder / f"{split}_results.json"
    _write_json(path, metrics)
    if combined:
        everything = folder / "all_results.json"
        saved: Any = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            saved = json.loads(everything.read_text(encoding="utf-8"))
        _write_json(everything, {**(saved if isinstance(saved, dict) else {}), **metrics})
    return path


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(_plain(values), indent=4, sort_keys=True).encode()
    replace_file(path, lambda write: write(text), len(text))


def log_metrics(split: str, metrics: Mapping[str, Any]) -> str:
    """Return metrics as the lines that Transformers prints."""
    from transformers.trainer_pt_utils import metrics_format

    texts = {str(key): str(value) for key, value in sorted(metrics_format(dict(metrics)).items())}
    key_width, width = (max(map(len, part), default=0) for part in (texts, texts.values()))
    rows = [f"  {key: <{key_width}} = {text:>{width}}" for key, text in texts.items()]
    return "\n".join([f"***** {split} metrics *****", *rows])


# ------------------------------------------------------------------------------------------------- the Hub


class Push(NamedTuple):
    """One upload: a model folder, a checkpoint beside it under this name, and its message."""

    folder: Path
    message: str
    checkpoint: Path | None = None
    checkpoint_name: str = ""


class _Secret:
    """A token that no text, log or comparison shows."""

    def __init__(self, value: str | None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "None" if self.value is None else "'***'"


class Uploader:
    """Upload folders to one repository of the Hub, in the background queue of its client; a failure ends no run.

    Parameters
    ----------
    repo_id : str
        The repository; it is created with the first upload.
    strategy : str
        When to upload.
    token : str, optional
        Else that of ``hf auth login``, or of HF_TOKEN.
    private : bool, optional
        Whether a new repository is private.
    revision : str, optional
        The branch.
    api : HfApi, optional
        The client; by default one of ``huggingface_hub``.
    """

    def __init__(
        self,
        repo_id: str,
        strategy: str = "every_save",
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        api: Any = None,
    ) -> None:
        self.repo_id = str(repo_id)
        self.strategy = strategy
        self.private = private
        self.revision = revision
        self._token = _Secret(token)
        self._api = api
        self._background: Any = None  # The client whose queue has the uploads.
        self._uploads: list[Future[None]] = []  # Those that have not ended.
        self._is_ending = False
        self._has_repo = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has no upload on its way."""
        return {**vars(self), "_background": None, "_uploads": [], "_is_ending": False}

    @property
    def is_busy(self) -> bool:
        """Whether an upload is on its way."""
        self._uploads = [upload for upload in self._uploads if not upload.done()]
        return bool(self._uploads)

    def start(self, push: Push) -> None:
        """Begin an upload in the background, after those on their way."""
        if self._background is None:
            self._background = copy.copy(self._client())  # The queue of a client cannot be copied with the trainer.
        self._uploads.append(self._background.run_as_future(self._upload_or_warn, push))

    def replaced(self, folder: Path, token: str | None, revision: str | None, private: bool | None) -> Uploader:
        """Return an uploader with other settings, or this one if no setting is given."""
        if not self.repo_id:
            self.repo_id = folder.absolute().name
        if token is None and revision is None and private is None:
            return self
        token = token or self._token.value
        revision = revision or self.revision
        private = self.private if private is None else private
        return Uploader(self.repo_id, self.strategy, token, private, revision, self._api)

    def wait(self) -> None:
        """Wait for the uploads on their way."""
        wait(self._uploads)

    def finish(self) -> None:
        """Wait for the uploads on their way, as the run has ended."""
        self._is_ending = True
        self.wait()
        self._is_ending = False

    def abandon(self) -> None:
        """Leave out the uploads that have not begun: the run has ended by an error."""
        self._is_ending = True
        for upload in self._uploads:
            upload.cancel()

    def upload(self, push: Push) -> Any:
        """Upload now, and return what the client returns."""
        client = self._client()
        token = self._token.value
        if push.checkpoint is not None:
            self._await(push.checkpoint)
        if not self._has_repo:
            repository = client.create_repo(self.repo_id, token=token, private=self.private, exist_ok=True)
            self.repo_id = str(getattr(repository, "repo_id", self.repo_id))
            self._has_repo = True
        with _snapshot(push) as folder:
            options = {"commit_message": push.message, "token": token, "revision": self.revision}
            return client.upload_folder(repo_id=self.repo_id, folder_path=str(folder), **options)

    def explain(self, error: Exception, push: Push) -> CheckpointError:
        """Return the error for an upload that the user asked for."""
        return CheckpointError(
            f"{push.folder} was not uploaded to {self.repo_id}: {self._describe(error)}. Check hub_model_id, hub_token "
            "and the network, and call push_to_hub() again"
        )

    def _upload_or_warn(self, push: Push) -> None:
        """Upload in the background; a failure is a warning."""
        try:
            self.upload(push)
        except Exception as error:
            text = "%s was not uploaded to %s: %s. It is in %s; upload it with trainer.push_to_hub()"
            _log.warning(text, push.message, self.repo_id, self._describe(error), push.folder)

    def _describe(self, error: Exception) -> str:
        text = redact(f"{type(error).__name__}: {error}", [self._token.value or ""])
        return printable(" ".join(text.split()))[:300]

    def _client(self) -> Any:
        if self._api is None:
            try:
                from huggingface_hub import HfApi
            except ImportError as error:
                raise ConfigError("push_to_hub needs huggingface_hub: pip install zae[hf]") from error
            return HfApi(library_name="zae")
        return self._api

    def _await(self, checkpoint: Path) -> None:
        """Wait until a checkpoint that another thread writes is whole."""
        ends = time.monotonic() + _SECONDS
        while not is_whole(checkpoint):
            if time.monotonic() > ends or (self._is_ending and not checkpoint.exists()):
                raise CheckpointError(f"{checkpoint} is not there; it was removed, or not saved")
            time.sleep(0.05)


@contextlib.contextmanager
def _snapshot(push: Push) -> Iterator[Path]:
    """Yield a folder with the files to upload, as they are now: later saves replace files, and remove checkpoints."""
    with tempfile.TemporaryDirectory(prefix=".hub-", dir=push.folder) as snapshot:
        _link(push.folder, Path(snapshot), (path for path in push.folder.iterdir() if path.is_file()))
        if push.checkpoint is not None:
            target = Path(snapshot) / push.checkpoint_name
            target.mkdir()
            _link(push.checkpoint, target, push.checkpoint.iterdir())
        yield Path(snapshot)


def _link(folder: Path, target: Path, files: Iterable[Path]) -> None:
    """Link the visible files into another folder of the same disk, or copy them where there are no links."""
    for file in files:
        if file.name.startswith((".", "_")):
            continue
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copy2(file, target / file.name)
