"""HOW ranks share the work: the mesh, its collectives, and the layers and schedules built on them.

mesh, collectives, region     the grid of ranks, exchanges along an axis, and how a layer's work is shared
weight, layout, gradients     a parameter, buckets as data, and how gradients become whole; bucket_sums: sums over both;
                              whole_matrices: matrices that an update needs whole
linear, vocab, context        layers and vocabulary cut over the tensor axis, the sequence over the context axis
experts                       rows of tokens on their way to the ranks of their experts, and back
gemms, adapter, deferred      the products of a linear, adapters around them, and those that are put off
pipeline, recompute, replay   plans played, blocks computed again, and a microbatch as a graph of the device
peers, one_shot, shared_memory   exchanges that overlap products, those of decoding, and one host's memory;
                                 pieces: how such products are cut
"""
