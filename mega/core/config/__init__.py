"""What a run is: its options as typed, and the run that they resolve to. It opens no data and knows no torch.

option, schema     what a field of a section is, and all of them as one table
sections           the sections of a run; families: which flags belong to which model
presets, compose   rows of values, and one run out of defaults, preset, TOML file and flags
run                `Options` as typed, `RunConfig` as resolved; toml: both as files
mixture, retriever options of a mixture of experts, and of what reads neighbours: parts of the model's section
check, check_files the rules, all of them at once, before any process starts; unread: flags that change nothing;
                   check_mixture, check_retriever: those of a mixture, and of what reads neighbours
resolve            what options leave out
faults             damage that a run may be asked for
corpora            short names for corpora; page: docs/configuration.md
"""
