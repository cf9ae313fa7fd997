"""What of a run outlives its processes, on disk and in hosts' memory, and how the run resumes from it.

place     the directory, held by one run at a time
saver     what is kept of a run's state, and how it gets there
proving   whether a saved step is any good
memory    copies in the hosts' memory, from which ranks that start again resume
resume    which checkpoint a run starts from, and how its state is filled
rollback  the same in the middle of a run
"""
