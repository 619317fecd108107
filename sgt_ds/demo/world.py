"""The state of one story while it is told: who is in it, what is taken, what time it is.

Plots ask for a thing, a spot or a task that no other plot of the story uses, so that what is
said early stays true to the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

from sgt_ds.demo.kinds import (
    Animal,
    Elder,
    Person,
    Place,
    Spot,
    Task,
    Thing,
    Trouble,
    Weather,
)
from sgt_ds.demo.phrases import expand
from sgt_ds.demo.words import (
    ANIMALS,
    CHILDREN,
    ELDERS,
    FOODS,
    LOOKS,
    MESSAGES,
    PLACES,
    RIDDLES,
    SKILLS,
    TASKS,
    THINGS,
    TRAITS,
    TROUBLES,
    VILLAGES,
    WEATHERS,
)

T = TypeVar("T")

# The hours of a story's day, in order; each is used at most once.
HOURS = (
    ("In the morning", "After breakfast", "Early in the day"),
    ("A little later", "Before noon", "When the bell struck ten"),
    ("At noon", "In the middle of the day", "After lunch"),
    ("In the afternoon", "When the shadows grew longer", "After a short rest"),
    ("Later that day", "Towards evening", "When the clock struck five"),
    ("In the evening", "Before supper", "When the sun was low"),
    ("At dusk", "As it grew dark", "When the first star came out"),
)


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class World:
    """One story's people and things. `tell` fills a template with them.

    Slots of every template: `h` the hero, `f` the friend, `e` an elder, `b` an animal,
    `v` the village, `w` the weather, `trait` and `trait2` of hero and friend.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        hero, friend = rng.sample(CHILDREN, 2)
        self.elders = self._shuffled(ELDERS)
        trait, trait2 = rng.sample(TRAITS, 2)
        self.slots: dict[str, object] = {
            "h": hero,
            "f": friend,
            "e": self.elders.pop(),
            "b": self.make_animal(tuple(ANIMALS)),
            "v": rng.choice(VILLAGES),
            "w": rng.choice(WEATHERS),
            "trait": trait,
            "trait2": trait2,
        }
        self._places = self._shuffled(
            place for place in PLACES.values() if place != self.elder.place
        )
        self._nouns = self._shuffled(THINGS)
        self._looks = self._shuffled(LOOKS)
        self._tasks = self._shuffled(TASKS)
        self._foods = self._shuffled(FOODS)
        self._messages = self._shuffled(MESSAGES)
        self._skills = self._shuffled(SKILLS.items())
        self._riddles = self._shuffled(RIDDLES.items())
        self._hour = 0
        self.day = rng.choice(DAYS)

    @property
    def hero(self) -> Person:
        """The child that the story follows."""
        return self._slot("h", Person)

    @property
    def friend(self) -> Person:
        """The hero's friend."""
        return self._slot("f", Person)

    @property
    def elder(self) -> Elder:
        """The grown-up of the story."""
        return self._slot("e", Elder)

    @property
    def animal(self) -> Animal:
        """The animal that goes along."""
        return self._slot("b", Animal)

    @property
    def weather(self) -> Weather:
        """The weather of the day."""
        return self._slot("w", Weather)

    def tell(self, *templates: str, **slots: object) -> str:
        """One of the templates, filled in."""
        template = templates[int(self.rng.random() * len(templates))]
        return expand(template, {**self.slots, **slots}, self.rng)

    def hour(self) -> str:
        """The time of day, later at every call."""
        names = HOURS[min(self._hour, len(HOURS) - 1)]
        if self._hour >= len(HOURS):
            names = ("Then", "Soon after", "And then")
        self._hour += 1
        return self.rng.choice(names)

    def thing(self) -> Thing:
        """A thing that nobody in the story has yet: neither its name nor its look."""
        noun = self._nouns.pop()
        return Thing(self._looks.pop(), noun, *THINGS[noun])

    def tool(self, trouble: Trouble) -> Thing:
        """The tool that a trouble needs."""
        return Thing(self._looks.pop(), trouble.tool, "use", "used")

    def place(self) -> Place:
        """A place where nothing has happened yet."""
        return self._places.pop()

    def spot(self) -> Spot:
        """A spot where a thing can lie, at a place where nothing has happened yet."""
        place = self.place()
        return Spot(self.rng.choice(place.spots), place)

    def task(self) -> Task:
        """Something to promise."""
        return self._tasks.pop()

    def food(self) -> str:
        """Something to eat that nobody has eaten yet."""
        return self._foods.pop()

    def message(self) -> str:
        """News for somebody."""
        return self._messages.pop()

    def skill(self) -> tuple[str, str]:
        """Something to learn, and its trick."""
        return self._skills.pop()

    def riddle(self) -> tuple[str, str]:
        """A riddle and its answer."""
        return self._riddles.pop()

    def another_elder(self) -> Elder:
        """A grown-up of another trade than all others in the story."""
        taken = {self.elder.trade}
        while (other := self.elders.pop()).trade in taken:
            pass
        self.elders = [elder for elder in self.elders if elder.trade != other.trade]
        return other

    def trouble(self) -> tuple[Trouble, Animal]:
        """A trouble, and an animal that can get into it; not the animal of the story."""
        trouble = self.rng.choice(TROUBLES)
        own = self.animal.species
        return trouble, self.make_animal([kind for kind in trouble.species if kind != own])

    def make_animal(self, kinds: Sequence[str]) -> Animal:
        """An animal of one of these species."""
        species = self.rng.choice(kinds)
        names, looks, called, food = ANIMALS[species]
        return Animal(
            self.rng.choice(names.split()),
            species,
            self.rng.choice(looks.split()),
            called,
            food,
        )

    def _shuffled(self, items: Iterable[T]) -> list[T]:
        shuffled = list(items)
        self.rng.shuffle(shuffled)
        return shuffled

    def _slot(self, name: str, kind: type[T]) -> T:
        value = self.slots[name]
        assert isinstance(value, kind)
        return value
