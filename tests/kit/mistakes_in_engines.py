"""Mistakes with DeepSpeed, Accelerate, sequences and pipelines; all are refused before a rank is started."""

from __future__ import annotations

import torch

from kit.mistakes import Task, loader, mistake, trainer_of
from zae.addons import (
    AccelerateAddon,
    AMPAddon,
    CompileAddon,
    ContextParallelAddon,
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


@mistake
def stage_that_deepspeed_does_not_have():
    deepspeed(zero_stage=4)


@mistake
def autocast_beside_deepspeed():
    deepspeed(None, AMPAddon)


@mistake
def two_engines():
    Task.add_on(DeepSpeedAddon, MultiGPUAddon)


@mistake
def misspelt_entry_of_deepspeed():
    deepspeed({"zero_optimization": {"stge": 2}})


@mistake
def configuration_that_does_not_exist():
    deepspeed("ds_config.json")


@mistake
def two_stages():
    deepspeed({"zero_optimization": {"stage": 3}}, zero_stage=2)


@mistake
def two_clips():
    deepspeed({"gradient_clipping": 1.0}, gradient_clip=0.5).plan(1, loader())


@mistake
def two_batch_sizes():
    deepspeed({"train_micro_batch_size_per_gpu": 16}).wrap_loader(loader(), True)


@mistake
def float16_of_deepspeed():
    deepspeed({"fp16": {"enabled": True}})


@mistake
def offloading_of_deepspeed():
    deepspeed({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})


@mistake
def scheduler_of_deepspeed():
    deepspeed({"scheduler": {"type": "WarmupLR"}})


@mistake
def optimizer_that_deepspeed_would_compile():
    deepspeed({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, optimizer=None)


@mistake
def several_optimizers_with_deepspeed():
    deepspeed(optimizer=[torch.optim.SGD, torch.optim.SGD])


@mistake
def average_in_stage_three():
    deepspeed(None, EMAAddon, zero_stage=3)


@mistake
def bfloat16_of_deepspeed_in_one_process():
    deepspeed(device="cpu", deepspeed_bf16=True)


@mistake
def bfloat16_in_stage_zero():
    deepspeed(zero_stage=0, deepspeed_bf16=True)


@mistake
def float64_with_deepspeed():
    deepspeed(model=torch.nn.Linear(4, 2).double()).plan(1, loader())


# ------------------------------------------------------------------------------------------------------ Accelerate


@mistake
def misspelt_argument_of_an_accelerator():
    accelerate(mixed_precison="bf16")


@mistake
def accumulation_of_an_accelerator():
    accelerate(GradientAccumulationAddon, gradient_accumulation_steps=4)


@mistake
def float16_of_an_accelerator():
    accelerate(mixed_precision="fp16")


@mistake
def two_autocasts():
    accelerate(AMPAddon, mixed_precision="bf16")


@mistake
def batches_that_an_accelerator_splits():
    accelerate(split_batches=True)


@mistake
def sharding_of_an_accelerator():
    accelerate(fsdp_plugin="plugin")


@mistake
def accelerator_for_several_devices():
    from accelerate import Accelerator

    trainer_of(Task.add_on(AccelerateAddon), accelerator=Accelerator(cpu=True), **TWO)


@mistake
def loader_that_accelerate_has_prepared():
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(loader())
    accelerate().run(1, prepared)


# ------------------------------------------------------------------------------------------------------- sequences


@mistake
def sequence_of_an_input_that_the_model_does_not_have():
    trainer_of(Task.add_on(ContextParallelAddon), context_inputs={"tokens": 1}, **TWO)


@mistake
def ring_on_a_cpu():
    trainer_of(Task.add_on(ContextParallelAddon), context_attention="ring", **TWO)


@mistake
def compiled_attention_over_ranks():
    Task.add_on(ContextParallelAddon, CompileAddon)


@mistake
def no_ranks_left_for_a_sequence():
    trainer_of(Task.add_on(MultiGPUAddon, ContextParallelAddon), **TWO).plan(1, loader())


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


@mistake
def misspelt_schedule():
    pipeline(pipeline_schedule="1FB1")


@mistake
def stage_that_the_model_does_not_have():
    pipeline(split=["layers.4"]).plan(1, loader())


@mistake
def stages_in_the_wrong_order():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    pipeline(model=model, split=["2", "1", "3"], pipeline_schedule="LoopedBFS").plan(1, loader())


@mistake
def more_stages_than_the_schedule_computes():
    pipeline(split=4).plan(1, loader())


@mistake
def more_stages_than_layers():
    pipeline(split=8, pipeline_schedule="Interleaved1F1B").plan(1, loader())


@mistake
def batch_that_the_micro_batches_do_not_divide():
    pipeline(pipeline_microbatches=3).wrap_loader(loader(), True)


@mistake
def too_few_micro_batches():
    pipeline(pipeline_microbatches=1).plan(1, loader())


@mistake
def tied_weights_in_two_stages():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    pipeline(model=model, split=["1"]).plan(1, loader())


@mistake
def batch_normalization_in_micro_batches():
    pipeline(model=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))).plan(
        1, loader()
    )


@mistake
def forward_that_looks_at_values():
    pipeline(model=layers(Reads), split=["1"]).plan(1, loader())


@mistake
def forward_that_keeps_a_loss_on_the_model():
    pipeline(model=layers(Keeps), split=["1"]).plan(1, loader())


@mistake
def example_of_another_shape():
    pipeline(pipeline_example=torch.ones(2, 3)).plan(1, loader())


@mistake
def one_rank_for_the_stages():
    pipeline(mesh={"replicate": 2, "pipeline": 1}).plan(1, loader())


@mistake
def adapters_in_a_pipeline():
    pipeline(PEFTAddon)


@mistake
def several_optimizers_in_a_pipeline():
    pipeline(optimizer=[torch.optim.SGD, torch.optim.SGD])
