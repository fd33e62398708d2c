"""Results of tools in every form that programs give them: compact or pretty JSON, nested, lists, numbers as text, plain text, errors."""

import json
import random

from words import any_word, article, city_name, noun, person_name, pseudo_word, ANIMALS, THINGS

# The same fact under other keys.
_KEYS = {"temperature": ["temp", "temp_c", "temperature_c", "degrees", "temperature_2m", "t"], "sky": ["conditions", "condition", "description",
    "weather", "summary", "forecast"], "result": ["value", "answer", "output", "sum", "total"],
         "time": ["local_time", "current_time", "now"], "price": ["cost", "amount", "value", "price_usd"], "departure": ["next_departure", "departs",
             "leaves_at"], "translation": ["translated", "text", "translatedText"], "content": ["text", "data", "body"],
         "meaning": ["definition", "def", "description"], "id": ["user_id", "number"], "order": ["order_id", "order_number", "id"],
         "results": ["items", "hits", "documents"], "ok": ["success", "done"]}
_EXTRA = [("source", lambda r: r.choice(("cache", "api", "local"))), ("id", lambda r: r.randrange(10000)), ("timestamp", lambda r: r.randrange(10**9,
    2 * 10**9)), ("status", lambda r: r.choice(("ok", "success", 200))), ("took_ms", lambda r: r.randrange(1, 900)),
          ("error", lambda r: None), ("cached", lambda r: r.random() < 0.5), ("version", lambda r: "1." + str(r.randrange(9))), ("humidity",
              lambda r: r.randrange(10, 100)), ("wind", lambda r: r.randrange(0, 90)), ("unit", lambda r: r.choice(("C", "celsius", "metric")))]
_TROUBLE = ["city not found", "timeout", "not found", "permission denied", "no such file", "service unavailable", "invalid argument",
            "too many requests", "no connection", "unknown place", "internal error", "access denied", "the server is busy", "missing parameter",
            "rate limit exceeded", "not allowed"]


def as_text(rng: random.Random, value: object) -> str:
    """JSON in one of the usual styles."""
    r = rng.random()
    if r < 0.3:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if r < 0.55:
        return json.dumps(value, ensure_ascii=False, indent=rng.choice((2, 2, 4)))
    return json.dumps(value, ensure_ascii=rng.random() < 0.2)


def wrapped(rng: random.Random, value: object) -> object:
    """The value inside another object or a list, or as it is."""
    r = rng.random()
    if r < 0.62:
        return value
    return rng.choice([{"result": value}, {"data": value}, {"status": "ok", "data": value}, {"response": value}, [value], {"ok": True,
        "result": value}, {"results": [value]}, {"output": value, "error": None}, {"success": True, "payload": value},
                       {"content": [{"type": "text", "text": json.dumps(value, ensure_ascii=False)}]}])


def dressed(rng: random.Random, result: dict) -> dict:
    """The same facts under other keys, as text, in another order, among facts that nobody asked for."""
    out = {}
    for k, v in result.items():
        k = rng.choice(_KEYS[k]) if k in _KEYS and rng.random() < 0.45 else k
        if isinstance(v, (int, float)) and not isinstance(v, bool) and rng.random() < 0.2:
            v = str(v)
        out[k] = v
    for name, make in rng.sample(_EXTRA, rng.choice((0, 0, 0, 1, 1, 2, 3))):
        if name not in out and not (name == "id" and {"id", "order"} & set(result)):
            out[name] = make(rng)
    if rng.random() < 0.3:
        keys = list(out)
        rng.shuffle(keys)
        out = {k: out[k] for k in keys}
    return out


def trouble(rng: random.Random) -> tuple[str, str]:
    """A result that says that something went wrong, and what the model says then."""
    m = rng.choice(_TROUBLE) if rng.random() < 0.7 else f"{any_word(rng, 0.3)} {any_word(rng, 0.3)}"
    form = rng.choice([{"error": m}, {"error": m}, {"error": {"message": m, "code": rng.choice((400, 403, 404, 429, 500, 503))}}, {"ok": False,
        "error": m}, {"status": "error", "message": m}, {"success": False, "reason": m}, {"code": 404, "message": m},
                       {"error": m, "result": None}, f"Error: {m}", f"error: {m}", f"Failed: {m}", f"ERROR {m}", f"Exception: {m}"])
    return form if isinstance(form, str) else as_text(rng, form), f"Sorry, that did not work: {m}."


def weather(rng: random.Random, city: str, deg: int, sky: str, unit: str = "") -> tuple[str, str]:
    """A weather result that may lack the sky, be a sentence or carry its unit, and the sentence that tells it."""
    said = f"{deg} degrees{' ' + unit if unit else ''}"
    r = rng.random()
    if r < 0.3:
        key = rng.choice(["temp", "temperature", "temp", "temp_c", "degrees", "temperature_c", "value", "celsius"])
        v = rng.choice((deg, deg, deg, str(deg)))
        value = {key: v}
        if rng.random() < 0.3:
            value = {**rng.choice(({"city": city}, {"location": city}, {"place": city})), **value}
        return as_text(rng, wrapped(rng, value)), f"It is {said} in {city}."
    if r < 0.4:
        t = rng.choice((f"{deg}°C", f"{deg} °C", f"{deg}°F", f"{deg} C", f"{deg}C", f"{deg:.0f}.{rng.randrange(10)}"))
        return rng.choice((t, as_text(rng, {"temperature": t}), as_text(rng, {"temp": t}))), f"It is {t} in {city}."
    if r < 0.5:
        return rng.choice((sky, as_text(rng, {rng.choice(_KEYS["sky"]): sky}), as_text(rng, {"city": city,
            "weather": sky}))), f"It is {sky} in {city}."
    if r < 0.62:
        text = rng.choice([f"{deg} degrees, {sky}", f"{sky}, {deg} degrees", f"{deg}, {sky}", f"The temperature is {deg} degrees and it is {sky}.",
                           f"{city}: {deg} degrees and {sky}", f"temperature: {deg}\nsky: {sky}", f"temp={deg} sky={sky}", f"{sky} {deg}"])
        return text, f"It is {said} and {sky} in {city}."
    value = {"temperature": deg, "sky": sky}
    if rng.random() < 0.2:
        value = {"current": value} if rng.random() < 0.5 else {"main": {"temp": deg}, "weather": [{"description": sky}]}
        return as_text(rng, value), f"It is {said} and {sky} in {city}."
    return as_text(rng, wrapped(rng, dressed(rng, value))), f"It is {said} and {sky} in {city}."


def told(rng: random.Random, result: object, final: str) -> tuple[str, str]:
    """A result as text and the sentence that tells it."""
    if rng.random() < 0.1:
        return trouble(rng)
    if result == {"ok": True} and rng.random() < 0.5:
        return rng.choice(("ok", "OK", "done", "Done.", "success", "true", as_text(rng, {"status": "ok"}), as_text(rng, {"success": True}),
                           as_text(rng, {"status": "success", "id": rng.randrange(10000)}), as_text(rng, {"result": "ok"}), "{}", "null", "")), final
    if isinstance(result, dict) and len(result) == 1 and rng.random() < 0.2:
        value = next(iter(result.values()))
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return str(value), final
    if isinstance(result, dict) and rng.random() < 0.75:
        return as_text(rng, wrapped(rng, dressed(rng, result))), final
    return json.dumps(result, ensure_ascii=False), final


# ---------------------------------------------------------------- tools of every purpose

_ATTRIBUTES = """price height weight age color size owner status population temperature speed distance address phone email balance score rank rating title author date length width
capacity model version language country currency salary birthday level volume stock quantity location name description category duration frequency humidity pressure mileage""".split()
_ENTITIES = """city book user order stock player country car recipe team movie song product employee customer server device room package flight hotel restaurant planet
animal mountain river company account ticket sensor battery house school game file project task student building bridge ship""".split()
_ACTIONS = {"delete": "deleted", "archive": "archived", "close": "closed", "open": "opened", "start": "started", "stop": "stopped", "lock": "locked",
            "unlock": "unlocked", "restart": "restarted", "cancel": "cancelled", "print": "printed", "share": "shared", "download": "downloaded",
            "upload": "uploaded", "save": "saved", "book": "booked", "reserve": "reserved", "check": "checked", "clean": "cleaned",
            "repair": "repaired", "paint": "painted", "move": "moved", "rename": "renamed", "copy": "copied", "pause": "paused",
            "publish": "published", "install": "installed"}
_OBJECTS = "file door meeting order ticket server window printer task note photo account document room table folder page report video machine project backup garage car light".split()
_LEVELS = "brightness volume temperature speed level intensity height power".split()
_DEVICES = "lamp light heater fan radio speaker screen oven kettle blinds motor robot television thermostat pump".split()


def _spec(name: str, description: str, params: dict[str, tuple[str, str]]) -> dict:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": {k: {"type": t, "description": d} for k, (t, d) in params.items()}, "required": list(params)}}}


def _cased(rng: random.Random, *parts: str) -> str:
    return "_".join(parts) if rng.random() < 0.7 else parts[0] + "".join(p.capitalize() for p in parts[1:])


def _value(rng: random.Random) -> str:
    return rng.choice((person_name(rng, 0.5), city_name(rng), any_word(rng), f"{any_word(rng)} {any_word(rng)}", pseudo_word(rng).capitalize(),
                       str(rng.randrange(10, 99999)), f"{any_word(rng)}{rng.randrange(100)}"))


def made_up_case(rng: random.Random) -> tuple[dict, str, dict, object, str]:
    """A tool for some purpose or other: (tool, request, arguments, result, final answer)."""
    r = rng.random()
    v = _value(rng)
    if r < 0.45:
        attr = rng.choice(_ATTRIBUTES) if rng.random() < 0.8 else any_word(rng, 0.3)
        ent = rng.choice(_ENTITIES) if rng.random() < 0.8 else rng.choice((rng.choice(ANIMALS), rng.choice(THINGS), any_word(rng, 0.3)))
        name = rng.choice([_cased(rng, "get", attr), _cased(rng, "get", ent, attr), _cased(rng, ent, attr), _cased(rng, "lookup", attr), _cased(rng,
            "fetch", ent, attr), _cased(rng, "find", attr), attr])
        param = rng.choice([ent, f"{ent}_name", "name", f"{ent}_id", "id", "query"])
        shown: object = v
        kind = "string"
        if v.isdigit() and param.endswith("id") and rng.random() < 0.7:
            shown, kind = int(v), "integer"
        got = rng.choice((rng.randrange(1, 100000), rng.randrange(1, 300), any_word(rng), _value(rng), f"{rng.randrange(1, 900)} {any_word(rng)}"))
        q = rng.choice([f"What is the {attr} of {v}?", f"what's the {attr} of {v}", f"{attr} of {v}", f"Get the {attr} of {v}.",
                        f"Tell me the {attr} of the {ent} {v}.", f"What is the {attr} of the {ent} {v}?", f"look up the {attr} of {v}",
                        f"find the {attr} for {v}",
                        f"I need the {attr} of {v}", f"show me the {attr} of {ent} {v}", f"{v} {attr}"])
        tool = _spec(name, rng.choice([f"Get the {attr} of {article(ent)}", f"Returns the {attr} of the given {ent}",
                                       f"Look up the {attr} of {article(ent)}", f"The {attr} of {article(ent)}"]), {param: (kind,
                                           rng.choice([f"The {ent}", f"Name of the {ent}", f"Which {ent}", f"Identifier of the {ent}"]))})
        return tool, q, {param: shown}, {attr: got}, f"The {attr} of {v} is {got}."
    if r < 0.75:
        verb, done = rng.choice(list(_ACTIONS.items()))
        obj = rng.choice(_OBJECTS) if rng.random() < 0.85 else any_word(rng, 0.2)
        param = rng.choice([obj, "name", f"{obj}_name", "id", "target"])
        q = rng.choice([f"{verb.capitalize()} the {obj} {v}.", f"{verb} {obj} {v}", f"Please {verb} the {obj} {v}.", f"can you {verb} the {obj} {v}?",
                        f"I want to {verb} the {obj} {v}", f"{verb} {v}"])
        tool = _spec(_cased(rng, verb, obj), rng.choice([f"{verb.capitalize()} {article(obj)}", f"{verb.capitalize()}s {article(obj)} by name",
                                                         f"{verb.capitalize()} the given {obj}"]), {param: ("string", rng.choice([f"Which {obj}",
                                                             f"The {obj} to {verb}", f"Name of the {obj}"]))})
        return tool, q, {param: v}, {"ok": True}, f"Done: the {obj} {v} is {done}."
    if r < 0.9:
        level, dev, n = rng.choice(_LEVELS), rng.choice(_DEVICES), rng.randrange(0, 101)
        room = rng.choice(["kitchen", "bedroom", "garage", "garden", "bathroom", "office", "living room", "hall"])
        where = rng.choice((dev, room))
        param, amount = rng.choice(("device", "name", "target") if where == dev else ("room", "location", "place")), rng.choice((level, "level",
            "value", "percent", "amount"))
        thing = f"the {dev}" if where == dev else f"the {dev} in the {room}"
        q = rng.choice([f"Set the {level} of {thing} to {n}.", f"set {thing} to {n} percent", f"Set {thing} to {n}%.", f"{dev} {level} {n}"
                        if where == dev else f"{room} {dev} {level} {n}", f"turn {thing} to {n}", f"Change the {level} of {thing} to {n}",
                        f"please set {thing} to {n} percent", f"dim {thing} to {n} percent"])
        tool = _spec(rng.choice([_cased(rng, "set", level), _cased(rng, "set", dev, level), _cased(rng, "change", level), _cased(rng, dev, level)]),
                     rng.choice([f"Set the {level} of {article(dev)}", f"Change the {level} of {article(dev)}", f"Sets {level} in percent"]),
                     {param: ("string", f"Which {param}"), amount: (rng.choice(("integer", "number")), f"The {level}")})
        return tool, q, {param: where, amount: n}, {"ok": True}, f"Done: {thing} is set to {n}."
    to, text = person_name(rng, 0.3), rng.choice(["I will be late", f"See you on {rng.choice(('Monday', 'Friday', 'Sunday'))}",
                                                  f"The {noun(rng, THINGS)} is ready", "please call me", f"bring {article(rng.choice(THINGS))}",
                                                  f"{any_word(rng)} {any_word(rng)} {any_word(rng)}"])
    who, what = rng.choice(("to", "recipient", "address")), rng.choice(("body", "text", "message", "content"))
    q = rng.choice([f"Send an email to {to}: {text}", f"email {to}: {text}", f"Write a mail to {to}: {text}", f"mail {to}: {text}",
                    f"Send {to} an email that says: {text}", f"send a mail to {to}: {text}"])
    tool = _spec(rng.choice([_cased(rng, "send", "email"), _cased(rng, "send", "mail"), "email", _cased(rng, "mail", "person")]),
                 rng.choice(["Send an email", "Sends a mail to a person", "Write an email to somebody"]), {who: ("string", "Who gets it"),
                     what: ("string", "The text")})
    return tool, q, {who: to, what: text}, {"ok": True}, f"I sent the email to {to}."
