"""The imports of the source keep to the table of the packages, run in no circle, and load no optional package."""

from __future__ import annotations

import itertools
import re
import sys

import zae.addons
from kit import imports
from kit.engines import Task
from zae.addons.fairseq2 import RegimeAddon
from zae.addons.huggingface.saving import SavingPart
from zae.errors import AddOnConflict

TRAIT = re.compile(r"^\| `(\w+)` \| (.*?) \|", re.MULTILINE)
REQUIRED = {"torch", "numpy", "safetensors", "tqdm", "zae", *sys.stdlib_module_names}


def test_the_imports_keep_to_the_table():
    assert imports.broken() == set()


def test_what_is_built_on_something_is_named_and_needs_it():
    """What is no longer needed is taken off the table."""
    pairs = [(module, other) for module, others in imports.graph().items() for other in others]
    for feature, needs in imports.BUILT_ON.items():
        for need in needs:
            used = [pair for pair in pairs if imports.is_in(pair[0], feature) and imports.is_in(pair[1], need)]
            assert used, (feature, need)


def test_the_core_and_the_add_ons_can_be_imported_without_the_tools():
    """What is built on a tool imports it where it is called; the core does not know the add-ons."""
    for module, others in imports.graph(at_import=True).items():
        package = imports.package_of(module)
        if package not in {*imports.TOOLS, "zae", "__main__"}:
            last = imports.LAST - {package}
            assert not [each for each in others if imports.package_of(each) in last], module


def test_a_trainer_loads_what_its_loop_needs():
    """No tool, no add-on, and nothing of checkpoints, optimizers of our own, notebooks or other trainers' names."""
    edges, loaded = imports.graph(at_import=True), set()
    waiting = ["zae.trainer"]
    while waiting:
        module = waiting.pop()
        loaded.add(module)
        waiting += edges[module] - loaded
    packages = {imports.package_of(module) for module in loaded}
    assert not packages & {*imports.LAST, "checkpoint", "description", "optimizers"}
    assert not loaded & {
        "zae.display.notebook",
        "zae.compose.hints",
        "zae.loop.predictions",
        "zae.schedulers.ramps",
    }


def test_every_package_has_its_rules():
    present = {imports.package_of(name) for name in imports.sources()} - {"zae", "__main__"}
    assert present <= set(imports.RULES)
    named = {each for allowed in imports.RULES.values() for each in allowed}
    assert named <= set(imports.RULES)
    assert not named & imports.LAST, "nobody imports these"


def test_a_feature_imports_no_other_one_than_it_is_built_on():
    for own, others in imports.imports_among_features().items():
        assert {f"addons.{other}" for other in others} <= imports.BUILT_ON.get(f"addons.{own}", set()), own


def test_no_add_on_is_known_by_its_name_to_others():
    """They ask for traits, slots, options and parts; what a feature is built on, it may name."""
    classes, guilty = imports.classes_of_features(), set()
    for module, path in imports.sources().items():
        own = imports.feature_of(module)
        allowed = {f"addons.{own}", *imports.BUILT_ON.get(f"addons.{own}", ())}
        if own in imports.COMPOSES or module.startswith(imports.NAMES_ADD_ONS):
            continue
        names = imports.named_in(path.read_text(encoding="utf-8"))
        guilty |= {(module, name) for name in names if f"addons.{classes[name]}" not in allowed}
    assert guilty == set()


def test_a_name_in_code_is_found_and_one_in_a_message_is_not():
    assert imports.named_in("if 'AMPAddon' in names: pass") == {"AMPAddon"}
    assert imports.named_in("class A(EMAAddon): excludes = {'FSDPAddon': ''}") == {"EMAAddon", "FSDPAddon"}
    assert imports.named_in("raise ValueError('leave AMPAddon out')  # EMAAddon") == set()


def test_no_private_name_belongs_to_two_add_ons_that_go_together():
    """An attribute that one sets in a method would hide a method of the other, or be written by both."""
    add_ons = [getattr(zae.addons, name) for name in zae.addons.__all__]
    shared = []
    for one, other in itertools.combinations(add_ons, 2):
        alone = [set(one.__mro__) - set(other.__mro__), set(other.__mro__) - set(one.__mro__)]
        own, others = (set().union(*(imports.private_names(each) for each in classes)) for classes in alone)
        common = set().union(*(imports.private_names(each) for each in set(one.__mro__) & set(other.__mro__)))
        shared += [(one, other, names)] if (names := own & others - common) else []
    assert [pair for pair in shared if can_compose(pair[0], pair[1])] == []


def can_compose(*add_ons: type) -> bool:
    """Return whether add-ons are refused for nothing else than a name."""
    try:
        Task.add_on(*add_ons)
    except AddOnConflict as error:
        return "both define" in str(error)
    return True


def test_a_private_name_is_found_where_a_class_defines_or_sets_it():
    assert {"_losses", "_mean_loss"} <= imports.private_names(zae.addons.SpikeGuardAddon)  # Set; a method.


def test_nobody_feels_for_what_an_add_on_may_have():
    """But for two that look for a class of their own feature."""
    found = {
        module: names for module, path in imports.sources().items() if (names := imports.felt_for(path.read_text()))
    }
    assert found == {
        "zae.addons.fairseq2.regime": {"publish_metrics"},
        "zae.addons.huggingface.length": {"get_eval_dataloader"},
    }
    assert imports.felt_for("getattr(self, 'scaler', None)\nhasattr(run.trainer, 'a')\ngetattr(loader, 'b', 1)") == {
        "scaler", "a",
    }  # fmt: skip


def test_the_traits_are_those_of_the_page():
    """Each that an add-on of zae declares is there, with who declares it; and each that one excludes is declared."""
    page = (imports.ROOT / "docs" / "extending" / "addons.md").read_text(encoding="utf-8")
    section = page.partition("## Traits")[2].partition("\n## ")[0]
    rows = {trait: {*names.replace("`", "").split(", ")} for trait, names in TRAIT.findall(section)}
    add_ons = [getattr(zae.addons, name) for name in zae.addons.__all__]
    declared: dict[str, set[str]] = {}
    for add_on in add_ons:
        for kind in add_on.__mro__:
            for trait in kind.__dict__.get("traits", ()):
                declared.setdefault(trait, set()).add("HuggingFaceAddon" if kind is SavingPart else kind.__name__)
    assert rows == declared
    asked = {trait for each in (*add_ons, RegimeAddon) for trait in (*each.excludes, *each.inside, *each.outside)}
    assert asked <= {*declared, *(add_on.slot for add_on in add_ons)}


def test_no_circle_among_the_packages():
    """What is built on others is left out."""
    edges: dict[str, set[str]] = {}
    for source, target in imports.ruled_edges():
        edges.setdefault(source, set()).add(target)
    assert imports.circles(edges) == []


def test_no_circle_among_the_modules():
    """At import time."""
    assert imports.circles(imports.graph(at_import=True)) == []


def test_the_search_finds_what_it_looks_for(tmp_path):
    """What is imported at once, in a function, for type checkers, and what closes a circle."""
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nimport zae.errors\nfrom zae.checkpoint import filesystem\n"
        "if TYPE_CHECKING:\n    from zae.trainer import Trainer\ndef late():\n    from zae.addons import EMAAddon\n"
    )
    found = dict(imports.imports_of(path))
    now = {"zae.errors": True, "zae.checkpoint.filesystem": True, "zae.addons.EMAAddon": False}
    assert {name: found[name] for name in now} == now
    assert not any("trainer" in name.lower() for name in found)
    assert imports.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert imports.is_allowed("zae.loop.trainer_state", "zae.checkpoint.encoding")
    assert not imports.is_allowed("zae.data.position", "zae.checkpoint.filesystem")
    assert not imports.is_allowed("zae.loop.run", "zae.trainer")
    assert not imports.is_allowed("zae.trainer", "zae.addons.ema")
    assert ("loop", "data") in imports.package_edges()
    assert imports.resolve("zae.errors.ZaeError", imports.sources()) == "zae.errors"
    assert imports.resolve("torch.nn", imports.sources()) is None


def test_optional_packages_are_imported_only_when_they_are_used():
    """At import time there is the standard library and what zae requires; a command waits for neither."""
    light = ("zae.errors", "zae.cli", "zae.display.answer", "zae.display.text")  # They import the standard library.
    for path in imports.sources().values():
        at_import = {name for name, now in imports.imports_of(path) if now}
        assert {name.split(".")[0] for name in at_import} <= REQUIRED, path
        assert not any(name.startswith(imports.OPTIONAL) for name in at_import), path
        own = [name for name in at_import if name.startswith("zae.")]
        if path.parent.name == "cli":
            assert all(name.startswith(light) for name in own), path
        if path.name in ("errors.py", "hints.py"):
            assert all(name.startswith("zae.errors.") for name in own), path
