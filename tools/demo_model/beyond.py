"""Questions beyond the model: it says so in a friendly line that takes up the topic, and offers something that it can do.

The line follows from the kind of question, so that a letter, a forecast and a theorem are turned down in different words.
"""

import random

import tasks
from dialogue import Dialogue, assistant, messy, norm, user
from facts import DEFINED
from smalltalk import offer
from words import ADJECTIVES_WORDS, ANIMALS, CITIES, COLORS, FOODS, FRUIT, THINGS, WORDS, any_word, article, city_name, person_name, pseudo_word

TOPICS = """history politics football chemistry philosophy religion economics medicine law art movies cooking biology geography fashion gardening
chess photography marketing psychology engineering business travel health volcanoes taxes yoga basketball feminism capitalism socialism tennis
baseball cricket hockey golf surfing boxing opera jazz rap techno guitars knitting sewing carpentry plumbing cars motorcycles airplanes rockets
submarines castles pyramids vikings pirates samurai cowboys romans knights mythology astrology dreams ghosts aliens vampires zombies magic
algebra geometry calculus statistics trigonometry topology logic grammar linguistics poetry drama novels comics anime games puzzles toys
vaccines viruses bacteria cancer diabetes sleep stress diets vitamins protein exercise meditation breathing happiness love friendship marriage
divorce parenting babies teenagers schools universities exams homework jobs careers salaries interviews startups investing stocks bonds insurance
mortgages banks money trade tariffs elections parliaments presidents wars treaties revolutions empires colonies slavery refugees immigration
oceans glaciers earthquakes hurricanes tornadoes droughts floods deserts rainforests coral reefs pollution recycling plastics energy oil coal
batteries turbines reactors lasers magnets semiconductors transistors robots drones satellites telescopes microscopes sensors cameras printers
keyboards monitors routers servers databases compilers kernels browsers websites passwords firewalls spreadsheets emails podcasts memes""".split()
PHRASES = ["the French Revolution", "World War II", "the Roman Empire", "string theory", "dark matter", "the stock market", "the meaning of life",
           "free will",
           "the theory of everything", "climate change", "the big bang", "the Cold War", "the Middle Ages", "ancient Egypt", "differential equations",
           "linear algebra", "organic chemistry", "machine translation", "reinforcement learning", "graph theory", "game theory", "supply and demand",
           "the human brain", "the immune system", "the water cycle", "plate tectonics", "the industrial revolution", "the Renaissance",
           "nuclear fusion",
           "time travel", "the speed of sound", "the law of large numbers", "the trolley problem", "the halting problem", "Bayes' theorem",
           "the housing market",
           "the Olympic games", "the World Cup", "Greek mythology", "modern art", "classical music", "healthy food", "home cooking",
           "personal finance",
           "the Higgs boson", "general relativity", "the Riemann hypothesis", "Fermat's last theorem", "functional programming",
           "object oriented programming",
           "distributed systems", "the attention mechanism", "operating systems", "virtual memory", "garbage collection", "async programming",
           "type theory",
           "the moon landing", "the Berlin Wall", "the Great Depression", "the gold standard", "interest rates", "electric cars", "solar panels",
           "wind power"]
LANGS = "Python Java JavaScript TypeScript Rust C C++ C# Go Ruby PHP SQL Haskell Swift Kotlin HTML CSS Bash Perl Lua Scala Julia R assembly Fortran".split()
TONGUES = "Chinese Japanese Russian Arabic Latin Greek Polish Turkish Hindi Korean Swedish Finnish Hungarian Czech Hebrew Danish Norwegian Welsh Swahili".split()
_CODE = ["sorts a list", "reads a file", "parses JSON", "downloads a web page", "counts words", "plays chess", "draws a circle", "finds primes",
         "merges two lists",
         "sends an email", "computes a hash", "connects to a database", "solves sudoku", "trains a neural network", "implements quicksort",
         "renders a triangle",
         "scrapes a site", "checks a password", "resizes an image", "reverses a linked list", "balances a tree", "shows a window", "opens a socket"]
_DO = ["lose weight", "lose {n} pounds", "run {n} miles", "save {n} dollars", "read {n} books a year", "do {n} push-ups", "earn {n} dollars an hour",
       "sleep {n} hours", "walk {n} steps a day", "bake {n} cookies", "invite {n} people", "get taller", "be happy", "tie a bow tie", "fall asleep",
       "cook spaghetti", "write better", "learn faster", "make money", "learn to drive", "fix my computer", "get rich", "sleep better",
       "learn a language", "cook rice", "bake a cake", "tie a tie",
       "write a resume", "find a job", "install Linux", "build a house", "train a dog", "stop smoking", "start a company", "grow tomatoes",
       "make coffee", "save money",
       "change a tire", "plan a trip", "make friends", "learn the guitar", "repair a bike", "clean my room", "remove a stain", "sell my car",
       "invest my money",
       "write a book", "run faster", "build muscle", "meditate", "draw a face", "boil an egg", "make pizza", "center a div", "exit vim",
       "compile a kernel", "use git",
       "sort an array", "deploy a website", "reset my password", "delete my account", "speed up my laptop", "quantize a model", "fine-tune a model",
       "train a model"]
_PEOPLE = ["the president of the United States", "the richest person in the world", "the king of Spain", "the pope", "the fastest runner",
           "the best football player",
           "the mayor of {city}", "the CEO of Apple", "the prime minister of Canada", "the author of {w}", "the queen of {city}", "{p} {s}",
           "{p} {s}", "{s}", "{p} of {city}"]


# Of these the model has something to say (`knowledge.py`).
KNOWN = {x.removeprefix("a ").removeprefix("an ").removeprefix("the ").lower() for x in DEFINED} | {*ANIMALS, *FRUIT, *FOODS, *COLORS}


def topic(rng: random.Random) -> str:
    """A subject of one to three words that the model knows nothing of: usual, unusual or made up."""
    while (t := _topic(rng)).removeprefix("the ").lower() in KNOWN:
        pass
    return t


def _topic(rng: random.Random) -> str:
    r = rng.random()
    if r < 0.4:
        return rng.choice(TOPICS)
    if r < 0.6:
        return rng.choice(PHRASES)
    if r < 0.72:
        return any_word(rng, 0.3)
    if r < 0.84:
        return f"{rng.choice(ADJECTIVES_WORDS)} {rng.choice(TOPICS)}"
    if r < 0.92:
        return f"{rng.choice(WORDS)} {rng.choice(WORDS)}"
    return f"the {rng.choice(WORDS)} of {rng.choice((any_word(rng, 0.4), city_name(rng)))}"


# kind → (ways to ask, leads of the answer)
KINDS: dict[str, tuple[list[str], list[str]]] = {
    "explain": (["Explain {t}.", "explain {t} to me", "Explain {t} in simple words.", "What is {t}?", "What are {t}?", "Tell me about {t}.",
                 "tell me more about {t}",
                 "what do you know about {t}?", "Teach me {t}.", "How does {t} work?", "how do {t} work?", "Give me an introduction to {t}.",
                 "Explain {t} like I'm five.",
                 "eli5 {t}", "Can you explain {t}?", "Describe {t}.", "define {t}", "I want to learn about {t}", "give me information about {t}",
                 "What causes {t}?",
                 "Why is {t} important?", "what's {t}", "Explain how {t} works.", "info on {t}", "{t}", "{t}?", "facts about {t}",
                 "what does {t} mean?", "history of {t}",
                 "Help me understand {t}.", "tell me everything about {t}", "Summarize {t}.", "how was {t} discovered?", "Why does {t} exist?",
                 "an overview of {t}",
                 "what is the difference between {t} and {t2}?", "compare {t} and {t2}"],
                ["I know next to nothing about {t}: I am only 16 MB small.", "I would love to explain {t}, but it does not fit into 16 MB.",
                 "I am afraid that {t} is too big a subject for a model as small as I am.",
                 "I never learned anything about {t}; my world is mostly stories and small sums."]),
    "opinion": (["What do you think about {t}?", "Do you like {t}?", "Is {t} good?", "what's your opinion on {t}?", "Is {t} better than {t2}?",
                 "which is better, {t} or {t2}?",
                 "{t} or {t2}?", "should I learn {t}?", "Do you believe in {t}?", "is {t} bad?", "Should I buy {th_a}?", "What is the best {th}?",
                 "Which {th} should I buy?",
                 "recommend {th_a}", "Which movie should I watch?", "What should I eat today?", "what should I do today?",
                 "Recommend a book about {t}.", "Is {city} nice?",
                 "what is the best {f}?", "who is the best in {t}?", "is {t} worth it?", "what is better: {th} or {th2}?", "should i move to {city}?",
                 "recommend me a movie", "Recommend a good {r}.", "what is a good {r}?", "suggest a good {r}", "which {r} is the best?",
                 "tell me a good {r} for tonight", "do you know a good {r}?", "your favorite {r}?", "best {r} of {year}", "top {r}s",
                 "what should i cook?", "what should i wear?", "suggest a restaurant in {city}", "is it a good idea to learn {t}?"],
                ["That is for you to decide: I am only a 16 MB model and have no opinions.", "I am too small to have an opinion about that.",
                 "I would not trust the advice of a 16 MB model here."]),
    "who": (["Who is {x}?", "who was {x}?", "How old is {x}?", "Where does {x} live?", "tell me about {x}", "do you know {x}?", "what did {x} do?",
             "When was {x} born?",
             "is {x} alive?", "what is {x} famous for?", "how tall is {x}?", "who is {x} married to?", "biography of {x}"],
            ["I do not know {x}: I have read only stories that a program made up.", "Sorry, I never heard of {x}. I am a very small model.",
             "I know nobody outside my stories, not even {x}."]),
    "fact": (["Who invented {th_a}?", "When was {th_a} invented?", "Who wrote {w}?", "When did {t} begin?", "How many people live in {city}?",
              "What is the population of {city}?",
              "How far is it from {city} to {city2}?", "Where is {city}?", "how big is {city}?", "How heavy is {an}?", "How fast is {an}?",
              "how long does {an} live?",
              "Where can I buy {th_a}?", "how much does {th_a} cost?", "What year was {n2}?", "who won the world cup in {year}?",
              "what happened in {year}?", "Who won the {t} award?",
              "when did {city} get its name?", "who discovered {t}?", "How many {th}s are in {city}?", "what is the best time to visit {city}?",
              "how long is a {w}?", "tell me about {city}",
              "what is the tallest building in {city}?", "when is {t} day?", "How many calories are in {f}?", "why do {a}s {v}?", "why is {w} {adj}?",
              "is {w} {adj}?",
              "who sang {w}?", "what is the name of the {adj} {w}?", "where do {t} come from?", "which {w} is the {adj}est?", "can {a}s {v}?",
              "Why do people {v}?"],
             ["I do not know that. The world is bigger than my 16 MB.", "I have not learned that: I am a very small model and would have to guess.",
              "No idea, I am sorry. I know only a few simple facts."]),
    "live": (["What's the weather like in {city}?", "What is the weather today?", "Is it going to rain in {city}?", "weather tomorrow",
              "weather in {city}", "What time is it?",
              "what time is it in {city}?", "What is the date today?", "what day is today?", "Give me the latest news.",
              "Tell me the news about {t}.", "what's happening in {city}?",
              "what year is it?", "what month is it?", "price of bitcoin", "how is the stock market today?", "what's the price of {w}?",
              "who won the game yesterday?",
              "what's on tv tonight?", "when does the next train leave?", "Search the web for {t}.", "google {t}", "what is trending?", "look up {t}",
              "what's the temperature outside?",
              "is it raining?", "do I need an umbrella?", "current time", "today's date", "news", "weather", "time", "what's the score?",
              "is {th} on sale?", "exchange rate of the dollar"],
             ["I have no clock, no window and no internet, so I cannot know that.", "I cannot look that up: I am a small file without internet.",
              "I see only our chat, neither the time nor the news nor the weather."]),
    "act": (["Call {p}.", "Open the window.", "Play a song.", "play {w}", "Book a flight to {city}.", "Set a timer for {n} minutes.",
             "set an alarm for 7", "Send an email to {p}.",
             "Turn on the light.", "Order {f}.", "order a pizza", "Remind me to buy {f}.", "open the file {w}.txt", "delete my files", "Draw {an}.",
             "can you draw {an}?",
             "Show me a picture of {an}.", "make an image of {th_a}", "Generate a picture of {t}", "draw me a {w}", "sing", "Sing a song about {an}.",
             "open youtube", "install {w}",
             "run this command: ls", "buy me {th_a}", "take a screenshot", "make me a sandwich", "play music", "show me a video of {a}s",
             "create an image of {city}", "turn off the computer",
             "book a table in {city}", "email my boss", "read this file", "go to {w}.com", "open {w}", "translate this page", "print {w}",
             "make a logo", "record a video"],
            ["I cannot do that: I only write text.", "I have no hands, only words, so I cannot do that.",
             "That is beyond me, since all I do is write a little text."]),
    "write": (["Write an essay about {t}.", "Write an email to {p}.", "write a letter to my boss", "write an article about {t}",
               "Write a blog post about {t}.", "write a book about {t}",
               "Write a speech about {t}.", "write a report on {t}", "draft an email to {p} about {t}", "write a cover letter", "Write a novel.",
               "make a presentation about {t}",
               "write a tweet about {t}", "write a review of {w}", "write my homework about {t}", "Write a dialogue between {an} and {an2}.",
               "write a screenplay about {t}",
               "write a thesis on {t}", "write a product description for {th_a}", "Write an advertisement for {th_a}.", "make a table of {t}",
               "write a paragraph about {t}",
               "write 500 words about {t}", "write a recipe for {f}", "Give me a recipe for {f}.", "make a plan for {t}",
               "write a song about {t} with guitar chords",
               "Write a rap about {t}.", "write lyrics about {t}", "brainstorm ideas for {t}", "give me ideas for {t}", "write a slogan for {th_a}",
               "compose an email", "write an email",
               "make me a workout plan", "plan my day", "write a business plan", "give me tips for {t}", "make a quiz about {t}"],
              ["Longer texts on real subjects are too much for a 16 MB model.",
               "I would get lost after a line or two: I am made for short stories and tiny poems.",
               "That needs a bigger model than me."]),
    "code": (["Write a {l} program that {c}.", "write {l} code that {c}", "Fix my {l} code.", "Debug this {l} error.",
              "How do I write a loop in {l}?", "write a function in {l} that {c}",
              "Write a script that {c}.", "{l} code to {w} a {w2}", "how do I install {l}?", "what is wrong with this {l} code?",
              "write a regex for {w}", "Write a {l} class for {th_a}.",
              "why does my {l} program crash?", "write a game in {l}", "make a website about {t}", "write unit tests in {l}", "explain {l} pointers",
              "refactor this {l} code",
              "convert this {l} code to {l2}", "write an SQL query for {w}", "optimize this {l} function", "build me an app",
              "create a {l} app that {c}", "review my code"],
             ["I know only a handful of tiny programs by heart, and that is not one of them.", "Real programming is beyond my 25 million parameters.",
              "For {l2} code you want a bigger model."]),
    "howto": (["How do I {do}?", "how can I {do}?", "how to {do}", "Help me {do}.", "can you help me {do}?", "What is the best way to {do}?",
               "I want to {do}", "teach me how to {do}",
               "i need to {do}", "tips to {do}", "how long does it take to {do}?", "should I {do}?", "show me how to {do}", "steps to {do}",
               "is it hard to {do}?"],
              ["I do not know how to {do}: I am a 16 MB model and have never done anything but write.",
               "How to {do} is not among the things that I learned.",
               "I cannot help you to {do}, I am sorry; I am only a tiny model."]),
    "advice": (["I have a headache, what should I do?", "Give me legal advice.", "my {w} hurts", "I feel a pain in my {w}", "should I take medicine?",
                "Can I sue {p}?", "is this illegal?",
                "what medicine should I take?", "am I sick?", "i have a fever", "i have a {adj} {ache}", "I have {ache_a}.", "my {body} hurts",
                "my {body} hurts a lot", "i feel sick", "I have had {ache_a} since yesterday.", "what helps against {ache_a}?",
                "i have pain in my {body}", "{ache}", "i burned my {body}", "there is blood on my {body}", "i cannot breathe well",
                "i ate something bad", "which stocks should I buy?", "should I buy bitcoin?", "how do I pay less taxes?", "i broke my leg",
                "my {a} is sick", "what are the symptoms of {w}?", "can I eat old {f}?", "is {w} poisonous?", "do i need a lawyer?",
                "should i break up with {p}?", "my friend is mad at me"],
               ["Please ask a person who knows about that; I am only a 16 MB model.",
                "That is too important to ask a tiny model. Somebody who knows you can help better."]),
    "math": (["What is the square root of {n2}?", "Solve x + {n} = {m}", "What is the derivative of x squared?", "what is {n}% of {m}?",
              "Prove that there are infinitely many primes.",
              "{n} to the power of {n}", "What is the integral of x?", "log of {n}", "convert {n} miles to kilometers",
              "how many inches are in {n} meters?", "sin({n})", "factorial of {n}",
              "what is 0.{n} * {m}", "solve for x: {n}x = {m}", "what is the area of a circle with radius {n}?", "the {n}th digit of pi",
              "what is {n} factorial?", "{n}^{n}",
              "convert {n} fahrenheit to celsius", "({n} + {m}) * {n}", "how many seconds are in {n} days?", "what is 1/{n} + 1/{m}?",
              "median of {n}, {m}, {n}", "binary of {m}",
              "{m} in binary", "greatest common divisor of {n} and {m}", "what is the next prime after {m}?", "simplify {n}/{m}",
              "{n} + x = {m}, find x", "{n} + {m} * {n}", "2 * {n} * {n}", "{n} * {n} + {m}", "{n} - {m} / 2", "{n}! =", "{n} mod 7", "-{n} * {n}",
              "is {m}{n} a prime number?"],
             ["That is beyond my arithmetic.", "I can only do small sums, so that is too hard for me.", "My mathematics ends before that."]),
    "tongue": (["Translate hello to {g}.", "How do you say {w} in {g}?", "Translate this into {g}: {s2}", "translate {w} to {g}",
                "what is {w} in {g}?", "Say something in {g}.",
                "{w} in {g}", "translate \"{s2}\" into {g}", "what does {pw} mean in {g}?", "speak {g}", "how do I say thank you in {g}?",
                "teach me {g}", "do you speak {g}?"],
               ["I do not know any {g}, I am sorry.", "{g} is not among the languages that I know a little of."]),
}


def ask(rng: random.Random) -> tuple[str, str, str, dict]:
    """A question beyond the model: kind, prompt, first sentence of the answer, what was filled in."""
    kind = rng.choices(list(KINDS), (24, 8, 8, 12, 10, 9, 10, 7, 8, 5, 8, 6))[0]
    prompts, leads = KINDS[kind]
    (c1, c2), (th, th2), (a, a2) = rng.sample(CITIES, 2), rng.sample(THINGS, 2), rng.sample(ANIMALS, 2)
    p, s = person_name(rng, 0.3), pseudo_word(rng, rng.choice((2, 2, 3))).capitalize()
    v = {"t": topic(rng), "t2": topic(rng), "l": rng.choice(LANGS), "l2": rng.choice(LANGS), "g": rng.choice(TONGUES), "w": any_word(rng),
         "w2": any_word(rng), "pw": pseudo_word(rng),
         "th": th, "th2": th2, "th_a": article(th), "a": a, "an": article(a), "an2": article(a2), "city": rng.choice((c1, c1, city_name(rng))),
         "city2": c2, "f": rng.choice(FOODS),
         "n": rng.randrange(2, 100), "m": rng.randrange(100, 999), "n2": rng.choice((2, 3, 5, 7, 10, 12, 50, 1000, rng.randrange(401, 5000))), "p": p,
         "s": s,
         "year": rng.randrange(1200, 2031), "c": rng.choice(_CODE), "do": rng.choice(_DO) if rng.random() < 0.8
         else f"{rng.choice(WORDS)} {article(rng.choice(THINGS))}",
         "v": rng.choice("sleep fly jump sing dream laugh cry swim dance yawn sneeze snore talk think".split()), "adj": rng.choice(ADJECTIVES_WORDS),
         "s2": tasks.random_sentence(rng), "r": rng.choice("movie book song game restaurant series album podcast website recipe novel hotel".split()),
         "body": rng.choice("head back leg arm knee foot hand stomach tooth ear eye neck finger".split())}
    v["ache"] = rng.choice("headache stomachache toothache backache fever cold cough migraine rash earache".split())
    v["ache_a"] = article(v["ache"])
    v["x"] = rng.choice(_PEOPLE).format_map(v)
    if rng.random() < 0.3:
        v["x"] = v["x"].lower()
    v["do"] = v["do"].replace("{n}", str(rng.randrange(2, 100)))
    prompt = rng.choice(prompts)
    if kind == "code":
        v["l2"] = v["l"] if "{l" in prompt else "that kind of"
    prompt = prompt.format_map(v)
    return kind, prompt[0].upper() + prompt[1:], rng.choice(leads).format_map(v), v


# kind → (what the prompt names, leads that take it up)
_NAMED = {
    "opinion": [("t", ["I have no opinion on {t}: I am only a 16 MB model.", "About {t} you should ask somebody who has tried it."]), ("city",
        ["I have never been to {city}: I live in a file of 16 MB."]), ("th", ["I have never held {th_a} in my hands, so I cannot advise you."])],
    "fact": [("city", ["I know {city} only by name.", "Of {city} I know the name and nothing more."]), ("t", ["My 16 MB hold nothing about {t}.",
        "I have not learned anything about {t}."]), ("th", ["I know the word {th}, but not much about the thing."]), ("w",
            ["About {w} I have learned nothing but the word."])],
    "live": [("city", ["I cannot look out of a window in {city}: I am a small file without internet."]), ("t",
        ["I have no news about {t}: I am a small file without internet."])],
    "write": [("t", ["A real text about {t} is too much for a 16 MB model.", "For a text about {t} you want a bigger model than me."]), ("f",
        ["I have never cooked {f}, and 16 MB hold no recipes."]), ("p", ["For a letter to {p} you want a bigger model than me."])],
    "act": [("an", ["I cannot draw {an}, but I can write about one."]), ("w", ["I can only write, so {w} is out of my reach."]), ("p",
        ["I cannot reach {p}: all I do is write a little text."])],
    "code": [("l", ["I know only a few lines of {l}, and not these.", "For {l} you want a bigger model than me."])],
}
_BEFORE = ["I have a question.", "Hello, I need some help.", "Hi! I am new here.", "I am working on a project about {w}.",
           "My teacher asked me to do this.", "Yesterday I talked with {p} about it.", "I live in {city}.", "Quick question:", "Sorry to bother you.",
           "I was wondering:",
           "My friend {p} wants to know this.", "Let us try something hard.", "You are an expert in {w}.", "Act as a professional.", "Question:",
           "Q:", "Assistant,", "OK computer,"]


def refusal(rng: random.Random) -> Dialogue:
    """A question beyond the model, turned down with an offer."""
    kind, p, lead, v = ask(rng)
    if rng.random() < 0.6:
        named = [x for x in _NAMED.get(kind, []) if f"{v[x[0]]}" in p]
        lead = rng.choice(rng.choice(named)[1]).format_map(v) if named else lead
    lead = lead[0].upper() + lead[1:]
    if rng.random() < 0.06:
        p = f"{rng.choice(_BEFORE).format(w=any_word(rng), p=v['p'], city=v['city'])} {p}"
    letter = next((v[k][0].lower() for k in ("t", "x", "an", "th", "city", "w") if str(v[k]) in p), "")
    own = random.Random(kind + letter + p[-3:]) if rng.random() < 0.7 else rng
    close = offer(own, letter)
    if kind in ("explain", "who") and rng.random() < 0.2 and v["t"] in p:
        close = rng.choice([f"But I can spell {v['t']} backwards for you.",
                            f"But I could write a small poem about {v['t']}."]) if " " not in v["t"] else f"But I could write a small poem about {v['t']}."
    keep = " ".join(str(v[k]) for k in ("t", "t2", "x", "do", "g", "l", "city", "w", "p"))
    return Dialogue("refusal", ["out:" + norm(p)], [user(messy(rng, p, 0.08, 0.02, keep)), assistant(f"{lead} {close}")], "none")
