"""The nouns: `english[/plural] | article Singular [-genitive] [Plural] | classes [| place]`.

Masculine and neuter nouns show the ending of the genitive; -n, -en on a masculine one means weak
declension (den Jungen, dem Jungen). No plural: not counted (milk) or not used so. The classes say
with which verbs and adjectives a noun makes sense. The place names a row of `words.PLACES`.
"""

NOUNS = """
teacher | der Lehrer -s Lehrer | person job
student | der Student -en Studenten | person job
pupil | der Schüler -s Schüler | person
doctor | der Arzt -es Ärzte | person job
nurse | die Krankenschwester Krankenschwestern | person job lady
farmer | der Bauer -n Bauern | person job
baker | der Bäcker -s Bäcker | person job
cook | der Koch -s Köche | person job
policeman/policemen | der Polizist -en Polizisten | person job
soldier | der Soldat -en Soldaten | person job
painter | der Maler -s Maler | person job
singer | die Sängerin Sängerinnen | person job lady
actress | die Schauspielerin Schauspielerinnen | person job lady
writer | der Schriftsteller -s Schriftsteller | person job
engineer | der Ingenieur -s Ingenieure | person job
mechanic | der Mechaniker -s Mechaniker | person job
judge | der Richter -s Richter | person job
lawyer | der Anwalt -s Anwälte | person job
gardener | der Gärtner -s Gärtner | person job
hunter | der Jäger -s Jäger | person job
waiter | der Kellner -s Kellner | person job
saleswoman/saleswomen | die Verkäuferin Verkäuferinnen | person job lady
secretary | die Sekretärin Sekretärinnen | person job lady
scientist | der Wissenschaftler -s Wissenschaftler | person job
driver | der Fahrer -s Fahrer | person job
thief/thieves | der Dieb -es Diebe | person
tourist | der Tourist -en Touristen | person
customer | der Kunde -n Kunden | person
guest | der Gast -es Gäste | person
neighbour | der Nachbar -n Nachbarn | person mate
colleague | der Kollege -n Kollegen | person mate
boss | der Chef -s Chefs | person mate
friend | der Freund -es Freunde | person mate
girlfriend | die Freundin Freundinnen | person mate lady
man/men | der Mann -es Männer | person
woman/women | die Frau Frauen | person lady
boy | der Junge -n Jungen | person young
girl | das Mädchen -s Mädchen | person young lady
child/children | das Kind -es Kinder | person young
baby | das Baby -s Babys | baby
king | der König -s Könige | person noble
queen | die Königin Königinnen | person noble lady
prince | der Prinz -en Prinzen | person noble
princess | die Prinzessin Prinzessinnen | person noble lady
knight | der Ritter -s Ritter | person hero
witch | die Hexe Hexen | person lady
giant | der Riese -n Riesen | monster
dragon | der Drache -n Drachen | monster
father | der Vater -s | person kin
mother | die Mutter | person kin lady
brother | der Bruder -s Brüder | person kin
sister | die Schwester Schwestern | person kin lady
grandfather | der Großvater -s | person kin
grandmother | die Großmutter | person kin lady
uncle | der Onkel -s Onkel | person kin
aunt | die Tante Tanten | person kin lady
son | der Sohn -es Söhne | person kin
daughter | die Tochter Töchter | person kin lady
dog | der Hund -es Hunde | animal pet hunter-animal
cat | die Katze Katzen | animal pet hunter-animal
horse | das Pferd -es Pferde | animal pet farm
cow | die Kuh Kühe | animal farm
pig | das Schwein -s Schweine | animal farm
goat | die Ziege Ziegen | animal farm
duck | die Ente Enten | animal farm bird-like
goose/geese | die Gans Gänse | animal farm bird-like
bird | der Vogel -s Vögel | animal bird-like small-animal
mouse/mice | die Maus Mäuse | animal small-animal
rabbit | das Kaninchen -s Kaninchen | animal pet small-animal
bear | der Bär -en Bären | animal wild
wolf/wolves | der Wolf -es Wölfe | animal wild hunter-animal
fox | der Fuchs -es Füchse | animal wild hunter-animal
lion | der Löwe -n Löwen | animal wild hunter-animal
elephant | der Elefant -en Elefanten | animal wild
monkey | der Affe -n Affen | animal wild
snake | die Schlange Schlangen | animal wild
bread | das Brot -es | food baked
cheese | der Käse -s | food
meat | das Fleisch -es | food dish
rice | der Reis -es | food dish
honey | der Honig -s | food
chocolate | die Schokolade | food sweets
soup | die Suppe Suppen | food dish
salad | der Salat -s Salate | food
cake | der Kuchen -s Kuchen | food baked sweets
egg | das Ei -s Eier | food dish
potato/potatoes | die Kartoffel Kartoffeln | food dish
tomato/tomatoes | die Tomate Tomaten | food fruit
apple | der Apfel -s Äpfel | food fruit
pear | die Birne Birnen | food fruit
cherry | die Kirsche Kirschen | food fruit
banana | die Banane Bananen | food fruit
sausage | die Wurst Würste | food dish
water | das Wasser -s | drink
milk | die Milch | drink
coffee | der Kaffee -s | drink hot-drink
tea | der Tee -s | drink hot-drink
juice | der Saft -es | drink
beer | das Bier -es | drink
wine | der Wein -s | drink
book | das Buch -es Bücher | text item work goods
newspaper | die Zeitung Zeitungen | text item
letter | der Brief -es Briefe | text item note
novel | der Roman -s Romane | text work
poem | das Gedicht -es Gedichte | text work verse
postcard | die Postkarte Postkarten | text item note
report | der Bericht -s Berichte | text note
dictionary | das Wörterbuch -s Wörterbücher | item goods
story | die Geschichte Geschichten | text tale
fairy tale | das Märchen -s Märchen | text tale
joke | der Witz -es Witze | tale
coat | der Mantel -s Mäntel | cloth
dress | das Kleid -es Kleider | gown
shirt | das Hemd -es Hemden | cloth
jacket | die Jacke Jacken | cloth
hat | der Hut -es Hüte | cloth
skirt | der Rock -s Röcke | gown
belt | der Gürtel -s Gürtel | cloth
scarf/scarves | der Schal -s Schals | cloth
sweater | der Pullover -s Pullover | cloth
car | das Auto -s Autos | vehicle machine
bus | der Bus -ses Busse | ride machine
train | der Zug -es Züge | ride
tram | die Straßenbahn Straßenbahnen | ride
ship | das Schiff -es Schiffe | ride
bicycle | das Fahrrad -s Fahrräder | vehicle machine
motorcycle | das Motorrad -s Motorräder | vehicle machine
boat | das Boot -es Boote | vehicle
plane | das Flugzeug -s Flugzeuge | flyer
house | das Haus -es Häuser | building home own-place | in
garden | der Garten -s Gärten | home outdoors own-place | in
kitchen | die Küche Küchen | home room own-place | in
room | das Zimmer -s Zimmer | home room own-place | in
living room | das Wohnzimmer -s Wohnzimmer | home room own-place | in
bedroom | das Schlafzimmer -s Schlafzimmer | home room own-place | in
cellar | der Keller -s Keller | home room own-place | in
school | die Schule Schulen | building public | school
library | die Bibliothek Bibliotheken | building public | school
museum | das Museum -s Museen | building public sight | school
theatre | das Theater -s Theater | building public | school
cinema | das Kino -s Kinos | public | school
restaurant | das Restaurant -s Restaurants | public tables | school
café | das Café -s Cafés | public tables | school
hotel | das Hotel -s Hotels | building public | school
zoo | der Zoo -s Zoos | public | school
supermarket | der Supermarkt -s Supermärkte | shop workplace | school
bakery | die Bäckerei Bäckereien | shop workplace | school
office | das Büro -s Büros | workplace | office
factory | die Fabrik Fabriken | building workplace | office
hospital | das Krankenhaus -es Krankenhäuser | building workplace | office
city | die Stadt Städte | town sight | office
village | das Dorf -es Dörfer | town | office
castle | das Schloss -es Schlösser | building sight | in
church | die Kirche Kirchen | building sight | in
park | der Park -s Parks | outdoors | in
forest | der Wald -es Wälder | outdoors woods | in
market | der Markt -es Märkte | shop | market
station | der Bahnhof -s Bahnhöfe | stop | station
airport | der Flughafen -s Flughäfen | stop | station
lake | der See -s Seen | waters outdoors | station
river | der Fluss -es Flüsse | waters outdoors | station
beach | der Strand -es Strände | outdoors | beach
sea | das Meer -es Meere | waters outdoors | beach
island | die Insel Inseln | land sight | island
mountain | der Berg -es Berge | land | top
street | die Straße Straßen | road outdoors | top
bridge | die Brücke Brücken | road | top
square | der Platz -es Plätze | road outdoors | field
meadow | die Wiese Wiesen | outdoors | field
field | das Feld -es Felder | outdoors | field
roof | das Dach -es Dächer | top-of-house | top
table | der Tisch -es Tische | surface furniture
desk | der Schreibtisch -s Schreibtische | surface furniture
chair | der Stuhl -s Stühle | surface seat furniture
bench/benches | die Bank Bänke | surface seat
sofa | das Sofa -s Sofas | surface seat furniture
bed | das Bett -es Betten | surface seat furniture
shelf/shelves | das Regal -s Regale | furniture
cupboard | der Schrank -s Schränke | closet furniture
box | die Kiste Kisten | container item
basket | der Korb -s Körbe | container item goods
suitcase | der Koffer -s Koffer | container item goods
bag | die Tasche Taschen | container item goods
wall | die Wand Wände | vertical
door | die Tür Türen | opening
window | das Fenster -s Fenster | opening
cup | die Tasse Tassen | item crockery goods
plate | der Teller -s Teller | item crockery goods
glass | das Glas -es Gläser | item crockery
bottle | die Flasche Flaschen | item crockery goods
knife/knives | das Messer -s Messer | item
spoon | der Löffel -s Löffel | item
key | der Schlüssel -s Schlüssel | item
umbrella | der Regenschirm -s Regenschirme | item goods
lamp | die Lampe Lampen | device item goods
radio | das Radio -s Radios | device machine item
computer | der Computer -s Computer | device machine item
clock | die Uhr Uhren | machine item
camera | die Kamera Kameras | machine item
ball | der Ball -s Bälle | item toy goods
doll | die Puppe Puppen | item toy goods
ring | der Ring -es Ringe | item goods
pencil | der Bleistift -s Bleistifte | item
candle | die Kerze Kerzen | item
gift | das Geschenk -s Geschenke | item
stone | der Stein -s Steine | item
picture | das Bild -es Bilder | item art
photo | das Foto -s Fotos | item art
money | das Geld -es | money
piano | das Klavier -s Klaviere | instrument
guitar | die Gitarre Gitarren | instrument
violin | die Geige Geigen | instrument
question | die Frage Fragen | topic question
idea | die Idee Ideen | topic idea
plan | der Plan -s Pläne | topic idea
problem | das Problem -s Probleme | topic task
riddle | das Rätsel -s Rätsel | topic task
secret | das Geheimnis -ses Geheimnisse | topic
rule | die Regel Regeln | topic
mistake | der Fehler -s Fehler | slip
word | das Wort -es Wörter | words
sentence | der Satz -es Sätze | words
language | die Sprache Sprachen | tongue
song | das Lied -es Lieder | song
film | der Film -s Filme | film
game | das Spiel -s Spiele | game event
concert | das Konzert -s Konzerte | event
party | das Fest -es Feste | event
trip | die Reise Reisen | journey
exam | die Prüfung Prüfungen | event
course | der Kurs -es Kurse | event
tree | der Baum -es Bäume | plant wood
flower | die Blume Blumen | plant blossom
rose | die Rose Rosen | plant blossom
sun | die Sonne | unique light
moon | der Mond -es | unique light
weather | das Wetter -s | unique
rain | der Regen -s | unique cause
storm | der Sturm -s Stürme | cause
noise | der Lärm -s | unique cause
heat | die Hitze | unique cause
cold | die Kälte | unique cause
"""
