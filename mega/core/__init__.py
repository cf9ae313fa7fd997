"""The parallel model, and the code that trains, saves and serves it. The package does not depend on the command line.

architecture, model, ops    the description of a model, its computation, and its fast kernels
plan, parallel, processes   pipeline schedules as data, collectives and gradients, and the start and end of ranks
config, data, text, corpus  the options of a run, and the data that it reads
training, optim, tasks      the training loop, the optimizers, and benchmarks that score a model
checkpoint, hub             checkpoints, in mega's and in other formats; names on the Hugging Face Hub
inference                   generation and serving
estimate, report            the resources that a run needs, and its results; quickstart: a first run without any input
retro                       databases of texts that a model reads in addition to its input
proof, bench                tests that layouts and conversions agree, and benchmarks of machines and of mega
family                      a model family as one record; no other module selects code by family
device      the GPU or CPU; files: durable writes; terminal: output; untrusted: input within limits
activity    what this process is doing
batch       the tensors of a microbatch; shard: the part of a tensor that a rank holds; flops: FLOPs of a step
words       how messages name ranks and numbers; environment: switches in environment variables
"""
