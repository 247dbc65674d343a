"""Where the time of a step goes, tokens per second, and the share of a device's peak arithmetic (MFU)."""

from __future__ import annotations

import resource
import sys
import time

import torch

# Dense bf16 peak in FLOP/s by the name torch reports (vendors' data sheets, without sparsity). A device that is
# not listed gets no MFU, rather than a wrong one.
_PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "B200": 2250e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a CUDA device in FLOP/s, or None when it is not known (every CPU, for one)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    matches = [key for key in _PEAK_FLOPS if key in name]
    return _PEAK_FLOPS[max(matches, key=len)] if matches else None


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: allocated on a CUDA device, resident in this process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # ru_maxrss counts KiB on Linux and bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


class StepTimer:
    """Splits training time into data, forward/backward and optimizer, between two log lines.

    The caller marks the moments; ``pause`` takes validation, checkpoints and logging out of the count. All times
    are wall-clock seconds.
    """

    PARTS = ("data", "forward_backward", "optimizer")

    def __init__(self, clock=time.perf_counter) -> None:
        self._clock = clock
        self._last: float | None = None
        self._seconds = dict.fromkeys(self.PARTS, 0.0)
        self._steps = 0
        self._tokens = 0
        self._all_seconds = 0.0
        self._all_tokens = 0

    def start(self) -> None:
        """Start or go on counting from now."""
        self._last = self._clock()

    def pause(self) -> None:
        """Stop counting until ``start``."""
        self._last = None

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to ``part``."""
        now = self._clock()
        if self._last is not None:
            self._seconds[part] += now - self._last
        self._last = now

    def step(self, tokens: int) -> None:
        """One optimizer step over ``tokens`` target tokens (of all processes) is done."""
        self._steps += 1
        self._tokens += tokens

    def take(self) -> dict[str, float]:
        """Figures since the last call: tokens per second and seconds per step by part; empty before a step."""
        seconds = sum(self._seconds.values())
        figures = {}
        if self._steps and seconds > 0:
            figures["throughput/tokens_per_second"] = self._tokens / seconds
            figures["throughput/step_seconds"] = seconds / self._steps
            figures |= {f"throughput/{part}_seconds": self._seconds[part] / self._steps for part in self.PARTS}
        self._all_seconds += seconds
        self._all_tokens += self._tokens
        self._seconds = dict.fromkeys(self.PARTS, 0.0)
        self._steps = self._tokens = 0
        return figures

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all that ``take`` has returned; None before a step."""
        return self._all_tokens / self._all_seconds if self._all_seconds else None
