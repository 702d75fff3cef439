"""Words to work on: lists of our own, and made-up words without end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from training.phrasings import Draw, Split

ANIMALS = tuple(
    "cat dog horse cow sheep goat pig duck goose hen rooster owl eagle crow raven swan frog toad snake lizard turtle whale "
    "dolphin shark salmon trout otter beaver badger fox wolf bear lion tiger zebra giraffe camel llama monkey rabbit hare "
    "mouse rat hamster squirrel hedgehog mole bat deer moose elephant rhino hippo panda koala kangaroo penguin parrot bee "
    "wasp ant beetle spider crab lobster snail worm butterfly moth".split()
)
FOODS = tuple(
    "bread cheese soup rice pasta pizza salad apple pear plum cherry peach grape lemon orange banana mango melon carrot "
    "potato tomato onion garlic pepper cucumber spinach beans lentils noodles pancakes waffles honey butter jam yogurt "
    "chocolate cake pie cookies tea coffee juice milk curry tacos sushi dumplings olives figs dates nuts".split()
)
COLOURS = tuple("red blue green yellow orange purple pink brown black white grey violet turquoise silver gold beige".split())
THINGS = tuple(
    "table chair lamp window door garden river mountain forest bridge castle tower ship boat train bicycle wagon wheel clock "
    "mirror candle basket bottle blanket pillow ladder hammer needle thread button ribbon paper pencil book letter stamp coin "
    "bell drum flute guitar violin trumpet piano kettle spoon fork knife plate bowl oven stove broom bucket rope anchor sail "
    "compass map lantern torch pocket jacket scarf glove boot shirt ring crown feather stone pebble sand shell cloud storm "
    "thunder rain snow wind island valley meadow field harvest orchard market street corner station tunnel engine rocket "
    "planet comet star moon sun shadow echo whisper puzzle riddle secret story poem song dance game dice card kite balloon "
    "marble doll robot magnet cable screen keyboard printer camera radio bakery kitchen cellar attic chimney fence gate path "
    "pillar statue fountain temple museum library school harbor beach cliff cave desert glacier volcano swamp pond lake ocean "
    "strawberry blueberry pumpkin cabbage mushroom walnut almond ginger pepper cinnamon vanilla saffron barley wheat clover "
    "daisy tulip rose lily violet maple willow cedar birch acorn branch root leaf seed petal thorn moss fern ivy".split()
)
QUALITIES = tuple(
    "quick slow bright dark warm cold soft hard brave gentle quiet loud happy sad clever simple strange honest early late "
    "round square narrow wide heavy light smooth rough sweet sour bitter fresh clean dusty shiny rusty tiny huge ancient "
    "modern lucky lazy busy calm angry proud shy silly wise polite curious".split()
)
ACTIONS = tuple(
    "walk run jump climb swim sail fly drive carry lift throw catch build paint draw write read sing listen speak laugh "
    "smile sleep dream wake wash cook bake taste smell touch open close lock find lose hide seek count measure borrow lend "
    "teach learn answer wonder remember forget travel wander gather scatter plant water mend sew knit polish".split()
)
NAMES = tuple(
    "Mira Tom Anna Ben Clara David Emma Felix Grace Hugo Iris Jonas Kate Leo Maya Nora Oscar Paula Quinn Rosa Sam Tara Uma "
    "Victor Wendy Xenia Yusuf Zoe Ada Boris Celia Dora Elena Finn Greta Henry Ida Jack Kira Liam Mona Nils Olga Pavel Rita "
    "Simon Thea Ursula Vera Walter Yara Zane Aisha Bruno Carmen Diego Esther Farid Gita Hana Ivan Jana Karim Lena Mateo Nadia "
    "Omar Priya Ravi Sofia Tariq Wei Yuki Amara Kofi Ines Luca Marta Noah Otto Petra Ruth Stella Theo Viola Alice Bob Carol "
    "Daniel Eva Frank George Helen Isaac Julia Kevin Laura Martin Nina Oliver Peter Sarah Tim Will".split()
)
CITIES = tuple(
    "Paris London Berlin Madrid Rome Vienna Prague Oslo Lisbon Dublin Athens Warsaw Helsinki Cairo Tokyo Lima Boston Chicago "
    "Toronto Sydney Delhi Mumbai Seoul Hanoi Nairobi Accra Lagos Quito Bogota Havana Denver Austin Seattle Porto Geneva Turin "
    "Krakow Ghent Malmo Bergen Split Riga Tallinn Vilnius Zagreb Sofia Ankara Tbilisi Osaka Kyoto Perth Auckland".split()
)
PROGRAM_WORDS = tuple(
    "palaver sprout terminal model token server browser page reply thought answer branch command prompt tool python program "
    "message conversation system network memory computer folder file continue retry undo export settings parameter".split()
)
WORDS = tuple(sorted({*ANIMALS, *FOODS, *COLOURS, *THINGS, *QUALITIES, *ACTIONS}))

# Real words that no training conversation works on; the evaluation draws from them.
UNSEEN_WORDS = tuple(
    "gravel hinge turnip velvet walrus bonfire cobweb dagger ferret gazelle hazel icicle jigsaw kernel lobby mustard nectar "
    "oyster parsley quiver raisin saddle tablet umpire vessel wicker yonder zipper bracket crimson dolmen elbow fiddle goblet "
    "hammock inkwell jasmine kennel lattice mammoth nutmeg obelisk pelican quarry rafter sapphire tangent urchin vulture "
    "weasel yodel zephyr bramble cactus drizzle ember flannel grotto hollow igloo jungle lagoon magpie nugget orchid "
    "pretzel quilt rubble sickle thistle upland vacuum wombat yeast zigzag blossom clarinet dormouse easel gherkin haddock "
    "ivory jackdaw knapsack limerick marmalade notebook otters pistachio quicksand rhubarb scabbard tambourine underdog "
    "viaduct waterfall toffee mocha tundra plaza glimmer rascal bog hut elk jug wax fog gym yak zen".split()
)

_ONSETS = tuple("b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr sh sk sl sm sn sp st sw th tr tw qu wh y x".split())
_VOWELS = tuple("a e i o u a e i o u ai ea ee oa oo ou ie y".split())
_CODAS = tuple("b d f g k l m n p r s t x ck ft ld lt mp nd ng nk nt rd rk rm rn rt sh sk sp st th ll ss zz".split())
# Made-up words that would read as ordinary ones in a sentence.
_ORDINARY = frozenset(
    "the thee she see set six ten two too one new now not net say may you how who why was has his her for put get got let yes "
    "yet what when this that then than them with will here have had make made take more most".split()
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()


def held_out(found: str) -> bool:
    """Whether a word is kept from training: the listed ones, and one in eleven of all others by its letters alone."""
    return found in UNSEEN_WORDS or sum((at + 1) * ord(letter) for at, letter in enumerate(found)) % 11 == 0


def _of_split(draw: Draw, source: Callable[[Draw], str]) -> str:
    """A word from the source that belongs to this draw's half."""
    kept_back = draw.split is Split.HELD_OUT
    while held_out((found := source(draw)).lower()) != kept_back:
        pass
    return found


def made_up(draw: Draw) -> str:
    """A pronounceable word of 3 to 10 letters that means nothing."""
    return _of_split(draw, _syllables)


def _syllables(draw: Draw) -> str:
    while True:
        word = ""
        for _ in range(draw.between(1, 3)):
            word += draw.pick(_ONSETS) + draw.pick(_VOWELS) + (draw.pick(_CODAS) if draw.chance(0.5) else "")
        if 3 <= len(word) <= 10 and word not in _ORDINARY:
            return word


def letters(draw: Draw) -> str:
    return _of_split(draw, _at_random)


def _at_random(draw: Draw) -> str:
    """Letters in any order, sometimes of so few kinds that they repeat."""
    known = "".join(draw.pick(_LETTERS) for _ in range(draw.between(2, 4))) if draw.chance(0.35) else _LETTERS
    return "".join(draw.pick(known) for _ in range(draw.between(3, 10)))


@cache
def _followers() -> dict[str, str]:
    """Which letters follow two others in our words; a full stop is a word's end."""
    found: dict[str, str] = {}
    for known in WORDS:
        spelt = f"  {known}."
        for at in range(2, len(spelt)):
            found[spelt[at - 2 : at]] = found.get(spelt[at - 2 : at], "") + spelt[at]
    return found


def _like_a_word(draw: Draw) -> str:
    """A word that looks English and mostly is none: each letter follows the two before it as in our words."""
    while True:
        word = "  "
        while not word.endswith(".") and len(word) < 14:
            word += draw.pick(_followers()[word[-2:]])
        if word.endswith(".") and 3 <= len(word) - 3 <= 11:
            return word[2:-1]


def _miswritten(draw: Draw) -> str:
    """A word of ours with a letter lost, added, doubled, changed or swapped: it must be spelt as it stands."""
    known = draw.pick(WORDS)
    at = draw.between(0, len(known) - 2)
    kind = draw.between(0, 4)
    if kind == 0 and len(known) > 3:
        return known[:at] + known[at + 1 :]
    if kind == 1:
        return known[:at] + known[at + 1] + known[at] + known[at + 2 :]
    letter = known[at] if kind == 2 else draw.pick(_LETTERS)
    return known[: at + 1] + letter + known[at + (1 if kind < 4 else 2) :]


@cache
def _small_and_capital(pieces: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(piece for piece in pieces if piece.islower()), tuple(piece for piece in pieces if not piece.islower())


def _from_pieces(draw: Draw) -> str:
    """A word glued from pieces of the tokenizer, so that each piece is spelt often."""
    small, _ = _small_and_capital(draw.pieces)
    while True:
        word = "".join(draw.pick(small) for _ in range(draw.between(1, 3)))
        if 3 <= len(word) <= 11:
            return word


def _from_capital(draw: Draw) -> str:
    """The same with a piece that has a capital at its start."""
    small, capital = _small_and_capital(draw.pieces)
    while True:
        word = "".join([draw.pick(capital), *(draw.pick(small) for _ in range(draw.between(0, 2)))])
        if 3 <= len(word) <= 11:
            return word


def capitalised(draw: Draw, known: str) -> str:
    """A word with a capital: this one, or in training often another that begins with a capital piece."""
    return _of_split(draw, _from_capital) if draw.pieces and draw.chance(0.6) else known.capitalize()


def word(draw: Draw) -> str:
    """A word to spell, count or turn round; with held-out phrasings always one that training never saw."""
    if draw.split is Split.HELD_OUT:
        return draw.pick(UNSEEN_WORDS) if draw.chance(0.5) else made_up(draw)
    kind = draw.random.random()
    if kind < 0.04:
        return draw.pick(PROGRAM_WORDS)
    if kind < 0.14:
        return draw.pick(WORDS)
    if kind < 0.45 and draw.pieces:
        return _of_split(draw, _from_pieces)
    if kind < 0.62:
        return _of_split(draw, _like_a_word)
    if kind < 0.72:
        return _of_split(draw, _miswritten)
    return letters(draw) if kind < 0.84 else made_up(draw)


def name(draw: Draw) -> str:
    """A person's name, common or made up."""
    return draw.pick(NAMES) if draw.chance(0.6) else made_up(draw).capitalize()


def anything(draw: Draw) -> str:
    """A common word, or one nobody knows."""
    return draw.pick(WORDS) if draw.chance(0.6) else made_up(draw)


def in_words(number: int) -> str:
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        return f"{_ONES[number // 100]} hundred" + (f" {in_words(number % 100)}" if number % 100 else "")
    return f"{in_words(number // 1000)} thousand" + (f" {in_words(number % 1000)}" if number % 1000 else "")
