r"""Trains a translation model, scores it and draws what it learned.

  python -m experiments.train --config=configs/quickstart.py
  python -m experiments.train --config=configs/multi30k.py:sinusoidal --workdir=runs/sinusoidal
  python -m experiments.train --config=configs/quickstart.py --config.model.max_distance=4 \
      --workdir=runs/k4
  python -m experiments.train --config=configs/quickstart.py --workdir=runs/mine \
      --config.data.source=pairs --config.data.pairs.train=train.en,train.de \
      --config.data.pairs.valid=valid.en,valid.de --config.data.pairs.test=test.en,test.de

The folder --workdir holds all of the run; the same command again goes on where it stopped.
"""

import functools
import pathlib
import sys

import jax
import optax
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from experiments import command
from experiments.evaluate import evaluate, joined
from experiments.run import (
  Run,
  init_params,
  learn_tokenizers,
  load_data,
  make_batches,
  make_translator,
  plan_run,
  with_average,
)
from experiments.validation import validate
from relpos_jax.data.batching import Batches, prefetch
from relpos_jax.data.corpus import Corpus
from relpos_jax.data.tokenizer import BOS, Tokenizers, load_tokenizers, save_tokenizers
from relpos_jax.evaluation.bleu import corpus_bleu
from relpos_jax.evaluation.report import Sample, plain_text, samples
from relpos_jax.training import optimizer as optimizers
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.loop import NonFiniteError, train
from relpos_jax.training.reporting import Reporter
from relpos_jax.training.sharding import put_batch, put_parameters, shapes_on
from relpos_jax.training.step import TrainState, init_state, make_eval_step, make_train_step
from relpos_jax.training.workdir import claim_workdir, write_run_files

FLAGS = dict(
  config=command.CONFIG,
  workdir=command.Flag("", "the run's folder; runs/NAME with the config's name if not given"),
)

_SHOWN = 3  # sample translations at each evaluation


def main(config: ConfigDict, workdir: str) -> None:
  """Trains to `config.training.num_steps` from the last checkpoint, if any, and evaluates."""
  validate(config)
  workdir = pathlib.Path(workdir or f"runs/{config.name}")
  claim_workdir(workdir, config.to_dict(), default.get_config().to_dict())
  corpus = load_data(config)
  for note in corpus.notes:
    print(note)
  run = plan_run(config, _tokenizers(config, corpus, workdir))
  try:
    with jax.set_mesh(run.mesh):
      run_training(run, corpus, workdir)
  except NonFiniteError as error:
    sys.exit(f"stopped: {error}")
  evaluate(with_average(run, workdir), corpus, workdir)


def _tokenizers(config: ConfigDict, corpus: Corpus, workdir: pathlib.Path) -> Tokenizers:
  """Those of the run's folder, or new ones."""
  return load_tokenizers(workdir) if _has_tokenizers(workdir) else learn_tokenizers(config, corpus)


def _has_tokenizers(workdir: pathlib.Path) -> bool:
  return any(workdir.glob("tokenizer*.json"))


def run_training(run: Run, corpus: Corpus, workdir: pathlib.Path) -> None:
  """Puts the parts of `config.training` together and trains.

  Nothing is written before all that may be a user's mistake has been looked at.
  """
  config = run.config.training
  train_batches, valid_batches = make_batches(run.config, corpus, run.tokenizers, run.mesh)
  print(f"training: {train_batches}", f"validation: {valid_batches}", sep="\n")
  optimizer = make_optimizer(run.config)
  with (
    Checkpoints(workdir / "checkpoints", keep=config.keep_checkpoints) as checkpoints,
    Reporter(workdir, config.num_steps) as reporter,
  ):
    state = _first_state(run, optimizer, checkpoints)
    write_run_files(workdir, run.config.to_dict())
    if not _has_tokenizers(workdir):
      save_tokenizers(run.tokenizers, workdir)
    batches = prefetch(train_batches, int(state.step), config.num_steps)
    train(
      state,
      make_step(run.config, run.graphdef),
      map(functools.partial(put_batch, mesh=run.mesh), batches),
      num_steps=config.num_steps,
      report=reporter.step,
      evaluate=_report_valid(run, corpus, valid_batches, reporter),
      save=lambda state: checkpoints.save(int(state.step), state),
      eval_every=config.eval_every,
      save_every=config.save_every,
    )


def _first_state(run: Run, optimizer, checkpoints: Checkpoints) -> TrainState:
  """That of the last checkpoint, if there is one."""
  start = lambda: init_state(init_params(run), optimizer)
  if checkpoints.latest_step() is None:
    return put_parameters(start(), run.mesh)
  state = checkpoints.restore(like=shapes_on(run.mesh, jax.eval_shape(start)))
  print(f"{checkpoints.folder.parent} is trained to step {int(state.step)}")
  return state


def make_step(config: ConfigDict, graphdef: nnx.GraphDef):
  """The training step of a config, compiled at its first call for each shape of batch."""
  return make_train_step(
    graphdef,
    make_optimizer(config),
    bos=BOS,
    label_smoothing=config.training.label_smoothing,
    num_microbatches=config.training.num_microbatches,
    dropout_key=jax.random.key(config.seed, impl=config.training.prng),
  )


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """Adam at the learning rates of a config."""
  return optimizers.adam(schedule(config))


def _report_valid(run: Run, corpus: Corpus, batches: Batches, reporter: Reporter):
  """What each evaluation during training does: the valid loss, and BLEU of some sentences."""
  eval_step = make_eval_step(
    run.graphdef, bos=BOS, label_smoothing=run.config.training.label_smoothing
  )
  translator = make_translator(run, beam_size=1)
  place = functools.partial(put_batch, mesh=run.mesh)
  some = corpus.splits["valid"][: run.config.training.num_samples]
  sources, references = zip(*some, strict=True)

  def report_valid(state: TrainState) -> None:
    losses = [
      eval_step(state.params, place(batch)) for batch in prefetch(batches, 0, batches.num_per_epoch)
    ]
    total, num_tokens = (sum(map(float, values)) for values in zip(*losses, strict=True))
    translations = translator(sources, state.params)
    bleu = corpus_bleu(translations, references, **run.config.evaluation)
    shown = [*zip(sources, references, translations, strict=True)][:_SHOWN]
    examples = plain_text(samples([Sample(*joined(run.config, triple)) for triple in shown]))
    step = int(state.step)
    reporter.values(step, dict(valid_loss=total / num_tokens, valid_bleu=bleu.value))
    reporter.text(step, "valid", examples)

  return report_valid


def schedule(config: ConfigDict):
  """The learning rate of each update, as `config.training` says."""
  training = config.training
  if training.schedule == "paper":
    return optimizers.paper_schedule(
      config.model.width, training.warmup_steps, training.learning_rate
    )
  return optimizers.inverse_sqrt(training.learning_rate, training.warmup_steps)


if __name__ == "__main__":
  command.run(main, FLAGS)
