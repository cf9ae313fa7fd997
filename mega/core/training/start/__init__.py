"""The work before the first step: all checks of flags, of files, and of differences between ranks.

inputs         checks and resolves a run once, and opens its tokenizer and data
consistency    the values that ranks compare
equal          the values that must be equal on all ranks, and on all hosts of a run
continuation   checks and messages about the checkpoint from which a run starts
introduce      messages to the user before the first step
untrained      a warning about control tokens that the base of adapters was never trained on
rank           the start of a run on one rank
dry_run        checks a run in any layout, and compares it with the checkpoint, without starting ranks
"""
