"""The division of work among ranks: the mesh, its collectives, and the layers and schedules that use them.

mesh, collectives, region     the grid of ranks, collectives along an axis, and the ranks that share the work of a layer
weight, layout, gradients     a parameter, the layout of buckets as data, and the reduction of gradients;
                              bucket_sums: norms and other sums over buckets;
                              whole_matrices: gather whole matrices for optimizers that need them
linear, vocab, context        layers and vocabulary sharded over the tensor axis, the sequence over the context axis
experts                       send rows of tokens to the ranks of their experts, and back
gemms, adapter, deferred      the GEMMs of a linear layer, LoRA around them, and deferred weight gradients;
                              weight_casts: fp8 casts of weights that a step's passes share
consistency                   comparison of values between ranks, before their work begins
pipeline, recompute, replay   the executor of plans, activation recomputation, and CUDA graphs of microbatches
peers, one_shot, shared_memory   exchanges that overlap GEMMs, sums during decoding, and memory shared on one host;
                                 pieces: the division of overlapped GEMMs
"""
