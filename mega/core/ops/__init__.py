"""The fast mathematics: one op a file, each with a plain torch reference; kernels/ has their Triton versions. It starts
no collective.

norm, activation, dropout, cross_entropy, rotary, sinusoid, heads, matmuls, total, square_sum   the ops of training
attention, mask, partial_attention   attention, what it sees, and parts of it that add up; cudnn: sliding windows
routing, grouped                     how tokens choose experts, and GEMMs of rows by the matrices of their experts
fp8, recompute                       products in 8 bits, and what is computed again
few_rows, paged_attention, kept_keys, fp8_weights   the ops of a model that answers
counter, autograd                    random numbers by what they act on, and conventions between ops and callers
suite, trial, packages, observe      which implementation a run uses, whether it is trusted, others', and who listens
"""
