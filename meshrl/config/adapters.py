"""Checks of LoRA's keys: which layers may have an adapter, and how large it may be."""

from pathlib import Path

from meshrl.config.model import ModelConfig
from meshrl.config.model_folder import read_header, tensor_file_problems
from meshrl.config.names import MODEL, ROLLOUT
from meshrl.config.rollout import VLLM_ADAPTER_RANKS
from meshrl.config.root import PPOConfig

# Modules whose adapters cannot be merged into the weights that a rollout gets.
UNMERGEABLE = ("lm_head", "embed_tokens")


def adapter_problems(config: PPOConfig) -> list[str]:
    """Adapters that a rollout could not take."""
    model, rollout, most = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, VLLM_ADAPTER_RANKS[-1]
    unmergeable = [name for name in UNMERGEABLE if name in model.target_modules]
    problems = []
    if model.lora_rank and unmergeable:
        problems.append(
            f"{MODEL}.target_modules: adapters of {' and '.join(unmergeable)} cannot be merged into the weights that "
            "the rollout gets: name linear layers before the head alone"
        )
    alone = rollout.update_weights_adapters == "alone" and config.actor_rollout_ref.hybrid_engine
    if rollout.name == "vllm" and alone and model.lora_rank > most:
        problems.append(
            f"{MODEL}.lora_rank ({model.lora_rank}) is above {most}, the most that vLLM takes of adapters alone: set "
            f"{ROLLOUT}.update_weights_adapters=merged"
        )
    return problems


def target_problems(model: ModelConfig, prefix: str) -> list[str]:
    """Modules that are to get an adapter and that the model's files, if they are whole, do not have."""
    folder = Path(model.path or "nowhere")
    is_named = model.lora_rank and model.lora_adapter_path is None and model.target_modules != ["all-linear"]
    if not is_named or tensor_file_problems(folder):
        return []
    headers = [read_header(file)[1] for file in folder.glob("*.safetensors")]
    matrices = [name for header in headers for name, entry in header.items() if len(entry.get("shape", ())) == 2]
    # What comes before the last part of a name may be another in the files than in the model.
    there = sorted({name.split(".")[-2] for name in matrices if name.endswith(".weight")})
    unknown = [name for name in model.target_modules if name.rpartition(".")[2] not in (*there, *UNMERGEABLE)]
    if not there or not unknown:
        return []
    linear = [name for name in there if name not in UNMERGEABLE]
    return [
        f"{prefix}.target_modules: {folder} has no linear layer {', '.join(unknown)}: name some of "
        f"{', '.join(linear)}, or all of them as [all-linear]"
    ]
