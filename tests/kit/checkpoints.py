"""Write a checkpoint of any state, without a trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zae.checkpoint.tensor_files import parse_format
from zae.checkpoint.writer import plan, write


def save_checkpoint(
    directory: str | os.PathLike[str],
    model_state: Mapping[str, Tensor],
    state: Mapping[Any, Any],
    *,
    model_format: str = "safetensors",
    manifest_info: Mapping[str, Any],
) -> Path:
    """Write a checkpoint from one process, in place of an existing one, and remove what killed processes have left."""
    directory = Path(os.path.abspath(directory))
    kind = parse_format(model_format)
    write(plan(directory, model_state, state, manifest_info, model_format=kind))
    return directory
