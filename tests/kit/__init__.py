"""Tools of the tests: data, loops by hand, oracles, tables, faults on purpose, and tasks for ranks."""
