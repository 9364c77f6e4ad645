"""docs/features/scale.md: its script runs, on as many ranks as it says, and prints what stands beside it."""

from __future__ import annotations

import re
from pathlib import Path

from kit.rank_tasks import forks
from kit.scripts import Script
from zae import addons
from zae.cli.diff import compare, read_ledger
from zae.storage.checkpoint import load_checkpoint, newest_valid

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features" / "scale.md"


def test_the_script_of_the_page_runs_on_two_ranks(tmp_path):
    """P-46: both runs end with two ranks, whose ledgers agree; the memory is that of the page."""
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(r"^<!-- not run: .*? -->\n```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    printed = "".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    Path("page.py").write_text("\n".join(blocks))
    with forks():
        status, shown, said = Script(Path("page.py").absolute()).end(60)
    assert (status, said) == (0, "")
    assert shown == printed
    for folder in ("run", "compressed"):
        manifest = newest_valid(Path(folder), load_checkpoint)[1][0]
        assert (manifest["world_size"], manifest["step"]) == (2, 8)
        first, second = (read_ledger(f"{folder}/ledger-{rank}.jsonl") for rank in (0, 1))
        assert len(first) == len(second) == 8
        assert compare(first, second) is None
        assert first[1]["stages"]["forward"]["loss"] != second[1]["stages"]["forward"]["loss"]


def test_every_engine_is_on_the_page():
    """P-46: an add-on that trains on several ranks has its line in the table, and no other name has."""
    engines = {name for name in addons.__all__ if "parallel" in getattr(getattr(addons, name), "layer", "")}
    table = PAGE.read_text(encoding="utf-8").split("## Which engine")[1].split("##")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == engines
