"""Pipeline schedules as data: the compute steps, sends and receives of every rank in one training step.

"Cargo" is an activation or a gradient that moves between stages. This package does not import torch.

    types      the types Compute, Transfer, Exchange and Plan; read this module first
    kinds      the schedules, each as an order of compute steps: SCHEDULES, and forward for evaluation
    exchange   inserts sends and receives between the compute steps, for any schedule
    play       runs a plan on a simulated clock
    prove      checks that a plan is complete and cannot deadlock, even with blocking sends
    simulate   computes length, bubble and live microbatches of a plan, and a lower bound for the length
    layers     assigns the blocks of the model to stages
    draw       draws a simulation as text, SVG or PNG (imported on demand)

To add a schedule, write a function and add it to `kinds.SCHEDULES`. The executor of plans does not change.
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
