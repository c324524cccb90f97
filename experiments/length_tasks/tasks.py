"""Generates five of the fifteen tasks of Ruoss et al. 2023, and batches of them.

Their inputs, outputs and symbols are those of the authors' code (github.com/
google-deepmind/randomized_positional_encodings). A model reads the input, then a blank
for each symbol of the output, and answers at the blanks.
"""

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np

from experiments.data.batching import round_up
from relpos_jax.typing import Array, Bool, Int

PAD = 0  # among tokens: input symbols are counted from 1
NO_TARGET = -1  # at the input and at padding: classes are counted from 0
MODULUS = 5
PLUS, MINUS, TIMES = 5, 6, 7  # after the digits 0 to 4
POP = 2  # PUSH 0 and PUSH 1 are 3 and 4; 0 and 1 are the bits of the initial stack
END_OF_STACK = 2
OMITTED, FILLER = 2, 3  # after the bits 0 and 1

_TEST_SEED = 2**32  # config.seed is below

# The inputs and outputs of B examples.
Example = tuple[Int[np.ndarray, "B n"], Int[np.ndarray, "B m"]]


def reverse_string(random: np.random.Generator, rows: int, length: int) -> Example:
  """Draws strings of bits; the output is the reversed string."""
  bits = random.integers(0, 2, (rows, length))
  return bits, bits[:, ::-1]


def bucket_sort(random: np.random.Generator, rows: int, length: int) -> Example:
  """Draws strings over five symbols; the output is the sorted string."""
  symbols = random.integers(0, 5, (rows, length))
  return symbols, np.sort(symbols)


def missing_duplicate(random: np.random.Generator, rows: int, length: int) -> Example:
  """Draws bit strings, each written twice, and omits a bit; the output is that bit.

  OMITTED takes the place of the bit. FILLER ends inputs of odd length. An input of
  length 1 is a 1, and so is its output.
  """
  if length == 1:
    ones = np.ones((rows, 1), int)
    return ones, ones
  bits = random.integers(0, 2, (rows, length // 2))
  twice = np.concatenate([bits, bits], axis=1)
  place = random.integers(0, twice.shape[1], (rows, 1))
  answers = np.take_along_axis(twice, place, axis=1)
  np.put_along_axis(twice, place, OMITTED, axis=1)
  fillers = np.full((rows, length % 2), FILLER)
  return np.concatenate([twice, fillers], axis=1), answers


def modular_arithmetic(random: np.random.Generator, rows: int, length: int) -> Example:
  """Draws sums, differences and products; the output is the result modulo 5.

  Products are computed first. Digits and operators alternate, so inputs are one symbol
  shorter if `length` is even.
  """
  num_operators = (length - 1) // 2
  symbols = np.empty((rows, 2 * num_operators + 1), int)
  symbols[:, ::2] = random.integers(0, MODULUS, (rows, num_operators + 1))
  symbols[:, 1::2] = random.integers(PLUS, TIMES + 1, (rows, num_operators))
  total = np.zeros(rows, int)
  term = symbols[:, 0]
  for place in range(1, symbols.shape[1], 2):
    sign, digit = symbols[:, place], symbols[:, place + 1]
    is_product = sign == TIMES
    next_term = np.where(sign == MINUS, -digit, digit)
    total = np.where(is_product, total, total + term)
    term = np.where(is_product, term * digit, next_term) % MODULUS
  answers = (total + term) % MODULUS
  return symbols, answers[:, None]


def stack_manipulation(random: np.random.Generator, rows: int, length: int) -> Example:
  """Draws stacks of bits and actions on them; the output is the resulting stack.

  The input is the stack from the bottom, then actions, each POP, PUSH 0 or PUSH 1. POP
  leaves an empty stack unchanged. The output is the stack from the top, END_OF_STACK,
  and zeros up to a fixed length.
  """
  num_bits = random.integers(1, max(length, 2), (rows, 1))
  bits = random.integers(0, 2, (rows, length))
  actions = random.integers(POP, POP + 3, (rows, length))
  symbols = np.where(np.arange(length) < num_bits, bits, actions)
  stack = np.zeros((rows, length + 1), int)
  height = np.zeros(rows, int)
  each_row = np.arange(rows)
  for symbol in symbols.T:
    is_pop = symbol == POP
    # What is written above the top after POP is written over, or never read.
    stack[each_row, height] = np.where(symbol < POP, symbol, symbol - POP - 1)
    height = np.where(is_pop, np.maximum(height - 1, 0), height + 1)
  from_top = height[:, None] - 1 - np.arange(length + 1)
  popped = np.take_along_axis(stack, np.maximum(from_top, 0), axis=1)
  below = np.where(from_top == -1, END_OF_STACK, 0)
  return symbols, np.where(from_top >= 0, popped, below)


class Task(NamedTuple):
  """Describes a task.

  Attributes:
    draw: `draw(random, rows, length)` draws inputs of a length, with their outputs.
    num_symbols: the number of input symbols.
    num_classes: the number of output symbols.
    has_one_answer: whether the output is one symbol. Otherwise it is as long as the
      input, not counting `last`.
    last: the symbol that ends the output; later symbols do not count for the accuracy.
      None if all symbols count.
  """

  draw: Callable[[np.random.Generator, int, int], Example]
  num_symbols: int
  num_classes: int
  has_one_answer: bool = False
  last: int | None = None

  def num_tokens(self, length: int) -> int:
    """Returns the largest number of tokens, symbols and blanks, for an input length."""
    if self.has_one_answer:
      return length + 1
    return 2 * length + (self.last is not None)


TASKS = dict(
  reverse_string=Task(reverse_string, 2, 2),
  bucket_sort=Task(bucket_sort, 5, 5),
  missing_duplicate=Task(missing_duplicate, 4, 2, has_one_answer=True),
  modular_arithmetic=Task(modular_arithmetic, 8, 5, has_one_answer=True),
  stack_manipulation=Task(stack_manipulation, 5, 3, last=END_OF_STACK),
)


class TaskBatch(NamedTuple):
  """Holds B inputs of one length with blanks after them, padded to L tokens.

  Attributes:
    tokens: input symbols + 1, blanks, and PAD.
    targets: the output symbols at the blanks; NO_TARGET elsewhere.
    counts: whether a target counts for the accuracy; False where there is none.
    positions: the tokens' positions, the same in each row.
  """

  tokens: Int[Array | np.ndarray, "B L"]
  targets: Int[Array | np.ndarray, "B L"]
  counts: Bool[Array | np.ndarray, "B L"]
  positions: Int[Array | np.ndarray, "B L"]


def empty_batch(shape: tuple[int, ...]) -> TaskBatch:
  """Returns a batch of padding with shape (rows, tokens)."""
  positions = np.arange(shape[1], dtype=np.int32)
  return TaskBatch(
    tokens=np.full(shape, PAD, np.int32),
    targets=np.full(shape, NO_TARGET, np.int32),
    counts=np.zeros(shape, bool),
    positions=np.tile(positions, (shape[0], 1)),
  )


class TaskBatches:
  """Makes batches of generated inputs: `batches[step]` for any step >= 0.

  All inputs of a batch have one length. Seed and step determine a batch.

  Attributes:
    lengths: the input lengths from which batches choose.
    num_per_epoch: the number of lengths.
    shapes: the number of rows and tokens of batches. A step is compiled once for each.
  """

  def __init__(
    self,
    task: Task,
    lengths: Sequence[int],
    *,
    rows: int,
    padded_rows: int | None = None,
    num_shapes: int,
    drawn_from: int,
    seed: int | None,
  ):
    """Chooses shapes, but generates nothing.

    Args:
      lengths: the lengths of inputs. Each batch draws one of them.
      rows: the number of inputs in a batch.
      padded_rows: the number of rows in a batch, by default `rows`. The others are
        padding, so a step has the same inputs on any number of devices.
      num_shapes: the number of lengths, evenly spaced, to which inputs are padded.
      drawn_from: the positions are a sorted sample of 0 to `drawn_from` - 1, without
        replacement. With 0 they are 0, 1, 2, ...
      seed: None for batches that are always the same, with the lengths in turn.
    """
    self.lengths = lengths
    self._task, self._rows = task, rows
    self._padded_rows = padded_rows or rows
    self._multiple = -(-max(lengths) // num_shapes)
    self._drawn_from, self._seed = drawn_from, seed
    self.num_per_epoch = len(lengths)
    self.shapes = {self._padded_shape(length) for length in lengths}

  def __getitem__(self, step: SupportsIndex) -> TaskBatch:
    random, length = self._start(step)
    inputs, outputs = self._task.draw(random, self._rows, length)
    num_inputs, num_outputs = inputs.shape[1], outputs.shape[1]
    num_tokens = num_inputs + num_outputs
    batch = empty_batch(self._padded_shape(length))
    at_inputs = slice(self._rows), slice(num_inputs)
    at_blanks = slice(self._rows), slice(num_inputs, num_tokens)
    batch.tokens[at_inputs] = inputs + 1
    batch.tokens[at_blanks] = self._task.num_symbols + 1
    batch.targets[at_blanks] = outputs
    batch.counts[at_blanks] = True
    if self._task.last is not None:
      is_last = outputs == self._task.last
      num_before = np.cumsum(is_last, axis=1) - is_last
      batch.counts[at_blanks] = num_before == 0
    if self._drawn_from:
      drawn = random.choice(self._drawn_from, num_tokens, replace=False)
      batch.positions[:, :num_tokens] = np.sort(drawn)
    return batch

  def shape(self, step: SupportsIndex) -> tuple[int, int]:
    """Returns the shape of a step's batch, one of `shapes`."""
    _, length = self._start(step)
    return self._padded_shape(length)

  def _start(self, step: SupportsIndex) -> tuple[np.random.Generator, int]:
    """Returns a step's random generator, and the length of its inputs."""
    step = operator.index(step)
    # All splits without a seed share it, so they are not independent of each other.
    seed = _TEST_SEED if self._seed is None else self._seed
    key = np.array([seed, step], np.uint64)
    random = np.random.Generator(np.random.Philox(key=key))
    if self._seed is None:
      return random, self.lengths[step % self.num_per_epoch]
    return random, int(random.choice(self.lengths))

  def _padded_shape(self, length: int) -> tuple[int, int]:
    num_tokens = self._task.num_tokens(round_up(length, self._multiple))
    return self._padded_rows, num_tokens

  def __str__(self) -> str:
    shortest, longest = min(self.lengths), max(self.lengths)
    return f"{self._rows} inputs of one length a batch, from {shortest} to {longest}"
