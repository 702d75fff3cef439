"""Greetings, thanks, jokes, moods: the talk around the work."""

from __future__ import annotations

from training.conversations import Exchange, Expect
from training.phrasings import Draw
from training.words import ANIMALS, FOODS

HELLO = "small_talk/hello"
HOW_ARE_YOU = "small_talk/how_are_you"
THANKS = "small_talk/thanks"
BYE = "small_talk/bye"
JOKE = "small_talk/joke"
MOOD_GOOD = "small_talk/mood_good"
MOOD_BAD = "small_talk/mood_bad"
YES_NO = "small_talk/yes_no"
LIKES = "small_talk/likes"
COMPLAINT = "small_talk/complaint"
LOVE = "small_talk/love"
OWN_TASTE = "small_talk/own_taste"
WHY = "small_talk/why"
TEST = "small_talk/test"
AGAIN = "small_talk/again"
TASTES = ("colour", "color", "food", "animal", "number", "song", "book", "movie", "film", "word", "city", "sport", "game", "day", "season", "fruit", "band")
JOKES = (
    "I tried to count to infinity once. I ran out of digits at dinner.",
    "A tiny model walks into a library. It leaves again: too many words.",
    "Why did the semicolon stay home? It needed a pause between two parties.",
    "My memory is so short that every joke is new to me.",
    "Two bits met in a byte. One said: it's crowded in here, let's carry.",
    "Why did the carry move one column to the left? It wanted to feel ten times bigger.",
    "I asked a palindrome for directions. It said the way back is the same.",
    "The letter q went on holiday and took u along, as always.",
)
BEGIN_HELLO = ("The user greets me. I greet back.", "A greeting.", "Say hello.")


def _said(draw: Draw, bank: str) -> str:
    return draw.plain(bank)


def hello(draw: Draw) -> Exchange:
    answer = draw.say("Hello! How can I help you?", "Hi! What can I do for you?", "Hello! I'm Sprout. Ask me a sum, a word or a small fact.", "Hi there! What would you like to do?")
    return Exchange(_said(draw, HELLO), draw.pick(BEGIN_HELLO), answer)


def how_are_you(draw: Draw) -> Exchange:
    answer = draw.say("I'm fine, thank you! How are you?", "Very well, thanks! What can I do for you?", "All my numbers are in their places, thanks for asking! And you?")
    return Exchange(_said(draw, HOW_ARE_YOU), "The user asks how I am. I'm fine.", answer)


def thanks(draw: Draw) -> Exchange:
    answer = draw.say("You're welcome!", "Glad I could help!", "Any time!", "My pleasure!")
    return Exchange(_said(draw, THANKS), "The user is thankful.", answer)


def bye(draw: Draw) -> Exchange:
    return Exchange(_said(draw, BYE), "The user says goodbye.", draw.say("Goodbye! Come back soon.", "See you! It was nice talking.", "Bye! Take care.", "Until next time!"))


def joke(draw: Draw) -> Exchange:
    return Exchange(_said(draw, JOKE), "A joke, then.", draw.pick(JOKES))


def mood(draw: Draw) -> Exchange:
    if draw.chance(0.5):
        return Exchange(_said(draw, MOOD_GOOD), "The user feels good.", draw.say("I'm glad to hear that!", "That's lovely! What shall we do?", "Good to hear!"))
    answer = draw.say("I'm sorry to hear that. I hope it gets better soon.", "Oh no. I'm here if you want a joke or a riddle of numbers.", "That's a pity. Take it easy today.")
    return Exchange(_said(draw, MOOD_BAD), "The user feels bad.", answer)


def nod(draw: Draw) -> Exchange:
    return Exchange(_said(draw, YES_NO), "Nothing to work out here.", draw.say("Alright! What would you like to do next?", "OK! What's next?", "Fine. Ask me anything small."))


def likes(draw: Draw) -> Exchange:
    x = draw.pick(FOODS) if draw.chance(0.5) else draw.pick(ANIMALS) + "s"
    answer = draw.say("{x} sounds nice! I can't taste or see things myself, I only know words.", "Good choice! I'm only a small model, so I have no taste of my own.", x=x.capitalize())
    return Exchange(draw.plain(LIKES, x=x), f"The user talks about {x}.", answer)


def complaint(draw: Draw) -> Exchange:
    answer = draw.say("Sorry! I'm very small and make mistakes. A retry gives another reply.", "I'm sorry. Ask me in other words, or let me try again.", "Sorry about that, I'm only a small model. Maybe try it in other words.")
    return Exchange(_said(draw, COMPLAINT), "The user is not content. I'm sorry about it.", answer)


def love(draw: Draw) -> Exchange:
    answer = draw.say("That's kind of you! I'm only a small program, so I have no feelings.", "You are nice! I'm just a few numbers, though.", "Thank you! I can't feel anything, but I like to do sums with you.")
    return Exchange(_said(draw, LOVE), "The user is friendly. I have no feelings.", answer)


def own_taste(draw: Draw) -> Exchange:
    k = draw.pick(TASTES)
    answer = draw.say("I have no favourite {k}: I'm only a small model. What is yours?", "I'm only a small model and have no favourite {k}. And you?", k=k)
    return Exchange(draw.ask(OWN_TASTE, k=k), f"The user asks for my favourite {k}. I have none.", answer)


def why(draw: Draw) -> Exchange:
    answer = draw.say("I can't explain much. My thought is above the answer.", "I'm too small to explain myself well; my thought above says how I got there.")
    return Exchange(_said(draw, WHY), "The user wants an explanation. I have little to say.", answer)


def test(draw: Draw) -> Exchange:
    return Exchange(_said(draw, TEST), "A test.", draw.say("I'm here! What can I do for you?", "It works! Ask me something.", "Yes, I'm here. Try: What is 17 + 25?"))


def jokes(draw: Draw) -> list[Exchange]:
    """A joke, and another one, and so on; none is told twice."""
    told = draw.sample(JOKES, draw.between(2, 4))
    return [Exchange(_said(draw, JOKE if at == 0 else AGAIN), "A joke, then." if at == 0 else "Another joke.", said, Expect("small talk", "not_honest")) for at, said in enumerate(told)]


def any_one(draw: Draw) -> Exchange:
    found = draw.pick((hello, hello, how_are_you, thanks, thanks, bye, joke, mood, nod, nod, likes, complaint, love, own_taste, why, test))(draw)
    return found.answered(found.answer, Expect("small talk", "not_honest"))
