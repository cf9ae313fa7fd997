"""BERT (Devlin et al. 2018), a bidirectional stack with heads for masked words and for rows.

Norms are placed before each branch, as in Megatron-LM's BERT, or after each branch, as in the original BERT. The
original BERT has a norm after the embeddings instead of a norm after the last layer. The output matrix is the embedding
table, with an additional bias.
"""

from __future__ import annotations

from dataclasses import replace

from mega.core.architecture.families import parts
from mega.core.architecture.model import Architecture, Output, Rows, Transform, Words
from mega.core.config.sections import ModelConfig


def bert(options: ModelConfig) -> Architecture:
    """Return BERT's architecture, which has a bidirectional stack and heads for words, for rows or for both."""
    # Without a head for words, the table is not tied, because a stage would wait for the gradient of an unused copy.
    words = None
    if options.head == "lm":
        transform = Transform(activation=options.head_activation, norm=parts.norm(options, "lm_head.norm"))
        words = Words(tied=options.tied, bias=True, transform=transform)
    rows = {
        "classification": Rows(name="classification_head", classes=options.classes, choices=1),
        "choice": Rows(name="multichoice_head", classes=1, choices=options.classes),
        "lm": Rows(name="binary_head", classes=2, choices=1) if options.binary_head else None,
    }.get(options.head)
    stack = parts.stack(options, lambda number: parts.layer(options, causal=False, number=number), options.layers)
    post = options.norm_placement == "post"
    return parts.architecture(
        options,
        input=parts.inputs(options, types=token_types(options), normed=post),
        stacks=(replace(stack, norm=None) if post else stack,),
        output=Output(words=words, pooler=options.binary_head or rows is not None, rows=rows),
    )


def token_types(options: ModelConfig) -> int:
    """Return the number of token types (segments) in the embedding, by default 2 with the binary head, as in
    Megatron-LM."""
    return (2 if options.binary_head else 0) if options.token_types is None else options.token_types
