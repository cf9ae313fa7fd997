"""Random plans for the property tests: every kind, with the numbers it accepts."""

from __future__ import annotations

from hypothesis import strategies as st

from mega.core.plan import Compute, Costs, Plan, plan

SPLIT = Costs(1, 1, 1)
"""F, B and W of one slot each."""

WHOLE = Costs(1, 1, 0)
"""F and B of one slot each, for plans without W acts."""


@st.composite
def plans(draw: st.DrawFn, stages: int = 8, microbatches: int = 24) -> Plan:
    kind = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved", "interleaved", "forward"]))
    fewest, most = {"interleaved": (2, 4), "forward": (1, 4)}.get(kind, (1, 1))
    return plan(
        kind,
        draw(st.integers(1, stages)),
        draw(st.integers(fewest, most)),
        draw(st.integers(1, microbatches)),
    )


def computes(made: Plan, rank: int, kinds: str = "FBW") -> list[Compute]:
    return [act for act in made.acts[rank] if isinstance(act, Compute) and act.kind in kinds]
