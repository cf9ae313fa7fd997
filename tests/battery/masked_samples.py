"""Time of BERT's and T5's samples, and whether another revision makes the same.

    python tests/battery/masked_samples.py [REVISION] [--shared DATA] [--seed N] [--corpora N]

Without REVISION: the milliseconds of one thread for a batch of 512 samples of 128 tokens, of the text of WikiText-2 in
the shared data, best of 30. With REVISION: batches of random corpora and settings, made by the working tree and by that
revision (in a `git worktree`), are compared byte for byte. Exit 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mega.core.config.sections import DataConfig, MaskingConfig
from mega.core.data.batches import Batches
from mega.core.data.build import build_datasets
from mega.core.data.indexed import token_dtype
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.text.build import build

ROOT = Path(__file__).resolve().parents[2]
ROWS = 512


def tokenizer_of(shared: Path) -> Any:
    vocabulary = shared / "bert" / "bert-base-uncased-vocab.txt"
    return build(tokenizer="BertWordPieceLowerCase", vocab_file=vocabulary, vocab_extra_ids=100)


def batches(prefix: Path, tokenizer: Any, rows: int, *, pairs: bool, seed: int, length: int, **masking: Any) -> Batches:
    data = DataConfig(train_data=(str(prefix),), data_cache=str(prefix.parent / "cache"))
    size = {"seq_length": length, "seed": seed, "vocab": tokenizer.vocab_size, "samples": (4 * rows, 0, 0)}
    datasets = build_datasets(data, **size, tokenizer=tokenizer, masking=MaskingConfig(**masking), pairs=pairs)
    assert datasets.train is not None
    return Batches(datasets.train, micro_batch=rows, vocab=tokenizer.vocab_size)


def wikitext(folder: Path, shared: Path, tokenizer: Any) -> Path:
    """WikiText-2's valid split, an article a document, a sentence a sequence."""
    with IndexedWriter(folder / "wiki", token_dtype(tokenizer.vocab_size)) as writer:
        for article in re.split(r"\n = [^=].*? = \n", (shared / "wikitext" / "wiki.valid.raw").read_text()):
            sentences = re.split(r"(?<=[.!?]) +|\n+", article)
            writer.add([ids for ids in map(tokenizer.encode, sentences) if ids])
    return folder / "wiki"


def timed(shared: Path) -> None:
    tokenizer = tokenizer_of(shared)
    with tempfile.TemporaryDirectory() as folder:
        prefix = wikitext(Path(folder), shared, tokenizer)
        for kind, more in (("bert", {}), ("t5", {"decoder_seq_length": 64})):
            taken = batches(prefix, tokenizer, ROWS, seed=5, pairs=True, length=128, sample_kind=kind, **more)
            times = []
            for _ in range(30):
                clock = time.process_time()
                taken.take(0, 1)
                times.append(time.process_time() - clock)
            print(f"{kind}: {ROWS} samples of 128 tokens in {1e3 * min(times):.1f} ms")


def random_corpus(folder: Path, number: int, dtype: np.dtype[np.integer]) -> Path:
    """Ids of whole words, of parts of words, and of control tokens."""
    rng = np.random.default_rng(number)
    longest, largest = rng.choice([3, 30, 300]), rng.choice([103, 3000, 30522])
    with IndexedWriter(folder / "a", dtype) as writer:
        for _ in range(rng.integers(1, 60)):
            sizes = rng.integers(0, 1 + longest, rng.integers(1, 20))
            writer.add([rng.integers(100, largest, size).tolist() for size in sizes])
    return folder / "a"


def digest(batches: Batches) -> str:
    """A digest of three batches, or the message of an error without the place at which it was found."""
    found = hashlib.sha256()
    try:
        for batch in batches.take(0, 3):
            for name, value in sorted(vars(batch).items()):
                array = np.zeros(0) if value is None else value.numpy()
                found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    except ValueError as error:
        return re.sub(r"(has|takes) \d+", "", str(error))
    return found.hexdigest()


def digests(shared: Path, seed: int, corpora: int) -> None:
    """Print one line for each corpus and setting."""
    tokenizer = tokenizer_of(shared)
    for number in range(seed, seed + corpora):
        draw = random.Random(number)
        length, rows = draw.choice([16, 64, 128, 512]), draw.choice([1, 3, 64])
        prob, start = draw.choice([0.15, 0.15, 0.05, 0.5, 0.9]), draw.randrange(2**31)
        settings: dict[str, Any] = {"seed": start, "length": length, "mask_prob": prob}
        with tempfile.TemporaryDirectory() as folder:
            prefix = random_corpus(Path(folder), number, token_dtype(tokenizer.vocab_size))
            for kind, pairs in (("bert", True), ("bert", False), ("t5", True)):
                try:
                    taken = batches(
                        prefix,
                        tokenizer,
                        rows,
                        pairs=pairs,
                        sample_kind=kind,
                        decoder_seq_length=2 * length,
                        **settings,
                    )
                    found = digest(taken)
                except ValueError as error:  # no document has two sentences
                    found = str(error).replace(folder, "")
                print(number, kind, pairs, rows, settings, found)


def digests_of(root: Path, options: argparse.Namespace) -> list[str]:
    """The lines that this script prints with --digests, with the package of the tree `root`."""
    command = [sys.executable, __file__, "--digests", "--shared", str(options.shared.resolve())]
    command += ["--seed", str(options.seed), "--corpora", str(options.corpora)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?")
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("MEGA_SHARED_DATA", "../shared/data")))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--corpora", type=int, default=40)
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.digests:
        digests(options.shared, options.seed, options.corpora)
        return 0
    if options.revision is None:
        timed(options.shared)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, options.revision], cwd=ROOT, check=True)
        try:
            found = [digests_of(root, options) for root in (tree, ROOT)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    wrong = [line for line, other in zip(*found, strict=True) if line != other]
    print(f"seed {options.seed}: {len(found[0]) - len(wrong)} of {len(found[0])} equal", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
