"""Benchmarks, one file each, named as in --task. Each file here must define `make(asked) -> Benchmark`.

READS: the fields of `options.OWN` that the benchmark reads; a file without READS is assumed to read all of them.
"""
