"""Will it fit, how fast, and on which layout: from a run's config, its real stages on the meta device, and its plans.

trace        live bytes of one microbatch on real stages without memory: the only file here that knows torch
footprint    the parts of a trace put together to a chunk of the model, with the buckets that come and go
chunks       what each rank of a pipeline holds of a model, in numbers
weights      parameters, gradients, masters and moments of a rank, as its buckets hold them
memory       a whole step through the pipeline's plan: every stage's peak, and when
hardware     devices and clusters as numbers (hardware.toml); fit makes them of measured seconds
sizes        the numbers of one tensor rank from which times follow
steptime     how long a step takes: arithmetic
duration     how long a training takes, failures included
search       the layouts that fit, fastest first
show         all of it for people and programs; picture draws
megatron     Megatron-LM's own estimate, next to ours
"""
