"""How many heads of standard attention reach the loss of a selective model: interpolation with its uncertainty."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """A number of heads, or on which side of what was measured it lies.

    Attributes:
        heads: interpolated; infinity above the most heads measured, 0 below the fewest.
        most, fewest: heads of standard models measured.
    """

    heads: float
    fewest: int
    most: int

    def __str__(self) -> str:
        if self.heads == math.inf:
            return f">{self.most}"
        if self.heads == 0:
            return f"<{self.fewest}"
        return f"{self.heads:.2g}" if self.heads < 10 else f"{self.heads:.0f}"


def equivalent_heads(losses: Mapping[int, float], loss: float) -> Equivalent:
    """The number of standard heads at which the loss is ``loss``.

    Args:
        losses: of standard models by their number of heads, nats per token; at least one.
        loss: of the selective model.

    Between two measured numbers of heads the loss is taken to be linear in the logarithm of heads. Where the curve
    passes ``loss`` several times (noise), the fewest heads count. Nothing is extrapolated.
    """
    heads = sorted(losses)
    side = (heads[0], heads[-1])
    if loss > losses[heads[0]]:
        return Equivalent(0.0, *side)
    for low, high in itertools.pairwise(heads):
        upper, lower = losses[low], losses[high]
        if upper >= loss > lower or loss == upper:
            share = 0.0 if upper == lower else (upper - loss) / (upper - lower)
            return Equivalent(2 ** (math.log2(low) + share * (math.log2(high) - math.log2(low))), *side)
    return Equivalent(float(heads[-1]) if loss == losses[heads[-1]] else math.inf, *side)


def equivalent_range(
    losses: Mapping[int, Sequence[float]], selective: Sequence[float]
) -> tuple[Equivalent, Equivalent, Equivalent]:
    """(of the means, least, most) equivalent heads over seeds.

    Args:
        losses: of standard models by heads, one for each seed.
        selective: losses of one number of selective heads, one for each seed.

    Least and most are over the standard curve shifted to its lowest and highest seed at every number of heads, against
    the highest and lowest selective seed: all that the seeds at hand allow.
    """
    mean = equivalent_heads({heads: _mean(values) for heads, values in losses.items()}, _mean(selective))
    least = equivalent_heads({heads: min(values) for heads, values in losses.items()}, max(selective))
    most = equivalent_heads({heads: max(values) for heads, values in losses.items()}, min(selective))
    return mean, least, most


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
