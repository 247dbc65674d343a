"""The tasks' examples, checked by solving them independently from their words."""

from __future__ import annotations

import numpy as np
import pytest

from selmodel.data.tasks import Copy, Parity, Task, TaskTokenizer, VariableAssignment, batch_of_examples
from selmodel.data.tokenizer import Tokenizer
from selmodel.errors import UserError

TASKS = (VariableAssignment(), VariableAssignment(2, 3, 1), Parity(), Copy(5))


def words(task: Task, length: int, seed: int) -> tuple[list[str], list[bool]]:
    symbols, is_answer = task.example(length, np.random.default_rng(seed))
    assert len(symbols) == len(is_answer) == task.n_symbols(length)
    return [task.symbols[i] for i in symbols], is_answer.tolist()


@pytest.mark.parametrize("length", [1, 2, 9, 40])
@pytest.mark.parametrize("seed", range(5))
def test_variable_assignment_asks_for_last_values(length, seed):
    task = VariableAssignment(n_names=3, n_values=4, n_queries=5)
    text, is_answer = words(task, length, seed)
    last = {}
    for name, value in zip(text[: 2 * length : 2], text[1 : 2 * length : 2], strict=True):
        assert name.startswith("x")
        last[name] = value
    questions = [text[i : i + 3] for i in range(2 * length, len(text), 3)]
    assert len(questions) == 5
    assert all(mark == "?" and last[name] == value for mark, name, value in questions)
    assert [i for i, answer in enumerate(is_answer) if answer] == [2 * length + 3 * i + 2 for i in range(5)]


def test_variable_assignment_uses_every_name_and_value():
    task = VariableAssignment(n_names=3, n_values=4, n_queries=2)
    text, _ = words(task, 200, 0)
    assert set(text) == set(task.symbols) == {"?", "x0", "x1", "x2", "0", "1", "2", "3"}


@pytest.mark.parametrize("length", [1, 7, 30])
def test_parity_follows_each_bit(length):
    text, is_answer = words(Parity(), length, 0)
    ones = 0
    for i in range(length):
        ones += text[2 * i] == "1"
        assert text[2 * i + 1] == ("odd" if ones % 2 else "even")
    assert is_answer == [False, True] * length


def test_copy_repeats_after_the_mark():
    text, is_answer = words(Copy(4), 6, 3)
    assert text[6] == "|"
    assert text[:6] == text[7:]
    assert is_answer == [False] * 7 + [True] * 6


@pytest.mark.parametrize("task", TASKS)
def test_tokenizer_has_a_token_per_symbol(task):
    tokenizer = TaskTokenizer().build(task)
    assert tokenizer.vocab_size == 3 + len(task.symbols)
    text = " ".join(task.symbols)
    assert tokenizer.encode(text).tolist() == list(range(3, tokenizer.vocab_size))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    again = Tokenizer.from_state(tokenizer.state())
    assert (again.hash, again.bos_id, again.eos_id) == (tokenizer.hash, 0, 1)


def test_tokenizer_refuses_other_data():
    with pytest.raises(UserError, match=r"tokenizer=task: .* expected tokenizer=sentencepiece"):
        TaskTokenizer().build(object())


def test_a_batch_is_filled_up_with_padding_that_never_counts():
    task = Parity()
    randoms = [np.random.default_rng(i) for i in range(3)]
    tokens, is_answer = batch_of_examples(task, [1, 3, 2], randoms, width=6)
    assert tokens.shape == (3, 7)
    assert is_answer.sum(1).tolist() == [1, 3, 2]
    tokenizer = TaskTokenizer().build(task)
    for row, length in zip(tokens, [1, 3, 2], strict=True):
        assert row[0] == tokenizer.bos_id
        rest = row[1 + 2 * length :].tolist()
        assert rest == ([tokenizer.eos_id] + [2] * (len(rest) - 1) if rest else [])
    # answers are the targets "even" and "odd", tokens 5 and 6
    assert set(tokens[:, 1:][is_answer]) <= {5, 6}


def test_fingerprint_follows_task_and_options():
    prints = {task.describe()["fingerprint"] for task in TASKS}
    assert len(prints) == len(TASKS)
    assert VariableAssignment().describe() == VariableAssignment(8, 16, 4).describe()


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: VariableAssignment(n_names=0), "data.source.n_names=0"),
        (lambda: VariableAssignment(n_values=1), "data.source.n_values=1"),
        (lambda: VariableAssignment(n_queries=0), "data.source.n_queries=0"),
        (lambda: Copy(1), "data.source.n_symbol_kinds=1"),
    ],
)
def test_options_out_of_range(make, option):
    with pytest.raises(UserError, match=option):
        make()
