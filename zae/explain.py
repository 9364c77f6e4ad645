"""`explain()`: the effective step, as the loop's own lines, each with the add-ons that have a hand in it."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from zae.compose import add_ons_of, seams_of

__all__ = ["explain"]

_LOOP = ("_run", "run_epoch", "run_batch", "gradients")


class Explanation(str):
    """Text that shows itself as it is, in a terminal and in a notebook."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        escaped = self.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return f"<pre>{escaped}</pre>"


class _ExplainMethod:
    """A method of the class and of the instance alike."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return lambda: Explanation(_text(owner))


explain: Any = _ExplainMethod()


def owners_of(cls: Any, name: str) -> list[str]:
    """Name the classes whose version of a seam runs, outermost first; those that nobody overrode give none."""
    introduced = seams_of(cls).get(name)
    return [klass.__name__ for klass in cls.__mro__ if name in klass.__dict__ and klass is not introduced]


def _text(cls: Any) -> str:
    """The loop with its seams resolved for a class."""
    parts = [f"{cls.__name__}: the effective loop; after # stands who overrides a seam, outermost first"]
    used: set[str] = set()
    for name in _LOOP:
        function = getattr(cls, name)
        parts.append("\n".join(_annotated(cls, function, used)))
    rest = [(seam, owners_of(cls, seam)) for seam in seams_of(cls) if seam not in used]
    lines = [f"    {seam}  # {' > '.join(owners)}" for seam, owners in rest if owners]
    if lines:
        parts.append("\n".join(["seams called outside of these lines:", *lines]))
    if add_ons_of(cls):
        parts.append("\n".join(f"{a.__name__} ({a.layer}): {_first_line(a)}" for a in add_ons_of(cls)))
    return "\n\n".join(parts)


def _annotated(cls: Any, function: Any, used: set[str]) -> list[str]:
    """The source of one method, without its docstring and the seams that do nothing here, each line with its owners."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    source = re.sub(r'"""[\s\S]*?"""\n', "", source, count=1)
    seams = seams_of(cls)
    lines = []
    for line in source.splitlines():
        called = [name for name in re.findall(r"self\.(\w+)", line) if name in seams]
        used.update(called)
        owners = [f"{name}: {' > '.join(owners_of(cls, name))}" for name in called if owners_of(cls, name)]
        only = re.fullmatch(r"\s*self\.(\w+)\(.*\)", line)
        if only and only[1] in seams and not owners and _does_nothing(seams[only[1]], only[1]):
            continue
        if line.strip() and not line.strip().startswith(("@", "#")):
            lines.append(line + (f"  # {'; '.join(owners)}" if owners else ""))
    return lines


def _does_nothing(owner: Any, name: str) -> bool:
    """Whether the default of a seam is an empty body."""
    body = re.sub(r'"""[\s\S]*?"""', "", textwrap.dedent(inspect.getsource(owner.__dict__[name])))
    return body.rstrip().endswith(":")


def _first_line(cls: Any) -> str:
    return (inspect.getdoc(cls) or "no description").splitlines()[0]
