"""Pipeline schedules as data: the compute steps, sends and receives of every rank in one step. Does not import torch.

    types      Compute, Transfer, Exchange, Plan: the types. Read this first
    kinds      the schedules, each as an order of compute steps: SCHEDULES, and forward for evaluation
    exchange   when cargo moves between the compute steps, for any schedule
    play       a clock that plays a plan
    prove      every act once, nothing missing, no deadlock even with blocking sends
    simulate   length, bubble, live microbatches; the lower bound for any plan
    layers     which blocks of the model each stage holds
    draw       the picture of a simulation: text, SVG, PNG (imported on demand)

A new schedule is a function and its row in `kinds.SCHEDULES`; the executor that plays plans does not change.
"""

from .kinds import SCHEDULES, PipelineSchedule, plan
from .layers import stage_layers
from .play import Interval
from .prove import prove
from .simulate import Costs, Simulation, lower_bound, simulate
from .types import Act, Compute, Exchange, Plan, PlanError, Transfer

__all__ = [
    "SCHEDULES",
    "Act",
    "Compute",
    "Costs",
    "Exchange",
    "Interval",
    "PipelineSchedule",
    "Plan",
    "PlanError",
    "Simulation",
    "Transfer",
    "lower_bound",
    "plan",
    "prove",
    "simulate",
    "stage_layers",
]
