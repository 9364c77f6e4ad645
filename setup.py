"""What setup.cfg does not say, as it follows from the files: the packages, and the add-ons as entry points.

The rest of the metadata is in setup.cfg.
"""

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from zae.lazy import names_in_stub  # noqa: E402  (it imports the standard library alone)

# zae/addons is a symbolic link to addons/, so that each package lies where its name says: an editable install is then
# one line in a .pth file, which type checkers and editors follow, and no import hook. Git writes a text file instead of
# the link where it may not make links (Windows without developer mode).
is_linked = (ROOT / "zae" / "addons").is_dir()
package_dir = {"": "."} if is_linked else {"": ".", "zae.addons": "addons"}

core = [path.parent.relative_to(ROOT) for path in (ROOT / "zae").rglob("__init__.py")]
add_ons = ["zae" / path.parent.relative_to(ROOT) for path in (ROOT / "addons").rglob("__init__.py")]
packages = {".".join(folder.parts) for folder in [*core, *add_ons]}

# Listed for whoever looks them up by name; nothing loads them by itself.
names = names_in_stub("zae.addons", str(ROOT / "addons" / "__init__.py"))
entry_points = {"zae.addons": [f"{name} = zae.addons:{name}" for name in sorted(names)]}

setup(packages=sorted(packages), package_dir=package_dir, entry_points=entry_points)
