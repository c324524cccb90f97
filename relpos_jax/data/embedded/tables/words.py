"""The other words, one a line; the columns are named above each table."""

# The groups of adjectives, in their order before a noun.
GROUPS = ("quality", "mood", "need", "size", "age", "colour")

# english | german | classes of nouns | group | German comparative, where one compares
ADJECTIVES = """
old | alt | person pet wild text cloth gown vehicle building town tree instrument item | age | älter
young | jung | person pet wild | age | jünger
new | neu | text cloth gown vehicle machine item building film song furniture | age | neuer
modern | modern | building machine vehicle town | age | moderner
big | groß | animal building town room plant goods container furniture outdoors | size | größer
small | klein | animal building town room plant goods container furniture young key | size | kleiner
tall | groß | person tree | size | größer
long | lang | text journey river road film scarf sentence gown | size | länger
short | kurz | text journey road film sentence gown | size | kürzer
high | hoch | mountain wall roof | size | höher
deep | tief | waters | size | tiefer
heavy | schwer | container furniture stone book dictionary computer | size | schwerer
tired | müde | person pet baby | mood
hungry | hungrig | person animal baby | need
thirsty | durstig | person animal | need
happy | glücklich | person baby | mood
sad | traurig | person | mood
angry | wütend | person wild monster | mood
sick | krank | person pet baby | mood
healthy | gesund | person animal baby | mood
friendly | freundlich | person pet | quality | freundlicher
polite | höflich | person | quality | höflicher
clever | klug | person pet monkey fox | quality | klüger
brave | mutig | person pet | quality | mutiger
hard-working | fleißig | person | quality | fleißiger
lazy | faul | person pet | quality | fauler
famous | berühmt | person sight film text song | quality
rich | reich | person | quality | reicher
poor | arm | person | quality | ärmer
strong | stark | man hero monster horse storm coffee bear | quality | stärker
strict | streng | teacher judge boss kin | quality | strenger
patient | geduldig | person | quality
shy | schüchtern | young person | quality
honest | ehrlich | person | quality
nice | nett | mate kin saleswoman waiter | quality | netter
dangerous | gefährlich | wild monster journey road thief | quality | gefährlicher
wild | wild | wild horse | quality
beautiful | schön | noble sight cloth gown blossom animal song outdoors room | quality | schöner
ugly | hässlich | building cloth gown furniture monster witch | quality
good | gut | text film idea dish friend weather song student pupil | quality | besser
bad | schlecht | film weather idea | quality | schlechter
expensive | teuer | cloth gown vehicle goods machine building tables furniture | quality | teurer
cheap | billig | cloth gown vehicle goods machine tables furniture | quality | billiger
broken | kaputt | crockery machine device toy furniture instrument | quality
dirty | schmutzig | cloth gown room crockery vehicle opening waters machine | quality
clean | sauber | cloth gown room crockery waters | quality
empty | leer | container room road | quality
dark | dunkel | room woods road | quality | dunkler
bright | hell | room lamp sun moon | quality | heller
quiet | ruhig | room town outdoors | quality | ruhiger
warm | warm | cloth gown room soup milk weather | quality | wärmer
cold | kalt | drink waters room weather | quality | kälter
hot | heiß | hot-drink soup | quality
fresh | frisch | fruit baked egg meat milk juice | quality
sweet | süß | sweets fruit juice tea | quality | süßer
delicious | lecker | food | quality
interesting | interessant | text film topic sight journey | quality | interessanter
boring | langweilig | text film event | quality | langweiliger
exciting | spannend | text film game journey | quality | spannender
funny | lustig | tale film young | quality | lustiger
important | wichtig | topic note exam word | quality | wichtiger
difficult | schwierig | task question exam tongue | quality | schwieriger
easy | einfach | task question exam | quality | einfacher
red | rot | cloth gown vehicle goods blossom apple sofa candle | colour
blue | blau | cloth gown vehicle goods sofa door pencil | colour
green | grün | cloth gown vehicle goods meadow door pencil | colour
black | schwarz | cloth gown vehicle dog cat horse | colour
white | weiß | cloth gown vehicle rose goose rabbit horse wall | colour
brown | braun | cloth gown horse cow dog bear furniture | colour
yellow | gelb | cloth gown vehicle goods box blossom candle | colour
grey | grau | cloth gown cat mouse wolf | colour
"""

# Adjectives that do not stand side by side.
ANTONYMS = """
big | small
tall | small
long | short
old | young
old | new
old | modern
lazy | hard-working
lazy | brave
rich | poor
good | bad
cheap | expensive
dirty | clean
dark | bright
warm | cold
hot | fresh
hot | warm
hot | cold
interesting | boring
exciting | boring
funny | boring
difficult | easy
beautiful | ugly
beautiful | broken
happy | sad
happy | angry
sick | healthy
"""

# english | german | tags of the verbs it goes with
MANNERS = """
slowly | langsam | slow
quickly | schnell | slow effort
loudly | laut | voice
quietly | leise | voice
peacefully | friedlich | calm
happily | fröhlich | joy
gladly | gern | joy-to
patiently | geduldig | patience
attentively | aufmerksam | attention
carefully | sorgfältig | effort
diligently | fleißig | effort
secretly | heimlich | secret
politely | höflich | manners
bravely | tapfer | bold
alone | allein | alone
by bus | mit dem Bus | transport
by train | mit dem Zug | transport
by car | mit dem Auto | transport
"""

# english | german | tenses: now (progressive), habit (present), past, future, perfect
TIMES = """
today | heute | now past future perfect
yesterday | gestern | past
tomorrow | morgen | future
now | jetzt | now
at the moment | im Moment | now
soon | bald | future
every day | jeden Tag | habit
every week | jede Woche | habit
every year | jedes Jahr | habit
last week | letzte Woche | past
last month | letzten Monat | past
last year | letztes Jahr | past
next week | nächste Woche | future
next month | nächsten Monat | future
next year | nächstes Jahr | future
this week | diese Woche | future perfect
in the morning | am Morgen | habit past future
in the afternoon | am Nachmittag | habit past future
in the evening | am Abend | habit past future
at night | in der Nacht | habit past
at the weekend | am Wochenende | habit past future
after breakfast | nach dem Frühstück | habit past future
before lunch | vor dem Mittagessen | habit past future
after dinner | nach dem Abendessen | habit past future
during the holidays | während der Ferien | habit past future
on Monday | am Montag | past future
on Tuesday | am Dienstag | past future
on Wednesday | am Mittwoch | past future
on Thursday | am Donnerstag | past future
on Friday | am Freitag | past future
on Saturday | am Samstag | past future
on Sunday | am Sonntag | past future
in January | im Januar | past future
in March | im März | past future
in May | im Mai | past future
in July | im Juli | past future
in October | im Oktober | past future
in December | im Dezember | past future
in spring | im Frühling | habit past future
in summer | im Sommer | habit past future
in autumn | im Herbst | habit past future
in winter | im Winter | habit past future
"""

# english | german | tenses; they stand by the verb in English, before the manner in German
ADVERBS = """
always | immer | habit past
often | oft | habit past
sometimes | manchmal | habit past
rarely | selten | habit past
usually | meistens | habit
never | nie | habit past perfect
already | schon | perfect
just | gerade | perfect
not yet | noch nicht | perfect
no longer | nicht mehr | habit
still | immer noch | now
"""

# english | german; they open the sentence
OPENERS = """
unfortunately | leider
fortunately | zum Glück
perhaps | vielleicht
suddenly | plötzlich
"""

# unit | German dative plural after vor and in
UNITS = """
hours | Stunden
days | Tagen
weeks | Wochen
months | Monaten
years | Jahren
"""

# key | English singular | English plural | German stem | declension. The declensions: definite
# (der, die, das), dieser, ein (then mixed), strong (viele) and bare (no ending); - is no form.
DETERMINERS = """
the | the | the | d | definite
a | a | - | ein | ein
zero | | | | bare
a, bare | a | - | | bare
the, bare | the | - | | bare
this | this | these | dies | dieser
every | every | - | jed | dieser
which | which | which | welch | dieser
no | no | no | kein | ein
any | a | any | kein | ein
all | - | all | all | dieser
many | - | many | viel | strong
some | - | some | einig | strong
how many | - | how many | wie viel | strong
my | my | my | mein | ein
your | your | your | dein | ein
his | his | his | sein | ein
her | her | her | ihr | ein
its | its | its | sein | ein
its, feminine | its | its | ihr | ein
our | our | our | unser | ein
their | their | their | ihr | ein
"""

# name | where in English | in German | whither in English | in German | whence in German
PLACES = """
in | in | in+D | into | in+A | aus
school | at | in+D | to | in+A | aus
office | in | in+D | to | in+A | aus
market | at | auf+D | to | auf+A | von
station | at | an+D | to | zu+D | von
beach | at | an+D | to | an+A | von
island | on | auf+D | to | auf+A | von
top | on | auf+D | onto | auf+A | von
field | in | auf+D | into | auf+A | von
"""

# english | german | classes of nouns
SPOTS = """
on | auf+D | surface shelf
under | unter+D | surface tree
beside | neben+D | furniture tree building
behind | hinter+D | furniture tree building
in front of | vor+D | furniture tree building
in | in+D | container cupboard
"""

# english | german, with the genitive
CAUSES = """
because of | wegen
despite | trotz
"""

# english | german | gender
NAMES = """
Anna | Anna | f
Maria | Maria | f
Julia | Julia | f
Laura | Laura | f
Emma | Emma | f
Peter | Peter | m
Paul | Paul | m
Martin | Martin | m
Daniel | Daniel | m
David | David | m
"""

# english | german
TOWNS = """
Berlin | Berlin
Hamburg | Hamburg
Munich | München
Vienna | Wien
Cologne | Köln
Rome | Rom
Paris | Paris
Italy | Italien
France | Frankreich
Germany | Deutschland
Austria | Österreich
Spain | Spanien
"""

# english | german; the rest of the closed classes
SMALL_WORDS = """
and | und
or | oder
but | aber
for | denn
so | deshalb
because | weil
although | obwohl
if | wenn
when | wenn
when | als
while | während
before | bevor
after | nachdem
until | bis
as soon as | sobald
that | dass
whether | ob
in order | um
without | ohne
very | sehr
too | zu
quite | ziemlich
where | wo
where | wohin
when | wann
why | warum
home | nach Hause
please | bitte
"""
