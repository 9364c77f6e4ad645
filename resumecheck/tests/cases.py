"""Scripts of users, in ``scripts``: how each is started, and what becomes of a run that is killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).resolve().parent / "scripts"


class Case(NamedTuple):
    """A script and its arguments, and what it does, by the comparison by hand."""

    script: str
    cause: str = ""
    """Why a run that is killed at a step ends otherwise; empty if it ends the same."""
    arguments: tuple[str, ...] = ()
    resume_with: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    """Lines of the script, and what stands there instead."""
    in_save: bool = False
    """Whether only a kill in the middle of a save shows the fault."""

    def command(self, folder: Path) -> list[str]:
        """Write the script to a folder, and return what starts it there."""
        text = (SCRIPTS / self.script).read_text()
        for old, new in self.edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.script).write_text(text)
        return [*self.launcher, self.script, *self.arguments]


def _mistake(cause: str, *edits: tuple[str, str], in_save: bool = False) -> Case:
    return Case("plain.py", cause, edits=edits, in_save=in_save)


_REMOVED = ""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_LAST = ("--resume_from_checkpoint", "last")

MISTAKES = {
    "the optimizer is not loaded": _mistake(
        "optimizer state", ('        optimizer.load_state_dict(state["optimizer"])\n', _REMOVED)
    ),
    "the scheduler is not loaded": _mistake(
        "learning rate", ('        scheduler.load_state_dict(state["scheduler"])\n', _REMOVED)
    ),
    "the scaler is not loaded": _mistake("loss scale", ('        scaler.load_state_dict(state["scaler"])\n', _REMOVED)),
    "dropout draws other numbers": _mistake(
        "random state", ('        torch.set_rng_state(state["random"])\n', _REMOVED)
    ),
    "the order is that of the first epoch": _mistake(
        "samples", ('        order.set_state(state["order"])\n', _REMOVED)
    ),
    "the model is not loaded": _mistake("weights", ('        model.load_state_dict(state["model"])\n', _REMOVED)),
    "the epoch begins again": _mistake(
        "repeated work",
        ("            if epoch == first_epoch and index < first_batch:\n                continue\n", _REMOVED),
    ),
    "the rest of the epoch is left out": _mistake(
        "skipped work",
        ('first_epoch, first_batch = state["epoch"], state["batch"]', 'first_epoch = state["epoch"] + 1'),
    ),
    "nothing is loaded": _mistake("does not resume", ("if os.path.exists(args.checkpoint):", "if False:")),
    "it saves at the end alone": _mistake(
        "does not resume",
        ("if (index + 1) % 10 == 0:", "if (epoch, index) == (args.epochs - 1, len(loader) - 1):"),
    ),
    "the file is not what torch.load takes": _mistake(
        "cannot load",
        ('"random": torch.get_rng_state(),', '"random": torch.get_rng_state(), "numpy": np.random.get_state(),'),
        ("import torch\n", "import numpy as np\nimport torch\n"),
    ),
    "the only file is overwritten": _mistake(
        "cannot load",
        ('torch.save(state, args.checkpoint + ".new")', "torch.save(state, args.checkpoint)"),
        ('                os.replace(args.checkpoint + ".new", args.checkpoint)\n', _REMOVED),
        in_save=True,
    ),
}
"""Mistakes in the loop of plain.py."""

CASES = {
    "plain": Case("plain.py"),
    **MISTAKES,
    "lightning": Case("with_lightning.py", "random state"),
    "transformers": Case("with_transformers.py"),
    "accelerate, by steps": Case("with_accelerate.py", "samples", resume_with=_LAST),
    "accelerate, seedable": Case(
        "with_accelerate.py", "samples", arguments=("--use_seedable_sampler",), resume_with=_LAST
    ),
    "accelerate, by epochs": Case("with_accelerate.py", arguments=("--checkpointing_steps=epoch",), resume_with=_LAST),
    "ignite": Case("with_ignite.py", "random state"),
    "ignite, deterministic": Case("with_ignite.py", arguments=("--deterministic",)),
    "skorch": Case("with_skorch.py", "repeated work"),
    "skorch, for the rest": Case("with_skorch.py", "random state", arguments=("--rest",)),
    "zae": Case("with_zae.py"),
    "ddp": Case("with_ddp.py", launcher=TORCHRUN),
}
