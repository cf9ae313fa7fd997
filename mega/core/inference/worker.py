"""Run one rank's share of a step: the rank's layers with their cache and, on the last stage, the choice of tokens.

All ranks of a pipeline stage process the same tokens. The first tensor rank of the last stage gathers the logits,
chooses tokens, and sends the result to rank 0. Ranks of the first stage store the last token of each request, so that a
step can be launched before the results of the previous step are known on any host. A worker does not depend on
requests; a step contains all necessary data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mega.core.architecture import Architecture
from mega.core.architecture.layer import Rope
from mega.core.device import HostArray, sent
from mega.core.inference.graphs import Decode, StepGraphs, known
from mega.core.inference.loading.adapters import AdapterChoice
from mega.core.inference.paged_cache import PagedCache
from mega.core.inference.retrieval import Retriever, SequenceReader
from mega.core.inference.sampling import Filters, SeenIds, draw, likeliest
from mega.core.inference.schedule import Choice
from mega.core.inference.step import BEAM, CHOOSE, NOT_FINITE, NUMBERS, Step
from mega.core.model.decode import DecodeStep
from mega.core.model.decoder import DecoderStage
from mega.core.model.forward import rotary_tables
from mega.core.ops.heads import Rotary
from mega.core.ops.kept_keys import KeptKeys
from mega.core.ops.paged_attention import INVARIANT, softcapped, trusted
from mega.core.ops.rotary import spread
from mega.core.parallel.collectives import first_problem
from mega.core.parallel.mesh import SINGLE, Axis, Mesh
from mega.core.parallel.one_shot import exchange_over


class DraftWorker(Protocol):
    """The interface of classes that run steps for guessing tokens on one rank; see draft_worker.py."""

    def launch(self, depth: int, step: Step) -> Launched: ...

    def close(self) -> None: ...


class Worker:
    """Runs steps on one rank.

    stage: a stage of a decoder, in evaluation mode. blocks, block: number and size of the cache's blocks. `blocks` may
    be a function, which is called after the weights have been converted for decoding. tile: number of tokens per tile;
    None to not split steps. requests: maximum number of requests in flight. vocab: only ids below this value can be
    chosen. adapters: the adapters of the stage's linears. graphs: whether to use CUDA graphs, if the attention
    implementation and the steps support them. most: maximum number of tokens in a captured step with prompts.
    retriever: finds neighbours for a model with a retriever; such a model must run on one rank, without graphs.
    """

    graphs: StepGraphs | None = None
    drafts: DraftWorker | None = None
    _seen: SeenIds | None = None

    def __init__(
        self,
        stage: Any,
        mesh: Mesh,
        device: torch.device,
        *,
        blocks: int | Callable[[], int],
        block: int,
        requests: int,
        tile: int | None,
        vocab: int | None = None,
        adapters: AdapterChoice | None = None,
        graphs: bool = False,
        most: int = 0,
        retriever: Retriever | None = None,
    ):
        model = stage.architecture
        self.stage, self.mesh, self.device, self.tile, self.adapters = stage, mesh, device, tile, adapters
        self.vocab, self.requests = vocab or model.input.vocab, requests
        layers = [unit for unit in stage.units if isinstance(unit, int)]
        windows = [model.layers[layer].attention.window for layer in layers]
        self._exchange = exchange_over(mesh.tp, device, stage.dtype)
        # The conversion to fp8 frees memory, so it must precede the sizing of the cache.
        self.decode = DecodeStep(stage, self._exchange.sum)
        self.blocks = blocks if isinstance(blocks, int) else blocks()
        pool = (self.blocks, block), layers[0] if layers else 0
        self.cache = paged_cache(stage, windows, device, *pool, tp=mesh.tp, invariant=bool(tile))
        self._latest = torch.zeros(requests + 1, dtype=torch.long, device=device)  # the last row is for padding
        self._arriving: deque[Arriving] = deque()
        if graphs and adapters is None and self.cache.attention.graphs:
            ends = mesh.pp.first, mesh.pp.last
            self.graphs = graphs_of(
                self, self.decode, self.cache, self._latest, ends, requests, min(most, self.blocks * block)
            )
        self.reader = None if retriever is None else SequenceReader(stage, retriever, requests)

    @property
    def chooses(self) -> bool:
        return self.mesh.pp.last and self.mesh.tp.first

    def run(self, step: Step) -> list[Choice]:
        """Compute a step. Return the result for each wanted row on rank 0, and [] on other ranks."""
        return self.launch(step).choices()

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Start a step on the device. If the step contains a `from_request` placeholder, first launch the step that
        chooses the token."""
        self._settle(step)
        if len(step.copies):
            self.cache.copy(*sent(step.copies, self.device).unbind(1))
        if len(step.marks) and self.chooses:
            self._mark(step.marks, step.biases)
        parts = [step] if self.tile is None else step.tiles(self.tile)
        logits: list[torch.Tensor] = []
        for part in parts:
            part_logits = self._forward(part)
            if part_logits is not None and len(step.wanted):
                wanted_here = len(part.wanted) if self.tile is None else _in_tile(step, len(logits), self.tile)
                logits.append(part_logits[:wanted_here])
        if not len(step.wanted):
            return Launched(step, None)
        result = self.choose(torch.cat(logits) if len(logits) > 1 else logits[0], step) if self.mesh.pp.last else None
        return self._deliver(result, step)

    def _forward(self, step: Step) -> torch.Tensor | None:
        """Run one forward pass of this rank's stage. Return logits on the last stage, else None."""
        mesh, cargo = self.mesh, None
        if not mesh.pp.first:
            shape = len(step.tokens), self.stage.architecture.hidden
            cargo = torch.empty(shape, dtype=self.stage.residual, device=self.device)
            dist.recv(cargo, mesh.pp.ranks[mesh.pp.index - 1], group=mesh.p2p["F", mesh.pp.index].group)
        recorded = None if self.graphs is None else self.graphs.shape_of(step)
        if self.graphs is not None and recorded is not None:
            out = self.graphs(step, cargo, recorded)
        else:
            out = self._computed(step, cargo)
        if mesh.pp.last:
            return out
        dist.send(out.contiguous(), mesh.pp.ranks[mesh.pp.index + 1], group=mesh.p2p["F", mesh.pp.index + 1].group)
        return None

    def _computed(self, step: Step, cargo: torch.Tensor | None) -> torch.Tensor:
        inputs = begin_step(step, self.cache, self._latest, step.sequences)
        if self.adapters is not None:
            self.adapters.begin(np.repeat(step.adapters, step.counts))
        if self.reader is None:
            return self.decode(*inputs, self.cache, *(() if cargo is None else (cargo,)))
        neighbours = self.reader.step(step, self.device)
        logits = self.decode(*inputs, self.cache, neighbours=neighbours)
        neighbours.close()
        return logits

    def close(self) -> None:
        while self._arriving:
            self._arriving.popleft().wait()
        if self.graphs is not None:
            self.graphs.close()
        if self.drafts is not None:
            self.drafts.close()

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather logits [m, ids of this rank] from all tensor ranks into fp32 [m, vocab], without padding."""
        if self.mesh.tp.size > 1:
            logits = self._exchange.gather(logits).transpose(0, 1).reshape(len(logits), -1)
        return logits[:, : self.vocab].float()

    def choose(self, logits: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Choose tokens on the first tensor rank of the last stage. Return None on the stage's other ranks.

        logits: [m, ids of this rank]. Return float64 [m, 2 + 2 k]: the chosen id, its log-probability, the k most
        likely ids and their log-probabilities; only [m, 1] if the step reports no log-probabilities. The id is
        NOT_FINITE if the row's logits are not finite.
        """
        logits = self._gathered(logits)
        if not self.chooses:
            return None
        allowed = sent(step.allowed, self.device) if step.allowed.size else None
        ids, share = self._ids(logits, step, allowed)
        if (step.targets != CHOOSE).any():
            targets = sent(step.targets, self.device)
            ids = torch.where(targets >= 0, targets, ids)
        if step.report < 0:
            return ids[:, None].double().masked_fill_(_not_finite(share), NOT_FINITE)
        logprobs = logits.log_softmax(-1)
        chosen_logprobs = logprobs.gather(1, ids[:, None]).double()
        columns = [
            ids[:, None].double().masked_fill_(_not_finite(share) | chosen_logprobs.isnan(), NOT_FINITE),
            chosen_logprobs,
        ]
        if step.report:
            if allowed is not None:  # beams use only allowed ids, but the reported most likely ids are unconstrained
                hidden = ~allowed & sent(step.targets == BEAM, self.device)[:, None]
                logprobs = logprobs.masked_fill(hidden, -torch.inf)
            top = logprobs.topk(min(step.report, self.vocab))
            columns += [top.indices.double(), top.values.double()]
        return torch.cat(columns, 1)

    def _ids(self, logits: torch.Tensor, step: Step, allowed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen id of each row, [m], and its logit or probability, [m, 1]. If any logit of a row is not
        finite, the returned logit or probability is not finite either, because the maximum is not finite or all
        probabilities are NaN."""
        chooses = step.targets == CHOOSE
        if not chooses.any():
            none = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
            return none, torch.zeros(len(logits), 1, device=logits.device)
        # greedy rows have temperature 0
        penalties, draws = (step.seen >= 0).any(), chooses & (step.numbers[:, 0] > 0)
        _, _, _, _, penalty, _, presence, frequency = step.numbers.T[..., None]
        if penalties:
            assert self._seen is not None
            amounts = (sent(each.astype(np.float32), self.device) for each in (penalty, presence, frequency))
            rows = sent(step.seen, self.device)
            logits = self._seen.adjusted(logits, rows, *amounts)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        ids, share = sampled(logits, step.numbers, draws)
        if penalties:
            assert self._seen is not None
            penalised_rows = sent(np.flatnonzero(step.seen >= 0), self.device)
            self._seen.add(rows[penalised_rows], ids[penalised_rows])
        return ids, share

    def _mark(self, marks: NDArray[np.int64], biases: NDArray[np.float64]) -> None:
        """Update the table of seen ids: clear rows, add ids, set biases."""
        if self._seen is None:
            self._seen = SeenIds(self.requests, self.vocab, self.device)
        self._seen.clear(sent(marks[marks[:, 1] < 0, 0], self.device))
        self._seen.seen[*sent(marks[marks[:, 1] >= 0], self.device).unbind(1)] = True
        if len(biases):
            self._seen.favour(sent(biases[:, :2].astype(np.int64), self.device), sent(biases[:, 2].copy(), self.device))

    def _deliver(self, result: torch.Tensor | None, step: Step) -> Launched:
        """Start sending the last stage's result to rank 0. On other ranks, return a `Launched` without results."""
        pp, mesh = self.mesh.pp, self.mesh
        if pp.size == 1:
            keep_latest(self._latest, result, step, mesh.tp)
            return Launched(step, HostArray(result) if mesh.model.first and result is not None else None)
        arriving = self.transfer(result, step)
        if pp.first:
            self._arriving.append(arriving)
        return Launched(step, arriving if arriving.found is not None else None)

    def transfer(self, result: torch.Tensor | None, step: Step) -> Arriving:
        """Send the last stage's result to rank 0, and return the result that this rank receives."""
        pp, mesh, work, buffer = self.mesh.pp, self.mesh, None, None
        if pp.last and result is not None:
            dist.send(result.contiguous(), pp.ranks[0], group=mesh.p2p["F", 0].group)
        if mesh.model.first:
            width = 1 if step.report < 0 else 2 + 2 * min(step.report, self.vocab)
            buffer = torch.empty(len(step.wanted), width, dtype=torch.float64, device=self.device)
            work = dist.irecv(buffer, pp.ranks[-1], group=mesh.p2p["F", 0].group)
        return Arriving(step, work, buffer)

    def _settle(self, step: Step) -> None:
        """Wait for the results of the earlier steps to which `step` refers, and limit the number of steps in flight to
        the number of stages."""
        if not self._arriving:
            return
        needed = set((~step.tokens[step.tokens < 0]).tolist())
        follows = [bool(needed.intersection(each.step.requests.tolist())) for each in self._arriving]
        count = max(len(follows) - self.mesh.pp.size, 0)
        if any(follows):
            count = max(count, len(follows) - follows[::-1].index(True))
        for _ in range(count):
            each = self._arriving.popleft()
            each.wait()
            keep_latest(self._latest, each.found, each.step, self.mesh.tp)


def graphs_of(
    worker: Worker,
    decode: Decode,
    cache: PagedCache,
    latest: torch.Tensor,
    ends: tuple[bool, bool],
    runs: int,
    most: int,
) -> StepGraphs:
    """Return the graphs of `decode` on the rank of `worker`. For the other arguments, see `StepGraphs`."""
    agree = partial(first_problem, axis=worker.mesh.tp, device=worker.device)
    width = -(-worker.stage.architecture.positions // cache.pool.shape[2])
    return StepGraphs(decode, cache, width, latest, ends, runs, most, agree=agree)


def begin_step(
    step: Step, cache: PagedCache, latest: torch.Tensor, sequences: NDArray[np.int64] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepare the cache for a step, and return ids, positions and wanted rows on the device. latest: as in `known`.
    sequences: as in `PagedCache.pages`."""
    arrays = (step.tokens, step.table_rows, step.slots, step.wanted)
    ids, positions, slots, wanted_rows = (sent(array, latest.device) for array in arrays)
    if (step.tokens < 0).any():
        ids = known(ids, latest)
    cache.begin(slots, cache.pages(step.counts, step.lengths, step.tables, sequences))
    return ids, positions, wanted_rows


def keep_latest(latest: torch.Tensor, result: torch.Tensor | None, step: Step, tp: Axis) -> None:
    """Store the chosen ids in `latest` on all ranks of `tp`, at the indices `step.requests`. The last row of `latest`
    is for padding. result: the step's result; given only on the first rank of `tp`."""
    if not (step.requests >= 0).any():
        return
    indices = np.where(step.requests < 0, len(latest) - 1, step.requests)
    ids = latest.new_empty(len(indices)) if result is None else result[:, 0].long().clamp(min=0)
    if tp.size > 1:
        dist.broadcast(ids, tp.ranks[0], group=tp.group)
    latest.index_copy_(0, sent(indices, latest.device), ids)


def paged_cache(
    stage: DecoderStage,
    windows: Sequence[int | None],
    device: torch.device,
    blocks: tuple[int, int],
    first: int,
    *,
    tp: Axis = SINGLE,
    invariant: bool = False,
) -> PagedCache:
    """Return an empty cache for layers of a stage. windows: attention window of each layer, in keys. blocks: number of
    blocks, and number of tokens per block. first: index of the first layer. tp: the ranks among which the heads are
    divided; all of them must call this function."""
    size = stage.architecture.cached
    shape = (len(windows), *blocks, 2, size.kv_heads // tp.size, size.head_dim)
    tables = _tables(stage.architecture, stage.dtype, device)
    pool, repeats = torch.zeros(shape, dtype=stage.dtype, device=device), size.heads // size.kv_heads
    capped = size.softcap is not None
    keeps = stage.ops.spread and not (invariant or any(windows) or capped) and pool.element_size() >= 4
    # The ranks must use the same attention implementation: only some implementations support graphs, and either all
    # ranks or none must capture graphs.
    attention, agree = stage.ops.paged_attention, partial(first_problem, axis=tp, device=device)
    for window in dict.fromkeys(windows):
        attention = INVARIANT if invariant else trusted(attention, pool[0], repeats, window, agree)
    if size.softcap is not None:
        attention = softcapped(size.softcap, invariant=invariant)
    spread_tables = {rope: spread(*table) for rope, table in tables.items()} if stage.ops.spread else tables
    return PagedCache(pool, first, attention, repeats, windows, spread_tables, KeptKeys(pool) if keeps else None)


class Arriving:
    """The results of a step, which are being sent from the last stage. found: the results; None on ranks that only
    receive the ids."""

    def __init__(self, step: Step, work: Any, found: torch.Tensor | None):
        self.step, self.found = step, found
        self._work = work
        self._host: HostArray | None = None

    def wait(self) -> None:
        """Make subsequent work on the device wait for the results."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            assert self.found is not None
            self._host = HostArray(self.found)

    def numpy(self) -> NDArray[np.float64]:
        """Wait for the results on the host."""
        self.wait()
        assert self._host is not None
        return self._host.numpy()


def _tables(model: Architecture, dtype: torch.dtype, device: torch.device) -> dict[Rope, Rotary]:
    """Return cos and sin of all positions; for LongRoPE, all rows with the short factors, then all rows with the long
    factors."""
    positions = torch.arange(model.positions, device=device)
    lengths = (None,) if model.long_from is None else (model.long_from, model.positions)
    parts = [rotary_tables(model.ropes, positions, dtype, length) for length in lengths]
    pairs_of = {rope: zip(*(part[rope] for part in parts), strict=True) for rope in model.ropes}
    return {rope: (torch.cat(next(pairs)), torch.cat(next(pairs))) for rope, pairs in pairs_of.items()}


@dataclass(frozen=True)
class Launched:
    """A step that was started on the device. found: the results of the step; None on ranks that do not receive
    results."""

    step: Step
    found: HostArray | Arriving | None

    def choices(self) -> list[Choice]:
        """Wait for the results, and return one result for each wanted row."""
        return [] if self.found is None else _choices(self.found.numpy(), self.step)


def sampled(
    logits: torch.Tensor, numbers: NDArray[np.float64], draws: NDArray[np.bool_]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the id chosen from each row of logits, [m], and its logit or probability, [m, 1].

    numbers: as in `Step`, [m, n]. draws: the rows whose id is sampled; for other rows, the most likely id is chosen.
    """
    device = logits.device
    if not draws.any():
        ids = likeliest(logits)
        return ids, logits.gather(1, ids[:, None])
    shares = _filters(numbers, device)(logits)
    ids = draw(shares, sent(numbers[:, NUMBERS.index("uniform"), None].copy(), device))
    share = shares.gather(1, ids[:, None])
    return ids if draws.all() else torch.where(sent(draws, device), ids, likeliest(logits)), share


def _filters(numbers: NDArray[np.float64], device: torch.device) -> Filters:
    """Return the filters for a step's rows, without those that are disabled in all rows."""
    temperature, top_k, top_p, min_p, *_ = numbers.T[..., None]

    def there(column: NDArray[np.float64]) -> torch.Tensor:
        return sent(column.astype(np.float32), device)

    most_k = int(top_k.max())
    return Filters(
        there(np.where(temperature > 0, temperature, 1.0)),
        sent(top_k.astype(np.int64), device) if most_k else torch.empty(0),
        most_k,
        there(top_p) if (top_p < 1).any() else None,
        there(min_p) if min_p.any() else None,
    )


def _not_finite(x: torch.Tensor) -> torch.Tensor:
    """Return ~x.isfinite() in fewer operations: x * 0 is 0 if x is finite, and NaN if x is infinite or NaN."""
    return x.mul(0) != 0


def _in_tile(step: Step, number: int, rows: int) -> int:
    """Return the number of wanted rows in tile `number`."""
    return int(((step.wanted >= number * rows) & (step.wanted < (number + 1) * rows)).sum())


def _choices(results: NDArray[np.float64], step: Step) -> list[Choice]:
    ids = results[:, 0].astype(np.int64).tolist()
    if step.report < 0:
        return [Choice(token) for token in ids]
    logprobs, most = results[:, 1].tolist(), (results.shape[1] - 2) // 2
    top_ids, top = results[:, 2 : 2 + most].astype(np.int64).tolist(), results[:, 2 + most :].tolist()
    return [
        Choice(token, logprob, tuple(zip(names[: max(tops, 0)], values[: max(tops, 0)], strict=True)))
        for token, logprob, names, values, tops in zip(ids, logprobs, top_ids, top, step.tops.tolist(), strict=True)
    ]
