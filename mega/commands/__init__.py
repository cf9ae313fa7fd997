"""The verbs of `mega`, one file each: a verb turns its options into one call to the core.

A file defines the flags of its verb and prints the results; the core does the work.
"""
