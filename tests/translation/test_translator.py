"""The translator: order, empty and long lines, devices, and few compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import default
from experiments.data.tokenizer import BOS, EOS, PAD, decode, encode, train_tokenizer
from experiments.training.run import Run
from experiments.training.sharding import make_mesh, parameter_sharding
from experiments.translation import translator as translator_module
from experiments.translation.translator import Translator
from relpos_jax.models.seq2seq import Transformer, TransformerConfig

TEXT = "ein eine Mann Hund Haus geht sieht schläft und aber dort"
WORDS = TEXT.split()
OPTIONS = dict(extra_length=6, token_budget=64)


def make_lines(seed: int, lengths) -> list[str]:
  generator = np.random.default_rng(seed)
  return [" ".join(generator.choice(WORDS, length)) for length in lengths]


TOKENIZER = train_tokenizer(make_lines(0, [9] * 50), "bpe", size=300)
ONE = make_mesh(1)
SHORT = make_lines(1, [5, 12, 1, 13, 3, 14, 9, 2, 15, 11])  # at most 16 tokens
(LONG,) = make_lines(2, [100])


SIZES = dict(num_layers=1, width=16, num_heads=2, feed_forward=32, max_distance=2)


def make(implementation: str | None = None) -> Transformer:
  size = TOKENIZER.get_vocab_size()
  options = SIZES | dict(share_embeddings=False, implementation=implementation)
  return Transformer(TransformerConfig(size, size, **options), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
  """Makes a model whose output depends on its source and often ends early."""
  graphdef = nnx.graphdef(nnx.eval_shape(make))
  params = jax.jit(lambda: nnx.state(make()))()
  (layer,) = params["decoder"]["layers"].values()
  layer["cross_attention"]["out"]["kernel"][...] *= 4.0
  layer["self_attention"]["out"]["kernel"][...] *= 4.0
  params["softmax"]["table"][EOS] *= 1.6
  return graphdef, params


@pytest.fixture(scope="module")
def translator(model):
  return Translator(*model, TOKENIZER, ONE, **OPTIONS)


@pytest.fixture(scope="module")
def translations(translator):
  return translator(SHORT)


def test_lines_come_back_in_order_and_know_nothing_of_their_neighbours(
  translator, translations
):
  assert translator(SHORT[::-1]) == translations[::-1]
  assert [translator([line])[0] for line in SHORT] == translations
  # The law holds for any model that ignores its source.
  assert len(set(translations)) > 7


def test_a_model_trained_by_skewing_translates_alike_on_eight_devices(
  model, translations
):
  graphdef = nnx.graphdef(nnx.eval_shape(lambda: make("skew")))
  mesh = make_mesh(8)
  params = jax.device_put(model[1], parameter_sharding(model[1], mesh))
  translator = Translator(graphdef, params, TOKENIZER, mesh, **OPTIONS)
  assert translator(SHORT) == translations
  assert translator(SHORT[:1]) == translations[:1]


def test_empty_lines_stay_empty_and_white_space_around_a_line_is_nothing(
  translator, translations
):
  lines = ["", f"  {SHORT[0]}\t\n", " \t", "\n", SHORT[1], ""]
  assert translator(lines) == ["", translations[0], "", "", translations[1], ""]
  assert translator([]) == []


def test_a_very_long_line_is_translated_among_others_and_compilations_are_few(
  translator, translations
):
  translated = translator([SHORT[0], LONG, SHORT[1]])
  assert [translated[0], translated[2]] == translations[:2]
  assert translated[1]
  assert len(encode(TOKENIZER, [LONG])[0]) > OPTIONS["token_budget"]
  assert translator._advance._cache_size() == 2  # source lengths 16 and 128


def test_a_translation_that_needs_more_room_is_searched_for_anew(model, monkeypatch):
  graphdef, params = model
  params = jax.tree.map(jnp.copy, params)
  params["softmax"]["table"][EOS] *= 0.0
  options = dict(extra_length=60, token_budget=1024, beam_size=2)
  found = Translator(graphdef, params, TOKENIZER, ONE, **options)(SHORT)
  lengths = [len(tokens) for tokens in encode(TOKENIZER, found)]
  assert max(lengths) > 50, "a batch of 32 tokens has room for 48"
  monkeypatch.setattr(translator_module, "_SHORTEST", 128)
  assert Translator(graphdef, params, TOKENIZER, ONE, **options)(SHORT) == found


CHANGES = dict(key="other", never_ends=True, stop="bound", beam_size=3)


def test_another_process_does_not_trace(model, translations, cache, monkeypatch):
  options = dict(OPTIONS, key="mine")
  assert Translator(*model, TOKENIZER, ONE, **options)(SHORT) == translations
  monkeypatch.setattr(Transformer, "decode", None)
  assert Translator(*model, TOKENIZER, ONE, **options)(SHORT) == translations
  for name, value in CHANGES.items():
    translator = Translator(*model, TOKENIZER, ONE, **options | {name: value})
    with pytest.raises(TypeError):  # of what it traces
      translator(SHORT)


@pytest.mark.parametrize("positions", ["rotary", "my_positions:Kerple"])
def test_programs_with_positions_of_ones_own_are_not_cached(
  model, positions, monkeypatch
):
  """The code of such positions may change, and the config stay the same."""
  config = default.get_config("translation")
  config.model.positions = positions
  arguments = {}
  monkeypatch.setattr(
    Translator, "__init__", lambda *_, **given: arguments.update(given)
  )
  translator_module.make_translator(Run(config, TOKENIZER, ONE, *model))
  assert ("key" in arguments) == (positions == "rotary")


def test_other_parameters_can_take_the_place_of_the_translators(
  model, translator, translations
):
  others = translator(SHORT, jax.tree.map(lambda x: x[::-1], model[1]))
  assert all(a != b for a, b in zip(others, translations, strict=True))
  assert translator(SHORT) == translations


def decode_greedily(model, sources, limits):
  """Returns the tokens of greedy translations, without a cache, token by token."""
  forward = jax.jit(lambda source, target: nnx.merge(*model)(source, target))
  tokens = np.full((len(sources), 1 + limits.max()), PAD)
  tokens[:, 0] = BOS
  for t in range(tokens.shape[1] - 1):
    best = np.array(forward(sources, tokens))[:, t, PAD + 1 :].argmax(axis=1) + PAD + 1
    goes_on = (t < limits) & ~(tokens == EOS).any(axis=1)
    tokens[:, t + 1] = np.where(goes_on, best, PAD)
  return tokens[:, 1:]


@pytest.fixture(scope="module")
def greedy(model):
  return Translator(*model, TOKENIZER, ONE, beam_size=1, **OPTIONS)


def test_greedy_translations_are_those_without_a_cache_token_by_token_on_one_line(
  model, greedy
):
  sources = encode(TOKENIZER, SHORT[:4]).pad(np.arange(4), (4, 16), PAD)
  limits = (sources != PAD).sum(axis=1) + OPTIONS["extra_length"]
  tokens = decode_greedily(model, sources, limits)
  ends = (tokens == EOS).any(axis=1)
  assert {*ends.tolist()} == {True, False}
  texts = [decode(TOKENIZER, row) for row in tokens]
  assert "\n" in "".join(texts), "which a translation of one line may not have"
  wanted = [text.replace("\n", " ").replace("\r", " ") for text in texts]
  assert greedy(SHORT[:4]) == wanted


def test_a_translation_of_given_length_is_the_greedy_one_that_ends_there(model, greedy):
  sources, order = encode(TOKENIZER, SHORT), [*range(len(SHORT))]
  options = OPTIONS | dict(beam_size=1, never_ends=True)
  endless = Translator(*model, TOKENIZER, ONE, **options)

  def translate(translator: Translator, limits) -> list[list[int]]:
    rows = dict(translator._translate_all(model[1], sources, limits, [*order]))
    return [rows[i][rows[i] != PAD].tolist() for i in order]

  ended = translate(greedy, sources.lengths + OPTIONS["extra_length"])
  free = [[token for token in row if token != EOS] for row in ended]
  lengths = np.array([*map(len, free)])
  assert len({*lengths}) > 3
  assert translate(endless, lengths) == free
  for longer, wanted in zip(translate(endless, lengths + 2), free, strict=True):
    assert longer[:-2] == wanted
    assert EOS not in longer
