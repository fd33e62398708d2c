"""Word lists the data generator draws from: names, nouns by theme, adjectives, and made-up words.

Made-up words (`pseudo_word`, `pseudo_name`) exist so that copying, spelling and field extraction are
learned as operations on letters and tokens, not as a table of the words listed here.
"""

import random
import re

GIRL_NAMES = """Anna Mia Lily Emma Zoe Rosa Nora Clara Ella Ivy Ruby Luna Sara Maya Lucy Hana Tina Grace Alice Daisy
Bella Sofia Eva Julia Nina Olga Pia Rita Stella Vera Wanda Yara Amy Betty Carla Dora Elsa Freya Greta Holly Iris Jane
Kate Laura Molly Nell Olive Penny Rose Sally Tess Una Violet Willa Ada Bea Cora Dina Edith Fay Gina Hazel Ida
Priya Aisha Mei Yuki Leila Fatima Amara Ingrid Paula Maria Helen Susan Linda Sarah Emily Chloe""".split()

BOY_NAMES = """Tom Ben Max Leo Sam Jack Finn Noah Oscar Hugo Theo Luke Adam Eli Felix Henry Ivan Jonas Karl Liam
Milo Nico Otto Paul Ravi Simon Toby Victor Will Yusuf Zack Alex Bruno Chris David Erik Fred George Hans Ian Jake Ken
Lars Mark Ned Oliver Peter Quinn Rob Sean Tim Umar Vince Walter Amir Boris Carlos Dan Ed Frank Greg Harry
Omar Kofi Chen Hiro Diego Pablo Marco Anton James John Mike Bob Charlie Arthur Rex""".split()

NICKNAMES = """Pip Bramble Whiskers Biscuit Pepper Honey Clover Button Pebble Sunny Patch Fern Hop Pumpkin Acorn Mossy
Rusty Snowy Bingo Cocoa Waffle Ziggy Bubbles Dusty Maple Nutmeg Olly Poppy Rolo Sprout Tiki Wiggles Bolt Sparky Gizmo
Dot Fizz Scout Rocket Cinder Ember Misty Storm Shadow Star Willow Hopper Tinker Muffin Peanut""".split()

CITIES = """Paris London Rome Berlin Madrid Tokyo Oslo Lima Cairo Delhi Vienna Prague Dublin Athens Lisbon Boston
Chicago Denver Dallas Seattle Toronto Sydney Nairobi Lagos Warsaw Zurich Geneva Milan Venice Munich Hamburg Porto Kyoto
Seoul Bangkok Hanoi Havana Bogota Quito Helsinki Stockholm Copenhagen Brussels Budapest Istanbul Moscow Miami Austin
Mumbai Leeds Bristol Glasgow Lyon Nice Naples Seville Krakow Riga Tallinn""".split()

FRUIT = """apple banana cherry grape lemon lime mango melon orange peach pear plum kiwi fig date berry papaya apricot
strawberry raspberry blueberry blackberry pineapple coconut avocado olive pumpkin""".split()

FOODS = """bread cheese soup rice pasta cake pie cookie honey jam butter egg salad pizza sandwich noodle potato carrot
tomato onion pepper corn bean pea mushroom garlic spinach cabbage lettuce cucumber waffle pancake muffin chocolate
candy yogurt milk juice tea coffee water sugar salt flour nut walnut almond peanut""".split()

ANIMALS = """cat dog fox rabbit bear mouse owl duck frog turtle hedgehog squirrel lion elephant penguin pig horse sheep
goat bee bird monkey tiger zebra giraffe wolf deer camel donkey cow hen goose swan eagle parrot crow snake lizard whale
dolphin shark crab octopus snail ant spider butterfly beetle otter beaver badger mole bat koala kangaroo panda
crocodile hippo rhino seal walrus moose raccoon hamster chicken rooster turkey peacock flamingo""".split()

THINGS = """ball book lamp chair table clock key door window box bag cup plate spoon fork knife bottle basket bell brush
bucket button candle card carpet coat coin comb computer crayon desk doll drum envelope fan feather flag flute glass
glove guitar hammer hat helmet jacket kettle kite ladder letter map mirror needle notebook paper pen pencil phone
piano picture pillow pocket pot puzzle radio ribbon ring rope ruler scarf shirt shoe shovel soap sock stamp stone
string suitcase sweater telescope tent ticket towel toy train truck trumpet umbrella vase violin wagon wallet watch
wheel whistle wire""".split()

PLACES_WORDS = """garden river mountain forest beach island lake desert valley village city town street bridge castle
farm field school library museum market kitchen bedroom attic cellar station airport harbor tower temple park hill
cave meadow pond ocean sea sky moon sun star planet cloud rain snow wind storm thunder lightning rainbow fire ice
earth sand""".split()

ADJECTIVES_WORDS = """happy sad angry brave calm clever cold cool dark deep dry early easy fair fast fine fresh funny
gentle glad good grand great green happy hard heavy high honest hot huge kind large late lazy light little long loud
lucky merry new nice noisy old plain polite proud quick quiet rich rough round sharp short shy silly simple sleepy
slow small smart smooth soft sour strange strong sweet tall thick thin tiny tired warm weak wet wide wild wise young
beautiful careful cheerful colorful curious dangerous delicious different famous favorite important interesting
wonderful yellow purple""".split()

OTHER_WORDS = """hello world letter summer winter spring autumn morning evening night today tomorrow yesterday week
month year minute second hour friend family mother father sister brother teacher doctor farmer baker sailor pilot
painter singer dancer writer king queen prince princess knight wizard dragon robot pirate giant music dance song
story poem game sport soccer tennis football basketball swimming running jumping reading writing math science history
color number word sentence question answer problem idea dream wish secret surprise adventure journey treasure magic
mystery language model expert engine memory keyboard internet program banana mississippi tennessee committee
balloon bookkeeper success address coffee cheese butterfly happiness bubble pepper giggle parallel alphabet dictionary
elephant umbrella vegetable breakfast lunch dinner supper birthday holiday vacation weekend window weather""".split()

MORE_WORDS = """one two three four five six seven eight nine ten eleven twelve twenty hundred thousand able about above
accept across act action actor add afraid after again age ago agree air album all almost alone along already also always
amount anchor ankle answer any apartment appear area arm army arrive art artist ask asleep atom aunt author autumn avoid
awake away baby back bacon badge bake band bank bar bark barn base basic basin bath battle beak beam beard beat because become
bed beef beer before begin behind believe belt bench bend best better between bicycle bike bill birth bite blanket blind block
blood blow board body bomb bone boot border borrow bottom bowl brain branch brand brass break breath brick bride brief bring
broken broom budget build bullet burger bus bush business busy buy buyer cabin cable cactus cage calendar call camera camp canal
canoe canvas capital captain carbon care cargo carry cartoon case cash catch cause ceiling center century chain chance change
chapter charge cheap check cheek chest chief child choice choose church cinema circle circus clay clean clear climb clinic close
cloth clown club coach coal coast code coin collar college column come common company compass concert contact control cook copper
copy corner cost cotton couch country couple courage course cousin cover cradle craft crane crash cream create credit crew cross
crowd crown cry cube cure curtain curve custom cut daily damp danger daughter dawn dead deal dear debt decide deck degree dentist
depend describe design detail device dial diamond diary diet dig dinosaur direct dirt dish dive dizzy dock document dollar dome
double doubt dough down dragonfly draw drawer dress drift drink drive drop dust duty each eager ear east eat echo edge effort
either elbow electric elevator else empty end enemy enjoy enough enter equal error escape even event ever every exact example
except exit expect explain eye fabric face fact factory fail faith fall false far farm fashion fat fault feel fence ferry fever
few fiber fiction fight figure file fill film final find finger finish firm first fish fist fix flame flat flavor fleet flesh
flight float flood floor flow flower fold follow foot force forget form forward fountain frame free freedom freeze fridge friendly
front frost fruit fuel full fun fur future gallery gap garage gas gate gather gear general gentle gift ginger give glad globe glow
glue go goal gossip grain gram grand grandmother grandfather grass gravity green grey grill grip grocery ground group grow guard
guess guest guide gulf gun gym habit hair half hall hand handle hang harvest hat have hawk head health hear heart heat heel height
hero hide hill hint hip hire hit hobby hold hole hollow home hood hook hope horn hospital host hotel house how hunger hunt hurry
hurt husband idea image impact inch income index ink inn insect inside iron ivory jaw jazz jeans jelly jewel job join joke journal
judge jump jungle junior jury just keen keep kettle kick kid kind kingdom kiss kit knee knock knot know label labor lady land
lane last late laugh laundry law lawn lawyer layer lead leaf learn leather leave left leg lens less lesson let level lid lie life
lift like limb limit line lion lip list listen litter live load loan local lock log logic long look loop lose lot love lower loyal
lung machine mad mail main make man manner many marble march mark marry mask mass master match mate matter meal mean measure meat
medal medicine meet melody melt member menu mercy message metal meter middle mild mile mill mind mine minor mint miracle miss
mistake mix mobile model modern moment money monster mood moral motor mount mouth move movie mud muscle museum must nail name
narrow nation native nature navy near neat neck need neighbor nephew nerve nest net never news next niece none noon north nose
note nothing notice novel nurse oak oasis object odd offer office often oil open opera opinion orchard order organ origin other
oven over owner oxygen pace pack page pain paint pair palace palm pan pants parade parent park part party pass past pasta pastry
path patient pattern pause pay peace peak pearl pedal penny people perfect perfume permit person pet photo phrase picnic piece
pigeon pile pill pin pine pint pipe pit pizza plain plan plane planet plant plastic platform play plaza please plenty plug plus
poet point poison pole police pond pony pool poor popcorn port post potion pound powder power prayer present press pretty price
pride prime print prison prize profit promise proof proper protect public pull pulse pump punch pupil puppet pure purse push queue
quiz quote race rack radar rail raise range rare rate raw ray reach react ready real reason recipe record referee relax remote
rent repair reply report rescue rest result return reward rib ride right rise risk rival road roast robin rocket role roll roof
room root rough row royal rubber rude rule run runner rush rust sad safe sail salad salmon sample sauce save saw say scale scene
scissors score screen screw script seat second seed seek sell send sense series serve set seven shade shake shape share sheet shelf
shell shelter shield shift shine ship shock shoot shop shore short shot shoulder shout show shower shut sick side sign signal
silence silk silver sing sink sister sit size skate skill skin skirt skull sleep sleeve slice slide slip slope snack sneeze soda
sofa soft soil soldier solid solve son soon sort soul sound soup south space spare speak speed spell spend spice spin spirit
splash split spoil spot spray square stable stadium staff stage stairs stand start state stay steam steel step stick still sting
stomach stop store storm straight strange straw stream stress strike strip study stuff style sudden suit sum summit sunset super
supply sure surface swap swear sweep swing switch sword symbol system tail take tale talk tank tap tape target task taste taxi
team tear teeth tell temple ten term test text thank theater thief thing think thorn thread throat throne throw thumb tide tie
tight tile time tin tip tired title toast toe together toilet tongue tool tooth top total touch tour toward track trade trail
train trap travel tray treat tree trial tribe trick trip trophy trouble trust truth try tube tulip tune tunnel turn twin twist
type uncle under uniform unit until upper upset use useful usual valley value van vapor vault vein verb very vest victory video
view villain vine virus visit voice volcano volume vote voyage wage waist wait wake walk wall want war ward warm warn wash waste
wave wax way wealth weapon wear web wedding weed weight welcome well west wheat where which while whisper who whole why wife
win wing winner wire wise witch with wolf woman wonder wood wool work worker worm worry worth wound wrap wrist write wrong yard
yarn yeast yes yet yolk yoga young youth zero zipper zone zoo rust python linux kernel server browser""".split()

WORDS = sorted(set(MORE_WORDS + FRUIT + FOODS + ANIMALS + THINGS + PLACES_WORDS + ADJECTIVES_WORDS + OTHER_WORDS))
LIST_GROUPS = [FRUIT, FOODS, ANIMALS, THINGS, PLACES_WORDS, ADJECTIVES_WORDS, WORDS, WORDS, WORDS, WORDS]
NAMES = sorted(set(GIRL_NAMES + BOY_NAMES))

COLORS = "red blue green yellow orange purple pink white black brown gray silver golden".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()

_ONSETS = "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr sh sk sl sm sn sp st sw th tr".split()
_VOWELS = "a e i o u a e i o u a e i o ai ea ee oa oo ou ie".split()
_CODAS = ["", "", "", "", "n", "r", "l", "s", "t", "m", "k", "p", "d", "nd", "st", "rk", "lt", "sh", "ck", "x", "ng"]


_RUDE = re.compile(
    r"cock|shit|fuck|fuk|cunt|dick|tits?$|^tit|nig|fag|rape|slut|whor|cum|piss|poop|penis|anal|nazi|sex|twat|wank|crap|prick|spic|kike|homo|porn|turd|coon|paki|shat|arse|anus"
)


def pseudo_word(rng: random.Random, syllables: int | None = None) -> str:
    """A pronounceable lower-case word of 1–4 syllables."""
    while True:
        n = syllables or rng.choice((1, 2, 2, 2, 3, 3, 4))
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(n))
        if not _RUDE.search(word):
            return word


# Every printable vocabulary entry, set by generate.tokenizer; empty until a tokenizer exists and in the evaluation.
PIECES: list[str] = []
_LETTERS: list[str] = []

ACCENTED = """Zoë José Zürich Köln Łódź München Malmö Åsa Søren François Jürgen Chloé Renée Noël Dvořák naïve café jalapeño über señor
Núria Müller Çelik Øystein Ağa Jiří Gül Weiß Straße Bjørn Siân Þóra Ångström crème façade Škoda Győr Ñandú Íñigo""".split()
_RANGES = [(0xC0, 0xFF), (0x100, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x627, 0x63A), (0x905, 0x939), (0x3041, 0x3093),
           (0x30A1, 0x30F3), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F600, 0x1F64F), (0x1F300, 0x1F5FF), (0x2190, 0x21FF), (0x2200, 0x22FF)]


def set_pieces(entries: list[str]) -> None:
    """Makes the vocabulary's entries known to `piece_text` and `any_word`."""
    PIECES[:] = [e for e in entries if e.strip() and e.isprintable() and "\ufffd" not in e and not e.startswith("<|")]
    _LETTERS[:] = [e for e in PIECES if e.isascii() and e.isalpha() and e.islower()]


def foreign_word(rng: random.Random) -> str:
    """A word or a few characters outside ASCII."""
    if rng.random() < 0.4:
        return rng.choice(ACCENTED)
    lo, hi = rng.choice(_RANGES)
    out = "".join(chr(rng.randint(lo, hi)) for _ in range(rng.randrange(1, 6)))
    return out if out.isprintable() else rng.choice(ACCENTED)


def piece_text(rng: random.Random) -> str:
    """Vocabulary entries side by side; a digit between two keeps them apart in the tokenizer."""
    out = ""
    for _ in range(rng.randrange(1, 9)):
        out += rng.choice(PIECES or WORDS) + rng.choice(("", " ", " ", str(rng.randrange(10)), str(rng.randrange(10))))
    return out.strip()


def pseudo_name(rng: random.Random) -> str:
    """A capitalised made-up name."""
    return pseudo_word(rng, rng.choice((1, 2, 2, 3))).capitalize()


def person_name(rng: random.Random, made_up: float = 0.2) -> str:
    """A first name; with probability `made_up` one that is in no list."""
    if rng.random() < 0.03 * (made_up > 0):
        return rng.choice(ACCENTED).capitalize()
    return pseudo_name(rng) if rng.random() < made_up else rng.choice(NAMES)


def any_word(rng: random.Random, made_up: float = 0.2) -> str:
    """A lower-case word; with probability `made_up` one that is in no list."""
    if _LETTERS and rng.random() < 0.1 * made_up:
        return "".join(rng.choice(_LETTERS) for _ in range(rng.randrange(1, 4)))[:16]
    return pseudo_word(rng) if rng.random() < made_up else rng.choice(WORDS)


def city_name(rng: random.Random) -> str:
    """A city, one time in six a made-up one."""
    return pseudo_name(rng) if rng.random() < 0.17 else rng.choice(CITIES)


def noun(rng: random.Random, listed: list[str]) -> str:
    """A word of `listed`, or one time in four any word at all."""
    return any_word(rng, 0.3) if rng.random() < 0.25 else rng.choice(listed)


def article(noun: str) -> str:
    """`noun` with "a" or "an" in front."""
    return ("an " if noun[0].lower() in "aeiou" and not noun.startswith(("uni", "use", "one")) else "a ") + noun
