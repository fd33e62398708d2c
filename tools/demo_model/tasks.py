"""Single-turn tasks with one right answer: numbers, lists, letters, copying, JSON records, small facts.

Each maker draws one problem and returns an `Example`. `key` names the *problem* apart from its wording ("add:37:48"),
so that holding out keys holds out the problem in every wording. Answers have one canonical form a task.
"""

import json
import random
from dataclasses import dataclass

import stories
from words import (ADJECTIVES_WORDS, ANIMALS, COLORS, DAYS, FOODS, FRUIT, LIST_GROUPS, MONTHS, NUMBER_WORDS, THINGS, WORDS,
                   any_word, article, city_name, foreign_word, noun, person_name, piece_text, pseudo_word)


@dataclass
class Example:
    """One problem: `check` says how an answer is judged (exact, number, json, contains, story, none)."""

    task: str
    key: str
    prompt: str
    answer: str
    check: str = "exact"
    gold: str = ""
    short: str = ""  # the bare answer, where one exists ("85", "cold")


def rough(rng: random.Random, text: str) -> str:
    """Types `text` the way people do: sometimes lower case, without the last mark, or with a polite word."""
    r = rng.random()
    if r < 0.35:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.04:
        text = _typo(rng, text)
    if rng.random() < 0.3 and text[-1] in ".?!":
        text = text[:-1]
    r = rng.random()
    if r < 0.05:
        text = "please " + text[0].lower() + text[1:]
    elif r < 0.08 and text[-1] not in ".?!:":
        text += " please"
    elif r < 0.11:
        text = rng.choice(("hey, ", "hi, ", "ok, ", "can you help me? ")) + text
    return text


_TYPO_WORDS = set("""tell story sort reverse what repeat convert count letters write which numbers please about calculate words
alphabetical minus plus times multiply subtract divided what's short bigger larger smaller word list many number json turn this
sentence capital explain opposite name these order how name""".split())


def _typo(rng: random.Random, text: str) -> str:
    """One letter of one instruction word dropped, doubled or swapped with the next."""
    parts = text.split(" ")
    at = [i for i, w in enumerate(parts[:6]) if w.lower() in _TYPO_WORDS and len(w) > 3]
    if at:
        i = rng.choice(at)
        w, j = parts[i], rng.randrange(1, len(parts[i]) - 1)
        parts[i] = rng.choice((w[:j] + w[j + 1:], w[:j] + w[j] + w[j:], w[:j] + w[j + 1] + w[j] + w[j + 2:]))
    return " ".join(parts)


def lower_some(rng: random.Random, text: str, p: float = 0.25) -> str:
    """All lower case with probability `p`; only for prompts whose answer does not depend on case."""
    return text.lower() if rng.random() < p else text


# ---------------------------------------------------------------- numbers

def _operand(rng: random.Random, digits: int) -> int:
    if digits > 1 and rng.random() < 0.1:  # long carries and borrows: 800, 4000, 999, 4999, 1001
        top = rng.randrange(1, 10) * 10 ** (digits - 1)
        return max(0, min(10 ** digits - 1, top + rng.choice((0, 0, 0, -1, -1, 1, -2, 10 ** (digits - 2)))))
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10 ** digits)


_SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (2, 2), (2, 2), (3, 1), (1, 3), (3, 2), (2, 3), (3, 3), (3, 3), (3, 3), (3, 3),
          (4, 4), (4, 4), (4, 3), (3, 4), (4, 2)]
_ADD = ["What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a}+{b}=", "{a} + {b} =", "{a} + {b} = ?", "Add {a} and {b}.",
        "What is {a} plus {b}?", "{a} plus {b}", "What's {a}+{b}?", "How much is {a} + {b}?", "Calculate {a} + {b}.",
        "Compute {a}+{b}", "What is the sum of {a} and {b}?", "Sum of {a} and {b}", "how much is {a} and {b} together?",
        "Can you add {a} and {b}?", "what do you get if you add {b} to {a}?", "Solve {a} + {b}", "add {b} to {a}",
        "I have {a} and get {b} more. How many do I have?", "tell me {a}+{b}", "{a} + {b}?", "whats {a} + {b}",
        "what does {a} + {b} equal?", "{a} plus {b} equals?", "{a} + {b} equals", "and {a} + {b}?", "what about {a} + {b}?", "{a} plus {b} is"]
_SUB = ["What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a}-{b}=", "{a} - {b} =", "{a} - {b} = ?", "Subtract {b} from {a}.",
        "What is {a} minus {b}?", "{a} minus {b}", "What's {a}-{b}?", "How much is {a} - {b}?", "Calculate {a} - {b}.",
        "Compute {a}-{b}", "What is the difference of {a} and {b}?", "take {b} away from {a}", "Take {b} from {a}",
        "Can you subtract {b} from {a}?", "what is left if you take {b} from {a}?", "Solve {a} - {b}", "{a} - {b}?",
        "tell me {a}-{b}", "whats {a} - {b}", "what does {a} - {b} equal?", "{a} minus {b} equals?", "and {a} - {b}?",
        "what about {a} - {b}?"]
_MUL = ["What is {a} × {b}?", "{a} × {b}", "{a}*{b}", "{a} * {b}", "{a} x {b}", "{a}x{b}", "What is {a} times {b}?",
        "{a} times {b}", "Multiply {a} by {b}.", "Multiply {a} and {b}", "What's {a}*{b}?", "Calculate {a} * {b}.",
        "How much is {a} times {b}?", "{a} * {b} =", "{a} x {b} = ?", "What is the product of {a} and {b}?",
        "Compute {a} × {b}", "{a} times {b} equals?", "and {a} * {b}?", "what about {a} x {b}?", "Can you multiply {a} by {b}?", "Solve {a} * {b}", "whats {a} x {b}", "tell me {a} times {b}"]


def _written(rng: random.Random, a: int, b: int) -> tuple:
    """The operands, now and then as words when they are small."""
    if a <= 12 and b <= 12 and rng.random() < 0.12:
        return NUMBER_WORDS[a], NUMBER_WORDS[b]
    return a, b


def _sum_prompt(rng: random.Random, forms: list[str], a: int, b: int) -> str:
    x, y = _written(rng, a, b)
    form = rng.choice(forms if x == a else [f for f in forms if " {b}" in f or "{b} " in f])
    prompt = rough(rng, form.format(a=x, b=y))
    return prompt.upper() if rng.random() < 0.02 else prompt


def add(rng: random.Random) -> Example:
    """Sum of two numbers below 10000."""
    a, b = (_operand(rng, d) for d in rng.choice(_SIZES))
    return Example("add", "add:%d:%d" % tuple(sorted((a, b))), _sum_prompt(rng, _ADD, a, b),
                   f"{a} + {b} = {a + b}", "number", str(a + b), str(a + b))


def subtract(rng: random.Random) -> Example:
    """Difference of two numbers below 10000, negative one time in six."""
    a, b = (_operand(rng, d) for d in rng.choice(_SIZES))
    if a < b and rng.random() < 0.7:
        a, b = b, a
    return Example("subtract", f"sub:{a}:{b}", _sum_prompt(rng, _SUB, a, b),
                   f"{a} - {b} = {a - b}", "number", str(a - b), str(a - b))


def product_steps(a: int, b: int) -> str:
    """The worked product: one partial product a digit, then their sum."""
    if a < 10 and b < 10 or a % 10 == 0 and b < 10 or a < 10 and b % 10 == 0 or min(a, b) < 2:
        return f"{a} × {b} = {a * b}"
    x, y = (a, b) if b < 10 or a >= 10 else (b, a)
    if y < 10:  # two digits times one
        t, u = x // 10 * 10, x % 10
        return f"{a} × {b} = {t} × {y} + {u} × {y} = {t * y} + {u * y} = {a * b}"
    t, u = y // 10 * 10, y % 10
    if u == 0:
        return f"{a} × {b} = {x} × {y // 10} × 10 = {x * (y // 10)} × 10 = {a * b}"
    return f"{a} × {b} = {x} × {t} + {x} × {u} = {x * t} + {x * u} = {a * b}"


def multiply(rng: random.Random) -> Example:
    """Product of two numbers of up to two digits, answered with the partial products."""
    a, b = (_operand(rng, d) for d in rng.choice(((1, 1), (2, 1), (1, 2), (2, 2), (2, 2), (2, 2), (2, 2))))
    return Example("multiply", "mul:%d:%d" % tuple(sorted((a, b))), _sum_prompt(rng, _MUL, a, b),
                   product_steps(a, b), "number", str(a * b), str(a * b) if max(a, b) < 10 else "")


def three_terms(rng: random.Random) -> Example:
    """Two sums or differences in a row, answered one step at a time; never negative."""
    while True:
        a, b, c = (rng.randrange(rng.choice((10, 10, 100))) for _ in range(3))
        o, u = rng.choice("++-"), rng.choice("++-")
        x = a + b if o == "+" else a - b
        y = x + c if u == "+" else x - c
        if x >= 0 and y >= 0:
            break
    s = f"{a} {o} {b} {u} {c}"
    p = rng.choice(["What is {s}?", "{s}", "{s} =", "Calculate {s}.", "How much is {s}?", "{s}?", "what's {s}"]).format(
        s=s if rng.random() < 0.6 else s.replace(" ", ""))
    return Example("three_terms", f"three:{s}", rough(rng, p), f"{s} = {x} {u} {c} = {y}", "number", str(y))


def half_double(rng: random.Random) -> Example:
    """Even or odd, double, half and square of a small number."""
    n = rng.randrange(rng.choice((10, 100, 500)))
    kind = rng.choice(("even", "even", "double", "half", "square"))
    if kind == "even":
        w = "even" if n % 2 == 0 else "odd"
        asked = rng.choice(("even", "odd"))
        p, a = rng.choice([(f"Is {n} even or odd?", f"{n} is {w}."), (f"{n}, even or odd?", f"{n} is {w}."),
                           (f"Is {n} {asked}?", f"{'Yes' if asked == w else 'No'}, {n} is {w}."),
                           (f"is {n} an {asked} number?", f"{'Yes' if asked == w else 'No'}, {n} is {w}.")])
    elif kind == "double":
        p = rng.choice(["double {n}", "What is double {n}?", "Double the number {n}.", "what is twice {n}?"]).format(n=n)
        a = f"{n} + {n} = {2 * n}"
    elif kind == "half":
        n *= 2
        p = rng.choice(["half of {n}", "What is half of {n}?", "Divide {n} in half.", "what's half of {n}"]).format(n=n)
        a = f"{n // 2} + {n // 2} = {n}, so half of {n} is {n // 2}"
    else:
        n %= 100
        p = rng.choice(["{n} squared", "What is {n} squared?", "the square of {n}", "{n}^2"]).format(n=n)
        a = product_steps(n, n)
    return Example("half_double", f"{kind}:{n}", rough(rng, p), a)


def sum_list(rng: random.Random) -> Example:
    """The sum of three to five numbers below 100, one step at a time."""
    xs = [rng.randrange(rng.choice((10, 20, 100))) for _ in range(rng.randrange(3, 6))]
    items = ", ".join(map(str, xs[:-1])) + rng.choice((", ", " and ")) + str(xs[-1])
    p = rng.choice(["Add {x}.", "What is the sum of {x}?", "sum of {x}", "Add up these numbers: {x}", "sum: {x}", "add these: {x}",
                    "Add {x} together.", "total of {x}", "Sum up {x}", "What do {x} add up to?", "{s}", "What is {s}?"])
    total, steps = xs[0], []
    for x in xs[1:]:
        steps.append(f"{total} + {x} = {total + x}")
        total += x
    return Example("sum_list", f"sum:{sorted(xs)}", rough(rng, p.format(x=items, s=rng.choice((" + ", " + ", "+")).join(map(str, xs)))) if len(xs) > 3 or "{s}" not in p
                   else rough(rng, "sum of " + items), ", ".join(steps), "exact", "", str(total))


def divide(rng: random.Random) -> Example:
    """A number up to 200 by at most 12, with remainder; the answer multiplies back first."""
    b = rng.randrange(1, 13)
    a = b * rng.randrange(0, 13) if rng.random() < 0.6 else rng.randrange(0, 201)
    q, r = divmod(a, b)
    p = rng.choice(["What is {a} / {b}?", "{a}/{b}", "{a} / {b}", "{a} divided by {b}", "What is {a} divided by {b}?",
                    "Divide {a} by {b}.", "How much is {a} / {b}?", "{a} ÷ {b}", "{a} / {b} ="]).format(a=a, b=b)
    steps = f"{q} × {b} = {q * b}" + (f", {a} - {q * b} = {r}" if r else "")
    return Example("divide", f"div:{a}:{b}", rough(rng, p), f"{steps}, so {a} ÷ {b} = {q}" + (f" remainder {r}" if r else ""))


_WORD_PROBLEMS = [
    ("+", "{n} has {a} {t}s and gets {b} more. How many {t}s does {n} have?", "{n} has {c} {t}s."),
    ("+", "{n} has {a} {t}s. {m} has {b} {t}s. How many {t}s do they have together?", "Together they have {c} {t}s."),
    ("+", "There are {a} {t}s on the table and {b} {t}s on the floor. How many {t}s are there?", "There are {c} {t}s."),
    ("-", "{n} has {a} {t}s and gives {b} to {m}. How many {t}s are left?", "{c} {t}s are left."),
    ("-", "I have {a} {t}s and eat {b}. How many are left?", "{c} {t}s are left."),
    ("-", "I have {a} {t}s and give away {b}. How many {t}s do I have left?", "You have {c} {t}s left."),
    ("-", "I had {a} {t}s but lost {b}. How many do I have now?", "You have {c} {t}s."),
    ("+", "I have {a} {t}s and buy {b} more. How many {t}s do I have?", "You have {c} {t}s."),
    ("+", "If I have {a} {t}s and you give me {b} more, how many do I have?", "You have {c} {t}s."),
    ("-", "There are {a} {t}s in a box. {n} takes {b}. How many {t}s are still in the box?", "{c} {t}s are in the box."),
    ("-", "{n} had {a} {t}s and lost {b} of them. How many {t}s does {n} have now?", "{n} has {c} {t}s."),
    ("+", "{n} has {a} {t}s and buys {b} more. How many {t}s?", "{n} has {c} {t}s."),
    ("+", "{n} has {a} {t}s. {m} gives {n} {b} more. How many {t}s does {n} have now?", "{n} has {c} {t}s."),
    ("+", "{n} found {a} {t}s in the morning and {b} in the evening. How many {t}s did {n} find?", "{n} found {c} {t}s."),
    ("+", "There are {a} red {t}s and {b} blue {t}s. How many {t}s are there in all?", "There are {c} {t}s."),
    ("+", "I bought {a} {t}s yesterday and {b} today. How many did I buy?", "You bought {c} {t}s."),
    ("-", "{n} has {a} {t}s and loses {b}. How many are left?", "{c} {t}s are left."),
    ("-", "{n} had {a} {t}s and sold {b}. How many {t}s are left?", "{c} {t}s are left."),
    ("-", "{n} has {a} {t}s and {m} has {b}. How many more does {n} have?", "{n} has {c} {t}s more."),
    ("-", "If you have {a} {t}s and take away {b}, how many are left?", "{c} {t}s are left."),
    ("-", "A shop has {a} {t}s and sells {b}. How many {t}s are left?", "{c} {t}s are left."),
    ("×", "There are {a} bags with {b} {t}s in each. How many {t}s are there?", "There are {c} {t}s."),
    ("×", "{n} buys {a} {t}s for {b} dollars each. How much does {n} pay?", "{n} pays {c} dollars."),
    ("×", "{n} has {a} boxes with {b} {t}s each. How many {t}s does {n} have?", "{n} has {c} {t}s."),
    ("×", "One {t} costs {b} coins. How much do {a} {t}s cost?", "{a} {t}s cost {c} coins."),
]
_COUNTABLE = """apple ball book coin candle card cookie egg button flower stone shell pencil kite lemon marble pear plum
carrot cup hat key lamp map nut onion pen ring shoe star ticket toy balloon banana orange melon""".split()


def word_problem(rng: random.Random) -> Example:
    """A one-step sum told in a sentence."""
    op, q, a_text = rng.choice(_WORD_PROBLEMS)
    c = 1
    while c == 1:  # would need a singular
        hi = 11 if op == "×" else rng.choice((10, 20, 100))
        a, b = rng.randrange(2, hi), rng.randrange(2, hi)
        if op == "-" and a < b:
            a, b = b, a
        c = a * b if op == "×" else a + b if op == "+" else a - b
    n, m = person_name(rng), person_name(rng)
    v = dict(n=n, m=m, a=a, b=b, c=c, t=noun(rng, _COUNTABLE))
    prompt = q.format(**v)
    return Example("word_problem", f"wp:{prompt}", rough(rng, prompt), f"{a} {op} {b} = {c}. {a_text.format(**v)}",
                   "exact", "", str(c))


def compare(rng: random.Random) -> Example:
    """Order of two numbers, or the largest or smallest of several."""
    r = rng.random()
    hi = rng.choice((10, 100, 100, 1000, 1000))
    if r < 0.25:
        xs = rng.sample(range(hi), rng.randrange(3, 7)) if hi > 10 else rng.sample(range(hi), 4)
        big = rng.random() < 0.5
        w = rng.choice(("largest", "biggest", "highest", "greatest") if big else ("smallest", "lowest"))
        best = max(xs) if big else min(xs)
        items = ", ".join(map(str, xs))
        p = rng.choice([f"What is the {w} number: {items}?", f"Which number is the {w}: {items}?", f"{w} of {items}",
                        f"Find the {w} number in {items}.", f"Which of these is the {w}? {items}"])
        return Example("compare", f"cmp:{sorted(xs)}", rough(rng, p), f"The {w} number is {best}.", "exact", "", str(best))
    a, b = rng.randrange(hi), rng.randrange(hi)
    if rng.random() < 0.3 and hi > 10:  # close numbers are the hard ones
        b = max(0, a + rng.choice((-10, -2, -1, 1, 2, 10)))
    if a == b:
        b += 1
    key = "cmp:%d:%d" % tuple(sorted((a, b)))
    if r < 0.6:
        big = rng.random() < 0.6
        w = rng.choice(("bigger", "larger", "greater") if big else ("smaller", "less"))
        best, other = (max(a, b), min(a, b)) if big else (min(a, b), max(a, b))
        p = rng.choice([f"Which is {w}, {a} or {b}?", f"What is {w}: {a} or {b}?", f"which number is {w}, {a} or {b}",
                        f"{a} or {b}, which is {w}?", f"is {a} or {b} {w}?"])
        return Example("compare", key, rough(rng, p), f"{best} is {w} than {other}.", "exact", "", str(best))
    if r < 0.85:
        big = rng.random() < 0.5
        w = rng.choice(("bigger", "larger", "greater", "more") if big else ("smaller", "less"))
        p = rng.choice([f"Is {a} {w} than {b}?", f"is {a} {w} than {b}"])
        yes = (a > b) == big
        real = w if yes else "less" if big else "greater"
        return Example("compare", key, rough(rng, p), f"{'Yes' if yes else 'No'}, {a} is {real} than {b}.", "exact", "",
                       "Yes" if yes else "No")
    p = rng.choice([f"Compare {a} and {b}.", f"compare {a} with {b}", f"Compare the numbers {a} and {b}."])
    return Example("compare", key, rough(rng, p), f"{a} is {'greater' if a > b else 'less'} than {b}.")


# ---------------------------------------------------------------- lists

def _bracketed(rng: random.Random, xs: list[str], result: list[str]) -> tuple[str, str]:
    """A list as people write it and the answer in the same style: brackets are kept, everything else becomes commas."""
    r = rng.random()
    if r < 0.05:
        return f"[{', '.join(xs)}]", f"[{', '.join(result)}]"
    if r < 0.08:
        q = [x if x.lstrip("-").isdigit() else f'"{x}"' for x in xs]
        return f"[{', '.join(q)}]", f"[{', '.join(q[xs.index(x)] for x in result)}]"
    return _join(rng, xs), ", ".join(result)


def _join(rng: random.Random, xs: list[str]) -> str:
    r = rng.random()
    if r < 0.62:
        return ", ".join(xs)
    if r < 0.8:
        return " ".join(xs)
    if r < 0.9:
        return ",".join(xs)
    return ", ".join(xs[:-1]) + " and " + xs[-1]


def _word_items(rng: random.Random, n: int) -> list[str]:
    if rng.random() < 0.25:
        xs: list[str] = []
        while len(xs) < n:
            w = any_word(rng, 0.5)
            if w not in xs:
                xs.append(w)
        return xs
    return rng.sample(rng.choice(LIST_GROUPS), n)


def _length(rng: random.Random) -> int:
    return rng.randrange(3, 8) if rng.random() < 0.9 else rng.randrange(8, 11)


def sort(rng: random.Random) -> Example:
    """3–10 numbers below 1000, up or down, or 3–6 words by the alphabet."""
    if rng.random() < 0.55:
        hi = rng.choice((10, 100, 100, 100, 1000))
        low = -hi if rng.random() < 0.07 else 0
        xs = rng.sample(range(low, hi), _length(rng))
        if rng.random() < 0.12:  # the same number twice
            xs[rng.randrange(len(xs))] = rng.choice(xs)
        down = rng.random() < 0.3
        items, answer = _bracketed(rng, [str(x) for x in xs], [str(x) for x in sorted(xs, reverse=down)])
        if down:
            p = rng.choice(["Sort {x} from largest to smallest.", "Sort these numbers from high to low: {x}",
                            "Sort in descending order: {x}", "Sort from big to small: {x}", "sort descending: {x}",
                            "Put these numbers in order from largest to smallest: {x}", "sort {x} in descending order"])
        else:
            p = rng.choice(["Sort {x}.", "Sort these numbers: {x}", "Sort the numbers {x}", "sort: {x}", "sort {x}",
                            "Sort in ascending order: {x}", "Put these numbers in order: {x}", "Order these numbers: {x}",
                            "Sort {x} from smallest to largest.", "Please sort this list: {x}", "sort the list {x}",
                            "Sort from small to big: {x}", "can you sort {x}?", "Arrange {x} in order."])
        return Example("sort", f"sort:{sorted(xs)}", rough(rng, p.format(x=items)), answer)
    xs = _word_items(rng, rng.randrange(3, 7))
    if rng.random() < 0.1:
        xs = []
        while len(xs) < 4:
            n = person_name(rng)
            if n not in xs:
                xs.append(n)
    elif rng.random() < 0.35:  # words that agree in their first letters
        start = rng.choice(WORDS)[:rng.choice((1, 1, 2))]
        same = [w for w in WORDS if w.startswith(start)]
        xs = list(dict.fromkeys(rng.sample(same, min(len(same), len(xs) - 1)) + [rng.choice(WORDS)]))
    items, answer = _bracketed(rng, xs, sorted(xs))
    p = rng.choice(["Sort these words: {x}", "Sort alphabetically: {x}", "Sort {x} alphabetically.", "sort: {x}",
                    "Put these words in alphabetical order: {x}", "Sort the words {x}", "Sort by the alphabet: {x}",
                    "Sort this list: {x}", "alphabetize: {x}", "Order these words from A to Z: {x}", "sort {x}",
                    "can you sort {x}?", "arrange these words in alphabetical order: {x}"])
    return Example("sort", f"sort:{sorted(xs)}", rough(rng, p.format(x=items)), answer)


def reverse(rng: random.Random) -> Example:
    """A list of 3–10 words or numbers backwards, or a word's letters backwards."""
    r = rng.random()
    if r < 0.2:
        w = any_word(rng, 0.25)
        while len(w) > 11:
            w = any_word(rng, 0.25)
        p = rng.choice(["Spell {w} backwards.", "reverse the letters of {w}", "Reverse the word {w}.", "{w} backwards",
                        "Write {w} backwards", "What is {w} spelled backwards?", "spell the word {w} backwards",
                        "reverse the word \"{w}\"", "reverse {w}", "Reverse \"{w}\".", "reverse: {w}", "{w} in reverse", "reverse string {w}"])
        return Example("reverse", f"rev:{w}", rough(rng, p.format(w=w)),
                       f"{'-'.join(w)} backwards is {'-'.join(reversed(w))}")
    if r < 0.6:
        xs = [str(rng.randrange(rng.choice((10, 100, 1000)))) for _ in range(_length(rng))]
        p = rng.choice(["Reverse {x}.", "Reverse the list {x}", "Reverse these numbers: {x}", "reverse: {x}", "reverse {x}",
                        "Write these numbers in reverse order: {x}", "Say these backwards: {x}", "Reverse this list: {x}",
                        "Turn this list around: {x}", "Reverse this: {x}", "can you reverse {x}?", "Give me {x} in reverse order."])
    else:
        xs = _word_items(rng, _length(rng))
        p = rng.choice(["Reverse {x}.", "Reverse the list: {x}", "Reverse these words: {x}", "reverse: {x}", "reverse {x}",
                        "Reverse the order of {x}", "Say these words backwards: {x}", "Reverse this list: {x}",
                        "Write these words in reverse order: {x}", "Turn this list around: {x}",
                        "Put these in reverse order: {x}", "can you reverse the list {x}?", "Give me {x} in reverse order."])
    items, answer = _bracketed(rng, xs, xs[::-1])
    return Example("reverse", f"rev:{xs}", rough(rng, p.format(x=items)), answer)


# ---------------------------------------------------------------- letters

def count(rng: random.Random) -> Example:
    """How often a letter is in a word, or how many letters it has; the answer spells the word and numbers the letter."""
    w = any_word(rng, 0.3)
    if rng.random() < 0.2:
        p = rng.choice(["How many letters are in {w}?", "how many letters does {w} have?", "Count the letters in {w}.",
                        "How long is the word {w}?", "number of letters in {w}", "How many letters are in the word \"{w}\"?"])
        return Example("count", f"len:{w}", rough(rng, p.format(w=w)), f"{'-'.join(w)}: {len(w)} letters", "exact", "", str(len(w)))
    if rng.random() < 0.08:
        p = rng.choice(["How many vowels are in {w}?", "How many vowels does {w} have?", "Count the vowels in {w}.", "vowels in {w}"])
        k = sum(x in "aeiou" for x in w)
        return Example("count", f"vowels:{w}", rough(rng, p.format(w=w)), f"{numbered(w, 'aeiou')}: {k} vowel{'s' * (k != 1)}", "exact", "", str(k))
    r = rng.random()
    if r < 0.55:
        c = rng.choice(w)
    elif r < 0.8:
        c = max(sorted(set(w)), key=lambda x: (w.count(x), rng.random()))
    else:
        c = rng.choice("abcdefghijklmnopqrstuvwxyz")
    k = w.count(c)
    shown = c.upper() if rng.random() < 0.12 else c
    p = rng.choice(["How many {c}'s are in {w}?", "How many times does {c} appear in {w}?", "how many {c} in {w}?",
                    "Count the letter {c} in {w}.", "How many times is the letter {c} in the word {w}?",
                    "How many letter {c} are in {w}?", "count the {c}'s in {w}", "How often is {c} in {w}?",
                    "How many {c}s are in {w}?", "how many {c} are there in {w}", "number of {c} in {w}",
                    "how many {c}'s are there in the word \"{w}\"?", "How many \"{c}\" are in \"{w}\"?"])
    if rng.random() < 0.16:
        p = p.replace("{w}", w.capitalize() if rng.random() < 0.7 else w.upper())
    return Example("count", f"count:{w}:{c}", rough(rng, p.format(c=shown, w=w)),
                   f"{numbered(w, c)}: {c} appears {k} time{'s' * (k != 1)}", "exact", "", str(k))


def numbered(word: str, letters: str) -> str:
    """`word` spelled with hyphens, each of `letters` followed by its number: "k-i-t(1)-t(2)-e-n"."""
    seen, out = 0, []
    for c in word:
        seen += c in letters
        out.append(f"{c}({seen})" if c in letters else c)
    return "-".join(out)


def letter_at(rng: random.Random) -> Example:
    """The first, last or n-th letter of a word; the answer for a position inside spells up to it."""
    w = any_word(rng, 0.3)
    if rng.random() < 0.6:
        first = rng.random() < 0.5
        which, c = ("first", w[0]) if first else ("last", w[-1])
        p = rng.choice(["What is the {o} letter of {w}?", "{o} letter of {w}", "which letter does {w} start with?" if first else
                        "which letter does {w} end with?", "What's the {o} letter in {w}?", "the {o} letter in the word {w}"])
        return Example("letter_at", f"at:{w}:{which}", rough(rng, p.format(o=which, w=w)),
                       f"The {which} letter of {w} is {c}.", "exact", "", c)
    n = rng.randrange(1, min(len(w), len(_ORDINALS)) + 1)
    p = rng.choice(["What is the {o} letter of {w}?", "{o} letter of {w}", "Which letter is {o} in {w}?", "the {o} letter in the word {w}"])
    answer = f"{'-'.join(w[:n])}: the {_ORDINALS[n - 1]} letter is {w[n - 1]}"
    if n == 1:
        answer = f"The first letter of {w} is {w[0]}."
    return Example("letter_at", f"at:{w}:{n}", rough(rng, p.format(o=_ORDINALS[n - 1], w=w)), answer, "exact", "", w[n - 1])


_ORDINALS = "first second third fourth fifth sixth seventh".split()


def case(rng: random.Random) -> Example:
    """A word or sentence in capitals or in small letters."""
    x = random_sentence(rng) if rng.random() < 0.5 else " ".join(any_word(rng, 0.3) for _ in range(rng.randrange(1, 5)))
    up = rng.random() < 0.6
    if not up:
        x = x.upper() if rng.random() < 0.5 else x.title()
    p = rng.choice(["Write this in capitals: {x}", "uppercase: {x}", "to upper case: {x}", "Make this uppercase: {x}", "uppercase {x}",
                    "put this in capital letters: {x}", "all caps: {x}", "Convert to uppercase: {x}", "capitalize: {x}", "Shout: {x}"] if up else
                   ["Write this in small letters: {x}", "lowercase: {x}", "to lower case: {x}", "Make this lowercase: {x}", "lowercase {x}",
                    "put this in lower case: {x}", "Convert to lowercase: {x}"]).split("{x}")[0]
    if rng.random() < 0.3:
        p = p[0].lower() + p[1:]
    p += x
    if up and rng.random() < 0.25:
        p = rng.choice(["Say {x} in capitals", "say {x} in capital letters", "{x} in capitals", "Write {x} in upper case", "{x} in all caps"]).format(
            x=x if rng.random() < 0.6 else f'"{x}"')
    return Example("case", f"case:{x.lower()}", p, x.upper() if up else x.lower())


def spell(rng: random.Random) -> Example:
    """The letters of a word, joined by hyphens."""
    w = any_word(rng, 0.35)
    p = rng.choice(["Spell {w}.", "spell the word {w}", "How do you spell {w}?", "Spell out {w}", "can you spell {w}?",
                    "What letters are in {w}?"])
    return Example("spell", f"spell:{w}", rough(rng, p.format(w=w)), "-".join(w))


# ---------------------------------------------------------------- copying

_COPY_SENTENCES = ["I like {f} and {g}.", "The {a} sat on the {t}.", "My name is {n}.", "{n} and {m} are in {c}.",
                   "It is {d} today!", "Where is the {col} {t}?", "The {adj} {a} saw {an_b}.", "We will meet on {d} at {h}.",
                   "{n} bought {h} {t}s in {c}.", "No, thank you, {n}.", "The number is {num}.", "{a}, {b}, {t}, {f}",
                   "Good night, {adj} {a}!", "In {mon} the {a} was {adj}.", "Can you see the {adj} {t}, {n}?"]


def random_sentence(rng: random.Random) -> str:
    """A short sentence of listed words, for copying."""
    return rng.choice(_COPY_SENTENCES).format(
        f=rng.choice(FOODS), g=rng.choice(FRUIT), a=rng.choice(ANIMALS), b=rng.choice(ANIMALS), t=rng.choice(THINGS),
        n=person_name(rng), m=person_name(rng), c=city_name(rng), d=rng.choice(DAYS), col=rng.choice(COLORS),
        adj=rng.choice(ADJECTIVES_WORDS), an_b=article(rng.choice(ANIMALS)), h=rng.randrange(2, 13),
        num=rng.randrange(100000), mon=rng.choice(MONTHS))


def scramble(rng: random.Random) -> str:
    """Pieces of words with odd capitals, digits and marks: text that no vocabulary knows as a whole."""
    out = ""
    for _ in range(rng.randrange(2, 9)):
        w = rng.choice(WORDS)
        i = rng.randrange(len(w))
        piece = w[i:i + rng.randrange(1, 7)] if rng.random() < 0.6 else pseudo_word(rng) if rng.random() < 0.5 else w
        r = rng.random()
        piece = piece.capitalize() if r < 0.3 else piece.upper() if r < 0.4 else piece
        out += piece + rng.choice(("", "", " ", " ", " ", "-", "_", ", ", ". ", "'", "1", "7 ", "!", " & ", "/", ": ", "@", " = ", "(", ") ", "#"))
    return out.strip()


def copy(rng: random.Random) -> Example:
    """Says back words, numbers, sentences or random characters, unchanged."""
    r = rng.random()
    if r < 0.35:
        x = random_sentence(rng)
        if rng.random() < 0.3:
            x = x.rstrip(".!?")
        if rng.random() < 0.2:
            x = x.lower()
    elif r < 0.55:
        x = " ".join(any_word(rng, 0.3) for _ in range(rng.randrange(1, 8)))
    elif r < 0.7:
        x = " ".join(str(rng.randrange(10 ** rng.randrange(1, 6))) for _ in range(rng.randrange(1, 6)))
    elif r < 0.76:
        x = scramble(rng)
    elif r < 0.83:
        x = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ-_") for _ in range(rng.randrange(3, 11)))
    elif r < 0.9:
        x = " ".join(pseudo_word(rng) for _ in range(rng.randrange(1, 5)))
    else:
        x = rng.choice(stories.tell(rng).text.split("\n\n")).split(". ")[0].strip()
        x = x if x.endswith(("\"", "!", "?", ".")) else x + "."
    if rng.random() < 0.08:
        x = rng.choice((" ", ", ", "")).join([foreign_word(rng) for _ in range(rng.randrange(1, 5))] + [x] * (rng.random() < 0.4))
    return _copy_of(rng, x)


def copy_pieces(rng: random.Random) -> Example:
    """Says back arbitrary vocabulary entries, so that no entry stays untrained."""
    return _copy_of(rng, piece_text(rng))


def _copy_of(rng: random.Random, x: str) -> Example:
    if rng.random() < 0.15 and "\"" not in x:
        p = rng.choice(["Say \"{x}\"", "Repeat \"{x}\"", "Please say \"{x}\".", "Copy \"{x}\"", "Repeat this: \"{x}\"", "write \"{x}\""])
        return Example("copy", f"copy:{x}", p.format(x=x) if "{" not in x else x, x)
    p = rng.choice(["Repeat after me: {x}", "Repeat: {x}", "Say this: {x}", "Copy this: {x}", "copy: {x}", "Echo {x}",
                    "Please repeat this text: {x}", "Say: {x}", "repeat this: {x}", "Write exactly this: {x}",
                    "Repeat exactly: {x}", "Can you repeat this? {x}", "Copy the following text: {x}", "echo: {x}",
                    "Repeat the following:\n{x}", "say {x}"]).split("{x}")[0]
    if rng.random() < 0.4:
        p = p[0].lower() + p[1:]
    return Example("copy", f"copy:{x}", p + x, x)


# ---------------------------------------------------------------- JSON

_JOBS = "teacher doctor farmer baker sailor pilot painter singer dancer writer nurse cook driver student".split()


def _person(rng):
    n, age, city, job = person_name(rng, 0.25), rng.randrange(3, 90), city_name(rng), noun(rng, _JOBS)
    color = rng.choice(COLORS)
    return rng.choice([
        (f"{n} is {age} years old and lives in {city}.", dict(name=n, age=age, city=city)),
        (f"{n}, {age}, lives in {city}.", dict(name=n, age=age, city=city)),
        (f"My name is {n}. I am {age} years old and I live in {city}.", dict(name=n, age=age, city=city)),
        (f"{n} is {article(job)} from {city}.", dict(name=n, job=job, city=city)),
        (f"{n} is {age} years old and works as {article(job)} in {city}.", dict(name=n, age=age, job=job, city=city)),
        (f"{n} is {age} and loves the color {color}.", dict(name=n, age=age, color=color)),
        (f"I am {n}, {article(job)}, {age} years old.", dict(name=n, job=job, age=age)),
        (f"{n} lives in {city}.", dict(name=n, city=city)),
        (f"{n} lives in {city} and is {age}.", dict(name=n, city=city, age=age)),
        (f"This is {n}, age {age}, from {city}.", dict(name=n, age=age, city=city)),
        (f"Name: {n}, age: {age}", dict(name=n, age=age)),
        (f"{n} is {age}.", dict(name=n, age=age)),
        (f"{n} from {city} likes {color} and is {age} years old", dict(name=n, city=city, color=color, age=age)),
        (f"{n} ({age}) is {article(job)}.", dict(name=n, age=age, job=job)),
        (f"In {city} lives {article(job)} called {n} who is {age} years old.", dict(name=n, age=age, job=job, city=city)),
    ])


def _order(rng):
    n, q, item, price = person_name(rng), rng.randrange(2, 60), noun(rng, _COUNTABLE), rng.randrange(2, 200)
    if rng.random() < 0.2:
        price = float(f"{rng.randrange(1, 60)}.{rng.randrange(1, 10)}")
    color = rng.choice(COLORS)
    return rng.choice([
        (f"{n} bought {q} {item}s for {price} dollars.", dict(customer=n, item=item, quantity=q, price=price)),
        (f"I want {q} {item}s.", dict(item=item, quantity=q)),
        (f"Order of {q} {item}s for {n}, {price} dollars.", dict(customer=n, item=item, quantity=q, price=price)),
        (f"{q} {item}s at {price} dollars", dict(item=item, quantity=q, price=price)),
        (f"{n} ordered {q} {color} {item}s.", dict(customer=n, item=item, color=color, quantity=q)),
        (f"Please send {q} {item}s to {n}.", dict(customer=n, item=item, quantity=q)),
        (f"We sold {q} {item}s to {n} for {price} dollars.", dict(customer=n, item=item, quantity=q, price=price)),
        (f"The {color} {item} costs {price} dollars.", dict(item=item, color=color, price=price)),
    ])


def _event(rng):
    what = rng.choice(["party", "meeting", "concert", "lesson", "game", "picnic", "dinner", "race", "show", "birthday party"])
    day, hour, place = rng.choice(DAYS), rng.randrange(1, 13), rng.choice(stories.PLACES + ["library", "museum", "school", "cafe"])
    half = rng.choice((":00", ":30", ":15", ":45"))
    time = f"{hour}{half}"
    n = person_name(rng)
    return rng.choice([
        (f"The {what} is on {day} at {time} in the {place}.", dict(event=what, day=day, time=time, place=place)),
        (f"{what} on {day}, {time}, {place}", dict(event=what, day=day, time=time, place=place)),
        (f"{n} invites you to a {what} on {day}.", dict(name=n, event=what, day=day)),
        (f"There is a {what} on {day} at {time}.", dict(event=what, day=day, time=time)),
        (f"On {day} at {time} {n} has a {what} at the {place}.", dict(name=n, event=what, day=day, time=time, place=place)),
        (f"Meet {n} on {day} at {time} at the {place}.", dict(name=n, day=day, time=time, place=place)),
    ])


def _weather(rng):
    city, t, sky, day = city_name(rng), rng.randrange(-15, 40), rng.choice(["sunny", "cloudy", "rainy", "snowy", "windy", "foggy"]), rng.choice(DAYS)
    return rng.choice([
        (f"It is {t} degrees and {sky} in {city}.", dict(city=city, temperature=t, sky=sky)),
        (f"On {day} it will be {sky} in {city} with {t} degrees.", dict(city=city, day=day, temperature=t, sky=sky)),
        (f"{city} is {sky} today.", dict(city=city, sky=sky)),
    ])


def _pet(rng):
    n, owner, kind, age, color = person_name(rng), person_name(rng), noun(rng, ANIMALS), rng.randrange(1, 20), rng.choice(COLORS)
    return rng.choice([
        (f"{owner} has {article(kind)} named {n} that is {age} years old.", dict(owner=owner, animal=kind, name=n, age=age)),
        (f"{n} is {article(color + ' ' + kind)}.", dict(name=n, animal=kind, color=color)),
        (f"the {kind} {n} is {color} and {age} years old", dict(animal=kind, name=n, color=color, age=age)),
        (f"{owner}'s {kind} is {age} years old.", dict(owner=owner, animal=kind, age=age)),
        (f"I have {article(color + ' ' + kind)} called {n}.", dict(animal=kind, color=color, name=n)),
        (f"The {kind} {n} belongs to {owner}.", dict(owner=owner, animal=kind, name=n)),
        (f"My {color} {kind} is called {n} and is {age} years old.", dict(animal=kind, color=color, name=n, age=age)),
    ])


def _trip(rng):
    a, b = city_name(rng), city_name(rng)
    n, day, by, price = person_name(rng), rng.choice(DAYS), rng.choice(["train", "bus", "plane", "boat", "car"]), rng.randrange(5, 900)
    return rng.choice([
        (f"{n} travels from {a} to {b} by {by}.", dict({"name": n, "from": a, "to": b, "by": by})),
        (f"The {by} from {a} to {b} on {day} costs {price} dollars.", dict({"from": a, "to": b, "by": by, "day": day, "price": price})),
        (f"On {day} {n} goes to {b} by {by}.", dict({"name": n, "to": b, "by": by, "day": day})),
    ])


def _things(rng):
    many = rng.randrange(2, 6)
    if rng.random() < 0.4:
        xs, key = [person_name(rng, 0.3) for _ in range(many)], "names"
        form = rng.choice(["{x} are here.", "The members are {x}.", "We invited {x}.", "My friends are {x}.", "{x} won the game."])
    else:
        group = rng.choice(LIST_GROUPS)
        xs, key = [noun(rng, group) for _ in range(many)], "items"
        form = rng.choice(["I need {x}.", "We bought {x}.", "My list: {x}.", "Please bring {x}.", "In the box are {x}.", "There is {x} on the table."])
    return form.format(x=", ".join(xs[:-1]) + " and " + xs[-1]), {key: xs}


def json_record(rng: random.Random) -> Example:
    """A sentence to a JSON object; when keys are listed, exactly those in that order."""
    sentence, rec = rng.choice((_person, _person, _order, _order, _event, _weather, _pet, _trip, _things))(rng)
    key = f"json:{sentence}"
    if rng.random() < 0.45:
        keys = list(rec)
        if rng.random() < 0.4 and len(keys) > 2:
            keys = rng.sample(keys, rng.randrange(1, len(keys)))
        elif rng.random() < 0.3:
            rng.shuffle(keys)
        rec = {k: rec[k] for k in keys}
        ks = ", ".join(keys) if rng.random() < 0.7 or len(keys) < 2 else ", ".join(keys[:-1]) + " and " + keys[-1]
        p = rng.choice(["Extract {k} as JSON: {s}", "Make JSON with {k}: {s}", "Turn this into JSON with the keys {k}: {s}",
                        "Give me a JSON object with {k}. {s}", "get {k} as json from: {s}", "JSON with {k}: {s}",
                        "{s} Write {k} as JSON.", "Read the sentence and return {k} in JSON. {s}"]).format(k=ks, s=sentence)
    else:
        p = rng.choice(["Turn this into JSON: {s}", "Convert to JSON: {s}", "Write this as JSON: {s}", "json: {s}",
                        "Make a JSON record from this sentence: {s}", "{s} Make this JSON.", "to json: {s}",
                        "Extract the data as JSON: {s}", "Give me JSON for: {s}", "Can you make a JSON record? {s}",
                        "Make a json record of this: {s}", "Please write a JSON object for this sentence: {s}"]).format(s=sentence)
    return Example("json", key, rough(rng, p), json.dumps(rec, ensure_ascii=False), "json")


# ---------------------------------------------------------------- small facts

_OPPOSITES = """hot cold, big small, tall short, fast slow, happy sad, light dark, old young, hard soft, wet dry, early late,
full empty, open closed, up down, left right, day night, good bad, clean dirty, loud quiet, strong weak, rich poor,
thick thin, high low, near far, first last, sweet sour, brave afraid, deep shallow, wide narrow, easy difficult, love hate,
begin end, win lose, black white, inside outside, above below, summer winter, true false, sharp dull, rough smooth"""
_SOUNDS = dict(cat="meow", dog="woof", cow="moo", sheep="baa", duck="quack", pig="oink", horse="neigh", lion="roar",
               frog="ribbit", bee="buzz", snake="hiss", owl="hoot", mouse="squeak", rooster="cock-a-doodle-doo", crow="caw")
_LEGS = dict(cat=4, dog=4, horse=4, spider=8, ant=6, bee=6, bird=2, chicken=2, snake=0, fish=0, cow=4, octopus=8, duck=2)
_THING_COLORS = {"the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a lemon": "yellow", "coal": "black",
                 "a carrot": "orange", "the sun": "yellow", "chocolate": "brown", "a strawberry": "red", "milk": "white", "blood": "red"}


def _fact_table() -> list[tuple[tuple[str, ...], str, str]]:
    t = []
    for pair in _OPPOSITES.replace("\n", " ").split(","):
        a, b = pair.split()
        for x, y in ((a, b), (b, a)):
            t.append((("What is the opposite of {x}?".format(x=x), f"opposite of {x}", f"the opposite of {x} is?",
                       f"whats the opposite of {x}", f"tell me the opposite of {x}"), f"The opposite of {x} is {y}.", y))
    for a, s in _SOUNDS.items():
        t.append(((f"What sound does {article(a)} make?", f"what does {article(a)} say?", f"What noise does a {a} make"),
                  f"{article(a).capitalize()} says {s}.", s))
    for a, n in _LEGS.items():
        t.append(((f"How many legs does {article(a)} have?", f"how many legs has {article(a)}"),
                  f"{article(a).capitalize()} has {n} legs.", str(n)))
    for a, c in _THING_COLORS.items():
        t.append(((f"What color is {a}?", f"which color is {a}", f"what colour is {a}?"), f"{a.capitalize()} is {c}.", c))
    for seq, w in ((DAYS, "day"), (MONTHS, "month")):
        for i, d in enumerate(seq):
            nxt, prev = seq[(i + 1) % len(seq)], seq[i - 1]
            t.append(((f"What {w} comes after {d}?", f"which {w} is after {d}", f"what comes after {d}?"), f"{nxt} comes after {d}.", nxt))
            t.append(((f"What {w} comes before {d}?", f"which {w} is before {d}"), f"{prev} comes before {d}.", prev))
    for i in range(1, 12):
        t.append(((f"What number comes after {NUMBER_WORDS[i]}?",), f"{NUMBER_WORDS[i + 1].capitalize()} comes after {NUMBER_WORDS[i]}.", NUMBER_WORDS[i + 1]))
    for i, c in enumerate("abcdefghijklmnopqrstuvwxy"):
        n = "abcdefghijklmnopqrstuvwxyz"[i + 1]
        t.append(((f"What letter comes after {c}?", f"which letter is after {c} in the alphabet?"), f"The letter after {c} is {n}.", n))
    t.append((("How many days are in a week?", "how many days has a week"), "A week has 7 days.", "7"))
    t.append((("How many months are in a year?", "how many months has a year"), "A year has 12 months.", "12"))
    t.append((("How many hours are in a day?", "how many hours does a day have"), "A day has 24 hours.", "24"))
    t.append((("How many minutes are in an hour?",), "An hour has 60 minutes.", "60"))
    t.append((("What are the days of the week?", "name the days of the week", "list the days of the week"), ", ".join(DAYS) + ".", ""))
    t.append((("What are the months of the year?", "name the months", "list all months"), ", ".join(MONTHS) + ".", ""))
    t.append((("Say the alphabet.", "what is the alphabet?", "abc"), " ".join("abcdefghijklmnopqrstuvwxyz"), ""))
    return t


FACTS = _fact_table()


def fact(rng: random.Random) -> Example:
    """A small fact from a closed table; held out by wording only."""
    qs, a, short = rng.choice(FACTS)
    q = rng.choice(qs)
    return Example("fact", f"fact:{q}", lower_some(rng, rough(rng, q), 0.15), a, "exact", "", short)


def count_to(rng: random.Random) -> Example:
    """Counting up or down between two numbers, at most 20 steps."""
    a = rng.choice((0, 1, 1, 1, rng.randrange(2, 90)))
    b = a + rng.randrange(2, 21)
    down = rng.random() < 0.3
    lo, hi = a, b
    if down:
        a, b = b, a
    if a == 1 and not down and rng.random() < 0.6:
        p = rng.choice(["Count to {b}.", "count up to {b}", "can you count to {b}?"])
    else:
        p = rng.choice(["Count from {a} to {b}.", "count from {a} to {b}", "Count {a} to {b}"])
        if down and rng.random() < 0.4:
            p = "Count down from {a} to {b}."
    xs = range(a, b - 1, -1) if down else range(a, b + 1)
    return Example("count_to", f"ct:{lo}:{hi}:{down}", rough(rng, p.format(a=a, b=b)), ", ".join(map(str, xs)))
