"""The example scripts of Megatron-LM 23.06 that pretrain GPT, BERT and T5, word for word: they check, and the model is
theirs.
"""

from __future__ import annotations

import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.core.data.build import _Builder
from mega.core.data.preprocessing.writer import IndexedWriter
from tests.support.lines import parsed
from tests.support.old_lines import recorded
from tests.support.shared import shared

ONE, EIGHT = "torchrun --nproc_per_node 1", "torchrun --nproc_per_node 8"
SCRIPTS = [
    # (script, launcher, family, ranks, parameters of a rank of each stage, with the padded vocabulary)
    ("bert", ONE, "bert", 1, ["336,297,858"]),
    ("bert_distributed", EIGHT, "bert", 8, ["336,297,858", "8 ranks: tp 1 x cp 1 x dp 8 x pp 1"]),
    ("bert_distributed_with_mp", EIGHT, "bert", 8, ["91,869,184", "93,463,554"]),
    ("t5", ONE, "t5", 1, ["222,495,744"]),
    ("t5_distributed", EIGHT, "t5", 8, ["222,495,744", "8 ranks: tp 1 x cp 1 x dp 8 x pp 1"]),
    ("t5_distributed_with_mp", EIGHT, "t5", 8, ["111,"]),
    ("gpt", ONE, "gpt", 1, ["354,871,296"]),
    ("gpt_distributed", EIGHT, "gpt", 8, ["354,871,296", "8 ranks: tp 1 x cp 1 x dp 8 x pp 1"]),
    ("gpt_distributed_with_mp", EIGHT, "gpt", 8, ["102,483,968", "101,437,440"]),
    ("gpt3_175B", "srun -n 1024 python", "gpt", 1024, ["1,463,", "1,359,461,376", "1,438,"]),
]


def words_of(script: str) -> list[str]:
    """Program and flags as they were recorded from the script, but that files are not called as a folder is."""
    wanted = ("Megatron-LM 23.06", f"examples/pretrain_{script}.sh")
    row = next(row for row in recorded() if (row["system"], row["script"]) == wanted)
    files = {"--vocab-file": "gpt2-vocab.json", "--merge-file": "gpt2-merges.txt"}
    pairs = zip(["", *row["flags"]], row["flags"], strict=False)
    named = [f"PLACEHOLDER/{files[flag]}" if flag in files and word == "PLACEHOLDER" else word for flag, word in pairs]
    return [row["program"], *named]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Vocabularies and corpora where the scripts name them. Their millions of samples are not drawn."""
    monkeypatch.chdir(tmp_path)
    Path("PLACEHOLDER").mkdir()
    for family in ("bert", "t5"):
        shutil.copy(shared("bert/bert-base-uncased-vocab.txt"), f"PLACEHOLDER/{family}-vocab.txt")
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(shared(f"gpt2/{name}"), "PLACEHOLDER")
    draw = random.Random(3)
    for name, length in (("PLACEHOLDER_text_sentence", 8), ("PLACEHOLDER_text_document", 3000), ("PLACEHOLDER", 3000)):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            for _ in range(60):
                sentences = [[draw.randrange(1000, 2000) for _ in range(8)] for _ in range(6)]
                writer.add(sentences if length == 8 else [[7] * length])

    whole: Any = _Builder.blend

    def few(self: Any, *arguments: Any) -> Any:
        return whole(self, *arguments[:-1], min(arguments[-1], 100))

    monkeypatch.setattr(_Builder, "blend", few)
    return tmp_path


@pytest.mark.parametrize(("script", "launcher", "family", "ranks", "told"), SCRIPTS, ids=[row[0] for row in SCRIPTS])
def test_it_checks(
    place: Path,
    script: str,
    launcher: str,
    family: str,
    ranks: int,
    told: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`mega pretrain` reads its flags, and the line that `mega translate` writes means the same."""
    program, *flags = words_of(script)
    assert main(["translate", *launcher.split(), program, *flags]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    start, _, translated = line.partition("mega pretrain ")
    assert start == ("srun -n 1024 " if ranks == 1024 else "")
    translated = translated.removeprefix(f"--nproc {ranks} ")
    loss = "--loss-normalizer microbatch --no-mask-padded-vocab".split()
    loss += ["--memory-padding", "zero"] if family == "t5" else []
    assert parsed(translated) == parsed(shlex.join(["--family", family, *flags, *loss]))
    assert main(["pretrain", "--family", family, *flags, "--dry-run", "--world", str(ranks)]) == 0
    printed = capsys.readouterr().out
    assert "everything checked, nothing trained" in printed
    assert all(number in printed for number in told), printed
