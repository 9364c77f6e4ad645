"""Draw the tree of the runs in a folder: which started from which, and what differs."""
