"""Questions about the facts of `facts.py`: capitals, short explanations, animals, words, numbers.

Every fact has several wordings; one wording in forty is held out (`know:` and the wording's letters and digits).
"""

import random

from beyond import TOPICS
from dialogue import Dialogue, assistant, messy, norm, user
from facts import CAPITALS, CONTINENTS, DEFINED, MIX, MONEY, PAST, PLURALS, RHYMES, ROMAN, SINGLE, SPOKEN, SYNONYMS, YOUNG
from words import ANIMALS, CITIES, COLORS, DAYS, FOODS, FRUIT, MONTHS, THINGS, WORDS, article, pseudo_word

_Q = {
    "capital": ["What is the capital of {x}?", "capital of {x}", "What's the capital of {x}?", "whats the capital city of {x}", "{x} capital",
                "Which city is the capital of {x}?", "capital city of {x}?",
                "Name the capital of {x}.", "Tell me the capital of {x}.", "Do you know the capital of {x}?", "the capital of {x} is",
                "can you tell me what the capital of {x} is?", "what is {x}'s capital?"],
    "country": ["Which country has the capital {x}?", "{x} is the capital of which country?", "What country is {x} the capital of?",
                "which country is {x} in?", "In which country is {x}?", "where is {x}?"],
    "continent": ["Which continent is {x} in?", "On which continent is {x}?", "what continent is {x} on?", "where is {x}?",
                  "is {x} in Europe or Asia?", "where is {x} located?"],
    "spoken": ["What language do they speak in {x}?", "Which language is spoken in {x}?", "language of {x}", "what do people speak in {x}?"],
    "money": ["What currency is used in {x}?", "What is the currency of {x}?", "currency of {x}", "what money do they use in {x}?"],
    "define": ["What is {x}?", "what's {x}?", "Explain {x}.", "explain {x}", "define {x}", "Tell me about {x}.", "what does {x} mean?",
               "explain {x} to me", "Explain {x} in simple words.", "can you explain {x}?",
               "How does {x} work?", "Explain {x} like I'm five.", "eli5 {x}", "describe {x}", "teach me about {x}", "{x}?",
               "What do you know about {x}?", "Explain {x} in one sentence.", "what exactly is {x}?",
               "give me a short explanation of {x}", "definition of {x}", "write about {x}", "do you know what {x} is?", "i want to understand {x}"],
    "young": ["What is a baby {x} called?", "What do you call a baby {x}?", "name of a baby {x}", "what is the young of {ax}?",
              "how is a young {x} called?"],
    "plural": ["What is the plural of {x}?", "plural of {x}", "the plural of {x} is?", "what's the plural of {x}", "make {x} plural",
               "how do you say more than one {x}?", "one {x}, two what?"],
    "past": ["What is the past tense of {x}?", "past tense of {x}", "the past of {x}", "what's the past tense of \"{x}\"?",
             "put {x} in the past tense", "simple past of {x}"],
    "synonym": ["What is a synonym for {x}?", "synonym for {x}", "another word for {x}", "give me a synonym of {x}", "What is another word for {x}?",
                "a different word for {x}"],
    "rhyme": ["What rhymes with {x}?", "rhyme with {x}", "words that rhyme with {x}", "Give me a rhyme for {x}.", "a word that rhymes with {x}",
              "find rhymes for {x}", "Name words that rhyme with {x}."],
    "mix": ["What color do {x} and {y} make?", "mix {x} and {y}", "what do you get if you mix {x} and {y}?", "{x} and {y} make which color?",
            "what is {x} plus {y}?"],
    "kind": ["What is {ax}?", "what's {ax}?", "what is {x}?", "Is {ax} an animal?", "tell me about {x}s", "define {x}", "describe {ax}",
             "What do you know about {x}s?", "explain {ax}", "{x}"],
    "roman": ["What is {x} in Roman numerals?", "roman numeral for {x}", "{x} in roman numerals", "write {x} as a roman numeral"],
    "prime": ["Is {x} a prime number?", "is {x} prime?", "{x} prime?", "Is {x} prime or not?", "is the number {x} a prime"],
    "root": ["What is the square root of {x}?", "square root of {x}", "sqrt({x})", "sqrt {x}", "root of {x}", "what's the square root of {x}"],
    "power": ["What is 2 to the power of {x}?", "2^{x}", "2 to the {x}", "2**{x}", "two to the power of {x}"],
}


_NOWHERE = "Narnia Wakanda Atlantis Mordor Gondor Oz Wonderland Neverland Elbonia Utopia Camelot Hogwarts Gotham Mars Jupiter Antarctica Europe Africa Asia Texas California Bavaria Sicily Hawaii Greenland Kosovo Monaco Somalia Sudan Mali Niger Chad Togo Benin Oman Yemen Laos Fiji Samoa Tonga Haiti".split()


def _factor(n: int) -> int:
    return next((d for d in range(2, int(n ** 0.5) + 1) if n % d == 0), n)


def _relation(rng: random.Random) -> tuple[str, str, str, str]:
    """(wording, answer, key words, words to keep as typed) of one fact from a table."""
    r = rng.choices(("capital", "country", "continent", "spoken", "money", "define", "young", "plural", "past", "synonym", "rhyme", "mix", "kind",
                     "roman", "prime", "root", "power", "unknown", "unrhymed"),
                    (30, 8, 5, 3, 3, 30, 4, 6, 6, 5, 6, 2, 12, 1, 7, 3, 2, 9, 2))[0]
    y = ""
    if r == "capital":
        x, a = rng.choice(list(CAPITALS.items()))
        answer, gold = rng.choice((f"The capital of {x} is {a}.",
                                   f"{a} is the capital of {x}.")) if rng.random() < 0.1 else f"The capital of {x} is {a}.", a
    elif r == "unknown":
        made_up = pseudo_word(rng, rng.choice((1, 2, 2, 3)))
        x = rng.choice((made_up.capitalize(), made_up.capitalize(),
                        f"{made_up}{rng.choice(('ia', 'nia', 'land', 'stan', 'ania', 'onia', 'a'))}".capitalize(), rng.choice(CITIES),
                        rng.choice(TOPICS), f"{rng.choice(WORDS).capitalize()}land", rng.choice(_NOWHERE)))
        r = rng.choice(("capital", "capital", "capital", "spoken", "money"))
        answer, gold = (f"I know about a hundred countries, but {x} is not among them.", x)
    elif r == "country":
        a, x = rng.choice([(k, v) for k, v in CAPITALS.items() if k not in ("England", "the UK", "the Netherlands", "the USA", "Singapore",
            "Luxembourg")])
        answer, gold = f"{x} is the capital of {a}.", a.removeprefix("the ")
    elif r == "continent":
        a = rng.choice(list(CONTINENTS))
        x = rng.choice(CONTINENTS[a].split())
        answer, gold = f"{x} is in {a}.", a
    elif r == "spoken":
        x, a = rng.choice(list(SPOKEN.items()))
        answer, gold = f"In {x} people speak {a}.", a
    elif r == "money":
        x, a = rng.choice(list(MONEY.items()))
        answer, gold = f"The currency of {x} is {a}.", a
    elif r == "define":
        x, a = rng.choice(list(DEFINED.items()))
        tail = rng.choice((" That is all that fits into 16 MB.", " More than that I do not know.", " My 16 MB hold no more about it.", "", ""))
        answer, gold = f"{a}.{tail}", max(a.rstrip(".").split(), key=len).strip(",;:")
        if rng.random() < 0.25:
            x = x.removeprefix("a ").removeprefix("an ")
        if rng.random() < 0.35:
            x = x.lower()
    elif r == "young":
        x, a = rng.choice(list(YOUNG.items()))
        answer, gold = f"A baby {x} is called a {a}.", a
    elif r == "plural":
        if rng.random() < 0.6:
            x, a = rng.choice(list(PLURALS.items()))
        else:
            x = rng.choice(ANIMALS + FRUIT + THINGS)
            a = plural(x)
        answer, gold = f"The plural of {x} is {a}.", a
    elif r == "past":
        x, a = rng.choice(list(PAST.items()))
        answer, gold = f"The past tense of {x} is {a}.", a
    elif r == "synonym":
        x, a = rng.choice(list(SYNONYMS.items()))
        if rng.random() < 0.3:
            x, a = a, x
        answer, gold = f"Another word for {x} is {a}.", a
    elif r == "rhyme":
        x, a = rng.choice(list(RHYMES.items()))
        answer, gold = f"{', '.join(a).capitalize()} {'rhyme' if len(a) > 1 else 'almost rhymes'} with {x}.", a[0]
    elif r == "unrhymed":
        r, x = "rhyme", rng.choice([w for w in WORDS if w not in RHYMES])
        answer, gold = f"I have no rhyme for {x}, but I know some for cat, moon, tree and star.", "no rhyme"
    elif r == "mix":
        (x, y), a = rng.choice(list(MIX.items()))
        if rng.random() < 0.5:
            x, y = y, x
        answer, gold = f"{x.capitalize()} and {y} make {a}.", a
    elif r == "kind":
        group, word = rng.choice(((ANIMALS, "an animal"), (FRUIT, "a fruit"), (COLORS, "a color"), (DAYS, "a day of the week"), (MONTHS, "a month"),
                                  (CITIES, "a city"), (FOODS, "something to eat or drink")))
        x = rng.choice(group)
        named = group in (ANIMALS, FRUIT)
        subject = (article(x) if named else x)
        answer = f"{subject[0].upper()}{subject[1:]} is {word}."
        if group is ANIMALS:
            answer += rng.choice((" Shall I tell you a story about one?", f" Would you like a story about {article(x)}?", ""))
        gold = word
        q = rng.choice([f for f in _Q["kind"] if (named and ("an animal" not in f or group is ANIMALS)) or ("{ax}" not in f and "{x}s" not in f)])
        if "Is {ax} an animal" in q:
            answer = f"Yes, {article(x)} is an animal."
        return q.format(x=x, ax=article(x)), answer, gold, x
    elif r == "roman":
        x, a = rng.choice(list(ROMAN.items()))
        answer, gold = f"{x} in Roman numerals is {a}.", a
    elif r == "prime":
        x = rng.randrange(2, 150)
        d = _factor(x)
        answer = f"Yes, {x} is a prime number." if d == x else f"No, {x} is not a prime number: {x} = {d} × {x // d}"
        gold = answer.split(",")[0]
    elif r == "root":
        a = rng.randrange(1, 21)
        x, answer, gold = a * a, f"The square root of {a * a} is {a}, because {a} × {a} = {a * a}", f"is {a}"
    else:
        x = rng.randrange(0, 17)
        answer, gold = f"2 to the power of {x} is {2 ** x}", str(2 ** x)
    form = rng.choice(_Q[r])
    x = str(x)
    return form.format(x=x, y=y, ax=article(x)), answer, gold, f"{x} {y}"


def plural(x: str) -> str:
    if x in PLURALS:
        return PLURALS[x]
    if x in ("fish", "sheep", "deer", "salmon", "moose"):
        return x
    if x.endswith(("s", "x", "ch", "sh")) and x not in ("walrus",):
        return x + "es"
    if x.endswith("y") and x[-2] not in "aeiou":
        return x[:-1] + "ies"
    return x + "s"


def knowledge(rng: random.Random) -> Dialogue:
    """A question about a fact, now and then with the same question about something else after it."""
    if rng.random() < 0.3:
        forms, answer, gold = rng.choice(SINGLE)
        p = rng.choice(forms)
        return Dialogue("knowledge", ["know:" + norm(p)], [user(messy(rng, p[0].upper() + p[1:], 0.08, 0.03)), assistant(answer)], "contains", gold)
    p, answer, gold, keep = _relation(rng)
    msgs = [user(messy(rng, p[0].upper() + p[1:], 0.08, 0.03, keep)), assistant(answer)]
    keys = ["know:" + norm(p)]
    if answer.startswith("The capital of ") and rng.random() < 0.3:
        for _ in range(rng.choice((1, 1, 2))):
            x, a = rng.choice(list(CAPITALS.items()))
            q = rng.choice(["and {x}?", "and of {x}?", "And the capital of {x}?", "what about {x}?", "now {x}", "{x}?", "And {x}"]).format(x=x)
            msgs += [user(q), assistant(f"The capital of {x} is {a}.")]
            gold = a
            keys.append(f"know:{norm(p)}:{norm(q)}")
    return Dialogue("knowledge", keys, msgs, "contains", gold)
