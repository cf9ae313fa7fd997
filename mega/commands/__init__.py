"""The verbs of `mega`, one file each: a verb turns its options into one call to the core.

A file knows the flags of its verb and where results are printed; the core does the work.
"""
