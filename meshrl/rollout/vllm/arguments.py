"""Arguments and inputs for vLLM as a rollout, in this process or as a server.

Parts: engine arguments, files of LoRA adapters, the sharding of vLLM's ranks (`Parallel`), and prompts with images.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from meshrl.config.rollout import VLLM_ADAPTER_RANKS
from meshrl.config.validate_rollout import server_words
from meshrl.data.images import KEPT_BYTES, Images, Newest, open_image, upright
from meshrl.data.prompt_images import encoded
from meshrl.models.names import expert_count
from meshrl.models.vision import Sight
from meshrl.rollout.requests import Request

FIXED: dict[str, Any] = {
    # These make vLLM report the policy's log-probs: see `log_probs`.
    "logprobs_mode": "processed_logits",
    "logits_processors": ["meshrl.rollout.vllm.log_probs:PolicyLogProbs"],
    "worker_extension_cls": "meshrl.weights.vllm_receiver.WorkerExtension",
    # A step returns the tokens that it computed, so that each has the version of its step.
    "async_scheduling": False,
}
BACKEND = "meshrl"
# vLLM offers its routes for pauses and weight updates only in this mode.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
# vLLM offers its route for loading adapters only with this setting.
ADAPTERS_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def engine_arguments(path: str | Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the user's vLLM `EngineArgs` with those that a rollout requires; raise ValueError for a conflict."""
    taken = sorted(set(FIXED) & set(wanted))
    if taken:
        raise ValueError(f"engine_kwargs.vllm.{taken[0]} cannot be set: the rollout needs {FIXED[taken[0]]!r}")
    # -1 removes vLLM's limit of 20 top log-probs.
    return {"model": str(path), "max_logprobs": -1, "seed": 0} | dict(wanted) | FIXED


def command_line(path: str | Path, wanted: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments that start vLLM's server as a rollout."""
    words = ["--enable-scale-out", "--weight-transfer-config", json.dumps({"backend": BACKEND})]
    return words + server_words("vllm", engine_arguments(path, wanted))


# LoRA adapters on the way into vLLM, which reads an adapter from a folder. The folder is in shared memory.

# The name by which requests select the adapter.
ADAPTER = "policy"


def adapter_arguments(rank: int, device_type: str) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter of rank `rank`, which every sync replaces."""
    room = next((most for most in VLLM_ADAPTER_RANKS if most >= rank), None)
    if room is None:
        raise ValueError(
            f"vLLM takes adapters up to rank {VLLM_ADAPTER_RANKS[-1]}, not {rank}: set "
            "actor_rollout_ref.rollout.update_weights_adapters=merged"
        )
    # On CPUs, requests without an adapter would otherwise use the last adapter slot.
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1 if device_type == "cuda" else 2}


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write an adapter in peft's format (two files) and return the folder."""
    folder.mkdir(exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)))
    return folder


# The sharding of a model over vLLM's ranks, as far as a weight sync needs it.


@dataclass(frozen=True)
class Parallel:
    """One rank of an engine with `size` ranks, which shard matrices (`tp`).

    The experts are distributed over `ep` ranks. 0 means that each expert's matrices are sharded instead.
    """

    size: int
    rank: int
    ep: int = 0

    @property
    def tp(self) -> int:
        return self.size


def parallel_of(config: Any, rank: int, hf_config: Any) -> Parallel | None:
    """Derive the sharding of a rank from vLLM's `ParallelConfig`.

    Returns None if a rank keeps all weights, or if the sharding cannot be determined.
    """
    size, experts = int(config.tensor_parallel_size), expert_count(hf_config)
    spreads = bool(config.enable_expert_parallel) and experts > 0
    # vLLM shards experts over more ranks than other matrices, or places experts in an order of its own.
    wider = config.data_parallel_size > 1 or getattr(config, "prefill_context_parallel_size", 1) > 1
    moves = config.enable_eplb or config.expert_placement_strategy != "linear" or experts % size
    if size == 1 or (experts and wider) or (spreads and moves):
        return None
    return Parallel(size, rank, size if spreads else 0)


def complaint(unsent: Iterable[Sequence[str]], passed_over: Iterable[Sequence[str]]) -> str | None:
    """Return an error message if a weight update left some parameters wrong, or None.

    `unsent` has each rank's parameters with values that are not numbers. `passed_over` has each rank's parameters that
    kept their old values.
    """
    kept = [name for names in passed_over for name in names]
    if kept:
        return (
            f"weight sync: vLLM did not take what it was sent for '{kept[0]}' ({len(kept)} parameters in all): it "
            "cannot renew those of this model while it runs; set rollout.name to sglang, embedded or hf"
        )
    found = [name for names in unsent for name in names]
    if not found:
        return None
    return (
        f"weight sync: vLLM's '{found[0]}' ({len(found)} parameters in all) has values that are no numbers. Either the "
        "trainer's weights have, or vLLM cuts this model over its ranks in another way than we think: then one rank "
        "must have all of it (rollout.tensor_model_parallel_size and expert_parallel_size, or "
        "engine_kwargs.vllm.tensor_parallel_size)"
    )


# Prompts with images for vLLM: the image, and one placeholder token for it. vLLM expands the placeholder itself.

ORIENTATION = 0x0112  # the EXIF tag for the orientation of the camera
# File formats that every reader decodes equally, if the pixels are plain RGB.
PLAIN = ("PNG", "JPEG", "WEBP")
# Decoded images are cached, because every completion of a prompt is a separate vLLM request.
_pictures: Newest[Any] = Newest(KEPT_BYTES)


def token_prompt(request: Request, sight: Sight | None) -> dict[str, Any]:
    """Return the fields of vLLM's `TokensPrompt`; raise ValueError if an image cannot be decoded."""
    if sight is None or not request.images:
        return {"prompt_token_ids": list(request.prompt_token_ids)}
    return {
        "prompt_token_ids": with_one_each(request, sight),
        "multi_modal_data": {"image": [_picture(image) for image in request.images]},
        "multi_modal_uuids": {"image": _names(request.images)},
    }


def content_parts(images: Images) -> list[dict[str, str]]:
    """Return the images of a request as content parts of a message to vLLM's server."""
    kinds = zip(map(_plain_file, images), _names(images), strict=True)
    return [{"type": "image_url", "url": url, "uuid": name} for url, name in kinds]


def with_one_each(request: Request, sight: Sight) -> list[int]:
    """Return the token ids of a prompt with a single placeholder token for each image."""
    ids = np.array(request.prompt_token_ids)
    times = np.array([sight.reader.num_tokens(image) for image in request.images])
    places = (ids == sight.image_token).nonzero()[0][: times.sum()]
    return np.delete(ids, np.delete(places, times.cumsum() - times)).tolist()


def _names(images: Images) -> list[str]:
    """Return the SHA-256 hashes by which vLLM identifies images. Without them vLLM would hash the pixels."""
    return [sha256(image).hexdigest() for image in images]


def _picture(image: bytes) -> Any:
    if (found := _pictures.get(image)) is not None:
        return found
    made = upright(image)
    return _pictures.keep(image, made, 3 * made.width * made.height)


def _plain_file(image: bytes) -> str:
    """Encode an image as a data URL that vLLM decodes to the same pixels as our reader does.

    Rotated or transparent images are converted to plain PNG, because vLLM handles those images differently.
    """
    opened = open_image(image)
    is_plain = opened.format in PLAIN and opened.mode == "RGB" and opened.getexif().get(ORIENTATION, 1) == 1
    kind, shown = (opened.format.lower(), image) if is_plain else ("png", encoded(upright(image)))
    return f"data:image/{kind};base64,{base64.b64encode(shown).decode()}"
