"""The Python interface, `import mega`. `mega/__init__.py` and `docs/python.md` list its names.

config        the options of a run, from a preset, a TOML file and keyword arguments
training      pretrain, finetune: complete runs; also the start of `mega pretrain` and `mega finetune`
ids           checks token ids from the caller
trainer       Trainer: for your own training loops and losses
model         load: a trained model, for generating text, chat and scoring
evaluation    evaluate: scores a model on a benchmark
conversion    convert: converts checkpoints and weights between formats
estimation    estimate: memory and step time of a run, as `mega memory-estimate` prints them
ranks         launch: runs a function on several local ranks

Functions take a configuration and return a result. A mistake raises ValueError with the message that the command line
would print. Nothing is printed without `verbose=True`. A module is imported when one of its names is first used, so
`import mega` does not import torch. No state is kept between calls, so a process may use several models.
"""
