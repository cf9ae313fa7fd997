"""Translate command lines, launchers, shell scripts and DeepSpeed files of other programs to mega.

flags        flags of Megatron-LM and its forks that have no option here: dropped or refused, with a reason; flags.toml
programs     the subcommand and the options that a program's name implies; programs.toml
lines        translates a command line; launchers: how ranks are started; rewrites: special rules for single programs
translation  the result of a translation, as text
scripts      the command lines of a shell script; nothing is executed
tables       the TOML files
deepspeed    a DeepSpeed JSON as options of a run; deepspeed.toml

Only the command line imports this package. Megatron-LM's spelling of an option that mega has is a property of that
option, in core/config/sections.py.
"""
