"""The page of a report, without a browser: its numbers, its text and what it must not contain."""

from __future__ import annotations

import base64
import hashlib
import math
import random
import re
from typing import Any

import pytest

from kit.pages import ABOUT, Page, curves, rows, unpacked
from zae.report.page import render
from zae.report.records import Records, Run


def test_each_number_of_the_log_is_in_the_page_to_the_last_bit() -> None:
    page, given = Page(render([Run("a", Records.of(rows()))])), rows()
    for key in ("train/loss", "valid/loss", "lr", "grad_norm"):
        assert curves(page)[key] == [(row["step"], row[key]) for row in given if key in row]
    assert [metric["name"] for metric in page.data["metrics"]] == ["loss", "lr", "grad_norm", "steps_per_s"]
    assert page.data["runs"][0]["epochs"] == [[1, 1], [4, 2]]
    assert [value for _, value in curves(page)["steps_per_s"]] == pytest.approx([8.0] * 6)
    assert unpacked(page.data["axes"][0][1]) == [step / 8 for step in range(1, 7)]


def test_not_a_number_is_kept_for_the_script() -> None:
    page = Page(render([Run("a", Records.of([{"step": i, "x": x} for i, x in enumerate(["nan", "inf", 1.0])]))]))
    assert repr(curves(page)["x"]) == repr([(0.0, math.nan), (1.0, math.inf), (2.0, 1.0)])
    assert "2" in page.texts["td"]


def test_what_is_known_of_a_run_is_on_its_page() -> None:
    doctor = {
        "path": "run/saved",
        "advice": ["all are intact: resume=True resumes from step-00000006"],
        "checkpoints": [
            {"name": "step-00000006", "whole": True, "bytes": 2_500_000, "step": 6, "epoch": 2, "world_size": 1,
             "zae": "0.1.0", "score": 0.25, "monitor": "loss"},
            {"name": "step-00000004", "whole": False, "bytes": 5, "wrong": "model.safetensors: was changed"},
        ],
    }  # fmt: skip
    text = render([Run("first", Records.of(rows()), [doctor])])
    page = Page(text)
    assert page.texts["h1"] == ["first"]
    assert [each.strip() for each in page.texts["h2"]] == [
        "Curves", "Metrics", "Checkpoints", "Composition", "Options", "Environment",
    ]  # fmt: skip
    assert any("Net, 1,234 parameters · cpu · started 2023-11-14 22:13:20 UTC" in each
               for each in page.texts["p"])  # fmt: skip
    tiles = [each.strip() for each in page.texts["dd"]]
    assert {"0.2667", "0.1667", "6", "2", "0.8s", "8"} <= set(tiles)
    for words in ("optimizer.lr", "EMAAddon", "for each epoch:", "intact", "damaged", "2.5 MB", "was changed",
                  "resume=True resumes from step-00000006", "torch", "2.6.0"):  # fmt: skip
        assert words in text


def test_several_runs_are_compared() -> None:
    runs = [Run("one", Records.of(rows())), Run("two", Records.of(rows(scale=2.0, decay=0.9, extra=[1, "x"])))]
    text = render(runs)
    page = Page(text)
    assert page.texts["h1"] == ["2 runs"]
    assert [run["name"] for run in page.data["runs"]] == ["one", "two"]
    assert len(page.data["axes"]) == 2, "axes that are equal are there once: of training and of validation"
    assert curves(page, 1)["train/loss"][0] == (1.0, 2.0)
    options = text[text.index("<section id='options'>") :]
    differing = re.findall(r"scope='row'>([\w.]+)<", options[: options.index("<details>")])
    assert differing == ["decay", "extra"]
    assert "The same in all runs (8)" in options
    assert "Nothing differs." in text[text.index("<section id='environment'>") :]


def test_a_resumed_run_shows_its_processes() -> None:
    again = [{**row, "step": row["step"] + 4} for row in rows(2)]
    text = render([Run("a", Records.of([*rows(), *again]))])
    page = Page(text)
    assert page.data["runs"][0]["resumed"] == [4]
    assert "resumed after step 4" in text
    assert [step for step, _ in curves(page)["train/loss"]] == [1, 2, 3, 4, 5, 6]


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'\"&amp;]]><!--",
    "\u202e\x1b[31m\u2028",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_only_text(name: str) -> None:
    """Of metrics, runs, options, add-ons, checkpoints: no element comes of them, and the data is what was given."""
    about = {"config": {name: name, "composition": [name], "model": name, "optimizer": {name: [name]}, "monitor": name},
             "explain": name, "environment": {name: name, "device": name}}  # fmt: skip
    doctor = {"path": name, "advice": [name], "crashes": [{"name": name, "whole": False, "bytes": 1, "wrong": name}],
              "checkpoints": [{"name": name, "whole": True, "bytes": 1, "step": name, "epoch": name, "monitor": name,
                               "world_size": name, "zae": name, "score": 1.0}]}  # fmt: skip

    def of(name: str, about: dict[str, Any], runs: int) -> Page:
        given = [{"step": 0, "run": about}, {"step": 1, name: 1.0, f"train/{name}": 2.0}, {"step": 2, "run": about}]
        records = Records.of([*given, {"step": 3, f"train/{name}": 2.0}])
        return Page(render([Run(name, records, [doctor], [name]) for _ in range(runs)]))

    for runs in (1, 2):
        page = of(name, about, runs)
        tags = [tag for tag, _ in page.elements]
        assert tags.count("script") == 2
        assert "img" not in tags
        assert {attribute for _, found in page.elements for attribute in found if attribute.startswith("on")} == set()
        assert [metric["name"] for metric in page.data["metrics"]] == [name]
        assert page.data["runs"][0]["name"] == name


def test_the_page_requests_nothing() -> None:
    """No element refers to another file, and the policy forbids all but the two parts whose hashes it has."""
    page = Page(render([Run("a", Records.of(rows()))]))
    links = [found[key] for _, found in page.elements for key in ("src", "href", "action", "data") if key in found]
    assert links == ["data:,", "#curves"]
    policy = next(found["content"] for tag, found in page.elements if "http-equiv" in found)
    style, script = page.texts["style"][0], page.texts["script"][1]
    for kind, content in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    for words in ("@import", "fetch(", "XMLHttpRequest", "WebSocket", "innerHTML", "eval("):
        assert words not in style + script
    assert "url(" not in style
    assert not any("style" in found for _, found in page.elements), "the policy would not apply them"


def test_ten_thousand_points_take_less_than_a_megabyte() -> None:
    draw = random.Random(0)
    given: list[dict[str, Any]] = [{"step": 0, "run": ABOUT, "unix_time": 1.7e9}]
    for step in range(1, 10_001):
        number = {"step": step, "epoch": 1 + step // 100, "unix_time": 1.7e9 + step * draw.random()}
        given.append({**number, "train/loss": draw.random(), "train/accuracy": draw.random(), "lr": draw.random()})
        if step % 100 == 0:
            given.append({**number, "valid/loss": draw.random(), "valid/accuracy": draw.random()})
    text = render([Run("a", Records.of(given))])
    assert len(text.encode()) < 1_000_000
    assert len(curves(Page(text))["train/loss"]) == 10_000


def test_a_log_with_thousands_of_names_stays_a_page() -> None:
    text = render([Run("a", Records.of([{"step": 1, **{f"x{i}": 1.0 for i in range(1000)}}]))])
    assert len(Page(text).data["metrics"]) == 100
    assert "900 more metrics are not drawn" in text


def test_a_run_that_logged_nothing_has_a_page() -> None:
    text = render([Run("a", Records(), composition=["EMAAddon"])])
    assert Page(text).data["metrics"] == []
    assert "EMAAddon" in text


def test_each_of_many_runs_has_a_mark_of_its_own() -> None:
    """Eight colours, in whole, dashed and dotted lines."""
    text = render([Run(f"run {at}", Records.of(rows())) for at in range(24)])
    marks = dict(re.findall(r"<span class='swatch ([^']+)'></span>(run \d+)", text))
    assert len(marks) == 24
