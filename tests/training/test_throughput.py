import torch

from selmodel.training.throughput import StepTimer, peak_flops, peak_memory_gib


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_time_is_split_by_part_and_pauses_do_not_count():
    clock = Clock()
    timer = StepTimer(clock)
    timer.start()
    for _ in range(2):
        for part, seconds in (("data", 1.0), ("forward_backward", 3.0), ("optimizer", 0.5)):
            clock.now += seconds
            timer.mark(part)
        timer.step(900)
        timer.pause()
        clock.now += 100.0  # a validation
        timer.start()
    figures = timer.take()
    # two steps of 4.5 s over 900 tokens each: 1800 tokens in 9 s
    assert figures == {
        "throughput/tokens_per_second": 200.0,
        "throughput/step_seconds": 4.5,
        "throughput/data_seconds": 1.0,
        "throughput/forward_backward_seconds": 3.0,
        "throughput/optimizer_seconds": 0.5,
    }
    assert timer.take() == {}
    assert timer.tokens_per_second == 200.0


def test_an_unknown_device_has_no_peak():
    assert peak_flops(torch.device("cpu")) is None


def test_peak_memory_counts_what_was_touched():
    before = peak_memory_gib(torch.device("cpu"))
    block = torch.ones(int((before + 0.25) * 2**30) // 4)
    assert peak_memory_gib(torch.device("cpu")) >= block.numel() * 4 / 2**30
