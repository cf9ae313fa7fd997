"""Pipeline schedules as data: what every rank computes, sends and receives in one step. No torch.

    types      Compute, Transfer, Exchange, Plan: the nouns. Read this first
    kinds      the schedules, each as an order of computes: gpipe, 1f1b, interleaved, zb-h1, forward
    exchange   when cargo moves between the computes, for any schedule
    layers     which blocks of the model each stage holds

A new schedule is a new function in `kinds`; the executor that plays plans does not change.
"""

from .kinds import plan
from .layers import stage_layers
from .types import Act, Compute, Exchange, Kind, Plan, PlanError, Transfer

__all__ = ["Act", "Compute", "Exchange", "Kind", "Plan", "PlanError", "Transfer", "plan", "stage_layers"]
