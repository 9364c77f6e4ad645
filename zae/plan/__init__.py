"""Preview a run: its steps, schedules and validations, and when it saves."""
