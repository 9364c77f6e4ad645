"""What type checkers, editors and help say of a user's code, with the wheel and with an editable install."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kit import imports

PROGRAMS = imports.ROOT / "tests" / "types"
ACCEPTED, REFUSED = PROGRAMS / "accepted.py", PROGRAMS / "refused.py"
BUILD = "import sys; from setuptools import build_meta; sys.stderr.write(build_meta.build_wheel(sys.argv[1]))"


def expected() -> list[tuple[str, int]]:
    """The lines that say that they are refused."""
    lines = REFUSED.read_text(encoding="utf-8").splitlines()
    return [(REFUSED.name, number) for number, line in enumerate(lines, start=1) if "# refused: " in line]


def run(*command: Any) -> str:
    """Run a checker elsewhere than in the checkout, whose folders are no installation."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def mypy(python: Path) -> list[tuple[str, int]]:
    """The lines that mypy reports; its cache stays, as torch takes it minutes."""
    cache = Path(tempfile.gettempdir()) / f"zae-mypy-{os.getuid()}"
    output = run(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", cache,
                 "--python-executable", python, ACCEPTED, REFUSED)  # fmt: skip
    found = re.findall(r"(\w+\.py):(\d+): error: ", output)
    assert re.search(rf"Found {len(found)} errors? in 1 file", output), output
    return sorted((name, int(line)) for name, line in found)


def pyright(python: Path) -> list[tuple[str, int]]:
    """The lines that pyright reports. basedpyright is the same program, and comes with what runs it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"include": [str(PROGRAMS)], "typeCheckingMode": "standard"}
        config = Path(folder, "pyrightconfig.json")
        config.write_text(json.dumps(settings))
        output = run(sys.executable, "-m", "basedpyright", "-p", config, "--pythonpath", python, "--outputjson")
    answer = json.loads(output)
    assert answer["summary"]["filesAnalyzed"] == 2
    found = answer["generalDiagnostics"]
    assert {each["severity"] for each in found} == {"error"}
    return sorted((Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, tmp_path_factory):
    """An interpreter where zae is installed in this way, over the packages of this one."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder / "venv", symlinks=True)
    site = next((folder / "venv").glob("lib/*/site-packages"))
    shared = [path for path in sys.path if path.endswith("site-packages")]
    if request.param == "wheel":
        settings = folder / "build.cfg"  # Elsewhere than in the checkout.
        settings.write_text(f"[build]\nbuild_base = {folder / 'build'}\n")
        command, env = [sys.executable, "-c", BUILD, folder], {**os.environ, "DIST_EXTRA_CONFIG": str(settings)}
        done = subprocess.run(command, cwd=imports.ROOT, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(site)
    else:
        shared = [str(imports.ROOT), *shared]  # The line that an editable install writes (tests/test_install.py).
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    found = folder / "venv" / "bin" / "python"
    home = run(found, "-c", "import zae; print(zae.__file__)").strip()
    assert Path(home).is_relative_to(site if request.param == "wheel" else imports.ROOT)
    return found


@pytest.mark.exhaustive  # With the extra dev: mypy and basedpyright.
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checkers_accept_what_is_right_and_refuse_what_is_wrong(python, checker):
    """mypy --strict and pyright report each line of refused.py that says so, and no other one of both files."""
    assert checker(python) == expected()


def test_the_accepted_programs_run(tmp_path, monkeypatch):
    """What the checkers accept is right."""
    spec = importlib.util.spec_from_file_location("accepted", ACCEPTED)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "accepted", module)  # check_addon pickles a trainer.
    spec.loader.exec_module(module)
    module.plain()
    module.schedule()
    module.errors()
    for program in (module.composed, module.stated, module.tools):
        program(tmp_path)


def test_the_page_of_types_shows_the_programs():
    """docs/reference/types.md quotes lines that the checkers were given."""
    page = (imports.ROOT / "docs" / "reference" / "types.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(
        r"<!-- not run: it is a part of tests/types/accepted.py, .* -->\n```python\n(.*?)```", page, re.S
    )
    assert quoted in ACCEPTED.read_text(encoding="utf-8")
