"""What every package may use: devices, random streams, optimizers, and checks of arguments.

`device` moves batches; `random_state` seeds, captures and restores; `optim` checks and steps optimizers;
`argument_checks` words the errors of arguments; `contexts` is the context that does nothing; `lazy`
imports names when they are first asked for; `moved` keeps the old names of modules.
"""
