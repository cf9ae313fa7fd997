"""Which test files begin first, so that none that is long keeps one worker busy while the others have ended."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

LONG = """
training/test_interrupt.py processes/test_exit_reports.py gpu/test_few_rows.py
repository/test_guides.py tasks/test_story.py processes/test_restarts.py
inference/server/test_serve.py gpu/test_few_experts.py processes/test_hosts.py
estimate/test_activations.py inference/test_engine.py quickstart/test_tour.py
training/test_resume.py estimate/test_search.py estimate/test_command.py
inference/test_serving_proofs.py checkpoint/test_store.py cli/test_start.py
corpus/test_near_duplicates.py gpu/test_paged_attention.py inference/server/test_identity.py
checkpoint/test_hub_families.py tasks/test_labels.py training/test_dpo.py
bench/test_preflight.py proof/test_layouts.py inference/server/test_embeddings.py
""".split()
"""Of more than ten seconds; side by side stand those that wait, for time-outs or ranks, and those that compute."""


def rank(file: Path) -> int:
    """Where a test file stands among the long ones; all others come after them, in their own order."""
    name = file.relative_to(TESTS).as_posix() if file.is_relative_to(TESTS) else ""
    return LONG.index(name) if name in LONG else len(LONG)
