"""torchdata's nodes: a pipeline's state is that of the batches delivered."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("torchdata.nodes")

from torch.utils.data import RandomSampler
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

from prefetch import CUDAPrefetcher

pytestmark = pytest.mark.integration

COUNT = 10
BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def double(number: int) -> int:
    """What the pipeline does with each sample, and undoes."""
    return 2 * number // 2


def pinned(numbers: list[int]) -> torch.Tensor:
    """A batch; torchdata's PinMemory is for CUDA only, and raises where there is none."""
    return torch.tensor(numbers).pin_memory()


def pipeline() -> Any:
    """Numbers in batches of four, made by threads and pinned."""
    node: Any = ParallelMapper(IterableWrapper(range(COUNT)), double, num_workers=2, method="thread")
    return Loader(Prefetcher(Mapper(Batcher(node, batch_size=4, drop_last=False), pinned), 2))


CASES = pytest.mark.parametrize(("device", "background"), [("cpu", None), ("cpu", True), ("sim", None), ("sim", True)])


@CASES
def test_epochs(sim: ModuleType, device: str, background: bool | None) -> None:
    """Each pass has all batches, and there is no length."""
    batches = CUDAPrefetcher(pipeline(), device, background=background)
    for _ in range(3):
        assert [batch.tolist() for batch in batches] == BATCHES
    with pytest.raises(TypeError, match="has no len"):
        len(batches)


@CASES
@pytest.mark.parametrize("delivered", [0, 1, 2])
def test_resume(sim: ModuleType, device: str, background: bool | None, delivered: int) -> None:
    """A pipeline that is given the state goes on with the rest, whatever was looked ahead, and then begins anew."""
    batches = CUDAPrefetcher(pipeline(), device, background=background)
    iterator = iter(batches)
    for expected in BATCHES[:delivered]:
        assert next(iterator).tolist() == expected
    state = batches.state_dict()
    iterator.close()
    resumed = CUDAPrefetcher(pipeline(), device, background=background)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == BATCHES[delivered:]
    assert [batch.tolist() for batch in resumed] == BATCHES


@pytest.mark.parametrize("background", [False, True])
def test_resume_of_a_shuffled_pass(sim: ModuleType, background: bool) -> None:
    """The rest of a shuffled pass is the rest of the same order."""

    def shuffled() -> CUDAPrefetcher[Any]:
        sampler = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(0))
        node = Mapper(Batcher(SamplerWrapper(sampler), batch_size=4, drop_last=False), pinned)
        return CUDAPrefetcher(Loader(node), "sim", background=background)

    whole = [batch.tolist() for batch in shuffled()]
    batches = shuffled()
    first = next(iter(batches)).tolist()
    resumed = shuffled()
    resumed.load_state_dict(batches.state_dict())
    assert [first, *(batch.tolist() for batch in resumed)] == whole
