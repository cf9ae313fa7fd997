"""Saving the state of a run to disk and to the memory of hosts, and resuming from it.

place     the directory, used by one run at a time
saver     the content of a checkpoint, and saving it at once or in the background
proving   verdicts on saved steps: good or suspect
memory    copies in the memory of hosts, from which restarted ranks resume
resume    the checkpoint from which a run starts, and restoring the state from it
rollback  restoring an earlier state during a run
"""
