"""hf -> mega (tp 1, 2, 4 x pp 1, 2) -> hf for tiny random models of every family, made by transformers: every tensor's
bytes and config.json come back equal, and --verify's largest difference of a logit is below 1e-4 in fp32.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file

from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.store import locate
from mega.core.proof.logits import BOUND, compare_logits
from tests.battery.data_ledger import run
from tests.support.hugging_face import FAMILIES, hf_folder

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
OF_GPT2 = {"n_head": 8, "n_layer": 4, "n_embd": 32, "n_positions": 64, "vocab_size": 102}


def layouts(family: str) -> Any:
    def prove() -> dict[str, Any]:
        largest = 0.0
        for dtype in (torch.float32, torch.bfloat16):
            with tempfile.TemporaryDirectory(prefix="mega-grid-") as name:
                home = Path(name)
                source = hf_folder(home / "hf", family, dtype, std=0.3, **(OF_GPT2 if family == "gpt2" else SIZES))
                before = load_file(source / "model.safetensors")
                for tp in (1, 2, 4):
                    for pp in (1, 2):
                        made, back = home / f"run-{tp}-{pp}", home / f"back-{tp}-{pp}"
                        convert(source, made, layout=Layout(tp, pp))
                        assert locate(made).world == tp * pp
                        convert(made, back)
                        after = load_file(back / "model.safetensors")
                        assert before.keys() == after.keys()
                        for key, tensor in before.items():
                            same = torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8))
                            assert tensor.dtype == after[key].dtype and same, (tp, pp, key)
                        configs = [json.loads((folder / "config.json").read_text()) for folder in (source, back)]
                        assert configs[0] == configs[1], (tp, pp)
                        if dtype == torch.float32:
                            largest = max(largest, compare_logits(source, made).largest)
                            assert largest < BOUND, (tp, pp, largest)
        return {"layouts": 12, "tensors": len(before), "largest difference of a logit": float(f"{largest:.2g}")}

    return prove


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    run("foreign_grid", [(family, layouts(family)) for family in FAMILIES])
