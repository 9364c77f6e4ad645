"""Weights alone, in one file: what `save_model` writes and `apply_weights` reads."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from zae.arguments.paths import check_url
from zae.checkpoint.ckpt_files import read_ckpt, read_trusted, write_ckpt
from zae.checkpoint.filesystem import replace_file
from zae.checkpoint.folder import holds_checkpoint, list_checkpoints, sweep
from zae.checkpoint.hashed_files import read_whole
from zae.checkpoint.manifest import read_manifest
from zae.checkpoint.shards import read_parts
from zae.checkpoint.tensor_bytes import byte_count, separate
from zae.checkpoint.tensor_files import format_of, load_safetensors, read_model, write_safetensors
from zae.errors import CheckpointError, CheckpointNotFound, ConfigError

__all__ = ["Weights", "load_weights", "read_weights", "save_weights"]

_log = logging.getLogger("zae")
Weights: TypeAlias = "str | Path | Mapping[str, Tensor]"


def save_weights(
    path: str | os.PathLike[str],
    model_state: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    writes: bool = True,
) -> Path:
    """Write the state of a model as one file; an existing file is replaced atomically.

    With ``writes=False`` everything is checked and nothing written: another process writes the file.
    """
    path = Path(os.path.abspath(os.path.expanduser(path)))
    writer = partial(write_ckpt, tensors=model_state)
    if format_of(path) == "safetensors":
        writer = partial(write_safetensors, tensors=model_state, metadata=metadata)
    separate(model_state)  # What cannot be written is refused before the disk is touched.
    if not writes:
        return path
    replace_file(path, writer, byte_count(*model_state.values()))
    sweep(path.parent)
    return path


def read_weights(weights: Weights) -> Mapping[str, Tensor]:
    """Return weights that are given as a file, or as they are."""
    if not isinstance(weights, (str, os.PathLike, Mapping)):
        raise ConfigError(
            f"weights is a {type(weights).__name__}; give the path of a file, or a state dict: model.state_dict()"
        )
    return weights if isinstance(weights, Mapping) else load_weights(weights)


def load_weights(path: str | os.PathLike[str], *, trust_pickle: bool = False) -> dict[str, Tensor]:
    """Read the state of a model from one file, or from a checkpoint."""
    if isinstance(path, str) and "://" in path:
        return _download_weights(path, trust_pickle)
    path = Path(path).expanduser()
    if path.is_dir():
        if not holds_checkpoint(path) and (saved := list_checkpoints(path)):
            raise CheckpointNotFound(
                f"{path} is a folder of checkpoints; give one of them, for instance the newest: {str(saved[0])!r}. "
                f"start_from={str(path)!r} of StateManagerAddon takes the newest intact one"
            )
        manifest = read_manifest(path)
        return {**read_model(path, manifest), **read_parts(path, manifest)[0]}
    kind = format_of(path)
    if not path.exists():
        raise CheckpointNotFound(f"there is no file {path}; give one that save_model wrote, or a checkpoint")
    path = path.resolve()  # A user's own link is followed: caches of downloads consist of them.
    if trust_pickle and kind == "ckpt":
        _log.warning("%s is read with trust_pickle=True: whatever code it contains is run", path)
        return read_trusted(path)
    return load_safetensors(path) if kind == "safetensors" else read_ckpt(read_whole(path), str(path))


def _download_weights(url: str, trust_pickle: bool) -> dict[str, Tensor]:
    """Read the state of a model from one file in a file system of fsspec."""
    files, place = check_url("weights", url)
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, place.rpartition("/")[2])
        format_of(local)
        try:
            files.get_file(place, str(local))
        except FileNotFoundError:
            raise CheckpointNotFound(f"there is no file {url}; give one that save_weights_every has stored") from None
        except Exception as error:  # The clients of object storage have their own errors.
            raise CheckpointError(f"{url} was not loaded: {type(error).__name__}: {error}") from error
        return load_weights(local, trust_pickle=trust_pickle)
