"""Mistakes with DeepSpeed, Accelerate, sequences and pipelines; all are refused before a rank is started."""

from __future__ import annotations

import torch

import zae
from kit.mistakes import Task, loader, mistake, mistakes, trainer_of
from zae.addons import (
    AccelerateAddon,
    AMPAddon,
    DeepSpeedAddon,
    EMAAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    PEFTAddon,
    PipelineAddon,
)

TWO = {"device": ["cpu", "cpu"]}


def deepspeed(config=None, *add_ons, **options):
    cls = Task.add_on(DeepSpeedAddon, *add_ons)
    return trainer_of(cls, deepspeed_config=config, **{**TWO, **options})


def accelerate(*add_ons, device="cpu", **arguments):
    return trainer_of(Task.add_on(AccelerateAddon, *add_ons), device=device, accelerator_args=arguments)


# ------------------------------------------------------------------------------------------------------- DeepSpeed


mistakes({
    "stage_that_deepspeed_does_not_have": (zae.ConfigError, lambda: deepspeed(zero_stage=4),
        "zero_stage=4; it must be", "0, 1, 2 or 3"),
    "autocast_beside_deepspeed": (zae.AddOnConflict, lambda: deepspeed(None, AMPAddon),
        "DeepSpeedAddon and AMPAddon do not go together: DeepSpeed computes in the",
        "leave AMPAddon out, and write deepspeed_bf16=True"),
    "two_engines": (zae.AddOnConflict, lambda: Task.add_on(DeepSpeedAddon, MultiGPUAddon),
        "DeepSpeedAddon and MultiGPUAddon both fill the slot 'parallel'", "keep one"),
    "misspelt_entry_of_deepspeed": (zae.ConfigError, lambda: deepspeed({"zero_optimization": {"stge": 2}}),
        "zero_optimization.stge is not used with DeepSpeedAddon", "did you mean 'stage'?"),
    "configuration_that_does_not_exist": (zae.ConfigError, lambda: deepspeed("ds_config.json"),
        "deepspeed_config='ds_config.json' cannot be read as a JSON file ([Errno 2]",
        "give the path of a configuration, or a dict"),
    "two_stages": (zae.ConfigError, lambda: deepspeed({"zero_optimization": {"stage": 3}}, zero_stage=2),
        "deepspeed_config has zero_optimization.stage=3, and the trainer",
        "write 'auto' there, or leave the option out"),
    "two_clips": (zae.ConfigError, lambda: deepspeed({"gradient_clipping": 1.0}, gradient_clip=0.5).plan(1, loader()),
        "deepspeed_config has gradient_clipping=1.0, and the trainer", "write 'auto' there, or the same in both"),
    "two_batch_sizes": (zae.ConfigError,
        lambda: deepspeed({"train_micro_batch_size_per_gpu": 16}).wrap_loader(loader(), True),
        "deepspeed_config has train_micro_batch_size_per_gpu=16, and the trainer",
        "write 'auto' there, or the same in both"),
    "float16_of_deepspeed": (zae.ConfigError, lambda: deepspeed({"fp16": {"enabled": True}}),
        "deepspeed_config: fp16 is not used with DeepSpeedAddon",
        "write 'bf16': {'enabled': true}, which needs no loss scale"),
    "offloading_of_deepspeed": (zae.ConfigError,
        lambda: deepspeed({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}),
        "deepspeed_config: zero_optimization.offload_param is not used with",
        "leave it out, or train with FSDPAddon, cpu_offload=True"),
    "scheduler_of_deepspeed": (zae.ConfigError, lambda: deepspeed({"scheduler": {"type": "WarmupLR"}}),
        "deepspeed_config: scheduler is not used with DeepSpeedAddon",
        "give the trainer a scheduler: scheduler=zae.schedulers.cosine(warmup=...)"),
    "optimizer_of_deepspeed": (zae.ConfigError,
        lambda: deepspeed({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}),
        "deepspeed_config: optimizer is not used with DeepSpeedAddon",
        "give the trainer an optimizer: optimizer=torch.optim.AdamW(model.parameters()"),
    "several_optimizers_with_deepspeed": (zae.ConfigError,
        lambda: deepspeed(optimizer=[torch.optim.SGD, torch.optim.SGD]),
        "DeepSpeed steps one optimizer, and the trainer has several",
        "give one with several groups, or train with MultiGPUAddon"),
    "average_in_stage_three": (zae.ConfigError, lambda: deepspeed(None, EMAAddon, zero_stage=3),
        "EMAAddon averages the weights that the model has, which are parts in stage",
        "write zero_stage=2 without deepspeed_bf16, or train with FSDPAddon"),
    "bfloat16_of_deepspeed_in_one_process": (zae.ConfigError, lambda: deepspeed(device="cpu", deepspeed_bf16=True),
        "deepspeed_bf16=True is the precision of several ranks, and one process",
        "give a list of devices, or train it with AMPAddon, precision='bf16'"),
    "bfloat16_in_stage_zero": (zae.ConfigError, lambda: deepspeed(zero_stage=0, deepspeed_bf16=True),
        "zero_stage=0 has no float32 weights beside those in bfloat16", "write zero_stage=1"),
    "float64_with_deepspeed": (zae.ConfigError,
        lambda: deepspeed(model=torch.nn.Linear(4, 2).double()).plan(1, loader()),
        "weight, bias is float64, and DeepSpeed steps weights in float32",
        "write model.float(), with deepspeed_bf16=True to compute in bfloat16, or train"),
})  # fmt: skip


# ------------------------------------------------------------------------------------------------------ Accelerate


mistakes({
    "misspelt_argument_of_an_accelerator": (zae.ConfigError, lambda: accelerate(mixed_precison="bf16"),
        "accelerator_args has 'mixed_precison', which Accelerator does not take", "did you mean 'mixed_precision'?"),
    "accumulation_of_an_accelerator": (zae.ConfigError,
        lambda: accelerate(GradientAccumulationAddon, gradient_accumulation_steps=4),
        "the Accelerator has gradient_accumulation_steps=4, which AccelerateAddon does",
        "leave it out, also of the configuration of accelerate launch, and write"),
    "float16_of_an_accelerator": (zae.ConfigError, lambda: accelerate(mixed_precision="fp16"),
        "the Accelerator has mixed_precision='fp16'; AccelerateAddon uses 'no', and",
        "Write mixed_precision='no' there, and Task.add_on(AccelerateAddon, AMPAddon)"),
    "two_autocasts": (zae.ConfigError, lambda: accelerate(AMPAddon, mixed_precision="bf16"),
        "AccelerateAddon uses 'no', and without AMPAddon 'bf16'", "Write mixed_precision='no' there"),
    "batches_that_an_accelerator_splits": (zae.ConfigError, lambda: accelerate(split_batches=True),
        "the Accelerator has split_batches=True, which AccelerateAddon does not use",
        "divide the batch_size of the loader by the number of ranks"),
    "sharding_of_an_accelerator": (zae.ConfigError, lambda: accelerate(fsdp_plugin="plugin"),
        "the Accelerator has fsdp_plugin='plugin', which AccelerateAddon does not use",
        "leave it out, also of the configuration of accelerate launch, and train with"),
})  # fmt: skip


@mistake(
    zae.ConfigError,
    "an Accelerator belongs to the process that has made it, and device is a",
    "Write accelerator_args={...}, or start the script with torchrun or accelerate",
)
def accelerator_for_several_devices():
    from accelerate import Accelerator

    trainer_of(Task.add_on(AccelerateAddon), accelerator=Accelerator(cpu=True), **TWO)


@mistake(
    zae.ConfigError,
    "the loader is a DataLoaderShard, which accelerator.prepare has made, and",
    "give run the DataLoader itself",
)
def loader_that_accelerate_has_prepared():
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(loader())
    accelerate().run(1, prepared)


# ------------------------------------------------------------------------------------------------------- pipelines


def pipeline(*add_ons, model=None, **options):
    made = model or torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return trainer_of(Task.add_on(PipelineAddon, *add_ons), model=made, **{**TWO, **options})


class Reads(torch.nn.Sequential):
    """Look at values to decide."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Keeps(torch.nn.Sequential):
    """Keep a part of the loss on the model."""

    def forward(self, x):
        x = self[0](x)
        self.penalty = x.square().mean()
        return self[1](x)


def layers(kind=torch.nn.Sequential):
    return kind(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


mistakes({
    "misspelt_schedule": (zae.ConfigError, lambda: pipeline(pipeline_schedule="1FB1"),
        "pipeline_schedule='1FB1' is not known; available: GPipe, 1F1B", "did you mean '1F1B'?"),
    "stage_that_the_model_does_not_have": (zae.ConfigError, lambda: pipeline(split=["layers.4"]).plan(1, loader()),
        "split: Sequential has no module 'layers.4'; its modules are 0, 1, 2", "write one of these paths"),
})  # fmt: skip


@mistake(zae.ConfigError, "split=['2', '1', '3'] is not in the order of the calls", "write split=['1', '2', '3']")
def stages_in_the_wrong_order():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    pipeline(model=model, split=["2", "1", "3"], pipeline_schedule="LoopedBFS").plan(1, loader())


mistakes({
    "more_stages_than_the_schedule_computes": (zae.ConfigError, lambda: pipeline(split=4).plan(1, loader()),
        "split=4 on 2 ranks gives 2 stages to each rank, and the schedule 1F1B",
        "write pipeline_schedule='Interleaved1F1B', or divide the model into 1 stage for"),
    "more_stages_than_layers": (zae.ConfigError,
        lambda: pipeline(split=8, pipeline_schedule="Interleaved1F1B").plan(1, loader()),
        "modules with which a stage could begin", "use fewer ranks or stages_per_rank, or name deeper modules"),
    "batch_that_the_micro_batches_do_not_divide": (zae.ConfigError,
        lambda: pipeline(pipeline_microbatches=3).wrap_loader(loader(), True),
        "a batch of 8 samples cannot be divided into pipeline_microbatches=3",
        "write batch_size=9 in the DataLoader, or another number of micro-batches"),
    "too_few_micro_batches": (zae.ConfigError, lambda: pipeline(pipeline_microbatches=1).plan(1, loader()),
        "pipeline_schedule=1F1B with pipeline_microbatches=1: Number of",
        "or write a multiple of the number of stages"),
})  # fmt: skip


@mistake(
    zae.ConfigError,
    "0.weight (stage 0) and 2.weight (stage 1) are one parameter, and a",
    "give each its own, or train with FSDPAddon",
)
def tied_weights_in_two_stages():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    pipeline(model=model, split=["1"]).plan(1, loader())


@mistake(
    zae.ConfigError,
    "1 is a batch normalization, whose statistics would be those of",
    "use GroupNorm or LayerNorm, call eval() of it before run(), or train with",
)
def batch_normalization_in_micro_batches():
    pipeline(model=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))).plan(
        1, loader()
    )


mistakes({
    "forward_that_looks_at_values": (zae.ConfigError,
        lambda: pipeline(model=layers(Reads), split=["1"]).plan(1, loader()),
        "split: the forward of Reads cannot be divided (mistakes_in_engines.py, line",
        "give split=a function of the model"),
    "forward_that_keeps_a_loss_on_the_model": (zae.ConfigError,
        lambda: pipeline(model=layers(Keeps), split=["1"]).plan(1, loader()),
        "split: the forward of Keeps cannot be divided (mistakes_in_engines.py, line",
        "Put other computation into a module"),
    "one_rank_for_the_stages": (zae.ConfigError,
        lambda: pipeline(mesh={"replicate": 2, "pipeline": 1}).plan(1, loader()),
        "mesh={'pipeline': 1, 'replicate': 2} leaves 1 rank for the stages",
        "write mesh={'pipeline': 2}, or leave PipelineAddon out"),
    "adapters_in_a_pipeline": (zae.AddOnConflict, lambda: pipeline(PEFTAddon),
        "PipelineAddon and PEFTAddon do not go together: it compares frozen",
        "leave PipelineAddon out, and train adapters with FSDPAddon"),
    "several_optimizers_in_a_pipeline": (zae.ConfigError,
        lambda: pipeline(optimizer=[torch.optim.SGD, torch.optim.SGD]),
        "a pipeline differentiates one loss by all parameters, and the trainer has",
        "give one with several groups, or train with MultiGPUAddon"),
})  # fmt: skip
