"""The page of a report in a real browser: what a person points at, presses and sees. Needs Chromium."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.browser import Browser
from kit.pages import rows
from zae.report.page import render
from zae.report.records import Records, Run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


def page(path: Path, *runs: Run) -> Path:
    path.write_text(render(runs), encoding="utf-8")
    return path


def place(browser: Browser, metric: str) -> tuple[float, float, float, float]:
    """Where a chart is in the window, after it was scrolled there: left, top, width and height."""
    found = browser.evaluate(
        f"(() => {{ const svg = document.querySelector('figure[data-metric={json.dumps(metric)}] svg');"
        "svg.scrollIntoView({block: 'center'}); const box = svg.getBoundingClientRect();"
        "return [box.x, box.y, box.width, box.height]; })()"
    )
    return found[0], found[1], found[2], found[3]


def tip(browser: Browser) -> tuple[str, dict[str, float]]:
    """The place and the values that are shown beside the pointer."""
    found = browser.evaluate(
        "(() => { const tip = document.querySelector('.tip:not([hidden])');"
        "return tip && [tip.querySelector('.head').textContent, [...tip.querySelectorAll('tr')]"
        ".map((row) => [...row.children].map((cell) => cell.textContent))]; })()"
    )
    assert found, "nothing is shown"
    return found[0], {name: float(value) for name, value in found[1]}


def points_of(browser: Browser, key: str) -> int:
    """How many points the curve of a series has."""
    path = browser.evaluate(f"document.querySelector('path[data-key=\"{key}\"]').getAttribute('d')")
    return int(path.count("M") + path.count("L"))


def check(browser: Browser) -> None:
    """Nothing was requested and nothing complained of; nothing is wider than the window."""
    assert browser.requests() == []
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_pointing_shows_the_values_of_the_log(browser: Browser, tmp_path: Path) -> None:
    """At every step, to the last digit; and each series has a curve with as many points as the log has lines."""
    given = rows(40)
    browser.open(page(tmp_path / "a.html", Run("a", Records.of(given))))
    for key in ("train/loss", "valid/loss", "lr", "grad_norm"):
        assert points_of(browser, key) == len([row for row in given if key in row])
    x, y, width, height = place(browser, "loss")
    logged = {row["step"]: row["train/loss"] for row in given if "train/loss" in row}
    valid = {row["step"]: row["valid/loss"] for row in given if "valid/loss" in row}
    seen = {}
    for at in range(int(width)):
        browser.mouse("mouseMoved", x + at, y + height / 2)
        head, values = tip(browser)
        step = int(head.split()[1])
        seen[step] = values["train"]
        assert f"epoch {1 + step // 4}" in head
        assert values.get("valid", values.get(f"valid (step {step + 1})", values.get(f"valid (step {step - 1})"))) in (
            valid.get(step), valid.get(step - 1), valid.get(step + 1),
        )  # fmt: skip
    assert seen == logged
    check(browser)


def test_zoom_and_scale(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path / "a.html", Run("a", Records.of(rows(40)))))
    x, y, width, _ = place(browser, "loss")
    whole = points_of(browser, "train/loss")
    browser.mouse("mousePressed", x + width * 0.4, y + 60, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + width * 0.6, y + 60, button="left")
    browser.mouse("mouseReleased", x + width * 0.6, y + 60, button="left", clickCount=1)
    assert points_of(browser, "train/loss") < whole / 2
    assert points_of(browser, "lr") < whole / 2, "all charts show the same steps"
    browser.evaluate("document.getElementById('reset').click()")
    assert points_of(browser, "train/loss") == whole
    linear = browser.evaluate("document.querySelector('path[data-key=\"train/loss\"]').getAttribute('d')")
    browser.evaluate("document.getElementById('log').click()")
    assert browser.evaluate("document.querySelector('path[data-key=\"train/loss\"]').getAttribute('d')") != linear
    browser.evaluate("document.querySelector('[data-x=times]').click()")
    assert points_of(browser, "train/loss") == whole
    check(browser)


def test_the_keyboard_moves_along_a_curve(browser: Browser, tmp_path: Path) -> None:
    """What is shown is said to who cannot see it; every chart and every button can be reached."""
    given = rows(12)
    browser.open(page(tmp_path / "a.html", Run("a", Records.of(given))))
    browser.evaluate("document.querySelector('figure svg').focus()")
    for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("End", 12), ("ArrowLeft", 11), ("Home", 1)):
        browser.key(key)
        assert tip(browser)[0].startswith(f"step {step} ")
        value = next(row["train/loss"] for row in given if row.get("step") == step and "train/loss" in row)
        said = browser.evaluate("document.getElementById('said').textContent")
        assert float(said.split("train ")[1].split(",")[0]) == value
    browser.key("+")
    assert browser.evaluate("!document.getElementById('reset').hidden")
    browser.key("0")
    assert browser.evaluate("document.getElementById('reset').hidden")
    unnamed = browser.evaluate(
        "[...document.querySelectorAll('figure > svg, button, input, [tabindex]')].filter((each) =>"
        "each.tabIndex < 0 || !(each.getAttribute('aria-label') || each.textContent || each.labels?.length)).length"
    )
    assert unnamed == 0
    label = browser.evaluate("document.querySelector('figure svg').getAttribute('aria-label')")
    assert label.startswith("Curve of loss. train: 12 points, lowest 0.08333333333333333, highest 1, ")


def test_gaps_and_hostile_names(browser: Browser, tmp_path: Path) -> None:
    name = "</script><script>document.title='owned'</script>\"'&"
    values: list[Any] = [1.0, "nan", 2.0, 3.0, "inf", 4.0, -1.0]
    records = Records.of([{"step": i, name: value} for i, value in enumerate(values)])
    browser.open(page(tmp_path / "a.html", Run(name, records)))
    drawn = browser.evaluate("document.querySelector('figure path').getAttribute('d')")
    assert (drawn.count("M"), drawn.count("L")) == (3, 2), "1, a gap, 2 to 3, a gap, 4 to -1"
    browser.evaluate("document.getElementById('log').click()")
    drawn = browser.evaluate("document.querySelector('figure path').getAttribute('d')")
    assert (drawn.count("M"), drawn.count("L")) == (3, 1), "a logarithm has no place for -1"
    assert browser.evaluate("document.title") == name
    assert browser.evaluate("document.querySelector('figcaption h3').textContent") == name
    check(browser)


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    """At 400 pixels nothing is cut; in both schemes text has a contrast of 4.5; the button switches the scheme."""
    runs = [Run(name, Records.of(rows(20, scale))) for name, scale in (("one", 1.0), ("another-run" * 4, 2.0))]
    browser.open(page(tmp_path / "a.html", *runs), width, 900, scheme)
    check(browser)
    contrast = (
        "(() => { const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => {"
        "v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });"
        "return 0.2126 * r + 0.7152 * g + 0.0722 * b; }; const back = light(getComputedStyle(document.body)"
        ".backgroundColor); return Math.min(...[...document.querySelectorAll('h1,h2,h3,p,td,th,button,figure text')]"
        ".filter((e) => e.textContent.trim()).map((e) => { const style = getComputedStyle(e);"
        "const front = light(e.tagName === 'text' ? style.fill : style.color);"
        "return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05); })); })()"
    )
    assert browser.evaluate(contrast) > 4.5
    overlaps = (
        "[...document.querySelectorAll('figure')].map((figure) => { const boxes = [...figure.querySelectorAll('text')]"
        ".map((e) => e.getBoundingClientRect()); const frame = figure.getBoundingClientRect();"
        "return boxes.some((a, i) => a.left < frame.left || a.right > frame.right || boxes.slice(i + 1).some((b) =>"
        "a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2)); })"
    )
    assert not any(browser.evaluate(overlaps)), "labels of the axes overlap, or are cut"
    before = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_ten_thousand_points_are_drawn(browser: Browser, tmp_path: Path) -> None:
    draw = random.Random(0)
    given = [{"step": i, "train/loss": draw.random(), "lr": draw.random()} for i in range(10_000)]
    browser.open(page(tmp_path / "a.html", Run("a", Records.of(given))))
    assert points_of(browser, "train/loss") == 10_000
    check(browser)
