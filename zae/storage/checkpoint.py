"""Read and list checkpoints, which are directories that are whole or absent; and weights alone, from one file.

A checkpoint has four files::

    step-00000012/
        model.safetensors     the state of the model (or model.ckpt, the zip file of torch.save)
        state.safetensors     every other tensor
        state.json            everything else, and where the tensors belong (see zae.storage.encoding)
        manifest.json         step, run, add-ons; size and SHA-256 of the files above; a hash of itself

zae.storage.share writes them, and more of them where the tensors lie in parts on several ranks. `load_checkpoint` reads
each byte once and hashes what it has read, and returns nothing before every hash has been compared with the manifest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from zae.common.argument_checks import check_url
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError
from zae.storage.encoding import decode, strict_json
from zae.storage.filesystem import install
from zae.storage.hashed_io import CURE, read_whole
from zae.storage.manifest import Manifest, is_whole, read_manifest, verify
from zae.storage.names import (
    KNOWN,
    MANIFEST,
    MODEL_FILES,
    STATE,
    STATE_TENSORS,
    entries_of,
    holds_checkpoint,
    locate,
    original_name,
    step_of,
)
from zae.storage.parts import read_parts
from zae.storage.weights_file import (
    format_of,
    load_safetensors,
    read_ckpt,
    read_model,
    read_trusted,
)

__all__ = [
    "Weights",
    "list_checkpoints",
    "load_checkpoint",
    "load_state",
    "load_weights",
    "newest_valid",
    "put_back",
    "read_weights",
    "refuse_links",
]

_log = logging.getLogger("zae")
_Content = TypeVar("_Content")
Weights: TypeAlias = "str | Path | Mapping[str, Tensor]"


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    allow_partial: Collection[str] = (),
    held: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Manifest, dict[str, Tensor], dict[Any, Any]]:
    """Read each byte of a checkpoint once, and return its content if every file has the hash in the manifest.

    Of one in shards, ``held`` names tensors of which this rank keeps its part (`zae.storage.parts.read_parts`).
    """
    if unknown := sorted(set(allow_partial) - (KNOWN - {MANIFEST})):
        raise ConfigError(f"allow_partial names {unknown}; write names of {sorted(KNOWN - {MANIFEST})}")
    directory = locate(Path(directory))
    manifest = read_manifest(directory)
    model_state: dict[str, Tensor] = {}
    model_parts, state_parts = read_parts(directory, manifest, held)
    try:
        model_state = {**read_model(directory, manifest), **model_parts}
    except CheckpointDamaged:
        if MODEL_FILES[manifest["model_format"]] not in allow_partial:
            raise
    state = load_state(directory, manifest, allow_partial, state_parts)
    return manifest, model_state, state


def load_state(
    directory: Path,
    manifest: Manifest | None = None,
    allow_partial: Collection[str] = (),
    parts: Mapping[str, Tensor] | None = None,
) -> dict[Any, Any]:
    """Read and verify what a checkpoint holds beside the model; arguments and errors as for `load_checkpoint`.

    ``parts`` is what `read_parts` returned, where it has been called.
    """
    manifest, state = manifest or read_manifest(directory), dict[Any, Any]()
    parts = read_parts(directory, manifest)[1] if parts is None else parts
    reading = STATE_TENSORS
    try:
        tensors = load_safetensors(directory / STATE_TENSORS, manifest["files"][STATE_TENSORS])
        reading = STATE
        entry, where = manifest["files"][STATE], str(directory / STATE)
        text = read_whole(directory / STATE, size=entry["size"], sha256=entry["sha256"])
        state = decode(strict_json(text, where), {**tensors, **parts}, where=where)
    except CheckpointDamaged:
        if reading not in allow_partial:
            raise
    if not isinstance(state, dict):
        raise CheckpointDamaged(f"{directory / STATE}: contains a {type(state).__name__}, not a dict. {CURE}")
    return state


def list_checkpoints(save_path: str | os.PathLike[str]) -> list[Path]:
    """List the directories named like checkpoints, the highest step first, without reading them.

    One that a killed save was about to replace comes right after the one that took its place. Raise ConfigError if
    `save_path` is a file.
    """
    found: list[tuple[int, bool, float, Path]] = []
    for entry in entries_of(Path(save_path)):
        own = original_name(entry.name)
        if (step := step_of(own)) is None or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # Removed since it was listed.
            age = entry.stat(follow_symlinks=False).st_mtime
            if not holds_checkpoint(Path(entry.path)):
                continue
            found.append((step, own == entry.name, age, Path(entry.path)))
    return [path for *_, path in sorted(found, reverse=True)]


def newest_valid(
    save_path: str | os.PathLike[str],
    read: Callable[[Path], _Content] = verify,  # type: ignore[assignment]
    list_all: Callable[[Any], list[Path]] = list_checkpoints,
) -> tuple[Path, _Content, list[tuple[Path, str]]] | None:
    """Find the newest checkpoint that can be read, among those that ``list_all`` returns."""
    passed_over: list[tuple[Path, str]] = []
    for path in list_all(save_path):
        try:
            return path, read(path), passed_over
        except (CheckpointDamaged, CheckpointNotFound) as error:
            passed_over.append((path, str(error)))
    if not passed_over:
        return None
    reasons = "\n".join(f"  {path.name}: {reason}" for path, reason in passed_over)
    raise CheckpointDamaged(
        f"{save_path}: all of {len(passed_over)} checkpoints are damaged; restore one from a copy, or move them away "
        f"to start from scratch:\n{reasons}"
    )


def refuse_links(folder: Path, found: Path | None) -> None:
    """Refuse to start from scratch, or from an older checkpoint, if a link stands for a newer one."""
    steps = {path: step_of(path.name) or 0 for path in folder.glob("step-*") if path.is_symlink()}
    newest = max(steps, key=lambda path: steps[path], default=None)
    if newest is not None and steps[newest] > (step_of(found.name) or 0 if found else -1):
        raise CheckpointNotFound(
            f"{newest} is a link, and links are not followed; write resume={os.path.realpath(newest)!r}, give the "
            "folder that it points into as save_path, or remove the link"
        )


def put_back(parent: str | os.PathLike[str]) -> None:
    """Rename what a killed save has moved aside back to its place, unless a whole checkpoint stands there.

    No other process may save into this directory at the same time.
    """
    for path in list_checkpoints(parent):
        place = path.with_name(original_name(path.name))
        if place != path and not is_whole(place) and is_whole(path):
            with contextlib.suppress(OSError):  # It stands in until it can be renamed.
                install(path, place)


# ------------------------------------------------------------------------------------------------ weights in one file


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
