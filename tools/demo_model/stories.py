"""Short stories from a grammar: one state (who, where, what) is drawn first, every sentence is realised from it.

The price of drawing the state first is that a plot is a fixed order of beats; variety comes from the plots, from
3–6 wordings a beat, from optional beats and from the state. Because all sentences share the state, names, pronouns,
objects and outcomes agree across the story, and questions about it have one answer.
"""

import random
import zlib
from dataclasses import dataclass, field

from words import BOY_NAMES, COLORS, FOODS as FOOD_WORDS, FRUIT, GIRL_NAMES, NICKNAMES, THINGS, article

HUMANS = ["girl", "boy", "princess", "prince", "knight", "pirate", "farmer", "baker", "wizard", "sailor", "painter", "teacher",
          "king", "queen", "witch", "astronaut", "grandmother", "grandfather", "fisherman", "doctor", "detective", "student"]
ANIMALS = """cat dog fox rabbit bear mouse owl duck frog turtle hedgehog squirrel lion elephant penguin pig horse sheep
goat monkey kitten puppy tiger zebra giraffe wolf deer donkey cow goose parrot otter beaver badger mole koala panda
hamster raccoon moose camel snail crow hippo kangaroo whale dolphin bee butterfly ant spider chicken
rooster swan eagle crab bat lizard""".split()
FANTASY = ["dragon", "robot", "unicorn", "giant", "ghost", "little monster", "snowman", "fairy", "toy soldier", "dinosaur", "star",
           "cloud", "train", "tree", "moon", "car", "boat", "mermaid", "elf", "troll", "teddy bear", "computer"]
SHE = {"girl", "princess", "fairy", "cow", "goose", "queen", "witch", "grandmother", "mermaid", "hen"}
HE = {"boy", "prince", "snowman", "king", "grandfather", "fisherman", "rooster"}

TRAITS = """brave kind curious shy cheerful clever gentle quiet careful young playful friendly funny small sleepy
stubborn hungry proud helpful lonely""".split()
HOMES_ANY = ["a small house by the river", "a quiet village", "a little house at the edge of the forest",
             "a valley between two hills", "a cottage near the sea", "a house with a green door",
             "a small town by the lake", "an old mill", "a little house on a hill", "a farmhouse far from the city"]
HOMES_ANIMAL = ["a hollow tree", "a warm den under an old oak", "a big green forest", "a meadow full of flowers",
                "a barn full of hay", "a cozy nest of leaves", "a garden behind a white house"]
HOMES_FANTASY = ["a castle made of stone", "a cave behind a waterfall", "a tower above the clouds",
                 "an old workshop", "a forest where it always smelled of honey"]
OBJECTS = """ball kite hat scarf key bell book lamp drum boat blanket basket button ring whistle map flute coin box
umbrella bucket cup wagon ribbon shell teddy balloon mirror crown spoon""".split()
SPOTS = ["under the old bridge", "behind the barn", "next to the well", "in the long grass", "near the pond",
         "under a big leaf", "on top of the hill", "beside the river", "behind the bakery", "under the apple tree",
         "inside a hollow log", "at the end of the path", "between two gray rocks", "by the garden gate"]
PLACES = ["forest", "market", "beach", "park", "lake", "mountain", "meadow", "river", "garden", "village square"]
FOODS = ["apple pie", "warm bread", "honey cake", "vegetable soup", "berry jam", "pancakes", "fresh cheese",
         "sweet cookies", "carrot cake", "hot cocoa"]
TIMES = ["One sunny morning", "One cold morning", "One afternoon", "One windy day", "One rainy day", "One evening",
         "One spring day", "One summer day", "One day in autumn", "One quiet day", "One bright winter morning"]


@dataclass
class Story:
    """A realised story, the state it was made from and questions with their answers."""

    plot: str
    state: dict
    text: str
    summary: str
    themes: list[str]
    questions: list[tuple[tuple[str, ...], str, str]] = field(default_factory=list)
    seed: int = 0
    loves: bool = False


def is_she(name: str) -> bool:
    """The pronoun of a name: always the same one, so that it can be learned."""
    if name in GIRL_NAMES or name in BOY_NAMES:
        return name in GIRL_NAMES
    if name in NICKNAMES:
        return NICKNAMES.index(name) % 2 == 0
    return name[-1] in "aeiy"


def _pronouns(she: bool, prefix: str, out: dict) -> None:
    he, him, his = ("she", "her", "her") if she else ("he", "him", "his")
    out[prefix + "he"], out[prefix + "him"], out[prefix + "his"] = he, him, his
    out[prefix + "He"], out[prefix + "His"] = he.capitalize(), his.capitalize()
    out[prefix + "self"] = "herself" if she else "himself"


def _name(rng: random.Random, kind: str, avoid: str = "") -> str:
    while True:
        if kind in HUMANS or rng.random() < 0.5:
            name = rng.choice(GIRL_NAMES if kind in SHE else BOY_NAMES if kind in HE else rng.choice((GIRL_NAMES, BOY_NAMES)))
        else:
            name = rng.choice(NICKNAMES)
        if name != avoid and not (kind in SHE and not is_she(name)) and not (kind in HE and is_she(name)):
            return name


def _kind(rng: random.Random, avoid: str = "") -> str:
    while True:
        r = rng.random()
        kind = rng.choice(HUMANS if r < 0.28 else FANTASY if r < 0.42 else ANIMALS)
        if kind != avoid:
            return kind


def new_state(rng: random.Random, kind: str | None = None, name: str | None = None) -> dict:
    """Draws hero, friend, places and things."""
    s: dict = {}
    k = kind or _kind(rng)
    while name and (k in SHE and not is_she(name) or k in HE and is_she(name)):
        k = _kind(rng)
    s["k"], s["ak"] = k, article(k)
    s["n"] = name or _name(random.Random(k) if rng.random() < 0.3 else rng, k)
    _pronouns(is_she(s["n"]), "", s)
    s["trait"] = rng.choice(TRAITS)
    s["atk"] = article(f"{s['trait']} {k}")
    homes = HOMES_ANY + (HOMES_ANIMAL * 2 if k in ANIMALS else HOMES_FANTASY * 2 if k in FANTASY else [])
    s["home"] = rng.choice(homes)
    # Half of the time friend and trait follow from the name: greedy decoding then gives different heroes different
    # company, while sampling still meets everybody.
    own = random.Random(s["n"]) if rng.random() < 0.5 else rng
    fk = _kind(own, k)
    s["fk"], s["afk"] = fk, article(fk)
    s["f"] = _name(own, fk, s["n"])
    _pronouns(is_she(s["f"]), "f", s)
    gk = rng.choice([a for a in ANIMALS if a not in (k, fk)])
    s["gk"], s["agk"] = gk, article(gk)
    obj, color = rng.choice(OBJECTS if rng.random() < 0.75 else THINGS), rng.choice(COLORS)
    s["obj"], s["color"] = obj, color
    s["cobj"] = f"{color} {obj}"
    s["acobj"] = article(s["cobj"])
    s["spot"], s["spot2"], s["spot3"] = rng.sample(SPOTS, 3)
    s["place"], s["place2"] = rng.sample(PLACES, 2)
    r = rng.random()
    s["food"] = rng.choice(FOODS) if r < 0.7 else rng.choice(FOOD_WORDS) if r < 0.9 else rng.choice(FRUIT) + rng.choice((" cake", " jam", " juice"))
    s["time"] = rng.choice(TIMES)
    return s


OPENING = [
    "Once upon a time, there was {atk} named {n}. {He} lived in {home}.",
    "Once upon a time, {atk} named {n} lived in {home}.",
    "There was once {atk} called {n}. {He} lived in {home}.",
    "In {home} lived {atk} called {n}.",
    "{n} was {atk} who lived in {home}.",
    "Long ago, in {home}, there lived {atk} whose name was {n}.",
    "This is the story of {n}, {atk} who lived in {home}.",
]
OPENING_EXTRA = [
    "Every morning {he} drank a cup of tea and looked out of the window.",
    "Everyone who met {n} could see how {trait} {he} was.",
    "{He} liked to hum a little song while {he} worked.",
    "{n} knew every path and every stone there.",
    "Most of all, {he} loved {food} and long walks.",
    "{His} best friend was {f} the {fk}.",
]
LOVES = ["{n} loved {food} more than anything.", "Most of all, {he} loved {food}.", "{n} loved {food} and ate some every day.",
         "Everyone knew how much {n} loved {food}."]
CLOSING = [
    "That night {n} slept very well.",
    "And from that day on, {n} smiled a little more often.",
    "{n} and {f} still laugh about it today.",
    "It was the best day {n} could remember.",
    "And that is how the day ended, with a full moon and a warm heart.",
    "The stars came out, and everything was quiet again.",
    "{n} went home happy.",
]

# Each plot: themes (how a person may ask for it), beats (each a list of wordings; a tuple (p, list) is kept with
# probability p), a one-line summary, and questions (wordings, answer, key phrase that a right answer contains).
PLOTS: dict[str, dict] = {}

PLOTS["lost"] = dict(
    themes=["something that got lost", "a lost {obj}", "a {obj}", "looking for a {obj}", "a missing {obj}", "finding a lost {obj}"],
    uses=["obj"],
    beats=[
        ["{n} had {acobj}, and {he} took it everywhere.", "{His} favorite thing in the world was {acobj}.",
         "For {his} birthday, {n} had been given {acobj}. {He} loved it very much.",
         "{n} owned only one treasure: {acobj}."],
        ["{time}, the {obj} was gone.", "{time}, {n} woke up and could not find the {obj}.",
         "{time}, {n} reached for the {obj}, but it was not there.", "But {time_l}, the {cobj} was missing."],
        (0.7, ["\"Oh no,\" said {n}. \"Where can it be?\"", "\"Where is my {obj}?\" cried {n}.",
               "{n} felt {his} eyes fill with tears.", "\"I had it yesterday,\" {n} said sadly."]),
        ["First {he} looked {spot2}, but there was nothing but dust.",
         "{He} looked {spot2}. It was not there.", "{n} searched {spot2}, but found only an old shoe.",
         "{He} ran to look {spot2}, but no luck."],
        (0.7, ["Then {he} looked {spot3}. It was not there either.", "{He} tried {spot3} too, and found nothing.",
               "Next {he} searched {spot3}, but there was only a sleeping {gk}."]),
        ["Then {n} met {f} the {fk}. \"Why do you look so sad?\" asked {f}.",
         "On the way {he} met {afk} named {f}. \"What is wrong?\" {fhe} asked.",
         "{f} the {fk} saw {him} and asked what had happened.",
         "Just then {f}, a friendly {fk}, came along the path."],
        ["\"I lost my {obj},\" said {n}. \"I will help you look,\" said {f}.",
         "{n} told {fhim} about the {obj}. \"Do not worry,\" said {f}. \"Four eyes see more than two.\"",
         "When {f} heard about the {cobj}, {fhe} said, \"Let us look together.\""],
        ["They looked and looked, and at last they found it {spot}.",
         "Together they searched until {f} called out, \"Here it is!\" The {obj} was {spot}.",
         "After a while, {n} saw something {color} {spot}. It was the {obj}!"],
        ["\"Thank you, {f}!\" said {n}, and {he} hugged {fhim}.",
         "{n} was so happy that {he} danced in a circle.",
         "{n} held the {obj} close and thanked {f} again and again."],
        (0.6, ["After that, {n} always put the {obj} in a safe place.",
               "Then they shared some {food} to celebrate.",
               "{n} had found the {obj}, and {he} had found a good friend too."]),
    ],
    summary="{n} the {k} lost {acobj}. {f} the {fk} helped {him} look, and they found it {spot}.",
    questions=[
        (("What did {n} lose?", "What was lost?", "What was {n} looking for?"), "{n} lost {acobj}.", "{cobj}"),
        (("Where was the {obj}?", "Where did they find the {obj}?", "Where was the {obj} found?"),
         "The {obj} was {spot}.", "{spot}"),
        (("What color was the {obj}?", "Which color was the {obj}?"), "The {obj} was {color}.", "{color}"),
        (("Who helped {n}?", "Who helped {n} look for the {obj}?"), "{f} the {fk} helped {n}.", "{f}"),
    ],
)

PLOTS["friend"] = dict(
    themes=["making a new friend", "friendship", "a lonely {k}", "two friends", "finding a friend"],
    uses=[],
    beats=[
        ["But {n} had nobody to play with.", "{n} was often alone, and the days felt long.",
         "{He} had many toys but no friends.", "All day {he} talked to the clouds, because there was nobody else."],
        ["{time}, {he} walked to the {place} and saw {afk} sitting {spot}.",
         "{time}, {n} went to the {place}. There, {spot}, sat {afk}.",
         "{time}, somebody new came to the {place}. It was {afk}."],
        ["{n} wanted to say hello, but {he} was afraid.", "{n} hid behind a tree and watched.",
         "At first {n} did not know what to say.", "{His} heart beat fast."],
        ["At last {he} took a deep breath and said, \"Hello, my name is {n}.\"",
         "Then {n} stepped forward. \"Hi, I am {n},\" {he} said softly.",
         "\"Would you like to play with me?\" {n} asked in a small voice."],
        ["The {fk} smiled. \"I am {f},\" {fhe} said. \"I was hoping somebody would talk to me.\"",
         "\"Yes, please!\" said the {fk}. \"My name is {f}, and I have no friends here yet.\"",
         "\"Hello, {n},\" said the {fk}. \"I am {f}. I just moved here.\""],
        ["They played with {acobj} all afternoon.", "They built a house of sticks and laughed when it fell down.",
         "They ran races, told jokes and looked at the clouds.",
         "{n} showed {fhim} the best places, and {f} taught {him} a song."],
        (0.6, ["When they were hungry, they shared {food}.", "{f} had some {food} in a bag, and {fhe} gave {n} half."]),
        ["When the sun went down, {f} asked, \"Will you come again tomorrow?\" \"Of course,\" said {n}.",
         "\"Same time tomorrow?\" asked {n}. {f} nodded happily.",
         "From then on they met every day at the {place}."],
        (0.6, ["{n} was not lonely anymore.", "It only took one small hello to make a big friend.",
               "{n} had learned that saying hello is worth being a little brave."]),
    ],
    summary="{n} the {k} was lonely. At the {place} {he} met {f} the {fk}, and they became friends.",
    questions=[
        (("Where did {n} meet {f}?", "Where did they meet?"), "{n} met {f} at the {place}.", "{place}"),
        (("Who became {n}'s friend?", "What is the name of {n}'s new friend?", "Who did {n} meet?"),
         "{n}'s new friend was {f} the {fk}.", "{f}"),
        (("How did {n} feel at the start?", "Why was {n} sad at first?"), "{n} was lonely.", "lonely"),
    ],
)

PLOTS["stuck"] = dict(
    themes=["helping someone", "helping a {gk}", "a rescue", "being kind", "kindness", "a {gk} in trouble"],
    uses=["gk"],
    beats=[
        ["{time}, {n} was walking through the {place} when {he} heard a small voice.",
         "{time}, on the way to the {place}, {n} heard somebody crying.",
         "{time}, {n} heard a strange sound coming from the {place}."],
        ["\"Help! Please help me!\" called the voice.", "\"Is anybody there?\" said the voice. \"I am stuck!\""],
        ["{n} looked around and found {agk} {spot}. Its foot was caught under a heavy branch.",
         "It was {agk}. It was stuck {spot} and could not move.",
         "{spot_c}, {he} found {agk} that could not get free."],
        ["\"Do not be afraid,\" said {n}. \"I will help you.\"", "\"I am here now,\" said {n} kindly.",
         "{n} knelt down and spoke softly until the {gk} stopped shaking."],
        ["{n} pulled and pulled, but {he} was not strong enough.",
         "{He} tried once, and {he} tried twice, but nothing moved.",
         "{n} pushed with all {his} strength. It did not help."],
        ["So {he} ran to fetch {f} the {fk}.", "Then {n} had an idea. {He} called {his} friend {f} the {fk}.",
         "Luckily, {f} the {fk} was passing by."],
        ["Together they used a long rope, and with one big pull the {gk} was free.",
         "\"One, two, three!\" said {f}. They pulled together, and the {gk} came free.",
         "{f} lifted, {n} pulled, and suddenly the {gk} was free."],
        ["\"Thank you both,\" said the {gk}. \"I will never forget this.\"",
         "The {gk} jumped for joy and thanked them many times.",
         "The {gk} was so thankful that it gave {n} {acobj}."],
        (0.6, ["On the way home, {n} felt warm inside.", "{n} learned that nobody is too small to help.",
               "That evening the three of them ate {food} together.",
               "\"Helping is easier with two,\" said {f}, and {n} agreed."]),
    ],
    summary="{n} the {k} found {agk} that was stuck {spot}. With {f} the {fk}, {he} set it free.",
    questions=[
        (("Who was stuck?", "Who needed help?", "Which animal was stuck?"), "{agk_c} was stuck.", "{gk}"),
        (("Where was the {gk}?", "Where was the {gk} stuck?"), "The {gk} was {spot}.", "{spot}"),
        (("Who helped {n}?", "Who came to help {n}?"), "{f} the {fk} helped {n}.", "{f}"),
    ],
)

_FEARS = [("the dark", "sit in the dark", "the lamp went out and the whole house was dark"),
          ("deep water", "go near deep water", "a little boat drifted away across the lake with a baby {gk} in it"),
          ("high places", "climb high places", "a baby {gk} climbed the tallest tree and could not come down"),
          ("thunder", "listen to thunder", "a great storm came with thunder and lightning"),
          ("the forest at night", "walk in the forest at night", "a baby {gk} got lost in the forest at night")]
PLOTS["fear"] = dict(
    themes=["being brave", "courage", "someone who is afraid of {fear}", "overcoming fear", "a fear of {fear}"],
    uses=["fear"],
    setup=lambda rng, s: s.update(zip(("fear", "fearact", "event"), (t.format_map(s) for t in rng.choice(_FEARS)))),
    beats=[
        ["{n} was afraid of only one thing: {fear}.", "There was one thing that {n} did not like at all, and that was {fear}.",
         "{n} was afraid of {fear}. {He} told nobody about it.", "{n} never wanted to {fearact}."],
        (0.7, ["\"What if something happens?\" {he} always thought.", "Just thinking about it made {his} knees shake.",
               "{His} friend {f} the {fk} knew, and never laughed about it."]),
        ["{time}, {event}.", "Then it happened: {time_l}, {event}."],
        ["{n} wanted to hide under the bed.", "{n} began to shake.", "At first {n} could not move."],
        ["\"I am afraid too,\" said {f} the {fk}. \"Let us be afraid together.\"",
         "{f} the {fk} took {his} hand. \"Being brave means doing it even when you are scared,\" {fhe} said.",
         "\"You can do it,\" said {f} the {fk}. \"I will stay right here.\""],
        ["{n} closed {his} eyes, counted to three and took one step. Then {he} took another.",
         "{n} took a deep breath. \"One step at a time,\" {he} told {self}.",
         "So {n} sang a little song, and with every word {he} grew a bit braver."],
        ["Soon it was over, and everything was fine.", "And before {he} knew it, the hard part was over.",
         "In the end it was not as bad as {he} had thought."],
        ["\"You did it!\" cried {f}.", "\"I was scared, but I did it,\" said {n} proudly.",
         "Everybody cheered for {n}."],
        (0.6, ["After that, {n} was still a little afraid of {fear}, but only a little.",
               "{n} was never so afraid of {fear} again.", "That night they had {food}, and {n} felt very brave."]),
    ],
    summary="{n} the {k} was afraid of {fear}. With the help of {f} the {fk}, {he} learned to be brave.",
    questions=[
        (("What was {n} afraid of?", "What did {n} fear?", "What scared {n}?"), "{n} was afraid of {fear}.", "{fear}"),
        (("Who helped {n} to be brave?", "Who helped {n}?", "Who stayed with {n}?"), "{f} the {fk} helped {n}.", "{f}"),
        (("How did {n} feel at the end?",), "{n} felt brave and proud.", "proud"),
    ],
)

_SKILLS = [("swim", "swimming", "sank like a stone"), ("whistle", "whistling", "made no sound at all"),
           ("dance", "dancing", "fell over {his} own feet"), ("ride a bike", "riding a bike", "rode into a bush"),
           ("bake bread", "baking bread", "burned it until it was black"),
           ("play the flute", "playing the flute", "made a terrible noise"),
           ("draw", "drawing", "made only a big black spot"), ("juggle", "juggling", "dropped every ball"),
           ("ice skate", "ice skating", "sat down on the ice with a bump"),
           ("sing", "singing", "frightened all the birds away"), ("read", "reading", "mixed up all the letters")]
PLOTS["skill"] = dict(
    themes=["learning to {skill}", "not giving up", "practice", "a {k} who wants to {skill}", "learning something new"],
    uses=["skill"],
    setup=lambda rng, s: s.update(zip(("skill", "skilling", "fail"), (t.format_map(s) for t in rng.choice(_SKILLS)))),
    beats=[
        ["More than anything, {n} wanted to learn to {skill}.", "{n} had one big wish: {he} wanted to {skill}.",
         "Every night {n} dreamed of {skilling}."],
        ["{time}, {he} tried for the first time. {He} {fail}.",
         "{time}, {n} went to the {place} to try it. {He} {fail}.",
         "{time}, {n} gave it a try, but {he} {fail}."],
        ["Some of the others laughed.", "\"I will never learn it,\" said {n}.", "{n} sat down and sighed.",
         "{agk_c} who was watching laughed out loud."],
        ["Then {f} the {fk} came by. \"I could not do it at first either,\" {fhe} said.",
         "\"Nobody can {skill} on the first day,\" said {f} the {fk}.",
         "An old {fk} named {f} had seen everything. \"Try again,\" {fhe} said, \"but slowly.\""],
        ["So {n} practiced every day, in the sun and in the rain.", "{n} tried again the next day, and the day after that.",
         "From then on {f} helped {him} every afternoon."],
        (0.7, ["Some days went well, and some days did not.", "It was hard work, but little by little it got better.",
               "After a week {he} was a bit better. After two weeks {he} was much better."]),
        ["And then, one day, {n} could do it!", "At last the big day came: {n} could {skill}!",
         "One month later, everyone came to the {place} to watch {n}, and {he} did it without a mistake."],
        ["\"You did not give up,\" said {f}. \"That is the secret.\"",
         "{f} clapped the loudest of all.", "\"Thank you for helping me,\" {n} said to {f}."],
        (0.5, ["Now {n} teaches others {skilling}.", "They celebrated with {food}.",
               "{n} had learned that practice is stronger than luck."]),
    ],
    summary="{n} the {k} wanted to learn to {skill}. It was hard at first, but with practice and help from {f} the {fk}, {he} learned it.",
    questions=[
        (("What did {n} want to learn?", "What did {n} learn?", "What did {n} want to do?"),
         "{n} wanted to learn to {skill}.", "{skill}"),
        (("Who helped {n}?", "Who told {n} to try again?", "Who gave {n} advice?"), "{f} the {fk} helped {n}.", "{f}"),
        (("Did {n} give up?",), "No, {n} did not give up.", "No"),
    ],
)

PLOTS["share"] = dict(
    themes=["sharing", "{food}", "someone who does not want to share", "being selfish", "learning to share", "{food}", "food"],
    uses=["food"],
    beats=[
        ["{time}, {n} made a very big plate of {food}.", "{time}, {n} came home from the {place} with a lot of {food}.",
         "{time}, somebody gave {n} a whole basket of {food}."],
        ["\"This is all for me,\" said {n}.", "\"Mine, all mine!\" {he} said and closed the door.",
         "{n} did not want to give any of it away."],
        ["First {f} the {fk} knocked. \"May I have a little?\" {fhe} asked. \"No,\" said {n}.",
         "Soon {f} the {fk} came by and asked for a bite. \"There is not enough,\" said {n}.",
         "{f} the {fk} looked in through the window with hungry eyes, but {n} turned away."],
        (0.7, ["Then {agk} came and asked, and {n} said no again.", "A little later {agk} asked too. \"Go away,\" said {n}.",
               "Next came {agk}, but {n} did not even open the door."]),
        ["So {n} ate alone. {He} ate and ate until {his} belly hurt.",
         "{n} sat at the table all alone. The {food} did not taste as good as {he} had hoped.",
         "It was very quiet. {n} chewed slowly and felt sad."],
        ["Outside, {he} heard the others laughing together.", "Through the window {he} saw the others playing in the {place}.",
         "\"It is no fun to eat alone,\" {he} thought."],
        ["At last {n} stood up, took the plate and carried it outside.",
         "{n} opened the door and called, \"Come in, everyone!\"",
         "\"I am sorry,\" {n} told {f}. \"Please come and eat with me.\""],
        ["Everybody got a piece, and there was enough for all.", "They sat in a circle and shared the {food}.",
         "{f} brought some juice, and it became a real feast."],
        ["\"It tastes better this way,\" said {n}.", "And do you know what? Now it tasted wonderful.",
         "{n} laughed more that evening than in the whole week before."],
        (0.4, ["From that day on, {n} always shared.", "{n} never closed {his} door again."]),
    ],
    summary="{n} the {k} did not want to share the {food}. Eating alone made {him} sad, so {he} shared it with {f} and the others.",
    questions=[
        (("What did {n} have?", "What food did {n} have?", "What did {n} not want to share?", "What did they eat?"),
         "{n} had {food}.", "{food}"),
        (("Who knocked first?", "Who asked first?", "Who wanted some of the {food}?"), "{f} the {fk} asked first.", "{f}"),
        (("What did {n} learn?",), "{n} learned to share.", "share"),
    ],
)

_BUILDS = [("tree house", "wood and nails"), ("raft", "logs and rope"), ("snow fort", "snow and ice"),
           ("flying machine", "paper and wheels"), ("bridge", "stones and planks"), ("sand castle", "sand and shells"),
           ("boat", "wood and an old sheet"), ("wagon", "boxes and wheels"), ("bird house", "wood and paint")]
PLOTS["build"] = dict(
    themes=["building a {build}", "a {build}", "making something", "teamwork", "working together"],
    uses=["build"],
    setup=lambda rng, s: s.update(zip(("build", "stuff"), rng.choice(_BUILDS)), fail2=rng.choice(
        ["a strong wind came and blew it apart", "it fell down with a loud crash", "one side broke",
         "the rain washed half of it away"])),
    beats=[
        ["{time}, {n} had a big idea. \"I will build a {build}!\" {he} said.",
         "{time}, {n} decided to build a {build}.", "{n} had always wanted a {build}. {time}, {he} began to make one."],
        ["{He} collected {stuff} and started to work.", "All {he} needed was {stuff}.",
         "{He} went to the {place} to find {stuff}."],
        ["{n} worked all day, but then {fail2}.", "It looked very good, until {fail2}.",
         "Just when {he} was almost done, {fail2}."],
        ["\"All that work for nothing,\" {n} sighed.", "{n} sat down and did not know what to do.",
         "{n} was so angry that {he} kicked a stone."],
        ["Then {f} the {fk} looked at it. \"The idea is good,\" {fhe} said. \"You only need help.\"",
         "\"Can I help?\" asked {f} the {fk}. \"I know how to tie strong knots.\"",
         "{f} the {fk} had watched from {fhis} window. {fHe} came out with a box of tools."],
        ["{n} was not sure at first, because {he} wanted to do it alone. But then {he} nodded.",
         "\"Yes, please,\" said {n}.", "\"Together we will be faster,\" said {n}, and {he} stood up again."],
        ["{f} held the parts, and {n} put them together.", "They measured, they carried and they hammered.",
         "They worked side by side until the sun went down."],
        ["At last the {build} was ready, and it was stronger than before.", "In the evening the {build} was done. It was perfect.",
         "This time it did not break. The {build} was finished!"],
        (0.7, ["They put {acobj} on top to make it beautiful.", "They painted it {color}, because that was {f}'s favorite color.",
               "They ate {food} next to it and were very proud."]),
        ["\"It is our {build} now,\" said {n}.", "\"We make a good team,\" said {f}.", "Everybody came to see it."],
    ],
    summary="{n} the {k} tried to build a {build}, but it broke. With the help of {f} the {fk}, the second try worked.",
    questions=[
        (("What did {n} build?", "What did {n} want to build?", "What did they build?"), "{n} built a {build}.", "{build}"),
        (("Who helped {n}?", "Who helped {n} build the {build}?"), "{f} the {fk} helped {n}.", "{f}"),
        (("What was the {build} made of?", "What did {n} use?"), "It was made of {stuff}.", "{stuff}"),
    ],
)

PLOTS["race"] = dict(
    themes=["a race", "winning and losing", "a big race", "a competition", "who is faster"],
    uses=[],
    beats=[
        ["{time}, there was a big race from the {place} to the {place2}.",
         "Every year there was a race to the {place2}, and this year {n} wanted to run too.",
         "{time}, {n} read a sign: Big race today! The prize is {acobj}."],
        ["{f} the {fk} was the fastest of all. \"Nobody can beat me,\" {fhe} said.",
         "\"I will win, of course,\" said {f} the {fk}, who was very fast.",
         "Everyone thought that {f} the {fk} would win."],
        ["\"I will do my best,\" said {n}.", "{n} said nothing and tied {his} shoes.", "{n} was nervous, but {he} stood at the line with the others."],
        ["\"Ready, set, go!\" called the {gk}, and off they went.", "The {gk} blew a whistle, and the race began."],
        ["{f} ran ahead and was soon out of sight.", "At once {f} was far in front, and {n} was last."],
        ["Halfway, {n} saw {f} sitting {spot}. {fHe} had hurt {fhis} foot.",
         "But {spot}, {n} found {f} on the ground. \"My foot hurts,\" {fhe} said.",
         "Then {n} came around a corner and saw {f} {spot}, holding {fhis} foot."],
        ["{n} could have run past and won. But {he} stopped.", "{n} thought of the prize. Then {he} stopped anyway.",
         "\"If I stop, I will not win,\" thought {n}. But {he} could not leave {fhim} there."],
        ["\"Lean on me,\" {he} said, and together they walked to the end.",
         "{He} helped {fhim} up, and they crossed the line together, last of all.",
         "{n} put {his} scarf around the foot, and they went on side by side."],
        ["Everybody clapped louder for them than for the winner.",
         "The {gk} gave them both a prize for being kind.", "\"You are the real winner,\" said {f}."],
        (0.6, ["From then on, {f} never boasted again.", "After the race they ate {food} and talked for a long time.",
               "{n} had not won the race, but {he} had won a friend."]),
    ],
    summary="{n} the {k} ran a race to the {place2}. {f} the {fk} got hurt, and {n} stopped to help, so they finished together.",
    questions=[
        (("Who got hurt?", "Who hurt a foot?", "Who was hurt in the race?"), "{f} the {fk} got hurt.", "{f}"),
        (("Why did {n} stop?", "Why did {n} not win?", "What did {n} do when {f} was hurt?"),
         "{n} stopped to help {f}.", "help"),
        (("Who started the race?",), "The {gk} started the race.", "{gk}"),
    ],
)

_PLANTS = [("sunflower", "yellow"), ("apple tree", "red"), ("rose", "pink"), ("pumpkin", "orange"),
           ("tulip", "red"), ("bean plant", "green"), ("cherry tree", "white"), ("blue flower", "blue")]
PLOTS["plant"] = dict(
    themes=["a garden", "growing a {plant}", "a seed", "waiting", "being patient", "a {plant}"],
    uses=["plant"],
    setup=lambda rng, s: s.update(zip(("plant", "pcolor"), rng.choice(_PLANTS)), pspot=rng.choice(SPOTS[:2] + [
        "near the pond", "by the garden gate", "next to the well", "beside the river"])),
    beats=[
        ["{time}, {n} found a tiny seed on the path.", "{time}, {f} the {fk} gave {n} a tiny seed.",
         "{time}, the wind blew a small seed right in front of {n}."],
        ["\"I wonder what it will be,\" {he} said, and planted it {pspot}.", "{n} dug a small hole {pspot} and put the seed inside.",
         "{He} planted it {pspot} and covered it with earth."],
        ["The next morning {he} ran to look, but there was nothing to see.", "{n} waited for an hour. Nothing happened.",
         "\"Grow!\" said {n}. But the seed did not grow."],
        ["\"You have to be patient,\" said {f} the {fk}. \"Good things take time.\"",
         "{f} the {fk} laughed kindly. \"A seed needs water, sun and time,\" {fhe} said."],
        ["So {n} watered it every day.", "Every morning {n} brought a bucket of water, and every evening {he} said good night to it.",
         "{n} gave it water and pulled out the weeds."],
        (0.6, ["When it was cold, {he} covered the place with a blanket.", "When a hungry {gk} came by, {n} asked it to eat something else.",
               "Days went by, and then weeks."]),
        ["Then one morning a little green leaf came out of the ground!", "And one day there was something green. \"It is growing!\" cried {n}."],
        ["It grew and grew, until it was a beautiful {plant}.", "By the end of summer it had become a big {plant}.",
         "The leaf became a stem, and the stem became a {plant}."],
        ["Everyone came to look at it.", "\"It was worth waiting for,\" said {n}.", "{f} said it was the finest {plant} in the whole land."],
        (0.5, ["{n} kept one seed for the next year.", "{n} gave the new seeds to all {his} friends.",
               "They sat beside it and ate {food}."]),
    ],
    summary="{n} the {k} planted a seed {pspot}. {He} was patient and watered it, and it became a {plant}.",
    questions=[
        (("What did the seed become?", "What grew from the seed?", "What did {n} grow?"), "The seed became a {plant}.", "{plant}"),
        (("Where did {n} plant the seed?", "Where was the seed planted?"), "{n} planted it {pspot}.", "{pspot}"),
        (("Who told {n} to be patient?", "Who gave {n} advice?"), "{f} the {fk} told {n} to be patient.", "{f}"),
    ],
)

PLOTS["way_home"] = dict(
    themes=["getting lost", "finding the way home", "a {k} who gets lost", "going home", "a long way home"],
    uses=[],
    beats=[
        ["{time}, {n} went for a walk to the {place}.", "{time}, {n} followed a butterfly all the way to the {place}.",
         "{time}, {n} wanted to see what was beyond the {place}."],
        ["{He} walked on and on, and when {he} looked back, {he} did not know the way anymore.",
         "Everything was so interesting that {he} forgot to look where {he} was going. Soon {he} was lost.",
         "After an hour, all the paths looked the same."],
        ["It was getting dark.", "The sun was going down, and the air was getting cold.", "A thick fog came up."],
        (0.7, ["\"Hello?\" called {n}. Nobody answered.", "{n} began to cry a little.", "\"I want to go home,\" said {n}."]),
        ["Then {he} saw a light. It belonged to {f}, {afk} who lived {spot}.",
         "Just then {afk} with a lamp came along. {fHis} name was {f}.",
         "{spot_c}, {he} met {afk} called {f}."],
        ["\"Are you lost?\" asked {f}. \"Tell me what your home looks like.\"",
         "\"Where do you live?\" asked {f} gently.", "\"Come, I will help you find your way,\" said {f}."],
        ["\"I live in {home},\" said {n}.", "{n} told {fhim} about {home}."],
        ["\"I know it,\" said {f}. \"We only have to follow the stars.\"", "\"Then we must go past the {place2},\" said {f}.",
         "{f} thought for a moment. \"That is past the {place2},\" {fhe} said."],
        ["They walked for a long time and talked about many things.", "{f} held the lamp high, and they sang so that the dark felt smaller.",
         "On the way they shared {food}."],
        ["At last {n} saw {his} own door. {He} was home!", "And there it was: home, with a light in the window.",
         "When {n} saw {his} home, {he} ran the last steps."],
        ["\"Thank you, {f},\" said {n}. \"You can visit me any time.\"", "{n} gave {f} {acobj} to say thank you.",
         "{f} waved and went back into the night."],
    ],
    summary="{n} the {k} got lost near the {place}. {f} the {fk} showed {him} the way home.",
    questions=[
        (("Who helped {n} find the way home?", "Who helped {n}?", "Who showed {n} the way?"), "{f} the {fk} helped {n}.", "{f}"),
        (("Where did {n} go?", "Where did {n} want to go?", "Where was {n} walking?"), "{n} went to the {place}.", "{place}"),
        (("Where does {n} live?", "Where is {n}'s home?"), "{n} lives in {home}.", "{home}"),
    ],
)

PLOTS["birthday"] = dict(
    themes=["a birthday", "a surprise party", "a birthday party", "a surprise", "a present"],
    uses=["obj"],
    beats=[
        ["{time}, it was {n}'s birthday.", "It was {n}'s birthday, and {he} woke up very early."],
        ["{n} waited for someone to say happy birthday, but nobody did.",
         "{He} waited for visitors, but nobody came.", "{He} looked in the letter box. It was empty."],
        ["{He} went to see {f} the {fk}, but {f} said, \"I have no time today.\"",
         "{f} the {fk} ran past with a big bag. \"Sorry, I am busy!\" {fhe} called.",
         "{n} met {f} the {fk}, but {fhe} only talked about the weather."],
        (0.7, ["Even the {gk} next door did not say a word about it.", "The {gk} at the {place} was busy too."]),
        ["\"They have all forgotten me,\" {n} thought, and walked slowly to the {place}.",
         "{n} was sad and sat down {spot}.", "So {n} took a long walk alone and felt sorry for {self}."],
        ["In the evening {he} came home and opened the door.", "When it got dark, {n} went home. The house was dark too.",
         "At last {n} went back home and reached for the light."],
        ["\"Surprise!\" shouted everybody.", "\"Happy birthday!\" shouted many voices at once.",
         "Suddenly the lights went on. \"Happy birthday, {n}!\""],
        ["There was {food}, and there were lamps in all colors.", "On the table stood {food} with one candle in it.",
         "All {his} friends were there, and the room was full of flowers."],
        ["{f} gave {him} {acobj}. \"I was looking for it all day,\" {fhe} said.",
         "From {f} {he} got {acobj}, which was just what {he} had wished for.",
         "\"This is for you,\" said {f}, and gave {him} {acobj}."],
        ["{n} laughed and cried at the same time.", "\"And I thought you had forgotten me!\" said {n}.",
         "They danced until late at night."],
    ],
    summary="Nobody seemed to remember {n}'s birthday. But in the evening there was a surprise party, and {f} the {fk} gave {him} {acobj}.",
    questions=[
        (("What did {n} get?", "What did {f} give {n}?", "What was the present?"), "{f} gave {n} {acobj}.", "{cobj}"),
        (("Why was {n} sad?",), "{n} thought that everybody had forgotten the birthday.", "forgotten"),
        (("What did they eat?", "What food was at the party?"), "There was {food}.", "{food}"),
        (("Who gave {n} a present?", "Who gave {n} the {obj}?"), "{f} the {fk} gave {n} the {obj}.", "{f}"),
    ],
)

_NOISES = [("a tap, tap, tap", "a branch that touched the window"), ("a strange whisper", "the wind in the old curtains"),
           ("a scratching sound", "a tiny mouse that was looking for crumbs"),
           ("a deep, low hum", "a bee that had lost its way"), ("a soft splash, splash", "water that dripped into a bucket"),
           ("a soft crying", "a kitten that wanted to come in"), ("a loud rumble", "a cart that rolled down the hill")]
PLOTS["noise"] = dict(
    themes=["a strange noise", "a mystery", "a noise in the night", "a spooky night", "solving a mystery"],
    uses=["noise"],
    setup=lambda rng, s: s.update(zip(("noise", "cause"), rng.choice(_NOISES))),
    beats=[
        ["One night, {n} heard {noise}.", "In the middle of the night, {n} woke up. There was {noise}.",
         "One dark night, {noise} came from outside."],
        ["\"Who is there?\" {he} asked. Nobody answered.", "{n} pulled the blanket over {his} head.",
         "\"Maybe it is a monster,\" {he} thought."],
        ["There it was again, a little louder than before.", "Then the sound came again.", "The sound did not stop."],
        ["{n} took a lamp and woke {his} friend {f} the {fk}.", "{He} ran next door to {f} the {fk}. \"Come quickly!\" {he} said.",
         "{n} called {f} the {fk}, who was never afraid."],
        ["\"A mystery!\" said {f}. \"Let us find out.\"", "\"Let us look together,\" said {f}. \"Then it is only half as scary.\"",
         "\"We will follow the sound,\" said {f} quietly."],
        ["They looked in the kitchen, but it was not there.", "They looked behind the door and found only an old broom.",
         "Step by step they followed the sound."],
        (0.6, ["{n} held the lamp with both hands.", "\"Do not be afraid,\" whispered {f}, and {fhis} voice shook a little.",
               "The floor creaked under their feet."]),
        ["And then they saw it. It was only {cause}!", "At last they found it: it was {cause}.",
         "{f} pointed with {fhis} finger. It was nothing but {cause}."],
        ["{n} and {f} looked at each other and laughed.", "\"That is our monster!\" laughed {n}.",
         "They laughed so loudly that they woke the {gk} next door."],
        ["Then they had {food} and went back to bed.", "\"Now I can sleep,\" said {n}.",
         "After that, {n} was never afraid of that sound again."],
    ],
    summary="At night {n} the {k} heard {noise}. With {f} the {fk}, {he} found out that it was only {cause}.",
    questions=[
        (("What made the noise?", "What was the noise?", "What was making the sound?"), "It was {cause}.", "{cause}"),
        (("What did {n} hear?",), "{n} heard {noise}.", "{noise}"),
        (("Who did {n} wake?", "Who helped {n}?", "Who went with {n}?"), "{f} the {fk} helped {n}.", "{f}"),
    ],
)

PLOTS["sorry"] = dict(
    themes=["telling the truth", "saying sorry", "a {obj}", "a broken {obj}", "honesty", "a mistake"],
    uses=["obj"],
    beats=[
        ["{n}'s neighbor was {f}, {afk}. {fHe} had {acobj} that {fhe} loved very much.",
         "{n} had a friend named {f}, {afk}. {f}'s dearest thing was {acobj}."],
        ["{time}, {n} played with it without asking, and it broke.",
         "{time}, {n} bumped into it, and it fell to the ground and broke.",
         "{time}, {n} wanted to look at it closely. It slipped out of {his} hands and broke."],
        ["Nobody had seen it.", "{n} looked around. Nobody was there.", "It was very quiet. Only the {gk} on the roof had seen it."],
        ["Quickly {he} hid the pieces {spot} and ran home.", "{He} was so frightened that {he} hid the pieces {spot}."],
        ["But all night {n} could not sleep.", "But {his} belly felt heavy, as if {he} had eaten a stone.",
         "At dinner there was {food}, but {n} could not eat."],
        ["The next day {f} asked, \"Have you seen my {obj}?\" {fHis} eyes were sad.",
         "In the morning {n} saw {f} looking for the {obj} everywhere."],
        ["{n} wanted to say no. But then {he} told the truth. \"I broke it,\" {he} said. \"I am very sorry.\"",
         "\"It was me,\" said {n} with a small voice. \"I broke it and I hid it. I am sorry.\"",
         "{n} took a deep breath. \"I have to tell you something,\" {he} said, and told {fhim} everything."],
        ["{f} was quiet for a moment. Then {fhe} said, \"Thank you for telling me the truth.\"",
         "{f} was sad about the {obj}, but {fhe} was glad that {n} had told the truth.",
         "\"I am not angry,\" said {f}. \"It was brave to tell me.\""],
        ["Together they put the pieces back with glue.", "They fixed it together. It took all afternoon.",
         "{n} worked for a week to buy a new one."],
        (0.6, ["It did not look quite the same, but {f} liked it even more.", "And {n}'s belly felt light again.",
               "That night {n} slept like a stone."]),
    ],
    summary="{n} the {k} broke {f}'s {cobj} and hid it {spot}. Later {he} told the truth, and they fixed it together.",
    questions=[
        (("What did {n} break?", "What broke?", "What was broken?"), "{n} broke {acobj}.", "{cobj}"),
        (("Where did {n} hide the pieces?", "Where were the pieces?"), "{n} hid the pieces {spot}.", "{spot}"),
        (("Whose {obj} was it?", "Who owned the {obj}?", "Who did the {obj} belong to?"), "The {obj} belonged to {f}.", "{f}"),
    ],
)

_TREASURES = ["a box full of old letters", "a chest of golden coins", "a jar of sweet candy", "a bag of seeds",
              "a little music box", "a book of stories", "a picture of two friends"]
PLOTS["treasure"] = dict(
    themes=["a treasure", "a treasure map", "an adventure", "pirates and treasure", "a hidden treasure", "a map"],
    uses=["treasure"],
    setup=lambda rng, s: s.update(treasure=rng.choice(_TREASURES)),
    beats=[
        ["{time}, {n} found an old map inside {acobj}.", "{time}, an old map fell out of a book.",
         "{time}, {n} found a bottle with a map in it."],
        ["There was a big red cross on it, {spot}.", "A red cross showed a place {spot}."],
        ["\"A treasure!\" cried {n}, and ran to {his} friend {f} the {fk}.",
         "{He} showed it to {f} the {fk}. \"Let us go and find it,\" said {f}.",
         "\"I need a partner,\" thought {n}, and asked {f} the {fk} to come along."],
        ["They packed {food} and left at once.", "They took a rope, a lamp and some {food}.", "Off they went with a shovel and a lot of hope."],
        ["First they had to cross the {place}.", "The way led through the {place}, and it was long."],
        (0.7, ["{agk_c} stood in the way. \"Only friends may pass,\" it said. \"We are friends,\" they said, and it let them pass.",
               "It began to rain, but they did not turn back.", "Once they took the wrong path and had to go back."]),
        ["At last they stood {spot}. They began to dig.", "In the evening they came to the red cross, {spot}. {n} dug, and {f} held the lamp."],
        ["The shovel hit something hard. It was {treasure}!", "And there, deep in the ground, was {treasure}.",
         "\"There it is!\" shouted {f}. They had found {treasure}."],
        ["\"Let us share it,\" said {n}.", "\"It belongs to both of us,\" said {n}, and {f} agreed.",
         "They carried it home together and showed it to everybody."],
        (0.7, ["But the best part was the adventure.", "\"The real treasure was the trip,\" said {f}, and they both laughed.",
               "They drew a new map, hid it in a bottle and gave it to the river."]),
    ],
    summary="{n} the {k} found a map. With {f} the {fk}, {he} followed it and found {treasure} {spot}.",
    questions=[
        (("What did they find?", "What was the treasure?", "What did {n} find at the end?"), "They found {treasure}.", "{treasure}"),
        (("Where was the treasure?", "Where was the red cross?", "Where did they dig?"), "The treasure was {spot}.", "{spot}"),
        (("Who went with {n}?", "Who helped {n}?", "Who came along?"), "{f} the {fk} went with {n}.", "{f}"),
    ],
)

PLOTS["storm"] = dict(
    themes=["a storm", "bad weather", "a snow storm", "a rainy day", "helping each other in a storm"],
    uses=[],
    setup=lambda rng, s: s.update(weather=rng.choice(["rain", "snow", "wind"])),
    beats=[
        ["{time}, the sky turned dark, and a big storm began. There was so much {weather} that nobody could see the road.",
         "{time}, dark clouds came up. Soon there was {weather} everywhere."],
        ["{n} was warm and safe inside.", "{n} sat by the fire and listened.", "{n} closed all the windows and made {food}."],
        ["Then somebody knocked on the door.", "Suddenly there was a knock: one, two, three.", "Knock, knock! Who could it be in this weather?"],
        ["It was {f}, {afk}. \"The storm broke my roof,\" {fhe} said. \"May I come in?\"",
         "Outside stood {afk}, wet and cold. \"I am {f},\" {fhe} said. \"I have no place to stay.\""],
        ["\"Come in, come in!\" said {n}, and gave {fhim} a blanket.", "\"Of course,\" said {n}. \"There is room for two.\""],
        ["Soon after, {agk} knocked, and {n} let it in too.", "Then came {agk}, and after that the whole family of the {gk}. {n} let them all in."],
        ["The room was small, but nobody was cold.", "It was a bit narrow, but it was warm, and everybody had enough to eat.",
         "They ate {food} and told stories while the storm was shouting outside."],
        ["In the morning the storm was over, and the sun was shining.", "The next day the sky was blue again."],
        ["Then they all went to fix {f}'s roof together.", "\"Now we will help you,\" said {f}, and they cleaned up {n}'s garden together.",
         "Before they left, {f} gave {n} {acobj} to say thank you."],
        (0.6, ["Since then, {n}'s door is always open.", "A small house with friends is bigger than a castle, {n} thought."]),
    ],
    summary="During a storm, {n} the {k} let {f} the {fk} and {agk} into the house. In the morning they all helped each other.",
    questions=[
        (("Who knocked on the door first?", "Who knocked first?", "Who came to the door?"), "{f} the {fk} knocked first.", "{f}"),
        (("Which animal came after {f}?", "Who came after {f}?", "Who knocked second?"), "{agk_c} came after {f}.", "{gk}"),
        (("What was the weather like?", "What was the weather in the story?"), "There was a storm with a lot of {weather}.", "{weather}"),
    ],
)

PLOTS["wish"] = dict(
    themes=["a wish", "a falling star", "magic", "a {obj}", "a magic {obj}", "three wishes"],
    uses=["obj"],
    beats=[
        ["{time}, {n} found {acobj} {spot}.", "{time}, {n} saw something shining {spot}. It was {acobj}."],
        ["When {he} picked it up, it began to glow. \"You may make one wish,\" it said.",
         "It was a magic {obj}! \"Tell me one wish,\" it whispered.",
         "\"Hello,\" said the {obj}. \"I can give you one wish.\""],
        ["{n} thought about a mountain of {food}.", "{n} thought about gold and about {food}.", "{n} could not believe {his} luck."],
        ["{He} thought about being as big as a house.", "Then {he} thought about being the strongest {k} in the world."],
        ["But then {he} saw {f} the {fk}, who was ill and had to stay in bed.",
         "Then {he} remembered {f} the {fk}, who was very sad because {fhis} house had burned down.",
         "On the way home {he} passed {f} the {fk}, who was old and always alone."],
        ["{n} held the {obj} and said, \"I wish that {f} is happy again.\"",
         "\"I wish that {f} will be well and happy,\" {he} said at last."],
        ["The {obj} shone like the sun, and then it was dark again.", "There was a bright light, and then the {obj} was just a {obj}."],
        ["The next day {f} came out, laughing and dancing.", "In the morning {f} stood at the door with a big smile.",
         "And from that hour on, {f} was happy."],
        ["\"It is a wonder!\" said {f}. {n} only smiled.", "\"I do not know what happened,\" said {f}, \"but I feel wonderful.\"",
         "{f} never knew why, and {n} never told."],
        ["{n} had no wish left, but {he} did not need one.", "And that made {n} happier than any {food} in the world.",
         "The best wishes, thought {n}, are the ones for somebody else."],
    ],
    summary="{n} the {k} found a magic {obj} that gave one wish. {He} used it to make {f} the {fk} happy.",
    questions=[
        (("What did {n} find?", "What was magic?", "Which thing was magic?"), "{n} found {acobj}.", "{cobj}"),
        (("What did {n} wish for?", "What was the wish?", "What did {n} wish?"), "{n} wished that {f} would be happy.", "{f}"),
        (("Where was the {obj}?", "Where did {n} find the {obj}?"), "The {obj} was {spot}.", "{spot}"),
    ],
)

COMMON_QUESTIONS = [
    (("Who is the story about?", "What is the name of the {k}?", "What was the {k} called?", "Who is the main character?"),
     "The story is about {n} the {k}.", "{n}"),
    (("What kind of animal or person was {n}?", "What was {n}?", "Who was {n}?"), "{n} was {ak}.", "{k}"),
    (("What was {f}?", "Who was {f}?", "What kind of animal or person was {f}?"), "{f} was {afk}.", "{fk}"),
    (("Where did {n} live?", "Where does {n} live?", "Where was {n}'s home?"), "{n} lived in {home}.", "{home}"),
]


def _fill(rng: random.Random, alternatives, s: dict) -> str:
    return rng.choice(alternatives).format_map(s)


def tell(rng: random.Random, kind: str | None = None, name: str | None = None, plot: str | None = None, loves: bool = False,
         usual: float = 0.6, full: bool = False) -> Story:
    """Draws and realises one story. `loves` makes it mention the favourite food; `full` keeps every optional beat; with probability `usual` the plot
    follows from the hero's kind, so that greedy decoding tells different stories about different heroes."""
    s = new_state(rng, kind, name)
    plots = list(PLOTS)
    key = plot or (plots[zlib.crc32(s["k"].encode()) % len(plots)] if rng.random() < usual else rng.choice(plots))
    if "setup" in PLOTS[key]:
        PLOTS[key]["setup"](rng, s)
    return realise(key, s, rng.getrandbits(48), loves, full)


def realise(key: str, state: dict, seed: int, loves: bool = False, full: bool = False, opening: str | None = None) -> Story:
    """The story of plot `key` about `state`; `seed` decides the wordings, so that the same seed with another name tells the same story.
    `opening` replaces the first sentence."""
    s, rng, p = dict(state), random.Random(seed), PLOTS[key]
    s["time_l"] = s["time"][0].lower() + s["time"][1:]
    for k in ("spot", "agk"):
        s[k + "_c"] = s[k][0].upper() + s[k][1:]
    sentences = [_fill(rng, OPENING, s)]
    if opening is not None:
        sentences = [opening] if opening else []
    elif loves:
        sentences.append(rng.choice(LOVES).format_map(s))
    elif full or rng.random() < 0.35:
        extra = OPENING_EXTRA[:-1] if key in ("friend", "storm", "way_home", "lost", "race", "skill") else OPENING_EXTRA
        sentences.append(_fill(rng, extra, s))
    paragraphs, cut = [], rng.choice((3, 4, 5))
    for i, beat in enumerate(p["beats"]):
        if isinstance(beat, tuple):
            if rng.random() > beat[0] and not full:
                continue
            beat = beat[1]
        sentences.append(_fill(rng, beat, s))
        if (i + 1) % cut == 0 and i + 2 < len(p["beats"]):
            paragraphs.append(" ".join(sentences))
            sentences = []
    if full or rng.random() < 0.45:
        sentences.append(_fill(rng, CLOSING, s))
    if sentences:
        paragraphs.append(" ".join(sentences))
    questions = []
    for qs, a, k in p["questions"] + COMMON_QUESTIONS:
        questions.append((tuple(q.format_map(s) for q in qs), a.format_map(s), k.format_map(s)))
    return Story(key, s, "\n\n".join(paragraphs), p["summary"].format_map(s),
                 [t.format_map(s) for t in p["themes"]], questions, seed, loves)


def changed(story: Story, kind: str | None = None, name: str | None = None) -> Story:
    """The same story about another kind of hero or a hero of another name; pronouns follow the name."""
    s = dict(story.state)
    s["k"], s["n"] = kind or s["k"], name or s["n"]
    s["ak"], s["atk"] = article(s["k"]), article(f"{s['trait']} {s['k']}")
    old = {x: story.state[x] for x in ("he", "his", "him", "self")}
    _pronouns(is_she(s["n"]), "", s)
    for x, text in s.items():  # what a plot's setup filled in with the old pronouns
        if x in ("fail", "fail2"):
            s[x] = " ".join({old["his"]: s["his"], old["self"]: s["self"]}.get(w, w) for w in text.split(" "))
    return realise(story.plot, s, story.seed, story.loves)
