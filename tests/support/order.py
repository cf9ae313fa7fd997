"""Which test files begin first, so that none that is long keeps one worker busy while the others have ended."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

LONG = """
training/test_interrupt.py processes/test_exit_reports.py parallel/test_experts.py proof/test_parity.py
gpu/test_few_rows.py repository/test_guides.py processes/test_restarts.py parallel/test_auxiliary.py
checkpoint/megatron/test_core.py inference/server/test_serve.py gpu/test_few_experts.py
estimate/test_activations.py processes/test_hosts.py tasks/test_story.py estimate/test_search.py
quickstart/test_tour.py training/test_resume.py checkpoint/megatron/test_mixtures.py training/test_guards.py
repository/test_mutations.py optim/test_state.py inference/test_engine.py estimate/test_command.py
parallel/test_ahead.py training/test_adapters.py training/test_gather.py training/test_going_on.py
parallel/test_layer_values.py estimate/test_memory.py checkpoint/megatron/test_core_out.py
inference/test_serving_proofs.py estimate/test_weights.py checkpoint/test_hub_families.py
cli/test_bad_input.py inference/server/test_identity.py gpu/test_paged_attention.py
checkpoint/megatron/test_core_arguments.py parallel/test_retriever.py cli/test_start.py
estimate/test_steptime.py corpus/test_near_duplicates.py tasks/test_labels.py training/test_dpo.py
proof/test_layouts.py training/test_fp8_casts.py data/test_workers.py data/test_sources.py
inference/test_ahead_drafts.py repository/test_doctests.py gpu/test_attention.py
training/test_lora_checkpoints.py corpus/test_scorers.py parallel/test_context.py
checkpoint/megatron/test_state.py data/test_chat.py data/test_preprocess.py tasks/test_eval.py
training/test_fp8.py
""".split()
"""Of more than ten seconds; those that wait, for time-outs or ranks, stand beside those that compute."""


def rank(file: Path) -> int:
    """Where a test file stands among the long ones; all others come after them, in their own order."""
    name = file.relative_to(TESTS).as_posix() if file.is_relative_to(TESTS) else ""
    return LONG.index(name) if name in LONG else len(LONG)
