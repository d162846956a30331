"""What a run of ``cifar10.py`` measures, and the plot of it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cifar10_distributed import Group
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


@dataclass
class Result:
    """What a run measured; accuracies are fractions."""

    losses: list[float] = field(default_factory=list)  # one a step
    accuracies: list[float] = field(default_factory=list)  # one an epoch, on the test set
    images_per_s: list[float] = field(default_factory=list)  # one an epoch, while training
    epoch_s: float = 0.0  # what the epoch under way has taken

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what another one was."""
        self.__init__(**state)  # type: ignore[misc]


class Recorder:
    """Enters into a result what the steps give.

    Losses stay on the device until then. To read one is to wait until the device has done all that was asked of it; in
    every step, that would leave it idle while the host asks for the next.

    Args:
        result: What is filled; it may have losses already.
        device: Where the losses are.
        group: The processes that train together: a loss is the mean of theirs.
    """

    def __init__(self, result: Result, device: torch.device, group: Group) -> None:
        self._result, self._device, self._group = result, device, group
        self._losses: list[torch.Tensor] = []
        self.start()

    @property
    def steps(self) -> int:
        """Since the beginning of the run."""
        return len(self._result.losses) + len(self._losses)

    def start(self) -> None:
        """The clock runs from now on."""
        self._begin = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        """That of one step, of the batch of this process."""
        self._losses.append(loss)

    def settle(self) -> None:
        """Read what was added since the last time."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # the host is ahead: a step ends when the device has ended it
        now = time.perf_counter()
        self._result.epoch_s += now - self._begin
        self._begin = now
        if self._losses:
            self._result.losses += (self._group.total(torch.stack(self._losses)) / self._group.size).tolist()
            self._losses.clear()

    def end_epoch(self, images: int) -> None:
        """Read, and count what the processes together had in this epoch."""
        self.settle()
        self._result.images_per_s.append(images / self._result.epoch_s)
        self._result.epoch_s = 0.0


def plot(result: Result, title: str, chance: float, path: Path) -> None:
    """Draw loss, accuracy and throughput."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    figure.suptitle(title, fontsize="medium", wrap=True)
    loss, accuracy, throughput = figure.subplots(1, 3)

    loss.plot(range(1, len(result.losses) + 1), result.losses, linewidth=1)
    loss.set(title="Training loss", xlabel="step", ylabel="cross-entropy (nats)", ylim=(0, None))

    epochs = range(1, len(result.accuracies) + 1)
    accuracy.plot(epochs, [100 * value for value in result.accuracies], marker="o", clip_on=False)
    accuracy.axhline(100 * chance, color="gray", linestyle="--")
    beside_the_axis = accuracy.get_yaxis_transform()  # x from 0 to 1, y in %
    accuracy.text(0.98, 100 * chance + 1, "guessing", ha="right", va="bottom", color="gray", transform=beside_the_axis)
    accuracy.set(title="Test accuracy", xlabel="epoch", ylabel="right answers (%)", ylim=(0, 100))

    top = 1.1 * max(result.images_per_s)
    throughput.plot(epochs, result.images_per_s, marker="o")
    throughput.set(title="Training throughput", xlabel="epoch", ylabel="images/s", ylim=(0, top))

    for axes in (loss, accuracy, throughput):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    figure.savefig(path, format="png", dpi=150)
