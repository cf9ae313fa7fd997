"""The Python interface: what `import mega` gives. The names are listed in mega/__init__.py and in docs/python.md.

config        the options of a run, from a preset, a TOML file and keywords
training      pretrain, finetune: whole runs. `mega pretrain` and `mega finetune` begin here too
ids           the check of token ids that a caller gives
trainer       a run in steps, for loops and losses of your own
model         load: a trained model that generates, converses and scores
evaluation    evaluate: the score of a model on a benchmark
conversion    convert: checkpoints and weights of other forms into one another
estimation    estimate: memory and step time of a run; `mega memory-estimate` prints it
ranks         launch: a function on several local ranks

Configuration goes in and results come out. A mistake is a ValueError with the one line that the command line prints;
nothing is printed unless `verbose` asks for it. A module is imported when one of its names is used: `import mega` loads
no torch. No state is kept between calls, so that a process may hold several models.
"""
