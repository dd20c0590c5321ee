"""Clipping and the step on each rank's parts, against torch's own on the whole, also where a rank has none."""

import pytest
import torch
import torch.distributed as dist
from process_group import own_device
from torch import nn


def model_of(rows: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, rows), nn.Linear(rows, 2, bias=False)).to(own_device())


def stepped(rows: int, max_norm: float, is_sharded: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Norms of three steps, the last clipped gradients and the weights; one parameter has no gradient in the second."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from meshrl.engines.fsdp.sharding import FSDP2
    from meshrl.engines.optim import LocalAdamW

    model = model_of(rows)
    if is_sharded:
        mesh = init_device_mesh(own_device().type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        fully_shard(model, mesh=mesh)
        sharding = FSDP2.__new__(FSDP2)
        sharding.module, sharding.group = model, mesh.get_group("fsdp")
    params = list(model.parameters())
    made = LocalAdamW if is_sharded else torch.optim.AdamW
    optimizer = made(params, lr=0.1, weight_decay=0.1, fused=True)
    norms = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7, 5, generator=generator).to(own_device())
        model(x).square().sum().backward()
        if step == 1:
            params[1].grad = None
        if is_sharded:
            norms.append(sharding.clip_grad_norm(max_norm))
        else:
            norms.append(float(torch.nn.utils.clip_grad_norm_(params, max_norm)))
        optimizer.step()
        grads = [param.grad for param in params]
        optimizer.zero_grad()
    return norms, [(x.full_tensor() if is_sharded else x).detach().cpu() for x in (*grads, *params)]


@pytest.mark.parametrize(("rows", "max_norm"), [(3, 1.0), (3, 1e6), (8, 0.5)])
def test_parts_step_as_the_whole_does(ranks, rows, max_norm):
    (norms, expected), *_ = ranks(4).run(stepped, rows, max_norm, False)
    for found_norms, found in ranks(4).run(stepped, rows, max_norm, True):
        assert found_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # Clipped otherwise, they would not be the same.
    _, others = ranks(4).run(stepped, rows, 0.3 * min(max_norm, norms[-1]), True)[0]
    assert not any(torch.allclose(a, b, rtol=0.1) for a, b in zip(others[:3], expected[:3], strict=True))
