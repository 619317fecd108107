"""Plots about words: a promise, a message, an errand, a bet, a lesson, a riddle, a warning.

Plots as in `plots_things`: what one stage says, a later one of the same plot says again.
"""

from __future__ import annotations

from collections.abc import Iterator

from sgt_ds.demo.plots_things import Stage
from sgt_ds.demo.world import World


def promise(world: World) -> Iterator[Stage]:
    """The hero promises a task, nearly forgets it, and keeps the promise."""
    tell = world.tell
    known = {"t": world.task(), "g": world.another_elder()}
    yield [
        tell(
            "{hour} {g} the {g.trade} [came by|met {h} on the road|stopped {h} with a wave].",
            "{hour} {h} [met|saw|greeted] {g} the {g.trade} {g.place.at}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"[Will|Can] you {t.do} before [dark|supper]?" {g.he} asked, "for {t.reason}."',
            '"[Please {t.do}|Be so good and {t.do}] today," said {g}, "because {t.reason}."',
            **known,
        ),
        tell(
            '"I promise to {t.do}," [said|answered|replied] {h}.',
            "{h} [gave {g} {h.his} word|nodded and promised to {t.do}].",
            **known,
        ),
    ]
    yield [
        tell(
            '{hour} {h} [stopped suddenly|jumped up|stood still]. "I [nearly|almost] forgot {g}!" '
            "{h.he} said.",
            '{hour} {f} asked, "[Did you not promise|Is there not something that you promised] '
            '{g}?"',
            "{hour} {h} remembered what {h.he} had promised {g}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            "{h} [ran|hurried|went straight] to {g.place} and {t.did}.",
            "So {h} {t.did}, [though|even though] {h.he} was [tired|hungry|cold].",
            "{f} [helped|came along], and together they {t.did}.",
            **known,
        ),
        tell(
            "[Soon|Then|After that] {t.after}, and {g} [smiled|was glad|was content].",
            'When {t.after}, {g} said, "[You kept|{h}, you kept] your promise."',
            '"[I knew|I was sure] that you would {t.do}," said {g} the {g.trade}.',
            **known,
        ),
    ]


def message(world: World) -> Iterator[Stage]:
    """The hero carries news from one grown-up to another, word for word."""
    tell = world.tell
    known = {"g": world.another_elder(), "k": world.another_elder(), "m": world.message()}
    yield [
        tell(
            "{hour} {g} the {g.trade} [called|waved to] {h}.",
            "{hour} {h} [looked in|stopped] {g.place.at}, where {g} the {g.trade} was [working|"
            "resting].",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"[Run to|Go to] {k} the {k.trade}," {g.he} said, "and [tell {k.him}|say] that {m}."',
            '"{k} must know that {m}," said {g}. "[Will you|Can you] tell {k.him}?"',
            **known,
        ),
        tell(
            '"{m}," {h} repeated, so as not to forget it.',
            'All the way {h} [whispered|sang|said] to {b}, "[Remember|Mind], {m}."',
            "{h} [learned|knew] the words by heart and [ran off|set out].",
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {h} [reached|came to] {k.place} and found {k}.",
            "{hour} {h} stood before {k} {k.place.at}, [out of breath|with red cheeks].",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"{g} [sends me|says]: {m}," said {h}.',
            '"I come from {g}," said {h}. "{m}."',
            '"[What does|And what does] {g} say?" asked {k}. "That {m}," said {h}.',
            **known,
        ),
        tell(
            '"[Good|Thank you], I [must|will] tell the others that {m}," said {k}.',
            "{k} thanked {h} and gave {h.him} some {food}.",
            food=world.food(),
            **known,
        ),
    ]


def errand(world: World) -> Iterator[Stage]:
    """Three things are to be fetched; the list is told at the start and again at the end."""
    tell = world.tell
    known = {"x": world.food(), "y": world.food(), "z": world.food(), "p": world.place()}
    yield [
        tell(
            '{hour} {e} said, "[Please bring|Fetch] me {x}, {y} and {z}[| from {p}]."',
            "{hour} {e} [gave|handed] {h} a basket and asked for {x}, {y} and {z}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"{x}, {y} and {z}," [said|counted] {h} on {h.his} fingers.',
            '"[I can|I will] remember that," said {h}, [for {h.he} was {trait}|and went off].',
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {h} [got|bought|found] the {x} [first|without trouble], and then the {y}.",
            "{hour} {h} [put|laid] the {x} into the basket, and [then|after that] the {y}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"[What was|And what is] the third thing, {h}?" asked {f}. "{z}!" said {h}.',
            '{h} forgot the third thing, but {f} said, "[Was it not|It was] {z}."',
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {h} [put|set] the basket down {e.place.at}.",
            "{hour} {h} came back to {e} with a [full|heavy] basket.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"{x}, {y} and {z}," said {e}. "[Nothing is missing|Well done], {h}."',
            "In it were {x}, {y} and {z}, [just as|exactly as] {e} had asked.",
            **known,
        ),
        tell(
            "For {h.his} trouble {h} [got|was given] some of the {z}.",
            "{e} [shared|divided] the {x} with {h} and {f}.",
            **known,
        ),
    ]


def bet(world: World) -> Iterator[Stage]:
    """Two children race; the loser owes what was agreed."""
    tell = world.tell
    winner, loser = world.rng.sample((world.hero, world.friend), 2)
    stake, paid = world.rng.choice(STAKES)
    known = {"p": world.place(), "win": winner, "lose": loser, "stake": stake, "paid": paid}
    yield [
        tell(
            '{hour} {f} said, "[Let us race|I bet I am faster] to {p}. The loser must {stake}."',
            '{hour} {h} said, "[Who is first|Who gets first] to {p}? The last one must {stake}!"',
            hour=world.hour(),
            **known,
        ),
        tell(
            "They ran [down the lane|past the houses|over the grass], and {win} was faster than "
            "{lose}.",
            "{lose} [stumbled|fell|lost a shoe], and so {win} won the race.",
            "{win} [touched the wall|got there] first, and {lose} came [second|a little later].",
            **known,
        ),
    ]
    yield [
        tell(
            '{hour} {win} [said|asked], "[Have you forgotten|Do you remember] our race? You must '
            '{stake}."',
            '{hour} {lose} said, "[I lost|You won] the race, so I must {stake}."',
            hour=world.hour(),
            **known,
        ),
        tell(
            "So {lose} {paid}, and {win} [laughed|clapped|was pleased].",
            "{lose} {paid} [without a word|with good grace|and did not complain].",
            **known,
        ),
    ]


STAKES = (
    ("carry the bags home", "carried the bags home"),
    ("sing a song", "sang a song"),
    ("wash the plates", "washed the plates"),
    ("tell a story", "told a story"),
    ("walk barefoot", "walked barefoot"),
    ("hop on one leg", "hopped on one leg"),
    ("bow three times", "bowed three times"),
)


def lesson(world: World) -> Iterator[Stage]:
    """The hero cannot do something, is told the trick, and passes it on in the same words."""
    tell = world.tell
    skill, trick = world.skill()
    known = {"k": skill, "trick": trick, "g": world.another_elder()}
    yield [
        tell(
            "{h} [wanted to|wished to] {k}, but it [never worked|always went wrong].",
            "Everyone in {v} could {k}, [only {h} could not|but not {h}].",
            **known,
        ),
        tell(
            '{hour} {g} the {g.trade} [watched {h.him}|saw it] and said, "{trick}."',
            '{hour} {h} asked {g} the {g.trade} for advice. "{trick}," said {g}.',
            hour=world.hour(),
            **known,
        ),
        tell(
            "{h} tried [again|once more], and [again|once more] it [failed|did not work].",
            "At first {h} [failed|did everything wrong], but {h.he} [went on|kept trying].",
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {h} could [suddenly|really|at last] {k}, [as {g} had said|thanks to {g}].",
            "{hour} {h} thought of {g}'s words, and this time {h.he} could {k}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            '"[How do|How can] you {k} so well?" asked {f}. "{trick}," said {h}.',
            '{f} wanted to {k} too. "{trick}," {h} [told|advised] {f.him}.',
            **known,
        ),
    ]


def riddle(world: World) -> Iterator[Stage]:
    """A riddle is asked early and answered late."""
    tell = world.tell
    question, answer = world.riddle()
    known = {"q": question, "x": answer, "food": world.food()}
    yield [
        tell(
            '{hour} {e} asked {h} this riddle: "{q}"',
            '{hour} {e} [smiled|winked at {h}] and asked, "{q}"',
            hour=world.hour(),
            **known,
        ),
        tell(
            '{h} thought [about it|hard]. "[Whoever|The one who] knows it gets some {food}," said {e}.',
            "There was {food} for the right answer, but {h} [did not know it|had no idea].",
            '{h} [thought|thought hard], but found no answer. "[Later|Tell me later]," said {e}, '
            '"there is {food} for it."',
            **known,
        ),
    ]
    yield [
        tell(
            '{hour} {h} [cried|shouted|called], "[I know it|I have it]! It is {x}!"',
            '{hour} {f} [whispered|said], "{q} [It is|It must be] {x}!"',
            '{hour} {e} asked again, "{q}" "It is {x}!" said {h}.',
            hour=world.hour(),
            **known,
        ),
        tell(
            "{e} [laughed|nodded] and gave them the {food}.",
            '"[Right|Quite right]," said {e}, and they [ate|got] the {food}.',
            **known,
        ),
    ]


def warning(world: World) -> Iterator[Stage]:
    """A grown-up warns of the weather's danger; one child listens, the other is sorry."""
    tell = world.tell
    place = world.place()
    wise, rash = world.rng.sample((world.hero, world.friend), 2)
    known = {"p": place, "wise": wise, "rash": rash, "harm": world.rng.choice(HARMS)}
    yield [
        tell(
            '{hour} {e} [warned|said to] the children, "[Do not|You must not] go to {p}, because '
            'of the {w}."',
            '{hour} {e} said, "[Keep away from|Stay away from] {p} today. The {w} '
            'makes it dangerous."',
            hour=world.hour(),
            **known,
        ),
        tell(
            "{wise} [nodded|listened well], but {rash} [only laughed|did not listen|looked away].",
            '"[Yes, {e}|We will]," said {wise}, but {rash} [said nothing|thought of other things].',
            **known,
        ),
    ]
    yield [
        tell(
            "{hour} {rash} went to {p} [all the same|all alone], {harm} and called for {wise}.",
            "{hour} {rash} [forgot|did not heed] the warning, went to {p} and {harm}.",
            hour=world.hour(),
            **known,
        ),
        tell(
            "{wise} [came at once|heard it] and helped {rash} [home|back].",
            '"{e} [told|warned] us," said {wise}, and {rash} [hung {rash.his} head|turned red].',
            **known,
        ),
        tell(
            "[It was|It had been] the {w}, just as {e} had [said|warned].",
            '"Next time I will listen to {e}," said {rash}.',
            **known,
        ),
    ]


HARMS = (
    "hurt a knee",
    "tore a sleeve",
    "got lost",
    "lost a boot",
    "fell into a ditch",
    "was stuck in a hedge",
)
