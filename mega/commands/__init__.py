"""The subcommands of `mega`, one module per subcommand. A subcommand converts its options to one call of a function in
mega/core or mega/api.

A subcommand's module defines the flags and prints the results, and contains no other logic.
"""
