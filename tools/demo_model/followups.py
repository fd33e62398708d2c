"""After a story: questions in the words that people use, changes of the story, what happens next. And stories that the user begins."""

import random
import re

import beyond
import knowledge
import smalltalk
import stories
import textwork
import verse
from chat import _MORE, _SUM, ODD, story_request
from dialogue import Dialogue, assistant, messy, norm, user
from words import ADJECTIVES_WORDS, THINGS, any_word, article, person_name

# plot → (how it ends, why what happened happened, what one can learn, title)
ABOUT = {
    "lost": ("In the end they found the {obj} {spot}.", "Because {n} had lost {his} {obj}.", "Four eyes see more than two.", "The Lost {Obj}"),
    "friend": ("In the end {n} and {f} became friends.", "Because {n} was lonely.", "One small hello can make a big friend.", "{n} Says Hello"),
    "stuck": ("In the end the {gk} was free again.", "Because the {gk} was stuck and needed help.", "Nobody is too small to help.",
              "{n} and the {Gk}"),
    "fear": ("In the end {n} was brave, and everything was fine.", "Because {n} was afraid of {fear}.",
             "Being brave means doing it even when you are afraid.", "{n} the Brave"),
    "skill": ("In the end {n} learned to {skill}.", "Because {n} wanted to learn to {skill}.", "Do not give up; practice helps.",
              "{n} Learns to {Skill}"),
    "share": ("In the end {n} shared the {food} with everybody.", "Because {n} did not want to share at first.",
              "Sharing makes everything taste better.", "{n} Learns to Share"),
    "build": ("In the end the second {build} worked.", "Because {n} wanted to build a {build}.", "The second try is often the better one.",
              "{n} Builds a {Build}"),
    "race": ("In the end {n} and {f} finished the race together.", "Because {f} got hurt and needed help.", "A friend is worth more than winning.",
             "The Great Race"),
    "plant": ("In the end the seed became a {plant}.", "Because {n} was patient.", "Good things need time.", "{n} and the Little Seed"),
    "way_home": ("In the end {n} found the way home.", "Because {n} had lost the way.", "It is good to ask for help.", "The Way Home"),
    "birthday": ("In the end there was a surprise party for {n}.", "Because {n} thought that everybody had forgotten the birthday.",
                 "Friends do not forget you.", "A Birthday Surprise"),
    "noise": ("In the end it was only {cause}.", "Because {n} heard {noise} in the night.", "Most things are less scary in the light.",
              "The Noise in the Night"),
    "sorry": ("In the end {n} told the truth, and {f} was not angry.", "Because {n} broke {f}'s {obj} and was ashamed.",
              "It is best to tell the truth.", "The Broken {Obj}"),
    "treasure": ("In the end they found {treasure}.", "Because {n} found a map with a red cross on it.",
                 "The best part of a treasure is the adventure.", "{n} and the Treasure Map"),
    "storm": ("In the end the storm was over, and they all helped each other.", "Because there was a big storm.",
              "A small house with friends is bigger than a castle.", "The Night of the Storm"),
    "wish": ("In the end {f} was happy, because {n} had wished for it.", "Because {n} used the wish for {f}.",
             "The best wishes are the ones for somebody else.", "One Wish"),
}
# (how it is asked, answer, key words, what the story must contain)
_ASK = [
    (("What is its name?", "what's its name", "What is his name?", "What's her name?", "what was his name?", "what was its name", "What is the name?",
      "name?", "what is {his} name", "How is {he} called?", "what was the {k}'s name?",
      "What is the {k}'s name?", "what is the name of the {k}", "who is the hero?", "what was the hero's name?",
      "what's the name of the main character?", "who was it about?", "Who is it about?", "who?", "about whom is it?", "what did you call {him}?"),
     "{His} name is {n}.", "{n}", ""),
    (("Who is the friend?", "what is the friend's name?", "What was the {fk}'s name?", "what's the name of the {fk}?", "who was the {fk}?",
      "what is the {fk} called?", "who else is in it?", "who is the other one?", "Who else was in the story?"), "The {fk} is called {f}.", "{f}",
      "{fk}"),
    (("Where did {he} live?", "where does it live?", "where does {he} live?", "Where was {his} home?", "where did it live?", "where?",
      "Where was that?", "where does the story happen?", "where did the {k} live"), "{He} lived in {home}.", "{home}", "{home}"),
    (("What animal is it?", "what is it?", "what kind of animal was it?", "what was {he}?", "what is {he}?", "is it an animal?",
      "what was {n} again?", "what kind of creature is it?"), "{n} is {ak}.", "{k}", ""),
    (("What color was it?", "what colour was it?", "what color is it?", "which color did it have?", "What colour was the {obj}?",
      "what color was the {obj}?", "and the color?", "what color?"), "The {obj} was {color}.", "{color}", "{cobj}"),
    (("When was that?", "when did it happen?", "When did this happen?", "what time of day was it?", "when?"), "It happened {when}.", "{when}",
     "{time}|{time_l}"),
    (("What happened at the end?", "how does it end?", "How did it end?", "what happens in the end?", "and the end?", "what was the ending?",
      "tell me the ending again", "what happened in the end", "how did the story end?", "what is the end of the story?", "does it end well?",
      "so what happened?"), "{END}", "In the end", ""),
    (("Why?", "why", "but why?", "Why did that happen?", "why was that?", "why did {he} do that?", "Why did {n} do that?", "why did it happen?",
      "why is that?", "what was the reason?", "why so?"), "{WHY}", "Because", ""),
    (("What is the moral?", "what is the moral of the story?", "what did {n} learn?", "What can we learn from it?", "the moral?",
      "what's the lesson?", "What does the story teach?", "and the moral of the story?", "what do we learn?"), "{MORAL}", "{MORAL}", ""),
    (("Give it a title.", "what is the title?", "What's the title of the story?", "find a title", "a title please", "Title?",
      "what would you call this story?", "how is the story called?", "name the story", "give the story a name", "suggest a title"), "\"{TITLE}\"",
      "{TITLE}", ""),
    (("Was {he} happy?", "was {n} happy at the end?", "is {n} happy now?", "was {he} happy in the end?", "did {he} smile?"),
     "Yes, in the end {n} was happy.", "Yes", ""),
    (("Is this a true story?", "is it true?", "did that really happen?", "is that real?", "Did you make that up?", "is this real?", "true story?",
      "where did you get this story?", "who wrote this story?", "did you write this?", "Who is the author?"), "I made it up just now.", "made it up",
      ""),
    (("How old was {n}?", "what did {n} wear?", "how tall is {n}?", "Who is {n}'s mother?", "what was the weather on Monday?", "how old is {he}?",
      "what is {n}'s last name?", "does {n} have children?", "what did {n} have for breakfast?", "what is {n}'s favorite song?",
      "who is {n}'s teacher?",
      "how much does {n} weigh?", "what color are {n}'s eyes?", "what is {n}'s phone number?", "when was {n} born?", "what language does {n} speak?",
      "how many brothers does {n} have?", "what was the name of the town?"), "The story does not say.", "does not say", ""),
    (("Who helped?", "who helped {him}?", "did somebody help {him}?", "who was kind?", "who was {his} friend?", "what was {his} friend called?"),
     "{f} the {fk}.", "{f}", "{f}"),
]
_LONGER = ["Make it longer.", "make it longer", "longer please", "A longer version please.", "tell it longer", "Can you make it longer?",
           "make the story longer", "more details", "Tell it with more details.", "expand it", "longer", "too short", "extend the story",
           "that was short, make it longer", "add more"]
_SHORTER = ["Shorter.", "shorter please", "make it short", "Can you make it shorter?", "make the story shorter", "too long", "shorten it",
            "the short version", "Tell it in one sentence.", "in short?", "keep it short", "that's too long", "summarise it", "sum it up",
            "what was it about?"]
_NEXT = ["And then?", "and then", "What happened next?", "what happens next?", "go on", "continue", "Continue the story.", "more", "tell me more",
         "and after that?", "then what?", "What happened after that?", "keep going", "what did {n} do next?", "what did {he} do then?", "next?",
         "and what happened then?",
         "go on please", "is there more?", "write the next chapter", "a second chapter please", "part 2", "continue please",
         "What happened the next day?", "don't stop"]
_RENAME = ["Change the name to {m}.", "change the name to {m}", "Call {him} {m}.", "call it {m}", "rename {n} to {m}", "the {k} should be called {m}",
           "Use the name {m}.", "make {his} name {m}", "Replace {n} with {m}.", "now with the name {m}", "tell it again, but the {k} is called {m}",
           "name {him} {m} instead", "change {n} to {m}",
           "can you change the name to {m}?", "the name should be {m}"]
_REKIND = ["Make it about {ak2}.", "make it {ak2}", "Change the {k} to {ak2}.", "the same story with {ak2}", "make {n} {ak2}",
           "now with {ak2} instead", "Replace the {k} with {ak2}.", "can it be {ak2}?", "tell it with {ak2} instead of {ak}",
           "same story but about {ak2}"]
_ANOTHER = _MORE + ["another", "one more", "a different one", "next story", "now another one", "more stories", "a new story",
                    "tell me a different story", "can you tell me another one?", "another one please", "something else", "new story please",
                    "I want another one.", "more please, a new one"]
_AFTER = ([["The next day, {n} visited {f} the {fk}.", "A week later, {n} and {f} met again at the {place}.",
            "The next morning, {f} knocked on {n}'s door.", "On the following day, {n} woke up early and went to see {f}."],
           ["They ate {food} and talked about everything that had happened.", "They walked to the {place2} and sang all the way.",
            "\"Do you remember?\" asked {f}. They both laughed.", "They had so much to tell each other that the tea got cold."],
           ["Then {agk} came by, and {n} had to tell the whole story once more.", "On the way they met {agk}, and {he} came along.",
            "{f} had brought a small present for {n}.", "Soon half the village sat around them and listened."],
           ["When it got dark, {n} went home, tired and happy.", "And from then on they met every week.",
            "\"What a life,\" said {n}, and fell asleep with a smile.", "And that was only the beginning of many more adventures."]])


def _next_part(rng: random.Random, s: dict) -> str:
    parts = [rng.choice(x).format_map(s) for x in _AFTER]
    parts[2] = parts[2].replace(f"and {s['he']} came along", "and it came along")
    if rng.random() < 0.4:
        del parts[rng.choice((1, 2))]
    return " ".join(parts)


def _extended(s: stories.Story, rng: random.Random) -> stories.Story:
    """The story with every optional sentence and what happened afterwards."""
    long = stories.realise(s.plot, s.state, s.seed, s.loves, full=True)
    long.text += "\n\n" + _next_part(rng, long.state)
    return long


def _facts(s: stories.Story) -> dict:
    """What the answers of `_ASK` are filled with."""
    st = dict(s.state)
    for x in ("obj", "gk", "skill", "build"):
        st[x.capitalize()] = " ".join(w.capitalize() for w in st.get(x, "").split())
    for x, text in zip(("END", "WHY", "MORAL", "TITLE"), ABOUT[s.plot]):
        st[x] = text.format_map(st)
    st["when"] = st["time_l"]
    return st


def story_follow_up(rng: random.Random) -> Dialogue:
    """A story, then one to four of: a question, another name, longer, shorter, what came next, another story."""
    p, s = story_request(rng)
    msgs, check, gold = [user(p), assistant(s.text)], "none", ""
    lengths = 0
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        r = rng.random()
        f = _facts(s)
        if r < 0.58:
            forms, a, k, needs = rng.choice(_ASK if rng.random() < 0.75 else _ASK[:8])
            if needs and not any(x.format_map(f) in s.text for x in needs.split("|")):
                continue
            q = rng.choice(forms).format_map(f)
            msgs += [user(messy(rng, q[0].upper() + q[1:], 0.05, 0.02, " ".join((f["n"], f["f"], f["k"], f["fk"])))), assistant(a.format_map(f))]
            check, gold = "contains", k.format_map(f)
            continue
        if lengths > 2:
            break
        lengths += 1
        if r < 0.65:
            q, a, gold = rng.choice(_SHORTER + _SUM[:4]), s.summary, f["n"]
        elif r < 0.72:
            q, s = rng.choice(_LONGER), _extended(s, rng)
            a, gold = s.text, f["n"]
        elif r < 0.81:
            q, a, gold = rng.choice(_NEXT).format_map(f), _next_part(rng, s.state), f["n"]
        elif r < 0.90:
            m = person_name(rng, 0.25)
            if m in (f["n"], f["f"]):
                continue
            q = rng.choice(_RENAME).format_map({**f, "m": m})
            s = stories.changed(s, name=m)
            a, gold = s.text, m
        elif r < 0.94:
            k = rng.choice(stories.ANIMALS + stories.FANTASY + stories.HUMANS)
            if k in (f["k"], f["fk"], f["gk"]):
                continue
            q = rng.choice(_REKIND).format_map({**f, "ak2": article(k)})
            s = stories.changed(s, kind=k)
            a, gold = s.text, k
        else:
            q, s = rng.choice(_ANOTHER), stories.tell(rng)
            a, gold = s.text, s.state["n"]
            msgs += [user(messy(rng, q, 0.04, 0.02)), assistant(a)]
            check, gold = "story", ""
            continue
        msgs += [user(messy(rng, q, 0.0, 0.01, " ".join((f["n"], gold)))), assistant(a)]
        check = "story"
    return Dialogue("story_follow_up", [norm(p), norm(s.text)[:200]], msgs, check, gold)


# ---------------------------------------------------------------- stories that the user begins

_BEGIN = ["Continue: {t}", "continue: {t}", "Continue this story: {t}", "continue the story: {t}", "Go on with this story: {t}",
          "Finish this story: {t}", "Complete the story: {t}", "Write the rest of this story: {t}", "Continue the following story:\n\n{t}",
          "continue this:\n{t}",
          "What happens next? {t}", "Continue: \"{t}\"", "Please continue this story: {t}", "{t}\n\nContinue.", "{t} Continue the story.",
          "{t}\n\nWhat happens next?", "finish this: {t}", "Keep writing: {t}", "Can you continue this story? {t}", "complete this: {t}",
          "Go on: {t}", "Story: {t}", "I start a story, you go on. {t}"]
_PLACES = ["on the moon", "under the sea", "in an old shoe", "on a tiny island", "in the middle of the desert", "in a library",
           "in the attic of a big house", "in a teapot", "on the top of a mountain", "in a big city", "behind the school", "in a train station",
           "far away from everybody", "in space", "in a lighthouse",
           "in a kingdom by the sea", "near a volcano", "on a farm", "in a castle", "deep in the woods", "in a box under the bed",
           "next to the airport", "in the year 3000", "in a cold country", "in a garden full of roses"]
_WHO = ["who could not fly", "who loved the rain", "who was afraid of the dark", "who had never seen the sea", "who wanted to see the world",
        "who always lost things", "who had a big secret", "who could not sleep", "who dreamed of adventures", "who did not like cake",
        "with a very long nose", "with a red hat", "who collected stones",
        "who was always late", "who lived alone", "who sang all day", "who had no friends", "who wanted to be a cook", "who never spoke",
        "who could do magic", "with big ears", "who worked at night", "who was very {adj}"]
_NAMED = ["Once upon a time there was {ak} named {n}.", "Once upon a time there was {atk} named {n} {who}.", "There once was {ak} called {n} {who}.",
          "Once there lived {ak} {place}. {His} name was {n}.", "{n} was {ak} {who}.", "{n} the {k} lived {place}.", "My name is {n} and I am {ak}.",
          "This is {n}. {He} is {ak} {who}.",
          "{n} was {atk}. {He} lived {place}.", "Long ago, {ak} named {n} lived {place}.", "{n} the {k} woke up early.",
          "One day {n} the {k} found something strange {place}.", "There was a {k} named {n}, and {he} was very {trait}.",
          "{n}, {atk}, lived {place} and {did}.", "Everybody {place} knew {n}, the {k} {who}.",
          "Once upon a time, {place}, there lived {ak} named {n} {who}.", "It was a cold night, and {n} the {k} could not sleep.",
          "{n} opened the door and saw {agk}.", "{n} the {k} was walking to the {place2} when {he} heard a voice.",
          "Last summer {n} the {k} went to the {place2}.", "In a land far away, {ak} named {n} ruled {place}."]
_UNNAMED = ["Once upon a time there was {ak}.", "Once upon a time there was {atk} {who}.", "There once was {ak} {who}.",
            "Once upon a time, {atk} lived {place}.", "There was {ak} {place} {who}.", "Long ago there was {ak} {who}.",
            "The {k} woke up and looked around.", "The {k} opened the old door.", "A {trait} {k} lived {place}.",
            "The last {k} in the world sat {place}.", "Once there was {ak} {who}, and everyone laughed.", "One day, {ak} found a map.",
            "The {k} was alone {place}.", "Nobody had ever seen {ak} like this one.", "There was a little {k} who lived {place}.",
            "Once upon a time there was a little {k} {place} {who}."]
_MOOD = ["It was a dark and stormy night.", "It was a cold winter morning.", "The old house had been empty for years.",
         "Nobody remembered who had built the tower.", "The sun was going down over the {place2}.", "In a galaxy far, far away,",
         "The forest was silent.", "It was raining.", "It all began on a {day}.", "The letter came in the morning.",
         "Somebody knocked on the door.", "The train stopped in the middle of nowhere.", "A long time ago, in a small village,",
         "At midnight the clock struck thirteen.", "In the beginning there was only the sea.", "The last leaf fell from the tree.",
         "Suddenly the lights went out.", "There was a strange light in the sky.", "Deep in the ocean,", "High up in the mountains,"]
_OPEN_ENDS = ["Once upon a time there was a little {k}", "Once upon a time there was {ak}", "There once was {ak}", "Once upon a time, {atk}",
              "Long ago there lived {ak}", "once there was a {trait} {k}"]
_SUBJECTS = ["The {adj} {k}", "The old {k}", "The {k}", "A {adj} {k}", "The little {k}", "The {k} of the village", "My neighbor, the {k},",
             "The last {k}"]
_HAPPENED = ["heard a knock at the door", "woke up in the middle of the night", "found {at} {place}", "looked out of the window",
             "had lost {his} {t}", "walked through the rain", "saw a light in the forest", "received a letter", "lived all alone {place}",
             "had never left the village", "opened {at}", "was late for school",
             "sat down and began to cry", "laughed so loudly that everybody woke up", "was looking for {his} {t}", "wanted to go home",
             "could not remember {his} own name", "had a plan", "forgot to lock the door", "dreamed of {aa}", "met {aa} {place}",
             "stood {place} and waited", "stopped and listened"]
_SCENE = ["The {t} came in the evening.", "There was {at} on the table.", "Nobody had touched the {t} for years.", "The {adj} {t} was gone.",
          "It was {adj} and quiet {place}.", "The rain fell on the roof.", "The snow fell all night.", "One evening the {t} began to glow.",
          "Everything began with {at}.", "The house {place} was empty.", "The wind blew through the {adj} trees.",
          "Far away, {place}, a bell rang.", "The sun rose over the sea.", "That night the moon was red.", "All the clocks stopped at once.",
          "There was a knock, and then silence.", "The door was open.", "The {t} was not where it should have been.",
          "On the first day of winter, something strange happened."]
_DID = ["sang every morning", "baked bread all day", "counted the stars", "never left the house", "fished in the river", "painted little pictures",
        "talked to the birds"]
_ENTER = ["In {home}, {atk} named {n} could not sleep.", "{n}, {atk}, looked out of the window of {home}.",
          "That was when {atk} named {n} came along.", "{atk_c} named {n} sat in {home} and listened."]


def opening(rng: random.Random, s: dict) -> tuple[str, str]:
    """The beginning of a story as a user may write it, and the words that introduce the hero where it does not."""
    s = {**s, "place": rng.choice(_PLACES), "who": rng.choice(_WHO).format(adj=rng.choice(ADJECTIVES_WORDS)), "did": rng.choice(_DID),
         "day": rng.choice(("Monday", "Friday", "Sunday")), "atk_c": s["atk"][0].upper() + s["atk"][1:]}
    r = rng.random()
    if r < 0.5:
        return rng.choice(_NAMED).format_map(s), ""
    s |= {"adj": rng.choice(ADJECTIVES_WORDS), "t": (t := rng.choice(THINGS)), "at": article(t), "aa": article(rng.choice(stories.ANIMALS))}
    if r < 0.78:
        if rng.random() < 0.5:
            text = f"{rng.choice(_SUBJECTS)} {rng.choice(_HAPPENED)}.".format_map(s)
            return text, rng.choice(("The {k}'s name was {n}.", "{His} name was {n}.", "The {k} was called {n}.")).format_map(s)
        return rng.choice(_UNNAMED).format_map(s), rng.choice(("The {k}'s name was {n}.", "{His} name was {n}.",
            "The {k} was called {n}.")).format_map(s)
    if r < 0.9:
        return rng.choice(_MOOD + _SCENE).format_map(s), rng.choice(_ENTER).format_map(s)
    return rng.choice(_OPEN_ENDS).format_map(s), rng.choice(("named {n}. {He} lived in {home}.", "called {n}, who lived in {home}.",
        "whose name was {n}.")).format_map(s)


def continuation(rng: random.Random) -> Dialogue:
    """Goes on with a story that the user began, asked to or not."""
    s = stories.tell(rng, name=person_name(rng, 0.5) if rng.random() < 0.65 else None, kind=rng.choice((*ODD, any_word(rng))) if rng.random() < 0.25
                     else None)
    st = s.state
    if rng.random() < 0.25:  # a story of the model's own, cut after some sentence
        cuts = [m.end() for m in re.finditer(r"[.!?\"](?=\s)", s.text[:2 * len(s.text) // 3])]
        cut = rng.choice(cuts[:6])
        if s.text[:cut].count('"') % 2:
            cut = cuts[0]
        begun, rest = s.text[:cut], s.text[cut:].strip()
    else:
        begun, enter = opening(rng, st)
        if rng.random() < 0.2:
            begun = begun[0].lower() + begun[1:]
        if rng.random() < 0.15:
            begun = begun.rstrip(".")
        elif rng.random() < 0.15 and begun[-1] != ",":
            begun = begun.rstrip(".") + "..."
        rest = stories.realise(s.plot, st, s.seed, opening=enter).text
    asked = rng.choice(_BEGIN).format(t=begun) if rng.random() < 0.65 else begun
    named = st["n"] if st["n"].lower() in begun.lower() else ""
    return Dialogue("continuation", [norm(begun)], [user(asked), assistant(rest)], "story", named if named.lower() in rest.lower() else "")


# ---------------------------------------------------------------- offers taken up

_YES = ["yes", "yes please", "sure", "ok", "okay", "go ahead", "please do", "yeah", "yep", "of course", "yes!", "do it", "why not", "i'd love that",
        "alright", "go on", "y", "sounds good", "great, do it", "tell me", "please", "yes, go on", "gladly", "Yes, please!", "sure, why not",
        "ok then", "fine", "yes i would", "absolutely", "let's hear it", "ja", "oui", "si", "yup", "ok do that", "I'd like that",
        "that would be nice", "good idea"]
_NO = ["no", "no thanks", "nope", "not now", "rather not", "no, thank you", "nah", "maybe later", "i don't want that", "something else", "no!",
       "not really"]
_DONE = {"17 + 25": "17 + 25 = 42", "sort 7, 3, 9, 1": "1, 3, 7, 9", "how many r's in strawberry?": "s-t-r(1)-a-w-b-e-r(2)-r(3)-y: r appears 3 times",
         "what is the capital of Japan?": "The capital of Japan is Tokyo.", "spell banana backwards": "b-a-n-a-n-a backwards is a-n-a-n-a-b",
         "what is 34 x 12?": "34 × 12 = 34 × 10 + 34 × 2 = 340 + 68 = 408", "name three fruits": "Apple, banana, cherry",
         "what is the opposite of hot?": "The opposite of hot is cold.", "translate hello into French": "Hello in French is bonjour.",
         "which is bigger, 87 or 78?": "87 is bigger than 78."}


def _fulfilled(rng: random.Random, said: str, asked: str) -> str:
    """What the model offered in its last sentence."""
    if m := re.search(r"(?:story|one) about (an? [a-z ]+?|one|it|somebody)(?:[?,.\"]|$| who)", said):
        kind = m[1].split(" ", 1)[-1]
        if kind in ("one", "it", "somebody"):
            found = [a for a in stories.ANIMALS if re.search(rf"\b{a}s?\b", (asked + " " + said).lower())]
            kind = found[0] if found else None
        return stories.tell(rng, kind=kind).text
    if m := re.search(r"poem about ([^?\".]+)", said):
        return verse.poem_text(rng, m[1])
    if "haiku about the sea" in said:
        return verse.haiku_text(rng, "the sea")
    for suggestion, answer in _DONE.items():
        if suggestion in said:
            return answer
    if "joke" in said and "story" not in said:
        return rng.choice(verse.JOKES)
    if m := re.search(r"spell (\S+) backwards", said):
        return f"{'-'.join(m[1])} backwards is {'-'.join(reversed(m[1]))}"
    return stories.tell(rng).text if "story" in said else ""


def offer_taken(rng: random.Random) -> Dialogue:
    """The model offers something, and the user says yes or no."""
    while True:
        d = rng.choice((beyond.refusal, beyond.refusal, smalltalk.small_talk, smalltalk.small_talk, textwork.statement, knowledge.knowledge))(rng)
        said = d.messages[-1]["content"]
        text = _fulfilled(rng, said, d.messages[-2]["content"])
        if text:
            break
    if rng.random() < 0.12:
        reply = rng.choice(["All right. What would you like instead?", "No problem. What else can I do for you?",
                            "Then not. Perhaps a sum, a list to sort or a word to spell?"])
        return Dialogue("offer_taken", d.keys, d.messages + [user(messy(rng, rng.choice(_NO), 0.03, 0.02)), assistant(reply)], "none")
    return Dialogue("offer_taken", d.keys, d.messages + [user(messy(rng, rng.choice(_YES), 0.03, 0.02)), assistant(text)], "none")
