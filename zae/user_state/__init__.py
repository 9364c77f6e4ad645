"""What training changes in the objects of the user: which values there are, which have changed, and the way back.

`owners` walks the objects, `values` has one table of the kinds of values, and `changes` notes what has changed, writes
it into a state and puts it back. The trainer's own objects are walked by `zae.loop.user_state`, those of a loader by
`zae.data.loader_values`.
"""
