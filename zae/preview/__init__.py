"""What a run is going to do, without doing it.

`explain` shows the effective loop. `preview` counts steps, simulates schedules and tries a batch on copies (`dry_run`);
`plan` is the page of what it found.
"""
