"""Run to a step of a run again, bitwise, and show what happens in it."""
