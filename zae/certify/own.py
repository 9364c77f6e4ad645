"""What zae promises of its own trainers beyond a resume."""

PROMISES: dict = {}
