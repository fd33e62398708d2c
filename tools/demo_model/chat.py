"""Conversations: story requests and questions about them, things to remember, follow-ups, system prompts, several turns."""

import json
import random

import stories
import tasks
from beyond import refusal, topic
from dialogue import Dialogue, assistant, norm, system, user
from knowledge import knowledge
from smalltalk import small_talk
from tasks import Example, lower_some, rough
from words import ANIMALS, CITIES, COLORS, FOODS, FRUIT, THINGS, any_word, article, city_name, person_name
from verse import joke


# ---------------------------------------------------------------- stories

_ASK_PLAIN = ["Tell me a story.", "tell me a story", "Write a story.", "Can you tell me a story?", "a story please",
              "Write a short story.", "I want to hear a story.", "Tell me a bedtime story.", "story", "Tell a story",
              "tell me a nice story", "Please write a little story for my daughter.", "write me a story",
              "Do you know a story?", "I can't sleep. Tell me a story.", "tell me something nice", "once upon a time"]
_ASK_ABOUT = ["Tell me a story about {x}.", "tell me a story about {x}", "Write a story about {x}.", "A story about {x}",
              "Write a short story about {x}.", "Can you tell me a story about {x}?", "story about {x}",
              "Tell me a bedtime story about {x}.", "I want a story about {x}.", "Please tell me a story about {x}.",
              "write a little story about {x}", "make up a story about {x}", "Do you know a story about {x}?",
              "could you write a story about {x} please", "Short story: {x}", "tell me about {x} in a story"]
_BRIEF = ["Tell me a very short story about {x}.", "Write a tiny story about {x}.", "Tell me a story about {x} in two sentences.",
          "a very short story about {x}", "Write a two-sentence story about {x}.",
          "tell me a two sentence story about {x}", "a one sentence story about {x}", "Tell me a story about {x} in one sentence.",
          "Give me the shortest story about {x}."]


ODD = """programmer scientist engineer nurse pilot chef mayor clown ninja superhero alien vampire zombie cowboy gardener librarian policeman firefighter spy thief toaster fridge keyboard laptop
phone satellite rocket volcano lighthouse bridge pancake cactus mushroom snowflake raindrop rainbow sock pencil piano banana grandma uncle mother father baby viking emperor monk bug hacker
ghost pony puppy bunny duckling seagull jellyfish lobster unicorn phoenix vacuum mailman judge queen bee tractor submarine router server robot-dog""".split()


def _on_a_subject(rng: random.Random, name: str | None) -> tuple[str, stories.Story]:
    """A story about something that is no hero: the hero of the story is taken with it."""
    s = stories.tell(rng, name=name)
    x = topic(rng)
    first = rng.choice(stories.OPENING).format_map(s.state)
    taken = rng.choice(["More than anything, {he} loved {x}.", "{n} thought about {x} all day long.", "Every night {he} dreamed of {x}.",
                        "Nobody knew more about {x} than {n}.", "{He} was very interested in {x}."]).format_map({**s.state, "x": x})
    s = stories.realise(s.plot, s.state, s.seed, opening=f"{first} {taken}")
    ask = x if rng.random() < 0.7 else f"{s.state['ak']} and {x}"
    return rough(rng, rng.choice(_ASK_ABOUT).format(x=ask)), s


def story_request(rng: random.Random) -> tuple[str, stories.Story]:
    """A request and a story that fits it."""
    r = rng.random()
    name = (person_name(rng, 0.2) if rng.random() < 0.8 else rng.choice(stories.NICKNAMES)) if rng.random() < 0.45 else None
    if r < 0.1:
        name = None
    elif rng.random() < 0.12:
        s = stories.tell(rng, name=name, loves=True)
        st = s.state
        x = rng.choice(["{ak} who loves {food}", "{ak} named {n} who loves {food}", "{n} the {k} who loves {food}", "{ak} that likes {food}"]
                       if name else ["{ak} who loves {food}", "{ak} that likes {food}", "{ak} and {food}", "{food}"])
        return lower_some(rng, rough(rng, rng.choice(_ASK_ABOUT).format(x=x.format_map(st))), 0.2), s
    if r > 0.93:
        return _on_a_subject(rng, name)
    s = stories.tell(rng, name=name, kind=rng.choice((rng.choice(ODD), rng.choice(THINGS), rng.choice(FRUIT), any_word(rng))) if rng.random() < 0.1
                     else None)
    st = s.state
    theme = rng.choice(s.themes)
    if name and not r < 0.1:
        x = rng.choice(["{ak} named {n}", "{ak} called {n}", "{n} the {k}", "{ak} whose name is {n}", "{n}, {ak}",
                        "{ak} named {n} and {theme}", "{n} the {k} and {theme}", "{n}"])
    elif r < 0.1:
        return rough(rng, rng.choice(_ASK_PLAIN)), s
    elif r < 0.4:
        x = rng.choice(["{ak}", "{ak}", "{ak}", "{atk}", "{atk}", "{k}s", "the {k}", "{ak} in {home}", "{ak} who lives in {home}"])
    elif r < 0.6:
        x = "{theme}"
    elif r < 0.75:
        x = "{ak} and {theme}"
    elif r < 0.87:
        x = rng.choice(["{ak} and {afk}", "{ak} and {afk}", "{ak} and {his} {fk}"])
    else:
        x = rng.choice(["{ak} and {afk} named {f}", "{f} the {fk} and {ak}", "{ak} who meets {f} the {fk}"])
    x = x.format_map({**st, "theme": theme})
    return lower_some(rng, rough(rng, rng.choice(_ASK_ABOUT).format(x=x)), 0.2), s


def _asked(prompt: str, s: stories.Story) -> str:
    """The hero's name and kind, as far as the prompt names them: a fitting story mentions both."""
    low = prompt.lower()
    return "|".join(s.state[x] for x in ("n", "k") if s.state[x].lower() in low)


_KINDS_OF_STORY = {"scary": "noise", "spooky": "noise", "adventure": "treasure", "exciting": "treasure", "birthday": "birthday",
                   "friendship": "friend",
                   "funny": None, "happy": None, "sad": "friend", "long": None, "longer": None, "nice": None, "magic": "wish", "good": None}


def kind_of_story(rng: random.Random) -> tuple[str, stories.Story]:
    """A request for a scary, funny, long … story."""
    word, plot = rng.choice(list(_KINDS_OF_STORY.items()))
    s = stories.tell(rng, plot=plot, full=word.startswith("long"))
    x = rng.choice(["", "", " about {ak}", " about {n} the {k}"]).format_map(s.state)
    p = rng.choice(["Tell me {a} story{x}.", "{a} story{x} please", "write {a} story{x}", "Can you tell me {a} story{x}?",
                    "I want {a} story{x}"]).format(a=article(word), x=x)
    if rng.random() < 0.15:
        p = rng.choice(["Write a story with a happy ending.", "Tell me a story that ends well.", "Tell me a story for children",
                        "tell me a story my kids will like",
                        "make up a story", "surprise me with a story", "tell me any story", "Tell me your favorite story.", "tell me a fairy tale",
                        "Tell a tale."])
    return rough(rng, p), s


def story(rng: random.Random) -> Dialogue:
    """One story."""
    if rng.random() < 0.06:
        s = stories.tell(rng)
        p = rng.choice(_BRIEF).format(x=rng.choice((s.state["ak"], f"{s.state['n']} the {s.state['k']}", rng.choice(s.themes))))
        return Dialogue("story", [norm(p)], [user(rough(rng, p)), assistant(s.summary)], "story", _asked(p, s))
    if rng.random() < 0.06:
        s = stories.tell(rng)
        head, _, rest = s.text.partition(". ")
        p = rng.choice(_CONTINUE) + head + "."
        return Dialogue("story", [norm(p)], [user(p), assistant(rest)], "story", s.state["n"])
    p, s = (kind_of_story if rng.random() < 0.12 else story_request)(rng)
    if rng.random() < 0.03:
        p = p.upper()
    return Dialogue("story", [norm(p)], [user(p), assistant(s.text)], "story", _asked(p, s))


_CONTINUE = ["Continue this story: ", "continue the story: ", "Go on with this story: ", "Finish this story: ", "What happens next? ",
             "Complete the story: ", "Write the rest of this story: ", ""]
_MORE = ["Tell me another story.", "another one", "one more please", "Another story!", "tell me one more", "again, a different one"]
_SUM = ["Summarize the story.", "Can you summarize it?", "what was the story about in short?", "Sum up the story in short.",
        "give me a summary", "Make it shorter.", "Tell it in one or two sentences.", "tl;dr"]


def story_qa(rng: random.Random) -> Dialogue:
    """A story, then 1–4 questions about it (sometimes a summary or another story on the way)."""
    p, s = story_request(rng)
    pasted = rng.random() < 0.25
    if pasted:
        msgs: list[dict] = []
        head = rng.choice(["Read this story and answer: {q}\n\n{t}", "{t}\n\n{q}", "Story: {t}\n\nQuestion: {q}",
                           "Here is a story.\n\n{t}\n\n{q}"])
    else:
        msgs = [user(p), assistant(s.text)]
        if rng.random() < 0.12:
            msgs += [user(rough(rng, rng.choice(_SUM))), assistant(s.summary)]
    qs = rng.sample(s.questions, min(len(s.questions), rng.choice((1, 1, 2, 3, 4))))
    gold = ""
    for i, (forms, a, k) in enumerate(qs):
        q = lower_some(rng, rough(rng, rng.choice(forms)), 0.2)
        msgs += [user(head.format(q=q, t=s.text) if pasted and i == 0 else q), assistant(a)]
        gold = k
    return Dialogue("story_qa", [norm(p), norm(s.text)], msgs, "contains", gold)


def story_more(rng: random.Random) -> Dialogue:
    """A story, then a summary or another story."""
    p, s = story_request(rng)
    msgs = [user(p), assistant(s.text)]
    if rng.random() < 0.5:
        return Dialogue("summary", [norm(p), norm(s.text)], msgs + [user(rough(rng, rng.choice(_SUM))), assistant(s.summary)], "none")
    p2, s2 = rng.choice(_MORE), stories.tell(rng)
    if rng.random() < 0.5:
        p2 = rng.choice(["Now one about {x}.", "and one about {x}?", "Tell me another one about {x}.", "now about {x}"]).format(x=s2.state["ak"])
    return Dialogue("story", [norm(p), norm(s.text)], msgs + [user(rough(rng, p2)), assistant(s2.text)], "story", _asked(p2, s2))


# ---------------------------------------------------------------- sums beyond the model

def too_big(rng: random.Random) -> Dialogue:
    """Sums beyond the trained sizes: the model says where its limit is."""
    op = rng.choice("+-*")
    if rng.random() < 0.12:
        a, b = (rng.randrange(201, 10 ** rng.randrange(3, 7)), rng.randrange(2, 100)) if rng.random() < 0.7 else (rng.randrange(13, 200),
            rng.randrange(13, 100))
        p = rng.choice(["What is {a} / {b}?", "{a}/{b}", "{a} / {b}", "{a} divided by {b}", "Divide {a} by {b}.", "{a} ÷ {b}",
                        "how much is {a} / {b}"]).format(a=a, b=b)
        return Dialogue("too_big", [f"big:/:{a}:{b}"], [user(rough(rng, p)),
                                                        assistant("That is too big for me. I can only divide numbers up to 200 by numbers up to 12.")],
                                                        "exact")
    if rng.random() < 0.25:
        a, b = (f"{rng.randrange(100)}.{rng.randrange(100)}" for _ in range(2))
        b = b if rng.random() < 0.6 else str(rng.randrange(100))
        p = rng.choice([*tasks._ADD[:6], *tasks._SUB[:6], *tasks._MUL[:6], "Which is bigger, {a} or {b}?", "which is larger {a} or {b}",
                        "Is {a} greater than {b}?", "{a} / {b}"]).format(a=a, b=b)
        return Dialogue("too_big", [f"dec:{a}:{b}"], [user(rough(rng, p)), assistant("I only know whole numbers, no decimals.")], "exact")
    if op == "*":
        a, b = rng.randrange(100, 10 ** rng.randrange(3, 6)), rng.randrange(2, 10 ** rng.randrange(1, 5))
        limit = "I can only multiply numbers up to two digits."
    else:
        a, b = rng.randrange(10000, 10 ** rng.randrange(5, 9)), rng.randrange(1, 10 ** rng.randrange(1, 8))
        limit = "I can only add and subtract numbers up to four digits."
    if rng.random() < 0.5:
        a, b = b, a
    p = rng.choice({"+": tasks._ADD, "-": tasks._SUB, "*": tasks._MUL}[op]).format(a=a, b=b)
    return Dialogue("too_big", [f"big:{op}:{a}:{b}"], [user(rough(rng, p)), assistant(f"That is too big for me. {limit}")], "exact")


# ---------------------------------------------------------------- memory within a conversation

def remember(rng: random.Random) -> Dialogue:
    """The user says something about themself and asks for it later."""
    n, city, color, food, pet = person_name(rng, 0.3), rng.choice(CITIES), rng.choice(COLORS), rng.choice(FOODS + FRUIT), rng.choice(ANIMALS)
    petn, age = person_name(rng), rng.randrange(4, 90)
    if rng.random() < 0.3:
        city, food, pet = city_name(rng), any_word(rng, 0.3), any_word(rng, 0.3)
    options = [
        (["My name is {n}.", "I am {n}.", "hi, i'm {n}", "Hello, my name is {n}.", "call me {n}"], "Nice to meet you, {n}!",
         ["What is my name?", "who am i?", "do you remember my name?", "what's my name"], "Your name is {n}.", "{n}"),
        (["I live in {city}.", "I am from {city}.", "my home is in {city}"], "{city} sounds like a nice place.",
         ["Where do I live?", "where am i from?", "which city do i live in?"], "You live in {city}.", "{city}"),
        (["My favorite color is {color}.", "I like the color {color}.", "i love {color}"], "{color_c} is a beautiful color.",
         ["What is my favorite color?", "which color do i like?", "what color do I like?"], "Your favorite color is {color}.", "{color}"),
        (["My favorite food is {food}.", "I love to eat {food}.", "i like {food} most"], "That sounds tasty.",
         ["What is my favorite food?", "what do i like to eat?", "which food do I like?"], "Your favorite food is {food}.", "{food}"),
        (["I have {apet} named {petn}.", "my {pet} is called {petn}"], "{petn} is a lovely name for {apet}.",
         ["What is the name of my {pet}?", "what is my {pet} called?", "do you remember the name of my {pet}?"], "Your {pet} is called {petn}.",
         "{petn}"),
        (["I am {age} years old.", "i'm {age} years old", "my age is {age}"], "That is a good age.",
         ["How old am I?", "what is my age?", "do you know how old i am?"], "You are {age} years old.", "{age}"),
    ]
    v = dict(n=n, city=city, color=color, color_c=color.capitalize(), food=food, pet=pet, apet=article(pet), petn=petn, age=age)
    chosen = rng.sample(options, rng.choice((1, 1, 2, 3)))
    msgs, key = [], "mem"
    for says, reply, *_ in chosen:
        t = rng.choice(says).format(**v)
        key += ":" + t
        msgs += [user(rough(rng, t)), assistant(reply.format(**v))]
        if rng.random() < 0.3:
            e = _filler(rng)
            msgs += [user(e.prompt), assistant(e.answer)]
            key += e.key
    gold = ""
    for _, _, asks, a, k in rng.sample(chosen, rng.randrange(1, len(chosen) + 1)):
        msgs += [user(rough(rng, rng.choice(asks).format(**v))), assistant(a.format(**v))]
        gold = k.format(**v)
    return Dialogue("memory", [key], msgs, "contains", gold)


SIMPLE = [tasks.add, tasks.subtract, tasks.multiply, tasks.compare, tasks.sort, tasks.reverse, tasks.count, tasks.copy, tasks.fact,
          tasks.spell, tasks.json_record, tasks.word_problem, tasks.divide, tasks.three_terms]


def _filler(rng: random.Random) -> Example:
    return rng.choice(SIMPLE)(rng)


def several(rng: random.Random) -> Dialogue:
    """2–6 unrelated tasks, facts, jokes and small talk in one conversation."""
    msgs, keys = [], []
    for _ in range(rng.randrange(2, 7)):
        if rng.random() < 0.35:
            d = rng.choice((small_talk, small_talk, refusal, refusal, knowledge, joke))(rng)
            msgs += d.messages
            keys += d.keys
        else:
            last = _filler(rng)
            msgs += [user(last.prompt), assistant(last.answer)]
            keys.append(last.key)
    e = _filler(rng)
    return Dialogue("multi_turn", keys + [e.key], msgs + [user(e.prompt), assistant(e.answer)], e.check, e.gold)


def follow_up(rng: random.Random) -> Dialogue:
    """A second request that needs the first answer."""
    r = rng.random()
    if r < 0.4:
        e = rng.choice((tasks.add, tasks.subtract))(rng)
        x = int(e.gold)
        while not 0 <= x < 10000:
            e = rng.choice((tasks.add, tasks.subtract))(rng)
            x = int(e.gold)
        msgs, keys = [user(e.prompt), assistant(e.answer)], [e.key]
        y = 0
        for _ in range(rng.choice((1, 1, 2))):
            y = rng.randrange(1, rng.choice((10, 50, 100)))
            if rng.random() < 0.5 and x + y < 10000:
                keys.append("add:%d:%d" % tuple(sorted((x, y))))
                p, z, op = rng.choice(["Now add {y}.", "plus {y}", "and add {y}", "add {y} to that", "+ {y}", "and {y} more?"]), x + y, "+"
            elif x - y >= 0:
                keys.append(f"sub:{x}:{y}")
                p, z, op = rng.choice(["Now subtract {y}.", "minus {y}", "and take away {y}", "subtract {y} from that", "- {y}",
                                       "and {y} less?"]), x - y, "-"
            else:
                continue
            msgs += [user(rough(rng, p.format(y=y))), assistant(f"{x} {op} {y} = {z}")]
            x = z
        return Dialogue("follow_up", keys, msgs, "number", str(x))
    if r < 0.7:
        e = rng.choice((tasks.sort, tasks.reverse))(rng)
        while "-" in e.answer and "backwards" in e.answer:
            e = tasks.sort(rng)
        xs = e.answer.split(", ")
        num = all(x.isdigit() for x in xs)
        kind = rng.random()
        if kind < 0.5:
            p, a = rng.choice(["Now reverse it.", "and in reverse?", "now the other way around", "Reverse that.",
                               "and backwards?"]), ", ".join(reversed(xs))
        elif kind < 0.75:
            p, a = rng.choice(["What is the first one?", "which one is first?", "and the first?"]), xs[0]
        elif num or kind < 0.9:
            p, a = rng.choice(["How many are there?", "how many items is that?", "count them"]), str(len(xs))
        else:
            p, a = rng.choice(["And the last one?", "which one is last?", "What is the last one?"]), xs[-1]
        return Dialogue("follow_up", [e.key + p], [user(e.prompt), assistant(e.answer), user(rough(rng, p)), assistant(a)])
    e = rng.choice((tasks.copy, tasks.fact, tasks.compare, tasks.sort))(rng)
    if r < 0.85:
        p, a = rng.choice(["Say that in capitals.", "now in capital letters", "Write that in upper case.", "and in all caps?",
                           "uppercase please"]), e.answer.upper()
    else:
        p, a = rng.choice(["Say that again.", "can you repeat that?", "What did you say?", "again please", "repeat your answer"]), e.answer
    return Dialogue("follow_up", [e.key + p], [user(e.prompt), assistant(e.answer), user(rough(rng, p)), assistant(a)])


# ---------------------------------------------------------------- system prompts

PLAIN_SYSTEM = ["You are a helpful assistant.", "You are a friendly assistant.", "You are a helpful model.", "Be helpful.",
                 "You are a small model that likes to help.", "You are a helpful AI assistant.", "Answer the user's questions.",
                 "You are moeflux, a helpful assistant.", "You are a kind teacher.", "You are a storyteller for children.", "Be polite.",
                 "You are an AI assistant.", "You are a chatbot.",
                "You are a helpful, honest assistant. If you do not know something, say so.", "Answer briefly and politely.",
                "You are a helpful assistant. Be concise."]
_CAPS = ["Answer in capitals.", "Always answer in capital letters.", "Write everything in upper case.", "Answer in ALL CAPS.",
         "Use only capital letters.", "You always shout. Answer in capital letters.", "Please answer in uppercase.", "Speak in all caps.",
         "Reply in uppercase letters only.", "You must write in capital letters."]
_LOWER = ["Answer in lower case.", "Use only small letters.", "Never use capital letters.", "Write everything in lowercase.",
          "Always answer in lowercase letters."]
_SHORT = ["Answer with one word.", "Answer in one word.", "Give only the answer.", "Reply with a single word or number.", "One word answers only.",
          "Answer with just the result.", "Be as short as possible.", "Only the answer, nothing else.", "Use one word only."]
_END = ["Always end your answer with the word {w}.", "End every answer with {w}.", "End your answers with \"{w}\".",
        "Finish every reply with the word {w}.",
        "The last word of every answer must be {w}.", "Say {w} at the end of every answer."]
_START = ["Always start your answer with the word {w}.", "Begin every answer with {w}.", "Start your answers with \"{w}\".",
          "The first word of every answer must be {w}.", "Say {w} at the start of every answer."]
_NAME = ["Your name is {w}.", "You are {w}.", "You are a helpful assistant named {w}.", "You are called {w}.", "You are {w}, a friendly assistant."]
_JSON = ["Answer in JSON with the key answer.", "Always answer as JSON: {{\"answer\": ...}}",
         "Reply only with a JSON object that has the key \"answer\".",
         "Output JSON only, with one key called answer."]
_USER_NAME = ["The user is called {w}. Use the name in your answers.", "The user's name is {w}. Always say the name at the end.",
              "You are talking to {w}. End every answer with the name."]


def _system_problem(rng: random.Random, need_short: bool) -> Example:
    while True:
        e = rng.choice((tasks.add, tasks.subtract, tasks.compare, tasks.fact, tasks.fact, tasks.fact, tasks.word_problem, tasks.sort,
                        tasks.copy, tasks.count, tasks.reverse, tasks.multiply))(rng)
        if not need_short or e.short:
            return e


def obey(rng: random.Random) -> Dialogue:
    """A system prompt that changes the form of every answer; 1–3 turns."""
    kind = rng.choice(("caps", "caps", "lower", "short", "short", "end", "end", "start", "name", "json", "user", "plain"))
    w = rng.choice((any_word(rng, 0.3), rng.choice(ANIMALS), rng.choice(FOODS), person_name(rng)))
    sysmsg, shape = {
        "caps": (rng.choice(_CAPS), str.upper), "lower": (rng.choice(_LOWER), str.lower), "short": (rng.choice(_SHORT), None),
        "end": (rng.choice(_END).format(w=w), lambda a: f"{a} {w}"),
        "start": (rng.choice(_START).format(w=w), lambda a: f"{w} {a}"),
        "name": ("", lambda a: a), "json": (rng.choice(_JSON).format(), None), "user": ("", None), "plain": (rng.choice(PLAIN_SYSTEM), lambda a: a),
    }[kind]
    msgs, keys, gold, check = [], [], "", "exact"
    if kind in ("name", "user"):
        w = person_name(rng, 0.3)
        sysmsg = rng.choice(_NAME if kind == "name" else _USER_NAME).format(w=w)
        shape = (lambda a: a) if kind == "name" else (lambda a: (a[:-1] + f", {w}.") if a[-1] == "." else f"{a}, {w}")
    persona = kind == "name" and rng.random() < 0.25
    if persona:
        w = article(rng.choice(stories.HUMANS + stories.ANIMALS + stories.FANTASY))
        sysmsg = rng.choice(["You are {w}.", "Pretend to be {w}.", "You play the role of {w}.", "Act like {w}."]).format(w=w)
    if kind in ("caps", "lower", "end", "plain", "name", "user") and rng.random() < 0.25:
        sysmsg = rng.choice(PLAIN_SYSTEM) + " " + sysmsg if kind not in ("plain", "name") else sysmsg
    for i in range(rng.choice((1, 1, 2, 3))):
        if kind == "name" and (i == 0 or rng.random() < 0.3):
            if persona:
                p = rng.choice(["Who are you?", "What are you?", "what are you", "who are you", "Tell me who you are."])
                msgs += [user(rough(rng, p)), assistant(f"I am {w}.")]
                keys.append(f"sys:{sysmsg}:{p}")
                continue
            p = rng.choice(["What is your name?", "Who are you?", "what's your name", "do you have a name?", "Tell me your name.",
                            "how are you called?"])
            msgs += [user(rough(rng, p)), assistant(f"My name is {w}.")]
            keys.append(f"sys:{sysmsg}:{p}")
            continue
        r = rng.random()
        if kind in ("caps", "lower", "end", "start", "plain", "user") and r < 0.14:
            d = rng.choice((small_talk, refusal, knowledge))(rng)
            msgs += [user(d.messages[0]["content"]), assistant(shape(d.messages[1]["content"]))]
            keys += d.keys
            check = "none" if kind not in ("caps", "lower", "end", "start") else "form"
            gold = kind + ":" + w
            continue
        if kind in ("caps", "lower", "end", "plain") and r < 0.24 and i == 0:
            p, s = story_request(rng)
            text = s.text if kind == "plain" or rng.random() < 0.5 else s.summary
            if text == s.summary:
                p = rng.choice(_BRIEF).format(x=s.state["ak"])
            msgs += [user(p), assistant(shape(text))]
            keys.append(norm(p))
            check, gold = ("story", _asked(p, s)) if kind == "plain" else ("form", kind + ":" + w)
            continue
        e = _system_problem(rng, kind in ("short", "json"))
        if kind == "json":
            answer = json.dumps({"answer": int(e.short) if e.short.lstrip("-").isdigit() else e.short}, ensure_ascii=False)
        else:
            answer = e.short if kind == "short" else shape(e.answer)
        msgs += [user(e.prompt), assistant(answer)]
        keys.append(e.key)
        check, gold = ("json", "") if kind == "json" else (e.check, e.gold) if kind in ("plain", "name") else ("exact", "")
    return Dialogue("system", keys, [system(sysmsg)] + msgs, check, gold)
