"""Command lines: how they are read, which flags exist, and how those of other programs are translated.

options          turns a config section into a panel of flags
help             --help as plain text: options by panel, and worked examples
legacy           translates command lines, shell scripts and DeepSpeed files of other programs
argv             spellings, unique prefixes, several values of one flag: argparse's behaviour, for Typer
layer_frequency  the expression of --moe-layer-freq in Megatron-core
examples         worked examples of every subcommand
"""
