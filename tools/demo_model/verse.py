"""Jokes, riddles, and small poems from a grammar: couplets, a haiku by counted syllables, a limerick."""

import random
import re

import stories
from beyond import topic
from dialogue import Dialogue, assistant, messy, user
from words import ADJECTIVES_WORDS, ANIMALS, FRUIT, PLACES_WORDS, THINGS, any_word, article, person_name

JOKES = """What did the little frog order for lunch? A burger and a diet croak!|Why did the cookie go to the doctor? It felt crumby.
What do you call a sleeping dinosaur? A dino-snore!|Why is six afraid of seven? Because seven eight nine!
What do you call a fish without an eye? A fsh.|Why did the book go to the hospital? It hurt its spine.
What do you call a bear without teeth? A gummy bear!|Why can't a bicycle stand on its own? It is two-tired.
What is orange and sounds like a parrot? A carrot.
Why did the computer go to bed early? It needed to reboot.|Why did the router go to school? It wanted to become an expert.
What do you call cheese that is not yours? Nacho cheese!|Why did the tomato turn red? It saw the salad dressing.
What do clouds wear under their coats? Thunderwear.
How does the moon cut its hair? Eclipse it.|Why did the banana go to the doctor? It was not peeling well.
What do you get when you cross a snowman with a dog? Frostbite.|Why do bees have sticky hair? They use honeycombs.
What do you call a pig that knows karate? A pork chop.
Why was the math book sad? It had too many problems.|What did zero say to eight? Nice belt!|Why do cows wear bells? Their horns do not work.
How do you make an octopus laugh? With ten tickles.|What kind of tree fits in your hand? A palm tree.
Why did the owl invite its friends? It did not want to be owl by itself.
What is a cat's favorite color? Purr-ple.|Why did the scarecrow win a prize? It was outstanding in its field.
What do you call a lazy kangaroo? A pouch potato.|Why are ghosts bad liars? You can see right through them.
How many programmers change a light bulb? None, that is a hardware problem.""".replace("\n",
    "|").split("|")
ABOUT = {  # a word in the request → a joke with it
    "cat": "What is a cat's favorite color? Purr-ple.", "dog": "What do you get when you cross a snowman with a dog? Frostbite.",
    "cow": "Why do cows wear bells? Their horns do not work.", "pig": "What do you call a pig that knows karate? A pork chop.",
    "bear": "What do you call a bear without teeth? A gummy bear!", "frog": "What did the little frog order for lunch? A burger and a diet croak!",
    "fish": "What do you call a fish without an eye? A fsh.", "dinosaur": "What do you call a sleeping dinosaur? A dino-snore!",
    "bee": "Why do bees have sticky hair? They use honeycombs.", "octopus": "How do you make an octopus laugh? With ten tickles.",
    "owl": "Why did the owl invite its friends? It did not want to be owl by itself.",
    "kangaroo": "What do you call a lazy kangaroo? A pouch potato.",
    "ghost": "Why are ghosts bad liars? You can see right through them.", "computer": "Why did the computer go to bed early? It needed to reboot.",
    "programmer": "How many programmers change a light bulb? None, that is a hardware problem.",
    "programming": "How many programmers change a light bulb? None, that is a hardware problem.",
    "math": "Why was the math book sad? It had too many problems.", "number": "Why is six afraid of seven? Because seven eight nine!",
    "moon": "How does the moon cut its hair? Eclipse it.", "tree": "What kind of tree fits in your hand? A palm tree.",
    "food": "What do you call cheese that is not yours? Nacho cheese!",
    "cheese": "What do you call cheese that is not yours? Nacho cheese!", "banana": "Why did the banana go to the doctor? It was not peeling well.",
    "book": "Why did the book go to the hospital? It hurt its spine.", "tomato": "Why did the tomato turn red? It saw the salad dressing.",
    "ai": "Why did the router go to school? It wanted to become an expert."}
_JOKE = ["tell me a joke", "do you know a joke?", "make me laugh", "say something funny", "a joke please", "joke", "tell a joke", "another joke",
         "give me a joke", "can you tell me a joke?", "I want to hear a joke.", "know any jokes?", "tell me something funny",
         "do you know any good jokes?", "got a joke?", "joke!", "tell me a funny joke", "jokes", "a short joke", "crack a joke",
         "tell me your best joke", "say a joke", "i need a laugh", "tell me a dad joke", "a good joke", "tell me one joke", "joke of the day"]
_JOKE_ABOUT = ["Tell me a joke about {x}.", "a joke about {x}", "do you know a joke about {x}?", "{x} joke", "make a joke about {x}",
               "tell a {x} joke", "joke about {x} please", "a funny joke about {x}"]
_AGAIN = ["another one", "one more", "again", "another", "tell me another one", "another joke", "one more please", "more", "do you know another one?",
          "haha, another one", "lol one more", "that was bad, another one", "next"]
RIDDLES = [("What has hands but cannot clap?", "A clock."), ("What gets wet while it dries?", "A towel."), ("What has keys but opens no door?",
    "A piano."), ("What has a neck but no head?", "A bottle."), ("What has teeth but cannot bite?", "A comb."),
           ("What goes up but never comes down?", "Your age."), ("What has one eye but cannot see?", "A needle."),
           ("The more you take, the more you leave behind. What are they?", "Steps."), ("What can you catch but not throw?", "A cold."),
           ("What has words but never speaks?", "A book."), ("What runs but never walks?", "Water."), ("What is full of holes but still holds water?",
               "A sponge.")]
_RIDDLE = ["tell me a riddle", "a riddle please", "riddle", "do you know a riddle?", "give me a riddle", "ask me a riddle", "riddle me",
           "another riddle", "i want a riddle", "quiz me", "ask me something", "ask me a question", "give me a quiz"]
_GIVE_UP = ["i don't know", "tell me", "what is it?", "i give up", "no idea", "what is the answer?", "answer?", "idk", "what?", "solution please",
            "hmm, i don't know", "the answer please", "what is the solution?"]

# Couplets: {x} with its article or in the plural stands where a word of any length fits.
_COUPLETS = ["I thought of {x} today,\nand all my worries went away.", "When I look up into the night,\nI think of {x} and feel all right.",
             "The wind was soft, the day was long,\nI made for {x} a little song.",
             "The sun came up, the sky was clear,\nand {x} was very, very near.", "I wrote {x} a letter on a tree,\nand someone sent it back to me.",
             "The river runs, the hours fly,\nand {x} will never say goodbye.",
             "I told my friends, I told the moon:\nI hope for {x} again, and soon.",
             "I closed my eyes and counted ten,\nand dreamed of {x} again, again.",
             "In winter snow, in summer heat,\nnothing like {x} was half so sweet.",
             "A lamp was lit, the tea was hot,\nI thought of {x}, and not a lot.",
             "Some like the hills, some like the sea,\nbut {x} is good enough for me.",
             "A bell rang low, a bird sang high,\nand {x} went slowly, slowly by.",
             "The road is far, the hat is blue,\nand {x} is here for me and you.",
             "If I could fly, if I could swim,\nI'd look for {x} till lights grow dim.",
             "The clock says one, the clock says two,\nand {x} is all that feels so true."]
_CLOSE = ["Now close the book, put out the light,\nand say to all the world: good night.",
          "And that is all that I can say:\nit was a good and gentle day.", "My little poem ends right here,\nso keep it close and keep it near.",
          "The stars come out, the day is done,\nand dreams begin for everyone.",
          "So small a song, so short a line,\nand yet for now the world is fine.", "And if you ask me, I would do\nit all again, and so would you."]
_POEM = ["Write a poem about {x}.", "write a poem about {x}", "a poem about {x}", "Write a short poem about {x}.", "poem about {x}",
         "can you write a poem about {x}?", "Compose a poem about {x}.", "make a poem about {x}", "Tell me a poem about {x}.",
         "give me a poem about {x}", "a small poem about {x} please", "write me a little poem about {x}", "Write a rhyme about {x}.", "{x} poem",
         "Please write a verse about {x}.", "write a four line poem about {x}", "I need a poem about {x}.",
         "write a love poem about {x}", "Write a funny poem about {x}.", "a song about {x}", "Write a song about {x}.",
         "write a rhyming poem about {x}", "a verse on {x}", "compose a poem on {x}", "a few lines on {x}", "write verses on {x}",
         "a little poem on {x}", "rhymes on {x}", "compose a short verse about {x}", "some lines about {x}", "put {x} into verse",
         "i want a poem about {x}", "i would like a poem about {x}", "poetry about {x}"]
_POEM_PLAIN = ["write a poem", "a poem please", "poem", "tell me a poem", "Write me a poem.", "can you write a poem?", "make a poem",
               "write something that rhymes", "a rhyme please", "do you know a poem?", "recite a poem", "write a short poem", "give me a poem",
               "write a love poem", "write a verse", "write a song", "sing me something", "a poem for my mother", "something poetic", "rhyme for me"]
_HAIKU = ["Write a haiku about {x}.", "a haiku about {x}", "haiku about {x}", "write a haiku about {x}", "can you write a haiku about {x}?",
          "Give me a haiku about {x}.", "{x} haiku", "compose a haiku about {x}", "tell me a haiku about {x}", "haiku {x}", "make a haiku about {x}",
          "a haiku on {x}", "i want a haiku about {x}", "i would like a haiku on {x}"]
_HAIKU_PLAIN = ["write a haiku", "a haiku please", "haiku", "give me a haiku", "do you know a haiku?", "can you write a haiku?", "tell me a haiku",
                "write me a haiku", "make a haiku"]
# First lines for a word of one, two, three or four syllables, then lines of seven and five.
_FIRST = {1: ["The quiet, old {x}.", "Morning, and the {x}.", "Evening light, the {x}.", "I look for the {x}."], 2: ["The quiet {x} waits.",
    "Alone, the {x}.", "I think of {x} now.", "Early light, {x}."],
          3: ["Slowly, {x}.", "Only {x}.", "Again, {x}.", "Such soft {x}."], 4: ["The {x}.", "Oh, {x}!", "Now {x}.", "Still {x}."], 5: ["{x}."]}
_SECOND = ["A small wind moves in the grass,", "Far away a bell is heard,", "Nobody is on the road,", "The first snow falls on the roof,",
           "Rain is singing on the leaves,", "A bird sits on the old fence,", "The moon looks into the well,", "Somebody lights a small lamp,",
           "Two leaves fall without a sound,"]
_THIRD = ["and the day begins.", "then all is quiet.", "nothing else happens.", "the night is so long.", "and summer is gone.", "I hold my warm cup.",
          "it will be spring soon.", "the stars come closer.", "somewhere a dog barks."]
_LIMERICK = ["write a limerick", "a limerick please", "limerick", "Write a limerick about {ak}.", "a limerick about {n}",
             "can you write a limerick about {ak}?", "tell me a limerick", "compose a limerick about {ak}"]


def syllables(text: str) -> int:
    """Syllables as groups of vowels; a last silent e does not count."""
    n = 0
    for w in re.findall(r"[a-z]+", text.lower()):
        groups = len(re.findall(r"[aeiouy]+", w))
        if w.endswith("e") and not w.endswith(("le", "ee", "ie", "oe", "ue", "ye")) and groups > 1:
            groups -= 1
        n += max(1, groups)
    return n


def _subject(rng: random.Random) -> tuple[str, str]:
    """What a poem is asked about: as asked, and as the poem says it."""
    r = rng.random()
    if r < 0.3:
        a = rng.choice(ANIMALS + stories.FANTASY)
        return rng.choice(((article(a), article(a)), (f"my {a}", f"my {a}"), (article(a), article(a)), (f"the {a}", f"the {a}")))
    if r < 0.5:
        p = rng.choice(PLACES_WORDS + ["sun", "spring", "summer", "autumn", "winter", "night", "morning"])
        x = p if p in ("snow", "rain", "thunder", "lightning", "fire", "ice", "earth", "sand", "spring", "summer", "autumn", "winter") else f"the {p}"
        return x, x
    if r < 0.6:
        x = f"the {rng.choice(THINGS)}"
        return x, x
    if r < 0.7:
        n = person_name(rng)
        return n, n
    if r < 0.8:
        x = rng.choice(("love", "friendship", "home", "coffee", "tea", "music", "my mother", "my father", "time", "the weekend", "school",
                        "computers", "robots", "pizza", "chocolate", "books", "code", "moeflux", "a mixture of experts", "a small model"))
        return x, x
    if r < 0.9:
        x = f"{article(rng.choice(ADJECTIVES_WORDS))} {rng.choice(ANIMALS + THINGS)}"
        return x, x
    t = topic(rng)
    return t, t


def poem_text(rng: random.Random, x: str) -> str:
    """Two couplets."""
    first = rng.choice(_COUPLETS).format(x=x)
    return first + "\n" + (rng.choice(_CLOSE) if rng.random() < 0.6 else rng.choice([c for c in _COUPLETS if c[:12] != first[:12]]).format(x=x))


def haiku_text(rng: random.Random, x: str) -> str:
    """Three lines; the subject stands in the first, without its article."""
    bare = x.removeprefix("the ").removeprefix("an ").removeprefix("a ")
    n = syllables(bare)
    first = rng.choice(_FIRST.get(n) or ["{x}."]).format(x=bare)
    first = first[0].upper() + first[1:]
    return f"{first}\n{rng.choice(_SECOND)}\n{rng.choice(_THIRD)}"


def poem(rng: random.Random) -> Dialogue:
    """A poem, haiku or limerick, and now and then another."""
    r = rng.random()
    if r < 0.12:
        k, n = rng.choice(ANIMALS), person_name(rng, 0.0)
        she = stories.is_she(n)
        p = rng.choice(_LIMERICK).format(ak=article(k), n=n)
        place, rest, last = rng.choice([("the hill", "who never would ever sit still", "and danced with the wheel of the mill"), ("the sea",
            "who drank every evening its tea", "as happy as someone can be"),
                                        ("the town", "who wore on its head a big crown", "and wore it until it fell down"), ("the moon",
                                            "who played every day on a spoon", "and sang us a wonderful tune")])
        who = f"{n} who lived near {place}" if n in p else f"{article(k)} of {place}"
        he = ("she" if she else "he") if n in p else "it"
        text = f"There once was {who}\n{rest.replace('its', {'she': 'her', 'he': 'his', 'it': 'its'}[he])}.\nIt laughed and it sang,\nthe big church bell rang,\n{last}.".replace("It laughed and it sang",
            f"{he.capitalize()} laughed and {he} sang")
        return Dialogue("poem", [], [user(messy(rng, p, 0.05, 0.02, n)), assistant(text)], "none")
    haiku = r < 0.45
    plain = rng.random() < 0.2
    asked, x = _subject(rng)
    if plain:
        x = rng.choice(("the moon", "the sea", "the rain", "a fox", "the night", "a bear", "the snow"))
        p = rng.choice(_HAIKU_PLAIN if haiku else _POEM_PLAIN)
    else:
        p = rng.choice(_HAIKU if haiku else _POEM).format(x=asked)
    make = haiku_text if haiku else poem_text
    msgs = [user(messy(rng, p, 0.05, 0.02, asked)), assistant(make(rng, x))]
    if rng.random() < 0.12:
        if rng.random() < 0.5:
            asked, x = _subject(rng)
            q = rng.choice(["now about {x}", "and one about {x}", "one about {x} please", "now one about {x}"]).format(x=asked)
        else:
            q = rng.choice(["another one", "one more", "again", "another"])
        msgs += [user(q), assistant(make(rng, x))]
    return Dialogue("poem", [], msgs, "contains" if not plain else "none", x.removeprefix("the ").removeprefix("an ").removeprefix("a "))


def joke(rng: random.Random) -> Dialogue:
    """A joke or riddle, perhaps on a subject, perhaps a second one."""
    if rng.random() < 0.2:
        q, a = rng.choice(RIDDLES)
        msgs = [user(messy(rng, rng.choice(_RIDDLE), 0.06)), assistant(q)]
        r = rng.random()
        if r < 0.45:
            msgs += [user(messy(rng, rng.choice(_GIVE_UP), 0.03)), assistant(a)]
        elif r < 0.6:
            msgs += [user(rng.choice((a.lower().rstrip("."), a, a.rstrip("."), a.split()[-1]))), assistant("That is right! " + a)]
        elif r < 0.75:
            wrong = rng.choice([b for _, b in RIDDLES if b != a] + [article(rng.choice(ANIMALS)).capitalize() + "."])
            msgs += [user(wrong.lower().rstrip(".")), assistant(f"Not quite. The answer is: {a}")]
        return Dialogue("joke", [], msgs, "none")
    if rng.random() < 0.3:
        if rng.random() < 0.65:
            x, text = rng.choice(list(ABOUT.items()))
        else:
            x = rng.choice((rng.choice(ANIMALS + FRUIT + THINGS), topic(rng), any_word(rng)))
            text = ABOUT.get(x) or f"I know no joke about {x}, but this one: {rng.choice(JOKES)}"
        shown = x + "s" if x in ABOUT and x not in ("math", "ai", "programming", "food", "fish", "cheese", "octopus") and rng.random() < 0.5 else x
        p = rng.choice(_JOKE_ABOUT).format(x=shown)
        return Dialogue("joke", [], [user(messy(rng, p, 0.05, 0.02, shown)), assistant(text)], "none")
    told = rng.sample(JOKES, 3)
    msgs = [user(messy(rng, rng.choice(_JOKE), 0.08)), assistant(told[0])]
    for t in told[1:]:
        if rng.random() < 0.3:
            msgs += [user(messy(rng, rng.choice(_AGAIN), 0.04)), assistant(t)]
    if rng.random() < 0.12:
        msgs += [user(rng.choice(["i don't get it", "why?", "i don't understand", "explain the joke", "why is that funny?", "that's not funny",
                                  "what?", "huh?"])),
                 assistant(rng.choice(["A joke that must be explained is no joke. Shall I try another one?",
                                       "Perhaps it was not my best. Shall I tell another one?"]))]
    return Dialogue("joke", [], msgs, "none")
