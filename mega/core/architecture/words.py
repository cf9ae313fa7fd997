"""A model's shape and its size in words, for those who look at a run, a preset or a checkpoint. No tensor is listed."""

from __future__ import annotations

from mega.core.config.sections import ModelConfig


def shape_words(model: ModelConfig) -> str:
    """What a resolved model is.

    >>> shape_words(ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn=256, vocab=512))
    'gpt, 2 layers, hidden 64, 4 heads (2 of keys and values), ffn 256, vocabulary 512'
    """
    shared = "" if model.kv_heads in (None, model.heads) else f" ({model.kv_heads} of keys and values)"
    parts = [model.family, f"{' + '.join(map(str, model.stacks))} layers", f"hidden {model.hidden}"]
    parts += [f"{model.heads} heads{shared}"]
    parts += [f"ffn {model.ffn}"] if model.ffn is not None else []
    parts += [f"vocabulary {model.vocab:,}"] if model.vocab is not None else []
    return ", ".join(parts)


def count_words(count: float) -> str:
    """A large number with a letter.

    >>> count_words(124_439_808), count_words(70_000), count_words(950), count_words(1.75e11)
    ('124.4M', '70.0k', '950', '175.0B')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if letter == 'k' else size):.1f}{letter}"
    return f"{count:g}"
