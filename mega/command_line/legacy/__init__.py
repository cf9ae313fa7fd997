"""What users bring from other programs: command lines, launchers, shell scripts and DeepSpeed's files, as ours.

flags        flags of Megatron-LM and its forks that are no options here: dropped or refused, with a reason; flags.toml
programs     what a program's name stands for; programs.toml
lines        a command line, put together from both; launchers: its start; rewrites: what single programs need besides
translation  what a line becomes, as text
scripts      the command lines of a shell script; nothing is executed
tables       the TOML files
deepspeed    a DeepSpeed JSON as options of a run; deepspeed.toml

Only the command line imports this package. A spelling of an option that exists here is a property of that option, in
core/config/sections.py.
"""
