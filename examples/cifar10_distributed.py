"""The processes that train ``cifar10.py`` together, one for each device, as ``torchrun`` starts them.

They differ in what the environment says: RANK among all of them, LOCAL_RANK among those of one machine, WORLD_SIZE.
Without ``torchrun`` there is one process, and all of this does nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from prefetch import CUDAPrefetcher

T = TypeVar("T")


def world_size() -> int:
    """How many processes train."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_device(name: str | None) -> torch.device:
    """The device of this process: of several accelerators the one with the number LOCAL_RANK.

    To be asked for before anything else touches an accelerator. It becomes the current device, so that what is made
    without a number is made there: otherwise every process would have a context on device 0, and hold memory there.

    Args:
        name: Such as "cpu" or "cuda"; ``None``: an accelerator, or the CPU where there is none.

    Raises:
        ValueError: It names one device for all processes, or there are fewer devices than processes.
        RuntimeError: There is no such device.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None:
        if name is not None and ":" in name:
            raise ValueError(
                f"must be without a number under torchrun, where LOCAL_RANK is each process's own, got {name!r}"
            )
        if name != "cpu" and torch.accelerator.is_available():
            count = torch.accelerator.device_count()
            if int(local_rank) >= count:
                raise ValueError(
                    f"must have one device for each process of this machine, got {count} for LOCAL_RANK {local_rank}"
                )
            torch.accelerator.set_device_index(int(local_rank))
    return CUDAPrefetcher((), name).device


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[Group]:
    """Connect the processes.

    Args:
        device: That of this process. It rules how they talk: NCCL for CUDA, gloo for the CPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if world_size() == 1:
        yield Group(0, 1, local_rank)
        return
    distributed.init_process_group(
        distributed.get_default_backend_for_device(device), device_id=None if device.type == "cpu" else device
    )
    yield Group(distributed.get_rank(), distributed.get_world_size(), local_rank)
    # Not after an error: the others may be in a collective in which this process has no part, and it would wait for
    # them. It just ends, and torchrun ends the others.
    distributed.destroy_process_group()


class Group(NamedTuple):
    """The processes that train together, seen from one of them."""

    rank: int
    size: int
    local_rank: int

    def say(self, text: str) -> None:
        """One line on the standard output, from one process."""
        if self.rank == 0:
            print(text, flush=True)

    def parallel(self, model: nn.Module) -> nn.Module:
        """What to train with instead of the model: its gradients are the means over all processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model)

    def batch_norm(self, device: torch.device) -> Callable[[int], nn.Module]:
        """The batch norm to build the model with: its statistics are those of the batches of all processes."""
        if self.size == 1:
            return nn.BatchNorm2d
        return SharedBatchNorm if device.type == "cpu" else nn.SyncBatchNorm

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sums over all processes."""
        if self.size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """What each process has, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def in_turns(self, function: Callable[[], T]) -> T:
        """Call a function that downloads: first in one process, then in one of each other machine, then in the rest."""
        turn = 0 if self.rank == 0 else 1 if self.local_rank == 0 else 2
        for _ in range(turn):
            self._wait()
        result = function()
        for _ in range(turn, 2):
            self._wait()
        return result

    def _wait(self) -> None:
        if self.size > 1:
            distributed.barrier()


class _Mean(torch.autograd.Function):
    """The mean over all processes, through which gradients flow back to each of them."""

    @staticmethod
    def forward(ctx: object, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - autograd's signature
        return _mean(values)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return _mean(gradients[0])


def _mean(values: torch.Tensor) -> torch.Tensor:
    values = values.contiguous().clone()
    distributed.all_reduce(values)
    return values / distributed.get_world_size()


class SharedBatchNorm(nn.BatchNorm2d):
    """What ``nn.SyncBatchNorm`` is, which knows accelerators only: for the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images, channels second, as many in each process."""
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        values = x.to(torch.promote_types(x.dtype, torch.float32))  # not in the narrow type of an autocast
        over = (0, 2, 3)
        moments = torch.stack([values.mean(over), values.square().mean(over)])
        mean, square = _Mean.apply(moments)
        variance = square - mean.square()
        with torch.no_grad():
            momentum = self.momentum or 0.0
            self.num_batches_tracked += 1
            count = x.numel() // x.shape[1] * distributed.get_world_size()
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * count / (count - 1), momentum)
        factor = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * factor
        y: torch.Tensor = values * factor[:, None, None] + shift[:, None, None]
        return y.to(x.dtype)
