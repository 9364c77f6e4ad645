"""Combine add-ons and a task into one trainer class.

`metaclass` arranges, names and caches the classes; `introspect` reads hooks, slots and add-ons off a class;
`class_checks` and `collisions` refuse classes that break the contract; `options` checks the arguments of a
call; `foreign_names` knows what other trainers call the same thing.
"""
