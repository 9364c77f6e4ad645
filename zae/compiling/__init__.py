"""The parts of CompileAddon.

`compiler` holds the settings of torch.compile; `graphs` decides what a graph can contain; `fused` puts the whole step
into one graph; `kernels` switches optimizers to their fused kernels; `benchmark` finds the fastest way to make a step.
"""
