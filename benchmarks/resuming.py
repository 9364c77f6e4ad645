"""Certify a script of each trainer: does a killed run end with the weights of one that was not killed?

The scripts are those of ``tests/certify/scripts``: the same model on the same digits, trained for three or four epochs,
with the checkpoints and the way to resume that the documentation of each library shows. ``python -m zae certify`` runs
each of them twice, then kills it at a step and in a save, in turn.

    python benchmarks/resuming.py               # writes its section of docs/howto/does_it_resume.md
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
MARK = "<!-- measured -->"
SETTINGS = {
    "plain": ("torch", "a loop of one's own that saves all it has, every 10 steps"),
    "ddp": ("torch", "DDP with 2 ranks, random numbers seeded in each epoch; saved after each epoch"),
    "lightning": ("lightning", '`ModelCheckpoint(save_last=True)`, `ckpt_path="last"`; saved after each epoch'),
    "transformers": ("transformers", "`save_steps=10`, `resume_from_checkpoint=True`"),
    "accelerate, by steps": ("accelerate", "`save_state` every 10 steps, `load_state`, `skip_first_batches`"),
    "accelerate, by epochs": ("accelerate", "`save_state` after each epoch, `load_state`"),
    "ignite": ("pytorch-ignite", "`Engine`, `Checkpoint` after each epoch, `load_objects`"),
    "ignite, deterministic": ("pytorch-ignite", "`DeterministicEngine`, the same"),
    "skorch": ("skorch", "`Checkpoint(monitor=None)` after each epoch, `LoadInitState`"),
    "skorch, for the rest": ("skorch", "the same, `load_params` and `partial_fit` for the epochs that are missing"),
    "zae": ("zae", '`StateManagerAddon`, `save_every=10`, `resume="auto"`'),
}
PROMISES = ("resume is exact", "saves survive a kill")


def certify(name: str, kills: int) -> dict[str, Any]:
    """Return what the command says of a script, in a folder of its own."""
    from kit.scripts_that_resume import CASES

    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        command = case.command(Path(folder))
        resume_with = ["--resume-with", " ".join(case.resume_with)] if case.resume_with else []
        chosen = [word for each in PROMISES for word in ("--only", each)]
        options = ["--kills", str(kills), *chosen, "--json", *resume_with]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
        run = subprocess.run(
            [sys.executable, "-m", "zae", "certify", *options, *(["--"] if case.launcher else []), *command],
            cwd=folder, env=environment, capture_output=True, text=True,
        )  # fmt: skip
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{name}: {run.stderr or run.stdout}")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def page(results: dict[str, dict[str, Any]], command: str) -> str:
    """The table, as Markdown."""
    import torch

    heads = ["trainer", "as its script has it", "killed at a step", "killed in a save"]
    text = [f"`{command}`, with Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}, on "
            "the CPU:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]  # fmt: skip
    for name, result in results.items():
        package, settings = SETTINGS[name]
        promises = {each["name"]: each for each in result["promises"]}
        step, save = (promises[each] for each in PROMISES)
        is_like_a_step = save["cause"] and save["cause"] == step["cause"]
        cells = [_cell(step), "as at a step" if is_like_a_step else _cell(save)]
        version = importlib.metadata.version(package).partition("+")[0]
        text.append(f"| {package} {version} | {settings} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def _cell(promise: dict[str, Any]) -> str:
    """Return the verdict in a word, with its cause."""
    if promise["verdict"] == "failed":
        return f"**{promise['cause']}**"
    return "the same" if promise["verdict"] == "passed" else promise["verdict"]


def main() -> None:
    """Certify each script, and write the section of the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs" / "howto" / "does_it_resume.md")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.only:
        results[name] = certify(name, arguments.kills)
        sys.stdout.write(json.dumps({name: results[name]["promises"]}) + "\n")
        sys.stdout.flush()
    before, _, after = arguments.output.read_text().split(MARK)
    command = " ".join(["python", "benchmarks/resuming.py", *sys.argv[1:]])
    arguments.output.write_text(f"{before}{MARK}\n\n{page(results, command)}\n{MARK}{after}")


if __name__ == "__main__":
    main()
