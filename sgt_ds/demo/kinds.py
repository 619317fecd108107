"""Kinds of what the stories are about, and how each is spoken of. Knows no plot and no words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Person:
    """Someone with a name and the pronouns that go with it."""

    name: str
    kind: str
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Elder:
    """A grown-up with a trade, and the place of that trade."""

    person: Person
    trade: str
    place: Place

    def __str__(self) -> str:
        return self.person.name

    @property
    def he(self) -> str:
        return self.person.he

    @property
    def him(self) -> str:
        return self.person.him

    @property
    def his(self) -> str:
        return self.person.his


@dataclass(frozen=True, slots=True)
class Animal:
    """An animal with a name, its sound, and what it likes."""

    name: str
    species: str
    look: str
    called: str
    food: str

    def __str__(self) -> str:
        return self.name

    @property
    def a(self) -> str:
        return with_article(f"{self.look} {self.species}")


@dataclass(frozen=True, slots=True)
class Thing:
    """Something to own, lose or lend, and what one does with it."""

    look: str
    noun: str
    use: str
    used: str

    def __str__(self) -> str:
        return f"{self.look} {self.noun}"

    @property
    def a(self) -> str:
        return with_article(str(self))


@dataclass(frozen=True, slots=True)
class Place:
    """A place of the village, how one is there, and the spots that it has."""

    name: str
    at: str
    spots: tuple[str, ...]

    def __str__(self) -> str:
        return f"the {self.name}"


@dataclass(frozen=True, slots=True)
class Spot:
    """A spot where a thing can lie: a spot is told in full, so that it can be told again."""

    where: str
    place: Place

    def __str__(self) -> str:
        return f"{self.where} {self.place.at}"


@dataclass(frozen=True, slots=True)
class Weather:
    """Weather of the story's day, and what it causes."""

    noun: str
    opening: str
    effect: str
    talk: str

    def __str__(self) -> str:
        return self.noun


@dataclass(frozen=True, slots=True)
class Task:
    """Something to promise: to do, done, the reason, and what is good afterwards."""

    do: str
    did: str
    reason: str
    after: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that has gone wrong, the tool that it needs, and how it is put right."""

    wrong: str
    tool: str
    mended: str
    cry: str
    species: tuple[str, ...]


def with_article(noun: str) -> str:
    """`a mill`, `an orchard`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def girl(name: str) -> Person:
    """A girl of that name."""
    return Person(name, "girl", "she", "her", "her")


def boy(name: str) -> Person:
    """A boy of that name."""
    return Person(name, "boy", "he", "him", "his")
