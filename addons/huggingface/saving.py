"""The base of HuggingFaceAddon that saves folders for ``from_pretrained``, and uploads them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from zae.addons.huggingface import hub
from zae.addons.huggingface.hub import Push, Uploader
from zae.arguments import checked
from zae.checkpoint.group import Group
from zae.compose.calls import explained_call
from zae.compose.introspect import AddOnPart
from zae.compose.options import options_of
from zae.errors import ConfigError
from zae.loop.trainer_state import weights_of

__all__ = ["SavingPart"]


class SavingPart(AddOnPart):
    """The part of HuggingFaceAddon that saves folders, files of metrics, and uploads to the Hub.

    Parameters
    ----------
    output_dir : str or Path, optional
        The folder of ``save_model()``, ``save_metrics()`` and of what is uploaded. Checkpoints of StateManagerAddon are
        in ``checkpoints`` within it, unless ``save_path`` is given.
    metadata : mapping, optional
        What ``save_model`` writes to ``zae.json`` beside versions, class, base model, step, epoch and metrics.
    push_to_hub : bool
        Upload the model in the background queue of the client, when ``hub_strategy`` says. A failed upload is a
        warning. Rank 0 uploads.
    hub_model_id : str, optional
        The repository, "user/name"; by default the name of ``output_dir``.
    hub_strategy : {"every_save", "end", "checkpoint", "all_checkpoints"}
        Upload the model with every checkpoint and at the end of a run, at the end only, or with every checkpoint and
        with the checkpoint itself, as ``last-checkpoint`` or under its own name. ``save_model(folder)`` uploads always.
    hub_token : str, optional
        A token that may write; else that of ``hf auth login``. It is not written anywhere.
    hub_private_repo : bool, optional
        Whether a new repository is private.
    hub_revision : str, optional
        The branch.
    hub_always_push : bool
        Wait for an upload that is on its way, instead of leaving the next one out.
    hub_api : huggingface_hub.HfApi, optional
        The client.
    """

    layer = "model"
    traits = ("saves_folders",)
    processing_class: Any  # An option of DatasetsPart.
    args: Any = None  # The TrainingArguments that the trainer was made of.
    uploader: Uploader
    _pushes: bool
    _pushed_at: int

    @checked
    def __init__(
        self,
        *args: Any,
        output_dir: str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        push_to_hub: bool = False,
        hub_model_id: str | None = None,
        hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = "every_save",
        hub_token: str | None = None,
        hub_private_repo: bool | None = None,
        hub_revision: str | None = None,
        hub_always_push: bool = False,
        hub_api: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.output_dir = None if output_dir is None else Path(output_dir).expanduser()
        hub.check_metadata(metadata)
        self.metadata = dict(metadata or {})
        self.hub_always_push = hub_always_push
        if push_to_hub and self.output_dir is None:
            raise ConfigError("push_to_hub=True uploads output_dir; write output_dir='folder'")
        repository = hub_model_id or (self.output_dir.absolute().name if self.output_dir else "")
        if hub_model_id is not None or push_to_hub:
            hub.check_repository(repository)
        self.uploader = Uploader(repository, hub_strategy, hub_token, hub_private_repo, hub_revision, hub_api)
        self._pushes = bool(push_to_hub)
        self._pushed_at = -1

    @classmethod
    def expand_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Put the checkpoints of StateManagerAddon into ``output_dir``."""
        expanded = super().expand_options(options)
        if "save_path" in options_of(cls) and expanded.get("output_dir") is not None and "save_path" not in expanded:
            expanded["save_path"] = Path(expanded["output_dir"]) / "checkpoints"
        return expanded

    # --------------------------------------------------------------------------------------------------- saving

    @explained_call("save_model('folder'), or save_model('weights.safetensors')")
    def save_model(self, path: str | Path | None = None, *, metadata: Mapping[str, Any] | None = None) -> Path:
        """Save the model as a folder that ``from_pretrained`` loads, or its weights as a file.

        A folder has the configuration, the weights, the generation configuration, the ``processing_class``,
        ``training_args.json`` and ``zae.json``; of a PEFT model it has the adapters. With ``push_to_hub=True`` it is
        uploaded. Where the weights lie in parts on several ranks, all of them call it, and rank 0 writes.

        Parameters
        ----------
        path : str or Path, optional
            A folder, ``output_dir`` by default; or a file with a suffix, as in ``Trainer.save_model``.
        metadata : mapping, optional
            What is added to ``zae.json``; values that JSON has.

        Returns
        -------
        Path
            The folder, or the file.
        """
        hub.check_metadata(metadata)
        if path is not None and hub.has_file_suffix(path):
            if metadata:
                raise ConfigError(
                    f"save_model({str(path)!r}, metadata=...): a file holds the weights alone; save a folder, whose "
                    "zae.json has the metadata"
                )
            return super().save_model(path)
        folder = self._save_folder(path, metadata or {}, all_call=not self.engine.can_save_alone)
        if self._pushes and self.is_main:
            self.uploader.start(Push(folder, "Model save"))
            if not self.current_run.setup.is_done:
                self.uploader.finish()
        return folder

    def _save_folder(
        self, path: str | Path | None = None, metadata: Mapping[str, Any] | None = None, all_call: bool = True
    ) -> Path:
        """Save the folder; rank 0 writes, and if it fails, all ranks that call it raise its error."""
        folder = self._folder(path, "save_model")
        weights = weights_of(self)
        group = Group(self.rank, self.gather) if all_call else Group()
        group.together(lambda: self._write_folder(folder, weights, metadata or {}) if self.is_main else None, folder)
        return folder

    def _write_folder(self, folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        model = self.unwrap()
        progress = self.progress_checker
        metrics = {f"train_{name}": value for name, value in self.train_metrics.items()}
        metrics |= {f"eval_{name}": value for name, value in self.test_metrics.items()}
        about = {"step": progress.step, "epoch": progress.epoch, "metrics": metrics}
        about = hub.describe_model(model, {**about, **self.metadata, **metadata})
        parts = {"processing_class": self.processing_class, "arguments": self.args}
        hub.save_folder(folder, model, weights, metadata=about, **parts)

    def _folder(self, path: str | Path | None, call: str) -> Path:
        """Return a folder, by default ``output_dir``."""
        if path is None and self.output_dir is None:
            example = "" if call == "save_metrics" else f"{call}('folder'), or "  # It takes none.
            raise ConfigError(f"{call} needs a folder; write {example}the option output_dir='folder'")
        return Path(path or self.output_dir or "").expanduser()

    def model_exists(self, path: str | Path | None = None) -> bool:
        """Return whether a folder, by default ``output_dir``, contains a whole model or a whole checkpoint.

        Parameters
        ----------
        path : str or Path, optional
            What ``save_model`` or ``save_pretrained`` wrote.

        Returns
        -------
        bool
            False for a folder with some of its files missing.
        """
        return hub.model_exists(self._folder(path, "model_exists"))

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write ``<split>_results.json`` into ``output_dir``, and add the metrics to ``all_results.json``.

        Parameters
        ----------
        split : str
            "train", "eval" or "test".
        metrics : mapping
            What ``evaluate`` returned, or the metrics of ``train`` and ``predict``.
        combined : bool
            Whether ``all_results.json`` is written.
        """
        if self.is_main:
            hub.save_metrics(self._folder(None, "save_metrics"), split, metrics, combined)

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Write metrics to standard output, as Transformers does.

        Parameters
        ----------
        split : str
            "train", "eval" or "test".
        metrics : mapping
            What ``evaluate`` returned.
        """
        if self.is_main and sys.stdout is not None:
            sys.stdout.write(f"{hub.log_metrics(split, metrics)}\n")

    # --------------------------------------------------------------------------------------------------- uploads

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> Any:
        """Save the model into ``output_dir`` and upload it now; every rank calls it, and rank 0 uploads.

        Parameters
        ----------
        commit_message : str
            The message of the commit.
        blocking : bool
            False uploads in the background; if that fails, it is a warning.
        token, revision : str, optional
            In place of ``hub_token`` and ``hub_revision``.
        private : bool, optional
            In place of ``hub_private_repo``.

        Returns
        -------
        object
            What the client returns; None on other ranks, and where ``blocking`` is false.

        Raises
        ------
        CheckpointError
            The upload failed.
        """
        folder = self._save_folder()
        push = Push(folder, commit_message)
        if not self.is_main:
            return None
        uploader = self.uploader.replaced(folder, token, revision, private)
        if not blocking:
            uploader.start(push)
            return None
        try:
            return uploader.upload(push)
        except Exception as error:
            raise uploader.explain(error, push) from None  # The error of a client may show the token.

    def on_save(self, path: Path) -> None:
        """Upload the model, and the checkpoint, if the strategy is one of every save."""
        super().on_save(path)
        strategy = self.uploader.strategy
        step = self.progress_checker.step
        if not self._pushes or strategy == "end":
            return
        names = {"checkpoint": "last-checkpoint", "all_checkpoints": path.name}
        if step != self._pushed_at or strategy in names:
            self._push(
                f"Training in progress, step {step}", path if strategy in names else None, names.get(strategy, "")
            )

    def on_run_end(self) -> None:
        """Upload the final model."""
        super().on_run_end()
        if self._pushes:
            self._push("End of training", is_last=True)

    def _push(self, message: str, checkpoint: Path | None = None, name: str = "", is_last: bool = False) -> None:
        """Save the model and begin its upload; while another one is on its way, only that of the end."""
        if not is_last and not self.hub_always_push and self.gather(self.uploader.is_busy)[0]:
            return
        folder = self._save_folder()
        self._pushed_at = self.progress_checker.step
        if self.is_main:
            if self.hub_always_push:
                self.uploader.wait()
            self.uploader.start(Push(folder, message, checkpoint, name))

    def on_exception(self, error: BaseException) -> None:
        """Leave uploads alone: the error is what matters now."""
        super().on_exception(error)
        self.uploader.abandon()

    def teardown(self) -> None:
        """Wait for the last upload."""
        self.uploader.finish()
        super().teardown()
