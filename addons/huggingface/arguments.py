"""Read the arguments of Transformers with their older names, and convert those of devices, loaders and loggers.

The tables name what is an option of HuggingFaceAddon, what nothing here reads, and what is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zae.compose.composition import load_installed
from zae.compose.hints import hint
from zae.compose.options import options_of
from zae.errors import AddOnError, ConfigError, did_you_mean, kind_of

_SERVICES = ("wandb", "mlflow", "neptune", "trackio", "tensorboard")
__all__ = ["GONE", "HERE", "OLD_NAMES", "OLD_OPTIMIZERS", "library", "read_arguments"]


def _set(name: str, value: Any) -> Callable[[Any], dict[str, Any]]:
    """Return a function of a flag, which says the same with another argument where it is on."""
    return lambda flag: {name: value} if flag else {}


def _warmup(ratio: Any) -> dict[str, Any]:
    """Return the steps of a warm-up: less than 1 is a share of the run."""
    share = _as_type("warmup_ratio", ratio, {"float"})
    if not 0 <= share < 1:
        raise ConfigError(f"warmup_ratio={ratio!r}; write warmup_steps, a share of the run such as 0.1, or steps")
    return {"warmup_steps": share} if share else {}


# Names of older versions and the present one; a function returns the arguments that say the same.
OLD_NAMES: dict[str, Any] = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": _warmup,
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "adafactor": _set("optim", "adafactor"),
    "group_by_length": _set("train_sampling_strategy", "group_by_length"),
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "include_inputs_for_metrics": _set("include_for_metrics", ["inputs"]),
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
}
OLD_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}
# What the present version has no argument for, and where it is here.
HERE = {
    "logging_dir": "log_dir, an option of TensorBoardLoggerAddon",
    "overwrite_output_dir": "overwrite, an option of StateManagerAddon",
    "save_safetensors": "save_format, an option of StateManagerAddon",
    "tokenizer": "processing_class, an option of HuggingFaceAddon",
}
# What was removed without a successor, and why nothing is lost.
GONE = {
    "fp16_opt_level": "the levels of Apex are gone: fp16=True or bf16=True is mixed precision, as its O1 was",
    "fp16_backend": "mixed precision is torch.autocast: fp16=True or bf16=True",
    "half_precision_backend": "mixed precision is torch.autocast: fp16=True or bf16=True",
    "use_mps_device": "an accelerator is found without it; use_cpu=True is for the CPU",
}


def library() -> Any:
    """Import Transformers, or say how to install it with what its arguments need."""
    for needed in ("transformers", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ConfigError(f'{needed} is not installed: pip install "zae[hf]"')
    return importlib.import_module("transformers")


def read_arguments(args: Any, stacklevel: int = 2) -> tuple[Any, dict[str, Any]]:
    """Return a ``TrainingArguments``, and the entries of older versions that zae has an option for.

    Parameters
    ----------
    args : transformers.TrainingArguments, mapping, str or Path
        A file is JSON or YAML, and holds a mapping.
    stacklevel : int
        The frame of the warnings about old names: 2 is that of the caller.

    Returns
    -------
    arguments : transformers.TrainingArguments
        The object itself, or one that was made of the entries.
    entries : dict
        Those of "logging_dir", "overwrite_output_dir", "save_safetensors" and "tokenizer" that were given.

    Raises
    ------
    ConfigError
        An unknown name, with the nearest one; a value of a wrong type.
    """
    transformers = library()
    if isinstance(args, transformers.TrainingArguments):
        return args, {}
    source = "args"
    if isinstance(args, (str, Path)):
        source = str(args)
        args = _read_file(Path(args))
    if not isinstance(args, Mapping):
        kind = "the class itself" if isinstance(args, type) else kind_of(args)
        raise ConfigError(
            f"{source} is {kind}; give a transformers.TrainingArguments, a dict of its arguments, or the path of a "
            "JSON or YAML file with one"
        )
    cls = transformers.TrainingArguments
    fields = _fields(cls)
    seq2seq = _fields(transformers.Seq2SeqTrainingArguments)
    if any(name in seq2seq and name not in fields for name in args):
        cls = transformers.Seq2SeqTrainingArguments
        fields = seq2seq
    values, entries, messages = _present(args, fields, source)
    for text in messages:
        warnings.warn(text, FutureWarning, stacklevel=stacklevel)
    kinds = _kinds(cls)
    values = {name: _as_type(name, value, kinds[name]) for name, value in values.items()}
    if str(values.get("hub_token", "")).startswith("<"):  # `to_dict` hides it.
        del values["hub_token"]
    # Transformers would ask for the package of it first.
    for name in [option for option in REFUSED if values.get(option)]:
        raise ConfigError(f"{name}={plain(values[name])!r} is not supported; {REFUSED[name]}")
    try:
        return cls(**values), entries
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"{cls.__name__} refuses {source}: {error}") from error


def _read_file(path: Path) -> Any:
    """Return what a JSON or YAML file contains."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"args={str(path)!r} has the suffix {suffix!r}; write a .json, .yaml or .yml file")
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if suffix == ".json" else importlib.import_module("yaml").safe_load(text)


def _fields(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


def _kinds(cls: type) -> dict[str, set[str]]:
    """Return the names of the types that each argument may have, for instance "float" and "None"."""
    # Not of the fields, whose types an HfArgumentParser changes.
    return {name: set(re.findall(r"\w+", str(hint))) for name, hint in typing.get_type_hints(cls).items()}


def _present(
    arguments: Mapping[str, Any], fields: tuple[str, ...], source: str
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the arguments by their present names, those that zae has an option for, and texts about old names."""
    values: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    messages: list[str] = []
    unknown: list[str] = []
    for name, value in arguments.items():
        if name == "optim" and str(value) in OLD_OPTIMIZERS:
            values[name] = OLD_OPTIMIZERS[str(value)]
            messages.append(f"optim={value!r} is of an older Transformers; write optim={values[name]!r}")
        elif name in fields:
            values[name] = value
        elif name in OLD_NAMES:
            renamed = {OLD_NAMES[name]: value} if isinstance(OLD_NAMES[name], str) else OLD_NAMES[name](value)
            text = " and ".join(f"{new}={new_value!r}" for new, new_value in renamed.items())
            messages.append(f"{name} is of an older Transformers; " + (f"write {text}" if text else "leave it out"))
            for new, new_value in renamed.items():
                if arguments.get(new) not in (None, 0, new_value):
                    raise ConfigError(f"{source} has {name}={value!r} and {new}={arguments[new]!r}; keep {new}")
                values[new] = new_value
        elif name in HERE:
            messages.append(f"{name}={value!r} is of an older Transformers; write {HERE[name]}")
            entries[name] = value
        elif name in GONE:
            messages.append(f"{name}={value!r} has no effect: {GONE[name]}")
        else:
            unknown.append(_unknown(str(name), fields))
    if unknown:
        raise ConfigError(f"{source} has {'; and '.join(unknown)}")
    return values, entries, messages


def _unknown(name: str, fields: tuple[str, ...]) -> str:
    """Return the text about a name that is not an argument."""
    known = hint(name)
    near = did_you_mean(name, [*fields, *OLD_NAMES, *HERE])
    remedy = (f"; {known}; leave it out of the arguments" if known else near) or (
        "; arguments of your own classes are read by "
        "transformers.HfArgumentParser((MyArguments, TrainingArguments)).parse_dict(...), which returns the "
        "TrainingArguments to give"
    )
    return f"{name!r}, which is not an argument of TrainingArguments{remedy}"


def _as_type(name: str, value: Any, kinds: set[str]) -> Any:
    """Return a value as the number or flag that its argument takes: YAML reads 5e-5 as a str."""
    plain = kinds & {"bool", "int", "float"}
    if not plain or value is None or kinds & {"str", "dict", "list"}:
        return value
    converted: Any = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            converted = json.loads(value.lower()) if value.lower() in ("true", "false") else float(value)
    if isinstance(converted, bool):
        is_right = "bool" in plain
    else:
        is_right = isinstance(converted, (int, float)) and plain != {"bool"}
        converted = int(converted) if is_right and plain == {"int"} and converted == int(converted) else converted
        is_right = is_right and ("float" in plain or isinstance(converted, int))
    if not is_right:
        texts = {"bool": "True or False", "int": "a whole number", "float": "a number"}
        words = " or ".join(text for kind, text in texts.items() if kind in plain)
        raise ConfigError(f"{name}={value!r} is {kind_of(value)}; write {words}")
    return converted


# ------------------------------------------------------------------- what `from_arguments` does not convert itself

# Arguments of datasets, of the loss in the model and of the Hub: options of HuggingFaceAddon by the same names. For
# each, what a task without that add-on does.
IN_LOADER = "HuggingFaceAddon has no such option; for your own: DataLoader(dataset, **converted.loader)"
_COLUMNS = "your own dataset and collate_fn decide"
_HUB = "upload the folder yourself: huggingface_hub.upload_folder"
_METRICS = "metrics are what test_step and metric_on_epoch_end return"
HUGGINGFACE = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
        ),
        IN_LOADER,
    ),
    "data_seed": "your own DataLoader has a generator",
    "label_smoothing_factor": "the loss is what train_step returns",
    **dict.fromkeys(("remove_unused_columns", "label_names", "length_column_name"), _COLUMNS),
    "train_sampling_strategy": "your own DataLoader has a sampler",
    **dict.fromkeys(
        ("prediction_loss_only", "include_for_metrics", "batch_eval_metrics", "eval_do_concat_batches"), _METRICS
    ),
    **dict.fromkeys(
        (
            "push_to_hub",
            "hub_token",
            "hub_private_repo",
            "hub_model_id",
            "hub_strategy",
            "hub_always_push",
            "hub_revision",
        ),
        _HUB,
    ),
    **dict.fromkeys(
        ("predict_with_generate", "generation_max_length", "generation_num_beams"),
        "call model.generate in predict_step or test_step",
    ),
}
# Arguments that nothing here reads, and why; a value that is not the default is reported.
_SCRIPT = "it is for your own script: call run, evaluate or predict"
_EVAL_TYPE = "evaluation has the precision of training, and no copy of the weights in another type is made"
REPORTED = {
    **dict.fromkeys(("do_train", "do_predict"), _SCRIPT),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), _EVAL_TYPE),
    "average_tokens_across_devices": "every target has the same weight, on any number of ranks",
    "tf32": "TrainingArguments has set it itself, for the whole process",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in on_step_end",
    "auto_find_batch_size": "call zae.find_batch_size(trainer, loader) before run",
    "log_on_each_node": "only the first process logs",
    "logging_nan_inf_filter": "a loss that is not finite ends the run, see on_nonfinite; it is not hidden in a log",
    "include_num_input_tokens_seen": "return the number in train_step: it is recorded, as a mean by sample",
    **dict.fromkeys(("log_level", "log_level_replica"), "set the level of the logger 'zae': logging.getLogger('zae')"),
    "eval_accumulation_steps": "outputs are moved to the host after each batch",
    "eval_use_gather_object": "predict and evaluate gather tensors of any nesting",
    "save_only_model": "a checkpoint has the whole state, so that a run can resume",
    "save_on_each_node": "one folder is written, on a disk that the nodes share",
    "enable_jit_checkpoint": "checkpoints are saved at SIGTERM in any case, see save_on_signal",
    "restore_callback_states_from_checkpoint": "the state of callbacks is always restored",
    "debug": "add AnomalyAddon, which names the module and the operation",
    "skip_memory_metrics": "torch.cuda.max_memory_allocated() is the peak of the memory",
    "local_rank": "the rank is that of the launcher",
    "ddp_bucket_cap_mb": "buckets have the size of torch",
    "ddp_broadcast_buffers": "buffers are sent once before each evaluation and save, not in each forward",
    "trackio_bucket_id": "give it as an entry of web_logger['trackio']",
    "trackio_static_space_id": "give it as an entry of web_logger['trackio']",
    "sortish_sampler": "write train_sampling_strategy='group_by_length'",
    "generation_config": "set it in the model: model.generation_config = ...",
}
# Arguments that would train another way: refused where they are given.
REFUSED = {
    "deepspeed": "write Task.add_on(DeepSpeedAddon), deepspeed_config=...; or shard with FSDPAddon: fsdp=True",
    "parallelism_config": "give the mesh to FSDPAddon or TensorParallelAddon: mesh={'shard': 2, 'tensor': 2}",
    "use_liger_kernel": "apply the kernels before: from transformers.integrations.liger import apply_liger_kernel; "
    "apply_liger_kernel(model, None)",
    "liger_kernel_config": "give it to transformers.integrations.liger.apply_liger_kernel(model, config)",
}


def is_default(args: Any, field: dataclasses.Field[Any]) -> bool:
    """Return whether an argument has its default, or what that becomes."""
    default = field.default_factory() if callable(field.default_factory) else field.default
    empty: tuple[Any, ...] = ([], "", None, "none")
    value = plain(getattr(args, field.name, default))
    return value == plain(default) or (value in empty and default in empty)


def plain(value: Any) -> Any:
    """Return the value of an entry of an enumeration."""
    return getattr(value, "value", value) if isinstance(value, str) else value


def huggingface_options() -> Mapping[str, Any]:
    """Return the options of HuggingFaceAddon."""
    try:
        return options_of(load_installed("HuggingFaceAddon"))
    except AddOnError:
        return {}


# ------------------------------------------------------------------------------------------------ devices and loaders


def convert_device(args: Any, to: Any) -> None:
    """Carry use_cpu, and the arguments of DDP and FSDP, where there are several processes."""
    several = args.world_size > 1
    to.options["device"] = "cpu" if args.use_cpu else "auto" if several else str(args.device)
    if args.n_gpu > 1:
        to.report["n_gpu"] = (
            f"n_gpu={args.n_gpu}: DataParallel is not used; for all of them, start with torchrun, or write "
            "converted.trainer(Task.add_on(MultiGPUAddon), model, device=['cuda:0', 'cuda:1'])"
        )
    if several:
        backend = {"backend": args.ddp_backend} if args.ddp_backend else {}
        to.options.update(timeout=float(args.ddp_timeout), **backend)
    if args.fsdp:
        _convert_fsdp(args, to)
    elif several:
        unused = args.ddp_find_unused_parameters
        to.add_on("MultiGPUAddon", **({} if unused is None else {"find_unused_parameters": unused}))
    for name in ("ddp_find_unused_parameters", "ddp_static_graph", "ddp_backend", "ddp_timeout"):
        field = next(field for field in dataclasses.fields(args) if field.name == name)
        if not (is_default(args, field) or several):
            to.report_unused(name, "there is one process")
        elif not is_default(args, field) and args.fsdp and name == "ddp_find_unused_parameters":
            to.report_unused(name, "FSDPAddon has no such option")
        elif not is_default(args, field) and name == "ddp_static_graph":
            to.report_unused(name, "the engines have no such option: steps may use different parameters")


_FSDP = ("reshard_after_forward", "cpu_offload")  # Named alike here.
_FSDP_OF_OTHER_NAME = ("activation_checkpointing", "transformer_layer_cls_to_wrap")


def _convert_fsdp(args: Any, to: Any) -> None:
    """Carry fsdp and fsdp_config; entries that FSDPAddon has no option for are reported."""
    config = dict(args.fsdp_config or {})
    options: dict[str, Any] = {name: bool(config[name]) for name in _FSDP if name in config}
    blocks = list(config.get("transformer_layer_cls_to_wrap") or ())
    if blocks:
        options["fsdp_blocks"] = blocks
    to.add_on("FSDPAddon", **options)
    if config.get("activation_checkpointing"):
        to.add_on("GradientCheckpointingAddon", **({"checkpoint_modules": blocks} if blocks else {}))
    keys = (*_FSDP, *_FSDP_OF_OTHER_NAME)
    unused = {name: value for name, value in config.items() if name not in keys and value}
    if unused:
        to.report["fsdp_config"] = f"fsdp_config has {unused}: FSDPAddon has no such options"


def convert_accelerator(args: Any, to: Any) -> None:
    """Report the entries of accelerator_config that differ from their defaults."""
    config = args.accelerator_config
    settings = config.to_dict() if hasattr(config, "to_dict") else dict(config or {})
    default = type(config)().to_dict() if hasattr(config, "to_dict") else {}
    changed = {name: value for name, value in settings.items() if value != default.get(name)}
    if changed:
        to.report["accelerator_config"] = (
            f"accelerator_config has {changed}: ranks share the batches of your loader evenly, and nothing else"
        )


def convert_loaders(args: Any, to: Any) -> None:
    """Carry the arguments of the loaders."""
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and torch.device(args.device).type != "cpu",
        "drop_last": args.dataloader_drop_last,
    }
    if workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = getattr(args, "dataloader_multiprocessing_context", None)
        options["in_order"] = getattr(args, "dataloader_in_order", True)
    to.loader = {"batch_size": args.per_device_train_batch_size, **options}
    to.valid_loader = {"batch_size": args.per_device_eval_batch_size, **options}
    if not workers:
        for name in ("persistent_workers", "multiprocessing_context", "in_order"):
            field = next((e for e in dataclasses.fields(args) if e.name == f"dataloader_{name}"), None)
            if field is not None and not is_default(args, field):
                to.report_unused(field.name, "it is for workers: dataloader_num_workers=1 or more")


# ------------------------------------------------------------------------------------------------------------ loggers


def convert_loggers(args: Any, to: Any) -> None:
    """Carry report_to, run_name, project and trackio_space_id."""
    wanted = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    wanted = [name for name in wanted if name != "none"]
    web = {name: _entries_for(name, args) for name in wanted if name in _SERVICES and name != "tensorboard"}
    names = {"wandb": "WandB", "mlflow": "MLflow"}
    for name in web:
        to.add_on(f"{names.get(name, name.capitalize())}LoggerAddon")
    if web:
        to.options["web_logger"] = web
    if "tensorboard" in wanted:
        place = to.entries.get("logging_dir") or os.environ.get("TENSORBOARD_LOGGING_DIR")
        to.add_on("TensorBoardLoggerAddon", log_dir=place or os.path.join(args.output_dir, "runs"))
    elif "logging_dir" in to.entries:
        logging_dir = to.entries["logging_dir"]
        to.report["logging_dir"] = f"logging_dir={logging_dir!r}: it is for report_to='tensorboard'"
    if unknown := [name for name in wanted if name not in _SERVICES]:
        to.report_unused(
            "report_to", f"there is no logger for {', '.join(unknown)}; write on_log, or take {', '.join(_SERVICES)}"
        )
    if args.run_name is not None and not web:
        to.report_unused("run_name", "it is for report_to='wandb' and other services")
    for name, readers in (("project", ("wandb", "trackio")), ("trackio_space_id", ("trackio",))):
        field = next((field for field in dataclasses.fields(args) if field.name == name), None)
        if field is not None and not is_default(args, field) and not set(readers) & set(web):
            to.report_unused(name, f"it is for report_to={readers[0]!r}")


def _entries_for(name: str, args: Any) -> dict[str, Any]:
    """Return the entries of ``web_logger`` for a service."""
    project = os.environ.get(f"{name.upper()}_PROJECT") or getattr(args, "project", "huggingface")
    entries: dict[str, dict[str, Any]] = {
        "wandb": {"project": project, "name": args.run_name},
        "trackio": {"project": project, "name": args.run_name, "space_id": getattr(args, "trackio_space_id", None)},
        "mlflow": {
            "experiment_name": os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default"),
            "run_name": args.run_name,
            "tracking_uri": os.environ.get("MLFLOW_TRACKING_URI"),
        },
        "neptune": {"name": args.run_name},
    }
    return {key: value for key, value in entries[name].items() if value is not None}
