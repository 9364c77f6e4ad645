"""The gallery: each example as a user runs it, without a network, over its floor; and its page is made of it."""

from __future__ import annotations

import os

import pytest

from _generators import gallery
from kit.gallery import CPU_SECONDS, EXAMPLES, check, run
from kit.gallery_list import GALLERY


@pytest.mark.gallery
@pytest.mark.parametrize("example", GALLERY, ids=lambda each: each.name)
def test_an_example_reaches_its_floor(example, tmp_path):
    """It exits with 0, says nothing to standard error, reaches its floor on the test data, and leaves no more files.

    That of the sunspots kills its run with SIGKILL, and compares the weights bit by bit.
    """
    folder = tmp_path / "empty"
    folder.mkdir()
    outcome = run(example, folder)
    check(example, outcome)
    if "GALLERY_RECORD" in os.environ:  # For its page.
        gallery.store(example, outcome, folder)


def test_the_pages_are_made_of_the_scripts_and_their_runs():
    """Each page has the script as it is and the output of this script, and nothing else is in docs/gallery."""
    assert len(GALLERY) >= 12
    old = [each.name for each in GALLERY if gallery.read_result(each)["script"] != each.digest]
    assert old == [], f"run python docs/_generators gallery {' '.join(old)}"
    made = {path.name for path in gallery.files()}
    drawn = {gallery.picture_name(each, number) for each in GALLERY for number, _ in enumerate(each.pictures)}
    stored = {f"runs/{each.name}.json" for each in GALLERY}
    there = {path.relative_to(gallery.FOLDER).as_posix() for path in gallery.FOLDER.rglob("*") if path.is_file()}
    assert there == {*made, *drawn, *stored}
    assert [name for name in made | drawn if (gallery.FOLDER / name).stat().st_size > 40_000] == []


def test_the_recorded_runs_reached_their_floors():
    """What the pages show is over the floor, took less than the limit, and is one numbered output a script."""
    for each in GALLERY:
        result = gallery.read_result(each)
        assert each.passes(each.numbers(result["output"])), each.name
        assert 0 < result["seconds"] <= CPU_SECONDS
    assert sum(gallery.read_result(each)["seconds"] for each in GALLERY) <= 600


def test_the_floors_can_be_missed():
    """Each floor refuses the numbers that a model without any skill would print."""
    for each in GALLERY:
        numbers = each.numbers(gallery.read_result(each)["output"])
        assert not each.passes({**dict.fromkeys(numbers, 0.5), "ridge": 0.6}), each.name


def test_each_script_is_in_the_gallery():
    paths = [each.path for each in GALLERY]
    assert {path for path in paths if path.parent.name == "gallery"} == set((EXAMPLES / "gallery").glob("*.py"))
