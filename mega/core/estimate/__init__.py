"""Will it fit, how fast, and on which layout: from a run's config, its real stages on the meta device, and its plans.

trace        live bytes of one microbatch on real stages without memory, with heard the only files here that know torch
heard        the operations of that microbatch, as shapes
operations   those of a chunk of the model
cost         seconds of operations, from measured curves (curves.json)
footprint    the parts of a trace put together to a chunk of the model, with the buckets that come and go
chunks       what each rank of a pipeline holds of a model, in numbers
weights      parameters, gradients, masters and moments of a rank, as its buckets hold them
experts      what an uneven load of them takes
memory       a whole step through the pipeline's plan: every stage's peak, and when
hardware     devices and clusters as numbers (hardware.toml); fit makes them of measured seconds
steptime     how long a step takes: the pipeline's plan on a clock
duration     how long a training takes, failures included
search       the layouts that fit, fastest first
show         all of it for people and programs; picture draws
host         what the ranks of this host need of it; options: the sections of `mega memory-estimate`
megatron     Megatron-LM's own estimate, next to ours
"""
