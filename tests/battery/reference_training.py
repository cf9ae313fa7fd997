"""Whole finetunings by mega against loops over transformers and peft: every step's loss, and the weights at the end.

text M L          all weights on plain text: M is stories260K or a small model of a family (Llama, Mistral with a
                  window, Qwen, GPT-2), L a layout; `documents`: a document a row in the loop
chat T L          conversations by template T, packed by mega, one a row in the loop; labels by a rule of the loop's own
lora M L          rank 4, alpha 8, all linears or M, against peft from the same first adapter; the adapter at the end
dpo S L           preferences, beta 0.1, label smoothing S, against a frozen copy, rewards too; `lora`: against peft's
labels T N L      BERT with norms N and a new head on QQP, MNLI or questions as RACE's, against transformers' own
rates             --lr-decay's against transformers' schedules, after the warm-up's end too
wrong ITEM: R     the loop with one rule changed: it must be out of the bounds, or they prove nothing

The loops (tests/support/reference_training.py) are torch.optim.AdamW over a model of transformers with transformers'
schedule, torch's clipping at 1.0 and decay of matrices only, in fp32 on a CPU, a global batch in one forward pass.
They share nothing with mega but the order of the samples. Step 1 has a rate of 0 (warm-up), so its checkpoint holds
the first weights of what begins at random: an adapter, a BERT.

`means of microbatches` is --loss-normalizer microbatch: gradients and reported losses of the mean of the microbatches'
means, as in Megatron-LM 23.06.

Bounds, relative. fp32: losses 2e-6, as of one model in two layouts. Gradient norms before clipping 5e-6. Weights: what
differs by what training changed, 1e-4 over all tensors and 1e-3 of one; Adam divides by the root of squares, so that
an element with a small gradient keeps the relative error that its sum had. DPO: 1e-5 for losses, norms and (absolute)
rewards, for they are of differences of sums of some hundred nats, each with an error of 2^-24. fp64 (GPT-2 and BERT;
transformers' RMSNorm is always fp32): 1e-12, norms 1e-10, weights 1e-9 and 1e-8. Each changed rule must be ten times
out of one of them. RACE is in fp64 only: of four options that an untrained BERT judges almost alike, the gradient is
what is left of sums 600 times as large, and fp32 leaves 7e-5 of its norm.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.cli import main
from tests.battery.data_ledger import ROOT, Item, run
from tests.support import reference_training as loops
from tests.support.hugging_face import FAMILIES, SIZES
from tests.support.reference_training import FP32, IGNORED, LINEARS, Ids, Recipe, Talk, opened, saved_names
from tests.support.shared import shared

Bounds = Mapping[str, float]
SUMS = loops.SUMS | {"reward": 1e-5}
FP64 = {"first": 1e-12, "loss": 1e-12, "norm": 1e-10, "rate": 1e-12, "weights": 1e-9, "tensor": 1e-8}
OUT = 10.0
"""How many bounds a wrong rule is out, at the least."""
FOUR = "--nproc 4 --tp 2 --pp 2".split()
LAYOUTS: dict[str, list[str]] = {
    "one rank": "--micro-batch 2".split(),
    "micro batch 1": "--micro-batch 1".split(),
    "micro batch 4": "--micro-batch 4".split(),
    "dp 2": "--nproc 2 --micro-batch 1 --zero 2".split(),
    "tp 2 x pp 2": [*FOUR, "--micro-batch", "1", "--sequence-parallel"],
}
TEXT = Recipe(steps=16, batch=4)
CHAT = Recipe(steps=12, batch=4)
LORA = Recipe(steps=12, batch=4, lr=5e-3, eps=1e-6)
DPO = Recipe(steps=10, batch=4, lr=1e-4, warmup=2, style="linear", betas=(0.9, 0.999))
LABELS = Recipe(steps=12, batch=16, style="linear", betas=(0.9, 0.999), eps=1e-6, decay=0.01)
LENGTH = {"text": 64, "chat": 256, "dpo": 160, "labels": 48}
DOCUMENTS = "--reset-attention --reset-positions --eod-mask-loss".split()


def mega(*words: object) -> None:
    """Errors: RuntimeError with what it said."""
    if "--nproc" in words:  # what its ranks print is not this process's
        command = [sys.executable, "-m", "mega", *map(str, words)]
        ranks = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if ranks.returncode:
            raise RuntimeError(ranks.stderr[-400:])
        return
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([str(word) for word in words])
    if code:
        raise RuntimeError(said.getvalue()[-400:])


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="mega-reference-training-"))


@functools.cache
def base() -> Path:
    """stories260K as a checkpoint of mega, which adapters name."""
    mega("convert-llama", "--load-dir", stories(), "--save-dir", folder() / "base")
    return folder() / "base"


def stories() -> Path:
    return shared("stories260K_hf/config.json").parent


@functools.cache
def paragraphs() -> list[str]:
    """Speeches of Shakespeare, each on one line, without who speaks."""
    parts = shared("tinyshakespeare/input.txt").read_text()[:60000].split("\n\n")
    return [" ".join(part.split("\n")[1:]) for part in parts if part.count("\n")]


# Models

OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "gpt2": {f"{place}_pdrop": 0.0 for place in ("resid", "embd", "attn")},
}


@functools.cache
def model_at(name: str) -> Path:
    """A folder of weights: stories260K as it lies, else a small random model of the 512 tokens of its vocabulary."""
    if name == "stories":
        return stories()
    import transformers

    values = {**SIZES, **FAMILIES[name], "vocab_size": 512, "max_position_embeddings": 256, **OWN.get(name, {})}
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind: Any = transformers.AutoModelForCausalLM
    made = kind.from_config(config)
    for parameter in made.parameters():  # biases and norms are constants at first
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    made.save_pretrained(folder() / name)
    return folder() / name


@functools.cache
def finetuned(name: str, layout: str, *words: str) -> Path:
    """Where a run of mega was saved, after every step."""
    save, recipe = folder() / f"{name} {layout}".replace(" ", "-"), recipe_of(name)
    stages = (
        ["--stage-layers", "2", "3"] if "--pp" in LAYOUTS[layout] and {str(stories()), str(base())} & set(words) else []
    )
    each = ["--save", save, "--save-interval", 1, "--no-save-optim", "--log-interval", 1]
    mega("finetune", *recipe.flags, *words, *LAYOUTS[layout], *stages, *each)
    return save


def exported(save: Path, to: str = "hf", step: int | None = None) -> Path:
    """The file of tensors of the last step, or of one, in transformers' form or peft's."""
    at = save if step is None else save / f"step-{step:07}"
    place = save.parent / f"{save.name}-{to}-{step}"
    if not place.exists():
        mega("convert-llama", "--to", to, "--load-dir", at, "--save-dir", place)
    return place / ("adapter_model.safetensors" if to == "peft" else "model.safetensors")


# Text


@functools.cache
def tokens() -> Path:
    lines = folder() / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": part}) + "\n" for part in paragraphs()))
    files = ["--tokenizer", "Llama2Tokenizer", "--tokenizer-model", stories() / "tokenizer.model"]
    mega("preprocess", "--input", lines, "--output-prefix", folder() / "text", "--append-eod", "--workers", 1, *files)
    return folder() / "text_text_document"


def text(model: str, layout: str, *words: str, **rule: Any) -> dict[str, float]:
    """words: more flags; with --reset-attention each document is a row of its own in the loop."""
    name = f"text {model} {' '.join(words)}".strip()
    data = ["--data-path", str(tokens()), "--split", "1,0,0", "--seq-length", str(LENGTH["text"]), *words]
    save, recipe = finetuned(name, layout, "--load", str(model_at(model)), *data), recipe_of(name)
    samples = loops.inputs(save)

    def loss(theirs: Any, step: int) -> torch.Tensor:
        rows = [samples[number].tolist() for number in range(step * recipe.batch, (step + 1) * recipe.batch)]
        if "--reset-attention" in words:
            rows = [document for row in rows for document in loops.documents(row, end=2)]
        return loops.token_loss(theirs, [(row, row) for row in rows])

    dtype = torch.float64 if "fp64" in words else torch.float32
    found = loops.train(opened(model_at(model)).to(dtype), recipe.but(**rule), loss)
    return loops.difference(found, save, exported(save))


# Conversations


def talks() -> list[Talk]:
    """Roles and texts: one to three turns of very different lengths, some after a system's; one longer than a row."""
    draws, parts, found = random.Random(3), [part for part in paragraphs() if part], []
    short = [part for part in parts if len(part) < 90]
    for number in range(60):
        talk = [("system", "Speak well.")] if number % 3 == 0 else []
        for _ in range(draws.randint(1, 3) if number % 2 else 1):
            talk += [("user", draws.choice(short)[:40].strip()), ("assistant", draws.choice(short).strip())]
        found.append(talk)
    found[7].append(("user", "And then?"))
    found[7].append(("assistant", max(parts, key=len)))
    return found


def as_llama2(talk: Talk) -> tuple[Ids, Ids]:
    """Meta's way: each turn as one text between <s> and </s>; trained is what begins after its [/INST]."""
    pieces, ids, labels, system = _pieces(), Ids(), Ids(), ""
    for (role, said), (_, answer) in pairwise(talk):
        if role == "system":
            system = f"<<SYS>>\n{said}\n<</SYS>>\n\n"
        if role != "user":
            continue
        asked = f"[INST] {system}{said} [/INST]"
        system = ""
        found = pieces.encode(f"{asked} {answer} ", return_type="proto").pieces
        turn = [piece.id for piece in found]
        kept = [piece.id if piece.begin >= len(asked) else IGNORED for piece in found]
        ids += [pieces.bos_id(), *turn, pieces.eos_id()]
        labels += [IGNORED, *kept, pieces.eos_id()]
    return ids, labels


@functools.cache
def _pieces() -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(str(stories() / "tokenizer.model"))


@functools.cache
def byte_pairs() -> Path:
    """A tokenizer of 512 entries with ChatML's two marks, trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    place, made = folder() / "byte-pairs", Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks, letters = ["<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=marks, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(paragraphs(), trainer)
    place.mkdir()
    made.save(str(place / "tokenizer.json"))
    return place


def tokenizer_flags(template: str) -> list[str]:
    if template == "chatml":
        return ["--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", str(byte_pairs())]
    return ["--tokenizer", "Llama2Tokenizer", "--tokenizer-model", str(stories() / "tokenizer.model")]


TEMPLATES: dict[str, tuple[Callable[[Talk], tuple[Ids, Ids]], str]] = {
    "llama2": (as_llama2, "stories"),
    "chatml": (lambda talk: loops.as_chatml(talk, byte_pairs() / "tokenizer.json"), "qwen2"),
}
"""Template -> a conversation's ids and labels, and the model."""


def chat_flags(template: str) -> list[str]:
    path = folder() / "talks.jsonl"
    lines = [{"messages": [{"role": role, "content": said} for role, said in talk]} for talk in talks()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--chat-data", str(path), "--chat-template", template, "--seq-length", str(LENGTH["chat"])]
    return [*words, *tokenizer_flags(template)]


def conversations(save: Path, template: str, recipe: Recipe) -> list[list[tuple[Ids, Ids]]]:
    made, most = TEMPLATES[template][0], LENGTH["chat"] + 1
    known = [(ids[:most], labels[:most]) for ids, labels in map(made, talks())]
    assert any(len(ids) == most for ids, _ in known) and len({tuple(ids) for ids, _ in known}) == len(known)
    return loops.conversation_batches(loops.inputs(save), known, recipe)


def chat(
    template: str, layout: str, *words: str, by_row: bool = False, everything: bool = False, **rule: Any
) -> dict[str, float]:
    """words: more flags. by_row, everything: wrong means, over rows and over all tokens."""
    model, name = model_at(TEMPLATES[template][1]), f"chat {template} {' '.join(words)}".strip()
    save = finetuned(name, layout, "--load", str(model), *chat_flags(template), *words)
    apart = 2 if "microbatch" in words else 1  # microbatches, whose means' mean is trained
    parts = conversations(save, template, CHAT.but(steps=CHAT.steps * apart, batch=CHAT.batch // apart))

    def loss(theirs: Any, step: int) -> torch.Tensor:
        rows = [
            [(ids, ids if everything else labels) for ids, labels in part]
            for part in parts[step * apart : (step + 1) * apart]
        ]
        if apart == 1:
            return loops.token_loss(theirs, list(chain.from_iterable(rows)), by_row=by_row)
        return torch.stack([loops.token_loss(theirs, part) for part in rows]).mean()

    found = loops.train(opened(model), CHAT.but(**rule), loss)
    return {**loops.difference(found, save, exported(save)), "rows": sum(map(len, parts))}


# Adapters


def adapted(save: Path, targets: list[str], **options: Any) -> Any:
    """stories260K with peft's adapter of a run's first values. options: of LoraConfig, wrong ones."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": targets} | options
    return loops.adapted(opened(stories()), exported(save, "peft", 1), **given)


def lora_flags(targets: list[str]) -> list[str]:
    chosen = [] if targets == LINEARS else ["--lora-targets", *targets]
    return ["--load", str(base()), "--lora-rank", "4", "--lora-alpha", "8", *chosen]


def lora(targets: str, layout: str, *, options: dict[str, Any] | None = None, **rule: Any) -> dict[str, float]:
    """Conversations again. options: of LoraConfig, wrong ones."""
    chosen = LINEARS if targets == "all" else targets.split()
    save = finetuned(f"lora {targets}", layout, *lora_flags(chosen), *chat_flags("llama2"))
    batches = conversations(save, "llama2", LORA)
    model = adapted(save, chosen, **(options or {}))
    found = loops.train(model, LORA.but(**rule), lambda theirs, step: loops.token_loss(theirs, batches[step]))
    return loops.difference(saved_names(found), save, exported(save, "peft"))


# Preferences


def pairs() -> list[tuple[Talk, str, str]]:
    """Prompts, every third of several turns; what is preferred, and what is not."""
    draws, short, found = random.Random(5), [part for part in paragraphs() if 0 < len(part) < 80], []
    for number in range(26):
        asked, before, chosen, rejected = draws.sample(short, 4)
        prompt = [("user", "Who is there?"), ("assistant", before)] if number % 3 == 0 else []
        found.append(([*prompt, ("user", asked)], chosen, rejected))
    return found


def answers() -> tuple[list[tuple[Ids, Ids]], list[tuple[Ids, Ids]]]:
    """Ids and labels of chosen and rejected answers, each after its prompt; only its own tokens are labels."""
    found: tuple[list[tuple[Ids, Ids]], list[tuple[Ids, Ids]]] = [], []
    for prompt, *both in pairs():
        for rows, said in zip(found, both, strict=True):
            ids, labels = as_llama2([*prompt, ("assistant", said)])
            begin = len(as_llama2(prompt[:-1])[0]) if len(prompt) > 1 else 0
            rows.append((ids, [IGNORED] * begin + labels[begin:]))
    return found


def dpo_flags() -> list[str]:
    path = folder() / "pairs.jsonl"
    lines = [
        {"prompt": [{"role": role, "content": said} for role, said in prompt], "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in pairs()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--task", "dpo", "--dpo-data", str(path), "--dpo-beta", "0.1", "--chat-template", "llama2"]
    return [*words, "--seq-length", str(LENGTH["dpo"]), *tokenizer_flags("llama2")]


def dpo(
    smoothing: float,
    layout: str,
    *,
    adapters: bool = False,
    beta: float = 0.1,
    mean: bool = False,
    smoothed: float | None = None,
    **rule: Any,
) -> dict[str, float]:
    """adapters: train those. beta, mean (of an answer's tokens), smoothed: wrong ones."""
    words = [*dpo_flags(), "--dpo-label-smoothing", str(smoothing)]
    kind = lora_flags(LINEARS) if adapters else ["--load", str(stories())]
    save = finetuned(f"dpo {smoothing} {'lora' if adapters else 'all'}", layout, *words, *kind)
    both, order, reference = answers(), loops.inputs(save).order.tolist(), opened(stories()).eval()
    with torch.no_grad():
        before = [loops.row_log_probability(reference, rows, mean=mean) for rows in both]
    asked, rewards = smoothing if smoothed is None else smoothed, list[list[float]]()

    def loss(theirs: Any, step: int) -> torch.Tensor:
        numbers = order[step * DPO.batch : (step + 1) * DPO.batch]
        chosen, rejected = (
            loops.row_log_probability(theirs, [rows[number] for number in numbers], mean=mean) for rows in both
        )
        known = before[0][numbers], before[1][numbers]
        rewards.append([beta * float((x - y).detach().mean()) for x, y in ((chosen, known[0]), (rejected, known[1]))])
        return loops.preference_loss((chosen, rejected), known, beta, asked)

    found = loops.train(adapted(save, LINEARS) if adapters else opened(stories()), DPO.but(**rule), loss)
    reported = [(row["chosen"], row["rejected"]) for row in loops.metrics(save)]
    off = max(abs(one - two) for pair in zip(reported, rewards, strict=True) for one, two in zip(*pair, strict=True))
    found = saved_names(found)
    return {**loops.difference(found, save, exported(save, "peft" if adapters else "hf")), "reward": off}


# Labels


COLUMNS = {"qqp": (3, 4, 5), "mnli": (8, 9, 15)}
"""Task -> where two texts and the label are."""
CLASSES = {"qqp": ("0", "1"), "mnli": ("contradiction", "entailment", "neutral")}
TABLES = {"qqp": "qqp/dev.tsv", "mnli": "mnli/dev_matched.part1.tsv"}
KINDS = {"pre": "MegatronBertForSequenceClassification", "post": "BertForSequenceClassification"}
"""Where norms are -> transformers' class."""


def labels(task: str, norms: str, layout: str, *words: str, types: bool = True, **rule: Any) -> dict[str, float]:
    """words: more flags. types: whether the loop tells the two texts apart."""
    import transformers

    tokenizer = transformers.BertTokenizer(str(shared("bert_hf_random/vocab.txt")))
    table, known = labelled(task, tokenizer)
    shape = f"--family bert --layers 2 --hidden 32 --heads 4 --hidden-dropout 0 --attention-dropout 0 {GELU[norms]}"
    data = ["--task", task, "--train-data", str(table), "--seq-length", str(LENGTH["labels"])]
    files = ["--tokenizer", "BertWordPieceLowerCase", "--vocab-file", str(shared("bert_hf_random/vocab.txt"))]
    name = f"labels {task} {norms} {' '.join(words)}".strip()
    save = finetuned(name, layout, *shape.split(), *data, *files, *words)
    samples = loops.inputs(save)

    def loss(theirs: Any, step: int) -> torch.Tensor:
        given: list[tuple[Ids, Ids]] = []
        classes = []
        for at in range(step * LABELS.batch, (step + 1) * LABELS.batch):
            row = samples[at]
            ids = [each[:length].tolist() for each, length in zip(row.tokens, row.lengths.tolist(), strict=True)]
            kinds, label = known[tuple(map(tuple, ids))]
            given += zip(ids, kinds if types else [[0] * len(each) for each in ids], strict=True)
            classes.append(label)
        shape = (LABELS.batch, -1) if task != "race" else (LABELS.batch, 4, -1)
        packed = torch.zeros(3, len(given), LENGTH["labels"], dtype=torch.long)
        for at, (one, its) in enumerate(given):
            packed[:, at, : len(one)] = torch.tensor([one, its, [1] * len(one)])
        names = ("input_ids", "token_type_ids", "attention_mask")
        logits = theirs(**{name: each.view(shape) for name, each in zip(names, packed, strict=True)}).logits
        return torch.nn.functional.cross_entropy(logits, torch.tensor(classes))

    dtype = torch.float64 if "fp64" in words else torch.float32
    model = getattr(transformers, "BertForMultipleChoice" if task == "race" else KINDS[norms]).from_pretrained(
        exported(save, "hf", 1).parent, dtype=dtype
    )
    found = loops.train(model, LABELS.but(**rule), loss)
    return loops.difference(found, save, exported(save))


GELU = {"pre": "", "post": "--norm-placement post --activation gelu --head-activation gelu"}


Packed = dict[tuple[tuple[int, ...], ...], tuple[list[Ids], int]]
"""By the ids of a sample's rows, as packed by a tokenizer of transformers: their types, and the class."""


@functools.cache
def labelled(task: str, tokenizer: Any) -> tuple[Path, Packed]:
    """A table of 120 samples, some of which are cut."""
    place, samples = (questions if task == "race" else table)(task, tokenizer)
    known: Packed = {}
    for firsts, second, label in samples:
        rows = [tokenizer(one, second, truncation="only_second", max_length=LENGTH["labels"]) for one in firsts]
        known[tuple(tuple(row["input_ids"]) for row in rows)] = [row["token_type_ids"] for row in rows], label
    lengths = [len(row) for rows in known for row in rows]
    assert len(known) == len(samples) and min(lengths) < max(lengths) == LENGTH["labels"]
    return place, known


Samples = list[tuple[list[str], str, int]]


def table(task: str, tokenizer: Any) -> tuple[Path, Samples]:
    """Rows of a shared table whose first text leaves room for the second."""
    first, second, label = COLUMNS[task]
    header, *lines = shared(TABLES[task]).read_text(encoding="utf-8").split("\n")[:600]
    rows = [line.split("\t") for line in lines]
    rows = [row for row in rows if len(tokenizer.tokenize(row[first])) < LENGTH["labels"] // 2][:120]
    place = folder() / f"{task}.tsv"
    place.write_text("".join(f"{line}\n" for line in (header, *map("\t".join, rows))))
    return place, [([row[first]], row[second], CLASSES[task].index(row[label].strip())) for row in rows]


def questions(task: str, tokenizer: Any) -> tuple[Path, Samples]:
    """Speeches as articles, four words of which one fills a gap, or answers."""
    draws, place, samples = random.Random(7), folder() / "RACE" / "train", Samples()
    place.mkdir(parents=True)
    for number, said in enumerate([part for part in paragraphs() if part.count(" ") > 3][:60]):
        words = said.split()
        options, answers = [draws.choices(words, k=4) for _ in range(2)], [draws.randrange(4) for _ in range(2)]
        asked = [f"{words[0]} _ {words[1]}", f"What of {words[2]}?"]
        passage = {"article": said, "questions": asked, "options": options}
        (place / f"{number:03}.txt").write_text(json.dumps(passage | {"answers": ["ABCD"[at] for at in answers]}))
        samples.append(([asked[0].replace("_", one) for one in options[0]], said, answers[0]))
        samples.append(([f"{asked[1]} {one}" for one in options[1]], said, answers[1]))
    return place, samples


# Rates


def rates() -> dict[str, Any]:
    """Every schedule that both have, over 120 steps of 8 samples, of which 100 decay."""
    from transformers import optimization

    from mega.core.optim.schedule import LearningRate

    steps, warmup, decay, peak, least, batch = 120, 10, 100, 3e-4, 3e-5, 8
    span = {"num_warmup_steps": warmup, "num_training_steps": decay}
    stable = {"num_warmup_steps": warmup, "num_decay_steps": 30, "num_stable_steps": 60, "min_lr_ratio": least / peak}
    theirs: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "constant": ("constant_schedule_with_warmup", {"num_warmup_steps": warmup}, {}),
        "linear": ("linear_schedule_with_warmup", span, {"least": 0.0}),
        "cosine": ("cosine_with_min_lr_schedule_with_warmup", {**span, "min_lr": least}, {}),
        "inverse-square-root": ("inverse_sqrt_schedule", {"num_warmup_steps": warmup}, {"decay": steps * batch}),
        **{
            f"wsd {kind}": ("wsd_schedule", {**stable, "decay_type": other}, {"anneal_style": kind, "initial": least})
            for kind, other in (("linear", "linear"), ("cosine", "cosine"), ("minus_sqrt", "1-sqrt"))
        },
    }
    found: dict[str, float] = {}
    for style, (name, given, own) in theirs.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
        schedule = getattr(optimization, f"get_{name}")(optimizer, **given)
        values = {"least": least, "warmup": warmup * batch, "decay": decay * batch, "anneal": 30 * batch, **own}
        ours, worst = LearningRate(peak=peak, style=style.split()[0], **values), 0.0
        for step in range(decay if style == "cosine" else steps):  # transformers' cosine rises again after its end
            worst = max(worst, abs(ours(step * batch) - schedule.get_last_lr()[0]) / peak)
            optimizer.step()
            schedule.step()
        found[style] = worst
    assert max(found.values()) <= 1e-12, found
    return found


RECIPES = {"text": TEXT, "chat": CHAT, "lora": LORA, "dpo": DPO, "labels": LABELS}


def recipe_of(name: str) -> Recipe:
    """GPT-2's keys have biases, whose gradients are rounding: an epsilon that is larger than these leaves them be."""
    recipe = RECIPES[name.split()[0]]
    return recipe.but(eps=1e-6) if "gpt2" in name else recipe


Measured = Callable[..., dict[str, float]]


def bounds_of(item: str) -> Bounds:
    return FP64 if "fp64" in item else SUMS if item.startswith("dpo") else FP32


def within(item: str) -> dict[str, Any]:
    """Errors: AssertionError where mega is further from the loop than the bounds."""
    found = RIGHT[item]()
    out = {name: found[name] for name, bound in bounds_of(item).items() if not found[name] <= bound}
    assert not out, f"out of bounds: {out}; all: {found}"
    return {name: value if isinstance(value, int) else float(f"{value:.2g}") for name, value in found.items()}


def beyond(item: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    """Errors: AssertionError where a wrong rule is not told from the right one."""
    found, bounds = RIGHT[item](**rule), bounds_of(item)
    worst = max(bounds, key=lambda name: found[name] / bounds[name])
    assert found[worst] >= OUT * bounds[worst], f"not told apart: {found}"
    return {"by": worst, "found": float(f"{found[worst]:.2g}"), "bounds": float(f"{found[worst] / bounds[worst]:.2g}")}


RIGHT: dict[str, Measured] = {
    **{f"text stories, {layout}": functools.partial(text, "stories", layout) for layout in ("one rank", "tp 2 x pp 2")},
    "text stories, documents": functools.partial(text, "stories", "one rank", *DOCUMENTS),
    **{f"text {model}, one rank": functools.partial(text, model, "one rank") for model in FAMILIES},
    "text gpt2, fp64": functools.partial(text, "gpt2", "one rank", "--dtype", "fp64"),
    **{f"chat llama2, {layout}": functools.partial(chat, "llama2", layout) for layout in LAYOUTS},
    "chat llama2, means of microbatches": functools.partial(
        chat, "llama2", "one rank", "--loss-normalizer", "microbatch"
    ),
    "chat chatml, one rank": functools.partial(chat, "chatml", "one rank"),
    **{f"lora all, {layout}": functools.partial(lora, "all", layout) for layout in ("one rank", "tp 2 x pp 2")},
    "lora q_proj v_proj, one rank": functools.partial(lora, "q_proj v_proj", "one rank"),
    **{f"dpo 0.0, {layout}": functools.partial(dpo, 0.0, layout) for layout in ("one rank", "tp 2 x pp 2")},
    "dpo 0.1, one rank": functools.partial(dpo, 0.1, "one rank"),
    **{
        f"dpo lora, {layout}": functools.partial(dpo, 0.0, layout, adapters=True)
        for layout in ("one rank", "tp 2 x pp 2")
    },
    **{
        f"labels qqp pre, {layout}": functools.partial(labels, "qqp", "pre", layout)
        for layout in ("one rank", "tp 2 x pp 2")
    },
    "labels mnli post, one rank": functools.partial(labels, "mnli", "post", "one rank"),
    "labels race post, fp64": functools.partial(labels, "race", "post", "one rank", "--dtype", "fp64"),
    "labels qqp pre, fp64": functools.partial(labels, "qqp", "pre", "one rank", "--dtype", "fp64"),
    "labels mnli post, fp64": functools.partial(labels, "mnli", "post", "one rank", "--dtype", "fp64"),
}
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("text stories, one rank", "norms decay", {"decays": lambda name, tensor: True}),
    (
        "text stories, one rank",
        "embeddings do not decay",
        {"decays": lambda name, tensor: tensor.dim() > 1 and "layers" in name},
    ),
    ("text stories, one rank", "the rate a step late", {"late": 1}),
    ("text stories, one rank", "no clipping", {"clip": 1e9}),
    ("text stories, one rank", "a second beta of 0.999", {"betas": (0.9, 0.999)}),
    ("text stories, one rank", "an epsilon of 1e-6", {"eps": 1e-6}),
    ("text gpt2, one rank", "biases decay", {"decays": lambda name, tensor: True}),
    ("chat llama2, one rank", "the mean of rows' means", {"by_row": True}),
    ("chat llama2, one rank", "all tokens are trained", {"everything": True}),
    ("lora all, one rank", "alpha by the root of the rank", {"options": {"use_rslora": True}}),
    ("lora all, one rank", "adapters do not decay", {"decay": 0.0}),
    ("dpo 0.0, one rank", "beta 0.11", {"beta": 0.11}),
    ("dpo 0.0, one rank", "means of answers", {"mean": True}),
    ("dpo 0.1, one rank", "without smoothing", {"smoothed": 0.0}),
    ("labels qqp pre, one rank", "one type of token", {"types": False}),
]
ITEMS: list[Item] = [
    ("rates", rates),
    *((name, functools.partial(within, name)) for name in RIGHT),
    *((f"wrong {name}: {what}", functools.partial(beyond, name, rule)) for name, what, rule in WRONG),
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    run("reference_training", ITEMS)
