"""The loop: state, one step, and what falls due between steps. It knows no family.

inputs, start, wire       a run resolved once, and what a rank makes of it
place, resume             where it saves, and where it goes on from
consistency, dry_run      what ranks must agree on, and a trial without any
state, step, loop         what a run is at a moment, one update, and all of them
routines                  what is due between steps: audit, evaluation, sampling, saver
schedules                 rates of a run that resumes
kinds, task_kind, task    what is trained on, by --task: pretraining, dpo, labelled
finite, proving           numbers that a checkpoint may keep, and saved steps on trial
stop, notice              requests to end early, and what one who asks is told
introduce, meters, trackers, exporter, output   what the user reads, before, during and elsewhere
lr_find                   the highest usable rate
"""
