"""The configuration of a run: its options as typed, and the resolved run. This package does not open data files and
does not import torch.

option, schema     the properties of one option, and all options as one table
sections           the sections of a run; families: flags that belong to some model families only
presets, compose   option values of published models; composes a run from defaults, preset, TOML file and flags
run                `Options` as typed and `RunConfig` as resolved; toml: writes both as TOML and reads TOML files
mixture, retriever options of a mixture of experts and of a retriever, which are parts of the model section
check, check_files the rules, all checked at once, before any process starts; unread: flags without effect;
                   check_mixture, check_retriever: the rules of a mixture and of a retriever
resolve            derives the values that options leave out
faults             faults that --inject puts into a run
corpora            short names for corpora; page: generates docs/configuration.md
"""
