"""Itself and the program around it.

A question that names no place is answered with the page's way. The terminal's way is told where the terminal is known: the
question names it or one of its commands, or the prompt says that the user is at a terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from training.conversations import Exchange, Expect
from training.phrasings import Draw

TERMINAL_WORDS = re.compile(r"(^|\s)/[a-z]+|\b(commands?|terminal|shell|script|slash|console)\b|palaver (serve|ask|chat)|Ctrl\+C", re.IGNORECASE)
"""What a question says that is about the terminal."""


@dataclass(frozen=True, slots=True)
class Way:
    """How something is done in one place: the thought, answers, and what each of them says."""

    thought: str
    answers: tuple[str, ...]
    wanted: str


@dataclass(frozen=True, slots=True)
class Topic:
    bank: str
    page: Way
    terminal: Way | None = None
    """None where it is the same everywhere."""


WHO = "palaver/who"
MAKER = "palaver/maker"
ABLE = "palaver/able"
PALAVER = "palaver/palaver"
STOP = "palaver/stop"
CONTINUE = "palaver/continue"
RETRY = "palaver/retry"
UNDO = "palaver/undo"
BRANCH = "palaver/branch"
EXPAND = "palaver/expand"
THINK = "palaver/think"
SAVE = "palaver/save"
SERVE = "palaver/serve"
REAL = "palaver/real"
ONCE = "palaver/once"
HELP = "palaver/help"
QUIT = "palaver/quit"
NEW = "palaver/new"
SYSTEM = "palaver/system"
TOOLS = "palaver/tools"
PRIVATE = "palaver/private"
FREE = "palaver/free"
EDIT = "palaver/edit"
SETTINGS = "palaver/settings"
LANGUAGE = "palaver/language"
OPEN = "palaver/open"
SEARCH = "palaver/search"
TITLE = "palaver/title"
PRESET = "palaver/preset"
COLLAPSE = "palaver/collapse"
SWITCH = "palaver/switch"
HISTORY = "palaver/history"
TOKENS = "palaver/tokens"
CONTEXT = "palaver/context"
LOAD = "palaver/load"
COPY = "palaver/copy"
MODEL = "palaver/model"
STATUS = "palaver/status"
RESULT = "palaver/result"
IN_TERMINAL = "palaver/in_terminal"
ON_PAGE = "palaver/on_page"
MODELS = ("Llama", "Qwen", "Mistral", "Gemma", "Phi", "DeepSeek", "a Qwen model", "Llama 3", "SmolLM", "my own model", "a bigger model", "Qwen3")
LANGUAGES = ("German", "French", "Spanish", "Italian", "Dutch", "Polish", "Chinese", "Japanese", "Russian", "Turkish", "Arabic", "Hindi")

ONE_QUESTION = Way("One question is palaver ask.", ('For one question from a shell there is `palaver ask "What is 17 + 25?"`.',), "palaver ask")
TOPICS: tuple[Topic, ...] = (
    Topic(WHO, Way("About me: I'm Sprout.", ("I'm Sprout, a tiny demo model that lives inside Palaver.", "I'm Sprout, the tiny model that comes with Palaver. I think, answer small questions and call tools."), "Sprout")),
    Topic(MAKER, Way("About how I was made.", ("I'm Sprout: fewer than 8 million parameters, trained by the makers of Palaver in minutes on conversations that programs wrote.",), "Palaver")),
    Topic(ABLE, Way("What I can do.", ("I can do sums, turn words around, count letters, tell small facts, remember what you say, follow a system prompt and call tools. Try: What is 17 + 25?", "Small things: arithmetic, words and letters, days and months, opposites, remembering names, tables and counting, and calling tools."), "tools")),
    Topic(PALAVER, Way("About Palaver.", ("Palaver is a chat system for open language models on your own machine: a page in the browser, a terminal and an API over one conversation.",), "Palaver is")),
    Topic(
        STOP,
        Way("Stopping: Stop.", ("Press Stop. What was written is kept, and you can go on from there.", "With Stop, or the Esc key. What I wrote so far is kept."), "Stop"),
        Way("In the terminal: Ctrl+C.", ("Press Ctrl+C in the terminal. What was written is kept, and you can go on from there.", "With Ctrl+C in the terminal. What I wrote so far is kept."), "Ctrl+C"),
    ),
    Topic(
        CONTINUE,
        Way("Continuing: Continue.", ("Press Continue under the reply. It goes on exactly where it stopped.", "Use Continue: it goes on exactly where the reply was stopped."), "Continue"),
        Way("In the terminal: /continue.", ("Type /continue in the terminal. The reply goes on exactly where it stopped.", "Use /continue in the terminal: it goes on exactly where the reply was stopped."), "/continue"),
    ),
    Topic(
        RETRY,
        Way("Another reply: Retry.", ("Press Retry under the reply. You get another reply next to the first one; nothing is overwritten.", "Use Retry: the old reply is kept beside the new one."), "Retry"),
        Way("In the terminal: /retry.", ("Type /retry in the terminal. You get another reply next to the first one; nothing is overwritten.", "Use /retry in the terminal: the old reply is kept beside the new one."), "/retry"),
    ),
    Topic(
        UNDO,
        Way("Going back: Undo and Redo.", ("Undo goes back a step, and Redo goes forward again. Nothing is lost.",), "Undo"),
        Way("In the terminal: /undo and /redo.", ("Type /undo in the terminal to go back a step; /redo goes forward again. Nothing is lost.",), "/undo"),
    ),
    Topic(
        BRANCH,
        Way("Branches: an edit or a retry makes one.", ("Edit a message or retry a reply: that starts another branch, and the old one is kept.",), "branch"),
        Way("In the terminal: /branch.", ("Type /branch in the terminal: your next message starts another branch. An edit or a retry makes one too, and the old one is kept.",), "/branch"),
    ),
    Topic(
        EXPAND,
        Way("Thoughts: a click shows them.", ("Click on the thought above the reply: it shows what I thought.",), "Click on the thought"),
        Way("In the terminal: /expand.", ("Type /expand in the terminal: it shows what I thought.",), "/expand"),
    ),
    Topic(
        THINK,
        Way("Thinking: a switch.", ("Use the Thinking switch below the message field.",), "Thinking switch"),
        Way("In the terminal: /think.", ("Type /think off in the terminal; /think on switches it on again.",), "/think"),
    ),
    Topic(
        SAVE,
        Way("Saving: Export.", ("Every message is kept anyway. Export in the menu writes the conversation to a file.",), "Export"),
        Way("In the terminal: /save and /export.", ("Every message is kept anyway. In the terminal, /save and /export write the conversation to a file.",), "/save"),
    ),
    Topic(
        SERVE,
        Way("The page comes with the server.", ("The page comes with Palaver's server: open the server's address in a browser.",), "server"),
        Way("The command is palaver serve.", ("`palaver serve` starts Palaver's server and opens the page in your browser.",), "palaver serve"),
    ),
    Topic(
        REAL,
        Way("A real model: the model menu.", ("Choose it in the model menu at the top: a folder, a GGUF file or the id of a model on the hub.", "In the model menu at the top, where you can also name a folder, a GGUF file or a hub id."), "model menu"),
        Way("In the terminal: /model, or its name at the start.", ("Type /model and its name in the terminal, or name it when you start Palaver: a folder, a GGUF file or the id of a model on the hub.",), "/model"),
    ),
    Topic(ONCE, ONE_QUESTION, ONE_QUESTION),
    Topic(
        HELP,
        Way("Help: the keyboard shortcuts.", ("Ctrl+/ shows the keyboard shortcuts, and every button says what it does.",), "shortcuts"),
        Way("In the terminal: /help.", ("In the terminal, /help lists the commands: /new, /open, /continue, /retry, /undo, /redo, /edit, /branch, /think, /expand, /set, /system, /tools, /save, /export, /quit.",), "/help"),
    ),
    Topic(
        QUIT,
        Way("Leaving: close the page.", ("Just close the page. The conversation is kept.",), "close the page"),
        Way("In the terminal: /quit.", ("Type /quit in the terminal. The conversation is kept.",), "/quit"),
    ),
    Topic(
        NEW,
        Way("A new conversation: New conversation.", ("Press New conversation; the old one is kept.", "Use New conversation: it begins a fresh one."), "New conversation"),
        Way("In the terminal: /new.", ("Type /new in the terminal; the old conversation is kept.", "Use /new in the terminal: it begins a fresh conversation."), "/new"),
    ),
    Topic(
        SYSTEM,
        Way("The system prompt: the settings.", ("It's in the settings: it tells me how to answer, for example: Answer in capitals.",), "settings"),
        Way("In the terminal: /system.", ("Type /system and your text in the terminal: it tells me how to answer, for example: Answer in capitals.",), "/system"),
    ),
    Topic(
        TOOLS,
        Way("Tools: the tool servers.", ("Add a tool server in the settings, under Tools. I call the tool that fits, and you approve it.",), "under Tools"),
        Way("In the terminal: /tools.", ("Add a tool server with /tools in the terminal. I call the tool that fits, and you approve it.",), "/tools"),
    ),
    Topic(PRIVATE, Way("I run on this machine alone.", ("I run on your own machine and need no internet. Your conversations stay on your disk.",), "your own machine")),
    Topic(FREE, Way("Palaver is free.", ("Palaver is free and open source. You need no account and no key.",), "free")),
    Topic(
        EDIT,
        Way("Editing: Edit.", ("Press Edit at your message; the old version is kept as a branch.",), "Press Edit"),
        Way("In the terminal: /edit.", ("Type /edit in the terminal; the old version is kept as a branch.",), "/edit"),
    ),
    Topic(
        SETTINGS,
        Way("Parameters: the settings.", ("They are in the settings: temperature, top-p, the longest reply and more.",), "in the settings"),
        Way("In the terminal: /set.", ("In the terminal it is /set with a name and its value, for example /set temperature 0.7.",), "/set"),
    ),
    Topic(
        OPEN,
        Way("Earlier conversations: the list.", ("They are in the list at the side: a click opens one.",), "list at the side"),
        Way("In the terminal: /list and /open.", ("In the terminal, /list shows them and /open goes on with one.",), "/open"),
    ),
    Topic(
        SEARCH,
        Way("Searching: the search field.", ("Use the search field above the list: it finds words in all your conversations.",), "search field"),
        Way("In the terminal: /search.", ("Type /search and some words in the terminal: it finds them in all your conversations.",), "/search"),
    ),
    Topic(
        TITLE,
        Way("The title: Rename.", ("Use Rename at the conversation in the list.",), "Rename"),
        Way("In the terminal: /title.", ("Type /title and a name in the terminal.",), "/title"),
    ),
    Topic(
        PRESET,
        Way("Presets: the settings.", ("Save a preset in the settings, under Presets.",), "Save a preset"),
        Way("In the terminal: /preset.", ("Type /preset save and a name in the terminal; /preset load brings it back.",), "/preset"),
    ),
    Topic(
        COLLAPSE,
        Way("Thoughts: a click hides them.", ("Click on the thought again, and it is folded away.",), "folded away"),
        Way("In the terminal: /collapse.", ("Type /collapse in the terminal, and thoughts are folded away.",), "/collapse"),
    ),
    Topic(
        SWITCH,
        Way("Branches: the arrows.", ("The arrows under a message go to its other versions.",), "arrows"),
        Way("In the terminal: /branches and /switch.", ("In the terminal, /branches lists them and /switch goes to one.",), "/switch"),
    ),
    Topic(
        HISTORY,
        Way("The messages so far: scroll up.", ("Scroll up: all messages are there.",), "Scroll up"),
        Way("In the terminal: /history.", ("Type /history in the terminal: it shows all messages.",), "/history"),
    ),
    Topic(
        TOKENS,
        Way("Tokens: the token view.", ("Tokens in the menu of a reply shows it token by token, with probabilities and alternatives.",), "menu of a reply"),
        Way("In the terminal: /tokens.", ("Type /tokens in the terminal: it shows the last reply token by token, with probabilities and alternatives.",), "/tokens"),
    ),
    Topic(
        CONTEXT,
        Way("Room in the context: the gauge.", ("The ring beside the message field shows how much of the context is used.",), "ring"),
        Way("In the terminal: /context.", ("Type /context in the terminal: it shows how much of the context is used.",), "/context"),
    ),
    Topic(
        LOAD,
        Way("Files: Import.", ("Use Import beside the list of conversations: the one in the file is opened.",), "Import"),
        Way("In the terminal: /import.", ("Type /import and the file in the terminal: the conversation in it is opened.",), "/import"),
    ),
    Topic(
        COPY,
        Way("Copying: Copy.", ("Press Copy under the reply.",), "Press Copy"),
        Way("In the terminal: /copy.", ("Type /copy in the terminal.",), "/copy"),
    ),
    Topic(
        MODEL,
        Way("The model: at the top.", ("Its name is at the top. I'm Sprout.",), "at the top"),
        Way("In the terminal: /model.", ("Type /model in the terminal: it shows the model. I'm Sprout.",), "/model"),
    ),
    Topic(
        STATUS,
        Way("The state: the model's card.", ("Click on the model's name at the top: it shows the model, the device and what is running.",), "model's name"),
        Way("In the terminal: /status.", ("Type /status in the terminal: it shows the model, the device and what is running.",), "/status"),
    ),
    Topic(
        RESULT,
        Way("A call is answered by its result.", ("Enter what the tool returned under the call; I go on from there.",), "under the call"),
        Way("In the terminal: /result.", ("Type /result and what the tool returned in the terminal; I go on from there.",), "/result"),
    ),
    Topic(LANGUAGE, Way("I speak English only.", ("I only speak English, but I can say hello in many languages. A real model speaks more.",), "English")),
)  # fmt: skip


def any_one(draw: Draw) -> Exchange:
    topic = draw.pick(TOPICS)
    form = draw.form(topic.bank)
    user, terminal = draw.phrase(form, m=draw.typed(draw.pick(MODELS)), x=draw.typed(draw.pick(LANGUAGES))), draw.terminal
    if topic.terminal is not None and topic.terminal is not topic.page:
        if TERMINAL_WORDS.search(form):
            terminal = True
        elif topic.bank != SERVE and draw.chance(0.3):
            terminal = draw.chance(0.6)
            user = _placed(draw, user, IN_TERMINAL if terminal else ON_PAGE)
    way = topic.terminal if terminal and topic.terminal is not None else topic.page
    apart = topic.terminal is not None and way is not topic.terminal
    return Exchange(user, way.thought, draw.pick(way.answers), Expect("itself and Palaver", "page_way" if apart else "contains", way.wanted))


def _placed(draw: Draw, question: str, bank: str) -> str:
    """The question with the place that it is asked for."""
    asked = question.rstrip("?.!")
    end = question[len(asked) :]
    return draw.plain(bank, q=asked, w=asked if re.match(r"I\b", asked) else asked[:1].lower() + asked[1:], e=end or draw.pick(("?", "")))
