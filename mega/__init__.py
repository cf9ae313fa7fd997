"""mega: train large transformers on any tensor x pipeline x data layout, from a laptop to a cluster.

cli             the `mega` command: its subcommands, each loaded when it is called, and how a process ends
command_line    reads command lines: mega's options, and the command lines of other programs
commands        one file for each subcommand
api             the Python interface, `import mega`; docs/python.md
core            the implementation of the subcommands
"""

import importlib

__version__ = "0.1.0"

COMPLETE_VARIABLE = "_MEGA_COMPLETE"
"""Environment variable with which a shell requests completions from `mega`."""

_MODULES = {
    "config": "api.config",
    "Options": "core.config.run",
    "pretrain": "api.training",
    "finetune": "api.training",
    "TrainingResult": "core.training.start.rank",
    "Trainer": "api.trainer",
    "StepResult": "api.trainer",
    "Predictions": "core.model.objective",
    "DecoderBatch": "core.batch",
    "load": "api.model",
    "Model": "api.model",
    "evaluate": "api.evaluation",
    "EvaluationResult": "api.evaluation",
    "convert": "api.conversion",
    "estimate": "api.estimation",
    "RunEstimate": "api.estimation",
    "launch": "api.ranks",
}
"""Name of the Python interface -> its module, imported when the name is first used. `__init__.pyi` lists the same names
for type checkers."""

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'mega' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mega.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
