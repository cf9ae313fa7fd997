"""Megatron-core's expression for the layers with experts: --moe-layer-freq ([0]*3+[1]*58).

Megatron-core evaluates the expression as Python. Here it is parsed, and may contain lists of 0 and 1, +, and * with a
number. This module does not depend on flags.
"""

from __future__ import annotations

import ast

from mega.core.config.sections import MOST_LAYERS


def layers_with_experts(expression: str) -> list[int]:
    """Return 0 for each dense layer and 1 for each layer with experts.

    Errors: ValueError if the expression is not such a list, or is implausibly long.

    >>> layers_with_experts("([0]*2+[1]*3)"), layers_with_experts("[0,1]*2")
    ([0, 0, 1, 1, 1], [0, 1, 0, 1])
    """
    try:
        layers = _evaluated(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("is not an expression") from None
    if not isinstance(layers, list) or not layers:
        raise ValueError("is not a list")
    return layers


def _evaluated(node: ast.expr) -> list[int] | int:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            numbers = [_evaluated(item) for item in items]
            if all(number in (0, 1) for number in numbers):
                return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            return _combined(_evaluated(left), _evaluated(right), isinstance(operator, ast.Add))
    raise ValueError("is not a list of 0 and 1")


def _combined(left: list[int] | int, right: list[int] | int, add: bool) -> list[int]:
    if isinstance(left, int):
        left, right = right, left
    if isinstance(left, int) or isinstance(right, list) != add:
        raise ValueError("is not a list of 0 and 1")
    if isinstance(right, list):
        return left + right
    if len(left) * right > MOST_LAYERS:
        raise ValueError(f"has more than {MOST_LAYERS} layers")
    return left * right
