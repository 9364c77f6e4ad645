"""Read one checkpoint: each byte once, hashed as it is read, and nothing is returned unless every hash is right."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from zae.checkpoint.encoding import decode
from zae.checkpoint.folder import locate
from zae.checkpoint.hashed_files import REMEDY
from zae.checkpoint.json_text import read_json
from zae.checkpoint.manifest import Manifest, read_manifest
from zae.checkpoint.names import KNOWN, MANIFEST, MODEL_FILES, PIECE, STATE, STATE_TENSORS
from zae.checkpoint.rows import add_rows
from zae.checkpoint.shards import read_parts
from zae.checkpoint.tensor_files import load_safetensors, read_model
from zae.errors import CheckpointDamaged, ConfigError

__all__ = ["load_checkpoint", "load_state"]


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    allow_partial: Collection[str] = (),
    local_shards: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Manifest, dict[str, Tensor], dict[Any, Any]]:
    """Read each byte of a checkpoint once, and return its content if every file has the hash in the manifest.

    Of one in shards, ``local_shards`` names tensors of which this rank keeps its part (`read_parts`).
    """
    unknown = [name for name in allow_partial if name not in KNOWN - {MANIFEST} and not PIECE.fullmatch(name)]
    if unknown:
        raise ConfigError(f"allow_partial names {sorted(unknown)}; write names of {sorted(KNOWN - {MANIFEST})}")
    directory = locate(Path(directory))
    manifest = read_manifest(directory)
    model_state: dict[str, Tensor] = {}
    model_parts, state_parts = read_parts(directory, manifest, local_shards)
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
    manifest = manifest or read_manifest(directory)
    parts = read_parts(directory, manifest)[1] if parts is None else parts
    reading = STATE_TENSORS
    try:
        tensors = load_safetensors(directory / STATE_TENSORS, manifest["files"][STATE_TENSORS])
        reading = STATE
        structure = read_json(directory / STATE, manifest["files"][STATE])
        state = decode(structure, {**tensors, **parts}, where=str(directory / STATE))
    except CheckpointDamaged:
        if reading not in allow_partial:
            raise
        return {}
    if not isinstance(state, dict):
        raise CheckpointDamaged(f"{directory / STATE}: contains a {type(state).__name__}, not a dict. {REMEDY}")
    add_rows(state, directory, manifest, allow_partial)
    return state
