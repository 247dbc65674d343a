"""The definition: S, F, M and the memory loss on numbers worked by hand, and the facts that PAPER lists."""

from __future__ import annotations

import math

import pytest
import torch

from selmodel.attention.selection import (
    accumulate,
    attended_pairs,
    document_starts,
    memory_loss,
    memory_term,
    selection_scores,
    selection_statistics,
)

# Causal logits of a selection head, n = 4. The values above the diagonal must not matter.
LOGITS = torch.tensor(
    [
        [5.0, 9.0, 9.0, 9.0],
        [3.0, 7.0, 9.0, 9.0],
        [2.0, 0.5, 1.0, 9.0],
        [4.0, 0.25, -2.0, 6.0],
    ]
)[None]

# Strictly below the diagonal, without column 0, negatives cut to 0:
SCORES = torch.tensor(
    [
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.5, 0.0, 0.0],
        [0.0, 0.25, 0.0, 0.0],
    ]
)[None]


def random_scores(n=12, seed=0):
    logits = torch.randn(2, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return selection_scores(logits)


def test_scores_by_hand():
    torch.testing.assert_close(selection_scores(LOGITS), SCORES, rtol=0, atol=0)


def test_scores_ignore_what_is_above_the_diagonal():
    """Also where it is -inf (masked logits) or NaN."""
    for filler in (-math.inf, math.inf, math.nan):
        logits = LOGITS.masked_fill(torch.ones(4, 4).triu(1).bool(), filler)
        assert torch.equal(selection_scores(logits), SCORES)


def test_scores_between_documents_are_zero_and_first_tokens_are_never_masked():
    """Documents of 2 and 3 tokens, every logit 1: only key 3 can be masked, by query 4.

    Key 1 could be masked by query 2 and later, which are of another document; key 2 is the first of its own.
    """
    scores = selection_scores(torch.ones(1, 5, 5), torch.tensor([[7, 7, 8, 8, 8]]))
    expected = torch.zeros(1, 5, 5)
    expected[0, 4, 3] = 1.0
    assert torch.equal(scores, expected)


def test_scores_of_a_block_of_queries_are_rows_of_the_whole():
    logits = torch.randn(2, 9, 9, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 2]])
    for documents in (None, ids):
        whole = selection_scores(logits, documents)
        assert torch.equal(selection_scores(logits[:, 4:7, :7], documents, first_query=4), whole[:, 4:7, :7])


def test_accumulate_by_hand():
    """Row i is the sum of the rows of S above it: the vote of query 2 (0.5) acts from query 3 on."""
    F = accumulate(SCORES)
    expected = torch.zeros(1, 4, 4)
    expected[0, 3, 1] = 0.5  # the 0.25 of query 3 would act on query 4
    assert torch.equal(F, expected)
    assert torch.equal(accumulate(torch.ones(1, 3, 1))[0, :, 0], torch.tensor([0.0, 1.0, 2.0]))


def test_zeros_of_F():
    """F[i,0] = F[i,i] = F[i+1,i] = 0, and nothing above the diagonal."""
    F = accumulate(random_scores())
    assert (F[:, :, 0] == 0).all()
    for offset in (0, 1):
        assert (F.diagonal(-offset, dim1=-2, dim2=-1) == 0).all()
    assert (F.triu() == 0).all()


def test_F_grows_down_each_column_and_acts_two_queries_later():
    S = random_scores()
    F = accumulate(S)
    assert (F.diff(dim=-2) >= 0).all()
    # The first query that can mask key j is j + 1, and its vote is seen by query j + 2: F[j+2,j] = S[j+1,j].
    assert torch.equal(F.diagonal(-2, dim1=-2, dim2=-1), S.diagonal(-1, dim1=-2, dim2=-1)[:, :-1])
    assert (F.diagonal(-2, dim1=-2, dim2=-1) > 0).any()


def test_later_queries_do_not_change_earlier_rows_of_F():
    logits = torch.randn(1, 10, 10, generator=torch.Generator().manual_seed(2))
    changed = logits.clone()
    changed[:, 6] += 5.0  # query 6 and key 6
    changed[:, :, 6] += 5.0
    before, after = accumulate(selection_scores(logits)), accumulate(selection_scores(changed))
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_F_is_accumulated_in_float32(dtype):
    """A sum of 512 ones is 512, and every partial sum on the way is exact.

    A sum kept in bfloat16 sticks at 256; one that is only stored in bfloat16 has no 257.
    """
    F = accumulate(torch.ones(1, 513, 1, dtype=dtype))
    assert F.dtype == torch.float32
    assert torch.equal(F[0, :, 0], torch.arange(513, dtype=torch.float32))


def test_F_of_float64_stays_float64():
    assert accumulate(torch.ones(1, 2, 2, dtype=torch.float64)).dtype == torch.float64


def test_infinite_votes_stay_infinite_and_make_no_nan():
    F = accumulate(torch.tensor([[[0.0], [math.inf], [1.0], [0.0]]]))
    assert F[0, :, 0].tolist() == [0.0, 0.0, math.inf, math.inf]


# Row i of F, keys 0..3, for the memory term:
MEMORY_F = torch.tensor(
    [
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.5, 0.0, 0.0],
        [0.0, 3.0, 0.25, 0.0],
    ]
)[None]


def test_memory_term_by_hand():
    """tau = 1: 1, 2, 3 - 0.5, 4 - (1 + 0.25).  tau = 2: 1, 2, 3 - 0.5/2, 4 - (2 + 0.25)/2."""
    assert memory_term(MEMORY_F, 1.0).tolist() == [[1.0, 2.0, 2.5, 2.75]]
    assert memory_term(MEMORY_F, 2.0).tolist() == [[1.0, 2.0, 2.75, 2.875]]


def test_memory_term_of_documents_counts_the_own_document_alone():
    """Documents of 1 and 3 tokens; keys 1, 2, 3 are the second document's.

    M = 1 | 1, 2 - 0.5, 3 - (1 + 0.25): F[2,1] = 0.5, then F[3,1] = 3, cut to 1, and F[3,2] = 0.25.
    """
    assert memory_term(MEMORY_F, 1.0, torch.tensor([[0, 1, 1, 1]])).tolist() == [[1.0, 1.0, 1.5, 1.75]]


def test_memory_loss_by_hand():
    """Two layers, one sequence of 4: max M = 2.75 and 4, so (2.75 + 4) / (2 layers * 4 tokens) = 0.84375.

    Without the division by n_layers it would be 1.6875, which a replication once trained against.
    """
    memory = torch.tensor([[[1.0, 2.0, 2.5, 2.75]], [[1.0, 2.0, 3.0, 4.0]]])
    assert memory_loss(memory).item() == 0.84375
    assert memory_loss(memory, torch.ones(1, 4, dtype=torch.bool)).item() == 0.84375


def test_memory_loss_leaves_padding_out_of_maximum_and_count():
    """Sequence 0: tokens 0..2, maxima 2.5 and 3 -> 5.5 / (2 * 3) = 11/12. Sequence 1: 4 and 2 -> 6 / (2 * 4) = 3/4.

    Their mean is (11/12 + 9/12) / 2 = 5/6. A sequence of padding alone changes nothing.
    """
    memory = torch.tensor(
        [
            [[1.0, 2.0, 2.5, 2.75], [1.0, 2.0, 3.0, 4.0], [9.0, 9.0, 9.0, 9.0]],
            [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 2.0, 2.0], [9.0, 9.0, 9.0, 9.0]],
        ]
    )
    nonpad = torch.tensor([[True, True, True, False], [True] * 4, [False] * 4])
    torch.testing.assert_close(memory_loss(memory, nonpad).item(), 5 / 6, rtol=1e-6, atol=0)
    assert memory_loss(memory[:, :2], nonpad[:2]).item() == memory_loss(memory, nonpad).item()
    assert memory_loss(memory[:, 2:], nonpad[2:]).item() == 0.0


def test_memory_loss_of_nothing_masked_is_one_and_does_not_depend_on_depth():
    """M[l,i] = i + 1 in every layer: n_layers * n / (n_layers * n) = 1."""
    for n_layers in (1, 3, 12):
        memory = torch.arange(1.0, 9.0).expand(n_layers, 2, 8)
        assert memory_loss(memory).item() == 1.0


def test_statistics_by_hand():
    """One head, d = 1, q = 1 and k = 1, n = 4: S = 1 for every maskable pair.

    F[2,1] = 0 (queries 2 and later vote, and act one query later), F[3,1] = 1 (the vote of query 2), rest 0.
    With q[2] = 3 that vote is 3: mean of F over the 4*5/2 = 10 causal pairs is 0.3, one pair of ten has F > 1,
    M = 1, 2, 3, 4 - 1, so M / (i + 1) has the mean (1 + 1 + 1 + 3/4) / 4 = 0.9375.
    """
    q = torch.tensor([1.0, 1.0, 3.0, 1.0])[None, :, None]
    k = torch.ones(1, 4, 1)
    mean_F, above_1, memory_share, live_share = selection_statistics(q, k)
    assert mean_F.item() == pytest.approx(0.3)
    assert above_1.item() == pytest.approx(0.1)
    assert memory_share.item() == pytest.approx(0.9375)
    assert live_share == 1
    # F[3,1] = 3 alone reaches a threshold of 3, and of 2; 4 is out of reach.
    for threshold, dead in ((2.0, 0.1), (3.0, 0.1), (4.0, 0.0)):
        live_share = selection_statistics(q, k, thresholds=torch.full((1, 4), threshold)).live_share
        assert live_share.item() == pytest.approx(1 - dead)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("block", [1, 4, 7, 64])
def test_statistics_equal_those_of_the_whole_F(documents, block):
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 21, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = torch.tensor([[0] * 5 + [1] * 9 + [2] * 7, [0] * 1 + [1] * 19 + [5]]) if documents else None
    F = accumulate(selection_scores(q @ k.mT / 8**0.5, ids))
    pairs = attended_pairs(21, 21, ids).expand(2, 21, 21)
    memory_share = memory_term(F, 0.7, ids) / pairs.sum(-1)
    thresholds = torch.rand(2, 21, generator=generator, dtype=torch.float64) + 0.5
    live = thresholds[:, None] > F
    expected = (F[pairs].mean(), (F[pairs] > 1).double().mean(), memory_share.mean(), live[pairs].double().mean())
    actual = selection_statistics(q, k, ids, tau=0.7, thresholds=thresholds, block=block)
    torch.testing.assert_close(tuple(actual), expected)
    assert 0.1 < actual.live_share < 0.9


def test_statistics_keep_no_graph_and_take_half_types():
    q = torch.ones(1, 300, 2, dtype=torch.bfloat16, requires_grad=True)
    mean_F = selection_statistics(q, q).mean_F
    assert mean_F.dtype == torch.float32
    assert not mean_F.requires_grad
    # S = 2/sqrt(2) for each of the i - 1 - j votes on key j >= 1; the sum over 1 <= j <= i - 2 of (i - 1 - j)
    # is C(i - 1, 2), and over i <= 299 that is C(299, 3).
    expected = math.comb(299, 3) * 2**0.5 / (300 * 301 / 2)
    assert mean_F.item() == pytest.approx(expected, rel=1e-5)  # float32 sums


def test_document_starts():
    starts = document_starts(torch.tensor([[4, 4, 5, 6, 6]]))
    assert starts.tolist() == [[True, False, True, True, False]]


def test_attended_pairs_by_hand():
    assert attended_pairs(2, 3, first_query=1).tolist() == [[True, True, False], [True, True, True]]
    pairs = attended_pairs(3, 3, torch.tensor([[0, 0, 1]]))
    assert pairs.tolist() == [[[True, False, False], [True, True, False], [False, False, True]]]
