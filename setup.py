"""All metadata is in setup.cfg; this file is for the tools that still ask for one."""

from setuptools import setup

setup()
