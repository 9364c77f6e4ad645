"""`python -m zae addons`: ours and those of another distribution, listed without an import; one of them described."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from zae.addons import EMAAddon
from zae.cli import main

MODULE = '''
"""It must not be imported by a list."""
import sys
sys.modules[__name__].was_imported = True
from zae import AddOnBase

class TiltAddon(AddOnBase):
    """Tilt the step \x1b[31m, and
    say so.

    More of it.
    """

    layer = "loop"
    state_attributes = ("count",)

    def __init__(self, *args, angle: float = 30.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.angle, self.count = angle, 0

    def optimizer_step(self):
        return super().optimizer_step()
'''


def install(name: str, point: str, text: str) -> None:
    """Write a distribution into the folder ``site``, as pip does."""
    module = name.replace("-", "_")
    for path, content in {
        f"{module}/__init__.py": "raise SystemExit('the package was imported')" if "broken" in name else "",
        f"{module}/tilt.py": text,
        f"{module}-1.2.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n",
        f"{module}-1.2.dist-info/entry_points.txt": f"[zae.addons]\n{point} = {module}.tilt:{point}\n",
    }.items():
        Path("site", path).parent.mkdir(parents=True, exist_ok=True)
        Path("site", path).write_text(content)
    importlib.invalidate_caches()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("site").mkdir()
    monkeypatch.syspath_prepend(str(Path("site").absolute()))


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["addons", *arguments])
    return status, *capsys.readouterr()


@pytest.mark.usefixtures("site")
def test_the_list_imports_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours first; each with its distribution, its version and the first line of its docstring."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "zae_tilt"]:  # Another test imports it.
        monkeypatch.delitem(sys.modules, name)
    install("zae-tilt", "TiltAddon", MODULE)
    install("zae-broken", "BrokenAddon", "def (")
    monkeypatch.setenv("COLUMNS", "60")
    status, said, _ = called(capsys)
    lines = said.splitlines()
    assert status == 0
    assert lines[0].startswith("zae 0.")
    assert lines.index("zae-broken 1.2") < lines.index("zae-tilt 1.2")
    assert lines[lines.index("zae-tilt 1.2") + 1].split(maxsplit=1)[0] == "TiltAddon"
    assert "\x1b" not in said
    assert max(map(len, lines)) <= 62
    status, said, _ = called(capsys, "--json")
    listed = {each["name"]: each for each in json.loads(said)["add_ons"]}
    assert listed["EMAAddon"]["line"] == (EMAAddon.__doc__ or "").partition("\n")[0]
    assert listed["BrokenAddon"]["line"] == ""
    assert listed["TiltAddon"]["line"].endswith("and say so.")
    assert "zae_tilt" not in sys.modules
    code = "import sys; from zae.cli import main; main(['addons']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("\nFalse\n"), done.stderr


@pytest.mark.usefixtures("site")
def test_one_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    """The word Addon may be left out."""
    install("zae-tilt", "TiltAddon", MODULE)
    status, said, error = called(capsys, "Tilt")
    assert (status, error) == (0, "")
    for words in ("TiltAddon, of zae-tilt 1.2 (zae_tilt.tilt)", "layer      loop", "overrides  optimizer_step",
                  "saves      count", "options    angle=30.0", "More of it."):  # fmt: skip
        assert words in said
    assert "\x1b" not in said
    assert called(capsys, "tilt")[1] == called(capsys, "TILTADDON")[1] == said
    found = json.loads(called(capsys, "EMAAddon", "--json")[1])
    options = {"decay": "0.999", "averaging": "'exponential'", "average_start": "0"}
    assert (found["options"], found["saves"], found["layer"]) == (options, ["average", "averaged"], EMAAddon.layer)


@pytest.mark.usefixtures("site")
def test_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is not there, a class that cannot be imported, one that is none, and a name of two distributions."""
    install("zae-odd", "OddAddon", "OddAddon = int\n")
    install("zae-lost", "LostAddon", "import nothing_of_this_name\n")
    for name, words in {
        "EMAAdon": "no add-on 'EMAAdon' is installed; did you mean 'EMAAddon'?",
        "xyz": "no add-on 'xyz' is installed; python -m zae addons lists all",
        "LostAddon": "LostAddon of zae-lost 1.2 cannot be imported: ModuleNotFoundError: No module named",
        "OddAddon": "OddAddon of zae-odd is not an add-on; it has to derive from AddOnBase",
    }.items():
        status, said, error = called(capsys, name)
        assert (status, said) == (2, "")
        assert words in error
    install("zae-ema", "EMAAddon", MODULE)
    status, said, _ = called(capsys)
    assert status == 1
    assert "-> EMAAddon is in zae 0." in said
    assert " and zae-ema 1.2: uninstall one of them" in said
