"""`mega translate`: old lines with launcher and program become lines of mega that run; what has no counterpart is told.

All recorded lines on stand-ins of what they name: tests/battery/command_lines.py.
"""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from mega.cli import main
from mega.command_line import argv
from mega.command_line.legacy import flags, launchers, lines, programs, rewrites, scripts, translation
from mega.command_line.legacy.lines import NULL
from mega.command_line.legacy.scripts import CommandLine, command_lines, split_command
from mega.command_line.legacy.translation import quoted
from tests.support.old_lines import Stands, judged, recorded, translated


@pytest.mark.parametrize("module", [argv, flags, launchers, lines, programs, rewrites, scripts, translation])
def test_worked_examples(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def new(line: str) -> list[str]:
    """The lines of mega that an old one becomes."""
    found = split_command(line.split())
    assert found is not None
    return [quoted(words) for words in translated(found).commands]


SIZES = "--num-layers 2 --hidden-size 8"
OURS = "--layers 2 --hidden 8"
LOSS = "--loss-normalizer microbatch --no-mask-padded-vocab"


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        (f"python pretrain_gpt.py {SIZES}", f"mega pretrain --family gpt {OURS} {LOSS}"),
        (f"torchrun pretrain_bert.py {SIZES}", f"mega pretrain --family bert {OURS} {LOSS}"),
        (
            f"torchrun --nproc_per_node 8 --nnodes 1 --master_port 6000 pretrain_t5.py {SIZES}",
            f"mega pretrain --nproc 8 --family t5 {OURS} {LOSS} --memory-padding uniform",
        ),
        (
            f"python -m torch.distributed.launch --nproc_per_node=8 --nnodes=2 pretrain_gpt2.py {SIZES}",
            f"torchrun --nproc_per_node=8 --nnodes=2 -m mega pretrain --family gpt {OURS} {LOSS}",
        ),
        (
            f"mpirun -np 8 -x MASTER_ADDR python pretrain_gpt.py {SIZES} --use-mpi",
            f"mpirun -np 8 -x MASTER_ADDR mega pretrain --family gpt {OURS} {LOSS}",
        ),
        (
            f"nohup deepspeed --num_gpus 4 pretrain_gpt2.py {SIZES}",
            f"nohup mega pretrain --nproc 4 --family gpt {OURS} {LOSS}",
        ),
        (
            f"deepspeed pretrain_gpt2.py {SIZES}",
            f"torchrun --nproc-per-node gpu -m mega pretrain --family gpt {OURS} {LOSS}",
        ),
        (
            f"torchrun $ARGS pretrain_gpt.py {SIZES}",
            f"torchrun $ARGS -m mega pretrain --family gpt {OURS} {LOSS}",
        ),
        (
            f"deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt2.py {SIZES}",
            f"torchrun --nnodes 2 --nproc-per-node 4 -m mega pretrain --family gpt {OURS} {LOSS}",
        ),
        (
            "python tasks/main.py --task LAMBADA --valid-data x --load c --strict-lambada --batch-size 8",
            "mega eval --task lambada --valid-data x --load c --strict-lambada --micro-batch 8",
        ),
        (
            "python tasks/main.py --task MNLI --train-data t --valid-data a b --epochs 5 --keep-last",
            "mega finetune --family bert --task mnli --train-data t --valid-data a b --epochs 5 --keep-last-batch",
        ),
        (
            "python tasks/main.py --task MNLI --valid-data a b --load c",
            "mega eval --task mnli --valid-data a b --load c",
        ),
        (
            "python tools/preprocess_data.py --input x --vocab v.txt --dataset-impl cached --output-prefix p",
            "mega preprocess --input x --vocab-file v.txt --output-prefix p --tokenizer BertWordPieceLowerCase",
        ),
        (
            "python tools/checkpoint/util.py --model-type GPT --loader llama2_hf --saver megatron --load-dir a "
            "--save-dir b --target-tensor-parallel-size 2 --tokenizer-model t",
            "mega convert-llama --to mega --load-dir a --save-dir b --tp 2",
        ),
        (
            "python tools/merge_mp_partitions.py --model-type BERT --tensor-model-parallel-size 2 --load c",
            "mega reshard --tp 1 --pp 1 --saver megatron --load-dir c --save-dir c-merged",
        ),
        (
            "python run_text_generation_server.py --tensor-model-parallel-size 8 --load c --top_p 0.9",
            "mega serve --tp 8 --load c --top-p 0.9",
        ),
        (
            "python generate_samples_gpt2.py --model-parallel-size 1 --load c --fp16 --genfile f --num-samples 2",
            "mega generate --tp 1 --load c --dtype fp16 --output f --num-samples 2",
        ),
        (
            "fairseq-train data --tokens-per-sample 1024 --max-update 9 --arch transformer_lm_megatron_11b",
            "mega pretrain --model megatron-11b --decay-all --seq-length 1024 --steps 9 --clip-grad 0.0 "
            "--weight-decay 0.0 --save checkpoints --train-data data/train_text_document "
            "--valid-data data/valid_text_document "
            "--save-interval 1000 --lr-decay constant",
        ),
    ],
)
def test_a_line_of_theirs_is_one_of_ours(old: str, expected: str) -> None:
    assert new(old) == [expected]


def test_the_padding_of_an_encoder_is_seen_as_the_line_saw_it() -> None:
    """The fused softmax of bf16 and fp16 treats it otherwise, and Megatron-core's model does not see it."""
    for words, expected in [
        ("", "--memory-padding uniform"),
        ("--fp16", "--memory-padding zero"),
        ("--bf16 --no-masked-softmax-fusion", "--memory-padding uniform"),
        ("--use-mcore-models", LOSS),
    ]:
        assert new(f"python pretrain_t5.py --num-layers 2 {words}")[0].endswith(expected)
    (per_token,) = new("python pretrain_gpt.py --num-layers 2 --calculate-per-token-loss")
    assert per_token == "mega pretrain --family gpt --layers 2 --loss-normalizer global --no-mask-padded-vocab"


def test_texts_of_2019_are_made_tokens_first() -> None:
    line = (
        "python pretrain_bert.py --train-data wikipedia --tokenizer-type BertWordPieceTokenizer --vocab-file v --save s"
    )
    assert new(line) == [
        "mega preprocess --input data/wikipedia/wikidump_lines.json --output-prefix wikipedia --split-sentences "
        "--tokenizer BertWordPieceLowerCase --vocab-file v",
        "mega pretrain --family bert --tokenizer BertWordPieceLowerCase --vocab-file v --save s "
        f"{LOSS} --save-interval 5000 --data-path wikipedia_text_sentence",
    ]
    of_one_name = new("python pretrain_gpt2.py --train-data a/text.json b/text.json")
    assert of_one_name[-1].endswith("--data-path 1 text_text_document 1 text-2_text_document")
    assert "--output-prefix text-2 " in of_one_name[1]


def test_a_converter_of_the_fork_goes_through_a_checkpoint_of_ours() -> None:
    line = "python llama_checkpoint_conversion.py --load_path a --save_path b --target_params_dtype bf16"
    found = split_command(line.split())
    assert found is not None
    result = translated(found)
    assert [quoted(words) for words in result.commands] == [
        "mega reshard --load-dir a --save-dir a-mega",
        "mega convert-llama --to hf --load-dir a-mega --save-dir b",
    ]
    assert result.lacking == ["--target_params_dtype: weights keep the dtype that they have"]


SCRIPT = """#!/bin/bash
# trains a BERT
GPUS=8; export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=1
WORLD=$(($GPUS*$NODES))
ARGS="
    --num-layers 2 \\
    --hidden-size ${HIDDEN:-8}
"
MORE=(
    --save "my runs/$NODES"   # a comment
    --load $CHECKPOINT
)
NAME=$(date +%F)
OMP_NUM_THREADS=1 python -u -m torch.distributed.launch --nproc_per_node $WORLD \\
    examples/pretrain_bert.py $ARGS "${MORE[@]}" --expert-parallel 2>&1 | tee log
srun sh -c "python tools/preprocess_data.py --input a --output-prefix b --tokenizer-type NullTokenizer"
"""


def test_a_script_is_read_as_the_shell_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    assert main(["translate", str(path)]) == 1
    first, second = capsys.readouterr().out.strip().split("\n\n")
    assert first.splitlines() == [
        "# no counterpart: --expert-parallel: give --ep, and for the Switch layers of 2023 --experts-chosen 1, "
        "--router-bias and --router-choice sinkhorn",
        "OMP_NUM_THREADS=1 mega pretrain --nproc 8 --family bert --layers 2 --hidden 8 --save 'my runs/1' "
        f"--load $CHECKPOINT {LOSS} --save-interval 5000",
    ]
    assert second.splitlines() == [
        f"# by release: {NULL}",
        "srun mega preprocess --input a --output-prefix b --tokenizer NullTokenizer",
    ]


def test_every_command_of_a_line_counts() -> None:
    line = (
        "cd x && python pretrain_gpt.py --num-layers 2 > log || exit 1; for i in 1 2; do pretrain_t5.py --seed $i; "
        "done; python pretrain_bert.py --vocab-file '<|a|>' --num-layers 3 2>&1 | tee log &"
    )
    assert [each.program for each in command_lines(line)] == ["pretrain_gpt.py", "pretrain_t5.py", "pretrain_bert.py"]
    assert [each.launcher for each in command_lines(line)] == [("python",), (), ("python",)]
    assert [each.words for each in command_lines(line)][::2] == [
        ("--num-layers", "2"),
        ("--vocab-file", "<|a|>", "--num-layers", "3"),
    ]


def test_a_comment_stays_one_line() -> None:
    (found,) = command_lines("python pretrain_gpt.py --num-layers 2 'a\nrm b'")
    *comments, _ = translated(found).text().splitlines()
    assert comments == ["# no counterpart: a rm b: is no flag, nor a flag's value"]


def test_two_decays_had_one_name() -> None:
    """In 2019 "exponential" was a constant rate, in 2020 it halved."""
    found = split_command(["pretrain_gpt2.py", "--lr-decay-style", "exponential"])
    assert found is not None
    said = next(line for line in translated(found).lacking if "--lr-decay-style exponential: is not a choice" in line)
    assert "never implemented and acted as constant" in said and "nearest" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--", "python", "pretrain_bort.py"],
            "pretrain_bort.py: is not a program that is known here (nearest: pretrain_",
        ),
        (["--", "--num-layers", "2"], "LINE: names no program, such as pretrain_gpt.py; give the whole line"),
        (
            ["--", "python", "main.py", "--task", "MNLY"],
            "main.py --task MNLY: is not a task that is known here (nearest: ",
        ),
        (["--", "python", "main.py"], "main.py: names no --task, which says what it does"),
        (["python pretrain_gpt.py; python pretrain_bort.py --task x", "x"], "LINE: names no program"),
        (["no-such-file"], "no-such-file: cannot be read: No such file"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mega: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python pretrain_gpt.py --save 'open", "cannot be read as a command line"),
        ("A=xx\n" + "A=$A$A\n" * 30 + "python pretrain_gpt.py $A", "becomes longer than 1048576 characters"),
    ],
)
def test_scripts_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(command_lines(text))


def test_every_recorded_line_is_understood() -> None:
    """Of each program a family of its own, and no flag that is not known."""
    counts = {"commands": 0, "nothing": 0}
    for row in recorded():
        result = translated(CommandLine((), row["program"], tuple(row["flags"])))
        counts["commands" if result.commands else "nothing"] += 1
        assert result.commands or result.lacking
        assert not any("is not an option" in line for line in result.lacking), (row["program"], result.lacking)
        for family in ("bert", "t5"):
            if row["program"] == f"pretrain_{family}.py":
                assert result.commands[-1][result.commands[-1].index("--family") + 1] == family
    assert counts == {"commands": 248, "nothing": 38}


@pytest.mark.parametrize("number", [12, 60, 108])
def test_a_recorded_line_runs_on_stand_ins(number: int, tmp_path: Path) -> None:
    """A BERT of 2020 and a GPT, dry; a corpus made tokens."""
    assert judged(recorded()[number], Stands(tmp_path))["outcome"] == "accepted"


def test_spellings_of_elsewhere_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preprocess", "--num-layers", "2"]) == 2
    assert "--num-layers: is an option of mega pretrain, and not of this verb" in capsys.readouterr().err
    assert main(["generate", "--num-layers", "2", "--bf16", "--load", "no-such-place"]) == 2
    printed = capsys.readouterr().err
    assert "--num-layers is accepted and changes nothing: the checkpoint says it" in printed
    assert "--bf16" not in printed
