"""docs/reference/fits.md (fits.md): made from the tests of this folder, with the versions that were tried."""

from __future__ import annotations

import configparser
from importlib.metadata import version

import pytest

from _generators import ROOT, fits


def test_the_page_of_fits_is_that_of_the_tests():
    """Every library has its test, its version and its lines of use, and the well-known ones are there."""
    found = fits.read_fits()
    names = [fit.library for fit in found]
    wanted = {"torchmetrics", "timm", "monai", "peft", "datasets", "scikit-learn", "jsonargparse", "tyro", "hydra-core",
              "optuna", "schedulefree", "torchdata", "transformers"}  # fmt: skip
    assert wanted <= {*names}
    assert len(names) == len(set(names))
    assert all(fit.tried and len(fit.use.splitlines()) >= 5 for fit in found)


def test_the_extra_has_what_the_marked_tests_need():
    """A test with a marker needs a library of the extra with its name, and each library there has a test."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extra in ("fits", "vision"):
        needed = [fit.library for fit in fits.read_fits() if fit.extra == extra]
        others = ["pytorch_optimizer"] if extra == "fits" else []
        assert [*needed, *others] == setup["options.extras_require"][extra].split()


@pytest.mark.fits
@pytest.mark.parametrize(
    "library", [fit.library for fit in fits.read_fits() if fit.extra != "vision"]
)
def test_the_versions_of_the_page_are_installed(library):
    """What the marked run tries is what the page says."""
    assert version(library) == fits.read_versions()[library.lower()]
