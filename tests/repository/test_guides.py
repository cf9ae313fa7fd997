"""The guides of docs/guides: their commands run, in order, with small models in place of large ones.

A `bash` block is a list of commands. A `toml` or `json` block that begins with a file's name is that file. A `python`
block is run. Each line of a `text` block is printed by the block of commands before it; blocks without a language show
what depends on the machine. A run of several hosts or of eight ranks is planned (`--dry-run`), not started.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega import cli
from mega.core.text.chat.templates import TEMPLATES
from mega.core.text.gpt2 import byte_letters
from tests.repository.test_pages import PAGES, REPOSITORY, text_of

GUIDES = sorted(path.stem for path in (REPOSITORY / "docs/guides").glob("*.md"))

SMALL = {
    "finetune": "--steps 2 --lr-warmup-steps 1 --seq-length 64 --micro-batch 1 --global-batch 2 --dtype fp32"
    " --device cpu --eval-iters 1",
    "pretrain": "--device cpu --eval-iters 1",
    "eval": "--device cpu --dtype fp32 --seq-length 64",
    "generate": "--tokens 4",
}
"""Flags that are added to the lines of a verb; the last value of a flag counts."""

SHORT = {
    "first-model": "--steps 2 --lr-warmup-steps 1 --save-interval 2 --eval-interval 2",
    "from-megatron": "--steps 1 --seq-length 32",
    "tokenizer": "--steps 2",
    "chat-model": "--steps 2",
}
"""Guide -> flags that are added to its `mega pretrain`."""

SHORTER = {"demo/corpus/train.jsonl": 1_000_000, "demo/corpus/held-out.jsonl": 80_000}
"""Files that a guide makes, and how many bytes of them it goes on with."""

NEEDS_A_MACHINE = (
    "salloc ",
    "mkdir ",
    "sbatch ",
    "srun ",
    "export ",
    "tail ",
    "curl ",
    "mega serve ",
    "mega download ",
    "mega preflight ",
)
"""Beginnings of lines that need a scheduler, a network or a terminal; only that their flags exist is tested."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the guides assume: token files, their tokenizer, conversations, a Llama, a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("mega.core.proof.rows.STEPS", (1, 2))
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    _tokens(tmp_path)
    talk = [{"role": "user", "content": "Who keeps the light?"}, {"role": "assistant", "content": "The keeper does."}]
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 8)
    (tmp_path / "mine.jsonl").write_text(f"{json.dumps({'text': 'The keeper wrote down the weather. ' * 20})}\n" * 40)
    return tmp_path


GPT2 = "--tokenizer GPT2BPETokenizer --vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt"


def _tokens(folder: Path) -> None:
    """Token files `tokens/my_text_document` and `my_text_document`; their tokenizer, of bytes."""
    (folder / "tokenizer").mkdir()
    letters = {letter: byte for byte, letter in byte_letters().items()}
    (folder / "tokenizer/vocab.json").write_text(json.dumps({**letters, "<|endoftext|>": 256}))
    (folder / "tokenizer/merges.txt").write_text("#version: 0.2\n")
    (folder / "my.jsonl").write_text(f"{json.dumps({'text': 'One line of text after another. ' * 200})}\n" * 40)
    _type(f"mega preprocess --input my.jsonl --output-prefix tokens/my --append-eod {GPT2}")
    for file in (folder / "tokens").iterdir():
        shutil.copy(file, folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / "tokenizer" / name, folder)


def _run(folder: Path, *places: str, positions: int = 32) -> None:
    """A run of two steps, under each of some names."""
    sizes = f"--layers 2 --hidden 32 --heads 4 --seq-length {positions} --micro-batch 2 --steps 2 --lr 1e-3"
    sizes += " --device cpu"
    _type(f"mega pretrain {sizes} --eval-iters 1 --data-path tokens/my_text_document {GPT2} --save {places[0]}")
    for place in places[1:]:
        shutil.copytree(folder / places[0], folder / place)


def _llama(folder: Path, name: str = "Llama-3.2-1B", **settings: str) -> None:
    """A small random model with Llama 3's control tokens; `settings` are of its tokenizer, such as a chat template."""
    from tokenizers import Tokenizer

    from tests.support.gguf_models import folder_of

    model = folder_of(folder / name, "llama3.2-llama-bpe")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    controls = ("begin_of_text", "start_header_id", "end_header_id", "eot_id")
    tokenizer.add_special_tokens([f"<|{name}|>" for name in controls])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **settings}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


def _chat_tokens(folder: Path) -> None:
    """Token files `tokens/chat_text_document`, whose tokenizer has the control tokens of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_letters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    (made := folder / "tokenizers/chat").mkdir(parents=True)
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    given = f"--tokenizer HuggingFaceTokenizer --tokenizer-model {made / 'tokenizer.json'}"
    _type(f"mega preprocess --input my.jsonl --output-prefix tokens/chat --append-eod {given}")


def _prepare(guide: str, folder: Path) -> None:
    if guide in ("chat-model", "continue-llama", "lora"):
        pytest.importorskip("transformers", reason="needs the extra dev: pip install '.[dev]'")
        if guide == "lora":
            pytest.importorskip("peft", reason="needs the extra peft")
            _llama(folder, "Llama-3.2-1B-Instruct", chat_template=TEMPLATES["llama3"])
            _run(folder, "runs/first", positions=64)
        else:
            _llama(folder)
        if guide == "chat-model":
            _chat_tokens(folder)
    elif guide in ("one-node", "slurm", "troubleshooting"):
        _run(folder, "runs/llama-1b", "runs/llama-7b", "runs/first")
    elif guide == "tokenizer":
        pytest.importorskip("sentencex", reason="needs the extra data")
        pages = [json.dumps({"text": text_of(page)}) for page in PAGES]
        (folder / "my.jsonl").write_text("\n".join(pages) + "\n", encoding="utf-8")
    elif guide == "from-megatron":
        _run(folder, "runs/given")
        _type("mega reshard --load-dir runs/given --save-dir megatron/gpt --saver megatron-23.06")


def _blocks(guide: str) -> Iterator[tuple[str, str]]:
    """(language, text) of each block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text_of(f"docs/guides/{guide}.md"), re.DOTALL | re.MULTILINE)


def _typed(guide: str, line: str) -> str | None:
    """A line of a guide as it is tested; None where it needs a machine."""
    if line.startswith(NEEDS_A_MACHINE) or not line.strip():
        return None
    assert line.startswith("mega "), f"{line}: is not a command of mega; add it to NEEDS_A_MACHINE if it cannot run"
    verb = line.split()[1]
    if verb == "launch":
        return line
    more = SMALL.get(verb, "") if guide != "tokenizer" or verb != "train-tokenizer" else "--vocab-size 2000"
    if verb == "pretrain":
        more += " " + SHORT.get(guide, "")
        if "recipes/" in line:
            # runs/ has small runs in place of the recipes' own; a dry run would compare the recipe with them
            line = line.replace("--save runs/", "--save planned/")
            return line if "--dry-run" in line else f"{line} --dry-run"
    return f"{line} {more}"


def _type(line: str) -> str:
    """Run one command line of `mega`; what it prints."""
    words = shlex.split(line, comments=True)[1:]
    file = None
    if words[-2:-1] == [">"]:
        file = Path(words[-1])
        del words[-2:]
    with pytest.MonkeyPatch.context() as patch:
        printed = io.StringIO()
        patch.setattr("sys.stdout", printed)
        patch.setattr("sys.stdin", io.StringIO("Who keeps the light?\n"))
        code = cli.main(words)
    if file is not None:
        file.write_text(printed.getvalue())
    assert code == 0 or (words[:2] == ["checkpoint", "diff"] and code == 1), f"{line}: exit code {code}"
    return printed.getvalue()


def _shorten(folder: Path) -> None:
    """Whole lines of the files that are longer."""
    for name, size in SHORTER.items():
        if (file := folder / name).exists() and file.stat().st_size > size:
            file.write_bytes(file.read_bytes()[:size].rpartition(b"\n")[0] + b"\n")


def _check_printed(expected: str, printed: str) -> None:
    """Each line of a block is printed, in its order."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in expected.splitlines():
        assert " ".join(line.split()) in lines, f"not printed: {line}\n{printed}"


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_works_as_typed(guide: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _prepare(guide, folder)
    printed = ""
    for language, text in _blocks(guide):
        name = re.match(r"# ([\w.-]+\.toml)\n", text)
        if language == "toml" and name:
            (folder / name[1]).write_text(text)
        elif language == "text":
            _check_printed(text, printed)
        elif language == "python":
            exec(compile(text, guide, "exec"), {"__name__": "__main__"})
        elif language == "bash":
            capfd.readouterr()
            lines = text.replace("\\\n", " ").splitlines()
            printed = "".join(_type(line) for line in (_typed(guide, line) for line in lines) if line)
            printed += "".join(capfd.readouterr())
            _shorten(folder)
    _check_metrics(folder)


def _check_metrics(folder: Path) -> None:
    """Fields and events of the runs of a guide are those of docs/metrics.md."""
    words = set(re.findall(r"`([\w ]+)`", text_of("docs/metrics.md")))
    for path in folder.glob("runs/*/metrics*.jsonl"):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            assert {*row} - {"event"} <= words and row.get("event", "step") in words, row


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_has_its_parts(guide: str) -> None:
    """For whom, what they have at the end, what can go wrong, what to read next; about one page."""
    text = text_of(f"docs/guides/{guide}.md")
    assert text.count("\n**For** ") == 1 and "\n## Next\n" in text
    if guide != "troubleshooting":
        assert re.search(r"\*\*At the end\*\*", text.replace("\n", " ")) and "\n## What can go wrong\n" in text
    assert len(text.split()) < 1000


def _messages() -> list[str]:
    """What the first column of the tables of troubleshooting quotes."""
    rows = re.findall(r"^\| (`.*?) \|", text_of("docs/guides/troubleshooting.md"), re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row) if not message.startswith("CUDA")]


@pytest.mark.parametrize("message", _messages())
def test_a_message_of_troubleshooting_is_printed(message: str) -> None:
    """It is in a string of the source, in which values are in braces."""
    sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "mega").rglob("*.py")]
    assert any(message in re.sub(r'"\n\s*f?"', "", source) for source in sources), message
