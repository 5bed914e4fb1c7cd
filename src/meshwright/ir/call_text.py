"""Reads texts of a plan such as ``server(ssp=3, servers=2)``: a name, words, and options."""

import re
from collections.abc import Callable

from meshwright.errors import MeshwrightError

Wrong = Callable[[str, str], MeshwrightError]
"""A function that makes an error from a problem and a remedy."""
SWITCH = ("on", "off")

_CALL = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\(([^()]*(?:\([^()]*\)[^()]*)*)\))?\s*")


class CallText:
    """The parts of a text ``name(word, ..., key=value, ...)``. A value in parentheses, such as ``codec=qsgd(4)``, stays
    in one part. For errors, ``names`` lists the valid names, and ``what`` says what they are names of.

    The methods take words and options; ``end`` refuses the words and options that are left.

    Raises:
        MeshwrightError: the text is malformed; ``wrong`` makes the error.
    """

    def __init__(self, text: str, wrong: Wrong, names: str, what: str) -> None:
        match = _CALL.fullmatch(text)
        if match is None:
            raise wrong(f"{text.strip()!r} is not a {what}", f"write {names}")
        self.name, self._wrong = match[1], wrong
        self._words: list[str] = []
        self._options: dict[str, str] = {}
        for piece in re.split(r",(?![^(]*\))", match[2]) if match[2] and match[2].strip() else ():
            key, equals, value = piece.partition("=")
            if not equals:
                self._words.append(key.strip())
            elif key.strip() in self._options:
                raise wrong(f"{key.strip()} stands twice", "give each option once")
            else:
                self._options[key.strip()] = value.strip()
        self._known: list[str] = []

    def word(self, choices: tuple[str, ...], default: str = "") -> str:
        """The next word, which must be in ``choices``. If there is no word, ``default``."""
        if not self._words and default:
            return default
        word = self._words.pop(0) if self._words else ""
        if word not in choices:
            problem = f"{self.name} with {word!r}" if word else f"{self.name} alone"
            raise self._wrong(problem, f"write {' or '.join(f'{self.name}({each})' for each in choices)}")
        return word

    def has_number(self) -> bool:
        """Whether the next word is a number."""
        return bool(self._words) and self._words[0].lstrip("-").isdecimal()

    def has(self, key: str) -> bool:
        """Whether there is an option of this name."""
        self._known.append(key)
        return key in self._options

    def text(self, key: str, default: str = "") -> str:
        """The text of the option."""
        self._known.append(key)
        return self._options.pop(key, default)

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """The value of the option, which must be in ``choices``."""
        value = self.text(key, default)
        if value not in choices:
            raise self._wrong(f"{key}={value}", f"{key} is {' or '.join(choices)}")
        return value

    def first(self, key: str, default: bool = False) -> str:
        """The text of the option. If it is missing and ``default`` is false, the next word.

        Raises:
            MeshwrightError: both are missing.
        """
        word = self.text(key)
        if not word and not default:
            word = self._words.pop(0) if self._words else ""
            if not word:
                raise self._wrong(f"{self.name} without a number", f"write {self.name}({key.upper()})")
        return word

    def as_number(self, key: str, word: str) -> float:
        """The word as a number."""
        try:
            return float(word)
        except ValueError:
            problem, remedy = f"{key}={word} is not a number", f"write {key} as a number, such as 0.01"
            raise self._wrong(problem, remedy) from None

    def whole(self, key: str, least: int, default: int | None = None) -> int:
        """The option as a whole number of at least ``least``. If the option has no default, it may also be the next
        word."""
        word = self.first(key, default is not None)
        if not word and default is not None:
            return default
        if not word.isdecimal() or int(word) < least:
            raise self._wrong(f"{key}={word}", f"{key} is a whole number of at least {least}")
        return int(word)

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """The option as a number. If the option has no default, it may also be the next word."""
        word = self.first(key, default is not None)
        if not word and default is not None:
            return default
        value = self.as_number(key, word)
        if not least <= value <= most:
            raise self._wrong(f"{key}={word}", f"{key} is at least {least:g} and at most {most:g}")
        return value

    def end(self) -> None:
        """Refuse the words and options that no method has taken."""
        known = f"its options are {', '.join(dict.fromkeys(self._known))}" if self._known else "it has no options"
        if self._words:
            what = "a number" if self.has_number() else repr(self._words[0])
            raise self._wrong(f"{self.name} with {what}", known)
        for key in self._options:
            raise self._wrong(f"unknown option {key!r} of {self.name}", known)


def sizes_of(text: str) -> tuple[int, ...]:
    """The sizes in a text such as ``2x2x1``; empty if the text has another form."""
    parts = text.split("x")
    return tuple(map(int, parts)) if len(parts) > 1 and all(part.isdecimal() for part in parts) else ()
