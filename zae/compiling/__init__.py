"""What CompileAddon is made of.

`compiler` holds the settings of torch.compile; `graphs` says what a graph covers; `fused` puts the whole step into one
graph; `kernels` switches optimizers to their fused kernels; `benchmark` finds the fastest way to make a step.
"""
