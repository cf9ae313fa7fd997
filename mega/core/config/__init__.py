"""The configuration of a run: the options that the user gave, and the resolved run. This package neither opens data
files nor imports torch.

option, schema     the properties of one option, and all options as one table
sections           the sections of a run; families: flags that only some model families accept
presets, compose   option values of published models; composes a run from defaults, preset, TOML file and flags
run                `Options` (given by the user) and `RunConfig` (resolved); toml: writes both, reads TOML files
mixture, retriever options of mixtures of experts and of retrievers, which belong to the model section
check, check_files the rules for options and files, checked before any process starts; unread: flags without effect;
                   check_mixture, check_retriever: the rules for mixtures of experts and for retrievers
resolve            derives the values of options that are not given
metrics_owner      determines which run wrote a metrics file
faults             faults that --inject causes in a run
corpora            short names for corpora; page: generates docs/configuration.md
"""
