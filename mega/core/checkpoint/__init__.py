"""Checkpoints in the project's own format and in forms of other programs, on a disk or in an object store.

This package imports nothing from parallel/ or model/: here a rank is a number, and a model is the list of its tensors.

own     the project's format: saving, publishing, finding, reading in any layout, retention, inspection
forms   the formats of other programs (Hugging Face, Meta, Megatron-LM, ...), read and written
"""
