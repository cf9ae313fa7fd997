"""DISK: checkpoints in the project's own format and in foreign forms. Knows no ranks and no model code.

own     the project's format: saving, publishing, finding, reading in any layout, retention, inspection
forms   everybody else's: Hugging Face, Meta, Megatron-LM and others, into our format and back
"""
