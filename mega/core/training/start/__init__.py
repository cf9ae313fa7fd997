"""Before the first step: everything that can fail because of flags, of what is on disk, or because ranks differ.

inputs         a run checked and resolved once, its tokenizer and its data
consistency    what ranks must agree on
equal          of that, what hosts that join a run must have too
introduce      what the user reads before the first step
rank           one rank's start, put together of these
dry_run        a trial of any layout, without ranks
"""
