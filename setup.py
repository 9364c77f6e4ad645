"""The metadata is in setup.cfg; this file only names the folder of zae.addons where the link to it is missing."""

from pathlib import Path

from setuptools import setup

# Git writes a text file instead of the link zae/addons where it may not make links (Windows without developer mode).
is_linked = Path(__file__).with_name("zae").joinpath("addons").is_dir()
setup(**({} if is_linked else {"package_dir": {"": ".", "zae.addons": "addons"}}))
