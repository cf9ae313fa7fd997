"""Megatron-LM's example command lines, as they stand, become the runs that they describe."""

from __future__ import annotations

import json
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.command_line.argv import Several, meanings, translate
from mega.command_line.legacy.flags import obsolete_flags
from mega.core.config import toml
from mega.core.config.presets import FAMILY_DEFAULTS, FamilyDefaults
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, entries, value_of
from mega.core.text.build import build
from tests.support.lines import parsed
from tests.support.shared import shared

GPT_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters
    500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
    --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --data-path my-gpt2_text_document --vocab-file
    gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1 --log-interval 100
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt"""

GPT3_175B = """
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288
    --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
    --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 146484375
    --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style
    cosine --log-interval 10 --eval-iters 40 --eval-interval 1000 --data-path 0.2 first 0.3 second 0.5
    third --vocab-file vocab.json --merge-file merges.txt --save-interval 1000 --save ckpt --load ckpt
    --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006 --tensorboard-dir tb --fp16 --recompute-activations"""

LLAMA2_7B = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 32 --hidden-size 4096
    --num-attention-heads 32 --ffn-hidden-size 11008 --seq-length 4096 --max-position-embeddings 4096
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 25000 --lr-warmup-iters 1000 --lr 1e-4
    --min-lr 3.3e-6 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --optimizer adam
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.02 --bf16 --use-distributed-optimizer
    --sequence-parallel --recompute-activations --recompute-granularity selective --use-flash-attn
    --attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --norm-epsilon 1e-5
    --use-rotary-position-embeddings --no-position-embedding --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --no-masked-softmax-fusion --no-query-key-layer-scaling
    --use-checkpoint-args --no-load-rng --no-load-optim --tokenizer-type Llama2Tokenizer
    --tokenizer-model tokenizer.model --train-data-path a b --split 949,50,1 --log-interval 1
    --save-interval 500 --eval-interval 100 --eval-iters 10 --save new --load old --use-mpi
    --distributed-backend nccl --wandb-name llama"""

WEAK_SCALING_76B = """
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers 60 --hidden-size 10240
    --num-attention-heads 80 --micro-batch-size 2 --global-batch-size 1792
    --num-layers-per-virtual-pipeline-stage 5 --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --DDP-impl local --fp16 --loss-scale 8192 --seq-length 2048
    --max-position-embeddings 2048 --train-samples 20480"""

GPT_345M_FIELDS = {
    "layers": 24,
    "hidden": 1024,
    "heads": 16,
    "seq_length": 1024,
    "positions": 1024,
    "micro_batch": 4,
    "global_batch": 8,
    "lr": 0.00015,
    "steps": 500000,
    "lr_decay_steps": 320000,
    "lr_decay": "cosine",
    "min_lr": 1e-5,
    "weight_decay": 0.01,
    "lr_warmup_fraction": 0.01,
    "clip_grad": 1.0,
    "dtype": "fp16",
    "data_path": ("my-gpt2_text_document",),
    "vocab_file": "gpt2-vocab.json",
    "merge_file": "gpt2-merges.txt",
    "split": "949,50,1",
    "log_interval": 100,
    "save_interval": 10000,
    "eval_interval": 1000,
    "eval_iters": 10,
    "save": "ckpt",
    "load": "ckpt",
}

LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT 345M": (GPT_345M, GPT_345M_FIELDS),
    "GPT 345M, data parallel": (
        GPT_345M.replace("--micro-batch-size 4 --global-batch-size 8", "--micro-batch-size 8 --global-batch-size 64"),
        GPT_345M_FIELDS | {"micro_batch": 8, "global_batch": 64},
    ),
    "GPT 345M, distributed": (
        GPT_345M.replace("--global-batch-size 8", "--global-batch-size 16")
        + " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
        + " --distributed-backend nccl --local_rank=3",
        GPT_345M_FIELDS | {"global_batch": 16, "tp": 2, "pp": 2, "sequence_parallel": True, "backend": "nccl"},
    ),
    "GPT-3 175B": (
        GPT3_175B,
        {
            "tp": 8,
            "pp": 16,
            "layers": 96,
            "hidden": 12288,
            "heads": 96,
            "micro_batch": 1,
            "global_batch": 1536,
            "rampup": (16, 16, 5859375),
            "samples": 146484375,
            "lr_decay_samples": 126953125,
            "lr_warmup_samples": 183105,
            "lr": 6e-5,
            "min_lr": 6e-6,
            "data_path": ("0.2", "first", "0.3", "second", "0.5", "third"),
            "split": "98,2,0",
            "adam_beta2": 0.95,
            "init_std": 0.006,
            "weight_decay": 0.1,
            "tensorboard_dir": "tb",
            "recompute": "selective",
            "dtype": "fp16",
        },
    ),
    "Llama-2 7B": (
        LLAMA2_7B,
        {
            "tp": 2,
            "pp": 2,
            "ffn": 11008,
            "steps": 25000,
            "lr_warmup_steps": 1000,
            "min_lr": 3.3e-6,
            "dtype": "bf16",
            "zero": 1,
            "sequence_parallel": True,
            "recompute": "selective",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "norm": "rmsnorm",
            "norm_eps": 1e-5,
            "position": "rope",
            "activation": "swiglu",
            "bias": False,
            "tied": False,
            "use_checkpoint_config": True,
            "load_optim": False,
            "tokenizer": "Llama2Tokenizer",
            "tokenizer_model": "tokenizer.model",
            "train_data": ("a", "b"),
            "backend": "nccl",
        },
    ),
    "Llama-2 70B, grouped heads": (
        LLAMA2_7B.replace("--num-attention-heads 32", "--num-query-groups 8 --group-query-attention --num-att 64"),
        {"heads": 64, "kv_heads": 8},
    ),
    "76B of the weak-scaling table": (
        WEAK_SCALING_76B,
        {
            "layers_per_chunk": 5,
            "recompute": "full",
            "recompute_method": "uniform",
            "recompute_layers": 1,
            "loss_scale": 8192.0,
            "micro_batch": 2,
            "global_batch": 1792,
        },
    ),
}


SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 4 --lr 1e-4 --train-iters 10"
BERT = SIZES + (
    " --seq-length 128 --max-position-embeddings 128 --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt "
    "--data-path my-bert_text_sentence --mask-prob 0.15 --short-seq-prob 0.1 --bert-no-binary-head --fp16"
)
T5 = SIZES + (
    " --encoder-seq-length 128 --decoder-seq-length 128 --max-position-embeddings 128 --vocab-file vocab.txt "
    "--vocab-extra-ids 100 --data-path my-t5_text_sentence --kv-channels 16 --ffn-hidden-size 256"
)
YUAN = SIZES + " --seq-length 128 --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --data-path text"


@pytest.mark.parametrize("name", LINES)
def test_example_command_line(name: str) -> None:
    line, fields = LINES[name]
    run = parsed(line)
    assert {field: value_of(run, field) for field in fields} == fields


def test_what_a_line_does_not_say_stays_megatrons_default() -> None:
    run = parsed(GPT_345M)
    untouched = set(entries()) - set(GPT_345M_FIELDS)
    assert {name: value_of(run, name) for name in untouched} == {name: value_of(Options(), name) for name in untouched}


def test_dropped_flags_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    parsed(LLAMA2_7B)
    printed = capsys.readouterr().err.splitlines()
    for flag in (
        "--use-flash-attn",
        "--no-masked-softmax-fusion",
        "--no-load-rng",
        "--use-mpi",
    ):
        assert sum(line.startswith(f"{flag} is accepted and changes nothing: ") for line in printed) == 1


@pytest.mark.parametrize(("line", "flags"), [(BERT, 4), (T5, 3)])
@pytest.mark.parametrize("more", ["", " --family gpt", " --print-config", " --model tiny-gpt"])
def test_a_line_of_another_family_is_no_gpt(line: str, flags: int, more: str) -> None:
    with pytest.raises(ValueError, match=r"belongs to|needs --family") as refused:
        parsed(line + more)
    # Whoever names the family may train it on any tokenizer.
    assert len(str(refused.value).splitlines()) == flags - (more == " --family gpt")


def test_a_line_of_berts_script_with_its_family_is_one() -> None:
    run = parsed(BERT + " --family bert")
    assert (run.model.family, run.masking.sample_kind, run.model.binary_head) == ("bert", "bert", False)
    assert resolve(run, 1, 30592).tokenizer.tokenizer == "BertWordPieceLowerCase"
    bare = BERT.replace(" --tokenizer-type BertWordPieceLowerCase", "")
    assert resolve(parsed(bare + " --family bert"), 1, 30592).tokenizer.tokenizer == "BertWordPieceLowerCase"


def test_a_gpt_on_word_pieces_names_its_family() -> None:
    with pytest.raises(ValueError, match=r"LowerCase: needs --family bert or t5.*; give --family gpt to train that"):
        parsed(YUAN)
    assert parsed(YUAN + " --family gpt").tokenizer.tokenizer == "BertWordPieceLowerCase"


def test_a_family_that_is_registered_reads_what_its_defaults_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILY_DEFAULTS, "bert", FamilyDefaults({}))
    monkeypatch.setitem(FAMILY_DEFAULTS, "electra", FamilyDefaults({"mask_prob": 0.25}))
    masked = SIZES + " --seq-length 128 --mask-prob 0.15"
    assert parsed(masked + " --family bert --bert-no-binary-head").model.binary_head is False
    assert parsed(masked + " --family electra").masking.mask_prob == 0.15
    with pytest.raises(ValueError, match=r"^--mask-prob 0\.15: needs --family bert or t5$"):
        parsed(masked)


def test_the_runs_own_file_is_not_another_familys(tmp_path: Path) -> None:
    """Which names every option, at its default too."""
    line = f"{YUAN} --family gpt --vocab-extra-ids 100"
    (tmp_path / "run.toml").write_text(toml.write(parsed(line)))
    assert parsed(f"--config {tmp_path / 'run.toml'}") == parsed(line)


KNOWN = meanings(list(entries().values()), {}, obsolete_flags())


def canonical(line: str) -> list[str]:
    return translate(shlex.split(line), KNOWN)[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--train-it 5", ["--steps=5"]),
        ("--num-layers=3", ["--layers=3"]),
        ("--micro_batch_size 2", ["--micro-batch=2"]),
        ("--override-opt_param-scheduler", ["--override-schedule"]),
        ("--override-opt-param-scheduler", ["--override-schedule"]),
        ("--disable-bias-linear", ["--no-bias"]),
        ("--no-bias", ["--no-bias"]),
        ("--lr -1", ["--lr=-1"]),
        ("--lr=-1e-3", ["--lr=-1e-3"]),
        ("--save a=b", ["--save=a=b"]),
        ("--lr 1 --lr 2", ["--lr=2"]),
        ("--swiglu --no-bias-gelu-fusion", ["--activation=swiglu"]),
        ("--no-bias-gelu-fusion", ["--activation=gelu"]),
        ("--no-bias-gelu-fusion --swiglu", ["--activation=swiglu"]),
        (
            "--recompute-activations --recompute-granularity full",
            ["--recompute=full", "--recompute-method=uniform", "--recompute-layers=1"],
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            ["--recompute=full", "--recompute-method=block", "--recompute-layers=2"],
        ),
        ("--recompute-granularity selective", ["--recompute=selective"]),
        ("--fp8-format hybrid --bf16", ["--fp8", "--dtype=bf16"]),
        ("--fp8-format hybrid --fp8-recipe blockwise", ["--fp8", "--fp8-scaling=block"]),
        ("--fp8-hybrid --fp8-recipe delayed", ["--fp8", "--fp8-scaling=tensor"]),
        ("--use-rotary-position-embeddings --no-position-embedding", ["--position=rope"]),
        ("--position-embedding-type learned_absolute", ["--position=learned"]),
        ("--normalization RMSNorm", ["--norm=rmsnorm"]),
        ("--group-query-attention", ["--kv-heads=1"]),
        ("--rampup 16 16 5859375 --bf16", ["--rampup=16", "--rampup=16", "--rampup=5859375", "--dtype=bf16"]),
        ("--train-data a --train-data b", ["--train-data=a", "--train-data=b"]),
        ("--bf16 --dtype bf16", ["--dtype=bf16"]),
        ("--dry-run positional", ["--dry-run", "positional"]),
        ("--no-async-tensor-model-parallel-allreduce --DDP-impl local", []),
        (
            "--batch-size 8 --model-parallel-size 2 --warmup .01",
            [*("--micro-batch=8", "--tp=2"), "--lr-warmup-fraction=.01"],
        ),
        (
            "--activations-checkpoint-method uniform",
            ["--recompute=full", "--recompute-method=uniform", "--recompute-layers=1"],
        ),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            ["--recompute=full", "--recompute-method=block", "--recompute-layers=3"],
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            ["--recompute=full", "--recompute-method=uniform", "--recompute-layers=2"],
        ),
        ("--intermediate-size 8 --min-scale 2", ["--ffn=8", "--min-loss-scale=2"]),
        ("--fp32-embedding --fp32-allreduce", ["--embedding-fp32", "--grad-dtype=fp32"]),
        (
            "--tokenizer-type BertWordPieceTokenizer --tokenizer-model-type bert-large-cased",
            ["--tokenizer=BertWordPieceCase"],
        ),
        ("--tokenizer-type BertWordPieceTokenizer", ["--tokenizer=BertWordPieceLowerCase"]),
        (
            "--tokenizer-type SentencePieceTokenizer --tokenizer-model-type bpe --tokenizer-path t.model",
            ["--tokenizer=SentencePieceTokenizer", "--tokenizer-model=t.model"],
        ),
        ("--save-retain-interval 9", ["--keep-last=1", "--keep-every=9"]),
        ("--cuda-graph-impl none", ["--no-cuda-graph"]),
        ("--use-distributed-optimizer --zero-stage 2", ["--zero=2"]),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 5", ["--lr-decay=wsd", "--lr-wsd-decay-steps=5"]),
        ("--train-tokens 100 --data-path2 1 a 2 b", ["--exit-tokens=100", *(f"--valid-data={w}" for w in "1a2b")]),
        ("--encoder-attn-mask-type padding --recompute-modules core_attn --inference-max-requests 3", []),
    ],
)
def test_habits_become_canonical(line: str, expected: list[str]) -> None:
    assert canonical(line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--layrs 2", "--layrs: is not an option (nearest: --layers)"),
        ("--seq 2", "--seq: is short for several flags: --seq-length, --sequence-parallel"),
        ("--layers", "--layers: needs a value"),
        ("--layers --hidden 3", "--layers: needs a value"),
        ("--layers two", "--layers two: must be a whole number"),
        ("--layers 2.5", "--layers 2.5: must be a whole number"),
        ("--lr fast", "--lr fast: must be a number"),
        ("--bf16=yes", "--bf16=yes: --bf16 takes no value"),
        ("--dtype fp32x", "--dtype fp32x: is not a choice (nearest: fp32); valid: fp32, bf16, fp16, fp64"),
        (
            "--normalization RmsNorm",
            "--normalization RmsNorm: is not a choice (nearest: RMSNorm); valid: LayerNorm, ",
        ),
        ("--fp16 --bf16", "--bf16: contradicts --fp16; give one of them"),
        ("--rampup-batch-size 16 x", "--rampup-batch-size x: must be a whole number"),
        ("--expert-parallel", "--expert-parallel: give --ep, and for the Switch layers of 2023 "),
        ("--batch-size 8 --micro-batch-size 4", "--micro-batch-size: contradicts --batch-size; give one of them"),
        ("--activations-checkpoint-method none", "--activations-checkpoint-method none: is not a choice; valid: unif"),
        ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16: is not supported: masters, moments and reduced gradients are"),
        ("--moe-use-upcycling", "--moe-use-upcycling: a dense checkpoint becomes a mixture by mega res"),
        ("--hidden-sise 8", "--hidden-sise: is not an option (nearest: --hidden-size)"),
        ("--zzz 8", "--zzz: is not an option; --help lists all"),
        ("--fp8-format e4m3", "--fp8-format e4m3: is not a choice; valid: hybrid"),
        ("--fp8-e4m3", "--fp8-e4m3: gradients in fp8 are e5m2; use --fp8-hybrid"),
        ("--fp8-recipe mxfp8", "--fp8-recipe mxfp8: is not a choice; valid: delayed, tensorwise, blockwise"),
        ("--data-path", "--data-path: needs a value"),
    ],
)
def test_mistakes_of_a_line(line: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        canonical(line)
    assert str(caught.value).startswith(message)


def test_every_spelling_of_megatron_leads_somewhere() -> None:
    """Each spelling of each option is known, and no table of dropped or refused flags shadows it."""
    for entry in entries().values():
        for spelling in entry.option.megatron:
            meaning = KNOWN[spelling]
            parts = meaning.parts if isinstance(meaning, Several) else (meaning,)
            assert entry.flag in [getattr(part, "flag", None) for part in parts]


@pytest.mark.parametrize(
    "name", ["gpt_fp32_tp2pp1dp2_plain", "llama_bf16_tp2pp2dp1_do", "te_llama_fp32_tp2pp1dp1_plain"]
)
def test_lines_that_megatron_core_recorded(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand, but for where files lie."""
    with tarfile.open(shared(f"megatron_core/{name}.tar.xz")) as archive:
        member = next(each for each in archive if each.name.endswith("record.json"))
        argv = json.load(archive.extractfile(member))["argv"]  # type: ignore[arg-type]
    data = str(shared("megatron_core/bytes_document.bin")).removesuffix(".bin")
    places = [data if word.endswith("/bytes_document") else str(tmp_path / Path(word).name) for word in argv]
    line = [place if word.startswith("/data/") else word for word, place in zip(argv, places, strict=True)]
    assert main(["pretrain", *line, "--dry-run", "--world", "4"]) == 0
    assert "everything checked" in capsys.readouterr().out


MIXTURE_FLAGS = """
num-experts moe-shared-expert-intermediate-size moe-shared-expert-gate moe-shared-expert-overlap
moe-shared-expert-glu-interleave-size moe-layer-freq moe-ffn-hidden-size moe-router-load-balancing-type moe-router-topk
moe-enable-routing-replay moe-router-topk-limited-devices moe-router-padding-for-quantization
moe-router-padding-for-fp8 moe-router-num-groups moe-router-group-topk moe-router-pre-softmax
moe-router-topk-scaling-factor moe-router-score-function moe-router-dtype moe-router-enable-expert-bias
moe-router-bias-update-rate moe-router-quantile-balancing-ema moe-router-force-load-balancing moe-router-force-biased
moe-grouped-gemm moe-use-grouped-tensor moe-single-grouped-weight moe-single-grouped-bias moe-aux-loss-coeff
moe-z-loss-coeff moe-input-jitter-eps moe-token-dropping moe-token-dispatcher-type moe-enable-deepep
moe-flex-dispatcher-backend moe-permute-fusion-into-hybridep moe-hybridep-pad-uneven-dispatch-inputs
moe-per-layer-logging moe-expert-capacity-factor moe-pad-expert-input-to-capacity
moe-pad-experts-for-cuda-graph-inference moe-token-drop-policy moe-layer-recompute moe-permute-fusion
moe-router-fusion moe-apply-probs-on-input moe-latent-size moe-flex-dispatcher-num-sms moe-deepep-num-sms
moe-hybridep-num-sms moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute
moe-hybridep-num-sms-preprocessing moe-ncclep-static-shape moe-ncclep-zero-copy moe-dispatch-fwd-dtype
moe-combine-bwd-dtype moe-mlp-glu-interleave-size moe-expert-rank-capacity-factor moe-paged-stash
moe-paged-stash-page-size moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu
moe-use-upcycling moe-upcycling-granularity expert-model-parallel-size expert-tensor-parallel-size
expert-tensor-parallel-num-weight-shards mtp-num-layers mtp-loss-scaling-factor mtp-use-repeated-layer mtp-detach-heads
mtp-hsm mtp-hybrid-override-pattern
"""
"""Of Megatron-core 0.18, 0.19 and its main branch of 2026: fields of TransformerConfig, and those of its parser."""


def test_every_flag_of_a_mixture_has_an_answer() -> None:
    """An option, a line that says that nothing changes, or one that refuses it; never that it is no option."""
    for name in MIXTURE_FLAGS.split():
        for words in (f"--{name}", f"--{name} 1", f"--{name} none"):
            try:
                canonical(words)
            except ValueError as error:
                assert "is not an option" not in str(error), error


def test_the_null_tokenizer_counts_as_core_does() -> None:
    old, new = (build(tokenizer="NullTokenizer", vocab_size=257, null_eod_last=last) for last in (False, True))
    assert (old.vocab_size, old.eod) == (258, 257) and (new.vocab_size, new.eod) == (257, 256)
    with pytest.raises(ValueError, match="--vocab-size 1: must be at least 2 with --null-eod-last"):
        build(tokenizer="NullTokenizer", vocab_size=1, null_eod_last=True)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--moe-router-pre-softmax", {"router_normalize": False}),
        ("--moe-router-pre-softmax --moe-router-score-function sigmoid", {"router_normalize": True}),
        ("--moe-aux-loss-coeff 1e-2", {"balance": ("microbatch",), "balance_loss": (0.01,)}),
        (
            "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss",
            {"balance": ("sequence",), "balance_loss": (0.01,)},
        ),
        ("--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type none", {"balance_loss": (0.0,)}),
        (
            "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3",
            {"balance": ("microbatch", "global"), "balance_loss": (0.01, 0.001), "router_choice": "largest"},
        ),
        ("--moe-layer-freq 2", {"experts_every": 2, "dense_layers": ()}),
        ("--num-layers 4 --moe-layer-freq ([0]*1+[1]*3)", {"experts_every": 1, "dense_layers": (0,)}),
        ("--moe-layer-freq=[0,1]*2", {"experts_every": 1, "dense_layers": (0, 2)}),
        ("--moe_layer_freq '[1, 1]'", {"experts_every": 1, "dense_layers": ()}),
    ],
)
def test_flags_of_mixtures_mean_what_core_makes_of_them_together(words: str, values: dict[str, Any]) -> None:
    options = parsed(f"--num-experts 4 {words}")
    assert {name: value_of(options, name) for name in values} == values


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--num-layers 3 --moe-layer-freq [0,1]", "--moe-layer-freq: has 2 numbers; must have as many numbers as --la"),
        ("--moe-layer-freq [2]", "--moe-layer-freq [2]: is not a list of 0 and 1; must be a whole number, or a list"),
        ("--moe-layer-freq [1]*100000000000", "--moe-layer-freq [1]*100000000000: has more than 10000 layers; must be"),
        ("--moe-layer-freq exit()", "--moe-layer-freq exit(): is not a list of 0 and 1; must be"),
        ("--moe-layer-freq [1", "--moe-layer-freq [1: is not an expression; must be"),
        ("--moe-router-load-balancing-type aux", "--moe-router-load-balancing-type aux: is not a choice; valid: aux_l"),
        ("--moe-router-topkk 2", "--moe-router-topkk: of mixtures of experts this is not built (nearest: --moe"),
    ],
)
def test_flags_of_mixtures_that_are_wrong(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The expression of core is not evaluated as Python."""
    assert main(["pretrain", "--num-experts", "4", *shlex.split(words), "--print-config"]) == 2
    assert capsys.readouterr().err.startswith(f"mega: {line}")
