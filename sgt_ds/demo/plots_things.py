"""Plots about things: where one was left, who lent it, hid it, took it, or has it now.

A plot is a generator over a world. It yields one stage at a time, a list of sentences, and other
plots may go on between two of its stages: owners, spots and causes are chosen once and told again.
"""

from __future__ import annotations

from collections.abc import Iterator

from sgt_ds.demo.kinds import with_article
from sgt_ds.demo.world import World

Stage = list[str]


def left_behind(world: World) -> Iterator[Stage]:
    """The hero leaves a thing somewhere, misses it, remembers, and finds it there."""
    tell, giver = world.tell, world.another_elder()
    known = {"o": world.thing(), "s": world.spot(), "g": giver}
    yield [
        tell(
            "{h} had {o.a} with {h.him}, a [present|gift] from {g}.",
            "{h} carried {o.a} that [once belonged to|came from] {g} the {g.trade}.",
            "{g} the {g.trade} had [given|made] {h} {o.a}, and {h.he} [loved|treasured] it.",
            **known,
        ),
        tell(
            "{hour} {h} [put|laid|left] the {o} {s} and [ran|went] [after {b}|to look at a beetle|"
            "to help a man with a cart|to pick some flowers|to watch the clouds|to jump over a "
            "ditch].",
            "{hour} {h} [put|laid|left] the {o} {s}, because {h.his} [hands were|arms were] "
            "[full|cold|tired].",
            hour=world.hour(),
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {h} wanted to {o.use} the {o.noun}, but it was [gone|not there|missing].",
            '{hour} {f} asked, "[May|Can] I {o.use} the {o}?" But {h} did not have it.',
            "{hour} {h} [noticed|saw] with a [start|shock] that the {o} was [missing|gone].",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"[What will|Oh no, what would] {g} say?" {h} [cried|sighed|asked].',
            '"{g} [must not hear of|will be sad about] this," said {h} [sadly|quietly].',
            "{h} thought of {g} and [felt ashamed|almost cried|grew quite pale].",
            **known,
        ),
        tell(
            '"Where [did you have it last|have you been today]?" asked {f}.',
            '"Think about it," said {f}. "[Where were you|Which way did you come], {h}?"',
            '"[Do not|Never] give up," said {f}. "[Try to remember|We will look together]."',
        ),
    ]
    yield [
        tell(
            '{hour} {h} remembered. "[It must be|I was] {s.place.at}!" {h.he} [cried|called|said].',
            "{hour} the two of them [walked|went|ran] back to {s.place}.",
            "{hour} they [searched|looked around] {s.place.at} [once more|with great care].",
            hour=world.hour(),
            **known,
        ),
        tell(
            "[There|And there], {s.where}, [lay|was] the {o}.",
            "[And indeed|Sure enough], the {o} was still {s.where}.",
            "{h} found the {o} {s.where}, [just where|exactly where] {h.he} had left it.",
            **known,
        ),
        tell(
            "{h} {o.used} it [at once|all the way home|with joy] and [promised|decided] to take "
            "better care of it.",
            "{f} laughed, and {h} {o.used} the {o.noun} [twice|again and again|happily].",
            '"[Now|So] {g} can be [proud|glad]," said {h} and [hugged|held] the {o.noun}.',
            **known,
        ),
    ]


def rescue(world: World) -> Iterator[Stage]:
    """An animal is in trouble; a tool is borrowed, used, and given back to its owner."""
    tell, owner = world.tell, world.another_elder()
    trouble, animal = world.trouble()
    known = {"o": world.tool(trouble), "g": owner, "a": animal, "t": trouble}
    a_tool = with_article(trouble.tool)
    yield [
        tell(
            "{hour} the children heard a [cry|faint cry|strange sound] [behind a house|close by|"
            "not far from {p}].",
            "{hour} {h} and {f} [heard something|were stopped by a sound] [on the way|near {p}].",
            "{hour} {f} [stopped and|stood still and] pointed at something that moved "
            "[in the distance|among the leaves|behind a wall].",
            hour=world.hour(),
            p=world.place(),
        ),
        tell("It was {a.a}[ called|, whose name was] {a}. {a} {t.wrong}.", **known),
        tell(
            '"We need {a_tool}," [said|cried] {f}. "[Who has one, {h}|Where can we get one]?"',
            '"[If only we had|Somebody must have] {a_tool}!" [said|cried] {h}.',
            a_tool=a_tool,
        ),
    ]
    yield [
        tell(
            "{hour} {h} [ran|hurried] to {g.place} and asked {g} the {g.trade} for help.",
            "{hour} {h} found {g} the {g.trade} {g.place.at} and told {g.him} about {a}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"Take my {o}," said {g}, "but bring it back before [night|dark]."',
            '{g} lent {h} {g.his} {o}. "I need it again [tonight|tomorrow]," {g.he} said.',
            **known,
        ),
        tell("{h} [ran back|came back in time]. {h.he} " + trouble.mended + ".", **known),
        tell(
            '"{t.cry}" {f} [had called|had shouted] [the whole time|again and again].',
            "{a} {a.called} [loudly|softly|for joy] and [followed|looked at] {h}.",
            "{f} gave {a} {a.food}, and {a} {a.called}.",
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {h} [brought|carried] the {o} back to {g}.",
            "{hour} {g} got {g.his} {o} back, [clean and dry|as {h} had promised].",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"And how is {a}?" asked {g}. "[Safe and sound|Free again|Well and hungry], {g}," said {h}.',
            '"So my {o.noun} saved {a}," said {g} [proudly|with a smile].',
            "{g} [laughed|smiled|was glad] when {g.he} heard about {a} the {a.species}.",
            **known,
        ),
    ]


def hidden_present(world: World) -> Iterator[Stage]:
    """The hero hides a present for the friend, who almost finds it, and gives it at last."""
    tell = world.tell
    known = {"o": world.thing(), "s": world.spot(), "day": world.rng.choice(OCCASIONS)}
    yield [
        tell(
            "[Tomorrow was|It was the day of] {f}'s {day}, and {h} had [bought|made] {o.a} for "
            "{f.him}.",
            "{h} had a secret: {o.a} for {f}'s {day}.",
            "For {f}'s {day} {h} had saved [every coin|for weeks], and now {h.he} had {o.a}.",
            **known,
        ),
        tell(
            "{hour} {h} hid the {o.noun} {s}[, so that {f} would not see it| and told nobody but "
            "{b}].",
            "{hour}, when {f} looked away, {h} hid the {o} {s}.",
            hour=world.hour(),
            **known,
        ),
    ]
    yield [
        tell(
            '{hour} {f} said, "[Let us|I want to|We could] go to {s.place}."',
            "{hour} {f} [wanted to play|wished to sit] {s.place.at}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"[No, not|Not] {s.place.at}!" said {h} [quickly|much too loudly]. "[Not yet|Not today], {f}."',
            '"[Not yet|Later], {f}," said {h} [and turned red|quickly|and looked at {b}].',
            **known,
        ),
        tell(
            "{f} [wondered|could not guess] why, [but said nothing|and frowned].",
            '"You [are hiding|know] something," said {f}, [for {f.he} was {trait2}|and smiled].',
        ),
    ]
    yield [
        tell(
            '{hour} {h} [took {f} by the hand|led {f} to {s.place}]. "[Look|Now look] {s.where}," '
            "{h.he} said.",
            "{hour} {h} [asked|told] {f} to look {s}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            "{f} looked {s.where} and found {o.a}.",
            "There {f} found the {o}, [wrapped in paper|with a ribbon on it].",
            **known,
        ),
        tell(
            '"[For my|Is it for my] {day}?" asked {f} and {o.used} it [at once|right away].',
            '"[Happy {day}|It is for your {day}]!" said {h}, and {f} {o.used} it [carefully|'
            "proudly].",
            **known,
        ),
    ]


OCCASIONS = ("birthday", "name day", "farewell", "first day at school")


def thief(world: World) -> Iterator[Stage]:
    """A thing is gone from the elder's place; a trace leads to the animal that took it, and why."""
    tell = world.tell
    known = {
        "o": world.thing(),
        "s": world.spot(),
        "trace": world.rng.choice(TRACES),
        "why": world.rng.choice(REASONS),
    }
    yield [
        tell(
            "{hour} there was [trouble|a great noise|much talk] {e.place.at}: {e}'s {o} was [gone|"
            "missing].",
            "{hour} {e} could not find {e.his} {o}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"[Who|Who on earth] takes {o.a}?" {e.he} [asked|cried]. "[It was here|I had it] this '
            'morning."',
            '"[Without|If I do not have] the {o.noun} I cannot [work|sleep]," {e.he} said.',
            **known,
        ),
        tell(
            "{h} looked [closely|around] and [found|saw] {trace} on the floor.",
            '"[Look here|See]!" said {h} and pointed at {trace} [by|near] the door.',
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {h} and {f} followed {trace} [step by step|along the path|for a long way].",
            '{hour} {f} [discovered|found] {trace} again. "This way, {h}!" {f.he} said.',
            hour=world.hour(),
            **known,
        ),
        tell(
            "It led [straight|past the church|over a wall] to {s.place}.",
            "[At last|In the end] they came to {s.place}.",
            **known,
        ),
        tell(
            "{s.where}, they found {b}, and under {b} lay the {o}.",
            "{b} sat {s.where}, with the {o} between the paws."
            if world.animal.species in ("dog", "cat")
            else "{b} stood {s.where}, and right beside {b} lay the {o}.",
            **known,
        ),
        tell(
            '"So it was you, {b}!" said {f}. {b} {b.called} [softly|sadly|as if to say sorry].',
            "{b} had [taken|carried off] the {o.noun}, [because|for] {b} {why}.",
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {h} [brought|gave] {e} the {o} back and told {e.him} about {b}.",
            "{hour} {e} [held|had] the {o} in {e.his} hands again.",
            hour=world.hour(),
            **known,
        ),
        tell(
            "{e} was not angry, [for|because] {b} {why}.",
            '"[Poor|Silly] {b}," said {e}, [and gave {b} {b.food}|and shook {e.his} head].',
            **known,
        ),
    ]


TRACES = (
    "a trail of crumbs",
    "a line of muddy prints",
    "a thread of wool",
    "a row of feathers",
    "a trail of straw",
    "a line of scratches",
    "a trail of flour",
)

REASONS = (
    "had wanted to play",
    "had felt lonely",
    "had missed the children",
    "liked the smell of it",
    "had been hungry",
    "had been cold in the night",
    "loved soft things",
    "had found it in the rain",
)


def swap(world: World) -> Iterator[Stage]:
    """Two children swap things, and later it is told who has what."""
    tell = world.tell
    known = {"o": world.thing(), "q": world.thing()}
    yield [
        tell(
            "{h} owned {o.a}, and {f} owned {q.a}.",
            "{h} had brought {o.a}, and {f} had brought {q.a}.",
            "That day {h} had {o.a} in {h.his} bag, while {f} carried {q.a}.",
            **known,
        ),
        tell(
            '{hour} {f} said, "[Give me|Let me have] your {o.noun}, and you [get|may have] my '
            '{q.noun}."',
            '{hour} {h} asked, "[Will you|Shall we] swap? My {o.noun} for your {q.noun}!"',
            hour=world.hour(),
            **known,
        ),
        tell(
            "They [shook hands|agreed], and so {f} got the {o} and {h} got the {q}.",
            "[So|And so] {h} took the {q}, and {f} took the {o}.",
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {f} {o.used} the {o}, and {h} {q.used} the {q}.",
            "{hour} {h} {q.used} {h.his} new {q.noun}, and {f} {o.used} {f.his} new {o.noun}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"[Are you|Do you feel] sorry about your {o.noun}?" asked {f}. "[No|Not at all], I '
            '[like|love] the {q.noun}," said {h}.',
            '"Why does {f} have your {o.noun}?" asked {e}. "Because I have {f.his} {q.noun}," said '
            "{h}.",
            "Both were [happy|content] with what they had got.",
            **known,
        ),
    ]
