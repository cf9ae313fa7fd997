"""The parallel model, and what trains, saves and serves it. It knows no command line.

architecture, model, ops    what a model is, its mathematics, and its fast kernels
plan, parallel, processes   pipeline schedules as data, collectives and gradients, and how ranks start and end
config, data, text, corpus  what a run is, and what it reads
training, optim, tasks      the training loop, its updates, and benchmarks that score a model
checkpoint, hub             checkpoints, our format and other programs'; names of the Hugging Face Hub
inference                   generation and serving
estimate, report            what a run needs, and how it went; quickstart: a first run from nothing
retro                       databases of texts that a model reads along with its own
proof, bench                whether layouts and conversions agree, and how fast machines and mega are
family                      a model family as one record: the only choice of code by family
device, files, terminal, untrusted   GPU or CPU, durable writes, output, and input within limits; activity: what this
            process is doing
batch       a microbatch's tensors; shard: where a rank's part of a tensor lies; flops: of a step; words: how
            messages name ranks and numbers
"""
