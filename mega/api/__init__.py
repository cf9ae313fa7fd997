"""The Python interface, `import mega`. Its names are listed in mega/__init__.py and in docs/python.md.

config        the options of a run, from a preset, a TOML file and keywords
training      pretrain, finetune: whole runs; also the beginning of `mega pretrain` and `mega finetune`
ids           checks token ids from the caller
trainer       a run in steps, for your own training loops and losses
model         load: a trained model that generates, chats and scores
evaluation    evaluate: scores a model on a benchmark
conversion    convert: converts checkpoints and weights between formats
estimation    estimate: memory and step time of a run, as `mega memory-estimate` prints them
ranks         launch: runs a function on several local ranks

Functions take a configuration and return a result. A mistake raises ValueError with the line that the command line
would print. Nothing is printed without `verbose=True`. A module is imported when one of its names is first used, so
`import mega` does not load torch. No state is kept between calls, so a process may hold several models.
"""
