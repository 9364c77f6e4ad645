"""Make one trainer class of a task and a set of add-ons; README.md explains how, and in which order to read it."""
