"""Check a trainer as it is made: its class is complete, and each ``__init__`` has left it whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zae.compose.class_checks import STEPS
from zae.compose.introspect import classes_to_initialize, mentions_super, recipe_of
from zae.compose.options import option_values, options_of
from zae.errors import TaskError

__all__ = ["check_complete", "check_instance", "check_received", "initial_values", "without_test_step"]

_OPTIONS = ("seed", "gradient_clip", "monitor", "log_bar", "log_every")
_TRAINER_NAMES = (
    "current_run",
    "engine",
    "history",
    "loader_position",
    "nonfinite",
    "optimization",
    "precision_part",
    "progress_checker",
    "step_window",
    *_OPTIONS,
    "best",
    "device",
    "devices",
    "grad_norm",
    "log_history",
    "log_test",
    "log_train",
    "optimizers",
    "schedulers",
    "test_metrics",
    "train_history",
    "train_metrics",
    "valid_history",
)
"""What a trainer reads by these names, and an attribute of the user's may replace unseen: first its parts, of which the
rest are attributes."""

_STEP_LINES = {
    "train_step": [
        "    def train_step(self, batch):",
        "        inputs, targets = batch",
        '        return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), targets)}',
        "",
        "    test_step = train_step  # of an evaluation",
    ],
}
"""The lines of what a class lacks, as its error shows them."""


def check_complete(cls: Any) -> None:
    """Refuse a class without train_step, with the lines to write."""
    missing = sorted(cls.__abstractmethods__, key=lambda name: (name not in STEPS, name != "train_step", name))
    if not missing:
        return
    root, ordered = recipe_of(cls)
    name = "MyTask" if root.__name__ == "Trainer" else root.__name__
    composition = f"{name}.add_on({', '.join(a.__name__ for a in ordered)})" if ordered else name
    lines = [f"class {name}(Trainer):"]
    for method in missing:
        lines += _STEP_LINES.get(method, [f"    def {method}(self): ..."])
    lines += ["", f"trainer = {composition}(model, optimizer=optimizer, ...)"]
    absent = " and no ".join(missing)
    raise TaskError(f"{cls.__name__} cannot be instantiated: it has no {absent}. Write:\n\n" + "\n".join(lines))


def without_test_step(cls: type) -> TaskError:
    """Return the error for a class that is to evaluate and has no test_step."""
    return TaskError(
        f"{cls.__name__} has no test_step, which an evaluation calls for each batch; write test_step = train_step into "
        "the class, or def test_step(self, batch)"
    )


def check_instance(trainer: Any) -> None:
    """Refuse an instance whose ``__init__`` was not completed, or whose attributes hide methods."""
    cls = type(trainer)
    if "loader_position" not in vars(trainer):
        starts = [c for c in cls.__mro__ if "__init__" in c.__dict__]
        owner = next((c for c in starts if not mentions_super(c.__dict__["__init__"])), starts[0])
        raise TaskError(
            f"{owner.__name__}.__init__ does not call super().__init__, and so the trainer has no model; write "
            "super().__init__(*args, **kwargs) in it"
        )
    for name, value in vars(trainer).items():
        if not callable(value) and callable(getattr(cls, name, None)):
            raise TaskError(
                f"{cls.__name__}.__init__ sets self.{name} = {type(value).__name__}, which hides the method {name}(); "
                "give the attribute another name"
            )
    for name, value in vars(trainer).pop("_initial_values").items():
        present = getattr(trainer, name)
        # An add-on puts another part in, of a class that derives from one of zae, or a device.
        is_part = any(c.__module__.partition(".")[0] in ("zae", "torch") for c in type(present).__mro__)
        is_plain = type(present) is type(value) and isinstance(value, (bool, int, float, str))
        if not (present is value or is_part or (is_plain and present == value)):
            raise _name_error(cls, name)


def initial_values(trainer: Any) -> dict[str, Any]:
    """Return what the constructor of Trainer has set, for `check_instance` to compare after every other one."""
    return {name: getattr(trainer, name) for name in _TRAINER_NAMES}


def _name_error(cls: type, name: str) -> TaskError:
    option = f", or write super().__init__(..., {name}=...)" if name in _OPTIONS else ""
    return TaskError(
        f"{cls.__name__}.__init__ sets self.{name}, which the trainer keeps for itself; give the attribute another "
        f"name{option}"
    )


def check_received(trainer: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse an ``__init__`` of the user that takes ``**kwargs`` and has not passed them on: options would be lost."""
    cls = type(trainer)
    options = options_of(cls)
    user_classes = [
        c for c in classes_to_initialize(cls) if not c.__module__.startswith("zae.") and "__init__" in c.__dict__
    ]
    if not user_classes:
        return
    values = option_values(trainer)
    for name, value in kwargs.items():
        parameter, owner = options[name]
        default = parameter.default
        # Only of plain values it is known that the trainer would have what was given, as it was given.
        is_plain = type(value) is type(values.get(name)) is type(default) and isinstance(value, (bool, int, float, str))
        if owner not in user_classes and is_plain and values[name] == default != value:
            names = " or ".join(c.__name__ for c in user_classes)
            raise TaskError(
                f"{name}={value!r} was given to {cls.__name__} and lost: {names}.__init__ does not pass it on; write "
                "super().__init__(*args, **kwargs) there"
            )
