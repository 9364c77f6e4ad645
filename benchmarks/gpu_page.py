"""Write the section of docs/explanation/performance.md about a GPU: python benchmarks/gpu_page.py RESULTS.

RESULTS is the JSON that `.ci/gpu` wrote on a machine with a GPU, such as benchmarks/gpu_h100.json. Without it, the
section says that nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "performance.md"
MARK = "<!-- gpu -->"
HEADING = "## On a GPU"
NOTHING = "Nothing was measured on a GPU yet; `.ci/gpu` does it on a machine that has one."
NAMES = {"by hand": "manual loop", "zae": "zae", "Lightning": "Lightning", "Transformers": "Transformers' Trainer"}
FURTHER = ("saves", "compiled", "copies")
EXPLAINED = """\
- Batches lie on the GPU, and a step is measured between two batches of a run, after waiting for the GPU: neither the
  loader nor what a library does before its first step or after its last one is in the figure.
- The loops take turns in one process: the manual loop, a library, the manual loop, the next library. A ratio is that of
  the time of a step to the mean of the manual loops before and after it; the figure is the median of the rounds
  (minimum-maximum). Less is faster. The first row compares the manual loop with itself: what the machine cannot tell
  apart.
- Small network: three linear layers of 64 units, 256 rows, float32. GPT: 124 million parameters, 8 rows of 1,024
  tokens, autocast to bfloat16. Both use `AdamW(fused=True)`. MFU is the share of the GPU's bfloat16 peak, as its maker
  states it."""


def section(results: dict[str, Any] | None) -> str:
    """Return the section, between its marks."""
    parts = [NOTHING] if results is None else measured(results)
    return "\n\n".join([MARK, HEADING, *parts, MARK]) + "\n"


def measured(results: dict[str, Any]) -> list[str]:
    """Return the paragraphs and tables of what was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    where = "an emulation, whose times mean nothing" if results["is_emulated"] else results["device"]
    parts = [
        f"`.ci/gpu` measured this section, and `python benchmarks/gpu_page.py` writes it. Measured on {where}, "
        f"{results['date']}, commit {results['commit']}, Python {results['python']}, CUDA {results['cuda']}; "
        f"{versions}.",
        EXPLAINED,
    ]
    if "note" in results:  # What somebody adds by hand that the figures do not tell.
        parts.insert(1, results["note"])
    for title in ("small network, float32", "GPT, bfloat16"):
        rows = speed_rows(results, title)
        if rows:
            table = [f"| {title} | steps/s | ratio to the manual loop | MFU |", "|---|---|---|---|", *rows]
            parts.append("\n".join(table))
    rows = memory_rows(results)
    if rows:
        parts.append("The peak of the GPU's memory while a model trains with AdamW, in units of its weights.")
        parts.append("\n".join(["| | peak |", "|---|---|", *rows]))
    further = further_figures(results)
    if further:
        parts.append(further)
    parts.append(verdicts(results))
    return parts


def speed_rows(results: dict[str, Any], title: str) -> list[str]:
    """Return a row for each loop that was measured on a network."""
    rows = []
    for name, label in NAMES.items():
        figures = figures_of(results, "speed", f"{title}, {name}")
        if figures:
            spread = f"{figures['ratio_min']:.3f}-{figures['ratio_max']:.3f}"
            mfu = f"{figures['mfu']:.1%}" if "mfu" in figures else "-"
            rate = f"{figures['steps_per_second']:.1f}"
            rows.append(f"| {label} | {rate} | {figures['ratio']:.3f} ({spread}) | {mfu} |")
    return rows


def memory_rows(results: dict[str, Any]) -> list[str]:
    """Return a row for each peak that was measured."""
    found = [each for each in results["checks"] if each["section"] == "memory" and "weights" in each["figures"]]
    return [f"| {each['name']} | {each['figures']['weights']:.2f} |" for each in found]


def figures_of(results: dict[str, Any], section: str, name: str) -> dict[str, float]:
    """Return the figures of a check; none where it was not made."""
    for each in results["checks"]:
        if (each["section"], each["name"]) == (section, name):
            figures: dict[str, float] = each["figures"]
            return figures
    return {}


def verdicts(results: dict[str, Any]) -> str:
    """Say of each section how many checks passed, and name those that did not."""
    lines = []
    for name in results["seconds"]:
        checks = [each for each in results["checks"] if each["section"] == name]
        passed = [each for each in checks if each["verdict"] == "ok"]
        failed = [each for each in checks if each["verdict"] == "failed"]
        if passed or failed:
            text = f"- {name}: {len(passed)} of {len(passed) + len(failed)} checks passed"
            named = "; ".join(f"{each['name']} ({each['detail']})" for each in failed)
            lines.append(f"{text}; failed: {named}" if failed else text)
    return "\n".join(["What was checked on it:", "", *lines])


def further_figures(results: dict[str, Any]) -> str:
    """List what the sections of `--full` have measured."""
    found = [each for each in results["checks"] if each["section"] in FURTHER and each["figures"]]
    return "\n".join(f"- {each['section']}, {each['name']}: {each['detail']}" for each in found)


def put_into(page: str, text: str) -> str:
    """Replace the section of a page."""
    pattern = re.compile(rf"{MARK}.*{MARK}\n", re.S)
    if not pattern.search(page):
        raise SystemExit(f"{PAGE} has no section between two lines {MARK}")
    return pattern.sub(lambda _: text, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="the JSON of .ci/gpu")
    parser.add_argument("--show", action="store_true", help="print the section, and do not write the page")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text()) if arguments.results else None
    if arguments.show:
        sys.stdout.write(section(results))
        return
    if results and (results["is_emulated"] or results["is_small"]):
        parser.error("these results are of an emulation, or of models that were shrunk; the page is about a GPU")
    PAGE.write_text(put_into(PAGE.read_text(), section(results)))
    sys.stdout.write(f"{PAGE} is written\n")


if __name__ == "__main__":
    main()
