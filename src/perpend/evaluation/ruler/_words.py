"""Plain English words for keys and word lists, written out here so that generation needs no download.

The original draws from the `wonderwords` package, whose lists are several times longer. This one has common
words only, so keys take fewer tokens and a little more of a length is haystack. Past its size the word list
is filled with adjective-noun compounds.
"""

from __future__ import annotations

import random
from functools import cache

_NOUNS = """
acorn actor album alley amber anchor angle ankle antler apple apron arch arena arrow artist atlas attic
autumn badge bakery balcony ballad bamboo banjo banner barn barrel basin basket beach beacon beaver bench
berry bicycle bishop blanket blossom boat bolt bonnet border bottle boulder bracket branch bread breeze
brick bridge broom brush bucket buckle budget bulb bundle butter button cabin cabinet cable cactus camel
camera canal candle canoe canvas canyon captain caravan carpet carrot cart castle cattle cedar cellar cement
chair chalk chapel cheese cherry chess chimney chorus cider circle citizen clay cliff clock cloud clover
coach coast cobalt coffee collar column comet compass copper coral cotton couch cousin cradle crane crayon
creek cricket crown crystal cupboard curtain cushion daisy dance dawn desert desk diamond dinner doctor
dolphin donkey door dragon drawer drum eagle earth easel echo elbow elephant ember engine envelope eraser
fabric falcon farmer feather fence fern ferry festival fiddle field finger flag flame flask flute forest
fork fossil fountain fox frame garden garlic gate geese giant ginger glacier glass glove goat goose grain
granite grape gravel guitar hammer harbor harvest hatch hedge helmet herb heron hill hinge honey horizon
horn hotel island ivory ivy jacket jaguar jar jasmine jelly jewel journey judge jungle kettle key kitchen
kite kitten ladder lagoon lake lamp lantern lava lawn leaf lemon letter lettuce library lichen lily
limestone linen lion lizard lobster locket lumber magnet mango maple marble market marsh meadow medal melon
meteor mill mirror mitten monkey moon mosaic moss motor mountain mouse museum mushroom napkin nectar needle
nest net notebook novel oak oasis ocean office olive onion orange orchard orchid otter oven owl oyster
paddle paint palace panda paper parade parrot parsley path peach peanut pearl pebble pelican pencil pepper
piano picnic pillow pine pirate pitcher planet plate plaza plum pocket poem pond pony poplar porch portrait
potato prairie prism puddle pumpkin puppet puzzle quarry queen quilt rabbit raccoon radio raft railway rain
raven recipe reef ribbon river road robin rocket roof rope rose ruby rudder saddle sail salad salmon sand
sandal sapphire satchel saucer scarf school scooter seal shadow sheep shelf shell shepherd shore shovel silk
silver skate sketch slipper smoke snail soap sofa soldier soup spade sparrow spider spoon spring squirrel
stable stadium stamp star station statue steam stone stool storm stove straw stream street sugar summer
sunset swan sweater table tailor teapot temple tent theater thistle thread thunder ticket tiger timber toast
tomato torch tower train trumpet tulip tunnel turtle umbrella uncle valley vase velvet vessel village vine
violet violin volcano wagon wallet walnut water wave wheat wheel whistle widow willow window winter wizard
wolf wool workshop yard yarn zebra zipper
"""
NOUNS = tuple(_NOUNS.split())

_ADJECTIVES = """
able absent active agile alert amused ancient angry anxious apt ashamed average awake aware bald basic
bitter bland blind blue blunt bold brave brief bright brisk broad broken bronze brown busy calm careful
careless charming cheap cheerful chilly clean clear clever clumsy cold common complex cool costly cozy crisp
crooked cruel curious curly curved daily damp dark dear decent deep defiant dense dizzy dry dull dusty eager
early earnest easy elastic elegant empty endless equal exact exotic faded fair faint faithful famous fancy
fast fearless fierce fine firm flat fluffy foggy fond formal fragile frank free fresh friendly frosty frozen
full funny fuzzy gentle giddy glad glossy golden good graceful grand gray great greedy green grumpy handy
happy hard harsh hasty healthy heavy helpful hollow honest huge humble humid hungry icy ideal idle jolly
joyful juicy keen kind large late lazy lean light likely little lively local lone long loose loud lovely
loyal lucky mad major mellow merry mighty mild misty modern modest moist muddy narrow nasty natural neat
nervous new nice noble noisy normal odd old open ornate pale patient perfect plain playful pleasant plump
polite poor precious pretty prickly prime prompt proper proud pure purple quaint quick quiet rapid rare raw
ready real red rich rigid ripe robust rosy rough round royal rude rural rusty sad safe salty scarce secret
selfish serene shaggy sharp shiny short shy silent silly simple sleepy slim slow small smart smooth snug
sober soft solid sour spare sparse spicy spotless square stale steady steep stern sticky stiff still
straight strange strict strong sturdy sudden sunny superb sweet swift tall tame tart tasty tender tense
thick thin thirsty tidy tight tiny tired tough tranquil true typical upset urban useful usual vague vain
vast vivid warm wary weak wealthy weary wet white whole wicked wide wild wise witty wooden worthy wrong
yellow young zesty
"""
ADJECTIVES = tuple(_ADJECTIVES.split())

_VERBS = """
accept admire admit advise agree allow announce answer appear applaud argue arrange arrive ask attach attend
avoid balance bathe behave believe belong blame bless boast borrow bounce bow breathe build burn bury buy
calculate call carry carve cause change chase check choose chop claim clap climb collect compare complain
compose confess connect consider contain continue cook copy cough count cover crash crawl create cross cry
cycle damage dare decide decorate delay deliver depend describe destroy detect develop dig disagree discover
divide double doubt draw dream dress drift drink drive drop earn eat educate employ encourage enjoy enter
escape examine excuse exercise exist expand expect explain explore extend fail fasten feed fetch fill fix
float flow fly fold follow forgive form gather gaze give glow glue grab greet grin grow guard guess guide
handle hang happen haunt heal heap hear help hide hop hover hug hum hunt hurry identify ignore imagine
impress improve include inform inject injure instruct intend interrupt introduce invent invite join juggle
jump kick kneel knit knock know label laugh launch learn leave lend level lick lift like list listen live
load lock lose love maintain manage march mark marry match matter measure meddle melt mend mix moan mourn
move multiply murmur nod notice number obey object observe obtain occur offer order owe own pack park part
pass pause peel perform permit persuade phone pick pinch plan plant play please plug point polish pour
practise pray preach prefer prepare present preserve press pretend prevent print produce promise protect
provide pull pump punch push question queue race reach read realise receive recognise record reduce reflect
refuse regret reign reject rejoice relax release rely remain remember remind remove repair repeat replace
reply report request rescue return rinse risk roll rub rule run rush sack satisfy save scatter scold scrape
scream scrub search see sell send separate serve settle shake share shave shelter shiver shout shrug sigh
signal sing sip sit ski skip slap sleep slide slip smell smile snatch sneeze sniff snore snow solve sparkle
speak spell spend spill spray sprout squeak squeeze stand stare start stay steer step stir stitch stop store
stretch strip study stuff subtract succeed suffer suggest suit supply support suppose surprise surround
suspect suspend swim switch talk tap taste teach tease tell thank think throw tickle tie time tip touch tour
tow trace trade travel treat tremble trot trust try tug tumble turn twist type understand undress unite
unlock unpack use vanish visit wail wait wake walk wander want warn wash waste watch weigh welcome whirl
whisper win wink wipe wish wobble wonder work worry wrap wreck write yawn yell zoom
"""
VERBS = tuple(_VERBS.split())


@cache
def compounds() -> tuple[str, ...]:
    """Every adjective-noun pair, sorted: the keys of needles."""
    return tuple(sorted(f"{adjective}-{noun}" for adjective in set(ADJECTIVES) for noun in set(NOUNS)))


@cache
def singles() -> tuple[str, ...]:
    """Every word once, sorted."""
    return tuple(sorted({*NOUNS, *ADJECTIVES, *VERBS}))


def draw(rng: random.Random, count: int) -> list[str]:
    """`count` different words: single ones first, compounds where those run out."""
    if count <= len(singles()):
        return rng.sample(singles(), count)
    words = rng.sample(singles(), len(singles())) + rng.sample(compounds(), count - len(singles()))
    rng.shuffle(words)
    return words
