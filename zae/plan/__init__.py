"""Preview a run: its steps and schedules, what it saves, and the memory that it takes."""
