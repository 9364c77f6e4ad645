"""Check and measure zae on a machine with a GPU; `.ci/gpu` runs it.

Each section is a file with a function `run(report)`. The folder `tests` must be in PYTHONPATH: what is trained, and the
loop by hand, are those of the tests on an emulated device.
"""
