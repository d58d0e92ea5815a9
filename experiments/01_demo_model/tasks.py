"""The demo model's three families of questions: generators, hold-out split and grading.

A question is decided by its content key; a hash of the key puts 10% of all keys aside, and no
training sequence shows them. ``grade`` judges an answer text from a plain dict, so that any
engine can be scored with it. Content characters of an answer are marked while it is built, which
lets the training weigh them; the marks never leave this file's callers.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

FAMILIES = ("arithmetic", "code", "facts")
HELD_OUT_PERCENT = 10
MARK_OPEN, MARK_CLOSE = "\x01", "\x02"
MAX_RESULT = 99
MAX_FACTOR = 10


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its only accepted style of answer.

    ``marked_answer`` carries marks round content characters; ``prefix`` is the part of the reply
    that is given (``{`` when a JSON reply is forced) and never predicted.
    """

    family: str
    form: str
    key: str
    question: str
    marked_answer: str
    expected: str
    prefix: str = ""

    @property
    def answer(self) -> str:
        return self.marked_answer.replace(MARK_OPEN, "").replace(MARK_CLOSE, "")

    def to_record(self) -> dict[str, str]:
        """The plain dict that is stored and graded."""
        record = {
            "family": self.family,
            "form": self.form,
            "key": self.key,
            "question": self.question,
            "expected": self.expected,
        }
        if self.prefix:
            record["prefix"] = self.prefix
        return record


def is_held_out(key: str) -> bool:
    """Whether a content key belongs to the 10% that training never sees."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def mark(text: object) -> str:
    return f"{MARK_OPEN}{text}{MARK_CLOSE}"


# --------------------------------------------------------------------------------------------
# Arithmetic
# --------------------------------------------------------------------------------------------

OPS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
OP_WORDS = {"+": "plus", "-": "minus", "*": "times"}
PLAIN_FORMS = (
    "What is {e}?",
    "Compute {e}.",
    "Calculate {e}.",
    "What is the result of {e}?",
    "{e} = ?",
    "How much is {e}?",
    "What is {w}?",
    "How much is {w}?",
)
PLAIN_FORM_WEIGHTS = (6, 2, 2, 1, 1, 1, 2, 1)
JSON_FORMS = (
    "{q} Answer as JSON.",
    "{q} Reply in JSON.",
    "{q} Give the answer as JSON.",
    "{q} Respond with JSON only.",
    "{q} Return JSON.",
    "Answer as JSON: {q}",
)
PEOPLE = ("Tom", "Anna", "Ben", "Mia", "Leo", "Eva", "Sam", "Lily", "Max", "Nina", "Paul", "Zoe")
ITEMS = ("apples", "books", "coins", "pens", "cards", "stones", "cakes", "balls", "eggs", "stamps")
STARTS = ("{n} has {a} {i}.", "{n} starts with {a} {i}.", "{n} owns {a} {i}.")
PRODUCT_STARTS = ("{n} has {a} bags with {b} {i} each.", "{n} fills {a} boxes with {b} {i} each.")
GAINS = ("{n} buys {a} more.", "{n} finds {a} more.", "{n} gets {a} more.")
LOSSES = ("{n} gives away {a}.", "{n} loses {a}.", "{n} sells {a}.")
ENDINGS = ("How many {i} does {n} have?", "How many {i} does {n} have now?")

Equation = tuple[int, str, int]


def equation_result(equation: Equation) -> int:
    a, op, b = equation
    return OPS[op](a, b)


def equation_key(equation: Equation) -> str:
    """Sums are one fact in either order; products are known by heart, see ``plain_key``."""
    a, op, b = equation
    if op == "+" and a > b:
        a, b = b, a
    return f"{a}{op}{b}"


def plain_key(equation: Equation, form_id: int) -> str:
    """A product also carries its question form: an unseen table entry cannot be derived."""
    key = equation_key(equation)
    return f"{key}|{form_id}" if equation[1] == "*" else key


def is_held_out_equation(equation: Equation) -> bool:
    """Whether a sum or difference is held out in every form (products are held out by form)."""
    return equation[1] != "*" and is_held_out(equation_key(equation))


def draw_equation(rng: random.Random) -> Equation:
    op = rng.choices("+-*", (5, 5, 2))[0]
    if op == "*":
        return rng.randint(0, MAX_FACTOR), op, rng.randint(0, MAX_FACTOR)
    larger = rng.randint(0, MAX_RESULT) if rng.random() < 0.3 else _draw_triangular(rng)
    part = _draw_part(rng, larger) if op == "-" else rng.randint(0, larger)
    return (part, op, larger - part) if op == "+" else (larger, op, part)


def _draw_triangular(rng: random.Random) -> int:
    """Larger number of a pair, so that all (larger, part) pairs are equally likely."""
    return max(rng.randint(0, MAX_RESULT), rng.randint(0, MAX_RESULT))


def _draw_part(rng: random.Random, larger: int) -> int:
    """What is taken away; often nearly everything, since one-digit results are the hard ones."""
    if rng.random() < 0.25:
        return larger - rng.randint(0, min(9, larger))
    return rng.randint(0, larger)


def write_equation(equation: Equation) -> str:
    a, op, b = equation
    return f"{a} {op} {b} = {mark(equation_result(equation))}"


def write_expression(equation: Equation, form_id: int) -> str:
    a, op, b = equation
    text = PLAIN_FORMS[form_id]
    return text.format(e=f"{a} {op} {b}", w=f"{a} {OP_WORDS[op]} {b}")


def draw_form(rng: random.Random) -> int:
    return rng.choices(range(len(PLAIN_FORMS)), PLAIN_FORM_WEIGHTS)[0]


def draw_plain(rng: random.Random) -> Question:
    equation, form_id = draw_equation(rng), draw_form(rng)
    return Question(
        family="arithmetic",
        form="plain",
        key=plain_key(equation, form_id),
        question=write_expression(equation, form_id),
        marked_answer=write_equation(equation),
        expected=str(equation_result(equation)),
    )


def draw_drill(rng: random.Random) -> Question:
    """Two or three expressions at once; used for training only."""
    equations = [draw_equation(rng) for _ in range(rng.choice((2, 3, 3)))]
    written = [f"{a} {op} {b}" for a, op, b in equations]
    head = rng.choice(("Compute", "Calculate", "Work out"))
    held_out = [equation_key(e) for e in equations if is_held_out_equation(e)]
    return Question(
        family="arithmetic",
        form="drill",
        key=held_out[0] if held_out else "drill",
        question=f"{head} {', '.join(written[:-1])} and {written[-1]}.",
        marked_answer="\n".join(write_equation(e) for e in equations),
        expected=str(equation_result(equations[-1])),
    )


def draw_story(rng: random.Random, *, max_steps: int = 3) -> tuple[str, list[Equation]]:
    """A word problem and its equations; every intermediate result is in 0..99."""
    name, items = rng.choice(PEOPLE), rng.choice(ITEMS)
    num_steps = rng.randint(1, max_steps)
    equations: list[Equation] = []
    if rng.random() < 0.3:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        sentences = [rng.choice(PRODUCT_STARTS).format(n=name, i=items, a=a, b=b)]
        equations.append((a, "*", b))
        total = a * b
    else:
        total = rng.randint(2, 80)
        sentences = [rng.choice(STARTS).format(n=name, i=items, a=total)]
    while len(equations) < num_steps:
        is_gain = total < 2 or (total <= MAX_RESULT - 2 and rng.random() < 0.5)
        if is_gain:
            part = rng.randint(1, min(50, MAX_RESULT - total))
        else:
            part = max(1, _draw_part(rng, total))
        sentences.append(rng.choice(GAINS if is_gain else LOSSES).format(n=name, a=part))
        equations.append((total, "+" if is_gain else "-", part))
        total = equation_result(equations[-1])
    sentences.append(rng.choice(ENDINGS).format(n=name, i=items))
    return " ".join(sentences), equations


def story_key(equations: list[Equation]) -> str:
    first = equations[0]
    return f"story|{first[0]}" + "".join(f"{op}{b}" for _, op, b in equations)


def draw_word_problem(rng: random.Random) -> Question:
    text, equations = draw_story(rng)
    total = equation_result(equations[-1])
    lines = [write_equation(e) for e in equations]
    return Question(
        family="arithmetic",
        form="story",
        key=story_key(equations),
        question=text,
        marked_answer="\n".join([*lines, f"The answer is {total}."]),
        expected=str(total),
    )


def draw_json(rng: random.Random, *, is_forced: bool) -> Question:
    """A single calculation answered as ``{"answer": n}``, asked for or forced by ``{``."""
    if rng.random() < 0.2:
        question, equations = draw_story(rng, max_steps=1)
        equation, key = equations[0], story_key(equations)
        if is_held_out_equation(equation):
            key = equation_key(equation)
    else:
        equation, form_id = draw_equation(rng), draw_form(rng)
        question, key = write_expression(equation, form_id), plain_key(equation, form_id)
    if not is_forced:
        question = rng.choices(JSON_FORMS, (5, 2, 2, 2, 1, 1))[0].format(q=question)
    total = equation_result(equation)
    return Question(
        family="arithmetic",
        form="json_forced" if is_forced else "json_asked",
        key=key,
        question=question,
        marked_answer=f'{{"answer": {mark(total)}}}',
        expected=str(total),
        prefix="{" if is_forced else "",
    )


EQUATION_PATTERN = re.compile(r"(\d+) ([-+*]) (\d+) = (-?\d+)")


def grade_arithmetic(record: dict[str, Any], answer: str) -> bool:
    """JSON: exactly the object. Text: every equation true and the last number the result."""
    expected = int(record["expected"])
    if record["form"].startswith("json"):
        try:
            value = json.loads(answer)
        except ValueError:
            return False
        return bool(value == {"answer": expected}) and not isinstance(value["answer"], bool)
    equations = EQUATION_PATTERN.findall(answer)
    if not equations or any(OPS[op](int(a), int(b)) != int(c) for a, op, b, c in equations):
        return False
    return int(re.findall(r"-?\d+", answer)[-1]) == expected


# --------------------------------------------------------------------------------------------
# Code
# --------------------------------------------------------------------------------------------

FUNCTION_NAMES = (
    "solve", "compute", "run", "process", "calc", "total", "pick", "scan", "task", "build",
    "work", "find", "make", "check", "apply", "get_result", "my_func", "helper", "select", "f",
)  # fmt: skip
LIST_NAMES = ("xs", "nums", "values", "items", "numbers")
STRING_NAMES = ("s", "text", "word", "line")
NUMBER_NAMES = ("x", "n", "a", "value")
CODE_FORMS = (
    "Write a function {sig} that returns {d}.",
    "Write a Python function {sig} that returns {d}.",
    "Define {sig}, which returns {d}.",
)

# filter name -> (phrase before the noun, phrase after the noun, source, meaning)
Filter = tuple[str, str, str, Callable[[int, int], bool]]
FILTERS: dict[str, Filter] = {
    "even": ("even ", "", "x % 2 == 0", lambda x, k: x % 2 == 0),
    "odd": ("odd ", "", "x % 2 == 1", lambda x, k: x % 2 == 1),
    "pos": ("positive ", "", "x > 0", lambda x, k: x > 0),
    "neg": ("negative ", "", "x < 0", lambda x, k: x < 0),
    "gt": ("", " greater than {k}", "x > {k}", lambda x, k: x > k),
    "lt": ("", " less than {k}", "x < {k}", lambda x, k: x < k),
    "ne": ("", " not equal to {k}", "x != {k}", lambda x, k: x != k),
    "div": ("", " divisible by {k}", "x % {k} == 0", lambda x, k: x % k == 0),
}
# map name -> (phrase, source, meaning)
MAPS: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "id": ("", "x", lambda x, k: x),
    "square": (", each squared", "x * x", lambda x, k: x * x),
    "negate": (", each negated", "-x", lambda x, k: -x),
    "add": (", each plus {k}", "x + {k}", lambda x, k: x + k),
    "sub": (", each minus {k}", "x - {k}", lambda x, k: x - k),
    "mul": (", each times {k}", "x * {k}", lambda x, k: x * k),
}
REDUCERS: dict[str, tuple[str, str, Callable[[list[int]], Any]]] = {
    "list": ("a list of", "[{b}]", lambda v: v),
    "sum": ("the sum of", "sum({b})", sum),
    "sorted": ("a sorted list of", "sorted({b})", sorted),
    "count": ("the count of", "len([{b}])", len),
}
# string step -> (phrase, source suffix, meaning)
STRING_STEPS: dict[str, tuple[str, str, Callable[[str, int], str]]] = {
    "reverse": ("reversed", "[::-1]", lambda s, k: s[::-1]),
    "upper": ("in upper case", ".upper()", lambda s, k: s.upper()),
    "lower": ("in lower case", ".lower()", lambda s, k: s.lower()),
    "strip": ("without outer spaces", ".strip()", lambda s, k: s.strip()),
    "head": ("cut to the first {k} characters", "[:{k}]", lambda s, k: s[:k]),
    "tail": ("cut to the last {k} characters", "[-{k}:]", lambda s, k: s[-k:]),
    "drop": ("without the first {k} characters", "[{k}:]", lambda s, k: s[k:]),
    "repeat": ("repeated {k} times", " * {k}", lambda s, k: s * k),
}
NUMBER_STEPS: dict[str, tuple[str, str]] = {
    "add": ("plus {k}", " + {k}"),
    "sub": ("minus {k}", " - {k}"),
    "mul": ("times {k}", " * {k}"),
}
STEPS_WITHOUT_CONSTANT = ("reverse", "upper", "lower", "strip")
Step = tuple[str, int]


def _write_step(step: Step) -> str:
    return f"{step[0]}:{step[1]}"


def _read_step(text: str) -> Step:
    name, constant = text.split(":")
    return name, int(constant)


def draw_list_spec(rng: random.Random) -> str:
    reducer = rng.choices(("list", "sum", "sorted", "count"), (4, 4, 2, 2))[0]
    filter_name = rng.choice((*FILTERS, "none")) if reducer != "count" else rng.choice([*FILTERS])
    map_name = rng.choice(list(MAPS)) if reducer != "count" else "id"
    has_constant = filter_name in ("gt", "lt", "ne", "div")
    low, high = (3, 9) if filter_name == "div" else (2, 20)
    filter_constant = rng.randint(low, high) if has_constant else 0
    map_constant = rng.randint(2, 20) if map_name in ("add", "sub", "mul") else 0
    filter_step = _write_step((filter_name, filter_constant))
    return f"list|{reducer}|{_write_step((map_name, map_constant))}|{filter_step}"


def draw_string_spec(rng: random.Random) -> str:
    num_steps = rng.choice((1, 2, 2, 2))
    names = rng.sample([n for n in STRING_STEPS if n != "repeat"], num_steps)
    if rng.random() < 0.2:
        names[-1] = "repeat"
    steps = [(n, 0 if n in STEPS_WITHOUT_CONSTANT else rng.randint(2, 9)) for n in names]
    return "string|" + "|".join(_write_step(s) for s in steps)


def draw_number_spec(rng: random.Random) -> str:
    num_steps = rng.choice((1, 2, 2, 2))
    steps = [(rng.choice(list(NUMBER_STEPS)), rng.randint(2, 20)) for _ in range(num_steps)]
    return "number|" + "|".join(_write_step(s) for s in steps)


def describe_code(spec: str, name: str) -> tuple[str, str]:
    """The description in words and the marked source of the returned expression."""
    kind, *parts = spec.split("|")
    if kind == "list":
        return _describe_list(parts, name)
    steps = [_read_step(p) for p in parts]
    if kind == "string":
        phrases = [STRING_STEPS[n][0].format(k=k) for n, k in steps]
        source = "".join(mark(STRING_STEPS[n][1].format(k=k)) for n, k in steps)
        return f"{name} {', then '.join(phrases)}", name + source
    phrases = [NUMBER_STEPS[n][0].format(k=k) for n, k in steps]
    source = name
    for position, (step_name, constant) in enumerate(steps):
        if step_name == "mul" and position and steps[position - 1][0] != "mul":
            source = f"{mark('(')}{source}{mark(')')}"
        source += mark(NUMBER_STEPS[step_name][1].format(k=constant))
    return f"{name} {', then '.join(phrases)}", source


def _describe_list(parts: list[str], name: str) -> tuple[str, str]:
    reducer, (map_name, map_constant), (filter_name, filter_constant) = (
        parts[0],
        _read_step(parts[1]),
        _read_step(parts[2]),
    )
    before = after = condition = ""
    if filter_name != "none":
        before, after, test, _ = FILTERS[filter_name]
        after = after.format(k=filter_constant)
        condition = f" if {mark(test.format(k=filter_constant))}"
    map_phrase, map_source, _ = MAPS[map_name]
    lead, wrap, _ = REDUCERS[reducer]
    body = f"{mark(map_source.format(k=map_constant))} for x in {name}{condition}"
    phrase = f"{lead} the {before}numbers in {name}{after}{map_phrase.format(k=map_constant)}"
    head, _, tail = wrap.partition("{b}")
    return phrase, f"{mark(head)}{body}{mark(tail)}"


def reference_function(spec: str) -> Callable[[Any], Any]:
    """What a spec means, without going through the source text that answers it."""
    kind, *parts = spec.split("|")
    if kind == "list":
        reduce_values = REDUCERS[parts[0]][2]
        map_name, map_constant = _read_step(parts[1])
        filter_name, filter_constant = _read_step(parts[2])
        map_value = MAPS[map_name][2]
        keep = FILTERS[filter_name][3] if filter_name != "none" else lambda x, k: True
        return lambda values: reduce_values(
            [map_value(x, map_constant) for x in values if keep(x, filter_constant)]
        )
    steps = [_read_step(p) for p in parts]

    def apply_steps(value: Any) -> Any:
        for name, constant in steps:
            if kind == "string":
                value = STRING_STEPS[name][2](value, constant)
            else:
                value = OPS[{"add": "+", "sub": "-", "mul": "*"}[name]](value, constant)
        return value

    return apply_steps


def draw_code(rng: random.Random) -> Question:
    kind = rng.choices(("list", "string", "number"), (5, 3, 2))[0]
    draw_spec = {"list": draw_list_spec, "string": draw_string_spec, "number": draw_number_spec}
    names = {"list": LIST_NAMES, "string": STRING_NAMES, "number": NUMBER_NAMES}[kind]
    spec, name, function_name = draw_spec[kind](rng), rng.choice(names), rng.choice(FUNCTION_NAMES)
    description, source = describe_code(spec, name)
    signature = f"{function_name}({name})"
    return Question(
        family="code",
        form=kind,
        key=spec,
        question=rng.choice(CODE_FORMS).format(sig=signature, d=description),
        marked_answer=f"def {signature}:\n    return {source}",
        expected=function_name,
    )


ALLOWED_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Call, ast.Name, ast.Load,
    ast.Store, ast.Constant, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.UnaryOp,
    ast.USub, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.GeneratorExp,
    ast.ListComp, ast.comprehension, ast.Attribute, ast.Subscript, ast.Slice,
)  # fmt: skip
ALLOWED_ATTRIBUTES = ("upper", "lower", "strip")
ALLOWED_BUILTINS: dict[str, Any] = {"sum": sum, "len": len, "sorted": sorted, "list": list}
MAX_CODE_CHARACTERS = 300
MAX_CONSTANT = 99


def load_function(source: str, name: str) -> Callable[[Any], Any] | None:
    """Run a definition with restricted builtins, only if every syntax node is on the list."""
    if len(source) > MAX_CODE_CHARACTERS:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    if not all(_is_allowed(node) for node in ast.walk(tree)):
        return None
    if sum(isinstance(node, ast.Mult) for node in ast.walk(tree)) > 3:
        return None
    scope: dict[str, Any] = {"__builtins__": ALLOWED_BUILTINS}
    exec(compile(tree, "<answer>", "exec"), scope)
    function = scope.get(name)
    return function if callable(function) else None


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ALLOWED_ATTRIBUTES
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) and abs(node.value) <= MAX_CONSTANT
    if isinstance(node, ast.FunctionDef):
        return not node.decorator_list
    return isinstance(node, ALLOWED_NODES)


def draw_code_input(kind: str, rng: random.Random) -> Any:
    if kind == "list":
        return [rng.randint(-30, 40) for _ in range(rng.randint(0, 12))]
    if kind == "number":
        return rng.randint(-50, 50)
    letters = [rng.choice("abcdeXYZ") for _ in range(rng.randint(0, 12))]
    return " " * rng.randint(0, 2) + "".join(letters) + " " * rng.randint(0, 2)


def grade_code(record: dict[str, Any], answer: str) -> bool:
    """The function named in the question agrees with the reference on 30 random inputs."""
    function = load_function(answer, record["expected"])
    if function is None:
        return False
    reference, rng = reference_function(record["key"]), random.Random(record["key"])
    kind = record["key"].split("|")[0]
    for _ in range(30):
        value = draw_code_input(kind, rng)
        try:
            if function(value) != reference(value):
                return False
        except (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError):
            return False
    return True


# --------------------------------------------------------------------------------------------
# Facts
# --------------------------------------------------------------------------------------------

ATTRIBUTES = ("capital", "continent", "currency", "language")
COUNTRIES: dict[str, tuple[str, str, str, str]] = {
    "France": ("Paris", "Europe", "euro", "French"),
    "Germany": ("Berlin", "Europe", "euro", "German"),
    "Italy": ("Rome", "Europe", "euro", "Italian"),
    "Spain": ("Madrid", "Europe", "euro", "Spanish"),
    "Portugal": ("Lisbon", "Europe", "euro", "Portuguese"),
    "Greece": ("Athens", "Europe", "euro", "Greek"),
    "Austria": ("Vienna", "Europe", "euro", "German"),
    "Finland": ("Helsinki", "Europe", "euro", "Finnish"),
    "Estonia": ("Tallinn", "Europe", "euro", "Estonian"),
    "Poland": ("Warsaw", "Europe", "zloty", "Polish"),
    "Hungary": ("Budapest", "Europe", "forint", "Hungarian"),
    "Romania": ("Bucharest", "Europe", "leu", "Romanian"),
    "Ukraine": ("Kyiv", "Europe", "hryvnia", "Ukrainian"),
    "Serbia": ("Belgrade", "Europe", "dinar", "Serbian"),
    "Albania": ("Tirana", "Europe", "lek", "Albanian"),
    "Sweden": ("Stockholm", "Europe", "krona", "Swedish"),
    "Norway": ("Oslo", "Europe", "krone", "Norwegian"),
    "Denmark": ("Copenhagen", "Europe", "krone", "Danish"),
    "Iceland": ("Reykjavik", "Europe", "krona", "Icelandic"),
    "the United Kingdom": ("London", "Europe", "pound", "English"),
    "Japan": ("Tokyo", "Asia", "yen", "Japanese"),
    "China": ("Beijing", "Asia", "yuan", "Chinese"),
    "South Korea": ("Seoul", "Asia", "won", "Korean"),
    "India": ("New Delhi", "Asia", "rupee", "Hindi"),
    "Nepal": ("Kathmandu", "Asia", "rupee", "Nepali"),
    "Bangladesh": ("Dhaka", "Asia", "taka", "Bengali"),
    "Thailand": ("Bangkok", "Asia", "baht", "Thai"),
    "Vietnam": ("Hanoi", "Asia", "dong", "Vietnamese"),
    "Cambodia": ("Phnom Penh", "Asia", "riel", "Khmer"),
    "Iran": ("Tehran", "Asia", "rial", "Persian"),
    "Iraq": ("Baghdad", "Asia", "dinar", "Arabic"),
    "Jordan": ("Amman", "Asia", "dinar", "Arabic"),
    "Saudi Arabia": ("Riyadh", "Asia", "riyal", "Arabic"),
    "Egypt": ("Cairo", "Africa", "pound", "Arabic"),
    "Morocco": ("Rabat", "Africa", "dirham", "Arabic"),
    "Tunisia": ("Tunis", "Africa", "dinar", "Arabic"),
    "Kenya": ("Nairobi", "Africa", "shilling", "Swahili"),
    "Ghana": ("Accra", "Africa", "cedi", "English"),
    "Nigeria": ("Abuja", "Africa", "naira", "English"),
    "Angola": ("Luanda", "Africa", "kwanza", "Portuguese"),
    "Brazil": ("Brasilia", "South America", "real", "Portuguese"),
    "Argentina": ("Buenos Aires", "South America", "peso", "Spanish"),
    "Chile": ("Santiago", "South America", "peso", "Spanish"),
    "Colombia": ("Bogota", "South America", "peso", "Spanish"),
    "Peru": ("Lima", "South America", "sol", "Spanish"),
    "Uruguay": ("Montevideo", "South America", "peso", "Spanish"),
    "Mexico": ("Mexico City", "North America", "peso", "Spanish"),
    "Cuba": ("Havana", "North America", "peso", "Spanish"),
    "Canada": ("Ottawa", "North America", "dollar", "English"),
    "the United States": ("Washington", "North America", "dollar", "English"),
    "Australia": ("Canberra", "Oceania", "dollar", "English"),
    "New Zealand": ("Wellington", "Oceania", "dollar", "English"),
}
FACT_ANSWERS = {
    "capital": "The capital of {c} is {v}.",
    "continent": "{C} is in {v}.",
    "currency": "The currency of {c} is the {v}.",
    "language": "People in {c} speak {v}.",
}
FACT_FORMS: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {c}?",
        "Name the capital of {c}.",
        "Which city is the capital of {c}?",
        "Tell me the capital of {c}.",
        "What is the capital city of {c}?",
        "Do you know the capital of {c}?",
        "Capital of {c}?",
        "I am going to {c}. What is its capital?",
    ),
    "continent": (
        "On which continent is {c}?",
        "Which continent is {c} in?",
        "What continent is {c} on?",
        "Name the continent of {c}.",
        "Tell me the continent of {c}.",
        "Where in the world is {c}?",
        "Continent of {c}?",
        "I am going to {c}. Which continent is it on?",
    ),
    "currency": (
        "What is the currency of {c}?",
        "Name the currency of {c}.",
        "Which currency is used in {c}?",
        "Tell me the currency of {c}.",
        "What money do people use in {c}?",
        "What do people pay with in {c}?",
        "Currency of {c}?",
        "I am going to {c}. What is its currency?",
    ),
    "language": (
        "What language is spoken in {c}?",
        "Name the language of {c}.",
        "Which language do people speak in {c}?",
        "Tell me the language of {c}.",
        "What do people in {c} speak?",
        "What is the language of {c}?",
        "Language of {c}?",
        "I am going to {c}. What language is spoken there?",
    ),
}


def make_fact(country: str, attribute: str, form_id: int) -> Question:
    value = COUNTRIES[country][ATTRIBUTES.index(attribute)]
    capitalised = country[0].upper() + country[1:]
    text = FACT_ANSWERS[attribute].format(c=country, C=capitalised, v=mark(value))
    return Question(
        family="facts",
        form=attribute,
        key=f"{form_id}|{country}|{attribute}",
        question=FACT_FORMS[attribute][form_id].format(c=country),
        marked_answer=text,
        expected=value,
    )


def draw_fact(rng: random.Random) -> Question:
    attribute = rng.choices(ATTRIBUTES, (4, 2, 3, 3))[0]
    form_id = rng.randrange(len(FACT_FORMS[attribute]))
    return make_fact(rng.choice(list(COUNTRIES)), attribute, form_id)


def grade_facts(record: dict[str, Any], answer: str) -> bool:
    """The sentence names the value and no other value of the same attribute."""
    column = ATTRIBUTES.index(record["form"])
    country = record["key"].split("|")[1]
    rest = re.sub(rf"\b{re.escape(country)}\b", "", answer, count=1, flags=re.IGNORECASE)
    values = {row[column] for row in COUNTRIES.values()}
    named = {value for value in values if re.search(rf"\b{re.escape(value)}\b", rest)}
    return named == {record["expected"]}


# --------------------------------------------------------------------------------------------
# All families
# --------------------------------------------------------------------------------------------

# form -> (share of the training sequences, generator)
MIXTURE: dict[str, tuple[float, Callable[[random.Random], Question]]] = {
    "plain": (0.15, draw_plain),
    "drill": (0.08, draw_drill),
    "story": (0.19, draw_word_problem),
    "json_asked": (0.13, lambda rng: draw_json(rng, is_forced=False)),
    "json_forced": (0.13, lambda rng: draw_json(rng, is_forced=True)),
    "code": (0.20, draw_code),
    "facts": (0.12, draw_fact),
}


def shows_held_out(question: Question) -> bool:
    """Whether the key, or any sum or difference written in the answer, is held out."""
    if is_held_out(question.key):
        return True
    equations = EQUATION_PATTERN.findall(question.answer)
    return any(is_held_out_equation((int(a), op, int(b))) for a, op, b, _ in equations)


def draw_training_question(rng: random.Random) -> Question:
    forms = list(MIXTURE)
    while True:
        form = rng.choices(forms, [MIXTURE[f][0] for f in forms])[0]
        question = MIXTURE[form][1](rng)
        if not shows_held_out(question):
            return question


def draw_held_out(form: str, rng: random.Random) -> Iterator[Question]:
    """Distinct held-out questions of one form, without end."""
    seen: set[str] = set()
    while True:
        question = MIXTURE[form][1](rng)
        if is_held_out(question.key) and question.question not in seen:
            seen.add(question.question)
            yield question


def grade(question_record: dict[str, Any], answer_text: str) -> bool:
    """Whether an answer (with the given prefix, without special tokens) is right."""
    graders = {"arithmetic": grade_arithmetic, "code": grade_code, "facts": grade_facts}
    return graders[question_record["family"]](question_record, answer_text.strip())
