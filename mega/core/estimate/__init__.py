"""Predict memory, step time and the best layout from a run's config, its real stages on the meta device, and its plans.

trace          live bytes of one microbatch on real stages without memory. This module and operation_log are the only
               modules here that import torch
operation_log  the operations of that microbatch, as shapes
operations     the operations of a chunk of the model
cost           seconds of operations, from measured curves (curves.json)
footprint      peak bytes of a chunk, from the parts of a trace and the buckets that are allocated only temporarily
chunks         the units and blocks of the model on each pipeline rank, as numbers
weights        parameters, gradients, masters and moments of a rank, as its buckets store them
experts        extra memory if the experts have uneven loads
memory         a whole step through the pipeline's plan: the peak of every stage, and when it occurs
hardware       devices and clusters as numbers (hardware.toml); fit computes them from measurements
steptime       the time of a step, from a simulation of the pipeline's plan
duration       the total time of a training run, including failures
search         the layouts that fit, fastest first
show           output as text and JSON; picture draws
host           checks of this host's cores and memory; options: the sections of `mega memory-estimate`
megatron       Megatron-LM's own estimate, for comparison
"""
