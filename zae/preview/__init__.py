"""Show what a run will do, without training.

`explain` shows the effective loop. `preview` counts steps and simulates schedules; `plan` is the page of what it found.
"""
