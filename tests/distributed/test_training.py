"""Two processes train as one would."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
pytest.importorskip("torchdata")

from tests.distributed.launch import notes, run

STEPS = 5  # of an epoch: 111 images in full batches of 20


class Run(NamedTuple):
    """What there is of a training that has ended."""

    folder: Path
    ended: subprocess.CompletedProcess[str]


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """The same training by one process and by two, in float64: what rounding leaves of a difference is then tiny."""
    runs = []
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp("run")
        options = ("--epochs", 2, "--seed", 3, "--checkpoint", folder / "checkpoint")
        runs.append(Run(folder, run(folder, processes, *options, DOUBLE="1")))
        assert (runs[-1].ended.returncode, runs[-1].ended.stderr) == (0, "")
    return runs


def test_same_losses_and_accuracies(runs: list[Run]) -> None:
    """Losses are means over the processes, and accuracies are of the whole test set, in each process."""
    one = notes(runs[0].folder)
    assert len(one["losses"]) == 2 * STEPS
    for rank in (0, 1):
        of_rank = notes(runs[1].folder, rank)
        assert one["losses"] == pytest.approx(of_rank["losses"], rel=1e-9)
        assert one["accuracies"] == of_rank["accuracies"]


def test_same_weights(runs: list[Run]) -> None:
    """So are, in the end, the weights, the statistics of the batch norm, and the optimizer's momentum."""
    one, two = (torch.load(folder / "checkpoint", weights_only=True)["parts"] for folder, _ in runs)
    assert len(one["model"]) > 50
    torch.testing.assert_close(two["model"], one["model"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(two["optimizer"]["state"], one["optimizer"]["state"], rtol=1e-9, atol=1e-12)


def test_batches_are_shared(runs: list[Run]) -> None:
    """Each process has half of every batch that the single process has, and together they have all of it."""
    whole = notes(runs[0].folder)["batches"]
    halves = [notes(runs[1].folder, rank)["batches"] for rank in (0, 1)]
    assert {len(half) for half in (*halves[0], *halves[1])} == {10}
    assert [sorted(batch) for batch in whole] == [sorted(a + b) for a, b in zip(*halves, strict=True)]


def test_the_test_set_is_shared(runs: list[Run]) -> None:
    """Each of its 21 images is looked at once an epoch, by one of the processes."""
    tested = [notes(runs[1].folder, rank)["tested"] for rank in (0, 1)]
    assert sorted(tested[0] + tested[1]) == sorted([*range(21)] * 2)
    assert [len(of_rank) for of_rank in tested] == [2 * 11, 2 * 10]


def test_each_epoch_has_an_order_of_its_own(runs: list[Run]) -> None:
    """The number of the epoch reaches the sampler through the prefetcher."""
    for rank in (0, 1):
        batches = notes(runs[1].folder, rank)["batches"]
        first, second = ([*itertools.chain(*epoch)] for epoch in (batches[:STEPS], batches[STEPS:]))
        assert len(first) == len(set(first)) == len(second) == len(set(second)) == 10 * STEPS
        assert first != second


def test_one_process_reports(runs: list[Run]) -> None:
    """The lines are those of a single process, once, and so is the plot."""
    one, two = ([line.split(", accuracy")[0] for line in ended.stdout.splitlines()] for _, ended in runs)
    assert one[1] == "device: cpu, with CUDAPrefetcher"
    assert two[1] == "device: 2 of type cpu, with CUDAPrefetcher"
    assert [*one[:1], *one[2:-2], one[-1]] == [*two[:1], *two[2:-2], two[-1]]
    assert [notes(runs[1].folder, rank)["plots"] for rank in (0, 1)] == [[str(runs[1].folder / "plot.png")], []]
