"""The ops that models are built from, each with a reference implementation in plain torch. kernels/ contains
implementations in Triton, and attention in CUDA C++. Ops do not call collectives.

norm, activation, dropout, cross_entropy, rotary, sinusoid, heads, matmuls, total, square_sum   the ops of training
attention, mask, partial_attention   attention, its masks, and attention in blocks; cudnn: sliding-window attention
operand, fused_casts, cublaslt       the input of GEMMs, casts fused with the op before them, and calls of cuBLASLt
cublaslt_gelu, cublaslt_fp8          its GEMMs with GELU or GELU's slope; its wgrad and large forward GEMMs in fp8
nvrtc                                compiles kernels in CUDA C++ at run time (kernels/hopper.cu), and launches them
routing, grouped, rows               the choice of experts, grouped GEMMs for experts, and sums of rows
fp8, fp8_blocks, block_scales, recompute   GEMMs in 8 bits, and activation recomputation
few_rows, few_experts, paged_attention, kept_keys, fp8_weights   the ops of inference
counter, autograd                    counter-based random numbers, and conventions between ops and callers
suite, trial, packages, observe      choice of implementations, trials of kernels, third-party ops, and observers
"""
