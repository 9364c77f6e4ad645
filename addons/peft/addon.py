"""Adapters of the package ``peft``, such as LoRA: checkpoints hold what is trained, and know their base model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zae.addon import AddOnBase
from zae.addons.peft import adapters
from zae.checkpoint.group import Group
from zae.checkpoint.weights import save_weights
from zae.compose.introspect import with_trait
from zae.optim.factories import as_dict

__all__ = ["PEFTAddon"]


class PEFTAddon(AddOnBase):
    """Train an adapter of ``peft`` (LoRA, DoRA, IA3, prompts and others), or the part of a model that is not frozen.

    Checkpoints and ``save_model(file)`` contain only what is trained, and a hash of each frozen weight.

    Parameters
    ----------
    peft_config : peft.PeftConfig, optional
        The adapter to add to ``model``, with its random weights drawn from ``seed``. It changes the layers of the model
        that is given. Then give the optimizer as a function, which gets the parameters of the adapter too. By default
        ``model`` has an adapter, or frozen parameters, already.

    Raises
    ------
    ConfigError
        ``peft_config`` does not fit the model, nothing is trained, or the optimizer holds only frozen parameters.
    CheckpointMismatch
        A checkpoint was saved with another base model.

    Examples
    --------
    >>> import peft, torch
    >>> from zae import Trainer
    >>> from zae.addons import PEFTAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> config = peft.LoraConfig(r=1, target_modules=["0"])
    >>> trainer = Task.add_on(PEFTAddon)(
    ...     lambda: torch.nn.Sequential(torch.nn.Linear(8, 8)), "cpu", optimizer=torch.optim.AdamW, seed=0,
    ...     peft_config=config)
    >>> _ = trainer.run(1, [torch.ones(4, 8)] * 3)
    >>> for name in trainer.model_state():
    ...     print(name)
    base_model.model.0.lora_A.default.weight
    base_model.model.0.lora_B.default.weight
    """

    layer = "model"
    traits = ("needs_all_weights",)
    state_attributes = ("_base",)
    checks_model = True
    _compared: dict[str, Any]

    def __init__(self, *args: Any, peft_config: Any = None, **kwargs: Any) -> None:
        if peft_config is not None:
            args, kwargs = adapters.with_adapter(args, kwargs, peft_config)
        super().__init__(*args, **kwargs)
        if self.mode == "train":
            adapters.check_trained(self.unwrap(), as_dict(self.optimizer).values())
        self._base: dict[str, str] = {}
        self._compared = {}  # Frozen weights that were compared, and how to see that they have not changed.

    def setup(self) -> None:
        """Hash the base model before anything changes or shards it."""
        adapters.check_plan(self.unwrap(), self.changed_modules("divided"))
        self._hash_base()
        super().setup()

    def _hash_base(self) -> dict[str, str]:
        if not self._base:
            self._base = adapters.base_weights(self.unwrap())
        return self._base

    def weights_to_save(self, names: Collection[str]) -> Collection[str]:
        """Leave out the frozen weights."""
        changed = adapters.changed_weights(self.unwrap(), self._hash_base(), self._compared)
        left_out = adapters.frozen_names(self.unwrap()) - changed
        names = super().weights_to_save(names)
        return [name for name in names if name not in left_out] if left_out else names

    def load_model_state(self, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Load weights; frozen parameters among them belong to the base from now on."""
        base = self._hash_base()
        super().load_model_state(weights, strict)
        self._base = {**base, **adapters.hash_parameters(self.unwrap(), weights, self.engine.full_tensors)}

    def state_dict(self) -> dict[str, Any]:
        """Add the hashes of the base model."""
        self._hash_base()
        adapters.refuse_merged(self.unwrap())
        return super().state_dict()

    def adapt_state(self, entry: Any) -> Any:
        """Take a state without an entry, which was saved with all weights."""
        return {"base": {}} if entry is None else entry

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Refuse a state of another base model, and load the rest."""
        entry, _ = self.take(state, "PEFTAddon", strict=False)
        if isinstance(entry, Mapping) and entry.get("base"):
            adapters.check_base(self.unwrap(), entry["base"], self._hash_base(), state["model"])
        adapters.check_adapter(self.unwrap(), state.get("model", {}))
        base = self._hash_base()
        super().load_state_dict(state, strict)
        if entry is None:
            self._base = {**base, **adapters.hash_parameters(self.unwrap(), state["model"], self.engine.full_tensors)}

    def save_model(self, path: str | Path | None = None, **options: Any) -> Path:
        """Save the trained weights alone: in a file as by default, or in a folder as ``peft`` saves an adapter.

        With `HuggingFaceAddon` the folder has its files too, and both arguments are its own.

        Parameters
        ----------
        path : str or Path
            A file with the suffix of a format, or a folder, which ``peft.PeftModel.from_pretrained`` loads. All ranks
            call it, and rank 0 writes.
        **options
            Of `HuggingFaceAddon`: ``metadata``.

        Returns
        -------
        Path
            The file or folder.
        """
        adapters.refuse_merged(self.unwrap())
        if path is None or with_trait(type(self), "saves_folders"):
            return super().save_model(*(() if path is None else (path,)), **options)
        if Path(path).suffix or not hasattr(self.unwrap(), "peft_config"):
            return super().save_model(path, **options)
        weights = self.model_state()

        def save() -> None:
            if self.is_main:
                adapters.save_adapter(self.unwrap(), Path(path).expanduser(), weights)

        Group(self.rank, self.gather).together(save, Path(path))
        return Path(path)

    def save_merged(self, path: str | Path) -> Path:
        """Save the base model with the adapter added to its weights; the trainer stays as it is.

        The model is copied in memory. All ranks call it, and rank 0 writes.

        Parameters
        ----------
        path : str or Path
            A file with the suffix of a format, under the keys of the base model; for a model of Transformers also a
            folder, as ``save_pretrained`` writes it.

        Returns
        -------
        Path
            The file or folder.

        Raises
        ------
        ConfigError
            The adapter cannot be merged: the base is quantized, the adapter is a prompt, the ranks hold parts of the
            weights, or the adapter changes a layer whose weight another one shares (tied embeddings).
        """
        adapters.refuse_sharded(self.unwrap())
        weights = self.model_state()

        def save() -> None:
            if not self.is_main:
                return
            merged = adapters.merged_copy(self.unwrap(), weights)
            if Path(path).suffix or not hasattr(merged, "save_pretrained"):
                save_weights(Path(path), merged.state_dict(), {"step": str(self.progress_checker.step)})
            else:
                adapters.save_folder(merged, Path(path).expanduser())

        Group(self.rank, self.gather).together(save, Path(path))
        return Path(path)
