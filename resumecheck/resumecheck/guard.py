"""Refuse what a script would change outside of given folders, before it is changed.

Landlock, from Linux 6.2 on, holds for the whole tree of processes: ``python guard.py '["FOLDER"]' COMMAND ...`` lets
the command change files in these folders alone. It cannot say what was refused. So each Python process has an audit
hook, and the writers that open files outside of Python are wrapped; what they refuse is written down, and the process
is killed: a script could catch an error and go on. Without Landlock they are all there is, and other programs pass.

This file imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Guard", "has_landlock", "is_within", "map_paths", "read_refusal", "when_imported", "writable_caches"]

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES: dict[str, tuple[str, tuple[tuple[int, int | None], ...]]] = {
    "os.rename": ("rename", ((0, 2), (1, 3))),
    "os.link": ("link", ((0, 2), (1, 3))),  # What is written through a link changes its other end.
    "os.symlink": ("link", ((1, 2),)),
    "os.remove": ("remove", ((0, 1),)),
    "os.rmdir": ("remove", ((0, 1),)),
    "os.mkdir": ("mkdir", ((0, 2),)),
    "os.truncate": ("truncate", ((0, None),)),
}
"""Each audit event of a change: what it does, and the places of its paths and of the folders they are relative to."""

CACHES = {
    "XDG_CACHE_HOME": "~/.cache",
    "HF_HOME": "~/.cache/huggingface",
    "TORCH_HOME": "~/.cache/torch",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "CUDA_CACHE_PATH": "~/.nv/ComputeCache",
    "MPLCONFIGDIR": "~/.config/matplotlib",
    "KERAS_HOME": "~/.keras",
    "TORCHINDUCTOR_CACHE_DIR": os.devnull,
    "NUMBA_CACHE_DIR": os.devnull,
}
"""The variable of each cache, and where it is without it; the last two lie in /tmp and beside the source."""
DEVICES = ("/dev/", "/proc/")
INNER_CACHES = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_EXTENSIONS_DIR")
"""The variables of caches that lie within another one, unless the user sets them."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_NO_NEW_PRIVILEGES = 38
_CHANGING_RIGHTS = 1 << 1 | sum(1 << bit for bit in range(4, 15))  # All but to execute and to read.
_LEAST_VERSION = 3  # The first that knows of truncation; the first two refuse what they should not, or miss it.


def has_landlock() -> bool:
    """Return whether this kernel can restrict what a tree of processes changes."""
    if not sys.platform.startswith("linux"):
        return False
    return _call(_CREATE_RULESET, None, 0, 1) >= _LEAST_VERSION


def restrict(folders: Iterable[str]) -> None:
    """Let this process and all that it starts change files in these folders alone."""
    rights = ctypes.c_uint64(_CHANGING_RIGHTS)
    rules = _check(_call(_CREATE_RULESET, ctypes.byref(rights), ctypes.sizeof(rights), 0))
    for folder in (*folders, *DEVICES):
        place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = _CHANGING_RIGHTS.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        _check(_call(_ADD_RULE, rules, 1, ctypes.c_char_p(rule), 0))
        os.close(place)
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    _check(libc.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero))
    _check(_call(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _call(number: int, *arguments: Any) -> int:
    """Make a system call for which libc has no function."""
    values = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *values))


def _check(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result


def writable_caches(environment: Mapping[str, str], temporary: str, origin: str) -> tuple[list[str], dict[str, str]]:
    """Return the caches that exist, which may be written to, and variables for those that do not.

    A cache that holds the working folder itself would allow all of it, and is replaced as well.
    """
    inner = {name: environment[name] for name in INNER_CACHES if name in environment}
    folders: list[str] = []
    variables = {}
    for name, default in (CACHES | inner).items():
        folder = os.path.realpath(os.path.expanduser(environment.get(name) or default))
        if os.path.isdir(folder) and not is_within(origin, folder):
            folders.append(folder)
        elif not any(is_within(folder, cache) for cache in folders):
            variables[name] = os.path.join(temporary, name.lower())
    return folders, variables


def _is_device(path: str) -> bool:
    """Return whether a path is a device, a process, or memory that processes share; folders in memory are users'."""
    return path.startswith(DEVICES) and not re.match("/dev/shm/[^/]+/", path)


def is_within(path: str, folder: str) -> bool:
    """Return whether a path is a folder, or in it."""
    return os.path.join(path, "").startswith(os.path.join(folder, ""))


def place_of(path: Any, folder: Any = -1) -> str:
    """Return a path without links but at its end; it may be relative to the folder of a descriptor."""
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    return os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))


def map_paths(text: str, origins: Iterable[str], copy: str) -> str:
    """Return a word of a command, or a variable, that names the copy where it named the folder."""
    for origin in origins:
        text = re.sub(rf"(?<![\w.-]){re.escape(origin)}(?![\w.-])", lambda _: copy, text)
    return text


def read_refusal(path: str) -> dict[str, str] | None:
    """Return what a guard has refused: the "operation" and the "path"."""
    try:
        with open(path, encoding="utf-8") as file:
            refusal: dict[str, str] = json.load(file)
            return refusal
    except FileNotFoundError:
        return None


class Guard:
    """Watch what this process changes, by an audit hook and around the writers that open files without an event.

    Parameters
    ----------
    folders : sequence of str
        Where it may change files.
    refusal : str
        The file that says what was refused.
    then : callable, optional
        Takes each change that is allowed: what it does, and its paths.
    """

    def __init__(
        self, folders: Sequence[str], refusal: str, then: Callable[..., None] = lambda operation, *paths: None
    ) -> None:
        self.roots = tuple(os.path.join(os.path.realpath(cache), "") for cache in folders)
        self.refusal, self.then = refusal, then
        self.is_refusing = False
        sys.addaudithook(self.audit)
        when_imported("torch", lambda torch: self._wrap(torch, "save", "f"))
        when_imported("safetensors", lambda safetensors: self._wrap(safetensors, "serialize_file", "filename"))
        when_imported("h5py", lambda h5py: self._wrap(h5py.File, "__init__", "name", "mode"))

    def audit(self, event: str, arguments: Any) -> None:
        """See an event that would change a file."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES:
                self.change("append" if flags & os.O_APPEND else "write", (path, -1))
        elif event in CHANGES:
            operation, places = CHANGES[event]
            relative = [folder if folder is not None and folder < len(arguments) else None for _, folder in places]
            folders = [-1 if place is None else arguments[place] for place in relative]
            self.change(operation, *zip((arguments[path] for path, _ in places), folders))

    def change(self, operation: str, *places: tuple[Any, Any]) -> None:
        """Refuse to change what is outside of the folders, and tell of all other changes."""
        if self.is_refusing or not all(isinstance(path, (str, bytes, os.PathLike)) for path, _ in places):
            return
        paths = [place_of(*place) for place in places]
        for path in paths:
            self.check(operation, path)
        self.then(operation, *paths)

    def check(self, operation: str, path: str) -> None:
        """Refuse to change a path outside of the folders, unless that would change nothing."""
        if operation in ("append", "write", "truncate"):  # A link is renamed or removed itself, not what it leads to.
            path = os.path.realpath(path)
        if os.path.join(path, "").startswith(self.roots) or _is_device(path):
            return
        if operation in ("mkdir", "remove") and os.path.lexists(path) == (operation == "mkdir"):
            return
        if os.path.basename(os.path.dirname(path)) == "__pycache__":
            raise PermissionError(f"{path} is outside of the copy of the working folder")
        self.refuse(operation, path)

    def refuse(self, operation: str, path: str) -> None:
        """Write down what is refused, and end this process at once."""
        self.is_refusing = True
        try:
            whole = f"{self.refusal}.{os.getpid()}"
            file = os.open(whole, os.O_WRONLY | os.O_CREAT)
            os.write(file, json.dumps({"operation": operation, "path": path}).encode())
            os.link(whole, self.refusal)
        except FileExistsError:  # Another process was first.
            pass
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def _wrap(self, module: Any, name: str, keyword: str, mode: str = "") -> None:
        """See the path that a writer of a module gets as its second argument; a third one, "r", is to read."""
        original = getattr(module, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not mode or (args[2] if len(args) > 2 else kwargs.get(mode, "r")) != "r":
                self.change("write", (args[1] if len(args) > 1 else kwargs.get(keyword), -1))
            return original(*args, **kwargs)

        setattr(module, name, call)


class _Finder:
    """Call a function as soon as a module has been imported. To look whether there is one is no import."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self.name = name
        self.action = action
        self.is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the module as the finders after this one do, with a loader that calls the function at its end."""
        if name != self.name or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: Any) -> None:
            sys.meta_path.remove(self)
            execute(module)
            self.action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def when_imported(name: str, action: Callable[[Any], None]) -> None:
    """Call a function with a module as soon as it has been imported."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, action))


def _main(folders: str, *command: str) -> None:
    """Restrict this process where the kernel can, and become the command."""
    if has_landlock():
        restrict(json.loads(folders))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(*sys.argv[1:])
