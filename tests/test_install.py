"""What an installation holds: the editable one, the wheel and the source archive, with and without symbolic links."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import zae
from kit.scripts import Script, importing_from
from zae import addons
from zae.cli import COMMANDS

PAPERS = ("CHANGELOG.md", "CITATION.cff", "SECURITY.md")
ROOT = Path(zae.__file__).resolve().parent.parent
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # A build sets sys.argv.
for kind in ("editable", "wheel", "sdist"):
    getattr(build_meta, f"build_{kind}")(f"{folder}/{kind}")
"""
SCRIPT = """
import site, sys
from importlib.util import find_spec
site.addsitedir(sys.argv[1])
import zae, zae.addons
from zae.errors import ZaeError
print(zae.__file__, zae.addons.__file__, find_spec("zae.addons.amp").origin)
print(*sorted(name for name in sys.modules if name.startswith("__editable__")))
try:
    import addons
    print("addons is imported")
except ImportError as error:
    print(error)
"""


def clone(folder: Path, is_linked: bool) -> Path:
    """Copy what an installation is made of, as git does where it may make symbolic links and where it may not."""
    folder.mkdir(parents=True)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", *PAPERS):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "addons", folder / "addons", ignore=ignore)
    shutil.copytree(ROOT / "zae", folder / "zae", ignore=shutil.ignore_patterns("__pycache__", "addons"))
    if is_linked:
        (folder / "zae" / "addons").symlink_to("../addons")
    else:
        (folder / "zae" / "addons").write_text("../addons")
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["linked", "text file for the link"])
def built(request, tmp_path_factory):
    """The three archives of a clone in a folder that is called as the package is, and whether it has the link."""
    parent = tmp_path_factory.mktemp("install")
    root = clone(parent / "zae", request.param)
    for kind in ("editable", "wheel", "sdist"):
        (parent / "built" / kind).mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, parent / "built"], cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return parent, {path.parent.name: path for path in parent.glob("built/*/*")}, request.param


def modules() -> list[str]:
    """Every file of the package, by its place in an installation."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "zae").rglob("*.py")]
    core = [path.as_posix() for path in paths if path.parts[1] != "addons"]
    return sorted([*core, *(f"zae/{path.relative_to(ROOT)}" for path in (ROOT / "addons").rglob("*.py"))])


def test_the_repository_has_the_link():
    """It is relative, so that it is right in every clone; setup.py takes over where git could not make it."""
    link = ROOT / "zae" / "addons"
    assert link.is_symlink()
    assert link.readlink() == Path("../addons")


def test_archives_hold_what_is_needed_and_nothing_of_the_development(built):
    """Every module, template and page of the package, the licence and the papers; no test, document or benchmark."""
    _, archives, _ = built
    wheel = zipfile.ZipFile(archives["wheel"]).namelist()
    with tarfile.open(archives["sdist"]) as archive:
        source = [member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()]
    info = f"zae-{zae.__version__}.dist-info"
    assert {name for name in wheel if not name.startswith("zae/")} >= {f"{info}/licenses/LICENSE", f"{info}/METADATA"}
    assert [name for name in wheel if not name.startswith(("zae/", f"{info}/"))] == []
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zae").rglob("*") if path.is_file()}
    data = {name for name in files if not name.endswith((".py", ".pyc", ".md"))}
    data |= {"zae/addons/py.typed", "zae/addons/__init__.pyi"}
    assert {name for name in wheel if name.startswith("zae/") and not name.endswith(".py")} == data
    assert not any(name.startswith(("tests", "docs", "benchmarks", "examples", ".")) for name in source)
    assert {*PAPERS, "LICENSE", "README.md", "MANIFEST.in", "pyproject.toml", "setup.cfg", "setup.py"} <= {*source}
    modules_of_source = [name for name in source if name.endswith(".py") and name != "setup.py"]
    assert len(modules_of_source) == len(modules())


def test_archives_hold_each_file_once(built):
    """The wheel is the same with and without the link; the source archive has each file once, no link."""
    _, archives, is_linked = built
    names = zipfile.ZipFile(archives["wheel"]).namelist()
    assert sorted(name for name in names if name.endswith(".py")) == modules()
    assert {name for name in names if name.endswith("py.typed")} == {"zae/py.typed", "zae/addons/py.typed"}
    assert {f"zae/report/report.{kind}" for kind in ("html", "css", "js")} <= set(names)
    with tarfile.open(archives["sdist"]) as archive:
        members = archive.getmembers()
    assert not any(member.issym() or member.islnk() for member in members)
    inner = [member.name.split("/", 1)[1] for member in members if member.isfile()]
    add_ons = [name for name in inner if "addons/" in name and name.endswith(".py")]
    folder = "zae/addons" if is_linked else "addons"
    here = [path.relative_to(ROOT / "addons").as_posix() for path in (ROOT / "addons").rglob("*.py")]
    assert sorted(add_ons) == sorted(f"{folder}/{name}" for name in here)


def test_an_editable_install_is_found_by_every_script(built, tmp_path):
    """Beside the clone, where the folder `zae` would win over an import hook; elsewhere; and in the checkout."""
    parent, archives, is_linked = built
    site = tmp_path / "site"
    zipfile.ZipFile(archives["editable"]).extractall(site)
    assert not list(site.glob("zae/*.py"))  # A new file needs no new installation.
    if is_linked:  # One plain line: what type checkers and editors follow.
        assert [path.read_text().strip() for path in site.glob("*.pth")] == [str(parent / "zae")]
    folders = [tmp_path, parent / "zae", *([parent] if is_linked else [])]
    for folder in folders:
        (folder / "script.py").write_text(SCRIPT)
        done = subprocess.run(  # Without site-packages: no other zae is there.
            [sys.executable, "-S", "-E", folder / "script.py", site], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        found, hooks, stray = done.stdout.splitlines()
        add_ons = parent / "zae" / ("zae/addons" if is_linked else "addons")
        expected = [parent / "zae/zae/__init__.py", add_ons / "__init__.py", add_ons / "amp.py"]
        assert found.split() == [str(path) for path in expected]
        assert bool(hooks) is not is_linked
        # `import addons` would make each class a second time.
        assert stray.startswith(("this is the package zae.addons, not addons", "No module named 'addons'"))


NAMES = """
import zae, zae.addons, zae.cli
from zae import Trainer
from zae.addons import EMAAddon
from zae.report.page import render
from zae.report.records import Records, Run
assert render([Run("first", Records.of([{"step": 1, "train/loss": 0.5}]))]).startswith("<!DOCTYPE html>")
print(zae.__file__.partition("/zae/__init__")[0], len(zae.__all__), len(zae.addons.__all__), len(zae.cli.COMMANDS))
"""


def test_a_wheel_works_from_within_its_archive(built, tmp_path):
    """As in a zipapp: the names that the stubs list, the commands and the page are read through the loader."""
    wheel = built[1]["wheel"]
    status, shown, said = Script(importing_from(wheel) + NAMES).end()
    assert status == 0, said
    assert shown.split() == [str(wheel), *(str(len(each)) for each in (zae.__all__, addons.__all__, COMMANDS))]


def test_a_package_without_its_stubs_can_be_imported(built, tmp_path):
    """Tools that freeze scripts take only modules along: then these are there, under their own names."""
    zipfile.ZipFile(built[1]["wheel"]).extractall(tmp_path / "site")
    for stub in tmp_path.glob("site/**/*.pyi"):
        stub.unlink()
    script = "import zae, zae.addons; from zae.trainer import Trainer; from zae.addons.ema import EMAAddon"
    status, shown, said = Script(
        f"{importing_from(tmp_path / 'site')}{script}; print(EMAAddon.__module__, zae.__file__)"
    ).end()
    assert status == 0, said
    assert shown.split() == ["zae.addons.ema", str(tmp_path / "site" / "zae" / "__init__.py")]
