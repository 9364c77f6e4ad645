"""`python -m zae new project|addon NAME`: write a project, or the distribution of an add-on, to begin with."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path
from string import Template

from zae.cli import Answer
from zae.errors import ConfigError, printable

__all__ = ["add_arguments", "render", "run"]

_FOLDER = Path(__file__).parent / "templates"
_NEXT = {
    "project": ('pip install -e ".[dev]"', "python -m zae plan train.py", "python train.py", "pytest"),
    "addon": ('pip install -e ".[dev]"', "pytest", "python -m zae addons {class_name}"),
}
"""What to do with each kind, in its folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("kind", metavar="project|addon", choices=[*_NEXT], help="project: a script that trains on real "
                        "data, a package, tests; addon: a distribution with an entry point, and a test with "
                        "zae's kit")  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="the name, my-digits for instance; an add-on my-noise is called "
                        "MyNoiseAddon, in zae-my-noise")  # fmt: skip
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help="where to write it, a folder that does not exist "
                        "or is empty (default: the name)")  # fmt: skip


def run(arguments: argparse.Namespace) -> Answer:
    """Write all files, or none where the folder is not empty."""
    names = _names(arguments.kind, arguments.name)
    folder = (arguments.folder or Path(names["distribution"])).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists, and nothing is overwritten; give another name, or --folder")
    files = render(arguments.kind, names)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    steps = [each.format(**names) for each in _NEXT[arguments.kind]]
    data = {"folder": str(folder), "files": list(files), **names, "next": steps}
    shown = printable(str(folder), kept="")
    return Answer(data, "\n".join([f"{shown}: {len(files)} files. Next:", f"  cd {shown}", *(f"  {s}" for s in steps)]))


def render(kind: str, names: dict[str, str]) -> dict[str, str]:
    """Return the text of each file of a kind by its path."""
    root, found = _FOLDER / kind, {}
    for file in sorted(root.rglob("*.txt")):
        path = file.relative_to(root).with_suffix("").as_posix().replace("PACKAGE", names["package"])
        found[path] = Template(file.read_text(encoding="utf-8")).substitute(names)
    return found


def _names(kind: str, name: str) -> dict[str, str]:
    """Return what the templates call the project and its parts; ConfigError for what cannot be a name."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
    words = words[1:] if kind == "addon" and words[:1] == ["zae"] else words
    words = words[:-1] if kind == "addon" and words[-1:] == ["addon"] else words
    package = "_".join(words)
    if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII) or not package.isidentifier() or keyword.iskeyword(package):
        raise ConfigError(f"{name!r} cannot be a name; write letters, digits and hyphens, my-digits for instance")
    taken = {"numpy", "sklearn", "tests", "torch", "train", "zae"}
    if kind == "project" and package in taken | sys.stdlib_module_names:
        raise ConfigError(f"a package {package!r} would be imported in the place of another one; give another name")
    import zae

    distribution = "-".join(words)
    made = {"name": distribution, "distribution": distribution, "package": package, "zae": zae.__version__}
    if kind == "addon":
        made |= {"distribution": f"zae-{distribution}", "package": f"zae_{package}"}
        made["class_name"] = "".join(word.capitalize() for word in words) + "Addon"
    return made
