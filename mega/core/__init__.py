"""The parallel model and all that trains, keeps and serves it. It knows no command line.

architecture, model, ops    what a model is, its mathematics, and its fast parts
plan, parallel, processes   schedules as data, the work of ranks, and their life
config, data, text, corpus  what a run is, and what it reads
training, optim, tasks      the loop, its updates, and what scores a model
checkpoint                  what is kept, ours and others'
inference                   a model that answers
estimate, report            what a run needs, and how it went; quickstart: a tour
proof, bench                whether mega is right, and how fast
family                      a model family as one record: the only choice of code by family
device, files, terminal, untrusted   what a host gives, within limits; activity: what this process is doing
batch, shard, flops         values that several rooms share; words: how lines name ranks and numbers
"""
