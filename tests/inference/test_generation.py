import pytest
import torch

from selmodel.errors import UserError
from selmodel.inference.generation import generate, sample
from selmodel.model import ModelOutput


class Successor:
    """A "model" that is sure of the next id: the last one plus one, modulo 10."""

    context_length = 8

    def __call__(self, tokens):
        logits = torch.full((*tokens.shape, 10), -30.0)
        logits.scatter_(-1, ((tokens + 1) % 10)[..., None], 30.0)
        return ModelOutput(logits, None)


def test_greedy_continues_to_the_length_asked_for():
    assert generate(Successor(), torch.tensor([3, 4]), 3, temperature=0).tolist() == [3, 4, 5, 6, 7]


def test_generation_ends_at_eos_and_at_the_context():
    assert generate(Successor(), torch.tensor([3]), 6, temperature=0, eos_id=6).tolist() == [3, 4, 5]
    assert generate(Successor(), torch.tensor([0]), 100, temperature=0).tolist() == list(range(8))


def test_one_seed_gives_one_text():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    draws = [
        [sample(logits, 1.0, 1.0, generator).item() for _ in range(20)]
        for generator in (torch.Generator().manual_seed(2), torch.Generator().manual_seed(2))
    ]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 5


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    # probabilities 0.5, 0.3, 0.15, 0.05: 0.7 needs the first two, 0.5 the first alone
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    assert {sample(logits, 1.0, 0.7, generator).item() for _ in range(200)} == {1, 3}
    assert {sample(logits, 1.0, 0.5, generator).item() for _ in range(50)} == {1}
    assert {sample(logits, 1.0, 1.0, generator).item() for _ in range(500)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1.0}, "temperature=-1.0"), ({"top_p": 0.0}, "top_p=0.0"), ({"top_p": 1.5}, "top_p=1.5")],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        generate(Successor(), torch.tensor([1]), 1, **options)


def test_a_prompt_longer_than_the_context():
    with pytest.raises(UserError, match="prompt of 9 tokens"):
        generate(Successor(), torch.arange(9), 1)
