r"""Models Bach's chorales with a decoder: Music Transformer (Huang et al. 2018).

  python -m experiments.train --config=configs/music.py --workdir=runs/music
  python -m experiments.train --config=configs/music.py:sinusoidal,published \
      --workdir=runs/sin
  python -m experiments.sweep --config=configs/music.py --seeds=3
  python -m experiments.sweep --config=configs/music.py:long --only=relative
  python -m experiments.sample --workdir=runs/music --prime=mine.mid --out=more.mid
  python -m experiments.train --config=configs/music.py --config.data.source=midi \
      --config.data.midi.path=FOLDER --workdir=runs/mine

Arguments, separated by commas, are positions and a version. The positions are:

- `relative`: sinusoids, and relative positions on keys with a table per head. Pairs
  beyond the last distance of the table get no relative term.
- `clipped`: relative positions on keys and values, clipped at distance 16, as in Shaw
  et al. 2018.
- `sinusoidal`: sinusoids.
- `none`: no positions.

The versions are:

- `brief`: a small model for CPUs. `sweep --parallel=4` uses four cores best.
- `long`: the same model, trained for 8,000 updates in place of 3,000.
- `published`: a model for an accelerator, with 5 layers of width 256 as in the
  published baseline.

All versions transpose training pieces by up to 5 semitones, and average the last
checkpoints.

The data are the JSB chorales in their published splits. The tokens are the four voices
of each 16th note in turn. The chorales are downloaded, unless
--config.data.chorales.path=FOLDER names a folder that holds them. A folder of your own
MIDI files, as in the last command, may have the sub-folders train, valid and test.
"""

from configs import default

_POSITIONS = {
  "relative": dict(positions="both", relative_values=False, beyond="zero"),
  "clipped": dict(
    positions="relative", relative_values=True, beyond="clip", max_distance=16
  ),
  "sinusoidal": dict(positions="sinusoidal"),
  "none": dict(positions="none"),
}
_BRIEF = dict(
  mesh=dict(data=1),  # one device: a batch has one or two pieces
  batches=dict(tokens=2304),
  model=dict(
    num_layers=3,
    width=128,
    num_heads=4,
    feed_forward=512,
    max_distance=256,
    implementation="chunked",
    **default.NO_DROPOUT,
  ),
  training=dict(learning_rate=0.004, warmup_steps=400, num_steps=3000, save_every=50),
)
_PUBLISHED = dict(
  batches=dict(tokens=16_896),
  model=dict(
    num_layers=5,
    width=256,
    num_heads=8,
    feed_forward=1024,
    max_distance=1024,
    embedding_dropout_rate=0.2,
    dropout_rate=0.2,
  ),
  training=dict(learning_rate=0.001, warmup_steps=1000, num_steps=6000, save_every=100),
)
_LONG = _BRIEF | dict(training=_BRIEF["training"] | dict(num_steps=8000))
_VERSIONS = dict(brief=_BRIEF, long=_LONG, published=_PUBLISHED)


def get_config(argument: str = ""):
  """Returns the config of positions and a version, by default relative and brief."""
  positions, version = default.choose(argument, _POSITIONS, _VERSIONS)
  config = default.get_config("music")
  config.name = f"music-{argument}".replace(",", "-").strip("-")
  config.data.transpose = 5
  # The longest training piece has 2,065 tokens with its end, so none is sliced.
  config.batches.update(max_length=2112, num_shapes=5)
  config.training.update(schedule="inverse_sqrt", eval_every=500, keep_checkpoints=8)
  config.decoding.average_checkpoints = 8
  config.update(_VERSIONS[version])
  config.model.update(_POSITIONS[positions])
  return config


def sweep():
  for name, changes in _POSITIONS.items():
    # `relative` is the config itself.
    yield name, {f"model.{key}": x for key, x in changes.items() if name != "relative"}
