"""Conversations: story requests and questions about them, small talk, refusals, system prompts, tools, several turns.

A `Dialogue` is a list of chat messages plus the keys that decide its split. Only its last answer is judged.
"""

import json
import random
import re
from dataclasses import dataclass, field

import stories
import tasks
from tasks import Example, lower_some, rough
from words import ANIMALS, CITIES, COLORS, DAYS, FOODS, FRUIT, THINGS, any_word, article, city_name, noun, person_name


@dataclass
class Dialogue:
    """Messages in chat format; `check` and `gold` judge the last assistant message."""

    task: str
    keys: list[str]
    messages: list[dict]
    check: str = "exact"
    gold: str = ""
    tools: list[dict] = field(default_factory=list)


def user(text: str) -> dict:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    """An assistant message."""
    return {"role": "assistant", "content": text}


def system(text: str) -> dict:
    """A system message."""
    return {"role": "system", "content": text}


def single(e: Example) -> Dialogue:
    """A one-turn dialogue."""
    return Dialogue(e.task, [e.key], [user(e.prompt), assistant(e.answer)], e.check, e.gold)


def norm(text: str) -> str:
    """Lower-case letters, digits and operators only: the identity of a prompt apart from typing."""
    return "".join(c for c in text.lower() if c.isalnum() or c in "+-*/×")


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
    s = stories.tell(rng, name=name)
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


_KINDS_OF_STORY = {"scary": "noise", "spooky": "noise", "adventure": "treasure", "exciting": "treasure", "birthday": "birthday", "friendship": "friend",
                   "funny": None, "happy": None, "sad": "friend", "long": None, "longer": None, "nice": None, "magic": "wish", "good": None}


def kind_of_story(rng: random.Random) -> tuple[str, stories.Story]:
    """A request for a scary, funny, long … story."""
    word, plot = rng.choice(list(_KINDS_OF_STORY.items()))
    s = stories.tell(rng, plot=plot, full=word.startswith("long"))
    x = rng.choice(["", "", " about {ak}", " about {n} the {k}"]).format_map(s.state)
    p = rng.choice(["Tell me {a} story{x}.", "{a} story{x} please", "write {a} story{x}", "Can you tell me {a} story{x}?", "I want {a} story{x}"]).format(a=article(word), x=x)
    if rng.random() < 0.15:
        p = rng.choice(["Write a story with a happy ending.", "Tell me a story that ends well.", "Tell me a story for children", "tell me a story my kids will like",
                        "make up a story", "surprise me with a story", "tell me any story", "Tell me your favorite story.", "tell me a fairy tale", "Tell a tale."])
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


# ---------------------------------------------------------------- small talk

_CAN = ("I can tell short stories, do small sums, compare numbers, sort and reverse short lists, count letters, "
        "repeat text and write small JSON records.")
_WHO = "I am the moeflux demo model, a very small Mixture-of-Experts language model."
SMALL_TALK: list[tuple[list[str], list[str]]] = [
    (["hi", "hello", "hey", "hi there", "hello there", "good morning", "good evening", "good afternoon", "hey there", "yo",
      "hiya", "greetings", "hello!", "hi!", "howdy", "hello model", "hi bot", "hey you"],
     ["Hello! What can I do for you?", "Hi! Would you like a story, a sum or a sorted list?", "Hello! Nice to meet you."]),
    (["how are you?", "how are you doing?", "how is it going?", "how do you feel?", "are you ok?", "what's up?", "how are you today?",
      "how are you doing today?", "how have you been?", "hope you are well"],
     ["I am fine, thank you. What can I do for you?", "I am well, thank you! How about a story?"]),
    (["who are you?", "what are you?", "what model are you?", "tell me about yourself", "tell me something about you", "say something about yourself", "introduce yourself", "are you a robot?",
      "are you human?", "are you an ai?", "what is your name?", "what's your name?", "do you have a name?", "are you chatgpt?",
      "which model is this?", "are you a person?", "who am i talking to?", "what kind of model are you?", "what is this?"],
     [_WHO + " " + _CAN, _WHO + " I run on the moeflux engine."]),
    (["what can you do?", "help", "what are you good at?", "how can you help me?", "what should i ask you?", "what do you know?",
      "can you help me?", "what are your skills?", "give me some ideas what to ask", "what can i ask?", "list your abilities",
      "i need help", "what else can you do?"], [_CAN, _CAN + " What would you like?"]),
    (["how old are you?", "what is your age?", "when were you born?", "when is your birthday?", "where do you live?", "do you have a family?"],
     ["I am a small language model, so I have no age and no home. But I can tell you a story."]),
    (["i like dogs", "i like cats", "i love pizza", "i like you", "i like music", "i have a dog", "i have a cat", "i play football", "i like to read",
      "i went to school today", "it is raining", "the weather is nice today", "i like stories"],
     ["That is nice! Would you like a story about it?"]),
    (["who made you?", "who created you?", "who trained you?", "where do you come from?", "how were you made?", "who built you?",
      "where were you trained?", "what data were you trained on?"],
     ["I was trained for the moeflux project on text made by a small program."]),
    (["how big are you?", "how many parameters do you have?", "how many experts do you have?", "are you a big model?", "how large are you?",
      "how many layers do you have?", "what size are you?", "are you a mixture of experts?"],
     ["I have about 25 million parameters: 7 layers with 16 experts each, and 4 experts work on each token."]),
    (["what is moeflux?", "tell me about moeflux", "what does moeflux do?", "explain moeflux", "what is this program?"],
     ["moeflux is an engine for Mixture-of-Experts models that are bigger than memory. It reads experts from disk when they are needed."]),
    (["what is a mixture of experts?", "what are experts?", "what is moe?", "how do experts work?", "explain mixture of experts",
      "what does moe mean?"],
     ["A Mixture-of-Experts model has many small networks called experts. A router picks a few of them for each token, so only a part of the model works at a time."]),
    (["thanks", "thank you", "thank you!", "thanks a lot", "thx", "great, thanks", "cool, thank you", "many thanks", "ty", "nice, thanks"],
     ["You are welcome!", "You are welcome! Is there anything else?"]),
    (["bye", "goodbye", "see you", "good night", "see you later", "bye bye", "that is all, bye", "ciao", "cya"],
     ["Goodbye!", "Goodbye! Come back soon."]),
    (["ok", "okay", "good", "nice", "cool", "great", "wow", "well done", "good job", "that was good", "perfect", "very good", "i like it",
      "that was a nice story", "you are smart", "awesome", "good bot"],
     ["I am glad you like it. What shall we do next?", "Thank you! What would you like next?"]),
    (["i am sad", "i feel sad", "i am tired", "i am bored", "i had a bad day", "i feel lonely", "i'm bored", "i'm sad", "today was hard"],
     ["I am sorry to hear that. Would you like to hear a story?"]),
    (["i am happy", "i feel great", "i had a good day", "today is a good day", "i'm happy", "i am so excited"],
     ["That is wonderful! Would you like to hear a story?"]),
    (["tell me a joke", "do you know a joke?", "make me laugh", "say something funny", "a joke please", "joke"],
     ["What did the little frog order for lunch? A burger and a diet croak!", "Why did the cookie go to the doctor? It felt crumby.",
      "What do you call a sleeping dinosaur? A dino-snore!", "Why is six afraid of seven? Because seven eight nine!"]),
    (["no", "that is wrong", "you are wrong", "that's not right", "wrong", "are you sure?", "you made a mistake", "this is not correct"],
     ["I am sorry. I am a very small model and I make mistakes."]),
    (["do you like stories?", "do you like cats?", "do you have friends?", "do you sleep?", "do you dream?", "can you feel?", "do you eat?",
      "are you alive?", "do you have feelings?", "what is your favorite color?", "what is your favourite colour?",
      "what do you like?", "are you sad?", "are you happy?", "do you love me?", "i love you", "what do you think?", "are you smart?"],
     ["I am only a small language model, so I do not have feelings. But I do like telling stories."]),
    (["yes", "yes please", "sure", "why not", "go on", "continue", "no thanks", "maybe", "hmm", "test", "testing", "...", "?", "asdf", "lol"],
     ["What would you like: a story, a sum, a sorted list or a JSON record?"]),
]


def small_talk(rng: random.Random) -> Dialogue:
    """A greeting, a question about the model, thanks, a joke."""
    prompts, replies = rng.choice(SMALL_TALK)
    p = rng.choice(prompts)
    shown = p if rng.random() < 0.4 else p[0].upper() + p[1:]
    if len(p) > 12 and rng.random() < 0.2:
        shown = rng.choice(("hello, ", "hi, ", "hi! ", "Hello! ", "hey, ", "Hi there, ", "hello there, ")) + p
    if rng.random() < 0.3:
        shown = shown.rstrip("?!.") or shown
    elif rng.random() < 0.2 and shown[-1].isalpha():
        shown += rng.choice(("!", ".", "!!"))
    shown = shown.upper() if rng.random() < 0.06 else shown
    return Dialogue("small_talk", ["talk:" + norm(p)], [user(shown), assistant(rng.choice(replies))], "none")


_TOPICS = """history politics music football chemistry physics philosophy computers religion economics medicine law art movies
space cooking biology geography fashion gardening chess poetry photography astronomy marketing psychology mathematics
engineering business travel health programming electricity dinosaurs volcanoes bitcoin taxes yoga basketball""".split()
_COUNTRIES = """France Germany Italy Spain Japan China India Brazil Canada Mexico Egypt Kenya Norway Sweden Poland Greece Turkey
Russia Australia England Portugal Peru Chile Argentina Nigeria Iran Iraq Korea Vietnam Thailand Cuba""".split()
_LANGS = "Python Java JavaScript Rust C Go Ruby PHP SQL Haskell Swift Kotlin HTML CSS Bash".split()
_TONGUES = "French German Spanish Italian Chinese Japanese Russian Arabic Latin Greek Polish Dutch Turkish Hindi Korean".split()
_OUT = ["What is the capital of {c}?", "Who is the president of {c}?", "Who is the king of {c}?", "How many people live in {c}?",
        "Write a {l} program that sorts a list.", "Write {l} code", "How do I write a loop in {l}?", "Explain {t}.", "explain {t} to me",
        "What do you think about {t}?", "Translate hello to {g}.", "How do you say {w} in {g}?", "Translate this into {g}: {s}",
        "What is the meaning of life?", "What's the weather like in {city}?", "What is the weather today?", "What time is it?",
        "What is the date today?", "Who won the world cup?", "Write an essay about {t}.", "Teach me {t}.", "What is {t}?",
        "Give me the latest news.", "Tell me the news about {t}.", "Who wrote {w}?", "When did the war end?", "Who was Einstein?",
        "Can you draw {a}?", "Show me a picture of {a}.", "Play a song.", "Sing a song about {a}.", "How do I cook {f}?", "Give me a recipe for {f}.",
        "What is the square root of {n}?", "Solve x + {n} = {m}", "What is the derivative of x squared?", "What is the distance to the moon?",
        "How far is it from {city} to {city2}?", "How old is {p}?", "Who is {p}?", "Where is {city}?", "What is the best {th}?", "Where can I buy {th_a}?",
        "How does {th_a} work?", "Write an email to {p}.", "write a letter to my boss", "Book a flight to {city}.", "Call {p}.", "Open the window.",
        "Search the web for {t}.", "Should I buy {th_a}?", "What should I eat today?", "Is it going to rain in {city}?", "Why is the sky blue?",
        "how do airplanes fly", "What causes {t}?", "Recommend a book about {t}.", "Which movie should I watch?", "What is quantum physics?",
        "Prove that there are infinitely many primes.", "What is the population of {city}?", "Who invented {th_a}?", "When was {th_a} invented?",
        "Give me legal advice.", "I have a headache, what should I do?", "How can I make money?", "write a poem about {t}", "Write a poem about {a}.",
        "What do {a_s} eat?", "Where do {a_s} live?", "Fix my {l} code.", "Debug this {l} error.", "Compare {c} and {c2}.", "List the planets.",
        "What's {n}% of {m}?", "{n}% of {m}", "is {n} a prime number?", "Is {n} prime",
        "Write a haiku about {w}.", "write a haiku about {t}", "Write a poem about {w}", "a song about {w}", "Write a rap about {t}.", "write a limerick",
        "average of {n} and {m}", "roman numeral for {n}", "convert {n} miles to kilometers", "{w}?", "what is {w}?",
        "rhyme with {w}", "what rhymes with {w}?", "synonym for {w}", "Name three rivers in {c}.", "What currency is used in {c}?", "define {w}", "What does {w} mean?", "{a} facts", "tell me about {c}",
        "Tell me about {t}.", "who is the best player in {t}", "2 to the power of {n}", "what is {n} percent of {m}?", "What is pi?"]
_NO = ["I am a very small model, so I do not know that. Ask me for a story, a sum, a sorted list or a JSON record.",
       "I am sorry, that is too hard for a model as small as I am. I can tell you a story or do a small sum.",
       "I can't help with that. I am a very small model; ask me for a story, a sum or a sorted list."]


def refusal(rng: random.Random) -> Dialogue:
    """A question beyond the model, answered by saying so."""
    c, c2 = rng.sample(_COUNTRIES, 2)
    city, city2 = rng.sample(CITIES, 2)
    th = rng.choice(THINGS)
    a = rng.choice(ANIMALS)
    p = rng.choice(_OUT).format(c=c, c2=c2, l=rng.choice(_LANGS), t=rng.choice(_TOPICS), g=rng.choice(_TONGUES), w=any_word(rng), th=th,
                                th_a=article(th), a=a, a_s=a + "s", city=city, city2=city2, f=rng.choice(FOODS), n=rng.randrange(2, 200),
                                m=rng.randrange(100, 999), p=person_name(rng), s=tasks.random_sentence(rng))
    return Dialogue("refusal", ["out:" + norm(p)], [user(lower_some(rng, rough(rng, p), 0.3)), assistant(rng.choice(_NO))], "none")


def too_big(rng: random.Random) -> Dialogue:
    """Sums beyond the trained sizes: the model says where its limit is."""
    op = rng.choice("+-*")
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
         ["What is the name of my {pet}?", "what is my {pet} called?", "do you remember the name of my {pet}?"], "Your {pet} is called {petn}.", "{petn}"),
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
    """2–6 unrelated tasks and small talk in one conversation."""
    msgs, keys, last = [], [], None
    for _ in range(rng.randrange(2, 7)):
        if rng.random() < 0.25:
            d = rng.choice((small_talk, refusal))(rng)
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
                p, z, op = rng.choice(["Now subtract {y}.", "minus {y}", "and take away {y}", "subtract {y} from that", "- {y}", "and {y} less?"]), x - y, "-"
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
            p, a = rng.choice(["Now reverse it.", "and in reverse?", "now the other way around", "Reverse that.", "and backwards?"]), ", ".join(reversed(xs))
        elif kind < 0.75:
            p, a = rng.choice(["What is the first one?", "which one is first?", "and the first?"]), xs[0]
        elif num or kind < 0.9:
            p, a = rng.choice(["How many are there?", "how many items is that?", "count them"]), str(len(xs))
        else:
            p, a = rng.choice(["And the last one?", "which one is last?", "What is the last one?"]), xs[-1]
        return Dialogue("follow_up", [e.key + p], [user(e.prompt), assistant(e.answer), user(rough(rng, p)), assistant(a)])
    e = rng.choice((tasks.copy, tasks.fact, tasks.compare, tasks.sort))(rng)
    if r < 0.85:
        p, a = rng.choice(["Say that in capitals.", "now in capital letters", "Write that in upper case.", "and in all caps?", "uppercase please"]), e.answer.upper()
    else:
        p, a = rng.choice(["Say that again.", "can you repeat that?", "What did you say?", "again please", "repeat your answer"]), e.answer
    return Dialogue("follow_up", [e.key + p], [user(e.prompt), assistant(e.answer), user(rough(rng, p)), assistant(a)])


# ---------------------------------------------------------------- system prompts

_PLAIN_SYSTEM = ["You are a helpful assistant.", "You are a friendly assistant.", "You are a helpful model.", "Be helpful.",
                 "You are a small model that likes to help.", "You are a helpful AI assistant.", "Answer the user's questions.",
                 "You are moeflux, a helpful assistant.", "You are a kind teacher.", "You are a storyteller for children.", "Be polite."]
_CAPS = ["Answer in capitals.", "Always answer in capital letters.", "Write everything in upper case.", "Answer in ALL CAPS.",
         "Use only capital letters.", "You always shout. Answer in capital letters.", "Please answer in uppercase.", "Speak in all caps.",
         "Reply in uppercase letters only.", "You must write in capital letters."]
_LOWER = ["Answer in lower case.", "Use only small letters.", "Never use capital letters.", "Write everything in lowercase.",
          "Always answer in lowercase letters."]
_SHORT = ["Answer with one word.", "Answer in one word.", "Give only the answer.", "Reply with a single word or number.", "One word answers only.",
          "Answer with just the result.", "Be as short as possible.", "Only the answer, nothing else.", "Use one word only."]
_END = ["Always end your answer with the word {w}.", "End every answer with {w}.", "End your answers with \"{w}\".", "Finish every reply with the word {w}.",
        "The last word of every answer must be {w}.", "Say {w} at the end of every answer."]
_START = ["Always start your answer with the word {w}.", "Begin every answer with {w}.", "Start your answers with \"{w}\".",
          "The first word of every answer must be {w}.", "Say {w} at the start of every answer."]
_NAME = ["Your name is {w}.", "You are {w}.", "You are a helpful assistant named {w}.", "You are called {w}.", "You are {w}, a friendly assistant."]
_JSON = ["Answer in JSON with the key answer.", "Always answer as JSON: {{\"answer\": ...}}", "Reply only with a JSON object that has the key \"answer\".",
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
        "name": ("", lambda a: a), "json": (rng.choice(_JSON).format(), None), "user": ("", None), "plain": (rng.choice(_PLAIN_SYSTEM), lambda a: a),
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
        sysmsg = rng.choice(_PLAIN_SYSTEM) + " " + sysmsg if kind not in ("plain", "name") else sysmsg
    for i in range(rng.choice((1, 1, 2, 3))):
        if kind == "name" and (i == 0 or rng.random() < 0.3):
            if persona:
                p = rng.choice(["Who are you?", "What are you?", "what are you", "who are you", "Tell me who you are."])
                msgs += [user(rough(rng, p)), assistant(f"I am {w}.")]
                keys.append(f"sys:{sysmsg}:{p}")
                continue
            p = rng.choice(["What is your name?", "Who are you?", "what's your name", "do you have a name?", "Tell me your name.", "how are you called?"])
            msgs += [user(rough(rng, p)), assistant(f"My name is {w}.")]
            keys.append(f"sys:{sysmsg}:{p}")
            continue
        r = rng.random()
        if kind in ("caps", "lower", "end", "start", "plain", "user") and r < 0.14:
            d = rng.choice((small_talk, refusal))(rng)
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


# ---------------------------------------------------------------- tools

def _tool(name: str, description: str, params: dict[str, tuple[str, str]]) -> dict:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": {k: {"type": t, "description": d} for k, (t, d) in params.items()}, "required": list(params)}}}


def _tool_cases(rng: random.Random) -> list[tuple[dict, str, dict, object, str]]:
    """(tool, user request, arguments, tool result, final answer) for one draw of every tool."""
    city, a, b = city_name(rng), city_name(rng), city_name(rng)
    n, m = person_name(rng, 0.25), person_name(rng)
    deg, sky = rng.randrange(-10, 38), rng.choice(["sunny", "cloudy", "rainy", "snowy", "windy", "foggy"])
    minutes, q, item = rng.randrange(1, 91), rng.randrange(1, 30), noun(rng, tasks._COUNTABLE)
    day, hour = rng.choice(DAYS), f"{rng.randrange(1, 13)}:{rng.choice(('00', '15', '30', '45'))}"
    x, y = rng.randrange(1000, 99999), rng.randrange(1000, 99999)
    room, what = rng.choice(["kitchen", "bedroom", "garage", "garden", "bathroom", "office"]), rng.choice(["concert", "meeting", "picnic", "lesson", "party", "dinner"])
    word, price, text = any_word(rng, 0.3), rng.randrange(2, 900), tasks.random_sentence(rng)
    state = rng.choice(("on", "off"))
    song = " ".join(any_word(rng, 0.0) for _ in range(2))
    c = rng.choice
    W = c(["get_weather", "weather", "current_weather", "get_current_weather"])
    P = c(["city", "location", "location", "place"])
    where, unit = city, c(["celsius", "fahrenheit"])
    if rng.random() < 0.2:
        where = f"{city}, {c(['MA', 'CA', 'NY', 'TX', 'France', 'Italy', 'UK', 'Japan', 'Germany'])}"
    weather = _tool(W, c(["Get the weather for a city", "Get the current weather in a given location", "Current weather"]),
                    {P: ("string", c(["The city", "City name", "The city and state, e.g. San Francisco, CA", "City and country e.g. Paris, France"]))})
    weather_unit = json.loads(json.dumps(weather))
    weather_unit["function"]["parameters"]["properties"]["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    amount, query = rng.randrange(1, 5000), " ".join(any_word(rng, 0.2) for _ in range(rng.randrange(1, 5)))
    money = rng.sample(["dollars", "euros", "pounds", "yen", "USD", "EUR", "GBP", "JPY"], 2)
    steps, way = rng.randrange(1, 30), c(["left", "right", "forward", "back", "up", "down"])
    path = c(["", "/tmp/", "data/", "docs/"]) + any_word(rng, 0.2) + c([".txt", ".json", ".csv", ".md"])
    tongue, op = c(_TONGUES), c("+-*/")
    return [
        (weather_unit, c([f"What's the weather like in {where} in {unit}?", f"weather in {where} in {unit}", f"How warm is it in {where}? Use {unit}."]),
         {P: where, "unit": unit}, {"temperature": deg, "unit": unit, "sky": sky}, f"It is {deg} degrees {unit} and {sky} in {where}."),
        (weather_unit, c([f"What's the weather like in {where}?", f"What is the weather like in {where} today?", f"weather {where}"]),
         {P: where}, {"temperature": deg, "sky": sky}, f"It is {deg} degrees and {sky} in {where}."),
        (_tool(c(["search", "web_search", "search_web"]), "Search the web", {c(["query", "q"]): ("string", "What to search for")}),
         c([f"Search for {query}.", f"search the web for {query}", f"google {query}", f"Find information about {query}."]),
         {"query": query}, {"results": [f"All about {query}"]}, f"I found this: All about {query}."),
        (_tool(c(["convert_currency", "currency"]), "Convert an amount of money", {"amount": ("number", "How much"), "from": ("string", "From currency"), "to": ("string", "To currency")}),
         c([f"Convert {amount} {money[0]} to {money[1]}.", f"How much is {amount} {money[0]} in {money[1]}?", f"{amount} {money[0]} in {money[1]}"]),
         {"amount": amount, "from": money[0], "to": money[1]}, {"result": x}, f"{amount} {money[0]} are {x} {money[1]}."),
        (_tool(c(["calculate", "calculator", "evaluate"]), "Calculate an expression", {"expression": ("string", "The expression")}),
         c([f"What is {x} {op} {y}?", f"{x} {op} {y}", f"Calculate {x} {op} {y}."]), {"expression": f"{x} {op} {y}"}, {"result": y}, f"The result is {y}."),
        (_tool(c(["move", "move_robot", "go"]), "Move the robot", {"direction": ("string", "Where to"), "steps": ("integer", "How many steps")}),
         c([f"Go {steps} steps {way}.", f"Move {way} {steps} steps.", f"{steps} steps {way} please"]), {"direction": way, "steps": steps}, {"ok": True}, f"I went {steps} steps {way}."),
        (_tool(c(["read_file", "open_file", "cat_file"]), "Read a file", {c(["path", "filename", "file"]): ("string", "Path of the file")}),
         c([f"Read {path}.", f"Open the file {path}", f"What is in {path}?", f"show me {path}"]), {"path": path}, {"content": query}, f"The file says: {query}"),
        (_tool(c(["translate", "translate_text"]), "Translate a text", {"text": ("string", "The text"), "language": ("string", "Target language")}),
         c([f"Translate {query} to {tongue}.", f"How do you say {query} in {tongue}?", f"translate {query} into {tongue}"]),
         {"text": query, "language": tongue}, {"translation": word}, f"In {tongue} it is {word}."),
        (_tool(c(["get_time", "current_time", "time_in"]), "Get the local time in a city", {P: ("string", "The city")}),
         c([f"What time is it in {city}?", f"time in {city}", f"Tell me the time in {city}."]), {P: city}, {"time": hour}, f"It is {hour} in {city}."),
        (_tool(c(["create_user", "add_user", "register"]), "Register a person", {"name": ("string", "Name"), "age": ("integer", "Age in years"), "city": ("string", "Home city")}),
         c([f"Register {n}, {minutes} years old, from {city}.", f"Add {n} from {city}, age {minutes}.", f"{n} is {minutes} and lives in {city}. Please add this user."]),
         {"name": n, "age": minutes, "city": city}, {"id": x}, f"I registered {n} with the number {x}."),
        (weather,
         c([f"What is the weather in {city}?", f"how is the weather in {city}", f"Is it cold in {city}?", f"weather {city}", f"Do I need an umbrella in {city}?"]),
         {P: city}, {"temperature": deg, "sky": sky}, f"It is {deg} degrees and {sky} in {city}."),
        (_tool(c(["set_timer", "start_timer", "timer"]), "Start a timer", {"minutes": ("integer", "Number of minutes")}),
         c([f"Set a timer for {minutes} minutes.", f"timer {minutes} minutes", f"wake me in {minutes} minutes", f"Start a {minutes} minute timer."]),
         {"minutes": minutes}, {"ok": True}, f"The timer is set for {minutes} minutes."),
        (_tool(c(["calculator", "add_numbers", "calculate_sum"]), "Add two numbers", {"a": ("integer", "First number"), "b": ("integer", "Second number")}),
         c([f"What is {x} + {y}?", f"{x}+{y}", f"Add {x} and {y}.", f"how much is {x} plus {y}"]), {"a": x, "b": y}, {"result": x + y}, f"{x} + {y} = {x + y}"),
        (_tool(c(["send_message", "send_text", "message"]), "Send a message to a person", {"to": ("string", "Name of the person"), "text": ("string", "The message")}),
         c([f"Send a message to {n}: {text}", f"Write to {n}: {text}", f"Text {n}: {text}", f"tell {n}: {text}"]), {"to": n, "text": text}, {"ok": True}, f"I sent the message to {n}."),
        (_tool(c(["add_event", "create_event", "calendar_add"]), "Put an event into the calendar",
               {"title": ("string", "What it is"), "day": ("string", "Day of the week"), "time": ("string", "Time of day")}),
         c([f"Put a {what} on {day} at {hour} in my calendar.", f"I have a {what} on {day} at {hour}. Please add it.", f"add {what} {day} {hour}"]),
         {"title": what, "day": day, "time": hour}, {"ok": True}, f"The {what} is in your calendar on {day} at {hour}."),
        (_tool(c(["search_trains", "find_train", "train_times"]), "Find trains between two cities", {"from": ("string", "Start"), "to": ("string", "Destination")}),
         c([f"When does a train go from {a} to {b}?", f"trains from {a} to {b}", f"I want to go from {a} to {b} by train.", f"Find a train to {b} from {a}."]),
         {"from": a, "to": b}, {"departure": hour}, f"The next train from {a} to {b} leaves at {hour}."),
        (_tool(c(["switch_light", "set_light", "light"]), "Turn a light on or off", {"room": ("string", "The room"), "state": ("string", "on or off")}),
         c([f"Turn {state} the light in the {room}.", f"{room} light {state}", f"Please switch the {room} light {state}."]), {"room": room, "state": state}, {"ok": True}, f"The light in the {room} is {state}."),
        (_tool(c(["get_price", "price_of", "lookup_price"]), "Look up the price of an item", {"item": ("string", "The item")}),
         c([f"How much does {article(item)} cost?", f"price of {article(item)}", f"What is the price of {article(item)}?"]), {"item": item}, {"price": price}, f"{article(item).capitalize()} costs {price} dollars."),
        (_tool(c(["order_item", "place_order", "buy"]), "Order items from the shop", {"item": ("string", "The item"), "quantity": ("integer", "How many")}),
         c([f"Order {q + 1} {item}s.", f"Buy {q + 1} {item}s please", f"I need {q + 1} {item}s. Order them."]), {"item": item, "quantity": q + 1}, {"order": rng.randrange(100, 999)}, f"I ordered {q + 1} {item}s."),
        (_tool(c(["play_song", "play_music"]), "Play a song", {"title": ("string", "Title of the song")}),
         c([f"Play {song}.", f"play the song {song}", f"I want to hear {song}."]), {"title": song}, {"ok": True}, f"Playing {song}."),
        (_tool(c(["lookup_word", "dictionary", "define_word"]), "Look up a word in the dictionary", {"word": ("string", "The word")}),
         c([f"What does {word} mean?", f"define {word}", f"Look up {word}."]), {"word": word}, {"meaning": f"{article(rng.choice(THINGS))}"}, ""),
        (_tool(c(["call_person", "phone_call"]), "Call a person on the phone", {"name": ("string", "Name of the person")}),
         c([f"Call {m}.", f"phone {m}", f"I want to talk to {m} on the phone."]), {"name": m}, {"ok": False}, f"I could not reach {m}."),
    ]


_UNUSED = {"limit": {"type": "integer", "description": "Most results"}, "verbose": {"type": "boolean"}, "note": {"type": "string", "description": "A note"},
           "format": {"type": "string", "enum": ["short", "long"]}, "urgent": {"type": "boolean", "description": "Whether it is urgent"}}


def _decorated(rng: random.Random, spec: dict) -> dict:
    """`spec` as other programs would write it: descriptions left out, a parameter nobody asks for, `strict`, titles."""
    f = json.loads(json.dumps(spec["function"]))
    schema = f["parameters"]
    if rng.random() < 0.25:
        for p in schema["properties"].values():
            p.pop("description", None)
    if rng.random() < 0.2:
        name = rng.choice(list(_UNUSED))
        schema["properties"][name] = _UNUSED[name]
    if rng.random() < 0.15:
        del schema["required"]
    if rng.random() < 0.15:
        schema["additionalProperties"] = False
    if rng.random() < 0.1:
        f["parameters"] = {**{k: schema[k] for k in schema if k != "type"}, "title": f["name"] + "Arguments", "type": "object"}
    if rng.random() < 0.1:
        f["strict"] = True
    if rng.random() < 0.08:
        del f["description"]
    return {"type": "function", "function": f}


def tool_call_text(name: str, arguments: dict) -> str:
    """How the chat template writes a call."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


def _purpose(function: dict) -> set[str]:
    """Words that two tools share when both could serve one request, which then has no right answer."""
    words = set(function["name"].split("_")) - {"get", "set", "add"}
    return words | ({"calculation"} if re.search("two numbers|expression", function["description"]) else set())


def tools(rng: random.Random) -> Dialogue:
    """1–4 tools in the prompt; one or two requests: a call, sometimes its result and the answer, or one that needs no tool."""
    while True:
        cases = rng.sample(_tool_cases(rng), rng.choice((1, 1, 2, 2, 3, 4)))
        purposes = [_purpose(c[0]["function"]) for c in cases]
        if all(not a & b for i, a in enumerate(purposes) for b in purposes[:i]):
            break
    specs = [_decorated(rng, c[0]) for c in cases]
    msgs = [system(rng.choice(_PLAIN_SYSTEM))] if rng.random() < 0.3 else []
    keys, check, gold = [], "exact", ""
    for _ in range(rng.choice((1, 1, 1, 2))):
        r = rng.random()
        if r < 0.1:
            d = small_talk(rng)
            msgs += d.messages
            keys += d.keys
            check, gold = "none", ""
            continue
        if r < 0.25:
            e = rng.choice((tasks.sort, tasks.reverse, tasks.count, tasks.copy, tasks.fact, tasks.spell))(rng)
            msgs += [user(e.prompt), assistant(e.answer)]
            keys.append(e.key)
            check, gold = e.check, e.gold
            continue
        spec, request, args, result, final = rng.choice(cases)
        function = spec["function"]
        if set(args) - set(function["parameters"]["properties"]):
            args = dict(zip(function["parameters"]["properties"], args.values()))
        verbatim = {"text", "query", "q", "expression", "path", "filename", "file", "title", "word"} & set(args)
        request = request if verbatim else rough(rng, request)
        msgs += [user(request), {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": function["name"], "arguments": args}}]}]
        keys.append("tool:" + norm(request))
        check, gold = "tool_call", ""
        if rng.random() < 0.5:
            if "meaning" in result:
                final = f"{args['word']} means {result['meaning']}."
            msgs += [{"role": "tool", "content": json.dumps(result)}, assistant(final)]
            check = "exact"
        else:
            break
    return Dialogue("tools", keys, msgs, check, gold, specs)
