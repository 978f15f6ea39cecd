# ruff: noqa: SIM905  (word lists read better as text)
"""Generate functions, questions that need them, their calls and results, and answers that use the results.

Names of functions and arguments, descriptions, values and the form of results vary, so that only copying helps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from random import Random
from typing import Any

from chatcache.demo_model.training import skills
from chatcache.demo_model.training.wording import (
    CITIES,
    FOODS,
    MONTHS,
    NAMES,
    SPELLABLE,
    ask,
    held_out,
    invent,
    pick,
    say,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a function: its JSON type, or the values it may have."""

    name: str
    type: str = "string"
    values: tuple[str, ...] = ()
    required: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the assistant may call."""

    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()

    def line(self) -> str:
        """Return the line that the chat template writes for this function."""
        arguments = ", ".join(
            f'"{each.name}"{"" if each.required else "?"}: '
            + ("|".join(f'"{value}"' for value in each.values) or each.type)
            for each in self.parameters
        )
        line = f'{{"name": "{self.name}", "arguments": {{{arguments}}}}}'
        return f"{line} {self.description}" if self.description else line

    def schema(self) -> dict[str, Any]:
        """Return the function as clients of the OpenAI API declare it."""
        properties = {
            each.name: {"type": each.type, "enum": list(each.values)} if each.values else {"type": each.type}
            for each in self.parameters
        }
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [each.name for each in self.parameters if each.required],
            "additionalProperties": False,
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters, "strict": True}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A question that needs calls of one function, the results of these calls, and the answer."""

    user: str
    calls: tuple[dict[str, Any], ...]
    results: tuple[str, ...] = ()
    answer: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A function, and the questions that need it: `ask(rng, held)` draws one, with unseen values if `held`."""

    kind: str
    tool: Tool
    ask: Callable[[Random, bool], Task]


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def _function_name(rng: Random, verbs: str, nouns: str, held: bool) -> str:
    """Compose a function's name; a few have an invented word in them."""
    while True:
        words = [rng.choice(verbs.split()), *rng.choice(nouns.split()).split("_")]
        if rng.random() < 0.04:
            words[0] = invent(rng, "function").lower()
        words = [word for word in words if word != "-"]
        style = rng.random()
        if style < 0.75:
            name = "_".join(words)
        elif style < 0.9:
            name = words[0] + "".join(word.capitalize() for word in words[1:])
        else:
            name = "".join(word.capitalize() for word in words)
        if held_out("function", name) == held:
            return name


def _argument(rng: Random, names: str) -> str:
    return rng.choice(names.split()) if rng.random() < 0.96 else invent(rng, "argument").lower()


def _described(rng: Random, descriptions: str) -> str:
    text = rng.choice((*descriptions.split("|"), "")) if rng.random() < 0.5 else rng.choice(descriptions.split("|"))
    return text.rstrip(".") if rng.random() < 0.2 else text


LONG_CITIES = (
    "New York|San Francisco|Los Angeles|Hong Kong|Buenos Aires|Cape Town|New Delhi|Rio de Janeiro|Mexico City|Tel Aviv|"
    "Zürich|Bogotá|São Paulo|Málaga|Köln|Kraków|San Francisco, CA|Paris, France|Boston, MA|Tokyo, Japan|Berlin, Germany"
).split("|")


def place(rng: Random, held: bool) -> str:
    """Draw a city: a held-out one if `held`, else one for training."""
    if held:
        return invent(rng, "city", held=True)
    choice = rng.random()
    if choice < 0.12:
        return rng.choice(LONG_CITIES)
    if choice < 0.22:
        return f"{invent(rng, 'city')}{rng.choice((' ', ', ', '-'))}{invent(rng, 'city')}"
    city = pick(rng, "city", CITIES, invented=0.6)
    return city.lower() if rng.random() < 0.1 else city


def _number(rng: Random) -> str:
    number = rng.choice((rng.randint(-9, 39), rng.randint(0, 99), rng.randint(100, 9999)))
    return f"{number}.{rng.randint(1, 9)}" if rng.random() < 0.2 else str(number)


ERRORS = "not found|timeout|unknown city|no connection|the service is down|invalid argument|too many requests"
CONDITIONS = (
    "sunny|cloudy|rainy|foggy|windy|snowing|clear|stormy|raining|warm and dry|cold|partly cloudy|light rain|hot"
)
NOTES = (
    "{a} is in {b}.|the {a} is closed today|{a} and {b}|{b}: {a}|The {a} opens at {n}.|It is {a} today.|"
    "{n} results for {a}|{a} was seen near {b}|see {a}, page {n}|no {a} today, but {n} {b}"
)


def note(rng: Random) -> str:
    """Return a short text that a function may return."""
    words = [rng.choice(SPELLABLE) if rng.random() < 0.6 else invent(rng, "note") for _ in range(2)]
    return say(rng, NOTES, a=words[0], b=words[1], n=rng.randint(1, 99))


def _found(rng: Random) -> tuple[str, str]:
    """Return a result of no special form, and the answer: an error, an object, or a text."""
    choice = rng.random()
    if choice < 0.2:
        error = rng.choice(ERRORS.split("|"))
        result = json.dumps({"error": error}) if rng.random() < 0.5 else f"error: {error}"
        return result, f"The tool reported an error: {error}."
    if choice < 0.5:
        pairs = {
            rng.choice(SPELLABLE) if rng.random() < 0.7 else invent(rng, "key").lower(): rng.choice(
                (rng.randint(0, 999), rng.choice(SPELLABLE), invent(rng, "value"))
            )
            for _ in range(rng.randint(1, 3))
        }
        return json.dumps(pairs), "Here is what I found: " + ", ".join(f"{k} {v}" for k, v in pairs.items()) + "."
    text = note(rng)
    return text, f"Here is what I found: {text}"


def _one_or_two(
    rng: Random, held: bool, draw: Callable[[Random, bool], str], name: str, questions: str,
    reply: Callable[[Random, str], tuple[str, str]], extra: dict[str, Any] | None = None,
) -> Task:  # fmt: skip
    """Return a task about one value, or about two with one call for each."""
    values = [draw(rng, held) for _ in range(2 if not held and rng.random() < 0.12 else 1)]
    replies = [reply(rng, value) for value in values]
    user = ask(rng, questions, v=rng.choice((" and ", " and in " if "in {v}" in questions else " and ")).join(values))
    return Task(
        user,
        tuple({name: value, **(extra or {})} for value in values),
        tuple(result for result, _ in replies),
        " ".join(answer for _, answer in replies),
    )


WEATHER_QUESTIONS = (
    "what is the weather in {v}?|how is the weather in {v}?|what is the weather like in {v}?|weather in {v}|"
    "what is the weather like in {v} today?|is it raining in {v}?|is it cold in {v}?|how warm is it in {v}?|"
    "what is the temperature in {v}?|temperature in {v}|how is the weather in {v} right now?|weather {v}|"
    "do i need an umbrella in {v}?|tell me the weather in {v}|is it sunny in {v} now?|what is the forecast for {v}?|"
    "how hot is it in {v} today?|i am in {v}. how is the weather?|check the weather in {v}|weather in {v} today?|"
    "will it rain in {v} tomorrow?|what is the current temperature in {v}?|what is the weather going to be in {v}?"
)
UNIT_PAIRS = (("celsius", "fahrenheit"), ("fahrenheit", "celsius"), ("c", "f"), ("metric", "imperial"))
UNIT_PHRASES = (" in {u}", ", in {u}", " in {u} please", " Answer in {u}.", " (in {u})")


def _weather_result(rng: Random, city: str) -> tuple[str, str]:
    condition = rng.choice(CONDITIONS.split("|"))
    degrees = str(rng.randint(-9, 39)) if rng.random() < 0.8 else f"{rng.randint(-9, 39)}.{rng.randint(0, 9)}"
    choice = rng.random()
    if choice < 0.2:
        return condition, f"It is {condition} in {city}."
    if choice < 0.35:
        mark = rng.choice(("", " C", "°C", " degrees", " F", "°"))
        return degrees + mark, f"It is {degrees} degrees in {city}."
    if choice < 0.45:
        text = rng.choice((f"{condition}, {degrees} degrees", f"{degrees} degrees and {condition}"))
        return text, f"It is {condition} in {city}, {degrees} degrees."
    if choice < 0.55:
        text = say(rng, "It is {c} in {v}.|The weather in {v} is {c}.|{c} in {v}", c=condition, v=city)
        return text, f"It is {condition} in {city}."
    if choice < 0.94:
        pairs = {rng.choice(("temperature", "temp", "degrees", "temperature_c")): float(degrees) if "." in degrees
                 else int(degrees), rng.choice(("condition", "conditions", "weather", "sky")): condition}  # fmt: skip
        items = list(pairs.items())
        rng.shuffle(items)
        if rng.random() < 0.3:
            items.insert(0, (rng.choice(("city", "location")), city))
        if rng.random() < 0.2:
            items.append((rng.choice(("unit", "units")), rng.choice(("celsius", "C"))))
        pairs = dict(items)
        return json.dumps(pairs, ensure_ascii=False), f"It is {condition} in {city}, {degrees} degrees."
    return _found(rng)


def weather(rng: Random, held: bool) -> Offer:
    """Offer the weather of a city, with or without a unit."""
    name = _function_name(
        rng, "get fetch check show find - current", "weather current_weather temperature forecast weather_report", held
    )
    argument = _argument(rng, "city location city place town city_name location where")
    parameters = [Parameter(argument)]
    units = rng.choice(UNIT_PAIRS) if rng.random() < 0.15 else ()
    required = rng.random() < 0.5
    unit = rng.choice(("unit", "units", "scale", "format"))
    if units:
        parameters.append(Parameter(unit, values=units, required=required))
    description = _described(
        rng,
        "Get the weather.|Get the current weather in a given location.|Get current temperature for a given location.|"
        "Return the weather of a city.|The weather in a city.|Fetch the weather for a place.|How it is outside.|"
        "Get the current weather.|Determine weather in my location|Weather of a city today.|Get weather for a city.",
    )

    def question(rng: Random, held: bool) -> Task:
        chosen = rng.choice(units) if units and rng.random() < 0.5 else ""
        extra = {unit: chosen or units[0]} if units and (chosen or required) else None
        task = _one_or_two(rng, held, place, argument, WEATHER_QUESTIONS, _weather_result, extra)
        if chosen:
            phrase = rng.choice(UNIT_PHRASES).format(u=chosen)
            task = dataclasses.replace(task, user=task.user + phrase)
        return task

    return Offer("weather", Tool(name, description, tuple(parameters)), question)


CLOCK_QUESTIONS = (
    "what time is it in {v}?|what is the time in {v}?|current time in {v}|time in {v}|what is the time in {v} now?|"
    "how late is it in {v}?|tell me the time in {v}|what time is it in {v} right now?|what is the local time in {v}?"
)
HERE_QUESTIONS = "what time is it?|what is the time?|what time is it now?|tell me the time|current time|how late is it?"


def clock(rng: Random, held: bool) -> Offer:
    """Offer the time, here or in a place."""
    name = _function_name(rng, "get current check tell - show", "time clock local_time current_time time_of_day", held)
    here = rng.random() < 0.3
    argument = _argument(rng, "zone timezone city location place time_zone tz")
    description = _described(
        rng,
        "Get the time.|Get the current time.|The current time."
        if here
        else "Get the time in a place.|Get the current time in a time zone.|The time of day in a city.|Local time.",
    )

    def question(rng: Random, held: bool) -> Task:
        def reply(rng: Random, city: str) -> tuple[str, str]:
            if rng.random() < 0.06:
                return _found(rng)
            time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
            result = rng.choice((time, time, json.dumps({"time": time}), f"It is {time}.", f"{time} o'clock"))
            return result, f"It is {time} in {city}." if city else f"It is {time}."

        if here:
            result, answer = reply(rng, "")
            return Task(ask(rng, HERE_QUESTIONS), ({},), (result,), answer)
        zone = rng.choice(("Europe", "Asia", "America")) + "/" if rng.random() < 0.1 else ""
        return _one_or_two(
            rng, held, lambda rng, held: zone + invent(rng, "city", held=held) if zone else place(rng, held),
            argument, CLOCK_QUESTIONS, reply,
        )  # fmt: skip

    return Offer("clock", Tool(name, description, () if here else (Parameter(argument),)), question)


OPERATIONS = {
    "+": ("add sum plus", "Add two numbers.|Add a and b.|The sum of two numbers.|Adds two integers.", "{a} + {b}"),
    "-": ("subtract minus difference", "Subtract two numbers.|Subtract b from a.|The difference.", "{a} - {b}"),
    "*": ("multiply times product", "Multiply two numbers.|Multiply a and b.|The product.", "{a} * {b}"),
    "/": ("divide division quotient", "Divide two numbers.|Divide a by b.", "{a} / {b}"),
}
CALCULATIONS = {
    "+": skills.SUM_QUESTIONS,
    "-": skills.DIFFERENCE_QUESTIONS.replace("|subtract {b} from {a}|take {b} away from {a}", ""),
    "*": skills.PRODUCT_QUESTIONS,
    "/": "what is {a} / {b}?|{a} divided by {b}|divide {a} by {b}|{a} / {b}|how much is {a} / {b}?",
}
OPERANDS = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("num1", "num2"), ("left", "right"), ("n", "m"))


def _operands(rng: Random, held: bool) -> tuple[int, int]:
    while True:
        limits = rng.choice((9, 99, 99, 99, 999, 9999, 99999))
        a, b = rng.randint(1, limits), rng.randint(1, limits)
        if held_out("operands", (a, b)) == held:
            return a, b


def calculator(rng: Random, held: bool) -> Offer:
    """Offer one operation on two numbers, or a calculator of expressions."""
    by_expression = rng.random() < 0.35
    sign = rng.choice("+++-**/")
    verbs, descriptions, _ = OPERATIONS[sign]
    first, second = rng.choice(OPERANDS)
    argument = _argument(rng, "expression expr formula input query")
    if by_expression:
        name = _function_name(rng, "calculate compute evaluate run -", "calculator expression math calc result", held)
        description = _described(
            rng, "Calculate an expression.|Evaluate a math expression.|A calculator.|Do arithmetic.|Compute a formula."
        )
        tool = Tool(name, description, (Parameter(argument),))
    else:
        name = rng.choice(verbs.split()) if not held and rng.random() < 0.4 else _function_name(
            rng, verbs, "numbers two integers values two_numbers", held)  # fmt: skip
        kind = rng.choice(("integer", "integer", "number"))
        tool = Tool(name, _described(rng, descriptions), (Parameter(first, kind), Parameter(second, kind)))

    def question(rng: Random, held: bool) -> Task:
        used = rng.choice("+++-*/") if by_expression else sign
        a, b = _operands(rng, held)
        text = OPERATIONS[used][2].format(a=a, b=b)
        value = a // b if used == "/" else {"+": a + b, "-": a - b, "*": a * b}[used]
        result = rng.choice((str(value), str(value), json.dumps({"result": value}), f"The result is {value}.",
                             json.dumps({"answer": value}), f"{text} = {value}"))  # fmt: skip
        arguments = {argument: text} if by_expression else {first: a, second: b}
        return Task(ask(rng, CALCULATIONS[used], a=a, b=b), (arguments,), (result,), f"{text} = {value}.")

    return Offer("calculator", tool, question)


SEARCH_QUESTIONS = (
    "search for {v}|look up {v}|find {v}|search {v}|find information about {v}|look for {v}|google {v}|"
    "search the web for {v}|what can you find about {v}?|find something about {v}|look up {v} for me|"
    "can you search for {v}?|do a search for {v}|please look up {v}|search the documents for {v}"
)


def _words(rng: Random, held: bool, most: int = 3) -> str:
    words = [rng.choice((*SPELLABLE, *FOODS)) if not held and rng.random() < 0.5 else invent(rng, "query", held=held)
             for _ in range(rng.randint(1, most))]  # fmt: skip
    text = " ".join(words)
    return text if rng.random() < 0.3 else text.lower()


def search(rng: Random, held: bool) -> Offer:
    """Offer a search."""
    name = _function_name(
        rng, "search look_up find query web -", "search web documents docs knowledge_base wiki files internet lookup",
        held,
    )  # fmt: skip
    argument = _argument(rng, "query q term topic text keywords search_query phrase")
    description = _described(
        rng, "Search the web.|Look something up.|Find documents.|Search the knowledge base.|Search for a term.|"
        "Look up information about a topic."
    )  # fmt: skip

    def question(rng: Random, held: bool) -> Task:
        words = _words(rng, held)
        result, answer = _found(rng)
        return Task(ask(rng, SEARCH_QUESTIONS, v=words), ({argument: words},), (result,), answer)

    return Offer("search", Tool(name, description, (Parameter(argument),)), question)


def stock(rng: Random, held: bool) -> Offer:
    """Offer the price of something."""
    name = _function_name(rng, "get fetch check find -", "price stock_price quote share_price product_price", held)
    argument = _argument(rng, "symbol ticker item product name stock")
    description = _described(rng, "Get the price of a stock.|The price of a product.|Look up a price.|Get a quote.")

    def draw(rng: Random, held: bool) -> str:
        word = invent(rng, "price", held=held)
        return word[:4].upper() if not held and rng.random() < 0.5 else word.lower() if rng.random() < 0.5 else word

    def reply(rng: Random, value: str) -> tuple[str, str]:
        if rng.random() < 0.15:
            return _found(rng)
        price = _number(rng).lstrip("-")
        result = rng.choice((price, price, json.dumps({"price": float(price) if "." in price else int(price)})))
        return result, f"The price of {value} is {price}."

    def question(rng: Random, held: bool) -> Task:
        return _one_or_two(
            rng, held, draw, argument, "what is the price of {v}?|price of {v}|how much does {v} cost?|"
            "what does {v} cost?|get the price of {v}|check the price of {v}|what is the stock price of {v}?", reply,
        )  # fmt: skip

    return Offer("stock", Tool(name, description, (Parameter(argument),)), question)


LANGUAGES = "French German Spanish Italian Dutch Polish Greek Japanese Latin Swedish".split()


def translate(rng: Random, held: bool) -> Offer:
    """Offer a translation."""
    name = _function_name(rng, "translate - get", "text translation word translate sentence", held)
    text, language = _argument(rng, "text word phrase input"), _argument(rng, "language target target_language to lang")
    description = _described(rng, "Translate a text.|Translate words into a language.|A translator.")

    def question(rng: Random, held: bool) -> Task:
        words, target = _words(rng, held), rng.choice(LANGUAGES)
        user = ask(rng, 'translate {v} into {l}|translate {v} to {l}|how do you say {v} in {l}?|what is {v} in {l}?|'
                   'translate "{v}" to {l}|say {v} in {l}', v=words, l=target)  # fmt: skip
        meaning = " ".join(invent(rng, "meaning").lower() for _ in range(rng.randint(1, 2)))
        result = meaning if rng.random() < 0.7 else json.dumps({"translation": meaning})
        return Task(user, ({text: words, language: target},), (result,), f"In {target}: {meaning}.")

    return Offer("translate", Tool(name, description, (Parameter(text), Parameter(language))), question)


def person(rng: Random, held: bool) -> tuple[str, dict[str, Any]]:
    """Return a sentence about a person, and what it contains: a name, an age, perhaps a city."""
    name = invent(rng, "name", held=True) if held else pick(rng, "name", NAMES, invented=0.7)
    if not held and rng.random() < 0.2:
        name = f"{name} {invent(rng, 'name')}"
    facts: dict[str, Any] = {"name": name, "age": rng.randint(1, 99)}
    if rng.random() < 0.3:
        facts["city"] = place(rng, False)
        forms = (
            "{name} is {age} years old and lives in {city}.|{name}, {age}, lives in {city}.|"
            "{name} is {age} and comes from {city}.|My name is {name}, I am {age} and I live in {city}.|"
            "{name} lives in {city} and is {age} years old."
        )
    else:
        forms = (
            "{name} is {age} years old.|{name} is {age}.|My name is {name} and I am {age}.|{name}, age {age}|"
            "I am {name}, {age} years old.|{name} ({age})|This is {name}, who is {age} years old.|"
            "{name} turned {age} today."
        )
    return say(rng, forms, **facts), facts


EXTRACT_LEADS = (
    "{t}|{t}|{t}|Extract: {t}|Extract the user: {t}|Save this: {t}|Extract {t}|Extract the data from: {t}|Parse: {t}"
)


def extract(rng: Random, held: bool) -> Offer:
    """Offer to record a person, as libraries for structured output do."""
    name = _function_name(rng, "user person save extract add record -",
                          "user person user_info user_detail contact character profile info", held)  # fmt: skip
    has_city = rng.random() < 0.4
    parameters = (Parameter("name"), Parameter("age", "integer"), *([Parameter("city")] if has_city else []))
    description = _described(
        rng, f"Correctly extracted `{name}` with all the required parameters with correct types|Save a user.|"
        "Record a person.|Information about a user.|Add a contact."
    )  # fmt: skip

    def question(rng: Random, held: bool) -> Task:
        text, facts = person(rng, held)
        while has_city and "city" not in facts:
            text, facts = person(rng, held)
        arguments = {each.name: facts[each.name] for each in parameters}
        result = rng.choice(("ok", "saved", "done", json.dumps({"status": "ok"}), "true"))
        return Task(say(rng, EXTRACT_LEADS, t=text), (arguments,), (result,), f"Done. I saved {facts['name']}.")

    return Offer("extract", Tool(name, description, parameters), question)


@dataclasses.dataclass(frozen=True, slots=True)
class Simple:
    """A function of one argument: words for names, questions, and the answer after a plain confirmation."""

    verbs: str
    nouns: str
    arguments: str
    descriptions: str
    questions: str
    answer: str
    values: tuple[str, ...]


ROOMS = "kitchen bedroom bathroom garage office hall garden cellar attic living_room".replace("_", " ").split()
SIGNS = "Aries Taurus Gemini Cancer Leo Virgo Libra Scorpio Aquarius Pisces".split()
SIMPLE = (
    Simple("turn_on switch set light", "light lights lamp light_on", "room place area", "Turn on the light.|Lights.",
           "turn on the light in the {v}|switch on the light in the {v}|light on in the {v}|i need light in the {v}",
           "The light in the {v} is on.", tuple(ROOMS)),
    Simple("play start", "music song track playlist", "song title name track", "Play a song.|Play music.|Music player.",
           "play {v}|play the song {v}|start the song {v}|i want to hear {v}", "Now playing {v}.", ()),
    Simple("get tell read", "horoscope zodiac", "sign zodiac_sign", "Get the horoscope of a sign.|Horoscopes.",
           "what is my horoscope? i am {v}|my sign is {v}. what is my horoscope?|horoscope for {v}|"
           "what is my horoscope? i am an {v}.", "", tuple(SIGNS)),
    Simple("get find load read show", "user customer order file document ticket page", "id name key number path",
           "Get an object.|Load one by its id.|Read a file.", "get {v}|show {v}|load {v}|open {v}|read {v}", "", ()),
    Simple("call phone ring ping", "contact person number friend", "name contact person who", "Call a contact.|Phone.",
           "call {v}|phone {v}|ring {v}|please call {v}|i want to talk to {v}", "Calling {v}.", ()),
    Simple("delete remove cancel", "file order meeting entry note", "name id item", "Delete an entry.|Cancel an order.",
           "delete {v}|remove {v}|cancel {v}|get rid of {v}", "I deleted {v}.", ()),
    Simple("order buy get", "food meal item pizza", "dish item food name", "Order food.|Order a dish.",
           "order {v}|i want to eat {v}|get me {v}|order some {v}|buy {v}", "I ordered {v}.", tuple(FOODS)),
    Simple("remind set add create", "reminder note todo task", "text title task note", "Create a note.|Add a reminder.",
           "remind me of {v}|add a note: {v}|remind me about {v}|note: {v}|add {v} to my list", "Noted: {v}.", ()),
    Simple("define explain get", "word definition meaning term", "word term", "Define a word.|The meaning of a word.",
           "define {v}|what does {v} mean?|what is the meaning of {v}?|meaning of {v}", "", ()),
    Simple("book find reserve", "flight hotel table room trip", "city destination place", "Book a trip.|Book a hotel.",
           "book a flight to {v}|book a hotel in {v}|i want to go to {v}|find a trip to {v}", "I booked {v}.",
           tuple(CITIES)),
    Simple("check list get", "calendar events schedule holidays", "month date", "List the events of a month.",
           "what is planned in {v}?|events in {v}|what happens in {v}?|show me {v}", "", tuple(MONTHS)),
)  # fmt: skip


def simple(rng: Random, held: bool) -> Offer:
    """Offer a function of one argument."""
    form = rng.choice(SIMPLE)
    argument = _argument(rng, form.arguments)
    tool = Tool(_function_name(rng, form.verbs, form.nouns, held), _described(rng, form.descriptions),
                (Parameter(argument),))  # fmt: skip

    def question(rng: Random, held: bool) -> Task:
        value = rng.choice(form.values) if form.values and not held and rng.random() < 0.7 else _words(rng, held, 2)
        result, answer = _found(rng)
        if form.answer and rng.random() < 0.7:
            result = rng.choice(("ok", "done", "true", json.dumps({"status": "ok"}), "success", '{"ok": true}'))
            answer = form.answer.format(v=value)
        return Task(ask(rng, form.questions, v=value), ({argument: value},), (result,), answer)

    return Offer("simple", tool, question)


def handoff(rng: Random, held: bool) -> Offer:
    """Offer to hand the conversation to another agent, as agent libraries do: a function without arguments."""
    topic = rng.choice((*LANGUAGES, "billing", "support", "sales", "refund", "math", "history", "travel", "booking"))
    name = _function_name(rng, "transfer_to hand_to ask", f"{topic.lower()}_agent {topic.lower()}", held)
    descriptions = f"Handoff to the {topic} agent to handle the request.|Ask the {topic} agent."
    tool = Tool(name, _described(rng, descriptions))

    def question(rng: Random, held: bool) -> Task:
        user = ask(rng, "i have a question about {v}|i need help with {v}|connect me to {v}|i want to talk about {v}|"
                   "{v} please|can i talk to {v}?|help me with {v}", v=topic)  # fmt: skip
        result, answer = _found(rng)
        return Task(user, ({},), (result,), answer)

    return Offer("handoff", tool, question)


def message(rng: Random, held: bool) -> Offer:
    """Offer to send a message: two texts to copy."""
    to, text = rng.choice((("to", "text"), ("recipient", "message"), ("name", "body"), ("to", "message")))
    function = _function_name(rng, "send write post", "message email mail sms note text", held)
    description = _described(rng, "Send a message.|Send an email.|Write to a person.")
    tool = Tool(function, description, (Parameter(to), Parameter(text)))

    def question(rng: Random, held: bool) -> Task:
        name, words = invent(rng, "name", held=held), _words(rng, held)
        user = ask(rng, "send {n} the message {w}|write {w} to {n}|send {w} to {n}|tell {n}: {w}|message {n}: {w}",
                   n=name, w=words)  # fmt: skip
        result = rng.choice(("ok", "sent", "done", json.dumps({"status": "sent"})))
        return Task(user, ({to: name, text: words},), (result,), f"I sent the message to {name}.")

    return Offer("message", tool, question)
