"""The tasks agree with definitions of one line, and batches with their masks."""

import numpy as np
import pytest

from experiments.data.batching import first_steps
from experiments.length_tasks.tasks import NO_TARGET, PAD, TASKS, TaskBatches

ACTIONS = "01POI"  # bits, POP, PUSH 0, PUSH 1
LENGTHS = (1, 2, 3, 4, 7, 12, 40)


def draw(name: str, length: int, rows: int = 200):
  """Returns rows of inputs and outputs, as lists."""
  random = np.random.default_rng(length)
  inputs, outputs = TASKS[name].draw(random, rows, length)
  return inputs.tolist(), outputs.tolist()


def as_text(symbols, alphabet: str) -> str:
  return "".join(alphabet[symbol] for symbol in symbols)


def run_stack(symbols) -> list[int]:
  """Runs the actions one by one on a list."""
  stack = []
  for symbol in symbols:
    if symbol == 2:
      del stack[-1:]
    else:
      stack.append(symbol if symbol < 2 else symbol - 3)
  output = [*reversed(stack), 2]
  return output + [0] * (len(symbols) + 1 - len(output))


def find_omitted(symbols) -> list[int]:
  """Compares both halves; returns the bit of the half that has it."""
  half = len(symbols) // 2
  first, second = symbols[:half], symbols[half : 2 * half]
  pairs = [(x, y) for x, y in zip(first, second, strict=True) if x != y]
  assert len(pairs) == 1 and 2 in pairs[0]
  assert symbols[2 * half :] == [3] * (len(symbols) % 2)
  return [min(pairs[0])]


def calculate(symbols) -> list[int]:
  return [eval(as_text(symbols, "01234+-*")) % 5]


DEFINITIONS = dict(
  reverse_string=lambda symbols: symbols[::-1],
  bucket_sort=sorted,
  missing_duplicate=lambda symbols: [1] if symbols == [1] else find_omitted(symbols),
  modular_arithmetic=calculate,
  stack_manipulation=run_stack,
)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_outputs_follow_from_inputs(name, length):
  inputs, outputs = draw(name, length)
  for symbols, output in zip(inputs, outputs, strict=True):
    assert output == DEFINITIONS[name](symbols)


def test_the_examples_of_the_authors():
  # The docstrings of their code: the definitions above are theirs.
  assert calculate([1, 5, 2, 7, 3]) == [2]
  assert calculate([1, 6, 1, 6, 1]) == [4]
  assert calculate([0, 7, 1, 5, 4, 7, 3, 6, 2]) == [0]
  assert run_stack([0, 1, 1, 0, 4, 2, 2]) == [1, 1, 0, 2, 0, 0, 0, 0]
  assert run_stack([1, 1, 0, 2, 2, 2]) == [2, 0, 0, 0, 0, 0, 0]
  assert find_omitted([0, 1, 1, 0, 0, 2, 1, 0]) == [1]
  assert find_omitted([1, 0, 1, 1, 2, 1, 3]) == [0]


@pytest.mark.parametrize("name", TASKS)
def test_all_symbols_and_classes_occur(name):
  inputs, outputs = draw(name, 12)
  task = TASKS[name]
  drawn = {symbol for row in inputs for symbol in row}
  if name == "missing_duplicate":
    drawn |= {symbol for row in draw(name, 13)[0] for symbol in row}
  assert drawn == {*range(task.num_symbols)}
  assert {symbol for row in outputs for symbol in row} == {*range(task.num_classes)}


def test_stacks_have_each_number_of_bits():
  inputs, _ = draw("stack_manipulation", 4, rows=300)
  assert {sum(symbol < 2 for symbol in row) for row in inputs} == {1, 2, 3}


def test_an_even_length_of_arithmetic_is_one_less():
  inputs, _ = draw("modular_arithmetic", 12)
  assert {len(row) for row in inputs} == {11}


def make(name: str = "stack_manipulation", **options):
  values = dict(rows=6, num_shapes=2, drawn_from=0, seed=3)
  return TaskBatches(TASKS[name], range(1, 11), **(values | options))


@pytest.mark.parametrize("name", TASKS)
def test_blanks_follow_the_input_and_padding_them(name):
  task = TASKS[name]
  for step in range(20):
    batch = make(name)[step]
    blank = task.num_symbols + 1
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
      kinds = np.select([tokens == PAD, tokens == blank], [2, 1], 0)
      assert (np.diff(kinds) >= 0).all()
      np.testing.assert_array_equal(targets != NO_TARGET, kinds == 1)
      num_inputs, num_blanks = int(np.sum(kinds == 0)), np.sum(kinds == 1)
      assert num_blanks == (
        1 if task.has_one_answer else task.num_tokens(num_inputs) - num_inputs
      )


@pytest.mark.parametrize("name", TASKS)
def test_answers_count_up_to_the_end_of_a_stack(name):
  for step in range(20):
    batch = make(name)[step]
    for counts, targets in zip(batch.counts, batch.targets, strict=True):
      counted, answers = counts.nonzero()[0], (targets != NO_TARGET).nonzero()[0]
      if name != "stack_manipulation":
        assert counted.tolist() == answers.tolist()
      else:
        assert (targets[counted] == 2).tolist() == [False] * (len(counted) - 1) + [True]
        assert counted.tolist() == answers[: len(counted)].tolist()


def test_plain_positions_count_the_tokens():
  batch = make()[0]
  assert (batch.positions == np.arange(batch.positions.shape[1])).all()


def test_random_positions_increase_and_fill_the_range():
  batches = make(drawn_from=100)
  drawn = []
  for step in range(300):
    batch = batches[step]
    assert (batch.positions == batch.positions[0]).all()
    positions = batch.positions[0, batch.tokens[0] != PAD]
    assert (np.diff(positions) > 0).all()
    drawn.append(positions)
  assert len({positions[0] for positions in drawn}) > 20
  everything = np.concatenate(drawn)
  assert (everything.min(), everything.max()) == (0, 99)
  # A uniform sample: its mean is that of the range.
  assert abs(everything.mean() - 49.5) < 2


def test_a_sample_as_large_as_its_range_is_the_range():
  batch = make(drawn_from=21, seed=None)[9]
  assert batch.positions[0].tolist() == [*range(21)]


def test_seed_and_step_determine_a_batch():
  same, other = make()[5], make(seed=4)[5]
  for x, y in zip(same, make()[5], strict=True):
    np.testing.assert_array_equal(x, y)
  assert same.tokens.shape != other.tokens.shape or (same.tokens != other.tokens).any()


def test_batches_without_a_seed_take_the_lengths_in_turn():
  batches = make("reverse_string", seed=None)
  lengths = [np.sum(batches[step].targets[0] >= 0) for step in range(20)]
  assert lengths == 2 * [*range(1, 11)]


def test_rows_that_devices_need_are_padding():
  batch, padded = make()[5], make(padded_rows=8)[5]
  for x, y in zip(batch, padded, strict=True):
    assert y.shape[0] == 8
    np.testing.assert_array_equal(x, y[:6])
  assert (padded.positions[6:] == padded.positions[0]).all()
  assert (padded.tokens[6:] == PAD).all()
  assert (padded.targets[6:] == NO_TARGET).all()
  assert not padded.counts[6:].any()


def test_each_shape_has_its_first_step():
  batches = make("reverse_string")
  steps = first_steps(batches, 3, 1000)
  shapes = [batches[step].tokens.shape for step in steps]
  assert {*shapes} == batches.shapes == {(6, 10), (6, 20)}
  assert len(shapes) == 2
  for step in range(3, max(steps)):
    assert batches[step].tokens.shape in shapes
