"""Benchmarks, one file each, called as --task names them. A file with `make(asked) -> Benchmark` here is a benchmark.

READS: the fields of `options.OWN` that it reads; all of them if it does not say.
"""
