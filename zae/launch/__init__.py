"""Start and connect the processes of the ranks.

`spawn` starts and watches them, or joins those of torchrun; `rank_process` is the life of one; `transfer`
pickles what goes between them; `ddp` wraps the model.
"""
