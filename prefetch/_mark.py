"""When what happened to one batch, in detail: of few batches without ``profile=True``."""

from __future__ import annotations

import time

import torch

from prefetch._device import timed_event

clock = time.perf_counter_ns


class Mark:
    """One batch, in nanoseconds on the host's clock, and in events of the device where it has streams."""

    __slots__ = (
        "asked_ns",
        "bytes",
        "delivered_ns",
        "device",
        "is_typical",
        "issue_end_ns",
        "issue_start_ns",
        "load_end_ns",
        "load_start_ns",
        "pass_number",
        "position",
    )

    def __init__(self, pass_number: int, position: int, load_start_ns: int, load_end_ns: int) -> None:
        self.pass_number = pass_number
        self.position = position
        self.is_typical = True
        self.load_start_ns = load_start_ns
        self.load_end_ns = self.issue_start_ns = self.issue_end_ns = load_end_ns
        self.asked_ns = self.delivered_ns = 0
        self.bytes = 0
        self.device: DeviceMark | None = None

    def issue_begins(self, side: torch.Stream, spare: list[torch.Event]) -> None:
        """There is room for the batch on the device, whose events are taken from ``spare``."""
        self.issue_start_ns = clock()
        self.device = DeviceMark(side, spare)

    def issue_ends(self, copied: int) -> None:
        """All is queued for it, and so many bytes are copied."""
        self.issue_end_ns = clock()
        self.bytes = copied


class DeviceMark:
    """What happened to the batch on the device.

    Args:
        side: Where it is copied.
        spare: Events that nobody uses any more.
    """

    __slots__ = ("_consumer", "_side", "_spare", "copies", "step_end", "wait_end", "wait_start")

    def __init__(self, side: torch.Stream, spare: list[torch.Event]) -> None:
        self._side = side
        self._spare = spare
        self.copies: list[list[torch.Event]] = []
        self.step_end: torch.Event | None = None

    def resume(self) -> None:
        """What is queued on the side stream from here on is work on the batch."""
        self.copies.append([timed_event(self._side, self._spare)])

    def pause(self) -> torch.Event:
        """What is queued there next is not: a wait, or the next batch."""
        event = timed_event(self._side, self._spare)
        if self.copies and len(self.copies[-1]) == 1:
            self.copies[-1].append(event)
        return event

    def wait(self, consumer: torch.Stream, copied: torch.Event) -> None:
        """Let the consumer wait for the batch."""
        self._consumer = consumer
        self.wait_start = timed_event(consumer, self._spare)
        consumer.wait_event(copied)
        self.wait_end = timed_event(consumer, self._spare)

    def end_step(self, consumer: torch.Stream) -> None:
        """What is queued on the batch is queued, if all this time on one stream; else nobody knows where it is."""
        if consumer == self._consumer:
            self.step_end = timed_event(consumer, self._spare)
