"""Predicts memory, step time and the best layout from a run's config, its stages on the meta device, and pipeline
plans.

trace          live bytes of one microbatch on stages on the meta device. Only trace and operation_log import torch when
               they are imported
operation_log  the operations of one microbatch, as shapes
operations     the operations of a chunk of the model
cost           seconds of operations; curves interpolates measured times (curves.json, or those of a calibrated device)
footprint      peak bytes of a chunk, from its trace and the temporary buckets of ZeRO 2 and 3
chunks         the units and blocks of the model on each pipeline rank, as numbers
weights        parameters, gradients, masters and moments of a rank, as its buckets store them
experts        additional memory if the experts have uneven loads
memory         simulation of a step's memory with the pipeline plan: the peak of every stage, and when the peak occurs
hardware       constants of devices and clusters (hardware.toml); fit computes these constants from measurements
steptime       the time of a step, from a simulation of the pipeline plan
serving        the time of an engine's step; `bench/simulated.py` predicts the speed of a server from it
duration       the total time of a training run, including failures
search         the layouts that fit, fastest first
show           output as text and JSON; picture draws bars as .svg or .png
host           checks of this host's cores and memory; options: the sections of `mega memory-estimate`
megatron       Megatron-LM's own estimate, for comparison
"""
