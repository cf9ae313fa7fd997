"""What the name of an old program stands for: Megatron-LM's scripts and tools of 2019 to 2024, its forks', fairseq's.

No flag of theirs names the model family or what is to be done; the program's name does. A row says which verb of
`mega` does the same, what the name adds to its line, and which of the program's own flags are called otherwise, change
nothing, or have no counterpart. Flags that training shares are in config/sections.py and legacy/flags.py. This
file knows names, and neither how a line is split into words nor what a verb does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mega.core.config.compose import nearest


@dataclass(frozen=True)
class Program:
    """One program.

    verb: words of `mega` that do the same; "" where nothing does, for the reason `why`.
    adds: flag -> value, or "" of a switch, that the name alone stands for.
    defaults: the same, where the line does not give the flag.
    renames: its flags -> ours. drops: its flags that change nothing -> why. lacks: its flags without a counterpart.
    lowers: flags whose values are names that we write in lower case.
    values: its flags -> our flag, and its values -> ours; others are refused.
    drops_switches: as drops, of flags without a value.
    arguments: our flags for the words of its line that no flag names, in their order; the last takes all that follow.
    hole: what has to be given before the new line runs: a variable of it, and what that is.
    """

    verb: str = ""
    adds: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    drops: Mapping[str, str] = field(default_factory=dict)
    drops_switches: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    lowers: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    hole: str = ""
    why: str = ""


GPT2_FILES = "GPT2: the folder of GPT-2's vocab.json and merges.txt, which were downloaded by name"
_WORDPIECE = {"--tokenizer-type": "BertWordPieceLowerCase"}
_MODEL = "the checkpoint says it"
_RETRIEVAL = "retrieval models (ICT, REALM's tasks) are not built yet"
_RETRO = "Retro is not built yet"
_VISION = "vision models are not built"
_DIALOGUE = "prompted dialogue (MSDP) is not built yet; mega generate continues the lines of a file of prompts"
_CHINESE = (
    "Yuan's tasks of CLUE are not built; mega eval --tasks scores those of lm-eval, mega generate continues prompts"
)

_LOSS = {"--loss-normalizer": "microbatch", "--no-mask-padded-vocab": ""}
"""Megatron-LM averages the means of microbatches, and its softmax includes the rows that pad the vocabulary."""

_GPT, _BERT, _T5 = (Program("pretrain", adds={"--family": name}, defaults=_LOSS) for name in ("gpt", "bert", "t5"))
_GENERATE = Program(
    "generate",
    renames={
        "--sample-input-file": "--input",
        "--sample-output-file": "--output",
        "--genfile": "--output",
        "--out-seq-length": "--tokens",
    },
    drops={
        "--recompute": "keys and values are always kept",
        "--max-tokens-to-oom": "as many prompts run at once as fit",
        "--cache-dir": "a tokenizer is read from its files",
    },
)
_EVAL = Program("eval", lowers=("--task",), drops={"--epochs": "nothing is trained"})
_FINETUNE = Program(
    "finetune",
    adds={"--family": "bert"},
    renames={"--keep-last": "--keep-last-batch"},
    lowers=("--task",),
)
_TASKS = {
    "lambada": _EVAL,
    "wikitext103": _EVAL,
    "mnli": _FINETUNE,
    "qqp": _FINETUNE,
    "race": _FINETUNE,
    **dict.fromkeys(
        ("retriever-eval", "ret-finetune-nq", "ict-zeroshot-nq"),
        Program(why=_RETRIEVAL),
    ),
    **dict.fromkeys(("msdp-prompt", "msdp-eval-f1"), Program(why=_DIALOGUE)),
    **dict.fromkeys(
        ("afqmc", "bustm", "chid", "csl", "csldcp", "eprstmt", "iflytek", "ocnli", "tnews", "wsc"),
        Program(why=_CHINESE),
    ),
}
"""--task of tasks/main.py, in lower case -> what it comes to."""

_CHECKPOINT_TOOL = Program(
    "reshard",
    renames={"--target-tensor-parallel-size": "--tp", "--target-pipeline-parallel-size": "--pp"},
    drops={
        **dict.fromkeys(("--megatron-path", "--max-queue-size", "--no-checking"), "nothing else is started"),
        **dict.fromkeys(("--loader", "--model-type"), "what is read is recognised by its files"),
        "--tokenizer-model": "a run reads the tokenizer that is given to it, or that lies with the weights",
    },
    defaults={"--saver": "megatron"},
)
_MERGE_PARTITIONS = Program(
    "reshard",
    adds={"--tp": "1", "--pp": "1", "--saver": "megatron"},
    renames={"--load": "--load-dir", "--save": "--save-dir"},
    drops={
        **dict.fromkeys(
            ("--tensor-model-parallel-size", "--model-parallel-size", "--pipeline-model-parallel-size"),
            "how the source is cut is seen from its files",
        ),
        "--model-type": "what is read is recognised by its files",
        **dict.fromkeys(("--vocab-file", "--tokenizer-type", "--num-attention-heads"), "the files say it"),
    },
)

_FAIRSEQ = {"--model-parallel-size": "--tp", "--batch-size": "--micro-batch", "--max-sentences": "--micro-batch"}
"""Flags that all programs of fairseq share -> ours."""
_FAIRSEQ_TRAIN = Program(
    "pretrain",
    adds={"--model": "megatron-11b", "--decay-all": ""},
    defaults={"--clip-grad": "0.0", "--weight-decay": "0.0", "--save": "checkpoints"},
    renames={
        **_FAIRSEQ,
        "--max-update": "--steps",
        "--warmup-updates": "--lr-warmup-steps",
        "--warmup-init-lr": "--lr-warmup-init",
        "--total-num-update": "--lr-decay-steps",
        "--end-learning-rate": "--min-lr",
        "--clip-norm": "--clip-grad",
        "--tokens-per-sample": "--seq-length",
        "--save-dir": "--save",
        "--save-interval-updates": "--save-interval",
        "--restore-file": "--load",
        "--update-freq": "--accumulation",
        "--dropout": "--hidden-dropout",
        "--fp16-init-scale": "--initial-loss-scale",
        "--fp16-scale-window": "--loss-scale-window",
        "--validate-interval-updates": "--eval-interval",
        "--keep-interval-updates": "--keep-last",
        "--distributed-world-size": "--nproc",
    },
    values={
        "--lr-scheduler": (
            "--lr-decay",
            {"inverse_sqrt": "inverse-square-root", "fixed": "constant", "polynomial_decay": "linear"},
        ),
        "--power": ("--lr-decay", {"1": "linear", "1.0": "linear"}),
    },
    drops={
        **dict.fromkeys(("--task", "--arch", "--criterion"), "--model megatron-11b says it"),
        **dict.fromkeys(("--sample-break-mode", "--shorten-method"), "samples are runs of tokens"),
        "--ddp-backend": "gradients always lie in contiguous buckets",
        **dict.fromkeys(("--log-format", "--required-batch-size-multiple"), "it changes no number"),
    },
    drops_switches={
        "--share-decoder-input-output-embed": "--model megatron-11b says it",
        **dict.fromkeys(("--no-progress-bar", "--no-epoch-checkpoints"), "it changes no number"),
    },
    lacks={"--add-bos-token": "samples are runs of tokens, with none before them"},
    arguments=("DATA",),
)
_FAIRSEQ_EVAL = Program(
    "eval",
    adds={"--task": "wikitext103"},
    defaults={"--context-window": "0", "--seq-length": "1024"},
    renames={
        **_FAIRSEQ,
        "--path": "--load",
        "--tokens-per-sample": "--seq-length",
        "--distributed-world-size": "--nproc",
    },
    drops=dict.fromkeys(("--task", "--criterion", "--max-tokens", "--sample-break-mode"), "the benchmark says it"),
    values={"--gen-subset": ("--gen-subset", {name: name for name in ("train", "valid", "test", "test1", "valid1")})},
    arguments=("DATA",),
)
_FAIRSEQ_SET = Program(
    "preprocess",
    adds={"--tokenizer": "FairseqTokenizer", "--text-lines": "", "--append-eod": ""},
    renames={"--srcdict": "--tokenizer-model"},
    drops=dict.fromkeys(("--dataset-impl", "--log-format"), "token files are always written in the mmap format"),
    drops_switches=dict.fromkeys(("--only-source", "--no-progress-bar"), "texts have one side"),
)
"""One of the sets of fairseq-preprocess, by --input and --output-prefix."""

PROGRAMS: Mapping[str, Program] = {
    **dict.fromkeys(("pretrain_gpt.py", "pretrain_gpt2.py", "pretrain_gpt_core.py"), _GPT),
    "pretrain_bert.py": _BERT,
    "pretrain_t5.py": _T5,
    "finetune_gpt.py": _GPT,
    "pretrain_ict.py": Program(why=_RETRIEVAL),
    "pretrain_retro.py": Program(why=_RETRO),
    **dict.fromkeys(
        (
            *("pretrain_vision_classify.py", "pretrain_vision_classification.py"),
            *("pretrain_vision_inpaint.py", "pretrain_vision_dino.py"),
        ),
        Program(why=_VISION),
    ),
    "preprocess_data.py": Program(
        "preprocess",
        defaults=_WORDPIECE,
        renames={"--vocab": "--vocab-file", "--json-key": "--json-keys", "--text-key": "--json-keys"},
    ),
    "merge_datasets.py": Program("data merge"),
    "preprocessing.py": Program(why=_DIALOGUE),
    **dict.fromkeys(("util.py", "checkpoint_util.py"), _CHECKPOINT_TOOL),
    "convert.py": _CHECKPOINT_TOOL,
    "merge_mp_partitions.py": _MERGE_PARTITIONS,
    "merge_mp_gpt.py": _MERGE_PARTITIONS,
    "llama_checkpoint_conversion.py": Program(
        "convert-llama",
        adds={"--to": "hf"},
        renames={"--load_path": "--load-dir", "--save_path": "--save-dir"},
        drops={
            "--convert_checkpoint_from_megatron_to_transformers": "--to hf says it",
            "--print-checkpoint-structure": "mega checkpoint show --tensors lists tensors",
            "--megatron-path": "nothing else is started",
            "--make_vocab_size_divisible_by": "padding is left out",
            "--use_distributed_optimizer": "weights alone are converted",
            **dict.fromkeys(
                (
                    *("--target_tensor_model_parallel_size", "--target_pipeline_model_parallel_size"),
                    "--target_data_parallel_size",
                ),
                "Hugging Face's form is not cut",
            ),
        },
        lacks={"--target_params_dtype": "weights keep the dtype that they have"},
    ),
    "run_text_generation_server.py": Program("serve"),
    "text_generation_cli.py": Program("generate", arguments=("--url",)),
    **dict.fromkeys(("generate_samples.py", "generate_samples_gpt.py", "generate_samples_gpt2.py"), _GENERATE),
    **dict.fromkeys(("generate_logits_gpt.py", "generate_loss_gpt.py", "generate_eval.py"), Program(why=_CHINESE)),
    "inference.py": Program(
        "generate",
        adds={"--tokenizer": "Llama2Tokenizer"},
        defaults={"--num-samples": "3", "--tokens": "2048"},
        renames={"--hf-model-path": "--load", "--hf-tokenizer-path": "--tokenizer-model"},
        drops={
            **dict.fromkeys(("--hf-cache-dir", "--hf-token"), "models are read where they lie"),
            "--limit-inference-case": "--num-samples says how many",
        },
    ),
    "is_same.py": Program("checkpoint diff"),
    "check.py": Program("checkpoint diff"),
    "upload.py": Program(why="nothing is sent to the Hub; its own client uploads the folder"),
    "ensemble_classifier.py": Program("eval"),
    "report_theoretical_memory.py": Program("memory-estimate"),
    "split_json.py": Program(
        "data split",
        renames={"--input_files": "--input", "--output_dir": "--output-dir"},
        defaults={"--split": "95,5,0"},
    ),
    "presplit_sentences_json.py": Program("data presplit", arguments=("--input", "--output")),
    "run_gpt2_eval.py": Program(
        "eval",
        adds={
            "--tokenizer": "GPT2BPETokenizer",
            "--vocab-file": "$GPT2/vocab.json",
            "--merge-file": "$GPT2/merges.txt",
        },
        renames={"--model-path": "--load", "--data-path": "--valid-data"},
        drops={
            "--cache-dir": "a tokenizer is read from its files",
            **dict.fromkeys(("--num-layers", "--hidden-size", "--num-attention-heads"), _MODEL),
        },
        hole=GPT2_FILES,
    ),
    # corpora
    "blacklist_urls.py": Program("corpus urls", adds={"--as-megatron": ""}, arguments=("--input", "--output")),
    "cleanup_dataset.py": Program(
        "corpus clean",
        adds={
            "--as-megatron": "",
            "--tokenizer": "GPT2BPETokenizer",
            "--vocab-file": "$GPT2/vocab.json",
            "--merge-file": "$GPT2/merges.txt",
        },
        arguments=("--input", "--output"),
        hole=GPT2_FILES,
    ),
    "find_duplicates.py": Program(
        "corpus near-duplicates",
        adds={"--as-megatron": ""},
        renames={"--output": "--pairs", "--kept": "--output"},
        drops={
            "--seed": "signatures are those of seed 1234",
            "--heuristic-iter": "all documents of a bucket are compared",
            "--jaccard-parallel": "--workers says how many processes",
        },
    ),
    "group_duplicate_url.py": Program("corpus group", arguments=("--pairs", "--groups", "--threshold")),
    "remove_group_duplicates.py": Program("corpus remove-groups", arguments=("--groups", "--input", "--output")),
    "filter_ngrams.py": Program(
        "corpus decontaminate",
        adds={"--as-megatron": ""},
        renames={"--num-threads": "--workers"},
        hole="TASKS: a folder with a file or folder of each benchmark under its name, which were downloaded by name",
    ),
    "perspective_api_annotate.py": Program(
        "corpus annotate",
        adds={"--scorer": "https://commentanalyzer.googleapis.com"},
        renames={"--data-path": "--input", "--out-path": "--output", "--workers": "--connections"},
        drops={"--total": "it sized a progress bar"},
    ),
    "filter-selfgeneration.py": Program("corpus select", renames={"--data-path": "--input", "--out-path": "--output"}),
    # fairseq's
    **dict.fromkeys(("fairseq-train", "train.py"), _FAIRSEQ_TRAIN),
    **dict.fromkeys(("fairseq-eval-lm", "eval_lm.py"), _FAIRSEQ_EVAL),
    **dict.fromkeys(("fairseq-preprocess", "preprocess.py", "fairseq-preprocess-set"), _FAIRSEQ_SET),
    "detok.py": Program("data detokenize", adds={"--detokenizer": "fairseq"}, arguments=("--input",)),
    "multiprocessing_bpe_encoder.py": Program(
        "data encode",
        adds={"--tokenizer": "GPT2BPETokenizer"},
        renames={
            "--encoder-json": "--vocab-file",
            "--vocab-bpe": "--merge-file",
            "--inputs": "--input",
            "--outputs": "--output",
        },
        drops={"--workers": "lines are encoded in batches"},
    ),
}
"""Every known program by the name of its file."""


def program_of(name: str, words: Sequence[str]) -> Program:
    """The row of a program that is called by `name`, whatever its folder, with these words after it.

    Errors: ValueError where it is not known.

    >>> program_of("tasks/main.py", ["--task", "LAMBADA"]).verb
    'eval'
    >>> program_of("pretrain_bort.py", [])
    Traceback (most recent call last):
    ...
    ValueError: pretrain_bort.py: is not a program that is known here (nearest: pretrain_bert.py)
    """
    base = PurePosixPath(name).name
    if base == "main.py":
        return _task(words)
    if PROGRAMS.get(base) is _CHECKPOINT_TOOL and _value(words, "--loader") in (
        "llama2_hf",
        "llama_hf",
        "llama_mistral",
    ):
        return Program(
            "convert-llama",
            adds={"--to": "mega"},
            renames=_CHECKPOINT_TOOL.renames,
            drops={**_CHECKPOINT_TOOL.drops, "--saver": "--to says what is written"},
        )
    if base not in PROGRAMS:
        raise ValueError(f"{name}: is not a program that is known here{nearest(base, [*PROGRAMS, 'main.py'])}")
    return PROGRAMS[base]


def is_program(word: str, *, known: bool = False) -> bool:
    """Whether a word of a command line names a program, known or not.

    known: whether only a program that is known here counts.

    >>> is_program("tools/preprocess_data.py"), is_program("fairseq-train"), is_program("--nproc_per_node")
    (True, True, False)
    """
    if " " in word or word.startswith("-"):
        return False
    name = PurePosixPath(word).name
    return name in PROGRAMS or (word.endswith(".py") and (not known or name == "main.py"))


def _task(words: Sequence[str]) -> Program:
    """tasks/main.py, or tools/retro/main.py. Errors: ValueError where no --task that is known is given."""
    if _value(words, "--retro-tasks") is not None:
        return Program(why=_RETRO)
    task = _value(words, "--task")
    if task is None:
        raise ValueError("main.py: names no --task, which says what it does")
    if task.lower() not in _TASKS:
        raise ValueError(f"main.py --task {task}: is not a task that is known here{nearest(task.lower(), _TASKS)}")
    found = _TASKS[task.lower()]
    scored = _value(words, "--train-data") is None or _value(words, "--epochs") == "0"
    return _EVAL if found is _FINETUNE and scored else found


def _value(words: Sequence[str], flag: str) -> str | None:
    """The first value of a flag; "" of one without."""
    for index, word in enumerate(words):
        name, attached, value = word.partition("=")
        if name == flag:
            following = words[index + 1] if index + 1 < len(words) else "--"
            return value if attached else "" if following.startswith("--") else following
    return None
