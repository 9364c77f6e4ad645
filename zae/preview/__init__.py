"""What a run is going to do, without doing it.

`explain` shows the effective loop; `plan` counts steps and simulates the schedule; `dry_run` tries on copies.
"""
