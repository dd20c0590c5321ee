"""Folders whose tensors are not those of their config: every way to load a model refuses them by name.

What the files' headers tell is told in the dry run too.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_trials import megatron_trial, write_small_model
from safetensors.torch import load_file, save_file

from meshrl.config.engine import EngineConfig, ModelConfig
from meshrl.config.validate_model import model_problems
from meshrl.engines.engine_class import engine_class
from meshrl.models.loading import load_model

LAYER = "model.layers.1."
UP, NORM, EMBED = f"{LAYER}mlp.up_proj.weight", f"{LAYER}self_attn.k_norm.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Case:
    """A change of a folder, the words that name it, and whether headers alone tell of it; no words: it fits."""

    change: Callable[[Path], None]
    words: str = ""
    by_headers: bool = False
    override: tuple[tuple[str, object], ...] = ()
    family: str = "qwen3"


def tensors(change):
    def apply(folder):
        found = change(load_file(folder / "model.safetensors"))
        save_file(
            {n: t.contiguous() for n, t in found.items() if t is not None},
            folder / "model.safetensors",
            {"format": "pt"},
        )

    return apply


def fields(**values):
    def apply(folder):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | values))

    return apply


def two_files(lost):
    """The tensors in two files with an index, which names one that its file does not hold."""

    def apply(folder):
        found = load_file(folder / "model.safetensors")
        names = sorted(found)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({name: found[name] for name in part if name != lost}, folder / file, {"format": "pt"})
        (folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


def layers(number):
    return fields(num_hidden_layers=number, layer_types=["full_attention"] * number)


def stray(*names):
    return tensors(lambda found: found | {name: torch.zeros(3, 2) for name in names})


CASES = {
    # what headers tell
    "int8": Case(tensors(lambda t: t | {UP: t[UP].to(torch.int8)}), rf"'{UP}' \(I8 .* is no float", True),
    "uint8": Case(tensors(lambda t: t | {NORM: t[NORM].to(torch.uint8)}), rf"'{NORM}' \(U8 .* is no float", True),
    "fp8": Case(tensors(lambda t: t | {UP: t[UP].to(torch.float8_e4m3fn)}), rf"'{UP}' \(F8_E4M3 .* is no float", True),
    "truth values": Case(tensors(lambda t: t | {UP: t[UP] > 0}), rf"'{UP}' \(BOOL .* is no float", True),
    "all int8": Case(
        tensors(lambda t: {name: value.to(torch.int8) for name, value in t.items()}),
        r"\d+ tensors, such as .*\(I8",
        True,
    ),
    "packed": Case(
        tensors(lambda t: t | {UP: None, UP.replace("weight", "qweight"): torch.zeros(3, 2, dtype=torch.int32)}),
        r"qweight' \(I32 \[3, 2\]\) is no float",
        True,
    ),
    "fewer layers": Case(
        layers(2), r"num_hidden_layers=2, and the files hold 4 layers: 22 tensors, such as 'model.layers.2", True
    ),
    "more layers": Case(layers(6), r"num_hidden_layers=6, and the files hold 4 layers: .* no tensor of layer 4", True),
    "a lost layer": Case(
        tensors(lambda t: {name: value for name, value in t.items() if not name.startswith(LAYER)}),
        r"num_hidden_layers=4, and the files hold 3 layers: there is no tensor of layer 1",
        True,
    ),
    "vocabulary": Case(fields(vocab_size=999), rf"'{EMBED}' is \[\d+, \d+\], and config.json has vocab_size=999", True),
    "width": Case(fields(hidden_size=96), rf"'{EMBED}' is .* and hidden_size=96", True),
    "experts": Case(
        fields(num_experts=8), r"num_experts=8, and the files hold 4 experts of a layer", True, family="qwen3_moe"
    ),
    "another file": Case(
        two_files(UP), rf"model.safetensors.index.json names '{UP}', which its file does not hold", True
    ),
    # what the modules tell
    "missing": Case(tensors(lambda t: t | {NORM: None}), rf"lacks 1 .*'{NORM}'"),
    "shape": Case(tensors(lambda t: t | {UP: torch.zeros(5, 4)}), rf"'{UP}'.*\[5, 4\].* needs \[\d+, \d+\]"),
    "extra bias": Case(stray(f"{LAYER}self_attn.q_proj.bias"), r"'model.layers.1.self_attn.q_proj.bias'"),
    "extra module": Case(
        stray("model.odd.weight", f"{LAYER}mlp.odd.weight"), r"2 tensors.* 'model.layers.1.mlp.odd.weight'"
    ),
    # what fits
    "whole": Case(lambda folder: None),
    "in two files": Case(two_files(None)),
    "tied head": Case(tensors(lambda t: t | {"lm_head.weight": t[EMBED].clone()})),
    "older buffers": Case(stray(f"{LAYER}self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")),
    "an older mask": Case(
        tensors(lambda t: t | {f"{LAYER}self_attn.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)})
    ),
    "a value head": Case(stray("v_head.summary.weight", "score.weight")),
    "a tower": Case(
        stray("model.visual.blocks.0.attn.qkv.weight", "visual.merger.mlp.0.weight", "vision_tower.x.weight")
    ),
    "further tokens": Case(stray("mtp.layers.0.mlp.up_proj.weight", "mtp.fc.weight")),
    "a further layer": Case(
        lambda folder: (fields(num_nextn_predict_layers=1)(folder), stray("model.layers.4.mlp.up_proj.weight")(folder))
    ),
    "a further layer by its parts": Case(stray("model.layers.4.eh_proj.weight", "model.layers.4.mlp.up_proj.weight")),
    "fewer layers as told": Case(
        lambda folder: None, override=(("num_hidden_layers", 2), ("layer_types", ["full_attention"] * 2))
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("misfits")
    whole = {name: write_small_model(name, base / name, layers=4) for name in ("qwen3", "qwen3_moe")}
    made = {}
    for number, (name, case) in enumerate(CASES.items()):
        made[name] = shutil.copytree(whole[case.family], base / f"case_{number}")
        case.change(made[name])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (made[name] / file).write_text("{}")
    return made


def check(name, said):
    case = CASES[name]
    if not case.words:
        assert said is None, f"{name}: {said}"
    else:
        assert said is not None, f"{name} was loaded without a word"
        assert re.search(case.words, said, re.DOTALL), f"{name}: {said}"


@pytest.mark.parametrize("name", CASES)
def test_the_dry_run_tells_what_headers_tell(folders, name):
    case = CASES[name]
    model = ModelConfig(path=str(folders[name]), override_config=dict(case.override))
    problems = model_problems(model, "model", EngineConfig(), "engine", 8, "data.max_length")
    if case.by_headers:
        assert any(problem.startswith("model.path: ") and re.search(case.words, problem) for problem in problems), (
            problems
        )
    else:
        assert problems == []


@pytest.mark.parametrize("name", CASES)
def test_a_whole_model_is_loaded_or_refused(folders, name):
    try:
        load_model(folders[name], "sdpa", override=dict(CASES[name].override))
    except ValueError as error:
        check(name, str(error))
    else:
        check(name, None)


def load_all(cases, strategy):
    """What an engine says of each folder; None where it holds it."""
    said = []
    for folder, override in cases:
        if strategy == "megatron":
            trial = megatron_trial(folder, {"tp": 2}, override_config=dict(override))
            model, config = trial.model, trial.engine
        else:
            model = ModelConfig(path=str(folder), override_config=dict(override), enable_gradient_checkpointing=False)
            config = EngineConfig(strategy=strategy)
        engine = engine_class(config)(model, config, None, device=torch.device("cpu"))
        try:
            engine.initialize()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append(None)
        if strategy == "megatron":
            from meshrl.engines.megatron.parallel_state import leave_parallel_state

            leave_parallel_state()
        dist.barrier()
    return said


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_every_rank_of_a_sharded_model_says_so(folders, ranks, strategy):
    """Also where one rank alone reads the files: the others must not wait for it."""
    cases = [(str(folders[name]), case.override) for name, case in CASES.items()]
    for said in ranks(2).run(load_all, cases, strategy):
        for name, words in zip(CASES, said, strict=True):
            check(name, words)


def test_megatron_says_so(folders, megatron_ranks):
    # Its layers are given by count, and a mixture of experts is another build.
    names = [name for name, case in CASES.items() if case.family == "qwen3"]
    cases = [(str(folders[name]), CASES[name].override) for name in names]
    for said in megatron_ranks(2).run(load_all, cases, "megatron"):
        for name, words in zip(names, said, strict=True):
            check(name, words)
