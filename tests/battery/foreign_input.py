"""500 mutations each of tokenizer.json, chat templates, packed and columnar files, notes (manifests resealed, notes of
token files) and configurations: every command ends within 30 s of processor time, its processes' in all, and 2 GiB,
with 0, or with 2 and lines that are no traceback and name a file or flag.

An item is 25 mutations of one kind, each in a process forked from this one; the seed is the item's name. A kind has
variants: a form of file and the command that reads it. Before the first mutation of a variant its whole file is read by
the same command, which has to take it: a refusal for another reason would prove nothing. Memory is that of the command
and of all processes that it starts, at their peaks, added. The files to mutate are made of the shared data.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.cli import main
from mega.core.data.indexed import token_dtype
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.text.gpt2 import byte_letters, tokenizer_json
from tests.battery.data_ledger import ROOT, run

EACH, ITEMS = 25, 20
SECONDS, BYTES = 30.0, 2 << 30
WAITED = 1200.0
"""Seconds of the clock after which a command that does not compute is ended; a busy machine makes others wait, too."""
SHARED = Path(os.environ.get("MEGA_SHARED_DATA", ROOT.parent / "shared" / "data"))
HOME = Path(tempfile.mkdtemp(prefix="mega-foreign-"))
Made = tuple[list[str], str]
"""A command line, and what its error has to name."""


class Change:
    """What is done to a whole file: nothing, or mutations drawn by `rng`."""

    def __init__(self, rng: random.Random, *, whole: bool = False) -> None:
        self.rng, self.whole = rng, whole

    def octets(self, data: bytes) -> bytes:
        return data if self.whole else of_bytes(data, self.rng)

    def json(self, content: Any, words: list[str]) -> Any:
        return content if self.whole else of_json(content, self.rng, words)

    def text(self, content: Any) -> bytes:
        return json.dumps(content).encode() if self.whole else as_json(content, self.rng)

    def chance(self, share: float) -> bool:
        return not self.whole and self.rng.random() < share


def _peaks(pid: int, known: dict[int, int]) -> None:
    """Note the peak of memory in KiB of a process and of all below it that are alive."""
    with contextlib.suppress(OSError, LookupError):
        status = Path(f"/proc/{pid}/status").read_text()
        known[pid] = int(status.partition("VmHWM:")[2].split()[0])
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            _peaks(int(child), known)


class Ended(NamedTuple):
    """How a command line ended: what it came to, seconds of processor time, MiB of memory at the most."""

    word: str
    seconds: float
    mebibytes: int


def ends(command: list[str], named: str) -> Ended:
    """Run one command line in a fork. Errors: AssertionError."""
    output, begin = HOME / "output", time.perf_counter()
    peaks: dict[int, int] = {}
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
            resource.setrlimit(resource.RLIMIT_CPU, (3 * int(SECONDS), 3 * int(SECONDS)))
            with open(output, "w") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(file):
                code = main(command)
                file.flush()
            os._exit(code)
        os._exit(99)
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        spent = time.perf_counter() - begin
        if done:
            break
        if spent > WAITED:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"no end within {WAITED} s: {command}")
        _peaks(pid, peaks)
        time.sleep(0.01)
    text, used = output.read_text(errors="replace"), usage.ru_utime + usage.ru_stime
    assert used < SECONDS, (used, command)
    assert os.WIFEXITED(status), (status, command, text[-500:])
    code = os.WEXITSTATUS(status)
    assert "Traceback" not in text and code in (0, 2), (code, command, text[-700:])
    most = max(usage.ru_maxrss, sum(peaks.values()))
    assert most << 10 < BYTES, (most, peaks, command)
    if code:
        lines = [line for line in text.splitlines() if line.strip()]
        assert named in text and len(lines) <= 25, (command, lines[:5])
    return Ended("taken" if code == 0 else "refused", used, most >> 10)


# --- mutations ------------------------------------------------------------------------------------------------------


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, a run cut out, doubled or replaced, or an end lost."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, size = rng.randrange(max(len(changed), 1)), rng.choice([1, 4, 64])
        way = rng.randrange(5)
        if way == 0 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del changed[at : at + size]
        elif way == 2:
            changed[at:at] = changed[at : at + size] * rng.choice([1, 50])
        elif way == 3:
            changed[at : at + size] = rng.randbytes(size)
        elif way == 4 and rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


VALUES: list[Any] = [
    None, True, -1, 0, 1 << 31, 1 << 62, 1 << 70, 10**400, 1e308, 0.5, "", "x", "a" * 5000, "\ud800", "(", "(a+)+$",
    [], [[]], {}, {"type": "Sequence"}, {"Regex": "("}, "<unk>", ["a", "b"], {"a": {"b": [1]}},
]  # fmt: skip


def of_json(content: Any, rng: random.Random, words: list[str]) -> Any:
    """One to three places of a JSON value changed: another value, a key gone, twice, or renamed to another's."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.choice([1, 1, 2, 3])):
        at, above = content, None
        while isinstance(at, dict | list) and at and (above is None or rng.random() < 0.8):
            above, key = at, rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at = above[key]
        if above is None:
            return rng.choice(VALUES)
        way = rng.randrange(4)
        if way == 0:
            del above[key]
        elif way == 1 and isinstance(above, dict):
            above[rng.choice(words)] = at
        elif way == 2 and isinstance(at, str):
            above[key] = rng.choice(words)
        else:
            above[key] = rng.choice(VALUES)
    return content


def as_json(content: Any, rng: random.Random) -> bytes:
    text = json.dumps(content)
    if rng.random() < 0.1:
        text = text.replace(": 1,", rng.choice([": 1e999,", ": NaN,", ": " + "9" * 5000 + ",", ": " + "[" * 9000]), 1)
    return text.encode("utf-8", "surrogatepass")


def words_of(content: Any) -> list[str]:
    if isinstance(content, dict):
        return [*content, *(word for value in content.values() for word in words_of(value))]
    if isinstance(content, list):
        return [word for value in content for word in words_of(value)]
    return [content] if isinstance(content, str) else []


# --- tokenizers and templates ---------------------------------------------------------------------------------------


def tokenizer() -> dict[str, Any]:
    """GPT-2's first 700 pieces with every kind of part that a tokenizer.json has."""
    merges = [
        (line.split()[0], line.split()[1]) for line in (SHARED / "gpt2/gpt2-merges.txt").read_text().splitlines()[1:444]
    ]
    pieces = [*byte_letters().values(), *(left + right for left, right in merges), "<|im_start|>", "<|im_end|>"]
    made: dict[str, Any] = json.loads(tokenizer_json({p: i for i, p in enumerate(dict.fromkeys(pieces))}, merges))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    made["added_tokens"] = [{"id": made["model"]["vocab"][w], "content": w, **flags} for w in pieces[-2:]]
    made["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}],
    }
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, made["pre_tokenizer"]]}
    one = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [700], "tokens": ["<|im_start|>"]}}
    made["post_processor"] = {"type": "TemplateProcessing", "single": one, "pair": one, "special_tokens": special}
    return made


def texts() -> Path:
    path = HOME / "texts.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": f"Some text {i}, of 12 words."}) + "\n" for i in range(20)))
    return path


def preprocess(source: Path, *options: str) -> list[str]:
    shutil.rmtree(HOME / "tokens", ignore_errors=True)
    (HOME / "tokens").mkdir()
    return ["preprocess", "--input", str(source), "--output-prefix", str(HOME / "tokens/t"), "--workers", "1", *options]


def tokenizer_file(variant: str, change: Change) -> Made:
    whole, path = tokenizer(), HOME / "tokenizer.json"
    if change.chance(0.25):
        path.write_bytes(change.octets(json.dumps(whole).encode()))
    else:
        small = {key: value for key, value in whole.items() if key != "model"}
        part = {"model": change.json(whole["model"], ["a", "BPE", "Unigram", "WordPiece", "WordLevel"])}
        rest = change.json(small, [*words_of(small), "Metaspace", "ByteFallback", "Fuse", "Precompiled", "Strip"])
        changed = whole | part if change.chance(0.4) else {**whole, **rest} if isinstance(rest, dict) else rest
        path.write_bytes(change.text(changed))
    return preprocess(texts(), "--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", str(path)), str(path)


def model_file(variant: str, change: Change) -> Made:
    path = HOME / "tokenizer.model"
    path.write_bytes(change.octets((SHARED / "llama2/tokenizer.model").read_bytes()))
    return preprocess(texts(), "--tokenizer", "Llama2Tokenizer", "--tokenizer-model", str(path)), str(path)


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TEMPLATES = [
    "{% for m in messages %}" + TURN + "{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m.content.strip() }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}",
    "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content %}{% endfor %}{{ ns.x }}",
    "{% macro turn(m) %}" + TURN + "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
]
SNIPPETS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'a' * 10**9 }}",
    "{{ 10 ** 10 ** 9 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ '%0999999999d' % 1 }}",
    "{{ lipsum(n=10**6) }}", "{{ messages[0].content * 10**6 }}", "{{ [0] * 10**10 }}", "{{ range(10**9) | list }}",
    "{{ messages | map(attribute='content') | join | center(10**9) }}", "{{ self.__init__.__globals__ }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ messages[0].content[1:] }}", "{{ '\ue000999999999\ue001' }}", "{% include 'a' %}", "{{ cycler }}", "{{",
]  # fmt: skip


def template(variant: str, change: Change) -> Made:
    path, tokens, rng = HOME / "chat.jinja", HOME / "im.json", change.rng
    source = TEMPLATES[int(variant)]
    for _ in range(0 if change.whole else rng.choice([1, 2, 3])):
        at = rng.randrange(len(source))
        if rng.random() < 0.4:
            source = source[:at] + rng.choice(SNIPPETS) + source[at:]
        else:
            source = change.octets(source.encode()).decode(errors="replace") or "x"
    path.write_text(source)
    tokens.write_text(json.dumps(tokenizer()))
    talk = HOME / "talk.jsonl"
    talk.write_text(json.dumps({"prompt": "How are you?", "completion": "Well."}) + "\n")
    files = ["--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", str(tokens), "--number", "0"]
    return ["data", "show-sample", "--input", str(talk), *files, "--chat-template", str(path)], "--chat-template"


# --- packed files, notes, configurations ----------------------------------------------------------------------------


def archives() -> dict[str, bytes]:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet
    import zstandard

    lines = texts().read_bytes() * 50
    bomb = lines[: lines.index(b"\n") + 1] + b"\n" * (64 << 20)
    table, arrow, parquet = pyarrow.table({"text": ["some text"] * 500}), io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(table, parquet)
    with pyarrow.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table)
    whole = {"arrow": arrow.getvalue(), "parquet": parquet.getvalue()}
    packers: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    for end, pack in (packers | {"zst": zstandard.compress}).items():
        whole |= {f"jsonl.{end}": pack(lines), f"b.jsonl.{end}": pack(bomb)}
    return whole


def archive(variant: str, change: Change) -> Made:
    whole_archives.update(whole_archives or archives())
    path = HOME / f"packed.{variant}"
    path.write_bytes(change.octets(whole_archives[variant]))
    (HOME / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "some", "text"]))
    return preprocess(path, "--tokenizer", "BertWordPieceCase", "--vocab-file", str(HOME / "vocab.txt")), str(path)


whole_archives: dict[str, bytes] = {}


TRAIN = (
    "pretrain --model tiny-gpt --layers 1 --hidden 16 --heads 2 --seq-length 8 --dtype fp16 --initial-loss-scale 1024 "
    "--lr 1e-3 --lr-decay constant --micro-batch 1 --global-batch 2 --mock-data --tokenizer NullTokenizer "
    f"--vocab-size 64 --metrics {HOME}/metrics.jsonl"
).split()


def trained() -> Path:
    """The directory of a run of one step, with moments and a loss scale."""
    path = HOME / "trained"
    if not path.exists():
        assert ends([*TRAIN, "--steps", "1", "--save", str(path), "--save-interval", "1"], "").word == "taken", (
            HOME / "output"
        ).read_text()
    return path


def note(variant: str, change: Change) -> Made:
    if variant in ("verify", "inspect"):
        prefix = HOME / "corpus"
        with IndexedWriter(prefix, token_dtype(100)) as writer:
            writer.add([[1, 2, 3] * 100])
        path = Path(f"{prefix}.json")
        found = json.loads(path.read_bytes())
        path.write_bytes(change.text(change.json(found, words_of(found))))
        return ["data", variant, str(prefix)], str(prefix)
    load = HOME / "run"
    shutil.rmtree(load, ignore_errors=True)
    shutil.copytree(trained(), load)
    path = next(load.glob("step-*/manifest.json"))
    found = json.loads(path.read_bytes())
    if change.chance(0.25):
        changed = change.json(found, words_of(found["meta"]))
    else:
        changed = {**found, "meta": change.json(found["meta"], words_of(found["meta"]))}
    text = change.text(changed)
    path.write_bytes(text)
    path.with_name("manifest.json.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")
    shutil.rmtree(HOME / "other", ignore_errors=True)
    verbs = {
        "show": ["checkpoint", "show", str(load), "--tensors"],
        "generate": ["generate", "--load", str(load), "--tokens", "2", "--prompt", "1 2 3"],
        "reshard": ["reshard", "--load-dir", str(load), "--save-dir", str(HOME / "other")],
        "resume": [*TRAIN, "--steps", "2", "--resume", str(path.parent)],
    }
    return verbs[variant], ""


DEEPSPEED = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "steps_per_print": 1,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": 10}},
}  # fmt: skip
TOML = (
    '[model]\nlayers = 2\nhidden = 64\nheads = 4\nvocab = 100\nrope_base = 1e4\nnorm = "rmsnorm"\n[batch]\n'
    "seq_length = 16\nmicro_batch = 1\nglobal_batch = 2\nrampup = [1, 1, 10]\n[optimizer]\nlr = 1e-3\n"
)
DEVICE = "memory = 80.0\nnode = 8\n[peak]\nbf16 = 989.0\n"
BOMBS = [
    b"a" + b".a" * 30000 + b"=1\n",
    b"[[a]]\n" * 90000,
    b"x = " + b"[" * 5000,
    b"k = 0x" + b"f" * 9000,
    b"#" * 3000000,
]
SIZES = [b"3000000", b"99999999999", b"-1", b"1e999", b"0x" + b"f" * 5000, b"nan", b'"a"']


def config(variant: str, change: Change) -> Made:
    path, rng = HOME / f"{variant}.{'json' if variant == 'deepspeed' else 'toml'}", change.rng
    if variant == "deepspeed":
        whole = json.dumps(DEEPSPEED).encode()
        changed = change.json(DEEPSPEED, words_of(DEEPSPEED))
        path.write_bytes(change.octets(whole) if change.chance(0.2) else change.text(changed))
        base = ["pretrain", "--model", "tiny-gpt", "--vocab", "100", "--mock-data", "--print-config"]
        return [*base, "--deepspeed-config", str(path)], ""
    lines = (TOML if variant == "toml" else DEVICE).encode().splitlines(keepends=True)
    way = 1.0 if change.whole else rng.random()
    if way < 0.2:
        lines.insert(rng.randrange(len(lines)), rng.choice(BOMBS))
    elif way < 0.6:
        at = rng.choice([i for i, line in enumerate(lines) if b"=" in line])
        lines[at] = lines[at].partition(b"=")[0] + b"= " + rng.choice(SIZES) + b"\n"
    else:
        lines = [change.octets(b"".join(lines))]
    path.write_bytes(b"".join(lines))
    model = ["--config", str(path)]
    if variant == "device":
        model = ["--model", "tiny-gpt", "--vocab", "100", "--gpu", str(path)]
    return ["memory-estimate", *model, "--micro-batch", "1"], ""


Maker = Callable[[str, Change], Made]
read_whole: set[tuple[str, str]] = set()
"""Kinds and variants whose whole file was taken by this process."""


def prove(kind: str, number: int, make: Maker, variants: Sequence[str]) -> Callable[[], dict[str, Any]]:
    def proof() -> dict[str, Any]:
        rng, seen, slowest, most = random.Random(f"{kind} {number}"), Counter[str](), 0.0, 0
        for _ in range(EACH):
            variant = rng.choice(variants)
            if (kind, variant) not in read_whole:
                command, named = make(variant, Change(random.Random(0), whole=True))
                assert ends(command, named).word == "taken", (command, (HOME / "output").read_text()[-500:])
                read_whole.add((kind, variant))
            command, named = make(variant, Change(rng))
            ended = ends(command, named)
            seen[ended.word] += 1
            slowest, most = max(slowest, ended.seconds), max(most, ended.mebibytes)
        return {"mutations": EACH, **seen, "slowest s": round(slowest, 1), "peak MiB": most}

    return proof


PACKED = [f"{start}jsonl.{end}" for start in ("", "b.") for end in ("gz", "bz2", "xz", "zst")]
KINDS: dict[str, tuple[Maker, Sequence[str]]] = {
    "tokenizer.json": (tokenizer_file, [""]),
    "template": (template, [str(number) for number in range(len(TEMPLATES))]),
    "archive": (archive, ["arrow", "parquet", *PACKED]),
    "note": (note, ["verify", "inspect", "show", "generate", "reshard", "resume"]),
    "config": (config, ["toml", "deepspeed", "device"]),
    "tokenizer.model": (model_file, [""]),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    import mega.commands.memory_estimate
    import mega.core.estimate.show
    import mega.core.inference.generation.prompts  # noqa: F401 - forks have loaded what commands need

    try:
        run("foreign_input", [(f"{k} {n}", prove(k, n, *made)) for k, made in KINDS.items() for n in range(ITEMS)])
    finally:
        shutil.rmtree(HOME)
