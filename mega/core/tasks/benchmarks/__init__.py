"""Benchmarks, one file each, named as in --task. Each file here must define `make(asked) -> Benchmark`.

READS: the fields of `options.OWN` that the benchmark reads; all of them if it is missing.
"""
