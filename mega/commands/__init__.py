"""One file a verb of `mega`: what its sections say becomes one call into the core, and its errors one line.

A verb's file knows flags and where an answer goes; what it does stands in the core.
"""
