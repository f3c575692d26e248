"""The dispatch across ranks against the local one, and whether the host waits in it."""

import pytest
import torch
import torch.distributed as dist

from pipeline.bench.step_profile import Calls, Operations
from pipeline.config.parts import MoE
from pipeline.model.moe import MixtureOfExperts
from pipeline.parallel.expert import AllToAll, _Exchange
from pipeline.parallel.world import World, join


@pytest.fixture
def alone():
    join(World.from_environment({}), {})  # an engine of an earlier test may have left its group
    return dist.group.WORLD


@pytest.mark.parametrize(
    ("top_k", "capacity", "waits"), [(1, 0.7, False), (2, 1.25, False), (2, None, True)]
)
def test_rows_travel_without_a_wait_where_experts_have_a_capacity(alone, top_k, capacity, waits):
    torch.manual_seed(0)
    routed = {"top_k": top_k, "capacity": capacity, "normalize": False, "shared": 1}
    cfg = MoE(kind="moe", activation="swiglu", hidden=16, dense_hidden=16, experts=4, **routed)
    layer = MixtureOfExperts(8, cfg, range(4))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x, grad = torch.randn(3, 20, 8), torch.randn(3, 20, 8)
    outcomes, places = [], []
    for dispatch in (layer.dispatch, AllToAll(alone, 4)):
        layer.dispatch, leaf = dispatch, x.clone().requires_grad_()
        layer.zero_grad()
        places.clear()
        with Operations(places), Calls(places):
            y, routing = layer(leaf)
            y.backward(grad)
        outcomes.append([y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    assert (routing.dropped > 0) == (capacity is not None)
    assert bool([place for place in places if place.startswith("expert.py")]) == waits
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("capacity", [1.25, None])
def test_the_shared_expert_runs_while_rows_and_their_gradients_travel(alone, capacity, monkeypatch):
    routed = {"top_k": 2, "capacity": capacity, "normalize": False, "shared": 1}
    cfg = MoE(kind="moe", activation="swiglu", hidden=16, dense_hidden=16, experts=4, **routed)
    layer = MixtureOfExperts(8, cfg, range(4))
    layer.dispatch, order = AllToAll(alone, 4), []
    for name in ("begin", "end"):
        whole = getattr(_Exchange, name)
        monkeypatch.setattr(
            _Exchange, name, lambda *given, n=name, f=whole: (order.append(n), f(*given))[1]
        )
    layer.shared.register_forward_hook(lambda *_: order.append("shared"))
    layer.shared.register_full_backward_hook(lambda *_: order.append("shared"))
    layer(torch.randn(3, 20, 8, requires_grad=True))[0].sum().backward()
    there, back = ["begin", "shared", "end"], ["begin", "end"]
    assert order == [*there, *back, *back, *there]
