"""Kernels are asynchronous and compute what the CPU computes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from types import ModuleType


def convnet() -> nn.Module:
    """Convolution, normalisation, pooling and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_a_convnet_trains_as_on_the_cpu(any_sim: ModuleType, foreach: bool) -> None:
    """Forward, backward and SGD with momentum give the same losses, without a race."""
    torch.manual_seed(0)
    models = {"cpu": convnet()}
    models["sim"] = copy.deepcopy(models["cpu"]).to("sim")
    data = [(torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))) for _ in range(3)]
    losses: dict[str, list[float]] = {}
    for device, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        device_losses = []
        for images, labels in data:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            device_losses.append(loss.detach())
        losses[device] = [loss.item() for loss in device_losses]
    assert losses["sim"] == pytest.approx(losses["cpu"], rel=1e-5)
    assert any_sim.races() == []


def test_operators_do_not_wait(sim: ModuleType) -> None:
    """A whole chain is queued behind a kernel that does not end."""
    values = torch.ones(4, device="sim")
    sim.hold_kernel()
    result = (values * 2 + 1).relu().sum()
    assert not torch.accelerator.current_stream().query()
    sim.release_kernels()
    assert result.item() == 12


def test_backward_runs_on_the_stream_of_the_forward(any_sim: ModuleType) -> None:
    """Autograd's own thread uses the simulated streams, and its waits are seen."""
    side, current = torch.Stream("sim"), torch.accelerator.current_stream()
    weight = torch.ones(1000, device="sim", requires_grad=True)
    side.wait_stream(current)
    with side:
        loss = (weight * 2).sum()
    current.wait_stream(side)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.sum().item() == 2000
    assert any_sim.races() == []


def test_data_dependent_operators(any_sim: ModuleType) -> None:
    """They wait for the stream, and are right."""
    values = torch.tensor([0, 1, 2], device="sim")
    assert values.nonzero().flatten().tolist() == [1, 2]
    assert values[values > 0].tolist() == [1, 2]
    assert torch.arange(6, device="sim")[torch.tensor([1, 2])].tolist() == [1, 2]
    assert torch.arange(6, device="sim")[values].tolist() == [0, 1, 2]
    assert torch.unique(values).tolist() == [0, 1, 2]


def test_host_scalars_are_passed_by_value(sim: ModuleType) -> None:
    """Changing a number on the host after the call does not change the kernel."""
    values, factor = torch.ones(3, device="sim"), torch.tensor(2.0)
    sim.hold_kernel()
    result = values * factor
    factor.fill_(5)
    sim.release_kernels()
    assert result.tolist() == [2, 2, 2]


def test_errors_surface_at_the_next_synchronisation(any_sim: ModuleType) -> None:
    """The call that causes it returns, the wait raises it, and then it is over."""
    index = torch.tensor([7]).pin_memory().to("sim", non_blocking=True)
    values = torch.ones(3, device="sim")
    taken = values[index]
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        torch.accelerator.synchronize()
    assert taken.shape == (1,)
    torch.accelerator.synchronize()


def test_operators_without_a_cpu_kernel_say_so(any_sim: ModuleType) -> None:
    """At the call, not later on a worker's thread."""
    with pytest.raises(NotImplementedError, match="no CPU kernel to run for aten::_thnn_fused_lstm_cell"):
        nn.LSTM(3, 4).to("sim")(torch.ones(2, 1, 3, device="sim"))


def test_random_operators(any_sim: ModuleType) -> None:
    """The device draws from a generator of its own: seeded with torch's, without disturbing the host's."""
    torch.manual_seed(0)
    host_alone = torch.rand(3)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        values = torch.rand(4, device="sim")
        kept = nn.functional.dropout(torch.ones(100, device="sim"), 0.25)
        assert torch.equal(torch.rand(3), host_alone)
        drawn.append((values.cpu(), kept.cpu()))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert ((drawn[0][0] >= 0) & (drawn[0][0] < 1)).all()
    assert 0 < (drawn[0][1] == 0).sum() < 60
    assert torch.randperm(5, device="sim").sort().values.tolist() == [0, 1, 2, 3, 4]
    assert torch.randint(3, 4, (2,), device="sim").tolist() == [3, 3]
    assert torch.rand_like(drawn[0][0].to("sim"), requires_grad=True).shape == (4,)


def test_dropout_has_a_gradient(any_sim: ModuleType) -> None:
    """It is zero exactly where the value was dropped."""
    values = torch.ones(100, device="sim", requires_grad=True)
    kept = nn.functional.dropout(values, 0.5)
    kept.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad.cpu(), kept.detach().cpu())
    assert set(kept.tolist()) == {0.0, 2.0}


def test_autocast(any_sim: ModuleType) -> None:
    """Matrix products run in the lower precision, other operators do not, gradients come back in the parameter's."""
    layer = nn.Linear(4, 2).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = layer(torch.ones(3, 4, device="sim"))
        total = torch.ones(3, device="sim") + 1
    assert product.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    assert layer(torch.ones(3, 4, device="sim")).dtype == torch.float32
    product.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.tolist() == [[3.0] * 4] * 2


def test_torchvision_transforms(any_sim: ModuleType) -> None:
    """The transforms that one would run on the device."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(2, 3, 4, 4)
    transform = v2.Compose(
        [v2.RandomHorizontalFlip(p=1), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    )
    transformed = transform(images.to("sim"))
    assert transformed.device.type == "sim"
    assert torch.allclose(transformed.cpu(), transform(images))
    assert v2.RandomResizedCrop(3)(images.to("sim")).shape == (2, 3, 3, 3)


def test_batch_norm_in_evaluation(any_sim: ModuleType) -> None:
    """Batch normalisation in evaluation mode, whose saved statistics are empty on the CPU, gives the CPU's values."""
    torch.manual_seed(0)
    layer = torch.nn.BatchNorm2d(3).eval()
    batch = torch.randn(4, 3, 5, 5)
    want = layer(batch)
    got = layer.to("sim")(batch.to("sim"))
    assert torch.allclose(got.cpu(), want)
