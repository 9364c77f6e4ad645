"""Take the trainer out of a user's script: `script.py:make_trainer`, for the tools that look at one."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from zae.errors import ConfigError, did_you_mean, kind_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = [
    "ScriptTrainer",
    "explain_failure",
    "making",
    "options_for",
    "redirect",
    "require_arguments",
    "split",
    "trainer_of",
    "variant",
]

_MOST = 12  # Frames of a traceback.
_RETURN = 'return trainer, {"n_epoch": 3, "loader": loader}'
_READ = ("start_from", "resume", "init_method")  # Options that name what is read.
_WRITTEN = ("path", "dir", "file", "folder")  # The ends of the names of those that name what is written.


class ScriptTrainer(NamedTuple):
    """What a script has made: a trainer, and the arguments of its run; None where the script returned none."""

    trainer: Trainer
    arguments: dict[str, Any] | None


@contextlib.contextmanager
def trainer_of(target: str, given: Sequence[str] = (), *, prints_aside: bool = False) -> Iterator[ScriptTrainer]:
    """Import the script and call its function, with its folder on the path as where it is started; undone at the end.

    ConfigError says what is wrong, with the user's frames where the script raises. ``given`` are the arguments of the
    script; with ``prints_aside``, what it prints goes to standard error, until the end.
    """
    path, function = split(target)
    if not path.is_file():
        near = did_you_mean(path.name, (each.name for each in path.absolute().parent.glob("*.py")))
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {what}{near or '; give the file of a Python script: script.py:make_trainer'}")
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else "zae_script"
    kept = sys.argv, sys.path[:], sys.dont_write_bytecode
    sys.argv, sys.path[:0], sys.dont_write_bytecode = [str(path), *given], [str(path.parent.absolute())], True
    try:
        with contextlib.redirect_stdout(sys.stderr) if prints_aside else contextlib.nullcontext():
            with _in_words(f"{path} failed as it was imported"):
                module = import_file(path, name)
            maker = _maker(module, function, path)
            with _in_words(f"{function}() of {path} failed"):
                made = maker()
            yield _check(made, function, path)
    finally:
        sys.argv, sys.path[:], sys.dont_write_bytecode = kept
        sys.modules.pop(name, None)


@contextlib.contextmanager
def making(make: Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Let a function make each trainer of the block.

    It gets what makes one, the class, and its arguments: further ones by position, and all that have a name by name.
    """
    from zae.compose.metaclass import TrainerMeta
    from zae.compose.options import options_of

    meta: Any = TrainerMeta
    original = meta.__call__

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, (p, _) in options_of(cls).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if any(name in kwargs for name, _ in zip(names, args)):
            return original(cls, *args, **kwargs)  # It refuses an argument that is given twice.
        return make(original, cls, args[len(names) :], {**dict(zip(names, args)), **kwargs})

    meta.__call__ = call
    try:
        yield
    finally:
        meta.__call__ = original


def variant(cls: Any, gone: Collection[Any], added: Sequence[Any]) -> Any:
    """Return a trainer class without some of its add-ons, and with others."""
    from zae.compose.composition import compose
    from zae.compose.introspect import recipe_of
    from zae.compose.leave_out import leave_out

    root, present = recipe_of(cls)
    kept = [each for each in present if each not in gone and each not in added]
    made = compose(root, [*kept, *added])
    return leave_out(made, add_ons=gone)  # The task itself may be derived from a class with add-ons.


def options_for(made: Any, cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a variant of a class takes too, and wrong ones, which it refuses."""
    from zae.compose.options import options_of

    known, own = options_of(made), options_of(cls)
    return {name: value for name, value in given.items() if name in known or name not in own}


def redirect(options: dict[str, Any], place: Callable[[str, str], Path | str]) -> None:
    """Change the options that name what is written to the place of the name of the option and of the file."""
    for name, value in options.items():
        if isinstance(value, (str, Path)) and name.endswith(_WRITTEN) and name not in _READ:
            options[name] = type(value)(str(place(name, Path(value).name)))


def require_arguments(found: ScriptTrainer, target: str) -> dict[str, Any]:
    """Return the arguments of the run of a script's trainer; ConfigError where the script returned none."""
    if found.arguments is None:
        raise ConfigError(f"{target} returned a trainer without the arguments of its run; write: {_RETURN}")
    return found.arguments


def split(text: str) -> tuple[Path, str]:
    """Return the file and the function of script.py:FUNCTION."""
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        path, name = text, "make_trainer"
    return Path(path).expanduser(), name


def import_file(path: Path, name: str) -> ModuleType:
    """Import a file as a module of this name."""
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


def _maker(module: ModuleType, name: str, path: Path) -> Any:
    """Return the function; ConfigError where there is none, or where it needs arguments."""
    maker = getattr(module, name, None)
    if not callable(maker):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)
               and value.__module__ == module.__name__]  # fmt: skip
        has = f" (it has {', '.join(own)})" if own else ""
        remedy = did_you_mean(name, own) or f"; write one that ends with: {_RETURN}"
        raise ConfigError(f"{path} has no function {name!r}{has}{remedy}")
    needed = [p.name for p in inspect.signature(maker).parameters.values()
              if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    if needed:
        raise ConfigError(f"{name}() of {path} needs {', '.join(needed)}; give each a default: it is called without")
    return maker


def _check(made: Any, function: str, path: Path) -> ScriptTrainer:
    """Return what the function returned as a trainer and arguments."""
    from zae.trainer import Trainer

    trainer, arguments = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(trainer, Trainer) and (arguments is None or isinstance(arguments, Mapping)):
        return ScriptTrainer(trainer, None if arguments is None else dict(arguments))
    shown = kind_of(made)
    if isinstance(made, tuple):
        shown = f"a tuple of {', '.join(kind_of(each) for each in made) or 'nothing'}"
    elif isinstance(made, type):
        shown = f"the class {made.__name__}, and not a trainer made of it"
    raise ConfigError(f"{function}() of {path} returned {shown}; write: {_RETURN}")


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Turn what a script raises into a ConfigError with the user's frames."""
    try:
        yield
    except SystemExit as error:
        raise ConfigError(
            f"{what}: it ended itself with status {error.code}. Arguments for the script go after --, and what only "
            'the script itself does goes under if __name__ == "__main__":'
        ) from None
    except Exception as error:
        raise ConfigError(f"{what}:\n{explain_failure(error)}") from None


def explain_failure(error: BaseException) -> str:
    """Return the user's frames of a traceback, the last ones if there are many, and the error with its notes."""
    folders = [str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    others = ("<", *(os.path.join(each, "") for each in folders))
    entries = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(others)
               and not {"site-packages", "dist-packages"} & set(Path(each.filename).parts)]  # fmt: skip
    left_out = [f"  ({len(entries) - _MOST} more above)\n"] if len(entries) > _MOST else []
    frames = traceback.format_list(entries[-_MOST:])
    return "".join([*left_out, *frames, *traceback.format_exception_only(error)]).rstrip()
