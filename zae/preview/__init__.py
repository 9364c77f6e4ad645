"""Show what a run will do, without training.

`explain` shows the effective loop. `preview` counts steps, simulates schedules and tries a batch on copies (`dry_run`);
`plan` is the page of what it found.
"""
