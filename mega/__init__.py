"""mega: large transformers trained on any tensor x pipeline x data layout, from a laptop to a cluster.

cli, options, argv   the command line: its verbs, options of sections as parameters, and Megatron-LM's spellings
commands             one file a verb
core                 all that they do
legacy               what users bring from other programs
"""

__version__ = "0.1.0"

COMPLETE_VARIABLE = "_MEGA_COMPLETE"
"""Environment variable by which a shell asks `mega` for completions instead of a run."""
