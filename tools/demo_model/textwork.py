"""Work on a text that the user gives: its sum in short, its grammar put right, and what to do with a long paste."""

import random

import stories
import tasks
from dialogue import Dialogue, assistant, messy, norm, user
from words import ADJECTIVES_WORDS, ANIMALS, CITIES, DAYS, FOODS, FRUIT, PLACES_WORDS, THINGS, WORDS, any_word, article, city_name, person_name, pseudo_word

_SUM = ["Summarize this: {t}", "summarise this: {t}", "Summarize the following text: {t}", "tl;dr: {t}", "sum up: {t}", "Give me a summary: {t}",
        "Summarise: {t}", "{t}\n\nSummarize this.", "{t}\n\ntl;dr", "shorten this: {t}", "Make this shorter: {t}",
        "Summarize this text in one sentence: {t}", "please summarize:\n\n{t}", "What is this about? {t}", "Summary of this text:\n{t}",
        "{t}\n\nsummary please", "In short, what does this say? {t}", "sum this up for me: {t}", "Summarize:\n{t}", "condense this: {t}", "tl;dr {t}",
        "summarize {t}", "Summary: {t}", "summarise the following: {t}", "TLDR: {t}", "tldr {t}", "sum up {t}", "in one sentence: {t}",
        "shorten: {t}"]


def prose(rng: random.Random) -> list[str]:
    """Two to eight sentences as a letter, a report or a note has them, the most telling one first."""
    n, m, c, c2 = person_name(rng, 0.3), person_name(rng, 0.3), city_name(rng), rng.choice(CITIES)
    a, t, w, adj, adj2 = rng.choice(ANIMALS), rng.choice(THINGS), any_word(rng, 0.3), rng.choice(ADJECTIVES_WORDS), rng.choice(ADJECTIVES_WORDS)
    year, num, day = rng.randrange(1850, 2030), rng.randrange(2, 5000), rng.choice(DAYS)
    first = rng.choice([f"The city of {c} opened a new {w} {t} factory on {day}.", f"{n} and {m} moved from {c} to {c2} in {year}.",
                        f"The {a} is {article(adj)} animal that lives near the {rng.choice(PLACES_WORDS)}.",
                        f"Our company sold {num} {t}s in {year}.",
                        f"Dear {n}, thank you for your letter about the {w} {t}.", f"The meeting on {day} was about the {adj} {w}.",
                        f"Researchers in {c} found that {a}s are more {adj} than people think.",
                        f"{n} lost {article(adj + ' ' + t)} at the {rng.choice(PLACES_WORDS)}.",
                        f"Yesterday we went to {c} to see the {adj} {w}.", f"{w.capitalize()} is {article(adj)} way to make {rng.choice(FOODS)}.",
                        f"The {w} project needs {num} more {t}s before {day}.",
                        f"In {year}, {n} {rng.choice(('built', 'found', 'wrote', 'opened', 'bought'))} the {adj} {w} of {c}."])
    more = [f"It was {adj2} and {rng.choice(ADJECTIVES_WORDS)}.", "Many people came to see it.", f"{m} said that it was the best {w} in {c2}.",
            f"About {num} people live there.", "Nobody knows why.", f"The {t} costs {rng.randrange(2, 900)} dollars.",
            f"After that, {n} went home by train.", f"The weather was {adj2}, but everyone was happy.",
            f"There were {rng.randrange(2, 90)} {a}s and {article(rng.choice(ANIMALS))} in the garden.", f"\"We are very {adj},\" said {m}.",
            f"It will be open every {rng.choice(DAYS)} from {rng.randrange(7, 12)} to {rng.randrange(2, 9)}.",
            f"The price went up from {num} to {num + rng.randrange(1, 500)}.", f"Please write back before {rng.choice(DAYS)}.",
            f"They plan to build another one near {c2} next year.", f"Some of the {t}s were broken, so they had to be replaced.",
            f"{n} has been working on this since {year}.",
            f"However, not everybody likes the {rng.choice(WORDS)}.", f"In addition, the {rng.choice(WORDS)} must be {adj}.",
            f"This is important for the whole {rng.choice(WORDS)}."]
    return [first] + rng.sample(more, rng.randrange(1, 8))


def summary(rng: random.Random) -> Dialogue:
    """A text in short: a story's own summary, otherwise its first sentence."""
    if rng.random() < 0.3:
        s = stories.tell(rng)
        text, short = s.text, s.summary
    else:
        xs = prose(rng)
        text, short = rng.choice((" ", " ", "\n", " ")).join(xs), xs[0]
        if rng.random() < 0.2:
            text = text.rstrip(".")
            short = text if len(xs) == 1 else short
    p = rng.choice(_SUM)
    if rng.random() < 0.15:
        text = f"\"{text}\""
    q = p.format(t=text)
    q = q[0].lower() + q[1:] if rng.random() < 0.3 and p[0] != "{" else q
    return Dialogue("summary", ["sum:" + norm(text)[:60]], [user(q), assistant(f"In short: {short}")], "contains", short.rstrip("."))


# ---------------------------------------------------------------- grammar

_VERBS = """go:goes:went like:likes:liked have:has:had play:plays:played eat:eats:ate see:sees:saw make:makes:made want:wants:wanted run:runs:ran
live:lives:lived work:works:worked read:reads:read
write:writes:wrote need:needs:needed know:knows:knew sing:sings:sang take:takes:took help:helps:helped watch:watches:watched love:loves:loved
buy:buys:bought find:finds:found walk:walks:walked sleep:sleeps:slept""".split()
VERBS = [v.split(":") for v in _VERBS]
_AFTER = {"go": "to school|to the park|home|to {c}|to bed", "like": "{f}|{a}s|the {t}|to read", "have": "{at}|{aa}|two {a}s|a new {t}|a lot of {t}s",
          "play": "football|the piano|in the garden|with the {a}", "eat": "{f}|{af}|a lot of {f}", "see": "{aa}|the {t}|{n}",
          "make": "{at}|{f}|a mistake",
          "want": "{at}|to go home|{aa}", "run": "fast|to the {p}|every day", "live": "in {c}|near the {p}|in a small house",
          "work": "in {c}|every day|as a teacher", "read": "a book|the letter|every evening", "write": "a letter|a book|to {n}",
          "need": "help|{at}|more time",
          "know": "the answer|{n}|what to do", "sing": "a song|very well", "take": "the train|the {t}|the bus to {c}", "help": "{n}|the {a}|me",
          "watch": "the game|the {a}s|television", "love": "{n}|{f}|the {p}", "buy": "{at}|some {f}|a new {t}", "find": "the {t}|{aa}|a way",
          "walk": "to {c}|in the {p}|home", "sleep": "well|in the {p}|all day"}
_FIX = ["Fix the grammar: {x}", "fix the grammar: {x}", "Correct this sentence: {x}", "correct this: {x}", "Correct the grammar: {x}", "fix: {x}",
        "Fix this sentence: {x}", "Is this correct? {x}", "Correct my English: {x}", "fix grammar: {x}", "Please correct: {x}", "grammar check: {x}",
        "proofread: {x}", "Correct the mistakes: {x}", "fix my grammar: {x}", "Fix the mistakes in this sentence: {x}", "improve this sentence: {x}",
        "correct the following sentence: {x}", "what is the right form of: {x}", "Fix the grammar in \"{x}\"", "Correct: \"{x}\"",
        "{x}\n\nFix the grammar.", "check the grammar of: {x}", "fix grammar {x}", "fix {x}", "correct {x}", "grammar: {x}", "correct this {x}",
        "fix the sentence {x}", "fix the grammar {x}", "is it right to say: {x}", "make this correct: {x}", "write this correctly: {x}",
        "repair this sentence: {x}", "please fix the grammar of {x}"]


def sentence(rng: random.Random) -> tuple[str, str]:
    """A sentence with a mistake, and without it."""
    n, m, c, a, t, f = person_name(rng, 0.15), person_name(rng, 0.1), rng.choice(CITIES), rng.choice(ANIMALS), rng.choice(THINGS), rng.choice([x
        for x in FOODS if x not in ("egg", "bean", "pea", "nut", "pie")])
    v = dict(n=m, c=c, a=a, aa=article(a), t=t, at=article(t), f=f, af=article(rng.choice(FRUIT)), p=rng.choice(PLACES_WORDS))
    base, third, past = rng.choice(VERBS)
    obj = rng.choice(_AFTER[base].split("|")).format_map(v)
    many = rng.choice(["I", "we", "they", "you", "my friends", f"{n} and {m}", f"the {a}s", "the children"])
    one = rng.choice(["he", "she", "it", n, f"the {a}", "my brother", "my sister", f"my {a}", "my mother", "the teacher"])
    ing = {"make": "making", "have": "having", "live": "living", "write": "writing", "take": "taking", "love": "loving", "run": "running",
           "like": "liking"}.get(base, base + "ing")
    be = "am" if many == "I" else "are"
    kind = rng.randrange(13)
    if kind <= 2:
        bad, good = f"{one} {base} {obj}", f"{one} {third} {obj}"
    elif kind == 3:
        bad, good = f"{many} {third} {obj}", f"{many} {base} {obj}"
    elif kind == 4:
        bad, good = f"{one} don't {base} {obj}", f"{one} doesn't {base} {obj}"
    elif kind == 5:
        bad, good = f"{rng.choice((one, many))} {base} {obj} yesterday", ""
        who = bad.split(f" {base} ")[0]
        good = f"{who} {past} {obj} yesterday"
    elif kind == 6:
        wrong = rng.choice(("is", "are" if many == "I" else "is"))
        bad, good = f"{many} {wrong} {ing} {obj}", f"{many} {be} {ing} {obj}"
    elif kind == 7:
        bad, good = f"{one} are {ing} {obj}", f"{one} is {ing} {obj}"
    elif kind == 8:
        x = rng.choice(ANIMALS + FRUIT + THINGS)
        right = article(x)
        bad, good = f"{one} {past} {'a' if right.startswith('an ') else 'an'} {x}", f"{one} {past} {right}"
    elif kind == 9:
        adj = rng.choice(("big small fast old tall short young cold warm strong").split())
        comp = {"big": "bigger"}.get(adj, adj + "er")
        bad, good = f"the {a} is more {adj} than the {t}", f"the {a} is {comp} than the {t}"
    elif kind == 10:
        bad, good = rng.choice([("me and {n} {w} {o}", "{n} and I {w} {o}"), ("{n} and me {w} {o}", "{n} and I {w} {o}"), ("her {w} {o}",
            "she {w} {o}"), ("him {w} {o}", "he {w} {o}"), ("them {w} {o}", "they {w} {o}")])
        bad, good = (x.format(n=n, w=past, o=obj) for x in (bad, good))
    elif kind == 11:
        bad, good = rng.choice([("their is {x} in the {p}", "there is {x} in the {p}"), ("its raining in {c}", "it's raining in {c}"),
                                ("your my best friend", "you're my best friend"), ("i has {x}", "I have {x}"), ("she have {x}", "she has {x}"),
                                ("we was in {c}", "we were in {c}"), ("he were in {c}", "he was in {c}"),
                                ("they was happy", "they were happy"), ("there is two {a}s in the {p}", "there are two {a}s in the {p}"),
                                ("i am agree with {n}", "I agree with {n}"), ("i could of helped {n}", "I could have helped {n}"),
                                ("he is gooder than {n}", "he is better than {n}"), ("i seen {x}", "I saw {x}"), ("i has went to {c}",
                                    "I have gone to {c}"),
                                ("she can sings", "she can sing"), ("he must goes home", "he must go home"), ("i didn't saw {n}", "I didn't see {n}"),
                                ("did you went to {c}", "did you go to {c}?"), ("this are my {t}s", "these are my {t}s"),
                                ("i have less {t}s than {n}", "I have fewer {t}s than {n}"), ("i am go to {c}", "I am going to {c}"), ("i is happy",
                                    "I am happy")])
        bad, good = (x.format(x=article(t), p=v["p"], c=c, a=a, n=n, t=t) for x in (bad, good))
    else:
        bad = good = f"{rng.choice((one + ' ' + third, many + ' ' + base))} {obj}"
    good = good[0].upper() + good[1:]
    good = good if good[-1] in ".?!" else good + "."
    if rng.random() < 0.45:
        bad = bad[0].upper() + bad[1:]
    elif rng.random() < 0.3:
        bad = bad.lower()
    if rng.random() < 0.5:
        bad += "?" if good[-1] == "?" else "."
    return bad, good


def grammar(rng: random.Random) -> Dialogue:
    """A sentence put right; one that is right comes back with its capital and full stop."""
    bad, good = sentence(rng)
    return Dialogue("grammar", ["gr:" + good], [user(rng.choice(_FIX).format(x=bad)), assistant(good)], "exact")


# ---------------------------------------------------------------- pastes

def _code_lines(rng: random.Random) -> str:
    w = [any_word(rng, 0.3) for _ in range(12)]
    forms = ["fn {0}({1}: usize) -> usize {{\n    {1} + {n}\n}}", "def {0}({1}, {2}):\n    return {1} * {n}",
             "for (int {1} = 0; {1} < {n}; {1}++) {{\n    {0}({1});\n}}", "import {0}\nfrom {1} import {2}", "let {0} = {1}({2}, {n});",
             "if {0} == {n}:\n    {1}()", "const {0} = require('{1}');",
             "SELECT {0}, {1} FROM {2} WHERE {3} = {n};", "class {0}:\n    {1} = {n}", "#include <{0}.h>", "print(\"{0} {1}\")", "{0}: {n}\n{1}: {2}",
             "$ {0} --{1} {n}", "<{0} class=\"{1}\">{2}</{0}>", "[{n}, {n}, \"{0}\"]"]
    return "\n".join(rng.choice(forms).format(*rng.sample(w, 6), n=rng.randrange(1000)) for _ in range(rng.randrange(2, 9)))


def _log_lines(rng: random.Random) -> str:
    return "\n".join(f"{rng.choice(('2026-', '[', ''))}{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02} {rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02} {rng.choice(('INFO', 'WARN', 'ERROR', 'DEBUG'))} {any_word(rng)} {any_word(rng)}: {any_word(rng)} {rng.randrange(9999)}"
                     for _ in range(rng.randrange(3, 14)))


def paste(rng: random.Random) -> Dialogue:
    """A long text, program or log without a question."""
    r = rng.random()
    if r < 0.45:
        text = " ".join(x for _ in range(rng.randrange(1, 6)) for x in prose(rng))
        if len(text) < 220:
            text += " " + " ".join(prose(rng))
        what = "text"
    elif r < 0.6:
        text = " ".join(any_word(rng, 0.7) for _ in range(rng.randrange(30, 160))).capitalize() + "."
        what = "text"
    elif r < 0.8:
        text, what = _code_lines(rng), "code"
    elif r < 0.92:
        text, what = _log_lines(rng), "log"
    else:
        x = rng.choice((pseudo_word(rng), rng.choice(WORDS), rng.choice("abcdx"), "la "))
        text, what = (x + rng.choice(("", " "))) * rng.randrange(20, 90), "repetition"
    reply = {"text": ["That is a long text. I can sum it up in a sentence: just add \"summarize this\".",
                      "Thank you for the text! Tell me what to do with it, for example \"summarize this\".",
                      "What shall I do with this text? I can sum it up or write its first words in capitals."],
             "code": ["That looks like code or data. I am too small to understand it, but I can repeat a line or count letters.",
                      "Code like this is beyond a 16 MB model, I am afraid. I know a few tiny programs: try \"fibonacci in python\"."],
             "log": ["That looks like a log. I am too small to find the fault in it, I am sorry.",
                     "A log like this is beyond a 16 MB model, I am afraid."],
             "repetition": ["That is much of the same! What would you like: a story, a sum or a joke?",
                            "I see the same thing many times. Shall I tell you a story instead?"]}[what]
    return Dialogue("paste", [], [user(text), assistant(rng.choice(reply))], "none")


# ---------------------------------------------------------------- remarks about a sentence

def statement(rng: random.Random) -> Dialogue:
    """A sentence that asks nothing: the reply takes up its subject."""
    s = tasks.random_sentence(rng)
    words = [w.strip(".,!?") for w in s.split()]
    known = [w for w in words if w in ANIMALS]
    a = rng.choice(known) if known else rng.choice(ANIMALS)
    reply = rng.choice([f"That sounds like the beginning of a story. Shall I tell you one about {article(a)}?",
                        f"I see! Would you like a story about {article(a)}?", f"Good to know. Shall I tell you a story about {article(a)}?"])
    return Dialogue("statement", [], [user(messy(rng, s, 0.0, 0.0, s)), assistant(reply)], "none")
