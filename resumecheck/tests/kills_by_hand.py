"""Run a script whole, killed and resumed, and compare the weights at the end; without resumecheck, to judge it.

``python kills_by_hand.py script.py ...`` runs the script with two hooks: the process is killed by SIGKILL after so many
optimizer steps, or in the middle of so many calls of ``torch.save``, as the environment says. A process that comes to
its end writes down its optimizer steps, and a hash of the parameters that its optimizers had.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEP, SAVE, ENDS = "KILL_AT_STEP", "KILL_IN_SAVE", "WRITE_ENDS_TO"


def train(command: Sequence[str], folder: Path, step: int = 0, save: int = 0) -> list[tuple[int, str]]:
    """Return the optimizer steps and the weights of each process that came to its end.

    ``command`` has the name of the script where it ends in ".py"; what precedes it is a launcher.
    """
    ends = folder / "ends"
    ends.mkdir(exist_ok=True, parents=True)
    for each in ends.iterdir():
        each.unlink()
    at = next(place for place, word in enumerate(command) if word.endswith(".py"))
    launcher = list(command[:at]) or [sys.executable]
    environment = {**os.environ, STEP: str(step), SAVE: str(save), ENDS: str(ends)}
    whole = [*launcher, str(Path(__file__).resolve()), *command[at:]]
    with open(folder / "output.txt", "a") as output:
        subprocess.run(whole, cwd=folder, env=environment, stdout=output, stderr=output, timeout=300)
    return [tuple(json.loads(each.read_text())) for each in sorted(ends.iterdir())]


def ends_the_same(
    command: Sequence[str], folder: Path, resume_with: Sequence[str] = (), **kill: int
) -> tuple[bool, list[tuple[int, str]], list[tuple[int, str]]]:
    """Return whether a run that was killed and resumed ends as one that was not, and the ends of both."""
    whole = train(command, folder / "whole")
    killed = train(command, folder / "killed", **kill)
    assert whole, (folder / "whole" / "output.txt").read_text()
    assert not killed, "the run came to its end before the kill"
    resumed = train([*command, *resume_with], folder / "killed")
    same = [weights for _, weights in whole] == [weights for _, weights in resumed]
    return same, whole, resumed


def _run() -> None:
    """Run the script that the arguments name, with the hooks."""
    import torch
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    optimizers = dict[int, Optimizer]()
    counts = {STEP: 0, SAVE: 0}

    def count(what: str) -> None:
        counts[what] += 1
        if counts[what] == int(os.environ[what]):
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizers[id(optimizer)] = optimizer
        count(STEP)

    def note_end() -> None:
        digest = hashlib.sha256()
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    digest.update(parameter.detach().cpu().numpy().tobytes())
        end = Path(os.environ[ENDS], os.environ.get("RANK", "0"))
        end.write_text(json.dumps([counts[STEP], digest.hexdigest()[:12]]))

    writer: Any = torch.serialization._open_zipfile_writer_file
    close = writer.__exit__

    def close_or_die(self: Any, *args: Any) -> None:
        count(SAVE)  # The records are in the file, and its directory is not.
        close(self, *args)

    writer.__exit__ = close_or_die
    register_optimizer_step_post_hook(stepped)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    note_end()


if __name__ == "__main__":
    _run()
