"""`explain()`: the effective loop as pseudo-code, each line with the add-ons that have a hand in it.

The text is written here, so that it reads in ten seconds; tests/explain/test_explain.py traces real runs, and fails
when a call is not where the text says, or is not there.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from zae.compose.introspect import add_ons_of, hooks_of, is_add_on, is_marked, owners_of
from zae.compose.options import own_options
from zae.display.text import terminal_columns, wrapped
from zae.loop.cadence import Every

__all__ = ["LOOP", "Line", "Text", "explain", "lines_of", "shown_option"]

LOOP = """
?launch(run, ...)
    setup()  # seed, move the model, build optimizers and schedulers
    ?    materialize(model)
    ?    model = wrap_model(model)
    ?    optimizer = build_optimizer()
    ?    wrap_optimizers(optimizers)
    ?    scheduler = build_scheduler()
    ?wrap_loader(loader)  # to count the steps, and check that the schedules last
    ?on_run_begin()
    for each epoch:
    ?    on_epoch_begin()
    ?    loader = wrap_loader(loader)
        zero_grad()  # of a step that was cut short
    ?    with epoch_context():
            for window in batches(loader):
    ?            on_step_begin(window)
    ?            with batch_context():
    ?                outputs = gradients(window):
    ?                    for batch in micro_batches(window):
    ?                        with sync_context(last):
                                batch = to_device(batch)
    ?                            out = micro_step(batch):
    ?                                with forward_context():
                                        out = train_step(batch)
    ?                                num_targets = count_targets(out, batch)
    ?                                loss = scale_loss(out["loss"])  # its share of the window
                                    backward(loss)
    ?                    normalize(num_targets)  # by those of the window, where steps count them
    ?                unscale()
                    clip()  # when gradient_clip > 0
    ?                    norm = gradient_norm(parameters)
    ?                should_step(outputs)  # else the step is left out: on_nonfinite="skip"
                    stepped = optimizer_step():
    ?                    step_one(optimizer)
                    if stepped: scheduler_step("batch")  # when scheduler_step_on_batch
                    zero_grad()
                for out in outputs: logging(out)  # for the epoch's means
    ?            on_step_end(outputs)
                when log_every is due:
                    log(metrics)
    ?            is_due = should_validate(is_due)
                when valid_every is due:
    ?                on_validation_begin()
                    metrics = validate()
    ?                on_validation_end(metrics)
    ?            checkpoint()
    ?    metrics = metric_on_epoch_end()
        when log_every is due at the epoch:
            log(metrics)
        scheduler_step("epoch")  # unless scheduler_step_on_batch
    ?    is_due = should_validate(is_due)
        when valid_every is due at the epoch:
    ?        on_validation_begin()
            metrics = validate()
    ?        on_validation_end(metrics)
    ?    on_epoch_end()
    ?    checkpoint()
    ?on_run_end()
    ?after a save: on_save(path)
    ?after a load: on_load(path)
    ?after an exception: on_exception(error)
    teardown()  # always

validate():  # in evaluation mode, without gradients, on its own random streams
?    with evaluation_context():
?        valid_loader = wrap_loader(valid_loader)
?        valid_loader = evaluation_batches(valid_loader)
        for batch in valid_loader:
            batch = to_device(batch)
?            with forward_context():
                out = test_step(batch)
            logging(out)
?    metrics = metric_on_epoch_end()
    log(metrics)
    check_better(metrics)  # of the monitored metric
"""
"""The loop; a line with a question mark is shown only if its hook is overridden."""

_WINDOW = ("count_targets", "scale_loss", "normalize")  # They act only with several micro-batches or ranks.
_BLOCKS = ("gradients", "micro_step", "optimizer_step")  # One override may replace all that they call.
_COLUMN = 46
_WIDTH = 140  # Columns of the page, where no terminal says how many there are.
_LEAST_NOTE = 24  # Columns of what is said of an override; a narrower terminal breaks the lines itself.
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


class Line(NamedTuple):
    """A line of the pseudo-code: its depth, the hooks that it calls in order, and who overrides them."""

    depth: int
    text: str
    calls: tuple[str, ...]
    notes: tuple[str, ...]


class Text(str):
    """Text whose repr is the text itself, in a terminal and in a notebook."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"


def explain(target: Any) -> Text:
    """Show the effective loop of a trainer, or of a trainer class, as `Trainer.explain` does.

    Parameters
    ----------
    target : Trainer or type
        A trainer is shown with its options.

    Returns
    -------
    Text
        Printed as it is, in a terminal and in a notebook.

    Examples
    --------
    >>> from zae import Trainer
    >>> from zae.addons import EMAAddon
    >>> from zae.explain import explain
    >>> "EMAAddon: Evaluate with the average" in explain(Trainer.add_on(EMAAddon))
    True
    """
    is_class = isinstance(target, type)
    return Text(_text(target, None) if is_class else _text(type(target), target))


def lines_of(cls: Any, instance: Any = None) -> list[Line]:
    """Return the lines to show for a class, or for a trainer, without what its options switch off."""
    hooks = hooks_of(cls).keys() | {"train_step", "test_step"}
    has_windows = bool(owners_of(cls, "micro_batches"))
    notes_by_hook = _told_of_hooks(instance)
    lines: list[Line] = []
    dropped: list[int] = []  # Depths of enclosing blocks that are not shown: their content moves to the left.
    closed: int | None = None  # The depth of a block that an add-on replaces.
    for raw in LOOP.strip("\n").splitlines():
        optional, text, comment, depth = _split_line(raw)
        if closed is not None and text and depth > closed:
            continue
        closed = None
        dropped = [level for level in dropped if level < depth] if text else []
        # A call in the arguments of another one is made first.
        calls = tuple(reversed([name for name in re.findall(r"(\w+)\(", text) if name in hooks]))
        overrides = [(name, owner) for name in calls for owner in owners_of(cls, name)]
        acts = bool(overrides) or (has_windows and bool(set(calls) & {*_WINDOW}))
        if (optional and not acts) or _is_off(text, calls, overrides, instance):
            if text.endswith(":") or not depth:
                dropped.append(depth)
            continue
        if any(name in _BLOCKS and is_marked(owner.__dict__[name], "__replaces__") for name, owner in overrides):
            closed = depth
        notes = [f"{owner.__name__}{_describe_override(owner, name)}" for name, owner in overrides]
        if not overrides or (instance is not None and "scheduler_step" in calls):
            notes += _switch(text, comment, instance)
        notes += [note for name in calls for note in notes_by_hook.get(name, [])]
        text = _text_for(cls, text, has_windows, closed is not None)
        lines.append(Line(depth - len(dropped), text, calls, tuple(notes)))
    return _without_empty_blocks(lines)


def _told_of_hooks(instance: Any) -> dict[str, list[str]]:
    """Return what the add-ons of a trainer tell of hooks; what depends on a run is for its plan."""
    notes_by_hook: dict[str, list[str]] = {}
    for fact in instance.describe() if instance is not None else ():
        if fact.value is not None and not callable(fact.value):
            notes_by_hook.setdefault(fact.where, []).append(str(fact))
    return notes_by_hook


def _text_for(cls: Any, text: str, has_windows: bool, is_replaced: bool) -> str:
    """Return the text of a line for this class: with batches instead of windows, and without a block that is gone."""
    if not has_windows:
        text = text.replace("for window in batches", "for batch in batches").replace("(window)", "(batch)")
        text = text.replace("for out in outputs: ", "")
        if not owners_of(cls, "scale_loss"):
            text = text.replace("backward(loss)", 'backward(out["loss"])')
    if text.startswith("when valid_every") and owners_of(cls, "should_validate"):
        return "when that is True:"
    is_call = text.endswith("():") and "=" in text
    return text.removesuffix(":") if is_replaced or (is_call and not has_windows) else text


def _split_line(raw: str) -> tuple[bool, str, str, int]:
    """Split a line of `LOOP` into its mark, its text, its comment and its depth."""
    optional = raw.lstrip().startswith("?")
    spaced = raw.replace("?", "", 1) if optional else raw
    text, _, comment = spaced.strip().partition("  # ")
    return optional, text, comment, (len(spaced) - len(spaced.lstrip())) // 4


def _without_empty_blocks(lines: list[Line]) -> list[Line]:
    """Write ``f():`` without its colon where nothing that it calls is shown."""
    followed = zip(lines, [*lines[1:], None], strict=True)
    return [
        line._replace(text=line.text.removesuffix(":"))
        if line.text.endswith("):") and "for " not in line.text and (after is None or after.depth <= line.depth)
        else line
        for line, after in followed
    ]


def _is_off(text: str, calls: tuple[str, ...], owned: list[Any], instance: Any) -> bool:
    """Return whether an option of this trainer switches a line off."""
    if instance is None or owned:
        return False
    if "scheduler_step" in calls:
        return not instance.optimization.steps_schedulers("batch" if "batch" in text else "epoch")
    return "clip" in calls and not instance.gradient_clip


def _switch(text: str, comment: str, instance: Any) -> list[str]:
    """Return the comment of a line; for an instance, the value of the option instead of the condition."""
    if instance is not None:
        if "clip()" in text:
            comment = f"gradient_clip={instance.gradient_clip:g}"
        elif "scheduler_step" in text:
            is_set = bool(instance.scheduler_step_on_batch)
            unit = "batch" if "batch" in text else "epoch"
            comment = f"scheduler_step_on_batch={is_set}"
            if not is_set and unit == "batch" and instance.optimization.steps_schedulers(unit):
                comment = "its schedule counts optimizer steps"
        elif text.startswith("when log_every"):
            comment = f"log_every={instance.log_every}"
    return [comment] if comment else []


def _describe_override(owner: Any, name: str) -> str:
    """Describe an override by the first sentence of its docstring."""
    if name in ("train_step", "test_step"):
        return ""
    doc = inspect.getdoc(owner.__dict__[name]) if owner.__dict__[name].__doc__ else None
    return f": {_first_sentence(doc)}" if doc else f".{name}"


def _first_sentence(doc: str) -> str:
    """Return the first sentence of a docstring, which may have several lines; names stand in single quotes."""
    paragraph = " ".join(doc.split("\n\n")[0].split()).replace("``", "'")
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph, maxsplit=1)[0]


def _text(cls: Any, instance: Any) -> str:
    """Return the whole page."""
    lines = lines_of(cls, instance)
    columns = terminal_columns(sys.stdout)
    note_width = max(_LEAST_NOTE, min(columns or _WIDTH, _WIDTH) - _COLUMN - len("  # ") - 1)
    title = f"{cls.__name__}, the effective loop; after # are the overrides of a call, outermost first"
    page = [*wrapped(title, columns, 4), ""]
    for line in lines:
        code = "    " * line.depth + line.text
        notes = [part for note in line.notes for part in textwrap.wrap(note, note_width, subsequent_indent="  ")]
        if not notes or (columns and len(code) > _COLUMN):
            page.append(code)
            code = ""
        for note in notes:
            page.append(f"{code:<{_COLUMN}}  # {note}")
            code = ""  # The other notes stand below the first one.
    shown = {name for line in lines for name in line.calls}
    elsewhere = {name: owners_of(cls, name) for name in hooks_of(cls) if name not in shown}
    also = [f"    {name}: {', '.join(o.__name__ for o in owners)}" for name, owners in elsewhere.items() if owners]
    if also:
        page += ["", "called elsewhere:", *also]
    page += ["", *(part for add_on in _add_ons(cls, instance) for part in wrapped(add_on, columns, 4))]
    return "\n".join(page).rstrip() + "\n"


def _add_ons(cls: Any, instance: Any) -> list[str]:
    """Describe each add-on, with its options for an instance."""
    facts = instance.describe() if instance is not None else []
    values = {fact.name: fact.value for fact in facts if fact.where == "option"}
    lines = []
    for add_on in add_ons_of(cls):
        lines.append(f"{add_on.__name__}: {_first_sentence(inspect.getdoc(add_on) or 'no description')}")
        names = [name for klass in add_on.__mro__ if is_add_on(klass) for name in own_options(klass)]
        shown = [f"{name}={shown_option(name, values[name])}" for name in names if name in values]
        if shown:
            lines.append(f"    {', '.join(shown)}")
    return lines


def shown_option(name: str, value: Any) -> str:
    """Return an option's value, unless it is long or may be secret."""
    if _SECRET.search(name) or isinstance(value, (dict, set)):
        return "..."
    if isinstance(value, (bool, int, float, type(None), Every)) or (isinstance(value, str) and len(value) <= 60):
        return repr(value)
    if isinstance(value, Path):
        return repr(str(value))
    if isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float)) for item in value):
        return repr(value)
    return f"<{type(value).__name__}>"
