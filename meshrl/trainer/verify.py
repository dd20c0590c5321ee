"""`meshrl verify`: does the engine compute, on this machine and this layout, what one process computes?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from meshrl.config.checks import ensure_runnable
from meshrl.config.errors import ConfigError
from meshrl.config.families import SEEING
from meshrl.config.load import load_config
from meshrl.config.model_folder import fit_problems
from meshrl.config.names import count
from meshrl.config.sft import SFTConfig
from meshrl.controller import ClassWithInitArgs, Deadlines, ResourcePool, create_worker_group
from meshrl.models.buffers import persistent_buffers
from meshrl.parallel.recurrence import recurrences
from meshrl.workers.verification import Trial, VerificationWorker, differences, run_reference

TOLERANCE = 1e-5
CONTROL_PERTURBATION = 1e-3
SMALL = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


@dataclass(frozen=True)
class Verdict:
    """What was found for one model."""

    model: str
    differences: dict[str, float]
    control: dict[str, float]

    @property
    def holds(self) -> bool:
        """Everything agrees, and the perturbed control does not."""
        return max(self.differences.values()) <= TOLERANCE and max(self.control.values()) > TOLERANCE


def small_config(family: str, layers: int = SMALL["num_hidden_layers"]) -> PretrainedConfig:
    """A tiny model of a known family."""
    return AutoConfig.for_model(family, **(SMALL | FAMILIES[family] | {"num_hidden_layers": layers}))


def small_configs(overrides: Sequence[str]) -> dict[str, PretrainedConfig]:
    """Tiny models of all families that the keys can be tried on: with experts if asked for, layers for all stages."""
    megatron = config_for(Path("."), 1, overrides, check=False).engine.megatron
    chunks = megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)
    families = [name for name in FAMILIES if megatron.expert_model_parallel_size == 1 or name.endswith("_moe")]
    return {name: small_config(name, max(chunks, SMALL["num_hidden_layers"])) for name in families}


def shape_of(path: str, layers: int) -> PretrainedConfig:
    """The config of the user's own model, with fewer layers."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError([f"--model {path}: there is no such folder with a config.json"])
    if layers < 1:
        raise ConfigError([f"--layers ({layers}) must be at least 1"])
    config = AutoConfig.from_pretrained(path)
    if config.model_type in SEEING:
        raise ConfigError([f"--model {path}: not supported yet: the shape of a model that sees ({config.model_type})"])
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and "linear_attention" in kinds:  # as many as it takes to have one of each kind
        layers = max(layers, 1 + max(kinds.index(kind) for kind in set(kinds)))
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if kinds:
        config.layer_types = kinds[: config.num_hidden_layers]
    return config


def write_model(config: PretrainedConfig, folder: Path) -> Path:
    """A model of this shape with random weights, which both sides load."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for buffer in persistent_buffers(model).values():
            if buffer.is_floating_point() and buffer.dim():
                buffer.normal_(std=0.1)  # a fresh router's bias is zero, which would say nothing
        for layer in recurrences(model):  # fresh states fade so fast that gradients of fading are but rounding
            torch.nn.init.uniform_(layer.A_log, -3, 0)
            torch.nn.init.normal_(layer.dt_bias, std=0.5)
        model.save_pretrained(folder)
    return folder


def config_for(model: Path, world: int, overrides: Sequence[str], check: bool = True) -> SFTConfig:
    """The config of a trial: engine keys may be given without their `engine.`; float32 throughout."""
    roots = ("engine.", "model.", "trainer.", "ray_init.")
    named = [word if word.startswith(roots) else f"engine.{word}" for word in overrides]
    fixed = [
        f"model.path={model}",
        f"trainer.n_gpus_per_node={world}",
        "model.enable_gradient_checkpointing=false",
        *([] if "strategy=megatron" in overrides else ["engine.fsdp_config.mixed_precision.param_dtype=fp32"]),
        *(["engine.megatron.dtype=fp32"] if "strategy=megatron" in overrides else []),
    ]
    config = load_config(None, [*fixed, *named], SFTConfig).config
    if check:
        ensure_runnable(config, check_files=False)
    return config


def verify(
    world: int,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    layers: int = 2,
    console: Console | None = None,
) -> bool:
    """Runs the check for the user's model shape, or for one tiny model of each family; prints a table."""
    console = console or Console()
    transformers_logging.disable_progress_bar()
    shapes = {Path(model).name: shape_of(model, layers)} if model else small_configs(overrides)
    engine, hint = (
        config_for(Path("."), world, overrides).engine,
        "" if model else "; --model DIR takes that of your own",
    )
    if engine.rounds:
        raise ConfigError(
            [
                "engine.fsdp_config.mixed_precision.product_dtype=fp8: two layouts differ by their last digits, which "
                "decides what is rounded up or down, and nothing could be compared to 1e-5. Leave it out: the layout "
                "is the same without it"
            ]
        )
    found = [problem for shape in shapes.values() for problem in fit_problems(shape.to_dict(), engine, "engine")]
    if found:
        raise ConfigError([f"{problem}{hint}" for problem in dict.fromkeys(found)])
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in shapes.items():
            with console.status(f"{name}: two optimizer steps on {count(world, 'rank')} and on one"):
                config = config_for(write_model(shape, Path(folder) / name), world, overrides)
                verdicts.append(check_one(name, config))
    show(verdicts, console)
    return all(verdict.holds for verdict in verdicts)


def check_one(name: str, config: SFTConfig) -> Verdict:
    """Both sides of one model, and the control."""
    trial = Trial(config.model, config.engine)
    trainer = config.trainer
    pool = ResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=trainer.device == "cuda")
    deadlines = Deadlines(start=trainer.deadlines.start, call=trainer.deadlines.call)
    # Rounding is compared on CPUs, except where the engine needs GPUs.
    on_cpu = trainer.device == "auto" and config.engine.strategy != "megatron"
    worker = ClassWithInitArgs(VerificationWorker, trial, "cpu" if on_cpu else trainer.device)
    with create_worker_group(pool, worker, backend=trainer.backend, role="verify", deadlines=deadlines) as group:
        outcomes = group.run()
    compare = [run_reference(trial), run_reference(trial, perturb=CONTROL_PERTURBATION)]
    found = [differences(outcomes, expected) for expected in compare]
    return Verdict(name, *found)


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """One row a model: the largest relative differences, and whether they are small enough."""
    table = Table(
        padding=(0, 0), title=f"engine against one process: largest relative difference (limit {TOLERANCE:.0e})"
    )
    table.add_column("model")
    for heading in verdicts[0].differences:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("control", justify="right")
    table.add_column("")
    for verdict in verdicts:
        cells = [f"{value:.1e}" for value in (*verdict.differences.values(), max(verdict.control.values()))]
        table.add_row(verdict.model, *cells, "[green]same[/]" if verdict.holds else "[red]DIFFERENT[/]")
    console.print(table)
    console.print(f"control: the reference with its weights off by {CONTROL_PERTURBATION:.0e} must be told apart")
