"""A command line as options: how it is read, what its flags are, and how lines of other programs are translated.

options   a config section becomes a panel of flags
help      --help as plain text: options by panel, and worked examples
legacy    command lines, shell scripts and DeepSpeed files of other programs, as ours
argv      spellings, unique prefixes, several values of one flag: argparse's habits, for Typer
examples  worked examples of every verb
"""
