"""What a model is, in every verb and export: each rule is typed at an earlier revision and now.

    python tests/battery/identity_before.py REVISION [--out FILE] [ITEM ...]

An item is a line of `mega`, or a call that both revisions have, and what must become of it. It is shown where the
working tree does that and REVISION does not. The same rules are held by the tests that `HELD_BY` names; those import
modules that an earlier revision does not have, so they cannot be run against it. Offsets into an echoed text (B.5) are
held by tests/inference/server/test_openai_api.py alone. One JSON line an item goes to --out;
items that have a good line for this commit are not run again. Exit 1 if any is not shown.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "build" / "battery" / "identity_before.jsonl"
HELD_BY = {
    "A.1": "tests/checkpoint/test_chat_exports.py",
    "A.2": "tests/tasks/test_bert_export.py tests/text/test_wordpiece_settings.py",
    "A.3": "tests/inference/test_not_finite.py",
    "B.1": "tests/text/test_chat_templates.py",
    "B.2": "tests/text/test_chat_templates.py tests/inference/server/test_openai_api.py",
    "B.3": "tests/text/test_chat_templates.py tests/inference/test_load.py",
    "B.4": "tests/data/test_preprocess.py tests/inference/server/test_openai_api.py",
    "B.6": "tests/text/test_chat_templates.py",
    "C.1": "tests/cli/test_identity.py",
    "C.2": "tests/cli/test_identity.py",
    "C.3": "tests/cli/test_identity.py tests/battery/identity_mistakes.py",
    "D.1": "tests/legacy/test_old_lines.py tests/training/test_step.py",
    "D.2": "tests/checkpoint/megatron/test_core.py",
    "D.3": "tests/data/test_gpt.py tests/training/test_foreign_start.py",
    "D.4": "tests/legacy/test_old_lines.py tests/model/test_encoder_decoder.py",
}
"""Rule -> the tests of the suite."""

SHAPE = "--family llama --layers 1 --hidden 16 --heads 2 --ffn 32 --positions 64"
STEP = (
    "--seq-length 32 --micro-batch 1 --steps 1 --lr 1e-3 --lr-decay constant --eval-iters 0 --device cpu --no-progress"
)
SAVE = "--save-interval 1 --save"
NULL = "--tokenizer NullTokenizer --vocab-size 500"


def mega(line: str) -> tuple[int, str]:
    from mega.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(line.split())
    return code, said.getvalue()


def made(line: str) -> str:
    code, said = mega(line)
    assert code == 0, (line, said[-500:])
    return said


def bytes_alone(folder: Path) -> Path:
    """A tokenizer of 257 entries, which fit into any model's."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Tokenizer(models.BPE(letters, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens([AddedToken("</s>", normalized=False)])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


class Place:
    """What the lines name, made by the revision that is judged."""

    def __init__(self, folder: Path) -> None:
        sys.path.append(str(ROOT))  # behind the tree that is judged
        from tests.support.chat_templates import byte_level
        from tests.support.shared import shared

        self.shared, self.f = shared, folder
        self.same = f"--tokenizer Llama2Tokenizer --tokenizer-model {folder}/tokenizer.model"
        (folder / "tokenizer.model").write_bytes(shared("stories260K_hf/tokenizer.model").read_bytes())
        (folder / "a.jsonl").write_text('{"text": "Once upon a time there was a model of few words."}\n' * 40)
        (folder / "n.jsonl").write_text((json.dumps({"text": "7 8 9 " * 9}) + "\n") * 40)
        turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The model."}]
        (folder / "talks.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
        for name, flags in (("a", self.same), ("n", NULL)):
            made(f"preprocess --input {folder}/{name}.jsonl --output-prefix {folder}/{name} {flags}")
        self.data = f"--data-path {folder}/a_text_document --split 1,0,0"
        self.other = f"--data-path {folder}/n_text_document --split 1,0,0"
        self.talks = f"--chat-data {folder}/talks.jsonl"
        made(f"pretrain {SHAPE} {STEP} {self.same} {self.data} {SAVE} {folder}/text")
        made(f"convert-llama --load-dir {folder}/text --save-dir {folder}/hf")
        chat = f"finetune --load {folder}/text {STEP} {self.talks} --chat-template llama2 {SAVE} {folder}/chat"
        made(chat)
        (folder / "marks").mkdir()
        byte_level(folder / "marks")
        self.marks = f"--tokenizer HuggingFaceTokenizer --tokenizer-model {folder}/marks"
        (folder / "begins").mkdir()
        byte_level(folder / "begins")
        config = json.loads((folder / "begins" / "tokenizer_config.json").read_text())
        (folder / "begins" / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|im_start|>"}))
        self.begins = f"--tokenizer HuggingFaceTokenizer --tokenizer-model {folder}/begins"
        self.letters = f"--tokenizer HuggingFaceTokenizer --tokenizer-model {bytes_alone(folder / 'letters')}"
        (folder / "packed.jsonl").write_text((folder / "a.jsonl").read_text(), encoding="utf-16")
        for name, change in (("nan", float("nan")), ("wild", 1e4)):
            self.changed(name, change)

    def changed(self, name: str, factor: float) -> None:
        from safetensors.torch import load_file, save_file

        (self.f / name).mkdir()
        for path in (self.f / "hf").iterdir():
            (self.f / name / path.name).write_bytes(path.read_bytes())
        tensors = load_file(self.f / "hf" / "model.safetensors")
        tensors["model.norm.weight"] *= factor
        save_file(tensors, self.f / name / "model.safetensors")

    def tokenizer(self, flags: str) -> Any:
        from mega.core.text.build import build

        _, kind, _, model = flags.split()
        return build(tokenizer=kind, tokenizer_model=Path(model))

    def prompt(self, source: str, flags: str, content: str) -> list[int]:
        """Ids of a message as a template puts it."""
        return self.labelled(source, flags, [("user", content)])[0]

    def labelled(self, source: str, flags: str, talk: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
        """Ids of a conversation, and which are trained."""
        from mega.core.text.chat import format as chat

        file, tokenizer = self.f / "t.jinja", self.tokenizer(flags)
        file.write_text(source)
        if hasattr(chat, "chat_format"):
            from mega.core.text.chat.messages import Conversation

            messages = [{"role": role, "content": content} for role, content in talk]
            ours = chat.chat_format(str(file), tokenizer)
            if talk[-1][0] == "user":
                return list(ours.prompt(messages)), []
            whole = ours.labelled(Conversation(messages))
            return list(whole.ids), list(whole.trained)
        older: Any = chat
        parts = older.template(str(file), tokenizer)([older.Message(*each) for each in talk])
        found = older.encode(parts, tokenizer)
        return list(found.ids), list(found.trained)


Judge = Callable[[Place], tuple[bool, str]]


def line(words: str, code: int, said: str) -> Judge:
    """It ends with `code`, having said `said`; with "not ...", not having said that."""

    def judge(place: Place) -> tuple[bool, str]:
        names = {**vars(place), "STEP": STEP, "SHAPE": SHAPE, "SAVE": SAVE, "NULL": NULL}
        found, text = mega(words.format(**names))
        unwanted = said.removeprefix("not ") if said.startswith("not ") else None
        told = unwanted not in text if unwanted is not None else said in text
        return found == code and told, f"exit {found}: {' '.join(text.split())[-200:]}"

    return judge


LOOP = "{% for m in messages %}"
USER = "<\N{FULLWIDTH VERTICAL LINE}User\N{FULLWIDTH VERTICAL LINE}>"


def llama2_literal(place: Place) -> tuple[bool, str]:
    source = LOOP + "{{ bos_token }}[INST] {{ m.content }} [/INST]{% endfor %}"
    model = f"--tokenizer Llama2Tokenizer --tokenizer-model {place.shared('llama2/tokenizer.model')}"
    ids = place.prompt(source, model, "hi  you")
    return ids == [1, 518, 25580, 29962, 7251, 29871, 366, 518, 29914, 25580, 29962], str(ids)


def control(place: Place) -> tuple[bool, str]:
    ids = place.prompt(LOOP + USER + "Q: {{ m.content }}{% endfor %}", place.marks, "hi")
    return place.tokenizer(place.marks).control(USER) in ids, f"{len(ids)} ids"


def begin(place: Place) -> tuple[bool, str]:
    ids = place.prompt(LOOP + "{{ bos_token }}{{ m.content }}{% endfor %}", place.begins, "hi")
    return ids[0] == place.tokenizer(place.begins).control("<|im_start|>"), str(ids)


def completed(prompt: str, judge: Callable[[dict[str, Any]], bool]) -> Judge:
    """What a server of the model answers to a prompt that is echoed."""

    def asked(place: Place) -> tuple[bool, str]:
        command = [sys.executable, "-m", "mega", "serve", str(place.f / "hf"), "--port", "0", "--dtype", "fp32"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            url = next(row.split()[1] for row in process.stdout if row.startswith("ready: "))
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
            kind = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), kind)
            with urllib.request.urlopen(request, timeout=60) as reply:
                found = json.load(reply)
        finally:
            process.terminate()
            process.wait(30)
        offsets = found["choices"][0]["logprobs"]["text_offset"]
        return judge(found), f"text_offset {offsets}, notes {found.get('notes')}"

    return asked


def rendered(source: str, content: str, expected: str) -> Judge:
    def judge(place: Place) -> tuple[bool, str]:
        said = place.tokenizer(place.marks).decode(place.prompt(source, place.marks, content))
        return expected in said, said

    return judge


def added_tokens(place: Place) -> tuple[bool, str]:
    from tests.support.chat_templates import sentencepiece

    folder = place.f / "added"
    folder.mkdir(exist_ok=True)
    sentencepiece(place.shared("llama2/tokenizer.model"))(folder)
    flags = f"--tokenizer Llama2Tokenizer --tokenizer-model {folder}/tokenizer.model"
    source = LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    ids = place.prompt(source, flags, "Hi")
    return ids == [32000, 1792, 13, 18567, 32001], str(ids)


def another_class(place: Place) -> tuple[bool, str]:
    from mega.core.inference.loading import load

    files = {}
    texts = {"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}'}
    for name, text in texts.items():
        files[name] = place.f / name
        files[name].write_text(text)
    from mega.core.text import build

    place_of_it: Any = load if hasattr(load, "tokenizer_kind") else build
    kind = place_of_it.tokenizer_kind(files)
    return kind is None, f"taken for {kind}"


def last_end_only(place: Place) -> tuple[bool, str]:
    source = LOOP + "{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% else %}{{ m.content }}"
    source += "{% if loop.last %}<|endoftext|>{% endif %}{% endif %}{% endfor %}"
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    try:
        ids, trained = place.labelled(source, place.marks, talk)
    except ValueError as error:
        return "does not end the assistant's earlier turns" in str(error), str(error)
    tokenizer = place.tokenizer(place.marks)
    return False, "trained: " + tokenizer.decode([each for each, learned in zip(ids, trained) if learned])


def exported(how: str, to: str) -> Judge:
    """A run of ChatML over a vocabulary whose own end is another: the template and <|im_end|> are in the export."""

    def judge(place: Place) -> tuple[bool, str]:
        f = place.f
        if not (f / "base").exists():
            made(f"pretrain {SHAPE} {STEP} {place.marks} {place.talks} --chat-template plain {SAVE} {f}/base")
            made(f"convert-llama --load-dir {f}/base --save-dir {f}/base-hf")
        name = f"chatml{len(how)}"
        if not (f / name).exists():
            tune = f"finetune --load {f}/base-hf {STEP} {place.talks} --chat-template chatml {how} {SAVE} {f}/{name}"
            made(tune)
        out = f / f"{name}-{to.split()[0]}"
        made(f"convert-llama --load-dir {f}/{name} --save-dir {out} --to {to.format(f=f)}")
        template = (out / "chat_template.jinja").exists()
        config = out / "generation_config.json"
        ends = json.loads(config.read_text()).get("eos_token_id") if config.exists() else None
        end = place.tokenizer(place.marks).control("<|im_end|>")
        found = end in (ends if isinstance(ends, list) else [ends])
        return template and found, f"template: {template}; ends: {ends}, the turn's is {end}"

    return judge


def cased(place: Place) -> tuple[bool, str]:
    f, vocabulary = place.f, place.shared("bert/bert-base-cased-vocab.txt")
    shape = "--family bert --layers 1 --hidden 16 --heads 2 --positions 64 --mock-data"
    made(f"pretrain {shape} {STEP} --tokenizer BertWordPieceCase --vocab-file {vocabulary} {SAVE} {f}/bert")
    made(f"convert-llama --load-dir {f}/bert --save-dir {f}/bert-hf")
    file = f / "bert-hf" / "tokenizer_config.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    return found.get("do_lower_case") is False, f"{sorted(path.name for path in (f / 'bert-hf').iterdir())}"


def second_finetuning(place: Place) -> tuple[bool, str]:
    made(f"finetune --load {place.f}/chat {STEP} {place.talks} {SAVE} {place.f}/again")
    text = "".join(path.read_text() for path in (place.f / "again").rglob("run.toml"))
    found = [row for row in text.splitlines() if row.startswith("chat_template")]
    return 'chat_template = "llama2"' in found, str(found)


def perplexity(place: Place) -> tuple[bool, str]:
    out = place.f / "wild.json"
    made(f"eval --task ppl --valid-data {place.f}/a.jsonl --load {place.f}/wild --device cpu --json {out}")
    text = out.read_text()
    return "485165195.4" not in text, text[:200]


def reported_loss(place: Place) -> tuple[bool, str]:
    """Of two conversations of unlike length, the mean of means is not the mean."""
    talks = [{"prompt": "a", "completion": answer} for answer in ("b", "Once upon a time there was")]
    (place.f / "two.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    found = []
    for how in ("global", "microbatch"):
        metrics = place.f / f"{how}.jsonl"
        made(
            f"finetune --load {place.f}/text {STEP} --global-batch 2 --chat-data {place.f}/two.jsonl --chat-template "
            f"llama2 --loss-normalizer {how} --metrics {metrics}"
        )
        losses = [json.loads(row).get("loss") for row in metrics.read_text().splitlines()]
        found.append(next(loss for loss in losses if loss is not None))
    return abs(found[0] - found[1]) > 1e-4, str(found)


def rows_of_one_rank(place: Place) -> tuple[bool, str]:
    words = f"finetune --load {place.f}/rows --use-checkpoint-config --tp 2 --nproc 2 --mock-data {STEP}"
    command = [sys.executable, "-m", "mega", *words.split(), "--no-mask-padded-vocab"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [row for row in (done.stdout + done.stderr).splitlines() if "mega: " in row or "Error" in row]
    return done.returncode == 0, f"exit {done.returncode}: {' '.join(said)[-300:]}"


def another_result(place: Place) -> tuple[bool, str]:
    before = Path.cwd()
    score = "eval --task ppl --device cpu --valid-data {}/a_text_document --load {}/{}"
    try:
        os.chdir(place.f)
        made(score.format(place.f, place.f, "text"))
        code, said = mega(score.format(place.f, place.f, "chat"))
    finally:
        os.chdir(before)
    return code == 2 and "is the result of another model" in said, f"exit {code}: {said[-200:]}"


OWN, MADE = "has a tokenizer of its own", "was made with"
LOSS = "--loss-normalizer microbatch --no-mask-padded-vocab"
SCORE = "eval --task ppl --device cpu --json {f}/s.json --valid-data {f}"
ITEMS: dict[str, Judge] = {
    "A.1 whole": exported("", "hf"),
    "A.1 merged": exported("--lora-rank 2", "hf"),
    "A.1 peft": exported("--lora-rank 2", "peft --base {f}/base-hf"),
    "A.2 a cased model": cased,
    "A.3 converted": line("convert-llama --load-dir {f}/nan --save-dir {f}/own", 2, "holds a NaN"),
    "A.3 generate": line("generate --load {f}/nan --prompt Once --tokens 2 --device cpu", 2, "holds a NaN"),
    "A.3 eval": line(SCORE + "/a.jsonl --load {f}/nan", 2, "holds a NaN"),
    "B.1 adjacent text": llama2_literal,
    "B.1 control tokens": control,
    "B.1 beginning": begin,
    "B.1 content is read": rendered(LOOP + "{{ m.content | length }}{% endfor %}", "abcdefghijklm", "13"),
    "B.2 tools": rendered(LOOP + "{% if tools %}t{% endif %}{{ m.content }}{% endfor %}", "Hi you", "Hi you"),
    "B.2 tool calls": rendered(LOOP + "{% if m.tool_calls %}t{% endif %}{{ m.content }}{% endfor %}", "Hi a", "Hi a"),
    "B.2 loop controls": rendered(LOOP + "{{ m.content }}{% break %}{% endfor %}", "Hi you", "Hi you"),
    "B.2 generation": rendered(
        LOOP + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "Hi you", "Hi you"
    ),
    "B.2 date": rendered(LOOP + "{{ strftime_now('%Y') }} {{ m.content }}{% endfor %}", "Hi you", "Hi you"),
    "B.3 added tokens": added_tokens,
    "B.3 another class": another_class,
    "B.4 preprocess": line(
        "preprocess --input {f}/spelt.jsonl --output-prefix {f}/spelt {marks}", 0, "--parse-special-tokens"
    ),
    "B.4 completions": completed("a </s> b", lambda found: "spells special tokens" in str(found.get("notes"))),
    "B.6 the last turn's end alone": last_end_only,
    "C.1 eval, other tokens": line(SCORE + "/n_text_document --load {f}/text", 2, MADE),
    "C.1 eval, another tokenizer": line(SCORE + "/n_text_document --load {f}/text {NULL}", 2, OWN),
    "C.1 generate, another tokenizer": line("generate --load {f}/text --prompt 7 --tokens 1 {NULL}", 2, OWN),
    "C.1 conversations, another tokenizer": line("finetune --load {f}/text {STEP} {talks} {letters}", 2, OWN),
    "C.2 no weights": line("finetune {SHAPE} {STEP} {same} {data}", 2, "--load is missing"),
    "C.2 a conversation continued": line(
        "generate --load {f}/chat --prompt a --tokens 1", 0, "was trained on conversations"
    ),
    "C.2 a template for text": line("generate --load {f}/chat --prompt a --chat-template llama2", 2, "--chat-template"),
    "C.2 a second finetuning": second_finetuning,
    "C.2 a size that is read": line("generate --load {f}/text --prompt a --vocab-size 500", 2, "needs --tokenizer"),
    "C.3 another's result": another_result,
    "C.3 documents without an end": line(
        "preprocess --input {f}/a.jsonl --output-prefix {f}/e {same}", 0, "documents have no end"
    ),
    "C.3 a rate of 3": line("finetune --load {f}/text {STEP} {data} --lr 3", 0, "is far above"),
    "C.3 perplexity": perplexity,
    "C.3 UTF-16": line("preprocess --input {f}/packed.jsonl --output-prefix {f}/u {same}", 2, "UTF-16"),
    "C.3 no place": line("preprocess --input {f}/a.jsonl --output-prefix /proc/x/y {same}", 2, "--output-prefix"),
    "D.1 BERT": line("translate python pretrain_bert.py --num-layers 2", 0, LOSS),
    "D.1 T5": line("translate python pretrain_t5.py --num-layers 2", 0, LOSS),
    "D.1 the loss that is reported": reported_loss,
    "D.2 rows of one rank": rows_of_one_rank,
    "D.3 no sharding": line(
        "pretrain {SHAPE} {STEP} --vocab 99 --mock-data --dataloader-type cyclic --no-data-sharding",
        0,
        "not changes nothing",
    ),
    "D.3 a tree": line(
        "pretrain {STEP} --mock-data --use-checkpoint-config --load {f}/tree --save {f}/tree --save-interval 1",
        2,
        "mega reshard",
    ),
    "D.3 a tree for 23.06": line(
        "reshard --load-dir {f}/text --save-dir {f}/tree2 --saver megatron-23.06", 0, "--no-load-rng"
    ),
    "D.4 padding of an encoder": line("translate python pretrain_t5.py --num-layers 2", 0, "--memory-padding uniform"),
}


def inside(folder: Path, names: list[str]) -> None:
    """Judge by the `mega` that is imported; a JSON line an item."""
    place = Place(folder)
    spelt = json.dumps({"text": "a<|im_end|>b"}) + "\n"
    (folder / "spelt.jsonl").write_text(spelt)
    made(f"pretrain {SHAPE} {STEP} --vocab 257 --mock-data --no-mask-padded-vocab {SAVE} {folder}/rows")
    made(f"reshard --load-dir {folder}/text --save-dir {folder}/tree --saver megatron")
    with (folder / "found.jsonl").open("w") as out:
        for name in names:
            try:
                good, said = ITEMS[name](place)
            except Exception as error:
                good, said = False, f"{type(error).__name__}: {error}"[:300]
                traceback.print_exc()
            out.write(json.dumps({"item": name, "good": bool(good), "said": said}) + "\n")
            out.flush()


def judged(tree: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="identity-") as place:
        alone = Path(place) / "package"  # of the tree only mega: the tests' helpers are today's
        alone.mkdir()
        (alone / "mega").symlink_to(tree / "mega")
        environment = {**os.environ, "PYTHONPATH": str(alone), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--inside", place, *names]
        subprocess.run(command, cwd=place, env=environment, check=True, stdout=sys.stderr)
        rows = map(json.loads, (Path(place) / "found.jsonl").read_text().splitlines())
        return {row["item"]: row for row in rows}


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def compare(
    description: str,
    items: Mapping[str, Any],
    held_by: Mapping[str, str],
    judged: Callable[[Path, list[str]], Mapping[str, Mapping[str, Any]]],
    rows_place: Path,
) -> int:
    """The command line of a battery of an earlier revision and now. judged: name -> whether a tree does what it must
    (`good`), and what it said. Exit code 0 if each item is shown."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="REVISION ITEM ...")
    parser.add_argument("--out", type=Path, default=rows_place)
    options = parser.parse_args()
    revision, now = git("rev-parse", "--short", options.words[0]), git("rev-parse", "--short", "HEAD")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(row) for row in options.out.read_text().splitlines()] if options.out.exists() else []
    shown = {row["item"] for row in rows if row["ok"] and (row["against"], row["commit"]) == (revision, now)}
    names = [name for name in options.words[1:] or items if name not in shown]
    with tempfile.TemporaryDirectory() as place:
        old = Path(place) / "tree"
        git("worktree", "add", "--detach", str(old), revision)
        try:
            before, today = judged(old, names), judged(ROOT, names)
        finally:
            git("worktree", "remove", "--force", str(old))
    for name in names:
        ok = today[name]["good"] and not before[name]["good"]
        row = {"item": name, "ok": ok, "before": before[name]["said"], "today": today[name]["said"]}
        row |= {"held_by": held_by[name.split()[0]], "against": revision, "commit": now}
        with options.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{'shown' if ok else 'NOT SHOWN'}: {name} | before: {row['before']} | today: {row['today']}", flush=True)
        shown |= {name} if ok else set()
    print(f"{len(shown)} of {len(options.words[1:] or items)} shown")
    return 0 if shown >= set(options.words[1:] or items) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(compare(__doc__, ITEMS, HELD_BY, judged, ROWS))
