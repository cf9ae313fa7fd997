"""The verbs of `mega`, one module per verb. A verb converts its options to one call of a function in mega/core or
mega/api.

A verb's module defines the flags and prints the results, and contains no other logic.
"""
