"""mega: large transformers trained on any tensor x pipeline x data layout, from a laptop to a cluster."""

__version__ = "0.1.0"

COMPLETE_VARIABLE = "_MEGA_COMPLETE"
"""Environment variable by which a shell asks `mega` for completions instead of a run."""
