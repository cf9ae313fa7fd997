"""Checkpoints in the project's own format and in formats of other programs, on a disk or in an object store.

This package does not import parallel/ or model/. A rank is represented by its number, and a model is represented by the
list of its tensors.

own     the project's format: saving, publishing, finding, reading in any layout, retention, inspection
forms   the formats of other programs (Hugging Face, Meta, Megatron-LM, ...), read and written
"""
