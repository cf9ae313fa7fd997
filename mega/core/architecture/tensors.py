"""Generates every logical tensor of a model in one traversal of the architecture, with name, shape, cuts, initial
values and units.

Tensors that exist in Llama have Hugging Face's names for Llama. Weights are [out, in]. The order is from the tables of
the first stack to the output, and within a layer from the first branch to the last. These tensors are the single source
for layers, initialisation, gradient norms and reductions, optimizer spans, checkpoints, converters and the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mega.core.architecture.layer import Attention, Dense, Experts, Layer, NeighbourAttention, Norm
from mega.core.architecture.model import Ahead, Architecture, Output
from mega.core.architecture.tensor import Cut, Init, Member, Partial, Tensor, Unit


def tensors(model: Architecture) -> Iterator[Tensor]:
    """Yield all tensors of a model except the tensors of adapters."""
    yield from _input(model)
    for stack in model.stacks:
        for number, layer in zip(stack.numbers, stack.layers, strict=True):
            for tensor in layer_tensors(model, layer, number):
                yield replace(tensor, name=stack.prefix(number) + tensor.name)
        if stack.norm is not None:
            yield from norm(stack.norm, model.ends(stack), "sequence")
    yield from _output(model, model.output)
    yield from model.extra


def layer_tensors(model: Architecture, layer: Layer, unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors of a layer, with names relative to the layer. unit: the layer's number, or the unit that
    contains the layer."""
    if layer.before is not None:
        yield from norm(layer.before, unit, "sequence")
    for branch in layer.branches:
        if branch.before is not None:
            yield from norm(branch.before, unit, "sequence")
        mixer = branch.mixer
        if isinstance(mixer, Attention):
            yield from _attention(model, mixer, unit)
        elif isinstance(mixer, Dense):
            yield from _dense(model, mixer, unit)
        elif isinstance(mixer, NeighbourAttention):
            yield from _neighbour_attention(model, mixer, unit)
        else:
            yield from _experts(model, mixer, unit)
        if branch.after is not None:
            yield from norm(branch.after, unit, "sequence")


def norm(value: Norm, unit: Unit, partial: Partial) -> Iterator[Tensor]:
    """Yield the weight of a norm, and the bias if it is a LayerNorm."""
    ones = Init(constant=0.0 if value.offset else 1.0)
    yield Tensor(f"{value.name}.weight", (value.width,), (unit,), ones, partial=(partial,))
    if value.kind == "layernorm":
        yield Tensor(f"{value.name}.bias", (value.width,), (unit,), Init(), partial=(partial,))


def whole_linear(model: Architecture, name: str, outs: int, partial: tuple[Partial, ...] = ()) -> Iterator[Tensor]:
    """Yield the weight and the bias of a linear layer of the head, which are replicated on every rank."""
    yield Tensor(f"{name}.weight", (outs, model.hidden), ("head",), Init(std=model.init_std), partial=partial)
    yield Tensor(f"{name}.bias", (outs,), ("head",), Init(), partial=partial)


def vocabulary_rows(model: Architecture) -> tuple[Cut, ...]:
    """Return the cut of an embedding table of tokens, whose rows are sharded over tensor ranks."""
    return (Cut(0, "tp", model.input.vocab, multiple=model.input.vocab_multiple),)


def _input(model: Architecture) -> Iterator[Tensor]:
    """Yield the embedding tables, which all stacks and a tied output share. Only the first stack has token types and a
    norm."""
    table, normal = model.input, Init(std=model.init_std)
    embeddings = tuple(stack.opens for stack in model.stacks)
    users = (*embeddings, "head") if model.tied or model.output.ahead else embeddings
    yield Tensor("model.embed_tokens.weight", (table.vocab, model.hidden), users, normal, vocabulary_rows(model))
    if table.learned_positions:
        shape = (table.learned_positions, model.hidden)
        yield Tensor("model.embed_positions.weight", shape, embeddings, normal, partial=("sequence",))
    if table.types:
        shape = (table.types, model.hidden)
        yield Tensor("model.embed_types.weight", shape, embeddings[:1], normal, partial=("sequence",))
    if table.norm is not None:
        yield from norm(table.norm, embeddings[0], "sequence")


def _attention(model: Architecture, attention: Attention, unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors of query, key, value and output projections, whose heads are sharded over tp."""
    name = attention.name
    for projection, heads in (("q", attention.heads), ("k", attention.kv_heads), ("v", attention.kv_heads)):
        outs = heads * attention.head_dim
        yield from _column(model, f"{name}.{projection}_proj", unit, outs, heads, attention.qkv_bias)
    for each in (attention.q_norm, attention.k_norm):
        if each is not None:
            yield from _head_norm(attention, each, unit)
    yield from _row(model, f"{name}.o_proj", unit, attention.width, attention.heads, attention.out_bias)


def _neighbour_attention(model: Architecture, mixer: NeighbourAttention, unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors of the encoder's layers, then those of the attention to neighbours."""
    for number, layer in enumerate(mixer.encoder):
        for tensor in layer_tensors(model, layer, unit):
            yield replace(tensor, name=f"{mixer.prefix}.layers.{number}.{tensor.name}")
    yield from _attention(model, mixer.attention, unit)


def _head_norm(attention: Attention, value: Norm, unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors of a norm of queries or keys. A norm per head is replicated; a norm over the whole projection
    is sharded like the heads."""
    for tensor in norm(value, unit, "tp"):
        if value.width == attention.head_dim:
            yield tensor
        else:
            yield replace(tensor, cuts=(Cut(0, "tp", value.width // attention.head_dim),), partial=())


def _dense(model: Architecture, dense: Dense, unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors of gate, up and down projections, whose hidden layer is sharded over tp."""
    for projection in ("gate", "up") if dense.gated else ("up",):
        yield from _column(model, f"{dense.name}.{projection}_proj", unit, dense.width, dense.width, dense.bias)
    yield from _row(model, f"{dense.name}.down_proj", unit, dense.width, dense.width, dense.bias)


def _experts(model: Architecture, experts: Experts, unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors of the router (replicated on every tensor rank), of each expert, and of the shared expert."""
    gate, normal = f"{experts.name}.gate", Init(std=model.init_std)
    partial_tokens: tuple[Partial, ...] = ("sequence",)
    yield Tensor(f"{gate}.weight", (experts.count, model.hidden), (unit,), normal, partial=partial_tokens)
    if experts.router.bias:
        yield Tensor(f"{gate}.bias", (experts.count,), (unit,), Init(), partial=partial_tokens)
    if experts.router.counts:
        yield Tensor(f"{gate}.e_score_correction_bias", (experts.count,), (unit,), Init(), counted=True)
    for number in range(experts.count):
        network = replace(experts.expert, name=f"{experts.expert.name}.{number}")
        member, share = Member("ep", number, experts.count), min(1.0, experts.chosen / experts.count)
        for tensor in _dense(model, network, unit):
            cuts = tuple(replace(cut, axis="etp") for cut in tensor.cuts)
            # Only one tensor rank adds the bias of the last linear layer, before the sum over ranks, so the bias's
            # gradient is partial.
            partial: tuple[Partial, ...] = () if cuts else ("tp",)
            yield replace(tensor, cuts=cuts, partial=partial, data="edp", member=member, share=share)
    if experts.shared is not None:
        yield from _dense(model, experts.shared, unit)
        if experts.shared_gate:
            shape = (1, model.hidden)
            yield Tensor(f"{experts.name}.shared_expert_gate.weight", shape, (unit,), normal, partial=partial_tokens)


def _column(model: Architecture, name: str, unit: Unit, outs: int, parts: int, bias: bool) -> Iterator[Tensor]:
    """Yield the tensors of a column-parallel linear layer. Rows of the weight are sharded, so each rank computes some
    of the outputs."""
    cuts = (Cut(0, "tp", parts),)
    yield Tensor(f"{name}.weight", (outs, model.hidden), (unit,), Init(std=model.init_std), cuts)
    if bias:
        yield Tensor(f"{name}.bias", (outs,), (unit,), Init(), cuts)


def _row(model: Architecture, name: str, unit: Unit, ins: int, parts: int, bias: bool) -> Iterator[Tensor]:
    """Yield the tensors of a row-parallel linear layer. Columns of the weight are sharded, so outputs are summed over
    ranks before the bias is added."""
    cuts = (Cut(1, "tp", parts),)
    yield Tensor(f"{name}.weight", (model.hidden, ins), (unit,), Init(std=model.out_std), cuts)
    if bias:
        yield Tensor(f"{name}.bias", (model.hidden,), (unit,), Init(), partial=("sequence",))


def _ahead(model: Architecture, ahead: Ahead) -> Iterator[Tensor]:
    """Yield the tensors of a layer of multi-token prediction. The layer belongs to the head, and uses the head's output
    matrix and the embedding table."""
    for each in (ahead.token_norm, ahead.stream_norm):
        yield from norm(each, "head", "sequence")
    shape, normal = (model.hidden, 2 * model.hidden), Init(std=model.init_std)
    yield Tensor(f"{ahead.name}.eh_proj.weight", shape, ("head",), normal, partial=("sequence",))
    for tensor in layer_tensors(model, ahead.layer, "head"):
        yield replace(tensor, name=f"{ahead.name}.transformer_layer.{tensor.name}")
    yield from norm(ahead.norm, "head", "sequence")


def _output(model: Architecture, output: Output) -> Iterator[Tensor]:
    """Yield the tensors of the output. The layers for tokens and for rows are replicated on tensor ranks. Under
    sequence parallelism, the layers for tokens process only the rank's tokens. The output matrix is sharded over the
    vocabulary."""
    if (words := output.words) is not None:
        if words.transform is not None:
            yield from whole_linear(model, "lm_head.dense", model.hidden, ("sequence",))
            yield from norm(words.transform.norm, "head", "sequence")
        shape, rows = (model.input.vocab, model.hidden), vocabulary_rows(model)
        if not words.tied:
            yield Tensor("lm_head.weight", shape, ("head",), Init(std=model.init_std), rows)
        if words.bias:
            yield Tensor("lm_head.bias", shape[:1], ("head",), Init(), rows)
    for ahead in output.ahead:
        yield from _ahead(model, ahead)
    if output.pooler:
        yield from whole_linear(model, "pooler.dense", model.hidden)
    if output.rows is not None:
        yield from whole_linear(model, output.rows.name, output.rows.classes)
