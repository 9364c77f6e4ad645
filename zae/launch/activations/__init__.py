"""What modules save for the backward: computed again in it, or kept in the memory of the host."""
