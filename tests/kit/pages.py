"""Reports as tests read them: their elements, and the points of their curves."""

from __future__ import annotations

import base64
import json
import struct
from html.parser import HTMLParser
from typing import Any

ABOUT = {
    "id": "0123456789abcdef",
    "config": {
        "model": "Net",
        "parameters": 1234,
        "monitor": "loss",
        "monitor_mode": "min",
        "seed": None,
        "decay": 0.5,
        "optimizer": {"name": "SGD", "lr": 0.1},
        "composition": ["EMAAddon"],
        "world_size": 1,
    },
    "explain": "Task, the effective loop\n    for each epoch:\n        step()\n",
    "environment": {"torch": "2.6.0", "device": "cpu"},
}


def rows(steps: int = 6, scale: float = 1.0, **config: Any) -> list[dict[str, Any]]:
    about = {**ABOUT, "config": {**ABOUT["config"], **config}}
    found: list[dict[str, Any]] = [{"step": 0, "run": about, "unix_time": 1.7e9}]
    for step in range(1, steps + 1):
        number = {"step": step, "epoch": 1 + step // 4, "unix_time": 1.7e9 + step / 8}
        found.append({**number, "train/loss": scale / step, "lr": 0.1, "grad_norm": 0.1 + 0.2 * step})
        if step % 2 == 0:
            found.append({**number, "valid/loss": scale / step + 0.1})
    return found


class Page(HTMLParser):
    """The elements and texts of a page; every element must be closed."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])


def unpacked(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 8}d", data))


def curves(page: Page, run: int = 0) -> dict[str, list[tuple[float, float]]]:
    """The points of each series, as the script finds them."""
    found = {}
    for each in page.data["runs"][run]["series"]:
        steps, values = unpacked(page.data["axes"][each["axis"]][0]), unpacked(each["values"])
        found[f"{each['split']}/{each['metric']}".lstrip("/")] = list(zip(steps, values, strict=True))
    return found
