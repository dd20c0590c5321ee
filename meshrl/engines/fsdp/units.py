"""Which modules of a model become units of sharding: each is gathered, used and freed as one."""

from __future__ import annotations

from torch import nn

from meshrl.config.engine import WrapPolicyConfig


def units_to_shard(hf_model: nn.Module, policy: WrapPolicyConfig) -> list[nn.Module]:
    """The units by the configured policy, inner ones first; what is in none of them stays with the root.

    By class (`_no_split_modules` unless named), or by size, or none at all. An embedding that is not tied to the output
    projection is a unit of its own; the projection stays with the root, which computes log-probs with its weight.
    """
    if policy.disable:
        return []
    if policy.min_num_params > 0:
        return _units_by_size(hf_model, policy.min_num_params)
    classes = set(policy.transformer_layer_cls_to_wrap or getattr(hf_model, "_no_split_modules", None) or ())
    units = [module for module in hf_model.modules() if type(module).__name__ in classes]
    if not units:
        names = ", ".join(sorted(classes)) or "(the model names none)"
        raise ValueError(f"the model has no layer of class {names}: set fsdp_config.wrap_policy")
    embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and embedding.weight is not head.weight:
        units.append(embedding)
    return units


def _units_by_size(hf_model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """From the leaves up: a module whose parameters outside inner units are this many becomes a unit."""
    head = hf_model.get_output_embeddings()  # type: ignore[operator]
    taken = set() if head is None else {id(p) for p in head.parameters()}
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        # Lists of modules are never called, so nothing would gather their weights.
        is_called = module is not hf_model and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_called and sum(own.values()) >= min_num_params:
            units.append(module)
            taken.update(own)

    visit(hf_model)
    return units
