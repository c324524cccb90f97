"""Times training steps of models with random parameters, and translation with trained ones."""

import functools
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import scipy.stats
from ml_collections import ConfigDict

from configs.positions import sweep
from experiments import command
from experiments.benchmark import attention, timing
from experiments.data.tokenizer import UNK, tokenizer_files
from experiments.errors import InputError
from experiments.evaluation.tables import markdown_table
from experiments.export import check_exportable, ctranslate2_spec
from experiments.files import Path
from experiments.run import build, load_run, parse_config
from experiments.training.environment import environment
from experiments.training.sharding import make_mesh
from experiments.translation.corpus import read_lines
from experiments.translation.task import make_translator

OURS, THEIRS = "relpos_jax", "CTranslate2"
BASELINE, AGAIN = "sinusoidal", "sinusoidal (again)"
_PREFIXES = dict(steps="", positions="cost-")  # of blocks, by the folder of the raw results


def time_steps(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the training steps of three models in turns."""
  relative = config.model.get("positions")  # which a config of graphs has not
  positions = {BASELINE: BASELINE, AGAIN: BASELINE, relative: relative}
  if len(positions) < 3:
    raise InputError(f"config.model.positions is {BASELINE}, the baseline: give relative")
  models = {name: {"model.positions": kind} for name, kind in positions.items()}
  _time_models(config, models, length, repetitions, out, "steps")


def time_positions(config: ConfigDict, length: int, repetitions: int, out: str) -> None:
  """Times the training steps of a model with each scheme of positions in turns."""
  models = {row: {"model.positions": row} | changes for row, changes in sweep()}
  models[AGAIN] = models[BASELINE]
  _time_models(config, models, length, repetitions, out, "positions")


def _time_models(config, models, length: int, repetitions: int, out: str, kind: str):
  """Times the training steps of a config's models, changes by name, and writes the page."""
  parse_config(config)
  if config.task == "graphs":
    raise InputError("--config is of graphs: give one of translation or music")
  if not 1 <= length <= config.batches.tokens:
    raise InputError(f"--length={length}: give 1 to {config.batches.tokens}, config.batches.tokens")
  folder = command.make_folder(pathlib.Path(out, kind), "out") if out else None
  shape = config.batches.tokens // length, length
  steps = {name: make_stepper(config, changes, shape) for name, changes in models.items()}
  results = {name: config.model[name] for name in ("positions", "width", "dtype")}
  results["models"] = {name: figures for name, (_, figures) in steps.items()}
  steps = {name: step for name, (step, _) in steps.items()}
  results |= dict(shape=shape, seconds=timing.time_rounds(steps, repetitions))
  timing.publish(config, results, folder, f"{shape[0]}x{length}", block_of_steps, _PREFIXES[kind])


def make_stepper(
  config: ConfigDict, changes: Mapping[str, object], shape: tuple[int, int]
) -> tuple[Callable[[], object], dict[str, int]]:
  """Returns a function that makes one step of training on the same batch [rows, tokens].

  Also returns the number of parameters, and the temporary memory of the compiled step.
  """
  task = parse_config(config, given=changes)
  training = build(task, task.mock_vocabulary(), make_mesh(data=1))
  state = training.init()
  size = config.vocabulary.size if config.task == "translation" else task.codec.vocab_size
  batch, treedef = jax.tree.flatten(task.empty_batch(shape))
  tokens = np.random.default_rng(0).integers(UNK, size, (len(batch), *shape))
  batch = treedef.unflatten(tokens.astype(np.int32))
  train_step = training.step.lower(state, batch).compile()
  figures = dict(parameters=sum(x.size for x in jax.tree.leaves(state.params)))
  figures["temporary_bytes"] = train_step.memory_analysis().temp_size_in_bytes

  def step():
    nonlocal state
    state, metrics = train_step(state, batch)
    return state, metrics

  jax.block_until_ready(step())
  return step, figures


def block_of_steps(results: timing.Record) -> str:
  """Returns the provenance and the table of steps: medians, and ratios to the baseline."""
  (rows, length), seconds, cells = results["shape"], results["seconds"], []
  baseline = np.mean([seconds[BASELINE], seconds[AGAIN]], axis=0)
  for name, figures in results["models"].items():
    median = np.median(seconds[name])
    against = seconds[BASELINE] if name == AGAIN else baseline
    memory = f"{figures['temporary_bytes'] / 2**20:,.1f} MiB"
    times = f"{1e3 * median:,.1f}", f"{rows * length / median:,.0f}"
    ratios = ("", "") if name == BASELINE else _ratio(seconds[name], against)
    cells.append([name, f"{figures['parameters']:,}", memory, *times, *ratios])
  header = ["positions", "parameters", "temporary memory", "ms a step, median", "tokens a second"]
  header += ["ratio (quartiles)", "95% interval of the ratio"]
  return (
    f"{timing.provenance(results, ['jax'])}\n"
    f"{results['name']}: width {results['width']}, {rows} x {length} tokens, {results['dtype']}, "
    f"{len(baseline)} rounds, config {results['digest']}.\n\n{markdown_table(header, cells)}"
  )


def _ratio(seconds: Sequence[float], against: Sequence[float] | np.ndarray) -> tuple[str, str]:
  """Returns the median ratio of a round with its quartiles, and the median's bootstrap interval."""
  ratios = np.divide(seconds, against)
  low, median, high = timing.quartiles(ratios)
  options = dict(n_resamples=10_000, method="percentile", rng=np.random.default_rng(12345))
  interval = scipy.stats.bootstrap((ratios,), np.median, **options).confidence_interval
  return f"{median:.3f} ({low:.3f} to {high:.3f})", "{:.3f} to {:.3f}".format(*interval)


def time_translation(workdir: Path, input: Path, lines: int, repetitions: int, out: str) -> None:
  """Times programs that translate the same lines in turns, as processes and within one."""
  run = load_run(workdir, "translation")
  check_exportable(run.config)
  from experiments.benchmark import foreign

  texts = read_lines(input)
  texts = list(itertools.islice(itertools.cycle(texts), lines or len(texts)))
  normal, decoding = run.task.normalize_lines(texts), run.config.decoding
  cores = environment()["cpu_cores"]
  options = dict(beam_size=decoding.beam_size, length_penalty=decoding.length_penalty)
  # The fastest batches of 1, 2, 4, ... sentences on two cores.
  options |= dict(max_decoding_length=256, max_batch_size=64)
  folder = command.make_folder(pathlib.Path(out, "translate"), "out") if out else None
  with tempfile.TemporaryDirectory() as temporary:
    raw, split, model = (pathlib.Path(temporary, name) for name in ("raw", "split", "model"))
    raw.write_text("\n".join(texts) + "\n", "utf-8")
    split.write_text("\n".join(normal) + "\n", "utf-8")
    model.mkdir()
    ctranslate2_spec(run).save(str(model))
    tokenizers = tokenizer_files(workdir)
    theirs = *map(str, (model, tokenizers[0], tokenizers[-1], split)), cores
    process = f"--workdir={workdir}", f"--input={raw}"
    functions = {
      f"{OURS}, process": _process("translate", *process),
      f"{THEIRS}, process": _process("benchmark.foreign", *map(str, theirs), json.dumps(options)),
      f"{OURS}, in one process": functools.partial(make_translator(run), normal),
      f"{THEIRS}, in one process": foreign.make_translator(*theirs, options),
    }
    results = dict(lines=len(texts), beam_size=decoding.beam_size, cores=cores)
    results["words"] = {  # also compiles
      name: sum(len(line.split()) for line in translate()) for name, translate in functions.items()
    }
    results["seconds"] = timing.time_rounds(functions, repetitions)
  timing.publish(run.config, results, folder, f"{len(texts)}-{cores}", block_of_translation)


def _process(module: str, *arguments: str) -> Callable[[], list[str]]:
  """Returns a function that runs a module in a process and returns the lines that it prints."""
  words = [sys.executable, "-m", f"experiments.{module}", *arguments]
  options = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, encoding="utf-8")
  return lambda: subprocess.run(words, **options).stdout.splitlines()


def block_of_translation(results: timing.Record) -> str:
  """Returns the provenance and the table of translation: medians, and ratios to CTranslate2."""
  rows, seconds = [], results["seconds"]
  for name, of in seconds.items():
    program, _, what = name.partition(", ")
    low, median, high = timing.quartiles(of)
    ratio = np.median(np.divide(of, seconds[f"{THEIRS}, {what}"]))
    cells = [f"{results['words'][name]:,}", f"{median:.2f} ({low:.2f} to {high:.2f})"]
    rows.append([what, program, *cells, f"{ratio:.2f}" if program == OURS else ""])
  header = ["what", "program", "words of output", "seconds (quartiles)", "ratio to CTranslate2"]
  return (
    f"{timing.provenance(results)}\n"
    f"{results['name']}: {results['lines']:,} lines, beam {results['beam_size']}, "
    f"{results['cores']} cores, {len(of)} rounds, config {results['digest']}.\n\n"
    f"{markdown_table(header, rows)}"
  )


def write_pages(out: pathlib.Path) -> None:
  """Rewrites the page of each command, attention's too, that has raw results in a folder."""
  timing.rewrite_page(out / "attention", attention.draw_block)
  for name, prefix in _PREFIXES.items():
    timing.rewrite_page(out / name, block_of_steps, prefix)
  timing.rewrite_page(out / "translate", block_of_translation)


MAINS = dict(
  step=time_steps, positions=time_positions, translate=time_translation, pages=write_pages
)
