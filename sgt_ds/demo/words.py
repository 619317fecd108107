"""Whom and what the stories are about: people, animals, things, places, weather. Knows no plot."""

from __future__ import annotations

from sgt_ds.demo.kinds import Elder, Person, Place, Task, Trouble, Weather, boy, girl


def _each(names: str) -> tuple[str, ...]:
    return tuple(names.split())


CHILDREN = tuple(
    girl(name)
    for name in _each(
        "Ada Anna Bella Clara Daisy Dora Ella Emma Fay Flora Greta Hanna Ida Ivy Jane Julia Kate "
        "Lena Lily Lucy Mara Mia Nell Nina Nora Olga Pia Polly Rita Ruby Sara Stella Tess Tilda "
        "Una Vera Wanda Zoe"
    )
) + tuple(
    boy(name)
    for name in _each(
        "Abel Adam Alan Arno Ben Carl Cole Dan Emil Erik Felix Finn Fred Gus Hal Hugo Ian Jack "
        "Jan Jonas Karl Leo Liam Luke Max Milo Ned Noah Olaf Otto Paul Pete Ralf Sam Simon Theo "
        "Tim Tom Victor Will"
    )
)

TRAITS = (
    "brave",
    "shy",
    "curious",
    "careful",
    "cheerful",
    "patient",
    "proud",
    "clever",
    "kind",
    "quick",
    "quiet",
    "stubborn",
    "lively",
    "thoughtful",
    "gentle",
    "bold",
)

VILLAGES = _each(
    "Alderbrook Applewick Birchfield Cloverdale Eastmere Fernhill Foxley Greywater Hazelton "
    "Kingsford Larkwood Littleport Longmeadow Millbridge Northcliff Oakham Pebbleton Redbarn "
    "Silverlake Stonewell Thistledown Westbay Whitesand Willowend"
)


def _place(name: str, preposition: str, *spots: str) -> Place:
    return Place(name, f"{preposition} the {name}", spots)


PLACES = {
    place.name: place
    for place in (
        _place("mill", "at", "behind the big wheel", "on the flour sacks", "under the stairs"),
        _place("bakery", "in", "beside the warm oven", "on the top shelf", "under the long table"),
        _place("school", "at", "under the last bench", "beside the globe", "on the window sill"),
        _place("harbour", "at", "inside an empty barrel", "under the nets", "beside the anchor"),
        _place("farm", "on", "behind the henhouse", "in the hay cart", "beside the water trough"),
        _place("forge", "in", "behind the bellows", "on the stone ledge", "under the workbench"),
        _place("garden", "in", "between the bean rows", "under the rose bush", "by the sundial"),
        _place("library", "in", "between two thick books", "on the reading desk", "behind a lamp"),
        _place("lighthouse", "in", "on the third step", "beside the great lamp", "behind the door"),
        _place("workshop", "in", "under the saw bench", "behind the planks", "on the tool rack"),
        _place("orchard", "in", "under the oldest tree", "in a fruit basket", "on the low wall"),
        _place("market", "at", "under the cheese stall", "behind the fountain", "on a crate"),
        _place("meadow", "in", "beside the fence", "in the tall grass", "on the flat rock"),
        _place("forest", "in", "in a hollow trunk", "between two roots", "under the ferns"),
        _place("pond", "by", "under the willow", "among the reeds", "on the little jetty"),
        _place("river", "by", "in the rowing boat", "beneath the bridge", "on a dry stone"),
        _place("barn", "in", "on the hay loft", "behind the ladder", "in the feed box"),
        _place("stable", "in", "under the saddle", "on a nail", "behind the straw"),
        _place("beach", "on", "under the white boat", "beside a sand castle", "in a rock pool"),
        _place("hill", "on", "beside the tall stone", "under the lone pine", "in the heather"),
        _place("station", "at", "on the green bench", "under the clock", "behind the ticket box"),
        _place("mountain hut", "at", "on the wood pile", "by the fireplace", "under the blanket"),
    )
}


def _elder(name: str, trade: str, place: str) -> Elder:
    woman = name.split()[0] in ("Aunt", "Grandma", "Mother", "Lady")
    person = (
        Person(name, "woman", "she", "her", "her")
        if woman
        else Person(name, "man", "he", "him", "his")
    )
    return Elder(person, trade, PLACES[place])


ELDERS = (
    _elder("Aunt Rosa", "baker", "bakery"),
    _elder("Uncle Martin", "baker", "bakery"),
    _elder("Grandpa Tobias", "miller", "mill"),
    _elder("Mother Agnes", "miller", "mill"),
    _elder("Lady Edith", "teacher", "school"),
    _elder("Uncle Walter", "teacher", "school"),
    _elder("Captain Boris", "sailor", "harbour"),
    _elder("Aunt Marina", "sailor", "harbour"),
    _elder("Grandma Hilda", "farmer", "farm"),
    _elder("Uncle George", "farmer", "farm"),
    _elder("Uncle Conrad", "smith", "forge"),
    _elder("Aunt Bertha", "smith", "forge"),
    _elder("Grandma Violet", "gardener", "garden"),
    _elder("Grandpa Edgar", "gardener", "garden"),
    _elder("Lady Margaret", "librarian", "library"),
    _elder("Grandpa Silas", "librarian", "library"),
    _elder("Captain Gregor", "lighthouse keeper", "lighthouse"),
    _elder("Grandma Ottilie", "lighthouse keeper", "lighthouse"),
    _elder("Grandpa Anton", "carpenter", "workshop"),
    _elder("Aunt Frieda", "carpenter", "workshop"),
    _elder("Mother Celia", "beekeeper", "orchard"),
    _elder("Uncle Basil", "beekeeper", "orchard"),
    _elder("Grandpa Rufus", "ferryman", "river"),
    _elder("Lady Sophie", "stationmaster", "station"),
)

# species: (names, looks, call, food)
ANIMALS = {
    "dog": ("Biscuit Bruno Rex", "brown spotted shaggy", "barked", "a bone"),
    "cat": ("Pepper Shadow Velvet", "black striped white", "meowed", "a fish head"),
    "goat": ("Clover Nanny Thistle", "white stubborn horned", "bleated", "a cabbage leaf"),
    "donkey": ("Barley Dusty Pilgrim", "grey patient long-eared", "brayed", "a carrot"),
    "goose": ("Feather Matilda Snowy", "noisy white fat", "honked", "a crust of bread"),
    "pony": ("Chestnut Ginger Star", "brown small lively", "neighed", "an apple"),
    "hen": ("Dot Henny Speckle", "speckled red plump", "clucked", "a handful of corn"),
    "crow": ("Ink Jet Raven", "black tame clever", "cawed", "a walnut"),
    "pig": ("Button Pinky Truffle", "pink muddy round", "grunted", "a turnip"),
    "lamb": ("Cloud Cotton Woolly", "white woolly tiny", "bleated", "a tuft of clover"),
}

# noun: (to use, used)
THINGS = {
    "kite": ("fly", "flew"),
    "drum": ("play", "played"),
    "flute": ("play", "played"),
    "whistle": ("blow", "blew"),
    "ball": ("throw", "threw"),
    "spinning top": ("spin", "spun"),
    "toy boat": ("sail", "sailed"),
    "lantern": ("carry", "carried"),
    "scarf": ("wear", "wore"),
    "hat": ("wear", "wore"),
    "picture book": ("read", "read"),
    "notebook": ("fill", "filled"),
    "paintbrush": ("use", "used"),
    "magnifying glass": ("use", "used"),
    "compass": ("follow", "followed"),
    "bell": ("ring", "rang"),
    "marble": ("roll", "rolled"),
    "puppet": ("move", "moved"),
    "umbrella": ("open", "opened"),
    "map": ("study", "studied"),
    "music box": ("wind up", "wound up"),
    "sledge": ("pull", "pulled"),
    "jumping rope": ("swing", "swung"),
    "key": ("turn", "turned"),
}

LOOKS = _each(
    "red blue green yellow white black brown grey silver golden purple orange pink old little "
    "striped painted shiny new tiny bright fine plain pretty lovely strange"
)

FOODS = (
    "honey cake",
    "plum jam",
    "apple pie",
    "goat cheese",
    "barley soup",
    "walnut bread",
    "cherry tart",
    "pear juice",
    "oat biscuits",
    "mushroom stew",
    "cold milk",
    "warm rolls",
    "roasted nuts",
    "fresh butter",
    "raisin buns",
    "berry pudding",
    "pancakes",
    "pumpkin soup",
)

WEATHERS = (
    Weather("rain", "it had rained all night", "the paths were deep in mud", "How wet it is!"),
    Weather("wind", "a strong wind was blowing", "the leaves flew about", "Hold on to your hat!"),
    Weather("snow", "fresh snow lay on the roofs", "every step left a print", "How white it is!"),
    Weather("fog", "a thick fog hung over the fields", "nobody could see far", "Stay close to me!"),
    Weather("sun", "the sun was shining", "the stones were warm", "What a fine day!"),
    Weather("heat", "the summer heat had come", "the grass was dry", "Find some shade!"),
    Weather("frost", "frost covered the windows", "the puddles were frozen", "How cold it is!"),
    Weather("thunder", "thunder rolled far away", "the birds had gone quiet", "Listen to that!"),
)

TASKS = (
    Task("feed the hens", "fed the hens", "they have eaten nothing", "the hens were full"),
    Task("water the beans", "watered the beans", "the soil is dry", "the beans stood tall again"),
    Task("shut the gate", "shut the gate", "the sheep might run away", "the sheep were safe"),
    Task("light the lamp", "lit the lamp", "the boats come home late", "the boats found their way"),
    Task("ring the bell", "rang the bell", "nobody has a watch", "everyone knew the hour"),
    Task("sweep the stairs", "swept the stairs", "guests are coming", "the stairs were clean"),
    Task("stir the soup", "stirred the soup", "it burns so easily", "the soup was just right"),
    Task("fetch the laundry", "fetched the laundry", "the air is damp", "the shirts were dry"),
    Task("wake the baby", "woke the baby", "it must not miss supper", "the baby laughed again"),
    Task("stack the logs", "stacked the logs", "the stove is cold", "the room was warm again"),
    Task("close the window", "closed the window", "there is a draught", "the candles burned well"),
    Task("pick the pears", "picked the pears", "the wasps are hungry", "the pears were safe"),
    Task("count the lambs", "counted the lambs", "one often strays", "no lamb was missing"),
    Task("post the letter", "posted the letter", "it is urgent", "the letter was on its way"),
    Task("brush the horse", "brushed the horse", "its coat is dusty", "the horse shone"),
    Task("empty the bucket", "emptied the bucket", "the roof leaks", "the floor stayed dry"),
    Task("mix the paint", "mixed the paint", "the sign has faded", "the sign looked new"),
    Task("wind the clock", "wound the clock", "it has stopped at six", "the clock ticked again"),
)

TROUBLES = (
    Trouble(
        "sat high up in the oak and did not dare to come down",
        "ladder",
        "leaned the ladder against the oak, climbed up, and carried {a} down",
        "I can reach up there!",
        ("cat", "hen"),
    ),
    Trouble(
        "had slid into the dry well and could not get out",
        "rope",
        "let the rope down into the well and pulled {a} up again",
        "Hold still down there!",
        ("cat", "lamb", "goat", "dog", "pig"),
    ),
    Trouble(
        "was caught between the branches of a fallen tree",
        "saw",
        "sawed through the branches and set {a} free",
        "One branch after another!",
        ("lamb", "goat", "dog", "cat", "goose"),
    ),
    Trouble(
        "drifted across the water on a broken raft",
        "paddle",
        "took the paddle, rowed out, and brought {a} back to the bank",
        "I am coming over!",
        ("cat", "dog", "pig", "lamb", "goat"),
    ),
    Trouble(
        "was shut in the cellar, where it was dark",
        "candle",
        "lit the candle, went down the steps, and led {a} out",
        "There is light now!",
        ("cat", "dog", "pig", "lamb", "goose"),
    ),
    Trouble(
        "had crawled under the shed, and a plank had fallen across the way out",
        "crowbar",
        "lifted the plank with the crowbar, and {a} slipped out",
        "One more push!",
        ("cat", "dog", "hen", "pig"),
    ),
    Trouble(
        "had sunk up to the belly in the swamp",
        "board",
        "laid the board over the mud and drew {a} to firm ground",
        "Lean on me!",
        ("pony", "donkey", "goat", "pig"),
    ),
    Trouble(
        "had run into the fishing net and was all tangled up",
        "knife",
        "cut the net open with the knife, and {a} was free",
        "Soon it is done!",
        ("dog", "cat", "goose", "crow", "lamb"),
    ),
)

MESSAGES = (
    "the ferry leaves at seven",
    "the bread is ready",
    "the bridge is closed",
    "the new calf is born",
    "the fair begins on Sunday",
    "the wolf has been seen again",
    "the concert is in the barn",
    "the doctor comes at noon",
    "the ice is too thin",
    "the train will be late",
    "the cherries are ripe",
    "the roof must be mended",
    "the race starts at the pump",
    "the twins have arrived",
)

# skill: (to do it, the trick)
SKILLS = {
    "whistle": "Wet your lips and blow softly",
    "swim": "Keep your chin up and kick slowly",
    "row": "Pull with your back and not with your arms",
    "skate": "Bend your knees and look ahead",
    "knit": "Keep the thread loose and count aloud",
    "juggle": "Watch the highest point and never your hands",
    "ride": "Sit straight and talk to the horse",
    "dance": "Listen to the drum and forget your feet",
    "fish": "Sit still and wait for the float to sink",
    "climb": "Move one hand at a time and do not look down",
    "tie a knot": "Go over, go under, and pull it tight",
    "bake": "Knead for a long time and let the dough rest",
}

RIDDLES = {
    "What has a neck but no head?": "a bottle",
    "What has hands but cannot clap?": "a clock",
    "What has teeth but never bites?": "a comb",
    "What gets wetter the more it dries?": "a towel",
    "What has a bed but never sleeps?": "the river",
    "What has an eye but cannot see?": "a needle",
    "What runs around the field but never moves?": "a fence",
    "What goes up and never comes down?": "your age",
    "What has many leaves but is no tree?": "a book",
    "What is full of holes but still holds water?": "a sponge",
    "What breaks when you say its name?": "silence",
    "What follows you all day and hides at night?": "your shadow",
}
