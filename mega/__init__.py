"""mega: large transformers trained on any tensor x pipeline x data layout, from a laptop to a cluster.

cli             the `mega` command: its verbs, each loaded when it is called, and how a process ends
command_line    how a line of words is read: our options, and the command lines of other programs
commands        one file a verb
core            what the verbs do
"""

__version__ = "0.1.0"

COMPLETE_VARIABLE = "_MEGA_COMPLETE"
"""Environment variable by which a shell asks `mega` for completions instead of a run."""
