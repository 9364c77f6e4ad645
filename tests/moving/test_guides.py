"""The guides for those who come from another loop: both sides of each row give the same, and their names are ours."""

import re
from inspect import signature

import pytest
import torch

import zae
import zae.addons
from kit.blocks import FIRST, ROOT, table_rows
from zae.compose.hints import HINTS


def rows(name):
    """Return the two sides of each row of a guide, by the heading above it."""
    text = (ROOT / "docs" / "moving" / f"{name}.md").read_text(encoding="utf-8")
    pattern = r"^## ([^\n]+)\n(?:(?!^## ).)*?<table>.*?```python\n(.*?)```.*?```python\n(.*?)```.*?</table>"
    return {heading: sides for heading, *sides in re.findall(pattern, text, re.S | re.M)}


PAGES = ("from_a_loop", "from_accelerate", "from_lightning", "from_transformers")
SIDES = [(page, heading) for page in PAGES for heading in rows(page)]


@pytest.mark.sample(count=4)
@pytest.mark.parametrize(("page", "heading"), SIDES)
def test_both_sides_of_a_guide_give_the_same(page, heading, tmp_path, monkeypatch):
    """The same weights, bitwise but for Transformers; a second start of what saves finds nothing left to do."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    before = FIRST.split("# The data is ready")[0] + FIRST[FIRST.index("from zae import") : FIRST.index("model = ")]
    if page in ("from_lightning", "from_transformers"):
        before = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "moving" / f"{page}.md").read_text(), re.S)[1]
    results = []
    for side in rows(page)[heading]:
        for _ in range(2 if "resume" in heading else 1):
            names = {}
            exec(before, names)
            exec(side, names)
            model = names["model"]
            state = model.state_dict()  # A module of Lightning and its network have other names for the same.
            weights = [value.clone() for name, value in state.items() if "key.bias" not in name]
            results.append((names.get("accuracy", 0), weights))
    limit = 1e-6 if page == "from_transformers" else 0.0
    for accuracy, weights in results[1:]:
        assert accuracy == pytest.approx(results[0][0], abs=1e-6)
        torch.testing.assert_close(weights, results[0][1], rtol=0.0, atol=limit)


def test_there_are_as_many_rows_as_tables():
    assert len(SIDES) == 19
    assert sum((ROOT / "docs" / "moving" / f"{name}.md").read_text().count("<table>") for name in PAGES) == 19


def test_weights_of_a_checkpoint_of_lightning_load(tmp_path, monkeypatch):
    """Into the whole module, and into the network inside of it, without the prefix."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "moving" / "from_lightning.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], names)
    exec(re.search(r"## Weights of a .ckpt file.*?```python\n(.*?)```", text, re.S)[1], names)
    weight = names["fitted"].model.model.weight
    assert torch.equal(names["trainer"].model.weight, weight)
    whole = names["Digits"](names["LitDigits"](), "cpu", mode="test")
    assert not torch.equal(whole.model.model.weight, weight)
    assert whole.apply_weights("runs/digits.ckpt") == ([], [])
    assert torch.equal(whole.model.model.weight, weight)


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_the_names_of_a_guide_are_those_of_the_errors(library):
    text = (ROOT / "docs" / "moving" / f"from_{library}.md").read_text(encoding="utf-8")
    listed = table_rows(text.split(f"<!-- names: {library} -->")[1], "| there | here")
    assert len(listed) > 8
    for there, here in listed:
        known = HINTS.get(there.strip("`"))
        assert here == (known or "the same")
        assert known or there.strip("`") in dir(zae.Trainer)


@pytest.mark.parametrize("library", ["OmniGenBench", "Forgather"])
def test_the_arguments_of_a_constructor_stand_beside_ours(library):
    """Each name on the right is an option or method of the class with the add-ons of the row, and so is "the same"."""
    text = (ROOT / "docs" / "moving" / "quick_starts.md").read_text(encoding="utf-8")
    listed = table_rows(text, f"| {library} | zae |")
    assert len(listed) > 8
    for there, here in listed:
        ours = re.findall(r"`(\w+)[`=]", here)
        add_ons = {zae.addons.HuggingFaceAddon, *(getattr(zae.addons, name) for name in ours if "Addon" in name)}
        task = zae.Trainer.add_on(*add_ons)
        named = [name for name in ours if "Addon" not in name]
        if here.startswith("the same"):
            named += re.findall(r"`(\w+)`", there)
        for name in named:
            assert name in signature(task).parameters or hasattr(task, name), (there, here, name)
