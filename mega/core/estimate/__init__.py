"""Will it fit, how fast, and on which layout: arithmetic on a run's config, inventory and plans. No torch, no device.

weights      parameters, gradients, masters and moments of a rank, as its buckets hold them
operators    each op: the bytes that are kept of it, and those that live while it runs
activations  ops in their order: what a microbatch takes on a chunk of the model
memory       a whole step through the pipeline's plan: every stage's peak, and when
flops        operations of a model
hardware     devices and clusters as numbers (hardware.toml); fit makes them of measured seconds
steptime     how long a step takes
duration     how long a training takes, failures included
search       the layouts that fit, fastest first
show         all of it for people and programs; picture draws
megatron     Megatron-LM's own estimate, to stand beside ours
"""
