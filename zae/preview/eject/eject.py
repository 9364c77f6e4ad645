"""`Trainer.eject` and `python -m zae eject`: a composition as one script of plain PyTorch."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from zae.common import optim
from zae.composition.introspect import add_ons_of, is_add_on, is_base, is_trainer, seam, seams_of, set_by
from zae.composition.options import options_of
from zae.data.loaders import length_of
from zae.errors import ConfigError
from zae.preview.eject.carry import Carried, carry, returned_keys
from zae.preview.eject.helpers import OF_ZAE
from zae.preview.eject.loop import Loop
from zae.preview.eject.ranks import main_lines, why_not, write_ranks
from zae.preview.eject.script import Script, indent
from zae.preview.explain import Text

__all__ = ["Ejected", "eject", "eject_lines", "write_script"]

_KEPT = ("model", "device", "mode", "optimizer", "scheduler")
_HOOKS = {
    "on_run_begin": "setup", "on_run_end": "end", "on_epoch_begin": "epoch_begin", "on_epoch_end": "epoch_end",
}  # fmt: skip
_ATTRIBUTES = ("devices", "grad_norm", "history", "optimizers", "progress_checker", "schedulers", "seed")
_RUN = ("n_epoch", "loader", "valid_loader", "max_steps", "steps_per_epoch", "valid_every")
_STEPS = ("train_step", "test_step", "predict_step", "metric_on_epoch_end")


class Ejected(Text):
    """The script, with what it leaves out and whether the weights differ by it."""

    missing: list[tuple[str, bool]]
    torchrun: str
    """How the script is started on several ranks; empty for one process."""


def eject(self: Any, run: Mapping[str, Any] | None = None) -> str:
    """Return this composition as a script of plain PyTorch: your steps, and the loop around them, without zae.

    ``python -m zae eject script.py:make_trainer`` writes one that runs by itself.

    Parameters
    ----------
    run : mapping, optional
        The arguments of ``run``, for instance ``{"n_epoch": 3, "loader": loader, "max_steps": 100}``.

    Returns
    -------
    str
        The script. What it leaves out is named at its top.

    Raises
    ------
    ConfigError
        The source of the class cannot be read.
    """
    return write_script(self, run)


@seam
def eject_lines(self: Any, script: Script) -> None:
    """Write the part of an add-on into a script of plain PyTorch, after that of ``super()``.

    An add-on that does not override it is named at the top of the script as left out.

    Parameters
    ----------
    script : Script
        The script, with its places; see ``zae.preview.eject.script.Script``.
    """


def write_script(
    trainer: Any,
    arguments: Mapping[str, Any] | None = None,
    function: str = "",
    script_module: ModuleType | None = None,
) -> Ejected:
    """Return a script of plain PyTorch that trains as a trainer does.

    Parameters
    ----------
    trainer : Trainer
        It is not changed.
    arguments : mapping, optional
        Those of its ``run``.
    function : str
        The function that returns the trainer and the arguments: the script calls it too.
    script_module : module, optional
        Where that function is.

    Raises
    ------
    ConfigError
        The source of the class cannot be read.
    """
    given = {key: value for key, value in (arguments or {}).items() if value is not None or key == "n_epoch"}
    own = [c for c in type(trainer).__mro__ if is_trainer(c) and not c.__module__.startswith("zae.")]
    own = [c for c in own if not is_add_on(c) and "_recipe" not in vars(c)]
    modules = _modules_of(own, script_module)
    script = Script(trainer, several=len(optim.as_dict(trainer.optimization.optimizer)) > 1)
    script.arguments = given
    script.imports.add("import torch")
    script.step_lines = script.of_each("optimizer.step()")
    _add_parts(script, own, given)
    carried = _carry(script, modules, own, not function)
    loop = Loop(script, given, _steps_of(own))
    functions = [loop.train()]
    if loop._has_validation:
        functions.append(loop.evaluate())
    name = own[0].__name__
    parts: list[str] = []
    base = "\n".join(_plain_base(script, name, carried.passes_dict))
    parts += [base, carried.body, *("\n".join(lines) for lines in functions), *script.helpers.values()]
    main = _main(function) if script.ranks is None else main_lines(script, function)
    parts += ["\n".join(main)] if function else []
    origin = f" ({Path(str(script_module.__file__)).name})" if script_module else ""
    head = f"{script.heading(name, origin)}\n\n{_imports(script, carried.imports)}"
    made = Ejected("\n\n\n".join([head, *parts]) + "\n")
    made.missing, made.torchrun = script.missing, script.torchrun if script.ranks is not None else ""
    return made


def _modules_of(own: list[Any], script_module: ModuleType | None) -> dict[str, str]:
    """Return the sources of the modules of the user's classes, bases first, and of the script, by name."""
    found: dict[str, str] = {}
    for name in dict.fromkeys([*(each.__module__ for each in reversed(own)), getattr(script_module, "__name__", "")]):
        if not name:
            continue
        try:
            found[name] = inspect.getsource(sys.modules[name])
        except (OSError, TypeError, KeyError):
            raise ConfigError(
                f"eject copies the steps of {own[0].__name__} from their file, and there is none (a notebook, or "
                "standard input); put the class into a file"
            ) from None
    return found


def _add_parts(script: Script, own: list[Any], arguments: Mapping[str, Any]) -> None:
    """Let each add-on write its part, and name what nobody writes."""
    trainer = script.trainer
    trainer.eject_lines(script)
    for add_on in add_ons_of(type(trainer)):
        writes = any("eject_lines" in vars(c) for c in add_on.__mro__ if is_add_on(c) and not is_base(c))
        if not writes:
            line = (inspect.getdoc(add_on) or "").split("\n")[0].rstrip(".")
            script.leave_out(f"{add_on.__name__} ({line})", add_on.layer != "observe")
    _add_ranks(script, own)
    for name in arguments:
        if name not in _RUN:
            script.leave_out(f"{name}={arguments[name]!r} of run()")
    every = arguments.get("valid_every")
    if length_of(arguments.get("loader")) is None and script.places.get("validated") and every is not None:
        script.leave_out("validations within an epoch of a loader without a length")
    overridden = [name for name in seams_of(type(trainer)) if any(name in vars(c) for c in own)]
    for name in overridden:
        if name in _HOOKS:
            script.add(_HOOKS[name], f"task.{name}()")
        elif name not in _STEPS:
            script.leave_out(f"{own[0].__name__}.{name}")
    for name in sorted(_read_of_trainer(own)):
        script.leave_out(f"self.{name}, which {own[0].__name__} reads")
    if "metric_on_epoch_end" in overridden:
        script.leave_out("metric_on_epoch_end", "score" in "".join(script.places.get("validated", [])))


def _add_ranks(script: Script, own: list[Any]) -> None:
    """Write the part of the add-on that trains on several ranks, or name why the script trains in one process."""
    if script.ranks is None:
        return
    others = [each for each in add_ons_of(type(script.trainer))
              if each.layer == "parallel" and each.__name__ != script.engine]  # fmt: skip
    reason = why_not(script, own, others)
    if reason:
        script.ranks = None
        script.leave_out(f"{script.engine} ({reason})")
    else:
        write_ranks(script, script.ranks)


def _read_of_trainer(own: list[Any]) -> set[str]:
    """Return the attributes that the user's classes read and that a plain one has not."""
    read, base = set(), next(c for c in own[0].__mro__ if c.__name__ == "Trainer" and c.__module__ == "zae.trainer")
    for each in own:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                read.add(node.attr)
    defined = {name for each in own for name in (*vars(each), *set_by(each))}
    known = {name for c in base.__mro__ for name in vars(c)} | {*_ATTRIBUTES}
    return (read & known) - defined - {*_KEPT}


def _carry(script: Script, modules: dict[str, str], own: list[Any], definitions_only: bool) -> Carried:
    """Return the user's source, and name what of zae is left in it."""
    options = set(options_of(type(script.trainer))) - {*_KEPT}
    options -= {name for c in own for name in inspect.signature(c.__init__).parameters if "__init__" in vars(c)}
    imports, bodies, passes_dict, trainers = list[str](), list[str](), False, {c.__name__ for c in own}
    for name, source in modules.items():
        held = vars(sys.modules[name])
        add_ons = {key for key, value in held.items() if is_add_on(value) and value.__module__ == name}
        carried = carry(source, trainers, add_ons, options, OF_ZAE, modules, definitions_only)
        imports += carried.imports
        passes_dict = passes_dict or carried.passes_dict
        bodies += [carried.body] if carried.body else []
        for line, key, known in carried.left:
            if known in OF_ZAE and key == known:
                script.define(known)
            else:
                what = f"zae's {known}" if known else f"the add-on {key}"
                script.leave_out(what + f" in line {line} of {name}" * bool(line))
    for module in (each.split()[1] for each in imports):
        values = vars(sys.modules[module]).values() if module in sys.modules and module != "torch" else ()
        if any(str(getattr(each, "__module__", "")).startswith("zae.") for each in values):
            script.leave_out(f"{module}, which imports zae")
    return Carried(imports, "\n\n\n".join(bodies), [], passes_dict)


def _steps_of(own: list[Any]) -> dict[str, Any]:
    """Return what the source says of the steps, for the loop."""
    counts = any("num_targets" in inspect.getsource(each) for each in own)
    return {"counts": counts, **{step: _keys_of(own, step) for step in ("train_step", "test_step")}}


def _keys_of(own: list[Any], step: str) -> set[str] | None:
    """Return the keys that a step returns; None where its source does not say."""
    for each in own:
        if step in vars(each):
            method = vars(each)[step]
            source = inspect.getsource(each)
            return returned_keys(inspect.cleandoc("\n" + source), getattr(method, "__name__", step))
    return None


def _imports(script: Script, carried: list[str]) -> str:
    """Return the imports, those of the standard library first."""

    def place(line: str) -> tuple[bool, str]:
        return line.startswith("from"), line

    future = sorted({line for line in carried if "__future__" in line})
    lines = {*script.imports, *carried} - {*future}
    lines = {line for line in lines if not any(_is_within(line, other) for other in lines)}
    standard = sorted((x for x in lines if x.split()[1].partition(".")[0] in sys.stdlib_module_names), key=place)
    others = sorted(lines - {*standard}, key=place)
    return "\n".join([*future, *([""] if future else []), *standard, *([""] if standard and others else []), *others])


def _is_within(line: str, other: str) -> bool:
    """Return whether another import from the same module binds the names of an import too."""
    (module, _, names), (place, _, others) = line.partition(" import "), other.partition(" import ")
    return module == place and "(" not in others and {*names.split(", ")} < {*others.split(", ")}


def _plain_base(script: Script, name: str, passes_dict: bool) -> list[str]:
    """Return the class that the steps derive from."""
    seed = script.trainer.seed
    rest, made = ", **options" * passes_dict, ["if not isinstance(model, torch.nn.Module):"]
    if seed is None:
        made.append("    model = model()")
    else:
        script.define("seed_everything")
        made += ["    with torch.random.fork_rng():", f"        seed_everything({seed})", "        model = model()"]
    hooks = [hook for hook in _HOOKS if f"task.{hook}()" in "".join(map("".join, script.places.values()))]
    return [
        "class Trainer:",
        f'    """What the steps of {name} use."""',
        "",
        f'    def __init__(self, model, device="auto", mode="train", optimizer=None, scheduler=None{rest}):',
        *["        # The other options are written into the loop below."] * passes_dict,
        f"        self.device = {_device(script)}",
        *indent(made, 2),
        "        self.model, self.mode = model, mode",
        "        self.optimizer, self.scheduler = optimizer, scheduler",
        *[line for hook in hooks for line in ("", f"    def {hook}(self):", "        pass")],
    ]


def _device(script: Script) -> str:
    """Return the expression of the device: under torchrun, that of the rank."""
    device = script.trainer.device
    if script.ranks is None or device.type == "cpu":
        return f'torch.device("{device}")'
    script.imports.add("import os")
    return f'torch.device("{device.type}", int(os.environ["LOCAL_RANK"]))'


def _main(function: str) -> list[str]:
    return [
        'if __name__ == "__main__":',
        f"    task, run = {function}()",
        '    train(task, run.get("n_epoch"), run["loader"], run.get("valid_loader"))',
        '    torch.save(task.model.state_dict(), "model.pt")',
    ]
