"""Lists of fruits, animals, names …, names for pets and other things, and tiny programs known by heart."""

import random

import tasks
from dialogue import Dialogue, assistant, messy, norm, user
from facts import CAPITALS
from words import ANIMALS, CITIES, FRUIT, article

_RING = {  # each in one fixed order: a list starts anywhere and goes on in this order, so that nothing comes twice
    "fruit": ["apple", "banana", "cherry", "orange", "pear", "grape", "mango", "lemon", "plum", "peach", "kiwi", "melon", "strawberry", "pineapple",
              "fig"],
    "animal": ["fox", "bear", "owl", "rabbit", "lion", "dolphin", "elephant", "frog", "horse", "penguin", "tiger", "mouse", "whale", "hedgehog",
               "giraffe", "dog", "cat"],
    "color": ["red", "blue", "green", "yellow", "purple", "orange", "pink", "white", "black", "brown", "gray", "silver"],
    "vegetable": ["carrot", "potato", "tomato", "onion", "cucumber", "spinach", "pepper", "cabbage", "bean", "pea", "pumpkin", "garlic"],
    "city": ["Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo", "Cairo", "Vienna", "Lisbon", "Oslo", "Boston", "Sydney", "Athens"],
    "country": ["France", "Japan", "Brazil", "Egypt", "Canada", "India", "Italy", "Kenya", "Norway", "Peru", "Spain", "China", "Mexico"],
    "bird": ["owl", "eagle", "duck", "crow", "parrot", "swan", "penguin", "flamingo", "goose", "peacock", "chicken"],
    "food": ["bread", "cheese", "soup", "pasta", "rice", "salad", "pizza", "pancakes", "cake", "honey", "yogurt"],
    "drink": ["water", "tea", "coffee", "milk", "juice", "cocoa", "lemonade"], "flower": ["rose", "tulip", "daisy", "lily", "sunflower", "violet",
        "poppy"],
    "sport": ["football", "tennis", "swimming", "running", "basketball", "skiing", "cycling", "chess"], "instrument": ["piano", "guitar", "violin",
        "flute", "drum", "trumpet", "harp"],
    "pet": ["dog", "cat", "hamster", "rabbit", "parrot", "goldfish", "turtle"], "tree": ["oak", "pine", "birch", "maple", "willow", "apple tree",
        "palm"],
    "job": ["teacher", "doctor", "farmer", "baker", "sailor", "pilot", "painter", "singer", "writer"], "planet": ["Mercury", "Venus", "Earth", "Mars",
        "Jupiter", "Saturn", "Uranus", "Neptune"],
    "language": ["English", "French", "German", "Spanish", "Italian", "Chinese", "Japanese", "Arabic", "Russian"], "shape": ["circle", "square",
        "triangle", "rectangle", "star", "oval"],
    "programming language": ["Rust", "Python", "C", "Java", "JavaScript", "Go", "Ruby", "Haskell"], "girl's name": ["Mia", "Anna", "Lily", "Emma",
        "Zoe", "Clara", "Ella", "Ivy", "Ruby", "Luna"],
    "boy's name": ["Tom", "Max", "Leo", "Sam", "Finn", "Noah", "Hugo", "Theo", "Luke", "Felix"], "name": ["Mia", "Tom", "Luna", "Leo", "Clara",
        "Finn", "Ruby", "Max", "Ivy", "Oscar"],
    "word": ["river", "candle", "whisper", "button", "cloud", "ladder", "honey", "garden", "pocket", "thunder"], "number": ["3", "17", "42", "8",
        "25", "99", "64", "12"],
    "adjective": ["brave", "quiet", "golden", "gentle", "clever", "tiny", "warm", "curious"], "verb": ["run", "sing", "write", "jump", "read", "swim",
        "laugh", "dream"],
    "thing": ["lamp", "key", "book", "ball", "cup", "kite", "clock", "basket", "mirror"], "river": ["Nile", "Amazon", "Rhine", "Danube", "Thames",
        "Mississippi"],
}
_PLURAL_RING = {"fruit": "fruits", "city": "cities", "country": "countries", "girl's name": "girls' names", "boy's name": "boys' names"}
_MANY = ["Name {n} {xs}.", "List {n} {xs}.", "Give me {n} {xs}.", "list {n} {xs}", "name {n} {xs}", "{n} {xs}", "tell me {n} {xs}",
         "Can you name {n} {xs}?", "give me a list of {n} {xs}", "Write {n} {xs}.",
         "I need {n} {xs}.", "what are {n} {xs}?", "make a list of {n} {xs}", "{n} {xs} please", "can you list {n} {xs}?", "think of {n} {xs}",
         "show me {n} {xs}", "name me {n} {xs}"]
_ONE = ["Name {ax}.", "Give me {ax}.", "tell me {ax}", "name one {x}", "give me one {x}", "Say {ax}.", "think of {ax}", "pick {ax}", "random {x}",
        "{ax} please", "Can you name {ax}?", "a random {x}"]
_SOME = ["Name some {xs}.", "List some {xs}.", "give me some {xs}", "what {xs} do you know?", "Which {xs} do you know?", "list of {xs}", "{xs}",
         "name a few {xs}", "a list of {xs}", "Give me examples of {xs}.",
         "list {xs}", "tell me some {xs}", "do you know any {xs}?", "a few {xs}", "make a list of {xs}"]


def _listed(xs: list[str]) -> str:
    if len(xs) > 4:
        return "\n".join(f"{i}. {x}" for i, x in enumerate(xs, 1))
    return ", ".join(xs)


def list_of(rng: random.Random) -> Dialogue:
    """So many fruits, animals, names …; or one, or one with a given first letter."""
    x = rng.choice([*_RING, "fruit", "animal", "color", "city", "country", "vegetable", "name"])
    ring = _RING[x]
    xs, ax = _PLURAL_RING.get(x, x + "s"), article(x)
    if rng.random() < 0.1 and x == "color":
        xs, ax, shown = "colours", "a colour", "colour"
    else:
        shown = x
    at = rng.randrange(len(ring)) if rng.random() < 0.6 else 0
    r = rng.random()
    if r < 0.16 and x in ("animal", "fruit", "city", "country", "vegetable", "color"):
        pool = sorted(set(ring + {"animal": ANIMALS, "fruit": FRUIT, "city": CITIES, "country": [c for c in CAPITALS if c[0] != "t"]}.get(x, [])))
        c = rng.choice("abcdefghijklmnopqrstuvwxyz")
        have = [w for w in pool if w[0].lower() == c]
        p = rng.choice(["Name {ax} that starts with {c}.", "{ax} starting with {c}", "{ax} with the letter {c}", "a {x} that begins with {c}",
                        "which {x} starts with {c}?", "tell me {ax} with {c}",
                        "give me {ax} that starts with the letter {c}"]).format(ax=ax, x=shown, c=c.upper() if rng.random() < 0.5 else c)
        a, gold = (have[by_letter(c, len(have))], "") if have else (f"I know no {shown} that starts with {c}.", "no")
        if have:
            a, gold = f"{a[0].upper()}{a[1:]} starts with {c}.", a
        return Dialogue("list", [f"list:{x}:{c}"], [user(messy(rng, p[0].upper() + p[1:], 0.06, 0.02, f"{c} {shown}")), assistant(a)], "contains",
                        gold)
    if r < 0.3:
        p, n = rng.choice(_ONE).format(x=shown, ax=ax), 1
    elif r < 0.45:
        p, n = rng.choice(_SOME).format(xs=xs), 5 if len(ring) > 5 else 4
    else:
        n = rng.choice((2, 3, 3, 3, 4, 5, 5, 6, 7, 8, 10, 10))
        n = min(n, len(ring))
        p = rng.choice(_MANY).format(n=n if rng.random() < 0.6 else tasks.NUMBER_WORDS[n], xs=xs)
    got = [ring[(at + i) % len(ring)] for i in range(n)]
    a = _listed(got)
    msgs = [user(messy(rng, p[0].upper() + p[1:], 0.06, 0.02)), assistant(a[0].upper() + a[1:] if n < 5 else a)]
    if rng.random() < 0.2:
        m = rng.choice((1, 1, 2, 3))
        if n + m <= len(ring):
            q = rng.choice({1: ["one more", "another one", "and another", "one more please", "another one please"], 2: ["two more",
                "give me two more"], 3: ["three more", "3 more please"]}[m])
            a = _listed([ring[(at + n + i) % len(ring)] for i in range(m)])
            msgs += [user(q), assistant(a[0].upper() + a[1:])]
    return Dialogue("list", [f"list:{norm(p)}"], msgs, "none")


def by_letter(c: str, n: int) -> int:
    """One of `n` by letter: always the same, so that it can be learned."""
    return (ord(c) * 7) % n


_PET_NAMES = {"cat": ["Whiskers", "Luna", "Misty", "Pepper", "Shadow", "Cleo"], "dog": ["Biscuit", "Rusty", "Bella", "Scout", "Max", "Daisy"],
              "hamster": ["Peanut", "Nibbles", "Waffle", "Pip"],
              "rabbit": ["Clover", "Hopper", "Snowy", "Thumper"], "horse": ["Star", "Storm", "Spirit", "Maple"], "fish": ["Bubbles", "Splash", "Finn",
                  "Coral"], "parrot": ["Rio", "Kiwi", "Coco", "Sunny"],
              "robot": ["Bolt", "Gizmo", "Sparky", "Chip"], "dragon": ["Ember", "Cinder", "Blaze", "Smoky"], "boat": ["Sea Star", "Little Wave",
                  "Blue Wind", "Seagull"], "baby": ["Mia", "Noah", "Ella", "Leo"],
              "band": ["The Quiet Foxes", "Moon Parade", "Paper Boats", "The Tin Buttons"], "company": ["Bright Acorn", "Blue Lantern",
                  "Little Giant", "North Star"], "car": ["Thunder", "Betty", "Silver", "Dusty"],
              "turtle": ["Speedy", "Shelly", "Mossy", "Otto"], "bear": ["Bramble", "Honey", "Bruno", "Hugo"], "fox": ["Rusty", "Ember", "Pip",
                  "Fern"], "ship": ["North Wind", "Sea Star", "Swift", "Old Anna"],
              "plant": ["Fern", "Basil", "Ivy", "Leafy"], "princess": ["Aurora", "Stella", "Rosa", "Elsa"], "wizard": ["Merlo", "Aldwin", "Fizz",
                  "Otto"], "cafe": ["The Warm Cup", "Honey and Bread", "The Blue Door", "Corner Crumb"]}
_NAME_ASK = ["Give me a name for {ax}.", "a name for {ax}", "Suggest a name for my {x}.", "what should I call my {x}?", "name my {x}",
             "Name for {ax}?", "how should i name my new {x}?", "{x} name", "{x} names",
             "I need a name for my {x}.", "think of a name for {ax}", "a good name for {ax}", "what is a good name for {ax}?", "cute {x} name",
             "a funny name for my {x}", "help me name my {x}", "i got a {x}, what should i call it?"]


def name_for(rng: random.Random) -> Dialogue:
    """A name for a cat, a boat, a band …, and another one."""
    x = rng.choice([*_PET_NAMES, "cat", "dog"]) if rng.random() < 0.8 else rng.choice(ANIMALS)
    names = _PET_NAMES.get(x) or ["Pip", "Biscuit", "Poppy", "Bramble", "Pepper", "Ziggy"]
    p = rng.choice(_NAME_ASK).format(x=x, ax=article(x))
    at = rng.randrange(len(names))
    n = names[at]
    msgs = [user(messy(rng, p[0].upper() + p[1:], 0.06, 0.02, x)), assistant(rng.choice(["How about {n}?", "{n} would be a good name for {ax}.",
        "What do you think of {n}?", "You could call it {n}."]).format(n=n, ax=article(x)))]
    while rng.random() < 0.25:
        at += 1
        n = names[at % len(names)]
        msgs += [user(rng.choice(["another one", "another", "one more", "i don't like it", "something else", "a different one",
                                  "no, another one please", "more", "other ideas?"])),
                 assistant(rng.choice(["Or {n}?", "Then {n}?", "How about {n}?"]).format(n=n))]
        if at > 6:
            break
    return Dialogue("name_for", ["name:" + norm(p)], msgs, "none")


# ---------------------------------------------------------------- code by heart

CODE = {
    ("fibonacci", "python"): "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a", ("factorial",
        "python"): "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
    ("hello world", "python"): "print(\"Hello, world!\")", ("hello world", "javascript"): "console.log(\"Hello, world!\");", ("hello world",
        "rust"): "fn main() {\n    println!(\"Hello, world!\");\n}",
    ("hello world", "c"): "#include <stdio.h>\n\nint main(void) {\n    printf(\"Hello, world!\\n\");\n    return 0;\n}", ("hello world",
        "go"): "package main\n\nimport \"fmt\"\n\nfunc main() {\n    fmt.Println(\"Hello, world!\")\n}",
    ("hello world", "bash"): "echo \"Hello, world!\"", ("hello world",
                                                        "java"): "class Main {\n    public static void main(String[] args) {\n        System.out.println(\"Hello, world!\");\n    }\n}",
    ("hello world", "ruby"): "puts \"Hello, world!\"", ("hello world", "html"): "<h1>Hello, world!</h1>", ("hello world",
        "sql"): "SELECT 'Hello, world!';",
    ("reverse a string", "python"): "def reverse(text):\n    return text[::-1]", ("sum a list", "python"): "total = sum([1, 2, 3])",
    ("check for a prime", "python"): "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, n))",
    ("a for loop", "python"): "for i in range(10):\n    print(i)", ("a for loop",
        "javascript"): "for (let i = 0; i < 10; i++) {\n    console.log(i);\n}", ("a for loop",
            "c"): "for (int i = 0; i < 10; i++) {\n    printf(\"%d\\n\", i);\n}",
    ("a for loop", "rust"): "for i in 0..10 {\n    println!(\"{i}\");\n}", ("sort a list", "python"): "numbers = [7, 3, 9]\nnumbers.sort()",
    ("fizzbuzz", "python"): "for i in range(1, 101):\n    print(\"Fizz\" * (i % 3 == 0) + \"Buzz\" * (i % 5 == 0) or i)",
    ("read a file", "python"): "with open(\"file.txt\") as f:\n    text = f.read()", ("fibonacci",
        "rust"): "fn fibonacci(n: u32) -> u64 {\n    let (mut a, mut b) = (0, 1);\n    for _ in 0..n {\n        (a, b) = (b, a + b);\n    }\n    a\n}",
    ("fibonacci", "javascript"): "function fibonacci(n) {\n    let [a, b] = [0, 1];\n    for (let i = 0; i < n; i++) {\n        [a, b] = [b, a + b];\n    }\n    return a;\n}",
    ("count words", "python"): "def count_words(text):\n    return len(text.split())", ("add two numbers",
        "python"): "def add(a, b):\n    return a + b",
}
_CODE_ASK = ["Write {l} code for {x}.", "write {l} code for {x}", "{x} in {l}", "Write {x} in {l}.", "{l} {x}", "how do I write {x} in {l}?",
             "Show me {x} in {l}.", "{l} program for {x}", "{l} code {x}", "code for {x} in {l}",
             "Write a {l} function for {x}.", "Can you write {x} in {l}?", "give me {l} code for {x}", "how to {x} in {l}", "{x} {l}",
             "write a {l} program for {x}", "a {l} script for {x}"]


def code(rng: random.Random) -> Dialogue:
    """A tiny program that the model knows by heart."""
    (x, l), text = rng.choice(list(CODE.items()))
    shown = {"javascript": "JavaScript", "html": "HTML", "sql": "SQL"}.get(l, l.capitalize()) if rng.random() < 0.5 else l
    p = rng.choice(_CODE_ASK).format(x=x, l=shown)
    if l == "python" and rng.random() < 0.3:
        p = rng.choice(["write {x}", "code for {x}", "Write code for {x}.", "write a function for {x}", "write a program for {x}",
                        "program {x}"]).format(x=x)
    return Dialogue("code", ["code:" + norm(p)], [user(messy(rng, p, 0.04, 0.01, f"{x} {l}")), assistant(f"```{l}\n{text}\n```")], "contains",
                    text.split("\n")[0])
