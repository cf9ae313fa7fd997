"""Every family of decoders that transformers has: its folder opens, computes and learns the same, and comes back whole.

The long form, with 700 tokens, ranks, answers and mutated configurations, is tests/battery/families.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from mega.core.architecture import architecture, units
from mega.core.checkpoint.forms import huggingface, peft
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.families.decoders import BY_TYPE, config_from_model, model_from_config
from mega.core.checkpoint.forms.form import SpecialTokens
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError, whole_box
from mega.core.config.compose import GivenOptions
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference.loading.load import open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.inference.start import engine_on
from mega.core.model.decoder import DecoderStage
from mega.core.model.residual import ResidualState
from mega.core.ops.suite import REFERENCE, Ops, choose, forward_only
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, weights
from mega.core.tasks.model import _model
from mega.core.training.saves.resume import _same_model
from tests.inference.test_engine import answers, engine_of, tokens
from tests.support import hub_families as hub
from tests.support.ranks import CPU

SLIDING = ["sliding_attention", "full_attention"] * 2

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install '.[hf]' in a clone)"
)


def stage_of(
    model: ModelConfig, wholes: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64, ops: Ops = REFERENCE
) -> DecoderStage:
    """A whole model with these weights."""
    stage = DecoderStage(model, units(model), ParameterFactory({}, dtype, CPU, ops), ALONE)
    left = dict(wholes)
    with torch.no_grad():
        for weight in weights(stage):
            weight.zero_()  # padding too
            for segment in weight.segments:
                segment.real(weight).copy_(left.pop(segment.shard.name))
    assert not left
    return stage


@pytest.mark.parametrize("case", hub.CASES)
def test_logits_and_gradients_are_transformers(tmp_path: Path, case: str) -> None:
    """Over 96 tokens, past any window; their gradients are read by the same table as their weights."""
    theirs = hub.saved(tmp_path / "hf", case)
    opened = hub.opened(tmp_path / "hf")
    stage, batch = stage_of(opened.model, hub.wholes(opened)), hub.batch_of(96)
    with hub.wide():
        logits = theirs(batch.tokens, use_cache=False).logits
        nll = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        torch.autograd.backward((nll * batch.loss_weights.flatten()).sum() / batch.loss_weights.double().sum())
    with torch.no_grad():
        found = stage(batch, outputs=True).outputs
    assert found is not None
    torch.testing.assert_close(found[..., : hub.VOCAB], logits.detach(), rtol=1e-10, atol=1e-10)
    scales = (1 / batch.loss_weights.double().sum()).expand(len(stage.terms))
    root = stage(batch, scales=scales).terms["lm"].root
    assert root is not None
    torch.autograd.backward(root, torch.empty_like(root))
    expected = hub.gradients(opened, theirs)
    for weight in weights(stage):
        assert weight.grad is not None
        for segment in weight.segments:
            name, ours = segment.shard.name, segment.real(weight.grad)
            torch.testing.assert_close(ours, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("case", hub.CASES)
def test_a_folder_comes_back_bit_for_bit(tmp_path: Path, case: str) -> None:
    hub.saved(tmp_path / "hf", case, torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "run", layout=Layout(2, 2))
    convert(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    said = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back")]
    assert said[0] == said[1]


@pytest.mark.parametrize("case", hub.CASES)
def test_our_own_config_says_the_same(case: str) -> None:
    """Read back by us, and every key of transformers' own class understood. A family may be written as one that is the
    same without what this model does not use."""
    kind, values = hub.CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**hub.TOKENS, **values}).to_dict()
    model = model_from_config(config, "config.json")
    written = BY_TYPE[config["model_type"]].config_from_model(model, "float32")
    assert model_from_config(written, "config.json") == model
    again = model_from_config(transformers.AutoConfig.for_model(**written).to_dict(), "config.json")
    assert again == model
    assert config_from_model(model, "float32")["model_type"] in BY_TYPE


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("llama-mlp-bias", {"rope_thetas": 1e6}, "rope_thetas"),
        ("llama-mlp-bias", {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor"),
        ("llama-mlp-bias", {"rope_parameters": {"rope_type": "wave"}}, "rope_type 'wave'"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("olmo3", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("qwen2-windows", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("pythia", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("gptj", {"embd_pdrop": 0.5}, "embd_pdrop"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("smollm3", {"layer_types": SLIDING, "sliding_window": 40}, "use_sliding_window must be true"),
        ("phi3", {"full_attn_mod": 2}, r"full_attn_mod 2 \(valid: 1\)"),
        ("phi3", {"interpolate_factor": 2}, "interpolate_factor"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type"),
        ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "objects by kind of layer"),
        ("olmo3-yarn", {"original_max_position_embeddings": 96}, "original_max_position_embeddings"),
    ],
)
def test_a_key_that_is_not_understood_is_refused(case: str, changes: dict[str, Any], words: str) -> None:
    kind, values = hub.CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**hub.TOKENS, **values}).to_dict()
    with pytest.raises(CheckpointError, match=words):
        model_from_config({**config, **changes}, "config.json")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("smollm3", {"layer_types": SLIDING}),
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        ("starcoder2", {"mlp_type": "default", "norm_type": "layer_norm", "rms_norm_eps": 1e-5}),
        ("pythia", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}),
        ("gemma", {"hidden_act": "gelu"}),
    ],
)
def test_a_key_of_released_files_changes_nothing(case: str, changes: dict[str, Any]) -> None:
    """Where transformers does not read it, or this is the only value that it has."""
    kind, values = hub.CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**hub.TOKENS, **values}).to_dict()
    assert model_from_config({**config, **changes}, "config.json") == model_from_config(config, "config.json")


def test_the_first_gemma_has_one_gelu() -> None:
    """transformers reads "gelu" as the tanh form, so that the other has no word."""
    kind, values = hub.CASES["gemma"]
    config = getattr(transformers, f"{kind}Config")(**{**hub.TOKENS, **values}).to_dict()
    exact = replace(model_from_config(config, "config.json"), activation="geglu")
    with pytest.raises(CheckpointError, match="activation geglu"):
        BY_TYPE["gemma"].config_from_model(exact, "float32")


def test_longrope_keeps_its_magnitude_at_other_positions() -> None:
    kind, values = hub.CASES["phi3"]
    config = getattr(transformers, f"{kind}Config")(**{**hub.TOKENS, **values}).to_dict()
    model = model_from_config(config, "config.json")
    longer = architecture(replace(model, positions=8192)).ropes[0].scaling
    assert longer == architecture(model).ropes[0].scaling
    theirs = hub.theirs("phi3")
    assert model.rope_magnitude == theirs.model.rotary_emb.attention_scaling


def test_dynamic_positions_are_kept_and_not_exceeded(tmp_path: Path) -> None:
    """No option holds the factor: a config.json written anew has it still, and more positions are refused."""
    hub.saved(tmp_path / "hf", "llama-dynamic", torch.bfloat16)
    opened = open_model(tmp_path / "hf")
    own = SimpleNamespace(
        model=replace(opened.model, positions=512),  # so that it is written anew
        source=SimpleNamespace(tensors=opened.weights.tensors),
        checkpoint=SimpleNamespace(attachments=opened.attachments, step=0, meta={}),
    )
    written = huggingface._config(BY_TYPE["llama"], own, SpecialTokens({}))  # type: ignore[arg-type]
    assert written["rope_scaling"] == {"rope_type": "dynamic", "factor": 4.0}
    assert model_from_config(written, "config.json") == own.model
    _model(opened, GivenOptions(None, {"positions": 96}))
    with pytest.raises(ValueError, match="--positions 1024: the model at"):
        _model(opened, GivenOptions(None, {"positions": 1024}))
    point: Any = SimpleNamespace(checkpoint=opened.weights, weights_only=True)
    run: Any = SimpleNamespace(
        model=replace(opened.model, positions=96),
        finetuning=SimpleNamespace(task="lm"),
        checkpoint=SimpleNamespace(use_checkpoint_config=False),
    )
    _same_model(run, point)
    run.model = replace(opened.model, positions=1024)
    with pytest.raises(CheckpointError, match=r"--positions 1024: the checkpoint .* has 768"):
        _same_model(run, point)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_engine_has_longrope_by_the_length_of_each_text(tmp_path: Path, ahead: int) -> None:
    """Short texts, long ones, and one that grows from the one to the other, of one beginning, all in flight together;
    transformers computes each token of the whole text before it. The keys of a text that has grown are made again."""
    theirs = hub.saved(tmp_path, "phi3", num_hidden_layers=2)
    opened = hub.opened(tmp_path)
    stage = stage_of(opened.model, hub.wholes(opened), ops=forward_only(choose(CPU, torch.float64))).eval()
    text = torch.randint(3, hub.VOCAB, (140,), generator=torch.Generator().manual_seed(7))
    sizes, expected = ((40, 12), (122, 14), (126, 2), (128, 6), (140, 6)), []
    for length, count in sizes:  # original_max_position_embeddings is 128
        whole = text[None, :length]
        with torch.no_grad(), hub.wide():
            for _ in range(count):
                whole = torch.cat([whole, theirs(whole, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        expected.append(whole[0, length:].tolist())
    asked = [
        Request(prompt=tuple(text[:length].tolist()), tokens=count, sampling=Sampling(temperature=0.0))
        for length, count in sizes
    ]
    engine = engine_of(stage, block=16, ahead=ahead)
    for _ in range(2):  # the second time by the keys that are kept of the first
        assert [tokens(events) for events in answers(engine, asked)] == expected
    tight = engine_of(stage, block=16, cache=144, requests=1, ahead=ahead)  # of one such text, with a beginning known
    assert [tokens(answers(tight, [each])[0]) for each in asked[:2]] == expected[:2]
    beams = replace(asked[1], sampling=Sampling(), beams=2)
    (alone,) = answers(engine_of(stage, block=16), [beams])
    assert answers(engine, [*asked, beams])[-1][-1].beams == alone[-1].beams
    assert engine._scheduler.blocks.available == engine._scheduler.blocks.count - 1


def test_soft_caps_are_not_recorded(tmp_path: Path) -> None:
    hub.saved(tmp_path / "other", "gemma2", torch.bfloat16)
    opened = open_model(tmp_path / "other")
    stage = SimpleNamespace(architecture=opened.architecture)
    with pytest.raises(ValueError, match="--cuda-graph: soft-capped"):
        engine_on(stage, Mesh.at(0), Device(CPU, "gloo"), EngineOptions(cuda_graph=True))


def test_a_base_model_without_a_prefix_opens(tmp_path: Path) -> None:
    """As `LlamaModel.save_pretrained` writes one; without an output matrix it must be tied."""
    theirs = hub.theirs("llama-mlp-bias")
    theirs.model.save_pretrained(tmp_path / "hf")
    opened = hub.opened(tmp_path / "hf")
    stage, batch = stage_of(opened.model, hub.wholes(opened)), hub.batch_of(24)
    with torch.no_grad(), hub.wide():
        found, logits = stage(batch, outputs=True).outputs, theirs(batch.tokens).logits
    assert found is not None
    torch.testing.assert_close(found[..., : hub.VOCAB], logits, rtol=1e-10, atol=1e-10)
    hub.theirs("mistral").model.save_pretrained(tmp_path / "untied")
    with pytest.raises(CheckpointError, match=r"lm_head.weight: is missing"):
        hub.opened(tmp_path / "untied")


def test_mistrals_own_files_alone(tmp_path: Path) -> None:
    """In Meta's names and order of rotary rows, written here by hand; a key that is not known is refused."""
    theirs = hub.theirs("mistral", sliding_window=None, max_position_embeddings=32768)
    names = {
        "model.embed_tokens": "tok_embeddings",
        "model.norm": "norm",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    state = {}
    for name, tensor in theirs.state_dict().items():
        module = name.removesuffix(".weight")
        block, _, within = module.removeprefix("model.layers.").partition(".")
        inside = module.startswith("model.layers.")
        if within in ("self_attn.q_proj", "self_attn.k_proj"):  # halves of a head become neighbours
            tensor = tensor.view(-1, 2, 8, 32).transpose(1, 2).reshape(tensor.shape)
        theirs_name = f"layers.{block}.{names[within]}" if inside else names[module]
        state[f"{theirs_name}.weight"] = tensor.contiguous()
    (tmp_path / "mistral").mkdir()
    save_file(state, tmp_path / "mistral" / "consolidated.safetensors")
    params: dict[str, Any] = {"dim": 32, "n_layers": 4, "head_dim": 16, "hidden_dim": 44, "n_heads": 4, "n_kv_heads": 2}
    params |= {"norm_eps": 1e-6, "vocab_size": hub.VOCAB, "rope_theta": 10000.0}
    (tmp_path / "mistral" / "params.json").write_text(json.dumps(params))
    opened = hub.opened(tmp_path / "mistral")
    for name, tensor in hub.wholes(opened).items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    assert opened.model == hub.opened_config(theirs)
    (tmp_path / "mistral" / "params.json").write_text(json.dumps({**params, "moe": {"num_experts": 8}}))
    with pytest.raises(CheckpointError, match="moe"):
        hub.opened(tmp_path / "mistral")
    del params["rope_theta"]
    (tmp_path / "mistral" / "params.json").write_text(json.dumps(params))
    with pytest.raises(CheckpointError, match="rope_theta: must be there"):
        hub.opened(tmp_path / "mistral")
    (tmp_path / "mistral" / "params.json").write_text(json.dumps({**params, "sliding_window": 40}))
    assert hub.opened(tmp_path / "mistral").model.rope_base == 10000.0


def test_fp8_with_scales_of_blocks_is_read_as_bf16(tmp_path: Path) -> None:
    """Blocks of 16 x 8, of matrices that they do not divide; a scale that is missing is named."""
    hub.saved(tmp_path / "hf", "mistral", torch.bfloat16)
    state = load_file(tmp_path / "hf" / "model.safetensors")
    expected = dict(state)
    for name, tensor in list(state.items()):
        if tensor.dim() == 2 and "layers" in name:
            rows, columns = (-(-size // block) for size, block in zip(tensor.shape, (16, 8), strict=True))
            scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.1
            whole = torch.kron(scale, torch.ones(16, 8))[: tensor.shape[0], : tensor.shape[1]]
            state[name] = (tensor.float() / whole).to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = scale
            expected[name] = (state[name].float() * whole).bfloat16()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    for name, tensor in hub.wholes(hub.opened(tmp_path / "hf")).items():
        assert torch.equal(tensor, expected[name]), name
    convert(tmp_path / "hf", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    del state["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(state, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv: is missing"):
        hub.opened(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is in fp8, and no quantization_config"):
        hub.opened(tmp_path / "hf")


@pytest.mark.parametrize("case", ["gemma", "gemma2", "gemma3", "olmo2", "mistral", "granite"])
def test_bf16_rounds_where_transformers_does(tmp_path: Path, case: str) -> None:
    """Rows of the table as they are scaled, and norms: of an offset in fp32, before the weight or after it."""
    theirs = hub.saved(tmp_path, case, torch.bfloat16).bfloat16()
    opened = hub.opened(tmp_path)
    stage = stage_of(opened.model, hub.wholes(opened), torch.bfloat16)
    rows, positions = hub.batch_of(24).tokens.flatten(), torch.zeros(48, dtype=torch.int64)
    inner = theirs.model
    scale = getattr(theirs.config, "embedding_multiplier", 1.0)
    assert torch.equal(stage.embedding.look_up(rows, positions), inner.embed_tokens(rows) * scale)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(stage.head.norm(ResidualState(x))[1], inner.norm(x))


@pytest.mark.parametrize("case", ["phi3", "pythia", "gptj", "starcoder2", "gpt2", "mistral"])
def test_adapters_of_linears_that_are_called_or_fused_otherwise(tmp_path: Path, case: str) -> None:
    """One that peft made on every linear computes the same here; ours become theirs and come back bit for bit."""
    made = pytest.importorskip("peft", reason="peft is absent: pip install '.[peft]' in a clone")
    theirs, folder = hub.saved(tmp_path / "hf", case), tmp_path / "adapter"
    family, base = BY_TYPE[theirs.config.model_type], hub.opened(tmp_path / "hf")
    stored = peft._linears(family, base.model)
    options = made.LoraConfig(
        r=3,
        lora_alpha=12,
        init_lora_weights=False,
        target_modules=list({peft._end(name, family): None for name in stored}),
        fan_in_fan_out=case == "gpt2",
    )
    adapted = made.get_peft_model(theirs, options, autocast_adapter_dtype=False).double().eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    opened = peft.open_adapter(folder, base.model, tmp_path / "hf", "--base")
    ours = {
        name.removeprefix("weights/"): opened.source.read(name, whole_box(shape))
        for name, (shape, _) in opened.source.tensors.items()
    }
    stage, batch = stage_of(opened.model, {**hub.wholes(base), **ours}), hub.batch_of(24)
    with torch.no_grad(), hub.wide():
        found, logits = stage(batch, outputs=True).outputs, adapted(batch.tokens, use_cache=False).logits
    assert found is not None
    torch.testing.assert_close(found[..., : hub.VOCAB], logits, rtol=1e-9, atol=1e-9)
    some = {name: tensor for name, tensor in ours.items() if "v_proj" not in name or case == "mistral"}
    joined = {f"{peft.WRAPPED}{name}": tensor for name, tensor in peft._joined(some, stored)}
    again = dict(peft._split(joined, stored, 3))
    assert again.keys() == some.keys() and all(torch.equal(again[name], some[name]) for name in some)


def test_numbered_files_need_no_index(tmp_path: Path) -> None:
    """Their headers name the tensors. One that is missing is named."""
    hub.theirs("mistral").save_pretrained(tmp_path, max_shard_size="40KB")
    expected = hub.wholes(hub.opened(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    found = hub.wholes(hub.opened(tmp_path))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    first, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    first.rename(tmp_path / "first")
    with pytest.raises(CheckpointError, match=f"holds no index, and {first.name} is missing"):
        hub.opened(tmp_path)
