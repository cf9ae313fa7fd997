"""Save the state of a run to disk and to the memory of hosts, and resume a run from a saved state.

place     the directory of --save, used by one run at a time
saver     the content of a checkpoint, saved immediately or in the background
proving   verdicts on saved steps: good or suspect
memory    copies in the memory of hosts, from which restarted ranks resume
resume    the checkpoint from which a run starts, and restoring the run's state
rounding  what changes the order of sums in a run that resumes
rollback  restoring an earlier state during a run
"""
