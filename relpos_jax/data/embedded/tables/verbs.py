"""The verbs, one a line: `english | german | subject | objects | tags`.

German: `auf-stehen` is separable, `ver=kaufen` is not, `sich` is reflexive, `*` takes sein. An
object is `preposition>marking:classes`, with ? when it may be left out. The preposition is the
English one. The marking is a German case (A, D), a preposition with its case (auf+A), or `place`,
`goal`, `origin`, `town`, `spot`, where the noun decides on the preposition. The classes are those
of the nouns that make sense. Tags: a `state` has neither progressive nor time; what
happens by `chance` is not planned; a `point` has no duration; what is `told` has no modal; what is
done `once` is no habit; only what is `lasting` goes on until something; it may be done for
`hunger`; `@class` names the places where it happens; the others are those of the manners.
"""

VERBS = """
sleep | schlafen | person pet baby | | calm @home lasting
wake up | auf-wachen* | person baby | | point
fall asleep | ein-schlafen* | person pet baby | | point
get up | auf-stehen* | person | | slow
work | arbeiten | person | | effort alone @workplace lasting
rest | sich aus-ruhen | person | | @home lasting
hurry | sich be=eilen | person | |
dance | tanzen | person | | joy alone @garden @square @beach @hotel lasting
sing | singen | person bird-like | A:song? | joy voice @home lasting
laugh | lachen | person | about>über+A:tale film? | voice
cry | weinen | person baby | | voice @home lasting
smile | lächeln | person | |
swim | schwimmen* | person dog duck | in>in+D:waters? | slow alone lasting
hike | wandern* | person | | alone joy @woods
go for a walk | spazieren_-gehen* | person | | alone @outdoors
go shopping | ein-kaufen | person | | alone @shop
run | laufen* | person pet | goal:home outdoors road woods | slow
go | gehen* | person | goal:home outdoors public workplace shop stop town church castle | slow alone
drive | fahren* | person | goal:town shop stop workplace beach sea lake castle | slow alone
travel | reisen* | person | town | transport alone
fly | fliegen* | bird-like flyer | over>über+A:building waters town woods | slow
come | kommen* | person | to>zu+D:event | transport alone
return | zurück-kommen* | person | origin:outdoors public workplace shop stop town | alone
arrive | an-kommen* | person ride | at>an+D:stop | point
depart | ab-fahren* | ride | | told
get | ein-steigen* | person | on>in+A:bus train tram | slow
get off | aus-steigen* | person | >aus+D:bus train tram | slow
stay | bleiben* | person | place:home town public | alone lasting
live | wohnen | person | place:town house castle island | alone state
sit | sitzen | person cat | spot:seat | alone
stand | stehen | person | spot:furniture wood building | state
stand | stehen | crockery | spot:table desk shelf cupboard | state
lie | liegen | item pet | spot:furniture wood container | state
sit down | sich setzen | person | on>auf+A:seat | slow
jump | springen* | cat dog rabbit young | onto>auf+A:surface | bold
climb | klettern* | cat monkey boy thief | onto>auf+A:roof wood | slow bold
fall | fallen* | crockery toy book | from>von+D:surface | chance
fall | fallen* | knight prince farmer | from>von+D:horse | chance
bark | bellen | dog | | voice @outdoors
shine | scheinen | sun moon lamp | | told
bloom | blühen | plant | | told @garden @park
grow | wachsen* | plant | | told slow @garden @forest
burn | brennen | candle building | | told chance
begin | beginnen | event film course | | point told
end | enden | event film course | | point told
wait | warten | person | for>auf+A:person ride | patience @stop lasting
think | denken | person | of>an+A:person topic journey |
dream | träumen | person | of>von+D:sweets journey person monster |
speak | sprechen | person | with>mit+D:person | voice
speak | sprechen | person | about>über+A:topic event film work weather | voice
fight | kämpfen | hero prince soldier | against>gegen+A:monster bear lion | bold
complain | sich be=schweren | person | about>über+A:noise weather dish heat |
look forward | sich freuen | person | to>auf+A:event journey | state
remember | sich er=innern | person | >an+A:person tale event journey | state
take care | sich kümmern | person | of>um+A:person pet garden baby |
fall in love | sich ver=lieben | person | with>in+A:noble singer actress painter tourist | chance
take part | teil-nehmen | person | in>an+D:event |
have breakfast | frühstücken | person | | alone @home @tables hunger
watch TV | fern-sehen | person | | alone @room
look | an-sehen | person | at>A:art person building animal | attention
listen | zu-hören | person | to>D:person | attention patience
hear | hören | person | A:song bird-like noise dog storm | state
help | helfen | person | D:person | joy-to
thank | danken | person | D:person, for>für+A:gift letter? | manners
follow | folgen* | person hunter-animal | D:person animal | secret slow
trust | ver=trauen | person | D:person | state
obey | ge=horchen | young soldier dog pupil | D:kin boss | state
answer | antworten | person | D:person | manners
answer | be=antworten | person | A:question letter | manners
congratulate | gratulieren | person | D:person | manners
forgive | ver=zeihen | person | D:person mate |
contradict | wider=sprechen | person | D:person | bold
belong | ge=hören | item cloth vehicle pet | to>D:person | state
meet | treffen | person | A:person | secret @public
visit | be=suchen | person | A:person sight |
greet | be=grüßen | person | A:person | manners
invite | ein-laden | person | A:person, to>zu+D:event? |
call | an-rufen | person | A:person | secret
ask | fragen | person | A:person | manners
ask | stellen | person | D:person, A:question | manners
pick up | ab-holen | person | A:person young baby, from>von+D:stop? |
get to know | kennen-lernen | person | A:person | chance
marry | heiraten | prince knight king | A:princess queen actress singer | secret once
marry | heiraten | princess queen nurse | A:prince knight doctor painter | secret once
kiss | küssen | person noble | A:person noble baby | secret
hug | um=armen | person | A:person young baby |
love | lieben | person | A:person pet work song baby | state
like | mögen | person | A:person animal food film work | state
hate | hassen | person | A:noise monster cold heat | state
miss | ver=missen | person | A:person pet | state
know | kennen | person | A:person sight tale song secret rule | state
see | sehen | person | A:person animal vehicle building monster moon | state
see | sehen | person | A:film | alone
watch | be=obachten | person hunter-animal | A:animal person | secret patience
find | finden | person | A:item money | chance
look | suchen | person | for>A:item person money pet | attention
lose | ver=lieren | person | A:item money cloth | chance
forget | ver=gessen | person | A:item word | chance
bring | bringen | person | A:food drink note item, to>D:person |
bring along | mit-bringen | person | A:food gift work drink |
give | geben | person | A:item money fruit, to>D:person |
show | zeigen | person | A:item sight art garden, to>D:person |
send | schicken | person | A:note gift art money, to>D:person | secret
lend | leihen | person | A:vehicle work money item, to>D:person |
give back | zurück-geben | person | A:item money vehicle, to>D:person |
tell | er=zählen | person | A:tale secret, to>D:person young | voice
explain | er=klären | person | A:topic task word, to>D:person pupil | patience
describe | be=schreiben | person | A:idea art sight, to>D:person | attention
recommend | empfehlen | person | A:work film tables, to>D:person |
sell | ver=kaufen | person | A:vehicle goods farm, to>D:person |
read aloud | vor-lesen | person | A:tale note, to>D:person young | slow
introduce | vor-stellen | person | A:mate kin, to>D:person |
offer | an-bieten | person | A:food drink, to>D:person | manners
steal | stehlen | thief | A:item money cloth vehicle | secret
steal | stehlen | fox monkey | A:fruit sausage egg | secret hunger
read | lesen | person | A:text | attention alone @room @library @outdoors lasting
write | schreiben | person | A:text | attention alone @room @library lasting
sign | unter=schreiben | person | A:note | attention
translate | über=setzen | person | A:text words | attention effort
learn | lernen | person | A:tongue verse words song | effort
understand | ver=stehen | person | A:topic text words task | state
correct | korrigieren | teacher person | A:slip text words | attention effort
notice | be=merken | person | A:slip person storm | point
solve | lösen | person | A:task | alone once
discuss | be=sprechen | person | A:topic film text |
eat | essen | person | A:food | slow @kitchen @tables @home hunger
eat | fressen | hunter-animal bear snake | A:meat | slow hunger
eat | fressen | farm monkey small-animal | A:fruit bread | slow hunger
drink | trinken | person | A:drink | slow hunger
drink | trinken | animal | A:water | slow hunger
drink | trinken | cat dog | A:milk | slow hunger
cook | kochen | person | A:dish | effort @kitchen hunger
bake | backen | person baker | A:baked | @kitchen @bakery hunger
cut | schneiden | person cook | A:bread fruit cake sausage cheese | attention @kitchen hunger
order | be=stellen | person | A:food drink | @tables hunger
pay | be=zahlen | person | for>A:food drink cloth goods |
try | probieren | person | A:food drink | hunger
prepare | vor-be=reiten | person | A:event journey exam | effort attention
wash | waschen | person | A:cloth gown machine crockery fruit | effort
clean | putzen | person | A:room opening crockery | effort
tidy up | auf-räumen | person | A:room office desk cupboard | effort
paint | malen | person painter | A:picture tree castle | attention
draw | zeichnen | person young | A:animal plant person building | attention
build | bauen | engineer farmer king neighbour man | A:house castle bridge boat shelf | alone once
repair | reparieren | mechanic man boy engineer kin | A:machine device vehicle | effort alone
open | öffnen | person | A:opening letter container bottle | attention
close | schließen | person | A:opening container | attention
turn on | ein-schalten | person | A:device |
turn off | aus-schalten | person | A:device |
put on | an-ziehen | person | A:cloth | slow
put on | an-ziehen | lady | A:gown | slow
take off | aus-ziehen | person | A:cloth | slow
try on | an-probieren | lady | A:cloth gown | @market
wear | tragen | person | A:cloth |
wear | tragen | lady | A:gown |
carry | tragen | person | A:container crockery computer | attention
throw away | weg-werfen | person | A:crockery note | once
break | zer=brechen | person young cat | A:crockery | chance
hide | ver=stecken | person dog | A:item money | secret
buy | kaufen | person | A:goods cloth gown vehicle food, for>für+A:person? | secret @market
need | brauchen | person | A:item money cloth vehicle | state
have | haben | person | A:pet vehicle idea problem question toy friend | state
own | be=sitzen | person | A:house castle hotel vehicle farm | state
receive | be=kommen | person | A:note gift money | chance
choose | wählen | person | A:cloth cake film gift |
choose | wählen | lady | A:gown |
photograph | fotografieren | person tourist | A:building animal person blossom | secret
plant | pflanzen | gardener kin farmer | A:plant | @garden @park
water | gießen | person gardener | A:blossom tree | @garden
pick | pflücken | person young | A:blossom fruit | @garden hunger
feed | füttern | person | A:pet farm | attention
catch | fangen | hunter-animal | A:small-animal | bold hunger
catch | fangen | policeman | A:thief | bold
chase | jagen | hunter-animal hunter | A:small-animal duck | bold hunger
bite | beißen | dog snake | A:person | chance
save | retten | hero prince doctor | A:noble young person | bold once
protect | schützen | hero soldier mother dog | A:noble young |
leave | ver=lassen | person | A:building town room shop workplace | slow secret
cross | über=queren | person animal | A:road waters | slow
reach | er=reichen | person ride | A:town island | point
play | spielen | young person dog | with>mit+D:toy young cat dog? | joy @outdoors @room lasting
play | spielen | person | A:game | joy lasting
play | spielen | person | A:instrument | joy lasting
win | gewinnen | person | A:game money | chance
lay | legen | person | A:item, on>auf+A:surface shelf |
place | stellen | person | A:crockery container, on>auf+A:surface shelf | attention
put | stecken | person | A:key money ring pencil, into>in+A:container | secret
hang | hängen | person | A:art clock, on>an+A:wall | attention
push | schieben | person | A:vehicle | effort
pull | ziehen | horse person | A:boat vehicle | slow
ride | reiten* | noble hero farmer soldier | goal:woods castle village meadow beach | slow alone
teach | unter=richten | teacher | A:pupil student young | patience
examine | unter=suchen | doctor | A:person baby | attention
park | parken | driver person | A:car motorcycle | attention
borrow | aus-leihen | person | A:work vehicle |
celebrate | feiern | person | A:party | joy @garden @tables
organise | organisieren | person | A:event journey | effort
"""

# The verbs that govern a clause: `english | german | kinds | tags`. Kinds: that (dass), whether
# (ob), question (indirect w-question), zu (zu-infinitive), gerund (English -ing, German zu).
CLAUSE_VERBS = """
say | sagen | that | told
believe | glauben | that | state
think | denken | that | told
know | wissen | that question | state
hope | hoffen | that zu | told
claim | be=haupten | that | told
notice | be=merken | that | point
fear | fürchten | that | state
hear | hören | that | point
ask | fragen | whether question | told
wonder | sich fragen | whether question | told
try | ver=suchen | zu |
decide | be=schließen | zu | point
plan | planen | zu |
promise | ver=sprechen | zu | point
forget | ver=gessen | zu | point
begin | beginnen | zu | point
refuse | sich weigern | zu | point
stop | auf-hören | gerund | point
"""
