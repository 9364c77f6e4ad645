"""What a run was given, by name: its options, its data, its optimizers and schedules, and the arguments of ``run``.

`zae.record.parts` reads it, one function for each owner, and `zae.record.contents` what its data hold. It is compared
between the ranks, before the first step (`zae.record.between_ranks`); it is in each state and manifest, and a resume
compares it (`zae.record.run_record`).
"""
