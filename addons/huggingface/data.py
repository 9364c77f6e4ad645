"""Loaders over the datasets of Transformers users: their collators, columns and order of samples."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from zae.arguments import Count, CountOrZero, checked
from zae.compose.introspect import AddOnPart
from zae.data.loaders import length_of
from zae.data.seeded import is_seeded
from zae.errors import ConfigError, kind_of

__all__ = ["DatasetsPart", "LoaderSettings", "columns_of", "default_collator", "forward_of"]

_log = logging.getLogger("zae")

_COLLATOR = "a function of a list of rows, for instance transformers.DataCollatorWithPadding(tokenizer)"


def default_collator(processing_class: Any) -> Callable[[Any], Any]:
    """Return the collator that Transformers takes by default: one that pads, where there is a tokenizer."""
    import transformers
    from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor

    if isinstance(processing_class, (transformers.PreTrainedTokenizerBase, SequenceFeatureExtractor)):
        return transformers.DataCollatorWithPadding(cast(Any, processing_class))
    return _collate_equal


def _collate_equal(rows: Any) -> Any:
    """Collate rows of equal lengths; rows that have no names, such as those of a TensorDataset, as torch does."""
    import transformers

    has_names = not rows or isinstance(rows[0], Mapping) or hasattr(rows[0], "__dict__")
    if not has_names or isinstance(rows[0], torch.Tensor):
        return torch.utils.data.default_collate(rows)
    try:
        return transformers.default_data_collator(rows)
    except ValueError as error:
        error.add_note("zae: rows of different lengths are padded with processing_class=tokenizer, or a data_collator")
        raise


def forward_of(model: Any) -> Any:
    """Return the ``forward`` that reads the columns: that of the base model, where PEFT is around it."""
    base = getattr(model, "get_base_model", None)
    return (model if base is None else base()).forward


def columns_of(model: Any, label_names: Sequence[str]) -> list[str]:
    """Return the columns that a model takes: the arguments of ``forward``, and the labels."""
    named = [name for name, p in inspect.signature(forward_of(model)).parameters.items() if p.kind not in (2, 4)]
    return list(dict.fromkeys([*named, "label", "label_ids", *label_names]))


def check_dataset(name: str, dataset: Any) -> None:
    """Refuse what is no dataset, and one without samples."""
    found = f"{name} is {f'the class {dataset.__name__}' if isinstance(dataset, type) else kind_of(dataset)}"
    if isinstance(dataset, str):
        raise ConfigError(f"{name}={dataset!r} is a name; load it: datasets.load_dataset({dataset!r})['train']")
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"{found}; give its dataset, or call run(n_epoch, loader) with the loader")
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, list(dataset)[:5]))
        raise ConfigError(
            f"{found} with {names}, and training takes one dataset; give one of them, {name}=data[...], or make one of "
            "columns: datasets.Dataset.from_dict(data)"
        )
    is_iterable = isinstance(dataset, IterableDataset) or hasattr(dataset, "_ex_iterable")
    if isinstance(dataset, type) or not (is_iterable or hasattr(dataset, "__getitem__")):
        raise ConfigError(f"{found}; give a list of dicts, a Dataset of torch or of datasets, or an IterableDataset")
    if not is_iterable and length_of(dataset) == 0:
        raise ConfigError(f"{found} without samples; give it data, or look at what has filtered them")


def _create_stream(collate: Any) -> None:
    """Create the generator of a collator with a seed now, and not with its first batch: a resume puts it back.

    It is that of Transformers in a process that is no worker; each worker creates another one.
    """
    if getattr(collate, "seed", None) is not None and hasattr(collate, "get_generator") and not collate.generator:
        collate.generator = collate.get_generator(collate.seed)


class _Keep:
    """A collator that leaves out the columns that the model does not take, and names them once."""

    def __init__(self, collate: Callable[[Any], Any], columns: Sequence[str], model: str) -> None:
        self.collate = collate
        self.columns = columns
        self.model = model
        self._is_named = False

    def __call__(self, samples: Sequence[Any]) -> Any:
        if samples and isinstance(samples[0], Mapping):
            _refuse_empty(samples[0], self.columns, self.model)
            dropped = [name for name in samples[0] if name not in self.columns]
            worker = torch.utils.data.get_worker_info()
            if dropped and not self._is_named and (worker is None or worker.id == 0):
                _warn_of_dropped(dropped, self.model)
            self._is_named = True
            samples = [{k: v for k, v in sample.items() if k in self.columns} for sample in samples]
        return self.collate(samples)


def _warn_of_dropped(names: Sequence[str], model: str) -> None:
    _log.warning(
        "%s.forward() does not take the columns %s: they are left out of the batches; give "
        "remove_unused_columns=False to keep them, or remove them from the dataset",
        model,
        ", ".join(names),
    )


def _refuse_empty(names: Any, columns: Sequence[str], model: str) -> None:
    if not any(name in columns for name in names):
        raise ConfigError(
            f"no column of the dataset ({', '.join(names)}) is an argument of {model}.forward(), which takes "
            f"{', '.join(columns)}; tokenize the dataset with map(), rename its columns, or give "
            "remove_unused_columns=False and a data_collator that makes the arguments"
        )


class _EpochSampler(RandomSampler):
    """Samples in the random order that Transformers' Trainer has with this seed: each epoch seeds its own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset, generator=torch.Generator())
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        assert self.generator is not None
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()


@dataclass
class LoaderSettings:
    """What the loaders over datasets are made with; the names are those of ``TrainingArguments``."""

    train_batch_size: int = 8
    eval_batch_size: int = 8
    num_workers: int = 0
    pin_memory: bool = True
    drop_last: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    strategy: str = "random"
    length_column: str = "length"
    input_name: str = "input_ids"
    removes_columns: bool = True
    seed: int = 42
    named: set[tuple[str, ...]] = field(default_factory=set)

    def loader(self, dataset: Any, collate: Any, columns: Sequence[str], model: str, group: int = 0) -> Any:
        """Return the loader over a dataset; ``group`` is how many batches make a step of training, 0 evaluates."""
        check_dataset("train_dataset" if group else "eval_dataset", dataset)
        sampler = self._sampler(dataset, group)
        if not self.num_workers or is_seeded(dataset):
            _create_stream(collate)
        if self.removes_columns and hasattr(dataset, "remove_columns") and getattr(dataset, "column_names", None):
            dropped = [name for name in dataset.column_names if name not in columns]
            _refuse_empty(dataset.column_names, columns, model)
            if dropped:
                if tuple(dropped) not in self.named:  # Each evaluation makes a loader.
                    _warn_of_dropped(dropped, model)
                    self.named.add(tuple(dropped))
                dataset = dataset.remove_columns(dropped)
        elif self.removes_columns:
            collate = _Keep(collate, columns, model)
        return DataLoader(
            dataset,
            batch_size=self.train_batch_size if group else self.eval_batch_size,
            sampler=sampler,
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory and torch.accelerator.is_available(),
            drop_last=self.drop_last and sampler is not None,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
        )

    def _sampler(self, dataset: Any, group: int) -> Sampler[int] | None:
        """Return the sampler of a dataset; None for one without a length, which has its own order."""
        if isinstance(dataset, IterableDataset) or length_of(dataset) is None:
            return None
        if not group or self.strategy == "sequential":
            return SequentialSampler(dataset)
        if self.strategy == "random":
            return _EpochSampler(dataset, self.seed)
        from transformers.trainer_pt_utils import LengthGroupedSampler

        is_named = self.length_column in (getattr(dataset, "column_names", None) or ())
        lengths = list(dataset[self.length_column]) if is_named else None
        generator = torch.Generator().manual_seed(self.seed)
        return LengthGroupedSampler(self.train_batch_size * group, dataset, lengths, self.input_name, generator)


class DatasetsPart(AddOnPart):
    """The part of HuggingFaceAddon that makes loaders over datasets.

    Parameters
    ----------
    train_dataset : Dataset, IterableDataset or list, optional
        What ``train()`` trains on: samples are dicts, for a model of Transformers, or what your own ``train_step``
        takes, such as the tuples of a TensorDataset.
    eval_dataset : Dataset, or dict of them, optional
        What ``evaluate()`` evaluates, and ``train()`` after each epoch or some steps.
    data_collator : callable, optional
        Makes a batch of a list of samples. By default the one that pads, where ``processing_class`` is a tokenizer,
        else ``transformers.default_data_collator``.
    processing_class : tokenizer or processor, optional
        Saved beside the weights. Its former name ``tokenizer`` is taken too, and warns.
    per_device_train_batch_size : int
        Samples in a batch of each rank.
    per_device_eval_batch_size : int
        The same for evaluations.
    train_sampling_strategy : {"random", "sequential", "group_by_length"}
        The order of the training samples. The random one is that of Transformers with the same seed.
        ``group_by_length=True`` is the former name of the last one.
    label_names : sequence of str
        The arguments of the model that are labels.
    length_column_name : str
        A column with the lengths, so that they are not computed.
    remove_unused_columns : bool
        Leave out the columns that ``forward`` does not take; a warning names them.
    dataloader_num_workers : int
        Processes that load.
    dataloader_pin_memory : bool
        Load into pinned memory, where there is an accelerator.
    dataloader_drop_last : bool
        Leave out a last batch that is smaller.
    dataloader_prefetch_factor : int, optional
        Batches that each worker prefetches.
    dataloader_persistent_workers : bool
        Keep the workers between epochs.
    data_seed : int, optional
        Seeds the order of the samples; ``seed`` by default, else 42.
    """

    layer = "model"
    loading: LoaderSettings

    @checked
    def __init__(
        self,
        *args: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Annotated[Callable[[Any], Any], _COLLATOR] | None = None,
        processing_class: Any = None,
        per_device_train_batch_size: Count = 8,
        per_device_eval_batch_size: Count = 8,
        train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = "random",
        label_names: Sequence[str] = ("labels",),
        length_column_name: str = "length",
        remove_unused_columns: bool = True,
        dataloader_num_workers: CountOrZero = 0,
        dataloader_pin_memory: bool = True,
        dataloader_drop_last: bool = False,
        dataloader_prefetch_factor: int | None = None,
        dataloader_persistent_workers: bool = False,
        data_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.data_collator = data_collator
        self.processing_class = processing_class
        self.label_names = tuple(label_names)
        names = getattr(processing_class, "model_input_names", None) or ["input_ids"]
        self.loading = LoaderSettings(
            per_device_train_batch_size,
            per_device_eval_batch_size,
            dataloader_num_workers,
            dataloader_pin_memory,
            dataloader_drop_last,
            dataloader_prefetch_factor,
            dataloader_persistent_workers,
            train_sampling_strategy,
            length_column_name,
            names[0],
            remove_unused_columns,
            next(seed for seed in (data_seed, self.seed, 42) if seed is not None),
        )

    def get_train_dataloader(self) -> Any:
        """Return the loader over ``train_dataset``; override it to train on one of your own."""
        if self.train_dataset is None:
            raise ConfigError(
                f"train() needs data; write {type(self).__name__}(..., train_dataset=dataset), or call "
                "run(n_epoch, loader)"
            )
        return self._loader(self.train_dataset, self.step_window.batches)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader over a dataset, by default ``eval_dataset``; of a dict of them, a dict of loaders."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, Mapping):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ConfigError(
                f"evaluate() needs data; write evaluate(dataset), or {type(self).__name__}(..., eval_dataset=dataset)"
            )
        if isinstance(dataset, Mapping):
            return {name: self._loader(part) for name, part in dataset.items()}
        return self._loader(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader over a dataset, without shuffling."""
        return self.get_eval_dataloader(test_dataset)

    def _loader(self, dataset: Any, group: int = 0) -> Any:
        model = self.unwrap()
        collate = self.data_collator or default_collator(self.processing_class)
        return self.loading.loader(dataset, collate, columns_of(model, self.label_names), type(model).__name__, group)
