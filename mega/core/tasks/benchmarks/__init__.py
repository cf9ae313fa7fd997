"""Benchmarks, one file each, with the name used in --task. Each file must define `make(asked) -> Benchmark`.

READS lists the fields of `options.OWN` that the benchmark reads. A benchmark without READS is assumed to read all
fields.
"""
