"""Tools that the prompt declares: when to call them, with which arguments, and how to tell a result of any form."""

import json
import random
import re

import results
import tasks
from chat import PLAIN_SYSTEM
from dialogue import Dialogue, assistant, norm, system, user
from knowledge import knowledge
from smalltalk import small_talk
from tasks import rough
from words import DAYS, THINGS, any_word, article, city_name, noun, person_name

_TONGUES = "French German Spanish Italian Chinese Japanese Russian Arabic Latin Greek Polish Dutch Turkish Hindi Korean".split()


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
    room, what = rng.choice(["kitchen", "bedroom", "garage", "garden", "bathroom", "office"]), rng.choice(["concert", "meeting", "picnic", "lesson",
        "party", "dinner"])
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
                    {P: ("string", c(["The city", "City name", "The city and state, e.g. San Francisco, CA",
                                      "City and country e.g. Paris, France"]))})
    weather_unit = json.loads(json.dumps(weather))
    weather_unit["function"]["parameters"]["properties"]["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    amount, query = rng.randrange(1, 5000), " ".join(any_word(rng, 0.2) for _ in range(rng.randrange(1, 5)))
    money = rng.sample(["dollars", "euros", "pounds", "yen", "USD", "EUR", "GBP", "JPY"], 2)
    steps, way = rng.randrange(1, 30), c(["left", "right", "forward", "back", "up", "down"])
    path = c(["", "/tmp/", "data/", "docs/"]) + any_word(rng, 0.2) + c([".txt", ".json", ".csv", ".md"])
    tongue, op = c(_TONGUES), c("+-*/")
    return [
        (weather_unit, c([f"What's the weather like in {where} in {unit}?", f"weather in {where} in {unit}",
                          f"How warm is it in {where}? Use {unit}."]),
         {P: where, "unit": unit}, {"temperature": deg, "unit": unit, "sky": sky}, f"It is {deg} degrees {unit} and {sky} in {where}."),
        (weather_unit, c([f"What's the weather like in {where}?", f"What is the weather like in {where} today?", f"weather {where}"]),
         {P: where}, {"temperature": deg, "sky": sky}, f"It is {deg} degrees and {sky} in {where}."),
        (_tool(c(["search", "web_search", "search_web"]), "Search the web", {c(["query", "q"]): ("string", "What to search for")}),
         c([f"Search for {query}.", f"search the web for {query}", f"google {query}", f"Find information about {query}."]),
         {"query": query}, {"results": [f"All about {query}"]}, f"I found this: All about {query}."),
        (_tool(c(["convert_currency", "currency"]), "Convert an amount of money", {"amount": ("number", "How much"), "from": ("string",
            "From currency"), "to": ("string", "To currency")}),
         c([f"Convert {amount} {money[0]} to {money[1]}.", f"How much is {amount} {money[0]} in {money[1]}?", f"{amount} {money[0]} in {money[1]}"]),
         {"amount": amount, "from": money[0], "to": money[1]}, {"result": x}, f"{amount} {money[0]} are {x} {money[1]}."),
        (_tool(c(["calculate", "calculator", "evaluate"]), "Calculate an expression", {"expression": ("string", "The expression")}),
         c([f"What is {x} {op} {y}?", f"{x} {op} {y}", f"Calculate {x} {op} {y}."]), {"expression": f"{x} {op} {y}"}, {"result": y},
         f"The result is {y}."),
        (_tool(c(["move", "move_robot", "go"]), "Move the robot", {"direction": ("string", "Where to"), "steps": ("integer", "How many steps")}),
         c([f"Go {steps} steps {way}.", f"Move {way} {steps} steps.", f"{steps} steps {way} please"]), {"direction": way, "steps": steps},
         {"ok": True}, f"I went {steps} steps {way}."),
        (_tool(c(["read_file", "open_file", "cat_file"]), "Read a file", {c(["path", "filename", "file"]): ("string", "Path of the file")}),
         c([f"Read {path}.", f"Open the file {path}", f"What is in {path}?", f"show me {path}"]), {"path": path}, {"content": query},
         f"The file says: {query}"),
        (_tool(c(["translate", "translate_text"]), "Translate a text", {"text": ("string", "The text"), "language": ("string", "Target language")}),
         c([f"Translate {query} to {tongue}.", f"How do you say {query} in {tongue}?", f"translate {query} into {tongue}"]),
         {"text": query, "language": tongue}, {"translation": word}, f"In {tongue} it is {word}."),
        (_tool(c(["get_time", "current_time", "time_in"]), "Get the local time in a city", {P: ("string", "The city")}),
         c([f"What time is it in {city}?", f"time in {city}", f"Tell me the time in {city}."]), {P: city}, {"time": hour},
         f"It is {hour} in {city}."),
        (_tool(c(["create_user", "add_user", "register"]), "Register a person", {"name": ("string", "Name"), "age": ("integer", "Age in years"),
            "city": ("string", "Home city")}),
         c([f"Register {n}, {minutes} years old, from {city}.", f"Add {n} from {city}, age {minutes}.",
            f"{n} is {minutes} and lives in {city}. Please add this user."]),
         {"name": n, "age": minutes, "city": city}, {"id": x}, f"I registered {n} with the number {x}."),
        (weather,
         c([f"What is the weather in {city}?", f"how is the weather in {city}", f"Is it cold in {city}?", f"weather {city}",
            f"Do I need an umbrella in {city}?"]),
         {P: city}, {"temperature": deg, "sky": sky}, f"It is {deg} degrees and {sky} in {city}."),
        (_tool(c(["set_timer", "start_timer", "timer"]), "Start a timer", {"minutes": ("integer", "Number of minutes")}),
         c([f"Set a timer for {minutes} minutes.", f"timer {minutes} minutes", f"wake me in {minutes} minutes", f"Start a {minutes} minute timer."]),
         {"minutes": minutes}, {"ok": True}, f"The timer is set for {minutes} minutes."),
        (_tool(c(["calculator", "add_numbers", "calculate_sum"]), "Add two numbers", {"a": ("integer", "First number"), "b": ("integer",
            "Second number")}),
         c([f"What is {x} + {y}?", f"{x}+{y}", f"Add {x} and {y}.", f"how much is {x} plus {y}"]), {"a": x, "b": y}, {"result": x + y},
         f"{x} + {y} = {x + y}"),
        (_tool(c(["send_message", "send_text", "message"]), "Send a message to a person", {"to": ("string", "Name of the person"), "text": ("string",
            "The message")}),
         c([f"Send a message to {n}: {text}", f"Write to {n}: {text}", f"Text {n}: {text}", f"tell {n}: {text}"]), {"to": n, "text": text},
         {"ok": True}, f"I sent the message to {n}."),
        (_tool(c(["add_event", "create_event", "calendar_add"]), "Put an event into the calendar",
               {"title": ("string", "What it is"), "day": ("string", "Day of the week"), "time": ("string", "Time of day")}),
         c([f"Put a {what} on {day} at {hour} in my calendar.", f"I have a {what} on {day} at {hour}. Please add it.", f"add {what} {day} {hour}"]),
         {"title": what, "day": day, "time": hour}, {"ok": True}, f"The {what} is in your calendar on {day} at {hour}."),
        (_tool(c(["search_trains", "find_train", "train_times"]), "Find trains between two cities", {"from": ("string", "Start"), "to": ("string",
            "Destination")}),
         c([f"When does a train go from {a} to {b}?", f"trains from {a} to {b}", f"I want to go from {a} to {b} by train.",
            f"Find a train to {b} from {a}."]),
         {"from": a, "to": b}, {"departure": hour}, f"The next train from {a} to {b} leaves at {hour}."),
        (_tool(c(["switch_light", "set_light", "light"]), "Turn a light on or off", {"room": ("string", "The room"), "state": ("string",
            "on or off")}),
         c([f"Turn {state} the light in the {room}.", f"{room} light {state}", f"Please switch the {room} light {state}."]), {"room": room,
             "state": state}, {"ok": True}, f"The light in the {room} is {state}."),
        (_tool(c(["get_price", "price_of", "lookup_price"]), "Look up the price of an item", {"item": ("string", "The item")}),
         c([f"How much does {article(item)} cost?", f"price of {article(item)}", f"What is the price of {article(item)}?"]), {"item": item},
         {"price": price}, f"{article(item).capitalize()} costs {price} dollars."),
        (_tool(c(["order_item", "place_order", "buy"]), "Order items from the shop", {"item": ("string", "The item"), "quantity": ("integer",
            "How many")}),
         c([f"Order {q + 1} {item}s.", f"Buy {q + 1} {item}s please", f"I need {q + 1} {item}s. Order them."]), {"item": item, "quantity": q + 1},
         {"order": rng.randrange(100, 999)}, f"I ordered {q + 1} {item}s."),
        (_tool(c(["play_song", "play_music"]), "Play a song", {"title": ("string", "Title of the song")}),
         c([f"Play {song}.", f"play the song {song}", f"I want to hear {song}."]), {"title": song}, {"ok": True}, f"Playing {song}."),
        (_tool(c(["lookup_word", "dictionary", "define_word"]), "Look up a word in the dictionary", {"word": ("string", "The word")}),
         c([f"What does {word} mean?", f"define {word}", f"Look up {word}."]), {"word": word}, {"meaning": f"{article(rng.choice(THINGS))}"}, ""),
        (_tool(c(["call_person", "phone_call"]), "Call a person on the phone", {"name": ("string", "Name of the person")}),
         c([f"Call {m}.", f"phone {m}", f"I want to talk to {m} on the phone."]), {"name": m}, {"ok": False}, f"I could not reach {m}."),
    ]


_UNUSED = {"limit": {"type": "integer", "description": "Most results"}, "verbose": {"type": "boolean"}, "note": {"type": "string",
    "description": "A note"},
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
    words = set(re.sub("([A-Z])", r"_\1", function["name"]).lower().split("_")) - {"get", "set", "add", "find", "fetch", "lookup"}
    words |= {"level"} if re.match("(Set|Change|Sets) ", function["description"]) else set()
    return words | ({"calculation"} if re.search("two numbers|expression", function["description"]) else set())


def _told(rng: random.Random, args: dict, result: object, final: str) -> tuple[str, str]:
    """The result as text in some form, and the answer that tells it."""
    if isinstance(result, dict) and {"sky", "temperature"} <= set(result) and rng.random() < 0.8:
        if rng.random() < 0.12:
            return results.trouble(rng)
        return results.weather(rng, next(iter(args.values())), result["temperature"], result["sky"], result.get("unit", ""))
    if rng.random() < 0.25:
        return json.dumps(result), final
    return results.told(rng, result, final)


def tools(rng: random.Random) -> Dialogue:
    """1–4 tools in the prompt; one or two requests: a call, sometimes its result and the answer, or one that needs no tool."""
    while True:
        cases = rng.sample(_tool_cases(rng), rng.choice((1, 1, 2, 2, 3, 4)))
        cases = [results.made_up_case(rng) if rng.random() < 0.3 else c for c in cases]
        purposes = [_purpose(c[0]["function"]) for c in cases]
        if all(not a & b for i, a in enumerate(purposes) for b in purposes[:i]):
            break
    specs = [_decorated(rng, c[0]) for c in cases]
    msgs = [system(rng.choice(PLAIN_SYSTEM))] if rng.random() < 0.3 else []
    keys, check, gold = [], "exact", ""
    for _ in range(rng.choice((1, 1, 1, 2))):
        r = rng.random()
        if r < 0.1:
            d = rng.choice((small_talk, small_talk, knowledge))(rng)
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
            shown, final = _told(rng, args, result, final)
            msgs += [{"role": "tool", "content": shown}, assistant(final)]
            check = "exact"
        else:
            break
    return Dialogue("tools", keys, msgs, check, gold, specs)
