"""How an answer under a grammar can be brought to an end in few tokens.

GrammarState is where one answer stands in its grammar: the tokens it has consumed, which may come
next, and a Closing, bytes that complete the value. Closings are searched byte by byte, since a
grammar has few choices of bytes where it may have thousands of tokens, and then spelled in the
fewest tokens.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from oled_moe.errors import ConfigError
from oled_moe.types import BoolArray

# Where JSON has a choice outside of strings, the bytes that lead to its end soonest come first; a 0
# may still need a fraction.
_JSON_ORDER = b'}],:1023456789"ntf-[{'
# Where so many bytes or more may come next they are content, not structure.
_MANY_CHOICES = 21
# Words of at least so many bytes may fill strings that need length.
_SHORTEST_WORD = 2
# Bytes of other ways tried to shorten one closing, at an answer's start and at each of its steps:
# half a second and some tens of milliseconds of the slowest grammars.
_WORK_AT_START = 40_000
_WORK_AT_STEP = 4_000
# The exact search gives up after so many states looked at, or so many remembered.
_MAX_LOOKED_AT = 2_000
_MAX_REMEMBERED = 60_000
# Bytes of the longest closing searched for.
_MAX_CLOSING_BYTES = 4_096


class _Bytes:
    """A vocabulary whose tokens are the 256 bytes, and one more as the end."""

    tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
    special_token_ids = [256]
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def byte_tokenizer() -> LLTokenizer:
    """llguidance's view of plain bytes."""
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257)


class Speller:
    """The tokens that text can be made of: their bytes, and the fewest that spell given bytes.

    `usable`: bool [V], False for special tokens and whatever else is no text.
    """

    def __init__(self, bytes_of: Sequence[bytes], usable: BoolArray) -> None:
        self.bytes_of = bytes_of
        self.usable = usable
        self._id_of: dict[bytes, int] = {}
        for token_id in usable.nonzero()[0].tolist():
            self._id_of.setdefault(bytes_of[token_id], token_id)
        self._id_of.pop(b"", None)
        self.longest = max(map(len, self._id_of), default=1)
        self.spells_every_byte = all(bytes([value]) in self._id_of for value in range(256))
        # One word of small and one of capital letters for each length, the longest first.
        words: dict[tuple[int, bool], bytes] = {}
        for spelling in self._id_of:
            is_word = spelling.isalpha() and (spelling.islower() or spelling.isupper())
            if is_word and len(spelling) >= _SHORTEST_WORD:
                words.setdefault((len(spelling), spelling.islower()), spelling)
        self.words = tuple(words[kind] for kind in sorted(words, reverse=True))

    def spell(self, text: bytes) -> list[int] | None:
        """The fewest tokens that make `text`, None where no tokens do."""
        # fewest[i]: tokens for the first i bytes, and the length of the last of them.
        fewest: list[tuple[int, int] | None] = [(0, 0)]
        for end in range(1, len(text) + 1):
            best = None
            for size in range(1, min(self.longest, end) + 1):
                before = fewest[end - size]
                if before is None or text[end - size : end] not in self._id_of:
                    continue
                if best is None or before[0] + 1 <= best[0]:
                    best = (before[0] + 1, size)
            fewest.append(best)
        if fewest[-1] is None:
            return None
        token_ids, end = [], len(text)
        while end:
            step = fewest[end]
            assert step is not None
            token_ids.append(self._id_of[text[end - step[1] : end]])
            end -= step[1]
        return token_ids[::-1]


class _Place(Enum):
    """Where in JSON a text ends: outside of strings, in one, or in one behind a backslash."""

    OUTSIDE = 0
    STRING = 1
    ESCAPE = 2


@dataclass(frozen=True, slots=True)
class Closing:
    """Bytes that complete a value, and tokens that spell them. `is_proven`: there are no fewer."""

    text: bytes
    token_ids: tuple[int, ...]
    is_proven: bool = False


class GrammarMark(NamedTuple):
    """A place of a GrammarState."""

    by_token: LLMatcher
    by_byte: LLMatcher
    num_tokens: int


class GrammarState:
    """Where one answer stands in its grammar.

    `by_token` and `by_byte` are matchers of the same grammar over tokens and over bytes, both at
    the start; `hints` is text that JSON strings of this grammar may end with, best first; `title`
    is what messages call the grammar. `num_tokens` counts what has been consumed.
    Raises: ConfigError from any method where the grammar turns out to be of no use: it has grown
    beyond the library's limits, or asks for what this model cannot write.
    """

    def __init__(
        self,
        by_token: LLMatcher,
        by_byte: LLMatcher,
        speller: Speller,
        *,
        hints: Sequence[bytes] = (),
        title: str = "the grammar",
    ) -> None:
        self._by_token = by_token
        self._by_byte = by_byte
        self._speller = speller
        self._hints = hints
        self._title = title
        self._consumed: list[int] = []
        # Where in JSON the text is, after each consumed token.
        self._places: list[_Place] = [_Place.OUTSIDE]
        # Of each set of bytes that may come next the choice made there the first time.
        self._narrowest_of: dict[bytes, tuple[bytes, bool]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._consumed)

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._by_token.is_accepting())

    @property
    def is_exhausted(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return bool(self._by_token.is_stopped()) and self.is_accepting

    def allowed(self) -> BoolArray:
        """Which tokens may come next, bool [V]; ends of the answer are not among them."""
        is_allowed = self._allowed_by(self._by_token)
        if not is_allowed.any() and not self.is_accepting:
            self._check()
            raise self._unwritable()
        return is_allowed

    def _allowed_by(self, matcher: LLMatcher) -> BoolArray:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        size = len(self._speller.bytes_of)
        is_allowed = np.unpackbits(bits, count=size, bitorder="little").astype(np.bool_)
        return is_allowed & self._speller.usable

    def allows(self, token_id: int) -> bool:
        """Whether this token may come next."""
        is_usable = bool(self._speller.usable[token_id])
        return is_usable and bool(self._by_token.validate_tokens([token_id]) == 1)

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever the model says; may be none."""
        token_ids: list[int] = self._by_token.compute_ff_tokens()
        return token_ids

    def consume(self, token_id: int) -> None:
        """One more token of the answer, which must be allowed. Mutates: the state."""
        text = self._speller.bytes_of[token_id]
        is_consumed = self._by_token.consume_token(token_id)
        is_consumed = is_consumed and self._by_byte.consume_tokens(list(text))
        if not is_consumed:
            self._check()
        assert is_consumed, f"token {token_id} was not allowed"
        self._consumed.append(token_id)
        self._places.append(_place_after(text, self._places[-1]))

    def since(self, num_tokens: int) -> tuple[int, ...]:
        """The tokens consumed after the first `num_tokens`."""
        return tuple(self._consumed[num_tokens:])

    def mark(self) -> "GrammarMark":
        """This place, to come back to."""
        # Copies, since the library's own way back has given wrong masks.
        return GrammarMark(
            self._by_token.deep_copy(), self._by_byte.deep_copy(), len(self._consumed)
        )

    def return_to(self, mark: "GrammarMark") -> None:
        """Take back all tokens consumed since. Mutates: the state."""
        self._by_token, self._by_byte = mark.by_token.deep_copy(), mark.by_byte.deep_copy()
        del self._consumed[mark.num_tokens :], self._places[mark.num_tokens + 1 :]

    def ends_with(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens complete the answer."""
        matcher = self._by_token.deep_copy()
        return bool(matcher.consume_tokens(list(token_ids)) and matcher.is_accepting())

    def closing(self, limit: int, *, is_quick: bool = False) -> Closing | None:
        """A completion of at most `limit` tokens; None where none was found.

        A straight one that fits is returned as it is, else alternatives are tried at its choices,
        some unless it is to be `is_quick`.
        """
        most = min(_MAX_CLOSING_BYTES, 300 + 4 * limit * self._speller.longest)
        return self._fitting(limit, most, 0 if is_quick else _WORK_AT_STEP)

    def first_closing(self, limit: int) -> Closing | None:
        """As `closing`, for the start of an answer: there is time for many alternatives and, at
        last, a search of all ways, up to a bound on the work."""
        best = self._fitting(limit, _MAX_CLOSING_BYTES, _WORK_AT_START)
        return best or self._exact(limit)[0]

    def shortest_closing(self) -> Closing | None:
        """The completion of fewest tokens that the whole search finds.

        `is_proven` where the search came to its end; else it gave up and this is the best it saw.
        """
        ways = [
            self._improved(closing, 0, _WORK_AT_START)
            for closing in self._straight(_MAX_CLOSING_BYTES)
        ]
        best = min(ways, key=_num_tokens, default=None)
        limit = _MAX_CLOSING_BYTES if best is None else _num_tokens(best) - 1
        found, is_complete = self._exact(limit)
        if found is not None:
            return found
        return best and Closing(best.text, best.token_ids, is_proven=is_complete)

    def _fitting(self, limit: int, most: int, work: int) -> Closing | None:
        found = []
        for closing in self._straight(most):
            if _num_tokens(closing) <= limit:
                return closing
            found.append(closing)
        for closing in found:
            better = self._improved(closing, limit, work)
            if _num_tokens(better) <= limit:
                return better
        return None

    def _straight(self, most: int) -> Iterator[Closing]:
        """The straight ways to the end, those of them that take at most `most` bytes."""
        for is_json in (True, False):
            closing = self._walked(b"", is_json, most)
            if closing is not None:
                yield closing
                most = min(most, len(closing.text) + self._speller.longest)

    def _improved(self, best: Closing, limit: int, work: int) -> Closing:
        """The closing after trying other ways at its choices until it fits, `work` bytes of them
        at most."""
        is_better = True
        while is_better and _num_tokens(best) > limit:
            is_better = False
            for start in self._alternatives(best.text):
                most = len(best.text) + self._speller.longest
                work -= 2 * most
                if work < 0:
                    break
                ways = [self._walked(start, is_json, most) for is_json in (True, False)]
                closing = min(filter(None, ways), key=_num_tokens, default=best)
                if _num_tokens(closing) < _num_tokens(best):
                    best, is_better = closing, True
                    break
        return best

    def _alternatives(self, text: bytes) -> Iterator[bytes]:
        """Beginnings that leave `text` at one of its choices, one for each kind of byte there."""
        matcher = self._by_byte.deep_copy()
        for position, value in enumerate(text):
            choices = _choices(matcher)
            if len(choices) > 1:
                seen = {_outlook(matcher, value)}
                for other in choices:
                    outlook = _outlook(matcher, other)
                    if outlook not in seen:
                        seen.add(outlook)
                        yield text[:position] + bytes([other])
                for hint in self._hints:
                    if matcher.validate_tokens(list(hint)) == len(hint):
                        yield text[:position] + hint
            matcher.consume_token(value)

    def _walked(self, start: bytes, is_json: bool, most: int) -> Closing | None:
        """The walk from `start`, spelled."""
        text = self._walk(start, is_json=is_json, most=most)
        token_ids = None if text is None else self._speller.spell(text)
        if text is None or token_ids is None:
            return None
        return Closing(text, tuple(token_ids))

    def _walk(self, start: bytes, *, is_json: bool, most: int) -> bytes | None:
        """Go on from `start` to an end within `most` bytes, at each choice by what promises to be
        near; there is no way back."""
        matcher = self._by_byte.deep_copy()
        if start and not matcher.consume_tokens(list(start)):
            return None
        text = bytearray(start)
        place = _place_after(start, self._places[-1])
        while not matcher.is_accepting():
            step = matcher.compute_ff_bytes()
            if not step:
                choices = _choices(matcher)
                if not choices or len(text) > most:
                    return None
                step = self._step(matcher, choices, place, is_json=is_json)
            if not matcher.consume_tokens(list(step)):
                return None
            text += step
            place = _place_after(step, place)
        return bytes(text)

    def _step(self, matcher: LLMatcher, choices: bytes, place: _Place, *, is_json: bool) -> bytes:
        """The bytes to go on with at a choice."""
        if place is _Place.STRING:
            is_end = b'"' in choices
            for hint in self._hints:
                # Where a string may end at once, only the name of a member is worth more.
                is_name = hint.endswith(b":")
                if (is_name or not is_end) and matcher.validate_tokens(list(hint)) == len(hint):
                    return hint
            if is_end:
                return b'"'
        if is_json and place is _Place.OUTSIDE:
            known = next((value for value in _JSON_ORDER if value in choices), None)
            if known is not None:
                return bytes([known])
        narrowest, is_nearer = self._narrowest(matcher, choices)
        if is_nearer or len(choices) < _MANY_CHOICES:
            return narrowest
        # This is content, and a long word is one token.
        for word in self._speller.words:
            if matcher.validate_tokens(list(word)) == len(word):
                return word
        return narrowest

    def _narrowest(self, matcher: LLMatcher, choices: bytes) -> tuple[bytes, bool]:
        """The byte after which the answer may end, or else the least may follow, and whether
        that is less than now."""
        key = matcher.compute_bitmask()
        if key not in self._narrowest_of:
            # Escapes and characters of several bytes narrow what follows for their own ends only.
            plain = [value for value in choices if value < 128 and value != 0x5C] or choices
            ranks = {value: _rank(matcher, value) for value in plain}
            best = min(plain, key=lambda value: ranks[value])
            self._narrowest_of[key] = bytes([best]), ranks[best][:2] < (True, len(choices))
        return self._narrowest_of[key]

    def _exact(self, limit: int) -> tuple[Closing | None, bool]:
        """The completion of fewest tokens, at most `limit`, and whether all ways were seen.

        Ways of the same bytes are one. Source: Dijkstra 1959, every token costing 1.
        """
        bytes_of = self._speller.bytes_of
        # Longer ways first among those of as many tokens: they are nearer to an end.
        heap: list[tuple[int, int, bytes, tuple[int, ...]]] = [(0, 0, b"", ())]
        seen, num_looked_at = {b""}, 0
        while heap:
            num_tokens, _, text, token_ids = heapq.heappop(heap)
            num_looked_at += 1
            if num_looked_at > _MAX_LOOKED_AT or len(heap) > _MAX_REMEMBERED:
                return None, False
            matcher = self._by_token.deep_copy()
            if not matcher.consume_tokens(list(token_ids)):
                continue
            if matcher.is_accepting():
                return Closing(text, token_ids, is_proven=True), True
            nexts = self._allowed_by(matcher) if num_tokens < limit else np.zeros(0)
            for token_id in nexts.nonzero()[0].tolist():
                longer = text + bytes_of[token_id]
                if longer not in seen:
                    seen.add(longer)
                    entry = (num_tokens + 1, -len(longer), longer, (*token_ids, token_id))
                    heapq.heappush(heap, entry)
        return None, True

    def _check(self) -> None:
        for matcher in (self._by_token, self._by_byte):
            if matcher.is_error():
                reason = " ".join(matcher.get_error().split())
                if reason.startswith("NoExtension"):
                    raise self._unwritable()
                raise ConfigError(
                    f"{self._title} has become too complex at token {self.num_tokens} of this "
                    f"answer; make it simpler, or its repetitions end ({reason})"
                )

    def _unwritable(self) -> ConfigError:
        return ConfigError(
            f"{self._title} asks for text that no token of this model can write at this place; "
            "allow other characters there"
        )


def _num_tokens(closing: Closing) -> int:
    return len(closing.token_ids)


def _choices(matcher: LLMatcher) -> bytes:
    """The bytes that may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return bytes(np.unpackbits(bits, bitorder="little")[:256].nonzero()[0].tolist())


def _outlook(matcher: LLMatcher, value: int) -> tuple[bool, bytes, bytes]:
    """What is to be seen after one more byte: whether that may be the end, else what follows."""
    after = matcher.deep_copy()
    after.consume_token(value)
    return after.is_accepting(), after.compute_bitmask(), after.compute_ff_bytes()


def _rank(matcher: LLMatcher, value: int) -> tuple[bool, int, bool, int]:
    """Orders bytes: those that may be the last first, then by how much may follow."""
    is_end, bits, _ = _outlook(matcher, value)
    num_next = int.from_bytes(bits, "little").bit_count()
    return not is_end, num_next, not chr(value).isalnum(), value


def _place_after(text: bytes, place: _Place) -> _Place:
    """Where in JSON is who read `text` from `place` on."""
    for value in text:
        if place is _Place.ESCAPE:
            place = _Place.STRING
        elif place is _Place.STRING and value == 0x5C:
            place = _Place.ESCAPE
        elif value == 0x22:
            place = _Place.OUTSIDE if place is _Place.STRING else _Place.STRING
    return place
