"""`mega presets`: list the models that --model accepts, with their shapes, parameters and memory."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from mega.core.config.presets import PRESETS
from mega.core.terminal import print_whole

WEIGHTS, TRAINING = 2, 18
"""Bytes per parameter: for bf16 weights alone, and for bf16 weights, fp32 gradients, fp32 master weights and Adam's two
moments."""

HEAD = ["preset", "family", "layers", "hidden", "heads", "seq", "vocab", "size", "weights", "training"]

SMALL_VOCABULARY = 1024
"""Vocabulary size assumed for presets whose vocabulary size depends on the tokenizer."""


def run(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="only presets whose names begin with NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print numbers as JSON instead of a table")] = False,
) -> int:
    """List the presets of --model with their shapes, parameters and memory.

    Memory is given in GiB for bf16 weights, and for training, which adds fp32 gradients, master weights and moments.
    --tp, --pp and --zero divide the memory over ranks. Activations are not included; mega memory-estimate --model NAME
    includes them.
    """
    from mega.core.config.compose import nearest

    selected = [name for name in PRESETS if not names or any(name.startswith(word) for word in names)]
    for word in names or ():
        if not any(name.startswith(word) for name in PRESETS):
            raise ValueError(f"NAME {word}: no preset begins so{nearest(word, PRESETS)}; mega presets lists all")
    if as_json:
        print_whole(json.dumps([_numbers(name) for name in selected], indent=2) + "\n")
        return 0
    rows = [HEAD, *(_row(name) for name in selected)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, family, *numbers in rows:
        aligned = (number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True))
        print(name.ljust(widths[0]), family.ljust(widths[1]), *aligned)
    print("GiB: weights in bf16; training with fp32 gradients, masters and moments too", file=sys.stderr)
    return 0


def _numbers(name: str) -> dict[str, str | int | list[int] | None]:
    """Return a preset's shape, the bytes of its bf16 weights, and the bytes needed for training."""
    from mega.core.architecture import architecture, parameters
    from mega.core.config.compose import compose
    from mega.core.config.resolve import model_alone

    run = compose(name)
    options = model_alone(run, SMALL_VOCABULARY)
    model, count = architecture(options), parameters(options)
    attention = model.block.attention
    return {
        "name": name,
        "family": model.family,
        "layers": [len(stack.layers) for stack in model.stacks],
        "hidden": model.hidden,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "seq_length": run.batch.seq_length,
        "vocab": run.model.vocab,
        "parameters": count,
        "weights_bytes": count * WEIGHTS,
        "training_bytes": count * TRAINING,
    }


def _row(name: str) -> list[str]:
    """Return the cells of a preset's row in the table."""
    from mega.core.words import count_words

    preset = _numbers(name)
    grouped = preset["kv_heads"] != preset["heads"]
    heads = f"{preset['heads']}/{preset['kv_heads']}" if grouped else str(preset["heads"])
    layers, count = preset["layers"], preset["parameters"]
    assert isinstance(layers, list) and isinstance(count, int)
    sizes = ["+".join(map(str, layers)), str(preset["hidden"]), heads]
    sizes += [str(preset["seq_length"]), str(preset["vocab"] or "any")]
    return [
        name,
        str(preset["family"]),
        *sizes,
        count_words(count),
        *(_gib(count * each) for each in (WEIGHTS, TRAINING)),
    ]


def _gib(count: int) -> str:
    """
    >>> _gib(2**31), _gib(10**6), _gib(18 * 10**12)
    ('2.0', '0.001', '16764')
    """
    size = count / 2**30
    return f"{size:.3f}" if size < 0.1 else f"{size:.1f}" if size < 1000 else f"{size:.0f}"
