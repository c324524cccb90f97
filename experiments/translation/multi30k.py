"""Multi30k: 29,000 image captions in English, German and French."""

import gzip

from experiments.data.upstream import Upstream
from experiments.translation.corpus import Corpus

# Names and sha256 of the upstream files: the captions, and the text of the baseline.
_SUMS = """
train.en.gz d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f
train.de.gz 726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6
train.fr.gz 622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c
val.en.gz 14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28
val.de.gz f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a
val.fr.gz ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9
test_2016_flickr.en.gz 611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9
test_2016_flickr.de.gz 9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8
test_2016_flickr.fr.gz 6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90
train.en 0ffe3e3bac16e6aa33ef0dd6a7dca81587479b0d18dff0db2a92ac3f32b00c86
train.de b2c74def7ec129f7ea7023a51501c77174c377ef06c6ccc2f031adcfb5cfadbd
valid.en 193d0d18fef5d1bc9d1cddafa13a644de3c5d6a24b45ac44476dcc5e96bfac6e
valid.de eeb95680d6a06eafb13e3494eed9f9fa99783b892f4a3c72dd36e7ce2e000b68
test.2016.en 13b5fe3f92f78c54446d66afcaaa0a00a33ab653a8411f16812c9c5ca3795d6d
test.2016.de 375c20d50f4c486149a78dfcfb161a430a04ddabe2b7d150f0c7811dc455ac60
"""
_FILES = dict(line.split() for line in _SUMS.strip().split("\n"))
CAPTIONS = Upstream(
  "multi30k",
  "data/task1/raw of github.com/multi30k/dataset",
  "https://raw.githubusercontent.com/multi30k/dataset/"
  "a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/",
  _FILES,
)
PREPARED = Upstream(
  "multi30k",
  "data/multi30k-en-de of github.com/LividWo/Revisit-MMT",
  "https://raw.githubusercontent.com/LividWo/Revisit-MMT/"
  "dc368d0af8d60270b8f4aaa2f3ac58771c551da3/data/multi30k-en-de/",
  _FILES,
)
_CAPTIONS = dict(train="train.{}.gz", valid="val.{}.gz", test="test_2016_flickr.{}.gz")
_PREPARED = dict(train="train.{}", valid="valid.{}", test="test.2016.{}")


def load(languages: str = "en-de", path: str = "", prepared: bool = False) -> Corpus:
  """Loads the captions: 29,000 pairs in train, 1,014 in valid, 1,000 in test (test_2016_flickr).

  They are cased, not tokenised, and in upstream's order (Elliott et al. 2016, 2017).

  Args:
    languages: "en-de", "de-en", "en-fr" or "fr-en".
    path: a folder with the upstream files; their sha256 must be the recorded ones. If empty, they
      are downloaded (1.3 MB) and kept: see `Upstream`.
    prepared: loads the text of the published baseline instead (Wu et al. 2021, LividWo/Revisit-MMT,
      4.5 MB; English and German): lower case, normalised, in Moses tokens and joint BPE of 10,000
      merges, where "@@" ends a subword inside a word. Files in `path` may be compressed (.gz).

  Raises:
    InputError: a file is missing or wrong, or there is no network.

  >>> load(languages="en-de", path="data/task1/raw").splits["valid"][0]  # doctest: +SKIP
  ('A group of men are loading cotton onto a truck', 'Eine Gruppe von Männern lädt ...')
  """
  upstream, names = (PREPARED, _PREPARED) if prepared else (CAPTIONS, _CAPTIONS)

  def lines(name: str, language: str) -> list[str]:
    content = upstream.read(name.format(language), path)
    text = content if prepared else gzip.decompress(content)
    return text.decode().removesuffix("\n").split("\n")  # str.splitlines splits at U+2028 too

  source, target = languages.split("-")
  return Corpus(
    {
      split: list(zip(lines(name, source), lines(name, target), strict=True))
      for split, name in names.items()
    }
  )
