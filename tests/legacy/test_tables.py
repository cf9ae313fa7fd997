"""The tables of mega/legacy name what exists, and each flag, program and task once."""

from __future__ import annotations

from collections import Counter

from mega.command_line.legacy import rewrites
from mega.command_line.legacy.programs import programs
from mega.command_line.legacy.tables import table
from mega.command_line.options import spellings_of


def test_a_flag_has_one_row() -> None:
    content = table("flags")
    keys = {"changes_nothing": ("switches", "values", "lists"), "refused": ("flags",)}
    flags = Counter(
        flag for kind, lists in keys.items() for row in content[kind] for key in lists for flag in row.get(key, ())
    )
    assert not [flag for flag, count in flags.items() if count > 1 or not flag.startswith("--")]
    assert {key for kind in keys for row in content[kind] for key in row} <= {
        *("reason", "families", "only"),
        *(key for lists in keys.values() for key in lists),
    }


def test_a_program_names_what_exists() -> None:
    """Verbs, rewrites, and flags of a verb; of two rows with the same name, the last holds always."""
    for name, rows in programs().items():
        assert not rows[-1].when and all(row.when for row in rows[:-1]), name
        for row in rows:
            assert bool(row.verb) != bool(row.why), name
            for function, registry in (
                (row.before, rewrites.BEFORE),
                (row.after, rewrites.AFTER),
                (row.whole, rewrites.WHOLE),
            ):
                assert not function or function in registry, name
            if row.verb and not row.whole:
                known = spellings_of(row.verb)
                mine = [*row.adds, *row.defaults, *row.renames.values(), *(flag for flag, _ in row.values.values())]
                # "DATA" and --gen-subset are read by a rewrite.
                assert {flag for flag in mine if flag not in known} <= {"--gen-subset"}, name


def test_every_rewrite_is_named() -> None:
    rows = [row for rows in programs().values() for row in rows]
    assert {row.before for row in rows} - {""} == set(rewrites.BEFORE)
    assert {row.after for row in rows} - {""} == set(rewrites.AFTER)
    assert {row.whole for row in rows} - {""} == set(rewrites.WHOLE)
