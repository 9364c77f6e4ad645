"""Silent faults: compute steps twice and compare."""
