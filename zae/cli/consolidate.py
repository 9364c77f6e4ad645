"""`python -m zae consolidate CHECKPOINT OUT`: write the weights of a checkpoint, sharded or not, as one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zae.errors import CheckpointError, ConfigError, printable

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "path", help="the save_path of a run, whose newest whole checkpoint is taken, or one checkpoint"
    )
    parser.add_argument("out", help="the file to write; its suffix is the format: .safetensors, .ckpt, .pt or .pth")


def run(arguments: argparse.Namespace) -> int:
    """Verify the checkpoint, and write its weights; return 0, 1 if it is damaged, or 2 for a wrong path."""
    # It imports torch, which takes seconds: not for --help.
    from zae.storage.checkpoint import load_weights, newest_valid, save_weights
    from zae.storage.manifest import verify

    path, out = Path(arguments.path).expanduser(), Path(arguments.out).expanduser()
    if not path.is_dir():
        sys.stderr.write(f"{printable(str(path), kept='')} is not a folder; give a checkpoint, or a save_path\n")
        return 2
    try:
        newest = None if (path / "manifest.json").exists() else newest_valid(path, verify)
        path = path if newest is None else newest[0]
        weights = load_weights(path)
        save_weights(out, weights)
    except (CheckpointError, ConfigError) as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return 2 if isinstance(error, ConfigError) else 1
    sys.stdout.write(f"{path}: {len(weights)} tensors in {out}\n")
    return 0
