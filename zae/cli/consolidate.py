"""`python -m zae consolidate CHECKPOINT OUT`: write the weights of a checkpoint, sharded or not, as one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from zae.cli import Answer
from zae.errors import ConfigError, printable

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "path", help="the save_path of a run, whose newest whole checkpoint is taken, or one checkpoint"
    )
    parser.add_argument("out", help="the file to write; its suffix is the format: .safetensors, .ckpt, .pt or .pth")


def run(arguments: argparse.Namespace) -> Answer:
    """Verify the checkpoint, and write its weights."""
    # It imports torch, which takes seconds: not for --help.
    from zae.checkpoint.folder import newest_valid, verify
    from zae.checkpoint.weights import load_weights, save_weights
    from zae.doctor.checkpoints import folders_below

    path, out = Path(arguments.path).expanduser(), Path(arguments.out).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a checkpoint, or a save_path")
    if not (path / "manifest.json").exists():
        newest = newest_valid(path, verify)
        if newest is None:
            below = folders_below(path)[:9]
            hint = "give " + " or ".join(below) if below else "give a checkpoint, or a save_path"
            raise ConfigError(f"{path} contains no checkpoint; {hint}")
        path = newest[0]
    weights = load_weights(path)
    save_weights(out, weights)
    answer = {"checkpoint": str(path), "file": str(out), "tensors": len(weights)}
    text = f"{printable(str(path), kept='')}: {len(weights)} tensors in {printable(str(out), kept='')}"
    return Answer(answer, text)
