"""fairseq's own numbers for the lines of its Megatron-11b document, on a tiny model. Needs fairseq, and not mega.

    PYTHONPATH=FAIRSEQ python tests/battery/fairseq_lines.py tests/golden/fairseq_lines

FAIRSEQ: a checkout of github.com/facebookresearch/fairseq, with its two Cython modules of fairseq/data built. The
folder holds dict.txt, *.bpe and rows.json, the samples of twelve steps as mega draws them; this writes fairseq.json
(ids, perplexities, losses, weights after the last step) and the model that mega reads. The decoder is fairseq's
transformer_lm with the document's options: its model-parallel twin needs a fork of Megatron-LM and GPUs. tests/cli/
test_document_lines.py holds mega to these numbers.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16"
SIZES += " --decoder-ffn-embed-dim 96 --decoder-attention-heads 2 --activation-fn gelu --decoder-normalize-before"
DOCUMENT = "--cpu --task language_modeling --sample-break-mode none --tokens-per-sample 32 --criterion cross_entropy"
DOCUMENT += (
    " --arch transformer_lm --share-decoder-input-output-embed --optimizer adam --adam-eps 1e-08 --clip-norm 0.0"
)
DOCUMENT += f" --lr-scheduler inverse_sqrt --lr 0.01 --weight-decay 0.01 {SIZES}"
LINE = [*DOCUMENT.split(), "--adam-betas", "(0.9, 0.98)"]
KEPT: tuple[str, ...] = (
    "decoder_layers",
    "decoder_embed_dim",
    "decoder_ffn_embed_dim",
    "decoder_attention_heads",
    "activation_fn",
)
KEPT += ("decoder_normalize_before", "share_decoder_input_output_embed", "tokens_per_sample")
TYPES = {1: np.uint8, 4: np.int32, 5: np.int64, 8: np.uint16}


def binarise(folder: Path, work: Path) -> dict[str, list[int]]:
    words = ["--only-source", "--srcdict", str(folder / "dict.txt"), "--destdir", str(work), "--workers", "1"]
    sets = [word for name in ("train", "valid", "test") for word in (f"--{name}pref", str(folder / f"{name}.bpe"))]
    subprocess.run([sys.executable, "-m", "fairseq_cli.preprocess", *words, *sets], check=True)
    found = {}
    for name in ("train", "valid", "test"):
        dtype = TYPES[(work / f"{name}.idx").read_bytes()[17]]
        found[name] = np.fromfile(work / f"{name}.bin", dtype).tolist()
    return found


def train(work: Path) -> Path:
    words = "--warmup-updates 30 --dropout 0.1 --attention-dropout 0.1 --batch-size 8 --max-update 120"
    words += f" --save-dir {work}/run --no-epoch-checkpoints --no-save-optimizer-state --seed 3"
    subprocess.run([sys.executable, "-m", "fairseq_cli.train", str(work), *LINE, *words.split()], check=True)
    return work / "run" / "checkpoint_last.pt"


def evaluate(work: Path, model: Path, window: int) -> dict[str, float]:
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli import eval_lm

    found: dict[str, float] = {}
    scored = eval_lm.eval_lm
    eval_lm.eval_lm = lambda **given: found.update(scored(**given)) or found
    words = f"{work} --cpu --path {model} --task language_modeling --gen-subset test --batch-size 8"
    words += f" --criterion cross_entropy --context-window {window} --tokens-per-sample 32"
    given = options.parse_args_and_arch(options.get_eval_lm_parser(), words.split())
    eval_lm.main(convert_namespace_to_omegaconf(given))
    eval_lm.eval_lm = scored
    return {name: float(value) for name, value in found.items()}


def steps(work: Path, model: Path, rows: Any) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Loss and rate of each step over given samples, without dropout, and sums of the weights after the last."""
    from fairseq import checkpoint_utils, options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer

    words = "--warmup-updates 4 --dropout 0 --attention-dropout 0 --batch-size 4 --max-update 12 --no-save"
    given = options.parse_args_and_arch(options.get_training_parser(), [str(work), *LINE, *words.split()])
    config = convert_namespace_to_omegaconf(given)
    task = tasks.setup_task(config.task)
    network, criterion = task.build_model(config.model), task.build_criterion(config.criterion)
    trainer = Trainer(config, task, network, criterion)
    network.load_state_dict(checkpoint_utils.load_checkpoint_to_cpu(str(model))["model"])
    trainer.lr_step_update()
    found = []
    for row in torch.tensor(rows):
        inputs, targets = row[:, :-1].contiguous(), row[:, 1:].contiguous()
        lengths = torch.full((len(row),), inputs.shape[1])
        sample = {"id": torch.arange(len(row)), "nsentences": len(row), "ntokens": targets.numel(), "target": targets}
        sample["net_input"] = {"src_tokens": inputs, "src_lengths": lengths}
        loss, size, _ = criterion(network, sample)
        found.append({"lr": float(trainer.get_lr()), "loss": float(loss) / size})
        trainer.train_step([sample])
    sums = {name: float(tensor.double().abs().sum()) for name, tensor in network.state_dict().items()}
    return found, {name: value for name, value in sums.items() if math.isfinite(value) and "version" not in name}


def main(folder: Path) -> None:
    from fairseq import checkpoint_utils

    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        found: dict[str, Any] = {"ids": binarise(folder, work)}
        model = train(work)
        found |= {f"window {window}": evaluate(work, model, window) for window in (24, 0)}
        found["steps"], found["weights"] = steps(work, model, json.loads((folder / "rows.json").read_text()))
        state = checkpoint_utils.load_checkpoint_to_cpu(str(model))
        options = {name: getattr(state["cfg"]["model"], name) for name in KEPT}
        torch.save({"model": dict(state["model"]), "args": options}, folder / "model-model_part-0.pt")
    (folder / "fairseq.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
