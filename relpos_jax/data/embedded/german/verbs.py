"""German conjugation. Persons are 1s 2s 3s 1p 3p: the corpus says du to one person, never ihr."""

import re
from functools import cache

PERSONS = ("1s", "2s", "3s", "1p", "3p")

# infinitive, third person present, first person past, participle
PRINCIPAL_PARTS = """
backen bäckt backte gebacken
beginnen beginnt begann begonnen
beißen beißt biss gebissen
bereiten bereitet bereitete bereitet
bieten bietet bot geboten
bleiben bleibt blieb geblieben
brechen bricht brach gebrochen
brennen brennt brannte gebrannt
bringen bringt brachte gebracht
denken denkt dachte gedacht
empfehlen empfiehlt empfahl empfohlen
essen isst aß gegessen
fahren fährt fuhr gefahren
fallen fällt fiel gefallen
fangen fängt fing gefangen
finden findet fand gefunden
fliegen fliegt flog geflogen
fressen frisst fraß gefressen
geben gibt gab gegeben
gehen geht ging gegangen
gewinnen gewinnt gewann gewonnen
gießen gießt goss gegossen
helfen hilft half geholfen
kennen kennt kannte gekannt
kommen kommt kam gekommen
laden lädt lud geladen
lassen lässt ließ gelassen
laufen läuft lief gelaufen
leihen leiht lieh geliehen
lesen liest las gelesen
liegen liegt lag gelegen
nehmen nimmt nahm genommen
reiten reitet ritt geritten
rufen ruft rief gerufen
scheinen scheint schien geschienen
schieben schiebt schob geschoben
schlafen schläft schlief geschlafen
schließen schließt schloss geschlossen
schneiden schneidet schnitt geschnitten
schreiben schreibt schrieb geschrieben
schwimmen schwimmt schwamm geschwommen
sehen sieht sah gesehen
singen singt sang gesungen
sitzen sitzt saß gesessen
sprechen spricht sprach gesprochen
springen springt sprang gesprungen
stehen steht stand gestanden
stehlen stiehlt stahl gestohlen
steigen steigt stieg gestiegen
tragen trägt trug getragen
treffen trifft traf getroffen
trinken trinkt trank getrunken
vergessen vergisst vergaß vergessen
verlieren verliert verlor verloren
verzeihen verzeiht verzieh verziehen
wachsen wächst wuchs gewachsen
waschen wäscht wusch gewaschen
werfen wirft warf geworfen
ziehen zieht zog gezogen
"""

# infinitive, five persons of the present, first person past, participle
IRREGULAR = """
sein bin bist ist sind sind war gewesen
haben habe hast hat haben haben hatte gehabt
werden werde wirst wird werden werden wurde geworden
wissen weiß weißt weiß wissen wissen wusste gewusst
können kann kannst kann können können konnte gekonnt
müssen muss musst muss müssen müssen musste gemusst
dürfen darf darfst darf dürfen dürfen durfte gedurft
wollen will willst will wollen wollen wollte gewollt
sollen soll sollst soll sollen sollen sollte gesollt
mögen mag magst mag mögen mögen mochte gemocht
möchten möchte möchtest möchte möchten möchten mochte gemocht
"""


def _by_infinitive(table: str) -> dict[str, list[str]]:
  rows = [row.split() for row in table.strip().splitlines()]
  return {infinitive: forms for infinitive, *forms in rows}


_PARTS, _WHOLE = _by_infinitive(PRINCIPAL_PARTS), _by_infinitive(IRREGULAR)


def split_prefix(verb: str) -> tuple[str, str]:
  """Separates auf-stehen into auf and stehen; the second keeps its = (vor-be=reiten)."""
  prefix, _, base = verb.rpartition("-")
  return prefix.replace("_", " "), base


def _stem(whole: str) -> str:
  return whole[:-1] if whole.endswith(("eln", "ern")) else whole[:-2]


def _needs_e(stem: str) -> bool:
  """After d, t and most consonants before m or n an e makes the ending speakable: öffnet."""
  return bool(re.search(r"([dt]|(ch|[bdfgkpt])[mn])$", stem))


def _principal(base: str) -> list[str] | None:
  """The parts of a strong verb, or of the one it is made of: ver=stehen from stehen."""
  whole = base.replace("=", "")
  if whole in _PARTS:
    return _PARTS[whole]
  prefix, mark, root = base.partition("=")
  if not mark or root not in _PARTS:
    return None
  present, past, participle = _PARTS[root]
  return [prefix + present, prefix + past, prefix + participle.removeprefix("ge")]


@cache
def present(base: str) -> dict[str, str]:
  """The present tense by person, of a verb without its separable prefix."""
  whole = base.replace("=", "")
  if whole in _WHOLE:
    return dict(zip(PERSONS, _WHOLE[whole], strict=False))
  stem, parts = _stem(whole), _principal(base)
  third = parts[0] if parts else stem + ("et" if _needs_e(stem) else "t")
  first = stem[:-2] + "le" if whole.endswith("eln") else stem + "e"
  return dict(zip(PERSONS, (first, _second(stem, third), third, whole, whole), strict=True))


def _second(stem: str, third: str) -> str:
  """The second person from the third: liest, liest; gibt, gibst."""
  if stem.endswith(("s", "ß", "z", "x")):
    return third
  return third.removesuffix("t") + "st"


@cache
def past(base: str) -> dict[str, str]:
  """The past tense (Präteritum) by person."""
  whole = base.replace("=", "")
  parts = _WHOLE[whole][5:] if whole in _WHOLE else (_principal(base) or [])[1:]
  stem = _stem(whole)
  first = parts[0] if parts else stem + ("ete" if _needs_e(stem) else "te")
  if first.endswith("e"):
    return dict(zip(PERSONS, (first, first + "st", first, first + "n", first + "n"), strict=True))
  second = first + ("est" if first.endswith(("s", "ß", "z", "d", "t")) else "st")
  return dict(zip(PERSONS, (first, second, first, first + "en", first + "en"), strict=True))


@cache
def participle(verb: str) -> str:
  """The past participle: aufgestanden, verkauft, eingekauft, studiert."""
  prefix, base = split_prefix(verb)
  return prefix + _participle(base)


def _participle(base: str) -> str:
  whole = base.replace("=", "")
  if whole in _WHOLE:
    return _WHOLE[whole][6]
  if parts := _principal(base):
    return parts[2]
  stem = _stem(whole)
  ge = "" if "=" in base or whole.endswith("ieren") else "ge"
  return ge + stem + ("et" if _needs_e(stem) else "t")


@cache
def infinitive(verb: str, zu: bool = False) -> str:
  """The infinitive, with zu where it belongs: aufzustehen, zu verkaufen, spazieren zu gehen."""
  prefix, base = split_prefix(verb)
  whole = base.replace("=", "")
  if not zu:
    return prefix + whole
  return prefix + ("zu" if prefix and " " not in prefix else "zu ") + whole


@cache
def joined(verb: str, finite: str) -> str:
  """The finite verb at the end of a clause takes its prefix back: steht auf, aufsteht."""
  return split_prefix(verb)[0] + finite


@cache
def imperative(base: str) -> str:
  """The familiar imperative: e becomes i (gib, lies), a does not become ä (schlaf); weak: frage."""
  whole = base.replace("=", "")
  stem, parts = _stem(whole), _principal(base)
  if parts and "i" in parts[0] and "i" not in stem:
    second = _second(stem, parts[0])
    return second.removesuffix("t") if stem.endswith("s") else second.removesuffix("st")
  if whole.endswith("eln"):
    return stem[:-2] + "le"
  return stem + "e" if parts is None or _needs_e(stem) else stem
