"""Pipeline stages, fused matrices and arguments of BERT, T5 and Retro in Megatron-LM checkpoints, where these models
differ from GPT.

Tensor names are the common names of eras.py. Source: Megatron-LM 23.06 to Megatron-core. This module does not read
files, and uses only names and shapes of tensors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from mega.core.architecture import Architecture, Unit, architecture
from mega.core.checkpoint.forms.megatron.eras import TIED_COPY, WORDS, has_two_stacks
from mega.core.checkpoint.own.pieces import CheckpointError, Tensors
from mega.core.config.sections import ModelConfig
from mega.core.plan.layers import split_layers, stage_layers


def pair_rows(part: str, heads: int, width: int, version: int) -> list[range]:
    """Return the rows of a tensor rank's key or value heads in the fused matrix of cross attention.

    part: "k" or "v". heads: number of this rank's heads. width: rows per head. version: the file's checkpoint_version.

        version 0          version 1, by row    versions 2 and 3, by head
        k k k k v v v v    k v k v k v k v      k k v v | k k v v

    >>> pair_rows("v", heads=2, width=3, version=3), pair_rows("v", heads=2, width=3, version=0)
    ([range(3, 6), range(9, 12)], [range(6, 12)])
    """
    position = "kv".index(part)
    if version == 0:  # all keys, then all values
        return [range(position * heads * width, (position + 1) * heads * width)]
    if version == 1:  # components of k and v alternate
        return [range(position, 2 * heads * width, 2)]
    return [range((2 * head + position) * width, (2 * head + position + 1) * width) for head in range(heads)]


# Stages


class Stages(NamedTuple):
    """The pipeline stage of each unit of a model (block, embedding, head, ...) in a Megatron-LM checkpoint."""

    blocks: list[tuple[str, int]]
    """(pipeline stage, index in the stage) of each block. A stage is `pp.chunk`, as in tensor names. T5's decoder
    blocks follow the encoder blocks."""
    end: str
    """The pipeline stage of the model's head."""
    copies: Mapping[str, list[str]]
    """Name of a tensor that the checkpoint stores several times -> `stage/common name` of each additional copy."""

    def place(self, model: Architecture, unit: Unit) -> tuple[str, int | None]:
        """Return (pipeline stage of a unit of the model, index in the stage). The index is None if the unit is not a
        block."""
        if isinstance(unit, int):
            return self.blocks[unit]
        if unit == "middle":  # the encoder's final norm
            return self.blocks[model.stacks[0].numbers[-1]][0], None
        return "0.0" if unit == "embedding" else self.end, None


def stages_of(model: Architecture, blocks: list[tuple[str, int]], end: str, tied: Collection[str] = ()) -> Stages:
    """Return the pipeline stages of a model, given the positions of its blocks. tied: names of the tied embedding's
    copies on the last stage. If `tied` is empty, a last stage that does not embed text is assumed to have a copy."""
    words, positions = "model.embed_tokens.weight", "model.embed_positions.weight"
    # The pipeline stage that embeds the decoder's tokens.
    first = blocks[model.stacks[-1].first][0] if len(model.stacks) > 1 else "0.0"
    tied = tied or ([TIED_COPY] if end not in ("0.0", first) else [])
    copies: dict[str, list[str]] = {words: [f"{end}/{name}" for name in tied if model.tied]}
    if model.output.ahead and end != "0.0":  # multi-token prediction layers need the embedding
        copies[words].append(f"{end}/{WORDS}")
    if first != "0.0":
        copies[words].append(f"{first}/{WORDS}")
        copies[positions] = [f"{first}/embedding.position_embeddings.weight"]
    return Stages(blocks, end, copies)


def written_stages(model: Architecture, pp: int) -> Stages:
    """Return the pipeline stages of a model's units (blocks, embedding, head, ...), for writing a checkpoint with `pp`
    stages.

    Errors: ValueError if the blocks cannot be divided into `pp` stages.
    """
    encoder = len(model.stacks[0].layers)
    stages = [chunks[0] for chunks in stage_layers(len(model.layers), pp, explicit=_sizes(model, pp))]
    blocks = [
        (f"{rank}.0", number - max(numbers[0], encoder * (number >= encoder)))
        for rank, numbers in enumerate(stages)
        for number in numbers
    ]
    return stages_of(model, blocks, f"{pp - 1}.0")


def _sizes(model: Architecture, pp: int) -> tuple[int, ...]:
    """The number of blocks per stage for T5; () for other families. The stages are divided between encoder and decoder
    so that the largest stage has as few blocks as possible."""
    if len(model.stacks) == 1 or pp == 1:
        return ()
    encoder, decoder = (len(stack.layers) for stack in model.stacks)
    divisions = []
    for split in range(1, pp):
        try:
            divisions.append(split_layers(encoder, decoder, pp, split))
        except ValueError:
            continue
    if not divisions:
        depths = f"its {encoder} blocks of the encoder and {decoder} of the decoder"
        raise ValueError(f"--pp {pp}: stages cannot share {depths} equally")
    return min(divisions, key=max)


# Models


def check_written(model: Architecture, to: str, *, distributed: bool) -> None:
    """Check that Megatron-LM's BERT or T5 supports the model. distributed: whether the optimizer state will be written
    in the format of the distributed optimizer. Errors: CheckpointError naming an option that Megatron-LM does not
    support."""
    family = FAMILIES.get(model.family)
    if family is None:
        return
    if to == "torch_dist" or distributed:
        flag = "--saver torch_dist" if to == "torch_dist" else "--use-distributed-optimizer"
        raise CheckpointError(f"{flag}: has no {model.family}, only GPT and Llama; valid: --saver megatron, mcore")
    for flag, value, valid in (("--norm-placement", model.block.norm_placement, "pre"), *family.rules(model)):
        if value != valid:
            raise CheckpointError(f"{flag} {value}: --saver {to} has a {model.family.upper()} with {valid} only")
    if model.output.words is None and model.output.rows is None:
        raise CheckpointError(f"--head none: --saver {to} has a BERT with a head; valid: lm, classification, choice")


def check_retriever(model: ModelConfig, to: str, pp: int, *, state: bool) -> None:
    """Check that Megatron-LM's Retro supports the model. state: whether the optimizer's state will be written. Errors:
    CheckpointError naming an option that Megatron-LM does not support."""
    structure = architecture(model)
    attention, usual = structure.block.attention, dataclasses.replace(model, retro_layers=())
    if to not in ("megatron", "megatron-23.06"):
        raise CheckpointError(f"--saver {to}: has no model with --retriever; valid: megatron, megatron-23.06")
    if state:
        raise CheckpointError(f"--saver {to}: takes the weights of a model with --retriever alone: --no-load-optim")
    for flag, value, valid in (
        ("--pp", pp, 1),
        ("--retro-rope", model.retro_rope and attention.rope is not None, False),
        ("--retro-gate", model.retro_gate, 1.0),
        ("--kv-heads", attention.kv_heads, attention.heads),
        ("--retro-layers", structure.reading, architecture(usual).reading),
    ):
        if value != valid:
            raise CheckpointError(f"{flag} {value}: --saver {to} has a model with --retriever with {valid} only")


RETRIEVER_ARGUMENTS = {
    "retro_chunk_length": "retro_gpt_chunk_length",
    "retro_neighbours": "retro_num_neighbors",
    "retro_retrieved_chunks": "retro_num_retrieved_chunks",
    "retro_encoder_layers": "retro_encoder_layers",
    "retro_encoder_hidden_dropout": "retro_encoder_hidden_dropout",
    "retro_encoder_attention_dropout": "retro_encoder_attention_dropout",
}
"""Option of a retriever -> name of Megatron-LM's argument."""


def retriever_arguments(model: ModelConfig) -> dict[str, object]:
    """Megatron-LM's arguments for a model with a retriever; {} for a model without one."""
    if not model.retriever:
        return {}
    arguments = {argument: getattr(model, option) for option, argument in RETRIEVER_ARGUMENTS.items()}
    return {"retro_add_retriever": True, **arguments}


def family_arguments(model: Architecture, pp: int) -> dict[str, object]:
    """Return the family-specific Megatron arguments for a model on `pp` stages; {} for GPT and Llama."""
    family = FAMILIES.get(model.family)
    return {} if family is None else family.arguments(model, pp)


Rules = Sequence[tuple[str, str, str]]
"""Triples of (flag, its value, the only value that Megatron-LM supports)."""


class MegatronFamily(NamedTuple):
    """The rules and arguments for a family other than GPT and Llama in Megatron-LM checkpoints."""

    rules: Callable[[Architecture], Rules]
    """Returns the flags for which Megatron-LM supports only one value."""
    arguments: Callable[[Architecture, int], dict[str, object]]
    """Returns the family's arguments for a model on the given number of pipeline stages."""


def _bert_rules(model: Architecture) -> Rules:
    words = model.output.words
    if words is None or words.transform is None:
        return []
    types = "2" if model.output.rows else "0"
    return [
        ("--head-activation", words.transform.activation, "gelu"),
        ("--token-types", str(model.input.types), types),
    ]


def _bert_arguments(model: Architecture, pp: int) -> dict[str, object]:
    return {"bert_binary_head": model.input.types > 0}  # in Megatron, this argument also adds token types


def _t5_rules(model: Architecture) -> Rules:
    """Return the rule that there are as many key/value heads as query heads, because Megatron's cross attention does
    not support grouped-query attention."""
    attention = model.block.attention
    return [("--kv-heads", str(attention.kv_heads), str(attention.heads))]


def _t5_arguments(model: Architecture, pp: int) -> dict[str, object]:
    lengths = {"encoder_seq_length": model.positions, "decoder_seq_length": model.positions}
    first = written_stages(model, pp).blocks[model.stacks[-1].first][0]
    split_rank = {"pipeline_model_parallel_split_rank": int(first.partition(".")[0]) if pp > 1 else None}
    depths = (len(stack.layers) for stack in model.stacks)
    return {**dict(zip(("encoder_num_layers", "decoder_num_layers"), depths, strict=True)), **lengths, **split_rank}


FAMILIES = {"bert": MegatronFamily(_bert_rules, _bert_arguments), "t5": MegatronFamily(_t5_rules, _t5_arguments)}
"""Families that differ from GPT in Megatron-LM checkpoints. Llama does not differ and is not listed."""


def as_family(model: ModelConfig, values: Mapping[str, object], tensors: Tensors, where: str) -> ModelConfig:
    """Return the model section of a BERT, T5 or Retro model if the tensor names identify one; otherwise return `model`.

    model: the GPT model that Megatron's arguments `values` describe. tensors: the tensors, keyed by `tp.pp.chunk/common
    name`. Errors: CheckpointError naming an argument that the tensors contradict.
    """
    shapes = {name.partition("/")[2]: shape for name, (shape, _) in tensors.items()}
    if has_two_stacks(shapes):
        pattern = re.compile(r"(0\.[\d.]+/decoder\.layers\.\d+)\..*")
        depth = len({match[1] for name in tensors if (match := pattern.fullmatch(name))})
        if (stated := values.get("decoder_num_layers")) not in (None, depth):
            raise CheckpointError(f"{where}: args.decoder_num_layers {stated!r}: the files hold {depth} of its blocks")
        return dataclasses.replace(model, family="t5", decoder_layers=depth)
    if reading := _numbers(shapes, r"encoder\.layers\.(\d+)\.inter_attention\..*"):
        return _with_retriever(
            model, values, reading, len(_numbers(shapes, r".*\.retriever\.layers\.(\d+)\..*")), where
        )
    heads: dict[str, Literal["lm", "classification", "choice"]] = {
        "lm_head.dense": "lm",
        "classification_head": "classification",
        "multichoice_head": "choice",
    }
    head = next((kind for module, kind in heads.items() if f"{module}.weight" in shapes), None)
    if head is None:
        return model
    classes = {"classification": shapes.get("classification_head.weight", (2,))[0], "choice": 4}.get(head, 2)
    types = shapes.get("embedding.tokentype_embeddings.weight", (0,))[0]
    judges = "binary_head.weight" in shapes if head == "lm" else True
    return dataclasses.replace(
        model,
        family="bert",
        head=head,
        classes=classes,
        binary_head=judges,
        token_types=None if types == 2 * judges else types,  # None selects the default
        head_activation="gelu_tanh" if values.get("openai_gelu") else "gelu",
    )


def _numbers(names: Collection[str], pattern: str) -> tuple[int, ...]:
    """The layer indices that `pattern` extracts from `names`, in ascending order."""
    return tuple(sorted({int(match[1]) for name in names if (match := re.fullmatch(pattern, name))}))


def _with_retriever(
    model: ModelConfig, values: Mapping[str, object], reading: tuple[int, ...], encoder: int, where: str
) -> ModelConfig:
    """Add a retriever to `model`. reading: indices of the layers that attend to neighbours. encoder: depth of the
    neighbours' encoder. Both values are derived from tensors, because the arguments do not contain `reading` and may
    omit other sizes. Neighbours have no rotary positions.

    Errors: CheckpointError if an argument is not a valid number.
    """

    def size(name: str, otherwise: int) -> int:
        value = values.get(name)
        value = otherwise if value is None else value
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{where}: args.{name} {value!r:.40}: must be a positive whole number")
        return value

    def rate(name: str) -> float:
        value = values.get(name, 0.1)
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise CheckpointError(f"{where}: args.{name} {value!r:.40}: must be at least 0 and below 1")
        return float(value)

    return dataclasses.replace(
        model,
        retriever=True,
        retro_encoder_hidden_dropout=rate("retro_encoder_hidden_dropout"),
        retro_encoder_attention_dropout=rate("retro_encoder_attention_dropout"),
        retro_layers=reading,
        retro_encoder_layers=encoder,
        retro_rope=False,
        retro_cross_documents=True,
        retro_chunk_length=size("retro_gpt_chunk_length", 64),
        retro_neighbours=size("retro_num_neighbors", 2),
        retro_retrieved_chunks=size("retro_num_retrieved_chunks", 2),
    )
