"""LAMB, which scales Adam's update of each tensor to the norm of the weights.

    r = m / (sqrt v + eps) + decay p        with bias-corrected moments m and v
    p <- p - lr (|p| / |r|) r               the ratio is 1 if either norm is 0

Source: You et al. 2020, algorithm 2, where phi is the identity. |p| and |r| are norms of whole logical tensors, across
all ranks that hold shards of a tensor. The update of biases and norm weights, which do not decay, is not scaled, as in
the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega.core.ops.square_sum import square_sums
from mega.core.optim.adam import AdamW
from mega.core.optim.rule import Allocator, Ranks, ShardState, StepArgs


@dataclass(frozen=True)
class LAMB:
    """LAMB, with the constants of the AdamW rule `adam`."""

    adam: AdamW

    def start(self, owned: ShardState, allocator: Allocator) -> None:
        self.adam.start(owned, allocator)

    def step(self, owned: ShardState, master: torch.Tensor, grad: torch.Tensor, ranks: Ranks, args: StepArgs) -> None:
        # 1 compute Adam's update of every element, and add the decay
        moment1, moment2 = owned.moments.values()
        update = self.adam.direction(grad, moment1.values, moment2.values, step=args.step)
        decayed = slice(0, owned.decay_end)
        update[decayed].add_(master[decayed], alpha=args.decay)
        # 2 compute the squared norms of weight and update of every whole matrix
        runs = [run for shard, run in owned.bucket.runs() if shard.tensor.decays]
        # 3 scale each matrix's update by the ratio of norms
        if runs:
            squares = square_sums([x[run] for run in runs for x in (master, update)])
            norms = ranks.sums(owned.bucket, squares).sqrt().view(-1, 2)
            ratios = torch.where((norms > 0).all(1), norms[:, 0] / norms[:, 1], 1.0).to(update.dtype)
            for run, ratio in zip(runs, ratios, strict=True):
                update[run].mul_(ratio)
        # 4 apply the scaled update
        master.sub_(update, alpha=args.lr)
