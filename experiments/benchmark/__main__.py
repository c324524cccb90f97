r"""Measures attention and training steps.

  python -m experiments.benchmark attention --lengths=512,1024 --implementations=chunked
  python -m experiments.benchmark step --config=configs/multi30k.py --length=16
  python -m experiments.benchmark positions --config=configs/positions.py:chorales \
      --length=512
  python -m experiments.benchmark claims --device=nvidia-h200
  python -m experiments.benchmark pages --out=results

Competing programs take turns in one process, and their order changes from round to
round. All times are written to a folder OUT, and the pages in OUT show them in tables.
`pages` measures nothing and only writes the pages again.
`python -m experiments.benchmark COMMAND --help` explains a command and its flags.
"""

import importlib
import sys

from experiments import command

_ABOUT = dict(
  attention="""Times attention, and writes OUT/attention.md.

  python -m experiments.benchmark attention --lengths=512,1024 --implementations=chunked
  python -m experiments.benchmark attention --implementations=none --schemes=all

Each implementation, attention of other libraries and, with --schemes, published schemes
of positions are compared with jax.nn.dot_product_attention without relations. A scheme
runs in the implementation that is its default. What cannot do a call, or needs more
memory than is free, is left out, and the page gives the reason. torch_sdpa needs the
extra `benchmark`.""",
  step="""Times training steps with relative positions and with sinusoids.

  python -m experiments.benchmark step --config=configs/multi30k.py --length=16

Both models have random parameters and get the same batch.""",
  positions="""Times training steps with each configuration of configs/positions.py.

  python -m experiments.benchmark positions --config=configs/positions.py:chorales \\
      --length=512""",
  claims="""Prints which claims on a device its times confirm or refute.

  python -m experiments.benchmark claims --device=nvidia-h200

The claims are goals for the kernels, in experiments/benchmark/claims.py. A time is
divided by the time of another function, and the temporary memory of a kernel by the
bytes of the queries. `attention` and the tests of experiments/first_device.sh make the
results.""",
  pages="""Writes the pages in OUT again, from the results there.

  python -m experiments.benchmark pages --out=results""",
)
FLAGS = dict(
  out=command.Flag("results", "the folder of measurements and pages", is_path=True)
)
_ATTENTION = dict(
  lengths=command.Flag(
    "32,128,512,1024,4096", "tokens of a sequence, separated by commas"
  ),
  implementations=command.Flag(
    "usual",
    "all, none, usual (all but reference), or some of reference, per_position, skew, "
    "projected, chunked, pallas_gpu, mosaic_gpu",
  ),
  schemes=command.Flag(
    "none",
    "all, none, or some of shaw, shaw_keys, t5, alibi, rotary, xl, content, deberta, "
    "labels, kerple",
  ),
  peers=command.Flag(
    "all", "all, none, or some of dense_bias, cudnn, cudnn_dense_bias, torch_sdpa"
  ),
  masks=command.Flag("all", "all, bidirectional or causal"),
  dtype=command.Flag(
    "", "bfloat16 or float32; by default float32 on CPUs and bfloat16 elsewhere"
  ),
  passes=command.Flag("all", "all, forward, or backward, which includes forward"),
)
_SIZES = dict(
  repetitions=command.Flag(20, "how often every pair is timed", least=1),
  tokens=command.Flag(4096, "tokens of a batch, for every length", least=1),
  heads=command.Flag(8, "number of heads", least=1),
  width=command.Flag(64, "width of a head", least=1),
  max_distance=command.Flag(16, "k: tables have 2 k + 1 rows", least=0),
)
_FILE = dict(
  out=command.Flag("runs/benchmark", "the folder to write to", is_path=True),
  name=command.Flag("", "names the results; by default the device does"),
)
_STEP = dict(
  config=command.CONFIG,
  length=command.Flag(32, "tokens of a sentence, on either side"),
  repetitions=command.Flag(
    42, "steps of each model; a multiple of 6 balances their order", least=2
  ),
  out=command.Flag("", "the folder to write to; empty: only print", is_path=True),
)
_POSITIONS = dict(
  _STEP, repetitions=command.Flag(22, "steps of each of the 11 models", least=2)
)
_CLAIMS = dict(
  FLAGS, device=command.Flag("", "the start of the names of results, such as nvidia")
)
COMMANDS = dict(
  attention=_ATTENTION | _SIZES | _FILE,
  step=_STEP,
  positions=_POSITIONS,
  claims=_CLAIMS,
  pages=FLAGS,
)
# The module and the function of each command.
_FUNCTIONS = dict(
  attention=("attention", "main"),
  step=("models", "time_steps"),
  positions=("models", "time_positions"),
  claims=("claims", "print_claims"),
  pages=("models", "write_pages"),
)


def run(argv: list[str]) -> None:
  """Runs the command that the first argument names; other arguments are its flags."""
  name, *flags = argv or ["--help"]
  if name in ("--help", "-h"):
    print(__doc__)
    return
  if name not in COMMANDS:
    print(f"error: no command {name!r}: give {', '.join(COMMANDS)}", file=sys.stderr)
    sys.exit(2)

  def main(**values) -> None:
    module, function = _FUNCTIONS[name]
    module = importlib.import_module(f"experiments.benchmark.{module}")
    getattr(module, function)(**values)

  command.run(main, COMMANDS[name], flags, _ABOUT[name])


if __name__ == "__main__":
  run(sys.argv[1:])
