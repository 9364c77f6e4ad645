"""What a training step costs in zae and in its peers, against the loop by hand: python benchmarks/overhead.py.

Every repetition is a fresh process: the loop by hand (half of the work), the contestant, the loop by hand (the other
half), in CPU time; the ratio is the contestant's to the two halves. Where a limit is to be judged, the process does it
again while its time allows it, and gives the median. Contestants are interleaved and rotated, and the median of the
repetitions is given with its least and greatest. A contestant is one small file in contestants/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "explanation" / "performance.md"
MEASURED = """\
- Tiny MLP: layers of 20, 64 and 5 units, SGD, a shuffling DataLoader with batches of 32. Free loader: the same network
  and a list of batches. 50 epochs: 20 batches in each. CNN: a step of about 10 ms.
- All features: validation, clipping, accumulation of 4 batches, a checkpoint (fsync and SHA-256) and a log record in
  each epoch, early stopping, progress bar. Evaluation: 500 batches of a DataLoader, or a list of 2,000.
- Each loop reads the loss of every step; zae also checks that it is finite.
- Exact data path: zae collates a batch of tensors in memory with one indexing operation, in the same order and with the
  same random numbers. It does so by default; the other rows of zae have `fast_data=False`.
- An asterisk marks final weights that are not bitwise those of the manual loop. The first row compares that loop with
  itself: its scatter is the noise of the machine."""
"""What the words of the table mean."""
WORKLOADS = ("mlp", "free", "short", "cnn", "all", "eval", "free_eval")
TITLES = ("tiny MLP", "free loader", "50 epochs", "CNN", "all features", "evaluation", "evaluation, free loader")
ORDER = ("bare", "zae_fast_data", "zae_eight_fast_data", "zae_core", "zae_eight")
SECONDS = 13.0  # Of CPU time, in which a process measures again where there is a limit; one measurement takes 1 to 4.
SECONDS_OF = {"cnn": 30.0}  # One measurement takes four of them, and a limit there is of one percent.
QUICK = [("zae_core", "free"), ("zae_eight", "free"), ("zae_fast_data", "mlp")]
# One thread; and the allocator keeps what it has: page faults are the system's cost, and vary from run to run.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_ARENA_MAX": "1",
}
NOISE = 1.05  # By how much two runs of the same code may differ.
LIMITS = [  # Of the issue: workload, contestant, the most that the median may be.
    ("mlp", "zae_core", 1.02), ("free", "zae_core", 1.05), ("mlp", "zae_eight", 1.05), ("free", "zae_eight", 1.10),
    ("all", "zae_core", 1.05), ("eval", "zae_core", 1.05), ("free_eval", "zae_core", 1.05),
    ("cnn", "zae_eight", 1.01),
    ("mlp", "zae_fast_data", 0.60), ("mlp", "zae_eight_fast_data", 0.65),
]  # fmt: skip


def contestants() -> dict[str, dict[str, Any]]:
    """The contestants that are installed: their names and needs are read from the text, nothing is imported."""
    found: dict[str, dict[str, Any]] = {}
    files = sorted((HERE / "contestants").glob("*.py"))
    for file in [*(f for n in ORDER for f in files if f.stem == n), *(f for f in files if f.stem not in ORDER)]:
        text = file.read_text()
        name = re.search(r'^NAME = "(.+)"', text, re.M)
        needs = re.findall(r'"(\w+)"', (re.search(r"^PACKAGES = (.+)", text, re.M) or ["", ""])[1])
        if name and all(importlib.util.find_spec(package) for package in needs):
            found[file.stem] = {"name": name[1], "terminal": "TERMINAL = True" in text, "packages": needs}
    return found


def measure(contestant: str, workload: str, terminal: bool, seconds: float = 0.0) -> dict[str, Any]:
    """One repetition in a process of its own; what it draws on its terminal is read and dropped."""
    read, write = os.pipe()
    command = [sys.executable, str(HERE / "harness.py"), contestant, workload, str(seconds), str(write)]
    master, slave = os.openpty() if terminal else (-1, -1)
    errors = slave if terminal else subprocess.PIPE
    with subprocess.Popen(
        command, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **SETTINGS},
        cwd="/",
    ) as process:  # fmt: skip
        os.close(write)
        shown: list[bytes] = []
        if terminal:
            os.close(slave)
        stream = master if terminal else process.stderr.fileno()  # type: ignore[union-attr]
        reader = threading.Thread(target=_drain, args=(stream, shown))
        reader.start()
        with os.fdopen(read) as file:
            text = file.read()
        process.wait()
        reader.join()
    if terminal:
        os.close(master)
    if not text:
        last = b"".join(shown).decode(errors="replace").strip().splitlines()
        return {"failed": last[-1] if last else f"exit status {process.returncode}"}
    result: dict[str, Any] = json.loads(text)
    return result


def _drain(descriptor: int, into: list[bytes]) -> None:
    try:
        while data := os.read(descriptor, 65536):
            into[:] = [*into[-20:], data]
    except OSError:  # A pseudo-terminal ends so.
        pass


def run(pairs: list[tuple[str, str]], repeats: int, once: bool) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """All measurements, interleaved and rotated; ``once`` in each process, or again where there is a limit."""
    known = contestants()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name, _ in pairs}
    order = [pair for repeat in range(repeats) for pair in _rotated(pairs, repeat)]
    with tqdm(order, unit="process", dynamic_ncols=True) as bar:
        for name, workload in bar:
            bar.set_postfix_str(f"{known[name]['name']}: {TITLES[WORKLOADS.index(workload)]}")
            # The loop by hand too: its row tells what of a figure is noise.
            again = not once and (name == "bare" or any(limit[:2] == (workload, name) for limit in LIMITS))
            seconds = SECONDS_OF.get(workload, SECONDS) if again else 0.0
            results[name].setdefault(workload, []).append(measure(name, workload, known[name]["terminal"], seconds))
    return results


def _rotated(pairs: list[tuple[str, str]], turn: int) -> list[tuple[str, str]]:
    turn %= len(pairs)
    return pairs[turn:] + pairs[:turn]


def cell(rows: list[dict[str, Any]], key: str = "ratio", digits: int = 2) -> str:
    """A median with its least and greatest, or why there is none."""
    values = [row[key] for row in rows if key in row]
    if not values:
        return "-"
    mark = "" if all(row.get("same", True) for row in rows) else "\\*"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}{mark}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f}){mark}"


def table(results: dict[str, Any], workloads: list[str]) -> str:
    """Markdown."""
    known = contestants()
    lines = [
        "| | " + " | ".join(TITLES[WORKLOADS.index(w)] for w in workloads) + " |",
        "|---" * (len(workloads) + 1) + "|",
    ]
    for name, rows in results.items():
        lines.append(f"| {known[name]['name']} | " + " | ".join(cell(rows.get(w, [])) for w in workloads) + " |")
    return "\n".join(lines)


def judged(results: dict[str, Any]) -> Iterator[tuple[str, str, float, list[dict[str, Any]]]]:
    """What has a limit and was measured: workload and contestant as a reader has them, the limit, and the rows."""
    known = contestants()
    for workload, name, limit in LIMITS:
        rows = [row for row in results.get(name, {}).get(workload, []) if "ratio" in row]
        if rows:
            yield TITLES[WORKLOADS.index(workload)], known[name]["name"], limit, rows


def verdicts(results: dict[str, Any]) -> str:
    """Return the table of the limits."""
    lines = [
        "| workload | contestant | limit | median | within the limit | microseconds per step over the manual loop |",
        "|---" * 6 + "|",
    ]
    for title, label, limit, rows in judged(results):
        value, more = median(row["ratio"] for row in rows), median(row["extra_us"] for row in rows)
        kept = "yes" if value <= limit else "no"
        lines.append(f"| {title} | {label} | {limit} | {value:.3f} | {kept} | {more:+.1f} |")
    return "\n".join(lines)


def committed() -> dict[tuple[str, str], float]:
    """The medians that `verdicts` has written on the page, where there is one: by workload and contestant."""
    text = PAGE.read_text() if PAGE.exists() else ""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| [\d.]+ \| ([\d.]+) \| (?:yes|no) \|", text, re.M)
    return {(title, label): float(value) for title, label, value in rows}


def changes(results: dict[str, Any]) -> str:
    """What has become slower, or faster, than the page says: a limit may be far away from what there was."""
    known, lines = committed(), []
    for title, label, _, rows in judged(results):
        if (title, label) in known:
            now, before = median(row["ratio"] for row in rows), known[title, label]
            what = "SLOWER" if now > before * NOISE else "faster" if before > now * NOISE else "the same"
            lines.append(f"{title}, {label}: {before:.3f} on the page, {now:.3f} now: {what}")
    return "\n".join([*lines, f"(up to {NOISE - 1:.0%} is taken for noise)"])


def floor(results: dict[str, Any]) -> str:
    """How long a step of the loop by hand takes, with a loader and without."""
    mlp, free = (
        median(row["hand_us"] for by in results.values() for row in by.get(workload, []) if "hand_us" in row)
        for workload in ("mlp", "free")
    )
    return (
        f"A step of the tiny MLP in the manual loop takes {mlp:.0f} microseconds with the DataLoader, and {free:.0f} "
        "over a list of batches."
    )


def machine() -> str:
    """The processor, and the versions of all that took part."""
    cpu = (
        re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    )
    packages = ["torch", "numpy", "lightning", "transformers", "accelerate", "pytorch-ignite", "skorch"]
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return (
        f"{cpu[1] if cpu else platform.processor()}, {os.cpu_count()} cores, {platform.system()}, "
        f"Python {platform.python_version()}; {', '.join(versions)}"
    )


def chart(results: dict[str, Any], workload: str = "mlp") -> str:
    """A bar chart as SVG: the median ratio of each contestant."""
    known = contestants()
    bars = [(known[n]["name"], median(v)) for n, rows in results.items()
            if (v := [row["ratio"] for row in rows.get(workload, []) if "ratio" in row])]  # fmt: skip
    widest = max((ratio for _, ratio in bars), default=1.0)
    parts = ['<rect width="100%" height="100%" rx="8" fill="#fff"/>']  # On a dark page too.
    for index, (name, ratio) in enumerate(bars):
        y, width = 20 + 24 * index, 360 * ratio / widest
        colour = "#2a6f97" if name.startswith("zae") else "#9aa5ad"
        parts.append(f'<text x="290" y="{y + 13}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="300" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>')
        parts.append(f'<text x="{305 + width:.1f}" y="{y + 13}">{ratio:.2f}</text>')
    one = 300 + 360 / widest
    height = 24 * len(bars) + 40
    parts.append(f'<line x1="{one:.1f}" y1="10" x2="{one:.1f}" y2="{height - 12}" stroke="#222" stroke-dasharray="4"/>')
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" {style}>{"".join(parts)}</svg>\n'


def page(results: dict[str, Any], others: dict[str, Any], workloads: list[str], command: str) -> str:
    """docs/explanation/performance.md."""
    failed = sorted({f"{n}, {w}: {row['failed']}" for n, by in results.items() for w, rows in by.items()
                     for row in rows if "failed" in row})  # fmt: skip
    differ = [f"{contestants()[n]['name']}, {w}: {max(row['difference'] for row in rows if 'difference' in row):.2g}"
              for n, by in results.items() for w, rows in by.items()
              if any(not row.get("same", True) for row in rows)]  # fmt: skip
    parts = [
        "# Performance",
        "What was measured, with the command that measures it. Less is faster.",
        "## The cost of a step",
        "The CPU time of training loops, divided by that of a manual loop in plain PyTorch that does the same work. "
        f"`{command}` on {machine()}. Each figure is the median (minimum-maximum) of "
        f"{max(len(rows) for by in results.values() for rows in by.values())} repetitions, each in a new process.",
        MEASURED,
        table(results, workloads),
        "![Ratio to the manual loop, tiny MLP with a DataLoader](performance.svg)",
        "The ratios that zae is meant not to exceed:",
        verdicts(results),
        floor(results),
        "## Start and memory",
        "| | import and first step, CPU seconds | a later run of one step, CPU milliseconds | memory growth in bytes "
        "per step, step 4,000 to 20,000 |\n|---|---|---|---|\n"
        + "\n".join(
            f"| {contestants()[n]['name']} | {cell(rows.get('start', []), 'seconds')} | "
            f"{cell(rows.get('once', []), 'milliseconds', 1)} | {cell(rows.get('growth', []), 'bytes_a_step', 0)} |"
            for n, rows in others.items()
        ),
    ]
    if differ:
        parts += [
            "Largest difference of a weight: " + "; ".join(differ) + ". Lightning and Transformers stop after as many "
            "batches as the loader's length says, without exhausting the iterator: a shuffling sampler then draws one "
            "permutation less per epoch, and the next epoch has another order."
        ]
    if failed:
        parts += ["Not measured: " + "; ".join(failed) + "."]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="zae alone, within two minutes")
    parser.add_argument("--repeats", type=int, default=None, help="repetitions (5; with --quick 4)")
    parser.add_argument("--only", nargs="*", help="names of contestants (files in contestants/)")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS)
    parser.add_argument("--no-page", action="store_true", help="do not write docs/explanation/performance.md")
    arguments = parser.parse_args()
    known = contestants()
    names = arguments.only or [*known]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no contestant {', '.join(unknown)}; there are {', '.join(known)}")
    pairs = [(name, workload) for workload in arguments.workloads or WORKLOADS for name in names]
    pairs = QUICK if arguments.quick else pairs
    workloads = [workload for workload in WORKLOADS if workload in {each for _, each in pairs}]
    results = run(pairs, arguments.repeats or (4 if arguments.quick else 5), arguments.quick)
    sys.stdout.write(f"{table(results, workloads)}\n\n{verdicts(results)}\n\n{changes(results)}\n")
    if arguments.quick or arguments.no_page or arguments.only or arguments.workloads:
        return
    measured = {n: {w: [measure(n, w, known[n]["terminal"])] for w in ("start", "once", "growth")} for n in names}
    PAGE.parent.mkdir(exist_ok=True)
    command = f"python benchmarks/overhead.py --repeats {arguments.repeats or 5}"
    # What stands between their marks is written by models.py and gpu_page.py.
    text = PAGE.read_text() if PAGE.exists() else ""
    kept = [found[0] for found in re.findall(r"\n(<!-- (\w+) -->.*<!-- \2 -->\n)", text, re.S)]
    PAGE.write_text("\n".join([page(results, measured, workloads, command), *kept]))
    PAGE.with_suffix(".svg").write_text(chart(results))
    sys.stdout.write(f"\n{PAGE} is written\n")


if __name__ == "__main__":
    main()
