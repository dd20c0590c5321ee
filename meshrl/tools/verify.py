"""`meshrl verify`: check that the engine, on this machine and layout, computes the same as one process.

Both sides run two optimizer steps from the same weights and samples, and the results are compared.

- Reference: the Hugging Face model with eager attention, padded batches, one process, a textbook loss, torch's AdamW.
- Engine: packs the samples, shards itself as configured, accumulates micro-batches and steps.
- Control: the reference with perturbed weights, which the comparison must tell apart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from meshrl.algorithms import BatchStats, agg_loss
from meshrl.config.engine import EngineConfig, ModelConfig, OptimConfig
from meshrl.config.families import SEEING
from meshrl.config.keys import ConfigError, count
from meshrl.config.load import load_config
from meshrl.config.model_folder import fit_problems
from meshrl.config.supervised import SFTConfig
from meshrl.config.validate import ensure_runnable
from meshrl.controller import (
    ClassWithInitArgs,
    Deadlines,
    Dispatch,
    ResourcePool,
    Worker,
    create_worker_group,
    register,
)
from meshrl.data.batch import DataProto, object_array
from meshrl.data.images import IMAGES, Images, as_png
from meshrl.engines.engine_class import engine_class
from meshrl.engines.fsdp.fsdp_engine import WRAPPER_PREFIX, FSDPEngine
from meshrl.engines.training_engine import Engine, LossFunction
from meshrl.models.loading import load_model_config, persistent_buffers
from meshrl.models.lora import adapter_init, adapter_scaling, add_adapters, merged_params
from meshrl.models.moe_routing import ROUTED_EXPERTS, find_routers, route_dtype, unknown
from meshrl.models.vision import Sight, find_sight, tower_of
from meshrl.parallel.linear_attention import recurrences
from meshrl.parallel.mesh import init_process_group, prepare_device

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
    """The largest relative differences found for one model, and those of its perturbed control."""

    model: str
    differences: dict[str, float]
    control: dict[str, float]

    @property
    def holds(self) -> bool:
        """True if every difference is within `TOLERANCE` and at least one difference of the control is not."""
        return max(self.differences.values()) <= TOLERANCE and max(self.control.values()) > TOLERANCE


def small_config(family: str, layers: int = SMALL["num_hidden_layers"]) -> PretrainedConfig:
    """Return the config of a tiny model of a family in `FAMILIES`."""
    return AutoConfig.for_model(family, **(SMALL | FAMILIES[family] | {"num_hidden_layers": layers}))


def small_configs(overrides: Sequence[str]) -> dict[str, PretrainedConfig]:
    """Return the configs of tiny models, by family, for the engine keys in `overrides`.

    With expert parallelism only families with experts are used. There are enough layers for all pipeline stages.
    """
    megatron = config_for(Path("."), 1, overrides, check=False).engine.megatron
    chunks = megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)
    families = [name for name in FAMILIES if megatron.expert_model_parallel_size == 1 or name.endswith("_moe")]
    return {name: small_config(name, max(chunks, SMALL["num_hidden_layers"])) for name in families}


def shape_of(path: str, layers: int) -> PretrainedConfig:
    """Return the config of the user's own model, with fewer layers."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError([f"--model {path}: there is no such folder with a config.json"])
    if layers < 1:
        raise ConfigError([f"--layers ({layers}) must be at least 1"])
    config = AutoConfig.from_pretrained(path)
    if config.model_type in SEEING:
        raise ConfigError([f"--model {path}: not supported yet: the shape of a model that sees ({config.model_type})"])
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and "linear_attention" in kinds:  # enough layers to include each kind
        layers = max(layers, 1 + max(kinds.index(kind) for kind in set(kinds)))
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if kinds:
        config.layer_types = kinds[: config.num_hidden_layers]
    return config


def write_model(config: PretrainedConfig, folder: Path) -> Path:
    """Write a model of this shape with random weights to a folder, which both sides then load."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for buffer in persistent_buffers(model).values():
            if buffer.is_floating_point() and buffer.dim():
                buffer.normal_(std=0.1)  # a fresh router's bias is zero, which would test nothing
        # Freshly initialized states decay so fast that the gradients of the decay are only rounding errors.
        for layer in recurrences(model):
            torch.nn.init.uniform_(layer.A_log, -3, 0)
            torch.nn.init.normal_(layer.dt_bias, std=0.5)
        model.save_pretrained(folder)
    return folder


def config_for(model: Path, world: int, overrides: Sequence[str], check: bool = True) -> SFTConfig:
    """Return the config of a trial in float32. Engine keys in `overrides` may omit their prefix `engine.`."""
    roots = ("engine.", "model.", "trainer.", "ray_init.")
    named = [word if word.startswith(roots) else f"engine.{word}" for word in overrides]
    fixed = [
        f"model.path={model}",
        f"trainer.n_gpus_per_node={world}",
        "model.enable_gradient_checkpointing=false",
        "engine.megatron.dtype=fp32"
        if "engine.strategy=megatron" in named
        else "engine.fsdp_config.mixed_precision.param_dtype=fp32",
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
    """Check the user's model shape, or one tiny model of each family; print a table and return whether all agree."""
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
    """Run the engine, the reference and the control for one model, and return their differences."""
    trial = Trial(config.model, config.engine)
    trainer = config.trainer
    pool = ResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=trainer.device == "cuda")
    deadlines = Deadlines(start=trainer.deadlines.start, call=trainer.deadlines.call)
    # The comparison runs on CPUs, unless the engine needs GPUs.
    on_cpu = trainer.device == "auto" and config.engine.strategy != "megatron"
    worker = ClassWithInitArgs(VerificationWorker, trial, "cpu" if on_cpu else trainer.device)
    with create_worker_group(pool, worker, backend=trainer.backend, role="verify", deadlines=deadlines) as group:
        outcomes = group.run()
    compare = [run_reference(trial), run_reference(trial, perturb=CONTROL_PERTURBATION)]
    found = [differences(outcomes, expected) for expected in compare]
    return Verdict(name, *found)


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print a table with one row a model: the largest relative differences, and whether they are small enough."""
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


# ---- the comparison

ENTROPY_WEIGHT = 0.01
STEPS = 2
SEED = 5
TEMPERATURE = 0.8


# Adam divides by the size of the gradient. With the usual epsilon, weights whose gradient is only rounding error would
# move by rounding error alone, and comparing such weights would test nothing. Hence the large epsilon.
COMPARABLE_OPTIM = OptimConfig(lr=1e-2, eps=1e-3)


@dataclass(frozen=True)
class Trial:
    """The model, the settings and the sizes of the batches that both sides compute."""

    model: ModelConfig
    engine: EngineConfig
    optim: OptimConfig = field(default_factory=lambda: COMPARABLE_OPTIM)
    samples: int = 8
    max_prompt: int = 9
    max_response: int = 13
    tokens_per_micro_batch: int = 30  # on one rank; small, so that several micro-batches accumulate
    with_routes: bool = False  # every batch prescribes the experts of its tokens

    def batches(
        self, vocab_size: int, routed: PreTrainedModel | None = None, sight: Sight | None = None
    ) -> list[DataProto]:
        """Draw one batch for each step, with prompts and responses of unequal lengths.

        One response has a single token. `input_ids` and `attention_mask` are `[B, P + R]`, with prompts padded on the
        left and responses on the right; `response_mask` and `advantages` are `[B, R]`. The model `routed` adds expert
        routes through its layers, and `sight` of a vision-language model adds images.
        """
        generator = torch.Generator().manual_seed(SEED)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        batches = []
        for step in range(STEPS):
            prompt = integers(1, self.max_prompt + 1, self.samples)
            response = integers(1, self.max_response + 1, self.samples)
            response[0], response[-1] = 1, self.max_response
            columns = torch.arange(self.max_prompt), torch.arange(self.max_response)
            prompt_mask = columns[0] >= self.max_prompt - prompt[:, None]
            response_mask = columns[1] < response[:, None]
            tensors = {
                "input_ids": integers(0, vocab_size, self.samples, self.max_prompt + self.max_response),
                "attention_mask": torch.cat([prompt_mask, response_mask], 1).long(),
                "response_mask": response_mask.long(),
                "advantages": torch.randn(self.samples, 1, generator=generator).expand_as(response_mask).contiguous(),
            }
            batches.append(DataProto.from_dict(tensors))
            if sight is not None:
                batches[-1] = with_images(batches[-1], sight, step)
            if routed is not None:
                lengths = tensors["attention_mask"].sum(1).tolist()
                batches[-1].non_tensor_batch[ROUTED_EXPERTS] = random_routes(routed, lengths)
        return batches


@dataclass
class Outcome:
    """The results of one side, or of one rank of the engine's side.

    Gradients, weights and moments are keyed by Hugging Face name. Log-probs have one row a sample, on collecting ranks
    only. `shard` is the rank's part of the batch: the index of the shard and the number of shards.
    """

    log_probs: Tensor
    shard: tuple[int, int] = (0, 1)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    routes: list[np.ndarray] = field(default_factory=list)  # the router's own experts for the first batch, by sample


def with_images(batch: DataProto, sight: Sight, step: int) -> DataProto:
    """Add images to two prompts of a batch: two images before one prompt, and one image before the next prompt.

    Both prompts are in the same half of the batch, so that a rank may have no images.
    """
    random = np.random.default_rng((SEED, step))
    sides = [(16, 24), (40, 20)]
    pictures = tuple(as_png(random.integers(0, 256, (*side, 3), dtype=np.uint8)) for side in sides)
    images: list[Images] = [()] * len(batch)
    first = step * (len(batch) // 2)
    images[first + 1], images[first + 2] = pictures, pictures[:1]
    # A text token follows each image, as Transformers requires.
    before = [[t for one in own for t in (*[sight.image_token] * sight.reader.num_tokens(one), 0)] for own in images]
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    ids = torch.where(ids == sight.image_token, 0, ids)
    ids, mask = (F.pad(x, (max(map(len, before)), 0)) for x in (ids, mask))
    for row, tokens in enumerate(before):
        end = int(mask[row].argmax())
        place = slice(end - len(tokens), end)
        ids[row, place], mask[row, place] = torch.tensor(tokens, dtype=torch.long), 1
    tensors = {**batch.batch, "input_ids": ids, "attention_mask": mask}
    return DataProto.from_dict(tensors, {**batch.non_tensor_batch, IMAGES: object_array(images)})


def random_routes(hf_model: PreTrainedModel, lengths: Sequence[int]) -> np.ndarray:
    """Draw random routes for every sample, `[T, layers, top_k]`, which no router would choose.

    The last token of each sample, and a fifth of the other tokens, have no route (`unknown`).
    """
    routers = find_routers(hf_model)
    experts, chosen = len(routers[0].weight), int(routers[0].top_k)
    random = np.random.default_rng(SEED)
    routes = []
    for length in lengths:
        orders = random.random((length, len(routers), experts)).argsort(-1)
        made = orders[..., :chosen].astype(route_dtype(experts))
        made[random.random(length) < 0.2] = unknown(made.dtype)
        made[-1] = unknown(made.dtype)
        routes.append(made)
    return object_array(routes)


@contextmanager
def watched_experts(model: nn.Module, watch: Callable[..., Any]) -> Iterator[None]:
    """Call `watch(layer, router, hidden, chosen experts, weights)` before the experts of each layer run.

    A returned tuple replaces the arguments `(hidden, chosen experts, weights)` of the experts.
    """
    all_experts: list[Any] = [block.experts for block in model.modules() if hasattr(block, "experts")]

    def hook(layer: int, router: Any, experts: Any, args: tuple[Tensor, ...]) -> Any:
        return watch(layer, router, *args)

    placed = [
        experts.register_forward_pre_hook(partial(hook, layer, router))
        for layer, (experts, router) in enumerate(zip(all_experts, find_routers(model), strict=True))
    ]
    try:
        yield
    finally:
        for handle in placed:
            handle.remove()


def forced_routes(batch: DataProto) -> Callable[..., Any]:
    """Return a watcher for `watched_experts` that sends tokens to the experts prescribed by the batch.

    The weights of the prescribed experts are computed from the router's scores, as the model computes weights.
    """
    mask = batch.batch["attention_mask"].bool().flatten()
    together = torch.from_numpy(np.concatenate(list(batch.non_tensor_batch[ROUTED_EXPERTS])))
    is_known = (together[:, 0, 0] != torch.iinfo(together.dtype).max)[:, None]

    def force(layer: int, router: Any, hidden: Tensor, own: Tensor, own_weights: Tensor) -> tuple[Tensor, ...]:
        taken = own.clone()
        taken[mask] = torch.where(is_known, together[:, layer].long(), own[mask])
        logits = hidden.float() @ router.weight.float().T
        scores = logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1)
        weights = scores.gather(-1, taken)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return hidden, taken, (weights * getattr(router, "routed_scaling_factor", 1.0)).to(own_weights.dtype)

    return force


@torch.no_grad()
def own_routes(model: PreTrainedModel, batch: DataProto) -> list[np.ndarray]:
    """Return the experts that the model's own routers choose for a batch: `[T, layers, top_k]` for each sample."""
    seen: list[Tensor] = []
    with watched_experts(model, lambda layer, router, hidden, chosen, weights: seen.append(chosen)):
        _reference_forward(model, batch)
    mask = batch.batch["attention_mask"].bool()
    routes = torch.stack(seen, 1)[mask.flatten()]
    return [part.numpy() for part in routes.split(mask.sum(1).tolist())]


def run_reference(trial: Trial, perturb: float = 0.0) -> Outcome:
    """Run the reference side: one process and padded batches, with Hugging Face and torch alone.

    `perturb` moves the weights randomly by that much, for a control that must differ.
    """
    sight = sight_of(trial.model)
    auto_class = AutoModelForCausalLM if sight is None else AutoModelForImageTextToText
    model = auto_class.from_pretrained(
        trial.model.path or "", dtype=torch.float32, attn_implementation="eager", use_safetensors=True
    )
    if sight is not None and trial.engine.freeze_vision_tower:
        tower_of(model).requires_grad_(False)
    if trial.model.lora_rank:
        add_adapters(model, trial.model)
        adapter_init(model, SEED)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for param in model.parameters():
            param.add_(perturb * torch.randn(param.shape, generator=generator))
    config = trial.optim
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    model.train()
    outcome = Outcome(log_probs=torch.empty(0))
    vocabulary = model.config.get_text_config().vocab_size
    for step, batch in enumerate(trial.batches(vocabulary, model if trial.with_routes else None, sight)):
        if trial.with_routes and step == 0:
            outcome.routes = own_routes(model, batch)
        with watched_experts(model, forced_routes(batch)) if trial.with_routes else nullcontext():
            log_probs, entropy = _reference_forward(model, batch, sight)
        mask = batch.batch["response_mask"]
        per_token = -batch.batch["advantages"] * log_probs - ENTROPY_WEIGHT * entropy
        loss = (per_token * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            outcome.log_probs = (log_probs * mask).detach()
            outcome.gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        outcome.losses.append(loss.item())
        outcome.grad_norms.append(float(nn.utils.clip_grad_norm_(trained.values(), trial.engine.grad_clip)))
        optimizer.step()
    params = ((name, p.detach()) for name, p in model.named_parameters())
    outcome.weights = dict(merged_params(params, adapter_scaling(model)) if trial.model.lora_rank else params)
    outcome.weights |= persistent_buffers(model)
    outcome.moments = {n: optimizer.state[p]["exp_avg"] for n, p in trained.items()}
    return outcome


def sight_of(model: ModelConfig) -> Sight | None:
    """Return how the model in a folder takes images, or None if it takes none."""
    return find_sight(load_model_config(model.path or "", trust_remote_code=model.trust_remote_code), model)


def _reference_forward(model: nn.Module, batch: DataProto, sight: Sight | None = None) -> tuple[Tensor, Tensor]:
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    width = batch.batch["response_mask"].shape[1]
    if sight is None:
        inputs = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    else:
        shown = [sight.reader.pixels(image) for own in batch.non_tensor_batch[IMAGES] for image in own]
        inputs = {
            "pixel_values": torch.cat([one.values for one in shown]),
            "image_grid_thw": torch.tensor([one.grid for one in shown]),
            "mm_token_type_ids": (ids == sight.image_token).int(),
        }
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **inputs).logits
    log_p = F.log_softmax(logits[:, -width - 1 : -1] / TEMPERATURE, -1)
    chosen = log_p.gather(-1, ids[:, -width:, None])[..., 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


def run_engine(trial: Trial, device: str = "cpu") -> Outcome:
    """Run the engine's side on this rank of the current process group; gradients, weights and moments are unsharded."""
    torch.backends.cudnn.allow_tf32 = False  # TF32 would round float32 to ten bits in convolutions of images
    engine = engine_class(trial.engine)(
        trial.model,
        trial.engine,
        trial.optim,
        device=torch.device(device),
        total_steps=STEPS,
        seed=SEED,
        replays_routes=trial.with_routes,
    )
    engine.initialize()
    outcome = Outcome(torch.empty(0), (engine.dp_rank, engine.dp_size))
    routed = engine.hf_model if trial.with_routes else None
    config = engine.hf_model.config
    sight, vocabulary = find_sight(config, trial.model), config.get_text_config().vocab_size
    for step, batch in enumerate(trial.batches(vocabulary, routed, sight)):
        mine = batch.chunk(engine.dp_size)[engine.dp_rank]
        mine.meta_info = {
            "temperature": TEMPERATURE,
            "use_dynamic_bsz": True,
            # At least as many tokens as the longest sample, images included.
            "max_token_len": max(trial.tokens_per_micro_batch, int(batch.batch["attention_mask"].sum(1).max())),
            "calculate_entropy": True,
        }
        if step == 0:
            outcome.log_probs = engine.forward(mine).get("log_probs", torch.empty(0))
        if step == 0 and trial.with_routes:
            asked = DataProto(mine.batch, {}, {**mine.meta_info, "record_routes": True})
            recorded = engine.forward_backward_batch(asked, None, forward_only=True).routes
            outcome.routes = [] if recorded is None else list(recorded)
        mask = batch.batch["response_mask"]
        stats = BatchStats(engine.gradient_ranks, int(mask.sum()), len(mask))
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(mine, _loss_function(stats)).metrics
        if step == 0 and trial.engine.strategy == "fsdp2":
            outcome.gradients = _whole({n: p.grad for n, p in _trained(engine).items()})
        outcome.losses.append(metrics["loss"])
        outcome.grad_norms.append(engine.optimizer_step())
        engine.lr_scheduler_step()
        _send_away_and_back(engine, trial, device)
    outcome.weights = {name: value.clone().cpu() for name, value in engine.per_tensor_params()}
    if isinstance(engine, FSDPEngine) and trial.engine.strategy == "fsdp2":
        states = {n: engine.optimizer.state[p]["exp_avg"] for n, p in _trained(engine).items()}
        outcome.moments = _whole(states)
    return outcome


def _loss_function(stats: BatchStats) -> LossFunction:
    def loss_function(output: dict[str, Tensor], data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        batch = data.to(output["log_probs"].device).batch
        per_token = -batch["advantages"] * output["log_probs"] - ENTROPY_WEIGHT * output["entropys"]
        loss = agg_loss(per_token, batch["response_mask"], "token-mean", stats=stats)
        return loss, {"loss": loss.detach() / stats.dp_size}

    return loss_function


def _send_away_and_back(engine: Engine, trial: Trial, device: str) -> None:
    config = trial.engine.megatron if trial.engine.strategy == "megatron" else trial.engine.fsdp_config
    if config.param_offload or config.optimizer_offload:
        engine.to("cpu", model=config.param_offload, optimizer=config.optimizer_offload)
        engine.to(device, model=config.param_offload, optimizer=config.optimizer_offload)


def _trained(engine: Engine) -> dict[str, nn.Parameter]:
    named = engine.module.named_parameters()
    return {name.removeprefix(WRAPPER_PREFIX): p for name, p in named if p.requires_grad}


def _whole(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    whole = {}
    for name, value in tensors.items():
        if value is not None:
            whole[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().cpu()
    return whole


def differences(found: list[Outcome], expected: Outcome) -> dict[str, float]:
    """Return the largest relative difference over all ranks, by quantity.

    The entry `routes` is the largest share of a sample's routes that differ.
    """
    result = dict.fromkeys(("log-probs", "loss", "norm", "gradients", "weights", "moments"), 0.0)
    if expected.routes:
        result["routes"] = 0.0

    def note(name: str, got: Tensor, want: Tensor) -> None:
        result[name] = max(result[name], relative_difference(got, want))

    answered = {outcome.shard[0] for outcome in found if len(outcome.log_probs)}
    if answered != set(range(found[0].shard[1])):
        raise ValueError(f"of {found[0].shard[1]} shards of the batch only {sorted(answered)} were answered for")
    for outcome in found:
        number, shards = outcome.shard
        if len(outcome.log_probs):
            note("log-probs", outcome.log_probs, expected.log_probs.chunk(shards)[number])
            size = len(expected.routes) // shards
            for got_routes, own in zip(outcome.routes, expected.routes[number * size :][:size], strict=True):
                other = (np.sort(got_routes, -1) != np.sort(own, -1)).any(-1)
                result["routes"] = max(result["routes"], float(other.mean()))
        note("loss", torch.tensor(outcome.losses), torch.tensor(expected.losses))
        note("norm", torch.tensor(outcome.grad_norms), torch.tensor(expected.grad_norms))
        for name, got, want in (
            ("gradients", outcome.gradients, expected.gradients),
            ("weights", outcome.weights, expected.weights),
            ("moments", outcome.moments, expected.moments),
        ):
            if got and got.keys() != want.keys():
                raise ValueError(f"{name}: the engine has {sorted(got.keys() ^ want.keys())[:4]} that differ in name")
            for key in got:
                note(name, got[key], want[key])
    return result


def relative_difference(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference divided by the largest absolute value; infinite if shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    scale = float(want.abs().max()) if want.numel() else 0.0
    difference = float((got.float() - want.float()).abs().max()) if want.numel() else 0.0
    return difference / max(scale, 1e-6)


class VerificationWorker(Worker):
    """A worker that runs one rank of the engine's side."""

    def __init__(self, trial: Trial, device: str):
        self.trial, self.device = trial, device

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run(self) -> Outcome:
        """Join the process group, run the trial and return this rank's outcome."""
        device = prepare_device(self.device, self.local_rank)
        init_process_group(device, timeout_seconds=300.0)
        return run_engine(self.trial, str(device))
