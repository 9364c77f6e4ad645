"""Log the records of a run to Weights & Biases, or to its offline files."""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from zae.addons.loggers.base import ClientSink, RunInfo
from zae.addons.loggers.logger import WebLoggerAddon
from zae.errors import AddOnRequirement
from zae.values.redact import redact

__all__ = ["WandBLoggerAddon", "WandBSink"]

_HOST = "https://api.wandb.ai"
_FOLDERS = ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
_FLUSH_SETTING = "x_transaction_log_flush_interval"
_FLUSH_INTERVAL_S = 0.05
"""The interval in which the client writes its file; at its default of 15 s, a kill loses the records since."""


class WandBSink(ClientSink):
    """A run of the wandb client."""

    name = "wandb"
    has_queue = True
    remedy = (
        "mend what this says; if it says that no answer came, "
        "check the network and WANDB_BASE_URL, raise logger_timeout, or log to files with "
        'web_logger={"wandb": {"mode": "offline"}} and send them with `wandb sync` later'
    )
    function = "wandb.init"
    accepted = ("api_key",)
    shown = ("config", "name", "notes", "tags", "group", "job_type")
    _last_second: ClassVar[int] = 0
    _is_own = True
    _written = False
    _size = 0

    @classmethod
    def check(cls, entries: Mapping[str, Any]) -> None:
        """Refuse an online run without an API key, for which the client would prompt."""
        mode, host = _mode_and_host(entries)
        if mode != "disabled" and not _home().is_absolute() and not all(map(os.environ.get, _FOLDERS)):
            raise AddOnRequirement(
                "wandb keeps files in the home folder, and there is none: HOME is not set, and the system knows none "
                f"for the user of this process; set HOME to a folder that can be written, or {', '.join(_FOLDERS)}"
            )
        if mode in ("online", "shared") and not _has_key(entries, host):
            raise AddOnRequirement(
                f"WandBLoggerAddon has no API key for {redact(host)}; log in with: wandb login (or set WANDB_API_KEY); "
                'or log to files: web_logger={"wandb": {"mode": "offline", ...}}'
            )

    def open(self, info: RunInfo) -> None:
        """Start the run, or continue the one with this id."""
        import wandb

        # The client names its folder by the second, so that two runs within one would share a file.
        if info.continued and _mode_and_host(self.entries)[0] != "disabled":
            time.sleep(max(0.0, WandBSink._last_second + 1 - time.time()))
        WandBSink._last_second = int(time.time())
        self._is_own = wandb.run is None
        entries = dict(self.entries)
        settings = _settings_of(entries)
        if _is_disabled():
            entries["mode"] = "disabled"
        if "api_key" in entries:
            settings["api_key"] = entries.pop("api_key")
        # The client's own timeouts, so that it stops and reports by itself.
        own_settings = {
            "init_timeout": info.timeout,
            "finish_timeout": info.timeout * 0.9,
            "finish_timeout_raises": True,
            _FLUSH_SETTING: _FLUSH_INTERVAL_S,
        }
        known_settings = getattr(wandb.Settings, "model_fields", {})  # Older clients do not have all of them.
        settings = {**{key: value for key, value in own_settings.items() if key in known_settings}, **settings}
        config = entries.get("config") or {}
        entries["config"] = {**info.config, **config} if isinstance(config, Mapping) else config
        shown = self.public_entries(entries)
        self.client = wandb.init(**{"id": info.id, "resume": "allow", **entries, **shown, "settings": settings})
        self.client.define_metric("step")
        self.client.define_metric("*", step_metric="step")

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log one row, without wandb's own step, which drops rows of a step that is repeated."""
        self.client.log({**metrics, "step": step})
        self._written = True

    def flush(self) -> None:
        """Wait until the file of the client has grown; there is no call for that."""
        interval = getattr(self.client.settings, _FLUSH_SETTING, 0.0)
        if not self._written or not 0 < interval < 1:
            return
        self._written = False
        self.client.summary.get("step")  # Answered after all earlier records.
        file = Path(self.client.settings.sync_file)
        size = -1
        end = time.monotonic() + 1
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                time.sleep(2 * interval)
                before = size
                size = file.stat().st_size
                if size == before > self._size:
                    break
            self._size = size

    def close(self, failed: bool) -> None:
        """Finish the run, unless the user started it."""
        if self.client is not None and self._is_own:
            self.client.finish(exit_code=int(failed))
        self.client = None


class WandBLoggerAddon(WebLoggerAddon):
    """Log to Weights & Biases.

    ``web_logger["wandb"]`` goes to ``wandb.init``: project, entity, name, tags, mode and so on; ``api_key`` is accepted
    too. Records have their own ``step``, the x axis of every chart, so that none is dropped. A run that is active
    already, in a sweep for instance, is used and left open.

    Parameters
    ----------
    web_logger : dict
        Declared by `WebLoggerAddon`, and shared by all web loggers.

    Raises
    ------
    AddOnRequirement
        At construction, when wandb is not installed, or there is no API key in online mode.

    Examples
    --------
    >>> import tempfile, torch
    >>> from zae.addons import WandBLoggerAddon
    >>> from zae.testing import PlainTask
    >>> model, batches = torch.nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> trainer = PlainTask.add_on(WandBLoggerAddon)(
    ...     model, "cpu", optimizer=torch.optim.SGD, web_logger={"wandb": {"project": "demo", "mode": "disabled"}}
    ... )
    >>> trainer.run(2, batches)["epoch"]
    2
    """

    web_key = "wandb"
    web_sink = WandBSink


def _settings_of(entries: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings from the entries; return a dict of those that were set."""
    settings = entries.pop("settings", None)
    if settings is None:
        return {}
    if isinstance(settings, Mapping):
        return dict(settings)
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def _mode_and_host(entries: Mapping[str, Any]) -> tuple[str, str]:
    """Return the mode and the host that wandb will use, from arguments, environment and files, without importing it."""
    settings = entries.get("settings")
    find = settings.get if isinstance(settings, Mapping) else lambda key: getattr(settings, key, None)
    filed = configparser.ConfigParser(interpolation=None)
    folders = (os.environ.get("WANDB_CONFIG_DIR") or _home() / ".config" / "wandb", Path("wandb"))
    with contextlib.suppress(OSError, configparser.Error):
        filed.read([Path(folder, "settings") for folder in folders])
    stored = dict(filed["default"]) if "default" in filed else {}
    mode = entries.get("mode") or find("mode") or os.environ.get("WANDB_MODE") or stored.get("mode") or "online"
    if _is_disabled():
        mode = "disabled"
    host = find("base_url") or os.environ.get("WANDB_BASE_URL") or stored.get("base_url") or _HOST
    return str(mode), str(host)


def _is_disabled() -> bool:
    """Return whether WANDB_DISABLED is set, which present clients ignore."""
    return os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes")


def _home() -> Path:
    """Return the home folder, or "~" where there is none, as in some containers."""
    return Path(os.path.expanduser("~"))


def _has_key(entries: Mapping[str, Any], host: str) -> bool:
    """Return whether wandb finds a key without a prompt."""
    settings = entries.get("settings")
    api_key = settings.get("api_key") if isinstance(settings, Mapping) else getattr(settings, "api_key", None)
    if (
        api_key
        or entries.get("api_key")
        or any(os.environ.get(f"WANDB_{k}") for k in ("API_KEY", "IDENTITY_TOKEN_FILE"))
    ):
        return True
    for path in (Path(os.environ.get("NETRC") or "no-netrc"), _home() / ".netrc", _home() / "_netrc"):
        try:
            if netrc.netrc(path).authenticators(urlsplit(host).hostname or ""):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
