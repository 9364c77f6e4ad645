"""Make one trainer class of a task and a set of add-ons.

README.md explains how, and names the modules in the order to read them.
"""
