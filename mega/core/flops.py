"""Floating-point operations that a model must do.

Matmuls only, a multiply and an add being two operations; norms, softmax and activations are not counted. It knows
no device and no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor, inventory
from mega.core.inventory.t5 import CROSS


@lru_cache(maxsize=16)
def matmul_parameters(model: ModelConfig, trainable: bool = False) -> int:
    """Elements of every tensor but those that are only looked up: the input embedding and the positions.

    A tied embedding counts once, for the head is a product. trainable: of those that are trained only.
    """
    return sum(tensor.elements for tensor in _matmul_tensors(model) if tensor.trainable or not trainable)


def _matmul_tensors(model: ModelConfig) -> Iterator[Tensor]:
    for tensor in inventory(model):
        if "embedding" not in tensor.units or "head" in tensor.units:
            yield tensor


def model_flops_per_token(model: ModelConfig, seq: int, decoder_seq: int = 0) -> float:
    """Operations of one token's forward and backward pass in a sequence of `seq` tokens: 6 N + 4 F + 12 L h s.

    N: `matmul_parameters` that are trained, F: those that are not, which get no gradient; L h: layers x heads x
    head_dim. Attention counts the whole square, although half of it is masked, as the published utilisations do
    (Chowdhery et al. 2022, appendix B). `model` must be resolved. decoder_seq: tokens of the decoder, where `seq` are
    an encoder's: the mean over both.

    >>> from mega.core.config.compose import compose
    >>> from mega.core.config.resolve import resolve
    >>> run = resolve(compose("llama2-7b", flags={"micro_batch": 1}), world=1)
    >>> round(model_flops_per_token(run.model, seq=4096) / 1e9, 2)
    46.09
    """
    assert model.layers and model.heads and model.head_dim, "resolve the model first"
    width = model.heads * model.head_dim
    if model.decoder_layers is None:
        trained = matmul_parameters(model, trainable=True)
        matmuls = 6.0 * trained + 4.0 * (matmul_parameters(model) - trained)
        return matmuls + 12.0 * model.layers * width * seq
    read, written = _by_side(model)
    pairs = model.layers * seq**2 + model.decoder_layers * decoder_seq * (decoder_seq + seq)
    return (read * seq + written * decoder_seq + 12.0 * width * pairs) / (seq + decoder_seq)


@lru_cache(maxsize=16)
def _by_side(model: ModelConfig) -> tuple[float, float]:
    """Operations of a token that an encoder reads, with the keys and values that a decoder makes of it, and of one that
    the decoder writes."""
    assert model.layers
    read = written = 0.0
    for tensor in _matmul_tensors(model):
        unit, operations = tensor.units[-1], (6.0 if tensor.trainable else 4.0) * tensor.elements
        of_memory = f"{CROSS}.k_proj" in tensor.name or f"{CROSS}.v_proj" in tensor.name
        if of_memory or unit == "middle" or (isinstance(unit, int) and unit < model.layers):
            read += operations
        else:
            written += operations
    return read, written
