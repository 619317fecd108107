"""How a story opens, what happens between its plots, how it ends. Keeps to the story's world."""

from __future__ import annotations

from collections.abc import Callable

from sgt_ds.demo.world import World

Scene = Callable[[World], str]


def opening(world: World) -> str:
    """Who the story is about, where, and in what weather."""
    tell = world.tell
    return " ".join(
        (
            tell(
                "[Once|Long ago|One year], in the village of {v}, there lived a {trait} {h.kind} "
                "called {h}.",
                "{h} was a {trait} {h.kind} [from|who lived in] {v}.",
                "In {v} [everybody|everyone] knew {h}, a {h.kind} who was {trait}[| by nature| from birth].",
                "This is [the|a] story of {h}, a {trait} {h.kind} [from|of] {v}.",
            ),
            tell(
                "[Always with|Never far from] {h.him} were {f}, a {trait2} {f.kind}, and {b}, {b.a}.",
                "{h.his} best friend was {f}, a {trait2} {f.kind}, and {b}, {b.a}, [went everywhere "
                "with them|followed them everywhere].",
                "{h} had a {trait2} friend, a {f.kind} called {f}, and {b.a} [named|by the name of] {b}.",
            ),
            tell(
                "[Every day|On most days|Often] {h} [visited|helped] {e} the {e.trade} {e.place.at}.",
                "{e} the {e.trade} [was fond of|knew and liked] {h.him}[| and {f}].",
                "{h.his} neighbour was {e} the {e.trade}.",
            ),
            tell(
                "One {day} {w.opening}, and around {e.place} {w.effect}.",
                "When {h} woke up one {day}, {w.opening}[, and {w.effect}|].",
                "On {f}'s way to {h}'s [house|door] that {day}, {w.opening}, and {w.effect}.",
                'One {day} {w.opening}. "{w.talk}" said {f} to {h}.',
                'It was a {day} in {v}, and {w.opening}. "{w.talk}" {h} called to {f}.',
                day=world.day,
            ),
        )
    )


def _meal(world: World) -> str:
    food = world.food()
    return world.tell(
        "They [sat down|rested] {p.at} and ate {food}. {b} got {b.food}.",
        '"[Are you hungry|Who is hungry|Shall we eat], {h}?" asked {f} and [unpacked|shared] {food}. {b} {b.called} until '
        "there was {b.food} too.",
        "{e} [gave|brought] them {food}, and {h} [kept|saved] {b.food} for {b}.",
        food=food,
        p=world.place(),
    )


def _antics(world: World) -> str:
    return world.tell(
        "{b} [ran ahead|chased a leaf|rolled on the ground] and {b.called}[ at {f}| at {h}| at the "
        "{w.noun}|].",
        "{b} [wanted to play|was bored|grew restless] and {b.called}, so {h} [threw a stick|sang "
        "softly|told {b} to wait].",
        'A bird [flew|landed] close to {b}. {b} {b.called}. "[Quiet|Hush], {b}!" said {f}.',
        "{b} had [found|smelled] {b.food} {p.at} and would not [leave|move].",
        p=world.place(),
    )


def _weather(world: World) -> str:
    return world.tell(
        '"{w.talk}" said {e}, [who was {e.place.at}|looking up at the sky].',
        "Because of the {w} they went [past {p}|by way of {p}].",
        "{w.effect}, and {f} [thought of|longed for] {food}.",
        'The {w} [did not stop|stayed all day]. "[I like it|I do not mind]," said {h} the {trait} '
        "one.",
        p=world.place(),
        food=world.food(),
    )


def _talk(world: World) -> str:
    return world.tell(
        '"[Are you always|Were you always] so {trait}?" asked {f}. "[Only with you|Since I know '
        'you]," said {h}.',
        '"Why are you so {trait}?" asked {f}. "Because you are so {trait2}," said {h}.',
        '"What do you [like|love] most in {v}?" asked {f}. "{p}," [answered|said] {h}, "and {food}."',
        '"[When I am big|One day]," said {f}, "I will be a {job} like {e}." "[And I|Then I] will '
        'visit you {e.place.at}," said {h}.',
        '"Who is [your|the] best friend [of all|in {v}]?" {b} seemed to ask. "{f}," said {h}, "and '
        'then you."',
        p=world.place(),
        food=world.food(),
        job=world.elder.trade,
    )


def _walk(world: World) -> str:
    return world.tell(
        "From {p} they [could see|saw] the roofs of {v}.",
        "The way led [past|along] {p} and on to {q}.",
        "They counted [seven|nine|eleven|twelve] [ducks|swallows|carts|frogs|snails] on the way to "
        "{p}, and {f} [was sure|said] there had been one more.",
        "{h} and {f} [walked|wandered] to {p}, and {b} [came too|walked behind them].",
        p=world.place(),
        q=world.place(),
    )


INTERLUDES: tuple[Scene, ...] = (_meal, _antics, _weather, _talk, _walk)


def interludes(world: World, count: int) -> list[str]:
    """`count` small scenes, each of another kind."""
    return [scene(world) for scene in world.rng.sample(INTERLUDES, count)]


def closing(world: World) -> str:
    """Evening in the village, in which the day's beginning is told once more."""
    return world.tell(
        '"You [were|have been] {trait} today," said {e}, and {h} [was happy|fell asleep with a smile].',
        "[So ended|That was] the {day} on which {w.opening}, and {h}, {f} and {b} [slept well|went to "
        "bed].",
        "And if you come to {v}, [ask for|look for] {h} and {f}; {b} will show you the way.",
        "{h} [said good night to|thanked] {f}, and {b} {b.called} once more.",
        "From then on {h} was [called|known as] the {trait} {h.kind} of {v}.",
        '"[Tomorrow|And tomorrow] we go to {p}," said {f}. "[With|But not without] {b}," said {h}.',
        "That night {h} [dreamed|dreamt] of {e} and {b}, and {f} of {food}.",
        p=world.place(),
        day=world.day,
        food=world.food(),
    )
