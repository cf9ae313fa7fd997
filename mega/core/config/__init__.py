"""The configuration of a run: its options as typed, and the run that they resolve to. It opens no data and knows no
torch.

option, schema     properties of a field of a section, and all fields as one table
sections           the sections of a run; families: which flags belong to which model
presets, compose   rows of values; one run from defaults, preset, TOML file and flags
run                `Options` as typed, `RunConfig` as resolved; toml: both as files
mixture, retriever options of a mixture of experts and of a retriever: parts of the model's section
check, check_files the rules, all checked at once, before any process starts; unread: flags without effect;
                   check_mixture, check_retriever: the rules of a mixture and of a retriever
resolve            derives the values that options leave out
faults             faults that --inject puts into a run
corpora            short names for corpora; page: docs/configuration.md
"""
