import math

import pytest
import torch

from selmodel.evaluation.perplexity import ValidationSums


def test_figures_by_hand():
    # Two sequences of two targets: losses ln 2, ln 4 | ln 2, not counted. Sum 4 ln 2 over 3 tokens; 4 bits over 5
    # bytes. By position: ln 2, and ln 4 (one token).
    sums = ValidationSums(2)
    losses = torch.tensor([[math.log(2), math.log(4)], [math.log(2), 99.0]])
    counted = torch.tensor([[True, True], [True, False]])
    sums.update(losses, counted, torch.tensor([[3, 1], [1, 50]]))
    result = sums.result()
    assert result.loss == pytest.approx(4 * math.log(2) / 3, rel=1e-7)  # the inputs are float32
    assert result.perplexity == pytest.approx(2 ** (4 / 3), rel=1e-7)
    assert result.bits_per_byte == pytest.approx(4 / 5, rel=1e-7)
    assert (result.tokens, result.bytes, result.sequences) == (3, 5, 2)
    assert result.loss_by_position == pytest.approx([math.log(2), math.log(4)], rel=1e-7)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_figures_do_not_depend_on_batches_or_padding(batch_size):
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(7, 5, generator=generator)
    n_bytes = torch.randint(0, 9, (7, 5), generator=generator)
    whole = ValidationSums(5)
    whole.update(losses, torch.ones(7, 5, dtype=torch.bool), n_bytes)
    parts = ValidationSums(5)
    for start in range(0, 7, batch_size):
        rows = slice(start, start + batch_size)
        padding = batch_size - len(losses[rows])
        counted = torch.cat([torch.ones(len(losses[rows]), 5), torch.zeros(padding, 5)]).bool()
        parts.update(
            torch.cat([losses[rows], torch.full((padding, 5), math.nan)]),
            counted,
            torch.cat([n_bytes[rows], torch.full((padding, 5), 100)]),
        )
    # float64 sums of float32 values with 24-bit mantissas are exact here, whatever their order
    assert parts.result() == whole.result()


def test_nothing_counted_is_an_error():
    with pytest.raises(ValueError, match="no target"):
        ValidationSums(3).result()


def test_without_bytes_bits_per_byte_is_not_a_number():
    sums = ValidationSums(1)
    sums.update(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), None)
    assert math.isnan(sums.result().bits_per_byte)
