"""What libraries cost with models of ten million parameters: python benchmarks/models.py writes models.json.

A ViT and a GPT are trained and evaluated on the CPU, with one thread, by the bare loop and by each library. In one
process they take turns: the bare loop, two libraries, the bare loop, the next two. A ratio is that of the time of a
step to the mean of the bare loops before and after; the figure is the median of all rounds with its 95 % interval.
The first step and the peak memory are measured in a fresh process for each library, and the saves in turns.

    python benchmarks/models.py                # about 25 minutes; writes models.json and the section of performance.md
    python benchmarks/models.py --only first   # measures a part again: rounds, first, saves
    python benchmarks/models.py --quick        # less than four minutes; shows the tables only
    python benchmarks/models.py --page         # writes the section of performance.md from models.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import median
from typing import Any

from model_jobs import COPY
from overhead import HERE, PAGE, SETTINGS, machine
from tqdm import tqdm

FILE = HERE / "models.json"
MARK = "<!-- models -->"
NAMES = {
    "bare": "bare loop", "zae_fast_data": "zae", "zae_eight_fast_data": "zae, eight add-ons",
    "with_accelerate": "Accelerate", "with_fabric": "Lightning Fabric", "with_lightning": "Lightning",
    "with_transformers": "Transformers' Trainer", "titan": "torchtitan's train step",
}  # fmt: skip
OURS = "zae_fast_data"
QUICK = ("bare", "zae_fast_data", "with_lightning", "with_transformers")
TITLES = {"vit": "ViT", "gpt": "GPT", "vit_workers": "ViT, loader with a worker", "vit_eval": "ViT, evaluation",
          "gpt_eval": "GPT, evaluation"}  # fmt: skip
UNITS = {"vit": (4, "images"), "gpt": (256, "tokens")}
SHARES = {"vit": 0.27, "gpt": 0.27, "vit_workers": 0.2, "vit_eval": 0.13, "gpt_eval": 0.13}
"""Of the time for the rounds."""
WHY = {
    "first": "zae imports its own modules after torch, and checks the model, the optimizer and the first batch.",
    "peak": "What zae takes beyond it are its own modules; it holds no copy of weights or gradients.",
    "save": "zae hashes every byte and waits for the disk; `torch.save` does neither.",
}


def child(*arguments: Any, settings: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows that a measurement in a fresh process gives."""
    read, write = os.pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(settings or {})}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # Each process would compile what is not installed.
    command = [sys.executable, str(HERE / "model_jobs.py"), str(write), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
        command, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=HERE.parent
    ) as process:  # fmt: skip
        os.close(write)
        try:
            with os.fdopen(read) as file:
                yield from map(json.loads, file)
        except GeneratorExit:  # Enough rounds.
            process.kill()
            raise
        if process.wait():
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()[-2000:]}")


def interval(values: list[float]) -> list[float]:
    """Return the lower end, the median and the upper end: the bootstrap's 95 % interval of the median."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(2000))
    return [round(each, 4) for each in (medians[50], median(values), medians[-51])]


def rounds(names: Sequence[str], steps: int, seconds: float) -> dict[str, Any]:
    """Train and evaluate in turns for so many seconds, at least two rounds of each kind."""
    found = {}
    for kind in tqdm(TITLES, desc="rounds", dynamic_ncols=True):
        rows, until = [], time.monotonic() + seconds * SHARES[kind]
        length = steps + 4 * kind.endswith("eval")
        with closing(child(kind, 999, length, ",".join(names), settings=SETTINGS)) as turn:
            for row in turn:
                rows.append(row)
                if time.monotonic() > until and len(rows) >= 2:
                    break
        found[kind] = summary(rows)
    return found


def first_steps(names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measure the first step and the peak memory, each in a fresh process, the libraries in turns."""
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in tqdm(range(-1, repeats), desc="first steps", dynamic_ncols=True):
        for name in names:
            starts[name] += child("first", name, "gpt", time.monotonic())
    # The first turn is not counted: Python compiles modules there, and the disk reads them.
    return {name: {key: spread([row[key] for row in rows[1:]]) for key in rows[0]} for name, rows in starts.items()}


def saves(turns: int) -> dict[str, Any]:
    """Measure the saves in turns, in one process."""
    rows = [*tqdm(child("save", turns), desc="saves", total=turns, dynamic_ncols=True)]
    return {key: spread([row[key] for row in rows]) for key in rows[0]}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each contestant: of all rounds, ratios with intervals."""
    found: dict[str, Any] = {"count": len(rows)}
    for name in rows[0]:
        own = [row[name] for row in rows]
        found[name] = {key: interval([each[key] for each in own]) for key in ("wall_ratio", "cpu_ratio")}
        found[name] |= {key: round(median(each[key] for each in own), 5) for key in ("wall", "cpu")}
        found[name]["same"] = all(each["same"] for each in own)
    return found


def spread(values: list[float]) -> list[float]:
    """Return the smallest, the median, and the largest."""
    return [round(each, 4) for each in (min(values), median(values), max(values))]


# -------------------------------------------------------------------------------------------------------------- tables


def ratio(row: dict[str, Any], key: str) -> str:
    low, middle, high = row[key]
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def shown(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the contestants that were measured, with their titles."""
    return [(name, title) for name, title in NAMES.items() if name in found["first"]]


def training(found: dict[str, Any]) -> list[str]:
    """Return the table of training."""
    lines = [
        "| | ViT, images/s | wall time | GPT, tokens/s | wall time | ViT, loader with a worker, wall time |",
        "|---" * 6 + "|",
    ]  # fmt: skip
    for name, title in shown(found):
        cells = [title]
        for kind in UNITS:
            row, (units, _) = found["rounds"][kind][name], UNITS[kind]
            mark = "" if row["same"] else "\\*"
            cells += [f"{units / row['wall']:.1f}", ratio(row, "wall_ratio") + mark]
        lines.append("| " + " | ".join([*cells, ratio(found["rounds"]["vit_workers"][name], "wall_ratio")]) + " |")
    return lines


def evaluation(found: dict[str, Any]) -> list[str]:
    """Return the table of evaluations, first steps and memory."""
    lines = [
        "| | evaluation, ViT, CPU time | evaluation, GPT, CPU time | first step, seconds | peak memory, MB |",
        "|---" * 5 + "|",
    ]  # fmt: skip
    for name, title in shown(found):
        first = found["first"][name]
        cells = [title, *(ratio(row[name], "cpu_ratio") if name in row else "-" for row in
                          (found["rounds"][kind] for kind in ("vit_eval", "gpt_eval")))]  # fmt: skip
        low, middle, high = first["wall"]
        cells += [f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{first['peak'][1] / 1e6:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def saving(found: dict[str, Any]) -> list[str]:
    """Return the table of saves."""
    lines = ["| | seconds | smallest to largest | ratio to torch.save |", "|---|---|---|---|"]
    base = found["saves"]["torch.save"][1]
    for name, (low, middle, high) in found["saves"].items():
        lines.append(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {middle / base:.2f} |")
    return lines


def columns(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, list[float]]]]:
    """Yield each column: its title, why zae is not first in it where that is known, and an interval by name."""
    for kind in TITLES:
        for key in ("wall_ratio", "cpu_ratio"):
            rows = {name: row[key] for name, row in found["rounds"][kind].items() if name in NAMES}
            yield f"{TITLES[kind]}, {key.partition('_')[0].replace('cpu', 'CPU')} time", "", rows
    for key, title, unit in (("wall", "seconds", 1), ("cpu", "CPU seconds", 1), ("peak", "MB", 1e6)):
        rows = {name: [each / unit for each in row[key]] for name, row in found["first"].items()}
        what = "peak memory" if key == "peak" else "first step"
        yield f"{what}, {title}", WHY["peak" if key == "peak" else "first"], rows
    saves = {name: row for name, row in found["saves"].items() if "async" not in name and name != COPY}
    saves[OURS] = saves.pop("zae, safetensors")
    yield "a save, seconds", WHY["save"], saves


def verdicts(found: dict[str, Any]) -> list[str]:
    """Return a line for each column in which another one is before zae, beyond the intervals of both.

    Where the interval of zae overlaps that of the bare loop, nothing that a library does can be told from noise.
    """
    lines = []
    for title, why, rows in columns(found):
        low, middle, _ = rows[OURS]
        ahead = [name for name, row in rows.items() if row[2] < low and not name.startswith("zae")]
        is_noise = not why and low <= rows["bare"][2]
        if ahead and not is_noise:
            first = ", ".join(f"{NAMES.get(name, name)} {rows[name][1]:.4g}" for name in ahead)
            lines.append(f"- {title}: {first}; zae {middle:.4g}. {why}".rstrip())
    return lines


def section(found: dict[str, Any]) -> str:
    """Return the section of the page."""
    counts = ", ".join(f"{TITLES[kind]} {found['rounds'][kind]['count']}" for kind in TITLES)
    ahead = verdicts(found)
    parts = [
        "## Models of ten million parameters",
        f"`python benchmarks/models.py`, on {found['machine']}; one thread. In one process the bare loop and the "
        "libraries take turns. A ratio is that of the time of a step to the mean of the bare loops before and after; "
        f"the figure is the median of all rounds ({counts}) with its 95 % interval. The first row compares the bare "
        "loop with itself.",
        "- ViT: 10.7 million parameters, 4 images of 32 x 32 in a step. GPT: 13.8 million, 256 tokens in a step. Both "
        "have 6 blocks of width 384, and `AdamW(fused=True)`. The batches are a list, but for the loader with a "
        "worker.\n"
        "- A step is measured from the start of one forward to the next, from the third step of a run on.\n"
        "- torchtitan 0.3 could not be imported. Its row is a loop written after its `train_step`, which always clips "
        "and steps a schedule. An asterisk marks weights that are not bitwise those of the bare loop.",
        "\n".join(training(found)),
        "Evaluation; and, in a fresh process each, the time from its start to the end of the first step of the GPT, "
        f"imports included ({found['repeats']} repetitions), and its peak memory (`ru_maxrss` after six steps).",
        "\n".join(evaluation(found)),
        f"How long training waits for a save of the GPT with the state of its optimizer, 166 MB ({found['turns']} "
        "turns, on the disk of the working folder):",
        "\n".join(saving(found)),
        "zae is not first in these columns, beyond the intervals of both. Columns in which the interval of zae "
        "overlaps that of the bare loop are left out.\n\n" + "\n".join(ahead) if ahead else
        "In no column is another one before zae, beyond the intervals of both.",
    ]  # fmt: skip
    return "\n\n".join(parts)


def write_page(found: dict[str, Any]) -> None:
    before, *rest = PAGE.read_text().split(MARK)
    after = rest[-1] if rest else "\n"
    PAGE.write_text(f"{before.rstrip()}\n\n{MARK}\n\n{section(found)}\n\n{MARK}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less than four minutes; writes nothing")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from models.json")
    parser.add_argument(
        "--only", nargs="+", choices=("rounds", "first", "saves"), help="measure these; keep the others of models.json"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="for the whole (25)")
    parser.add_argument(
        "--steps", type=int, default=9, help="steps of one turn of training (9), on a slow machine less"
    )
    arguments = parser.parse_args()
    if arguments.page:
        write_page(json.loads(FILE.read_text()))
        return
    names = QUICK if arguments.quick else [*NAMES]
    steps, repeats, turns = (5, 1, 2) if arguments.quick else (arguments.steps, 5, 9)
    # The fresh processes and the saves take some six minutes.
    seconds = 0.0 if arguments.quick else (arguments.minutes - 7) * 60
    found = json.loads(FILE.read_text()) if arguments.only else {}
    found |= {"machine": machine(), "steps": steps, "repeats": repeats, "turns": turns}
    parts: dict[str, Callable[[], Any]] = {
        "rounds": lambda: rounds(names, steps, seconds),
        "first": lambda: first_steps(names, repeats),
        "saves": lambda: saves(turns),
    }
    for part in arguments.only or parts:
        found[part] = parts[part]()
    sys.stdout.write(section(found) + "\n")
    if not arguments.quick:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        write_page(found)


if __name__ == "__main__":
    main()
