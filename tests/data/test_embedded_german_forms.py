"""German inflection against the tables of a school grammar, written out."""

import pytest

from relpos_jax.data.embedded.german import nominals, verbs
from relpos_jax.data.embedded.german.phrases import nominal, part
from relpos_jax.data.embedded.lexicon import (
  ADJECTIVES,
  CLAUSE_VERBS,
  DETERMINERS,
  NOUNS,
  VERBS,
  nouns_of,
)
from relpos_jax.data.embedded.tree import NounPhrase, Phrase, Pronoun, Quality, Relative

# Every strong or irregular verb of the lexicon without its separable prefix:
# infinitive, du, er, ich in the past, participle.
STRONG = """
backen bäckst bäckt backte gebacken
beginnen beginnst beginnt begann begonnen
beißen beißt beißt biss gebissen
bekommen bekommst bekommt bekam bekommen
beschließen beschließt beschließt beschloss beschlossen
beschreiben beschreibst beschreibt beschrieb beschrieben
besitzen besitzt besitzt besaß besessen
besprechen besprichst bespricht besprach besprochen
bieten bietest bietet bot geboten
bleiben bleibst bleibt blieb geblieben
brennen brennst brennt brannte gebrannt
bringen bringst bringt brachte gebracht
denken denkst denkt dachte gedacht
empfehlen empfiehlst empfiehlt empfahl empfohlen
essen isst isst aß gegessen
fahren fährst fährt fuhr gefahren
fallen fällst fällt fiel gefallen
fangen fängst fängt fing gefangen
finden findest findet fand gefunden
fliegen fliegst fliegt flog geflogen
fressen frisst frisst fraß gefressen
geben gibst gibt gab gegeben
gehen gehst geht ging gegangen
gewinnen gewinnst gewinnt gewann gewonnen
gießen gießt gießt goss gegossen
haben hast hat hatte gehabt
helfen hilfst hilft half geholfen
kennen kennst kennt kannte gekannt
kommen kommst kommt kam gekommen
laden lädst lädt lud geladen
laufen läufst läuft lief gelaufen
leihen leihst leiht lieh geliehen
lesen liest liest las gelesen
liegen liegst liegt lag gelegen
mögen magst mag mochte gemocht
nehmen nimmst nimmt nahm genommen
reiten reitest reitet ritt geritten
rufen rufst ruft rief gerufen
scheinen scheinst scheint schien geschienen
schieben schiebst schiebt schob geschoben
schlafen schläfst schläft schlief geschlafen
schließen schließt schließt schloss geschlossen
schneiden schneidest schneidet schnitt geschnitten
schreiben schreibst schreibt schrieb geschrieben
schwimmen schwimmst schwimmt schwamm geschwommen
sehen siehst sieht sah gesehen
sein bist ist war gewesen
singen singst singt sang gesungen
sitzen sitzt sitzt saß gesessen
sprechen sprichst spricht sprach gesprochen
springen springst springt sprang gesprungen
stehen stehst steht stand gestanden
stehlen stiehlst stiehlt stahl gestohlen
steigen steigst steigt stieg gestiegen
tragen trägst trägt trug getragen
treffen triffst trifft traf getroffen
trinken trinkst trinkt trank getrunken
unterschreiben unterschreibst unterschreibt unterschrieb unterschrieben
vergessen vergisst vergisst vergaß vergessen
verlassen verlässt verlässt verließ verlassen
verlieren verlierst verliert verlor verloren
versprechen versprichst verspricht versprach versprochen
verstehen verstehst versteht verstand verstanden
verzeihen verzeihst verzeiht verzieh verziehen
wachsen wächst wächst wuchs gewachsen
waschen wäschst wäscht wusch gewaschen
werden wirst wird wurde geworden
werfen wirfst wirft warf geworfen
widersprechen widersprichst widerspricht widersprach widersprochen
wissen weißt weiß wusste gewusst
zerbrechen zerbrichst zerbricht zerbrach zerbrochen
ziehen ziehst zieht zog gezogen
"""
STRONG = {row.split()[0]: row.split()[1:] for row in STRONG.strip().splitlines()}

# infinitive as in the lexicon: ich, du, er, wir, ich in the past, du in the past, participle
WEAK = """
arbeiten arbeite arbeitest arbeitet arbeiten arbeitete arbeitetest gearbeitet
be=suchen besuche besuchst besucht besuchen besuchte besuchtest besucht
danken danke dankst dankt danken dankte danktest gedankt
fotografieren fotografiere fotografierst fotografiert fotografieren fotografierte fotografiertest \
fotografiert
ge=hören gehöre gehörst gehört gehören gehörte gehörtest gehört
lächeln lächle lächelst lächelt lächeln lächelte lächeltest gelächelt
öffnen öffne öffnest öffnet öffnen öffnete öffnetest geöffnet
spielen spiele spielst spielt spielen spielte spieltest gespielt
reisen reise reist reist reisen reiste reistest gereist
regnen regne regnest regnet regnen regnete regnetest geregnet
tanzen tanze tanzt tanzt tanzen tanzte tanztest getanzt
über=setzen übersetze übersetzt übersetzt übersetzen übersetzte übersetztest übersetzt
wandern wandere wanderst wandert wandern wanderte wandertest gewandert
wohnen wohne wohnst wohnt wohnen wohnte wohntest gewohnt
zeichnen zeichne zeichnest zeichnet zeichnen zeichnete zeichnetest gezeichnet
"""


def _bases() -> set[str]:
  """The verbs of the lexicon without separable prefixes, and those the grammar itself uses."""
  written = {verb.german for verb in (*VERBS, *CLAUSE_VERBS)}
  return {verbs.split_prefix(verb)[1] for verb in written} | {"sein", "haben", "werden"}


def _is_regular(base: str) -> bool:
  stem = base.replace("=", "").removesuffix("n").removesuffix("e")
  return verbs.past(base)["1s"] in (stem + "te", stem + "ete")


def test_strong_verbs_have_their_principal_parts():
  for base in _bases():
    whole = base.replace("=", "")
    if whole in STRONG:
      found = verbs.present(base)["2s"], verbs.present(base)["3s"], verbs.past(base)["1s"]
      assert [*found, verbs.participle(base)] == STRONG[whole]


def test_every_other_verb_is_regular():
  others = {base for base in _bases() if base.replace("=", "") not in STRONG}
  assert {base for base in others if not _is_regular(base)} == set()
  assert STRONG.keys() <= {base.replace("=", "") for base in _bases()} | {"werden"}


@pytest.mark.parametrize("row", WEAK.replace("\\\n", "").strip().splitlines())
def test_weak_verbs(row):
  base, *forms = row.split()
  present, past = verbs.present(base), verbs.past(base)
  found = [present[person] for person in ("1s", "2s", "3s", "1p")]
  assert [*found, past["1s"], past["2s"], verbs.participle(base)] == forms


@pytest.mark.parametrize(
  ("verb", "forms"),
  [
    ("sein", "bin bist ist sind sind war warst war waren waren"),
    ("haben", "habe hast hat haben haben hatte hattest hatte hatten hatten"),
    ("werden", "werde wirst wird werden werden wurde wurdest wurde wurden wurden"),
    ("können", "kann kannst kann können können konnte konntest konnte konnten konnten"),
    ("müssen", "muss musst muss müssen müssen musste musstest musste mussten mussten"),
    ("dürfen", "darf darfst darf dürfen dürfen durfte durftest durfte durften durften"),
    ("wollen", "will willst will wollen wollen wollte wolltest wollte wollten wollten"),
    ("mögen", "mag magst mag mögen mögen mochte mochtest mochte mochten mochten"),
    ("gehen", "gehe gehst geht gehen gehen ging gingst ging gingen gingen"),
    ("finden", "finde findest findet finden finden fand fandest fand fanden fanden"),
    ("essen", "esse isst isst essen essen aß aßest aß aßen aßen"),
  ],
)
def test_all_persons(verb, forms):
  persons = ("1s", "2s", "3s", "1p", "3p")
  found = [tense(verb)[person] for tense in (verbs.present, verbs.past) for person in persons]
  assert found == forms.split()


def test_sollen_and_moechten_are_subjunctive():
  assert " ".join(verbs.past("sollen").values()) == "sollte solltest sollte sollten sollten"
  found = " ".join(verbs.present("möchten").values())
  assert found == "möchte möchtest möchte möchten möchten"


@pytest.mark.parametrize(
  ("verb", "finite", "particle", "last", "participle", "infinitive", "with_zu"),
  [
    ("auf-stehen", "steht", "auf", "aufsteht", "aufgestanden", "aufstehen", "aufzustehen"),
    (
      "ein-schlafen",
      "schläft",
      "ein",
      "einschläft",
      "eingeschlafen",
      "einschlafen",
      "einzuschlafen",
    ),
    ("an-rufen", "ruft", "an", "anruft", "angerufen", "anrufen", "anzurufen"),
    ("an-probieren", "probiert", "an", "anprobiert", "anprobiert", "anprobieren", "anzuprobieren"),
    ("fern-sehen", "sieht", "fern", "fernsieht", "ferngesehen", "fernsehen", "fernzusehen"),
    (
      "vor-be=reiten",
      "bereitet",
      "vor",
      "vorbereitet",
      "vorbereitet",
      "vorbereiten",
      "vorzubereiten",
    ),
    (
      *("spazieren_-gehen", "geht", "spazieren", "spazieren geht", "spazieren gegangen"),
      *("spazieren gehen", "spazieren zu gehen"),
    ),
    ("ver=stehen", "versteht", "", "versteht", "verstanden", "verstehen", "zu verstehen"),
  ],
)
def test_separable_verbs(verb, finite, particle, last, participle, infinitive, with_zu):
  prefix, base = verbs.split_prefix(verb)
  assert verbs.present(base)["3s"] == finite
  assert prefix.strip() == particle
  assert verbs.joined(verb, finite) == last
  assert verbs.participle(verb) == participle
  assert verbs.infinitive(verb) == infinitive
  assert verbs.infinitive(verb, zu=True) == with_zu


@pytest.mark.parametrize(
  ("verb", "imperative"),
  [
    *(("geben", "gib"), ("lesen", "lies"), ("sehen", "sieh"), ("nehmen", "nimm")),
    *(("helfen", "hilf"), ("essen", "iss"), ("ver=gessen", "vergiss"), ("fahren", "fahr")),
    *(("schlafen", "schlaf"), ("kommen", "komm"), ("schneiden", "schneide")),
    *(("be=schreiben", "beschreib"), ("stehen", "steh"), ("ziehen", "zieh")),
    *(("fragen", "frage"), ("öffnen", "öffne"), ("wandern", "wandere"), ("lächeln", "lächle")),
    *(
      ("spielen", "spiele"),
      ("danken", "danke"),
      ("arbeiten", "arbeite"),
      ("ge=horchen", "gehorche"),
    ),
  ],
)
def test_imperatives(verb, imperative):
  assert verbs.imperative(verb) == imperative


def test_first_person_is_the_infinitive_without_n():
  """Ich spiele, ich gebe; but ich lächle, and not the irregular."""
  regular = {base for base in _bases() if base not in ("sein", "wissen", "mögen", "lächeln")}
  for base in regular - {base for base in regular if base.endswith("ern")}:
    assert verbs.present(base)["1s"] + "n" == base.replace("=", "")


def test_auxiliary_of_the_perfect():
  """Sein for motion and change of state, haben for the rest."""
  moving = """
ab-fahren an-kommen auf-stehen auf-wachen aus-steigen bleiben ein-schlafen ein-steigen fahren
fallen fliegen folgen gehen klettern kommen laufen reisen reiten schwimmen spazieren_-gehen
springen wachsen wandern zurück-kommen
"""
  assert {verb.german for verb in VERBS if verb.auxiliary == "sein"} == set(moving.split())


def _column(determiner, gender):
  return [nominals.determiner_form(DETERMINERS[determiner], gender, case) for case in "NADG"]


def test_articles():
  """Rows are nominative, accusative, dative, genitive; columns m, f, n, plural."""
  definite = [_column("the", gender) for gender in "mfnp"]
  assert list(zip(*definite, strict=True)) == [
    ("der", "die", "das", "die"),
    ("den", "die", "das", "die"),
    ("dem", "der", "dem", "den"),
    ("des", "der", "des", "der"),
  ]
  assert _column("a", "m") == ["ein", "einen", "einem", "eines"]
  assert _column("a", "f") == ["eine", "eine", "einer", "einer"]
  assert _column("a", "n") == ["ein", "ein", "einem", "eines"]
  assert _column("no", "p") == ["keine", "keine", "keinen", "keiner"]
  assert _column("our", "m") == ["unser", "unseren", "unserem", "unseres"]
  assert _column("her", "n") == ["ihr", "ihr", "ihrem", "ihres"]
  assert _column("this", "f") == ["diese", "diese", "dieser", "dieser"]
  assert _column("every", "m") == ["jeder", "jeden", "jedem", "jedes"]
  assert _column("which", "n") == ["welches", "welches", "welchem", "welches"]
  assert _column("all", "p") == ["alle", "alle", "allen", "aller"]
  assert _column("many", "p") == ["viele", "viele", "vielen", "vieler"]


# Endings of adjectives: rows are cases, columns m, f, n, plural.
WEAK_ENDINGS = ["e e e en", "en e e en", "en en en en", "en en en en"]
MIXED_ENDINGS = ["er e es en", "en e es en", "en en en en", "en en en en"]
STRONG_ENDINGS = ["er e es e", "en e es e", "em er em en", "en er en er"]


@pytest.mark.parametrize(
  ("determiner", "table"),
  [
    *(("the", WEAK_ENDINGS), ("this", WEAK_ENDINGS), ("every", WEAK_ENDINGS)),
    *(("a", MIXED_ENDINGS), ("no", MIXED_ENDINGS), ("my", MIXED_ENDINGS)),
    *(("zero", STRONG_ENDINGS), (None, STRONG_ENDINGS)),
  ],
)
def test_adjective_endings(determiner, table):
  found = [
    " ".join(
      nominals.adjective_ending(DETERMINERS[determiner] if determiner else None, gender, case)
      for gender in "mfnp"
    )
    for case in "NADG"
  ]
  assert found == table


@pytest.mark.parametrize(("determiner", "plural"), [("all", "en"), ("many", "e"), ("some", "e")])
def test_adjectives_after_plural_words(determiner, plural):
  """Alle alten Bücher, but viele alte Bücher."""
  assert nominals.adjective_ending(DETERMINERS[determiner], "p", "N") == plural


@pytest.mark.parametrize(
  ("english", "singular", "plural"),
  [
    ("man", "Mann Mann Mann Mannes", "Männer Männer Männern Männer"),
    ("boy", "Junge Jungen Jungen Jungen", "Jungen Jungen Jungen Jungen"),
    ("student", "Student Studenten Studenten Studenten", "Studenten " * 4),
    ("neighbour", "Nachbar Nachbarn Nachbarn Nachbarn", "Nachbarn " * 4),
    ("bear", "Bär Bären Bären Bären", "Bären " * 4),
    ("uncle", "Onkel Onkel Onkel Onkels", "Onkel Onkel Onkeln Onkel"),
    ("woman", "Frau Frau Frau Frau", "Frauen " * 4),
    ("mouse", "Maus Maus Maus Maus", "Mäuse Mäuse Mäusen Mäuse"),
    ("child", "Kind Kind Kind Kindes", "Kinder Kinder Kindern Kinder"),
    ("car", "Auto Auto Auto Autos", "Autos " * 4),
    ("museum", "Museum Museum Museum Museums", "Museen " * 4),
    ("secret", "Geheimnis Geheimnis Geheimnis Geheimnisses", None),
  ],
)
def test_noun_declension(english, singular, plural):
  noun = next(noun for noun in NOUNS if noun.english == english)
  assert [nominals.noun_form(noun, case, False) for case in "NADG"] == singular.split()
  if plural:
    assert [nominals.noun_form(noun, case, True) for case in "NADG"] == plural.split()


def test_weak_nouns():
  """These and no others have -n or -en in all cases but the nominative."""
  weak = """
Affe Bauer Bär Drache Elefant Junge Kollege Kunde Löwe Nachbar Polizist Prinz Riese Soldat Student
Tourist
"""
  assert {noun.german for noun in NOUNS if nominals.is_weak(noun)} == set(weak.split())


def test_feminine_nouns_do_not_change_in_the_singular():
  for noun in NOUNS:
    assert (noun.genitive == noun.german) == (noun.gender == "f")


def test_relative_pronouns():
  expected = {
    ("m", False): "der den dem dessen",
    ("f", False): "die die der deren",
    ("n", False): "das das dem dessen",
    ("f", True): "die die denen deren",
  }
  for (gender, plural), forms in expected.items():
    pronoun = Relative(gender, plural, human=True)
    assert [nominal(pronoun, case)[0] for case in "NADG"] == forms.split()


@pytest.mark.parametrize(
  ("english", "gender", "forms"),
  [
    *(("I", "m", "ich mich mir"), ("you", "m", "du dich dir"), ("we", "m", "wir uns uns")),
    *(("he", "m", "er ihn ihm"), ("she", "f", "sie sie ihr"), ("they", "m", "sie sie ihnen")),
    *(("it", "m", "er ihn ihm"), ("it", "f", "sie sie ihr"), ("it", "n", "es es ihm")),
    ("who", "m", "wer wen wem"),
  ],
)
def test_pronouns(english, gender, forms):
  assert [nominal(Pronoun(english, gender), case)[0] for case in "NAD"] == forms.split()


def _noun(english, determiner="the", plural=False, **rest):
  return NounPhrase(nouns_of(english)[0], DETERMINERS[determiner], plural, **rest)


@pytest.mark.parametrize(
  ("preposition", "case", "noun", "words"),
  [
    *(("in", "D", "garden", "im Garten"), ("in", "A", "house", "ins Haus")),
    *(("in", "A", "kitchen", "in die Küche"), ("in", "D", "kitchen", "in der Küche")),
    *(("an", "D", "lake", "am See"), ("an", "A", "sea", "ans Meer")),
    *(("zu", "D", "station", "zum Bahnhof"), ("zu", "D", "school", "zur Schule")),
    *(("von", "D", "market", "vom Markt"), ("von", "D", "island", "von der Insel")),
    *(("auf", "A", "bed", "auf das Bett"), ("wegen", "G", "rain", "wegen des Regens")),
  ],
)
def test_prepositions_merge_with_the_article(preposition, case, noun, words):
  assert " ".join(part(Phrase("", preposition, case, _noun(noun)))) == words


def test_prepositions_do_not_merge_with_other_words():
  assert part(Phrase("", "in", "D", _noun("house", "this"))) == ["in", "diesem", "Haus"]
  assert part(Phrase("", "in", "D", Relative("n", False, False))) == ["in", "dem"]


def test_owners():
  teacher = _noun("teacher")
  assert " ".join(nominal(_noun("dog", owner=teacher), "D")) == "dem Hund des Lehrers"


def test_stems_of_adjectives():
  expected = {"hoch": "hoh", "teuer": "teur", "dunkel": "dunkl", "müde": "müd", "sauber": "sauber"}
  for adjective, stem in expected.items():
    assert nominals.attributive_stem(adjective) == stem


def test_adjectives_between_determiner_and_noun():
  old = next(adjective for adjective in ADJECTIVES if adjective.german == "alt")
  phrase = _noun("teacher", "a", qualities=(Quality(old),))
  assert " ".join(nominal(phrase, "A")) == "einen alten Lehrer"
  phrase = _noun("book", "zero", plural=True, number=21, qualities=(Quality(old),))
  assert " ".join(nominal(phrase, "D")) == "einundzwanzig alten Büchern"


@pytest.mark.parametrize(
  ("number", "word"),
  [
    *((2, "zwei"), (7, "sieben"), (12, "zwölf"), (13, "dreizehn"), (16, "sechzehn")),
    *((17, "siebzehn"), (20, "zwanzig"), (21, "einundzwanzig"), (30, "dreißig")),
    *((66, "sechsundsechzig"), (77, "siebenundsiebzig"), (99, "neunundneunzig")),
  ],
)
def test_numbers(number, word):
  assert nominals.number_word(number) == word
