"""Every text that the terminal shows, in one place, to be read as a whole and translated one day.

Texts with `{names}` are filled in with `str.format`. Numbers are written by `palaver.repl.text`.
"""

from __future__ import annotations

from dataclasses import dataclass

# --- nouns, in one and in many ---

TOKENS = ("token", "tokens")
MESSAGES = ("message", "messages")
CONVERSATIONS = ("conversation", "conversations")
TOOLS = ("tool", "tools")
CHARACTERS = ("character", "characters")
REPLIES = ("reply was", "replies were")
FILES = ("file", "files")

# --- the first screen ---

BANNER = "palaver {version} · "
DEMO_MODELS = {
    "sprout": (
        "sprout is a tiny demo model. It thinks out loud, does sums, makes tables and calls tools.",
        "What is 1234 + 5678?",
    ),
    "sprout-omni": (
        "sprout-omni is a tiny demo model. It sees coloured shapes, and hears numbers and everyday words.",
        "/attach picture.png   and then:  What shapes are there?",
    ),
    "sprout-diffusion": (
        "sprout-diffusion is a tiny demo model. It writes by denoising: watch a reply come into focus.",
        "What is 17 + 25?",
    ),
}
"""By the name of a shipped model: what it is, and an example."""
FIRST_EXAMPLE = "Try:  "
EXAMPLE = "Explain in two sentences why the sky is blue."
REAL_MODEL = "Load a real model:  "
REAL_MODEL_COMMAND = "/model Qwen/Qwen3-0.6B"
REAL_MODEL_SIZE = "  (1.5 GB)"
REAL_MODEL_ON_SERVER = "Use a real model: restart the server with  "
REAL_MODEL_SERVER_COMMAND = "palaver serve Qwen/Qwen3-0.6B"
FIRST_KEYS = "/help lists commands · Ctrl+C stops a reply · Ctrl+D quits"
READY = "{model} is ready"
CONTEXT_FACT = "context {tokens}"
NO_MODEL = "no model loaded · /model NAME loads one"
LOAD_FAILED = "Can't load {model}. {reason}"
LOAD_ANOTHER = "Load another one with /model NAME, or quit with Ctrl+D."
LOADING = "Loading {model}"
LOADING_STEP = "{line} · {step}"
TYPE_ALREADY = "{line} · you can already type"
AVAILABLE_MODELS = "Available models: {names}. You can also load a folder or a model from the Hugging Face hub."
LOAD_BY_NAME = "/model NAME loads another model."
THINKS = "thinks"
THINKS_WITH_SWITCHES = "thinks ({switches})"
THINKS_ALWAYS = "always thinks"
NEVER_THINKS = "doesn't think"
CALLS_TOOLS = "calls tools"
CALLS_NO_TOOLS = "can't call tools"
FIRST_CONVERSATION = "No conversations yet, so this is a new one."

# --- waiting ---

WAITING = "{what} · {time}"
WAITING_FOR_SERVER = "Waiting for the server"
WAITING_FOR_MODEL = "Waiting for the model"
READING_PROMPT = "Reading"
QUEUED = "Waiting in line: number {position}"
QUEUED_WITH_TIME = "{line}, about {time}"
COUNTING = "Counting tokens"
READING_TOKENS = "Reading the tokens"
SPEAKING = "Speaking"

# --- replies ---

THINKING = "Thinking"
THOUGHT = "Thought"
THOUGHT_FOR = "Thought for {time}"
CALLS = "calls {name}"
BAD_ARGUMENTS = "The arguments are not valid JSON, or were cut off."
INTERRUPTED = "Cancelled."
DROPPED = "Reply dropped, your message kept. /retry asks again, /undo brings the reply back."
STOPPED = "Stopped. /continue picks up where it left off."
CUT = "Reached the length limit. /continue picks up where it left off."
CUT_PLAIN = "reached the length limit"
STOPPED_PLAIN = "stopped"
UNFINISHED_BLOCK = "The block that was not finished (/continue denoises it again):"
STOP_STRING = "Ended at the stop string {text}."
INTERRUPTED_REPLY = "Interrupted. /continue picks up where it left off."
FAILED_REPLY = "Failed. /continue tries again from here."
FAILED = "Failed: {reason}"
RUNNING = "Still running"
LINE_NOT_UTF8 = "Line {number} of the standard input is not UTF-8 (byte {position})."
INTERNAL_ERROR = "Something went wrong inside Palaver. The conversation is safe. ({error})"

# --- statistics ---

THINKING_TOKENS = "{tokens} ({thinking} thinking)"
SPEED = "{speed} tokens/s"
FIRST_TOKEN = "first {time}"
PROMPT_TOKENS = "prompt {tokens}"
PROMPT_CACHED = "prompt {tokens} ({cached} cached)"

# --- the context ---

CONTEXT_USED = "{used} of {limit} tokens ({share}) · {left} left"
CONTEXT_CACHED = "{line} · {cached} cached"
CONTEXT_EMPTY = "This conversation is empty. The context holds {limit} tokens."
CONTEXT_NEARLY_FULL = (
    "The context is {share} full: {left} tokens left. /new starts over; "
    "/set overflow shorten drops the oldest messages when it is full."
)
CONTEXT_FULL = (
    "The context is full, so the reply can't go on. /new starts over; "
    "/set overflow shorten drops the oldest messages from now on."
)
CONTEXT_CHOICES = """\
s  Send it without the oldest messages (they stay saved)
a  Always do that (/set overflow shorten)
n  Send it in a new conversation"""
CONTEXT_QUESTION = "Your choice? (Enter: edit the message)"

# --- help ---

KEYBOARD_SHORTCUTS = "Keyboard shortcuts"
ESSENTIAL_KEYS = (
    ("Alt+Enter", "new line; a \\ at the end of a line does it, too"),
    ("Ctrl+C", "stop the reply and keep it; twice: drop it"),
    ("Ctrl+T", "show or hide thoughts; /expand: the last one"),
    ("Up", "edit your last message; again: earlier input"),
    ("Ctrl+R", "search earlier input"),
)
KEYS = (("Enter", "send"), *ESSENTIAL_KEYS, ("Ctrl+L", "clear the screen"), ("Ctrl+D", "quit"))
HELP_MORE = """\
Also: /search, /branches, /compare, /attach, /tools, /save
/help all lists every command, /help NAME explains one."""
HELP_SLASHES = "To send text that begins with /, type //."
HELP_ALIASES = "{description} (also {aliases})"
UNKNOWN_COMMAND = "Unknown command /{name}. {hint} To send it as a message, type //{name}."
DID_YOU_MEAN = "Did you mean {names}?"
SEE_HELP = "/help all lists every command."

# --- conversations ---

NEW_CONVERSATION = "New conversation. The previous one is saved: /open brings it back."
NEW_AFTER_DELETED = "New conversation."
NEW_EMPTY_CONVERSATION = "This is a new conversation already."
NO_TITLE = "(untitled)"
TITLE = 'Title: "{title}"'
NO_TITLE_YET = "No title yet: the first message becomes the title."
NO_CONVERSATIONS = "No conversations yet."
NO_MATCHING_CONVERSATIONS = 'No conversation title contains "{words}". /search looks inside messages too.'
MORE_CONVERSATIONS = "These are the newest {count}. /list WORDS and /search WORDS find older ones."
OPEN_NUMBER = "/open NUMBER opens one."
SEARCH_USAGE = "What should I search for? Type /search WORDS."
SEARCH_NOTHING = 'No results for "{words}", neither in messages nor in thoughts.'
SEARCH_HIT = "{role}: {snippet}"
SEARCH_THOUGHT = "{role}, thinking: {snippet}"
OPEN_NOTHING = 'No conversation matches "{words}". /list shows the newest ones.'
OPEN_QUESTION = "Open which number? (Enter: none)"
CONVERSATION_HEAD = " · {messages}"
DELETED_ELSEWHERE = (
    "This conversation was deleted elsewhere: /new starts another one, `palaver undelete {id}` brings it back."
)
NOTHING_TO_DELETE = "There is no conversation to delete."
DELETED = "Deleted. To bring it back, run:  palaver undelete {id}"

# --- branches ---

ROLES = {"user": "You", "assistant": "Model", "tool": "Tool", "system": "System"}
MESSAGE_HEAD = "{number} {role}"
VERSIONS = " · {count} versions"
SYSTEM_HEAD = "System prompt"
BLOB = "[{about}]"
BLOB_KINDS = {"image": "picture", "audio": "sound", "video": "video"}
BLOB_PIXELS = "{width} × {height}"
TOOL_RESULT = "{name}: {content}"
NOTHING_TO_RETRY = "There is no message to reply to yet."
SEED_IS_SET = "The seed is fixed at {seed}, so the reply may be the same. /seed none picks a new one each time."
NOTHING_TO_CONTINUE = "There is no reply to continue."
NOTHING_TO_UNDO = "Nothing to undo."
NOTHING_TO_REDO = "Nothing to redo."
UNDONE = "Undone."
REDONE = "Redone."
BRANCHED = "Your next message starts a new branch."
NOW_AT = '{verb} Now at: "{preview}"'
NOW_AT_START = "{verb} Now at the start of the conversation."
NOTHING_TO_BRANCH = "There is nothing to branch from yet."
NOTHING_TO_EDIT = "There is no message to edit yet."
NOT_CHANGED = "Nothing changed."
REPLY_EDITED = "Saved as another version of the reply. /continue picks up from its end."
EDITOR_FAILED = "Can't start the editor {editor}: {reason}. /edit inline edits the message here."
EDITED_TEXT_UNREADABLE = (
    "Can't read the text that {editor} saved: it must be a file in UTF-8. The message is unchanged."
)
NO_BRANCHES = "No branches yet."
SWITCH_TO_BRANCH = "/switch NUMBER goes to a branch."
ONLY_BRANCH = "There is only one branch."
EMPTY_CONVERSATION = "Nothing here yet."
MESSAGE_NUMBER = "message number"
BRANCH_NUMBER = "branch number"
NUMBER_RANGE = "must be between 1 and {maximum}"

# --- comparing ---

COMPARE_USAGE = (
    "Type /compare COLUMN COLUMN, with 2 to {maximum} columns: settings such as temperature=0 or "
    'thinking=off,seed=1, system="Be brief.", a model, a preset, or default. Your next messages get a reply for each.'
)
COMPARE_ON = "Your next messages get a reply for each column. /compare off ends this."
COMPARE_BLIND_ON = "Your next messages get a reply for each column, in random order. The names come after your choice."
COMPARE_OFF = "Messages get one reply again."
COMPARE_STATE = "Comparing: {columns}. /compare off ends this."
COMPARE_QUOTES = "The quotes are not closed: {reason}."
COMPARE_PRESET = "a preset"
COMPARE_MODEL = "a model"
COMPARE_BLIND = "hide which is which until you chose"
COMPARE_STOP = "one reply again"
COMPARE_OWN = "the settings of this conversation"
TALLY_HEAD = ("Compared", "chosen", "blind")
TALLY_SHARE = "{chosen} of {compared}"
CHOOSE_QUESTION = "Which is better? 1 to {count}, n none, t tokens{more} (Enter: later):"
CHOOSE_CONTINUE = ", c continue"
CHOOSE_HELP = "Type the number of a reply, or n, t or c."
CHOOSE_LATER = "Going on with 1. /choose decides later."
CHOSEN = "Going on with {number}: {name}"
CHOSEN_NONE = "None is better. Going on with 1; /switch goes to another."
REVEALED = "{number} was {name}"
NOTHING_TO_CHOOSE = "No replies are compared on this branch. /compare starts it."
REPLY_NUMBER = "reply number"
WHOLE_NUMBER = "must be a whole number"
FIRST_TOKENS = "These are the first {count} tokens. /tokens shows all of the reply that you go on with."

# --- thinking ---

THINKING_SETTING = "Thinking: {state}"
THINKING_ON = "on"
THINKING_OFF = "off"
THINKING_DEFAULT = "the model's default"
THINKING_EFFORT = "effort {effort}"
THINKING_BUDGET = "at most {tokens} tokens"
THINKING_OF_MODEL = "This model {summary}."
THINK_USAGE = "Type /think on, off, default, budget NUMBER or effort LEVEL."
NO_THINKING_SWITCH = "This model can't switch thinking on or off."
NO_THINKING_SWITCH_OFF = "This model can't switch thinking off. /think budget 0 ends every thought at once."
NO_EFFORT = "This model has no thinking effort to set."
EFFORT_LEVELS = "must be one of {levels} for this model"
NO_THOUGHT = "The last reply has no thoughts."
NO_THOUGHT_IN = "Message {number} has no thoughts."
NO_REPLY_YET = "There is no reply yet."
THOUGHTS_COLLAPSED = "Thoughts are collapsed to a few lines. /expand shows the last one."
THOUGHTS_EXPANDED = "Thoughts are shown in full."
THOUGHTS_HIDDEN = "Thoughts are hidden."
ON_OR_OFF = "must be on or off"

# --- parameters ---

PARAMETER_VALUE = "{name} = {value}"
PARAMETER_IS_DEFAULT = "the model's default"
PARAMETER_DEFAULT = "the model's default is {value}"
PARAMETER_RANGE = "{low} to {high}"
PARAMETER_RANGE_OR_NONE = "{low} to {high}, or none"
PARAMETER_SET = "set"
PARAMETER_UNSET = "default"
PARAMETER_DEFAULT_CHOICE = "the model's default: {value}"
NO_LIMIT = "no limit"
NONE = "none"
RANDOM_SEED = "random"
OVERFLOW = "when the context is full: refuse (stop and ask) or shorten (drop the oldest messages)"
MODEL_DEFAULT = "default"
MEDIA_PARAMETERS = {
    "max_slice_nums": "into how many slices a picture is cut at most, where the model cuts pictures",
    "use_image_id": "whether pictures are numbered in the prompt, where the model numbers them",
    "stack_frames": "frames of each second of a video, all but the first in one picture",
    "frames_per_second": "frames of each second of a video",
    "max_frames": "the most frames of a video",
}
USE_THINK = "Set this with /think."
STRINGS_VALUE = "{name}: {values} · {meaning}"
BAD_QUOTES = 'must be plain text, or text in quotes such as "\\n"'
SYSTEM_PROMPT = "System prompt: {text}"
NO_SYSTEM_PROMPT = "No system prompt. /system TEXT sets one."
PRESETS = "Presets: {names}"
NO_PRESETS = "No presets yet. /preset save NAME saves the current settings."
PRESET_SAVED = 'Saved the settings as preset "{name}".'
PRESET_DELETED = 'Deleted preset "{name}".'
PRESET_USAGE = "Type /preset save NAME, /preset load NAME or /preset delete NAME."
PRESET_UNKNOWN = 'No preset named "{name}". {others}'
PRESET_OTHERS = "Presets: {names}."

# --- tools ---

TOOLS_OFFERED = "The model can call {tools} of a file. You answer such a call with /result TEXT."
NO_TOOLS = (
    "No tools are offered. /tools add demo adds a tool server that comes with Palaver; /tools FILE.json offers others."
)
TOOL_SERVER = "{mark} {name} ({transport}): {tools}"
TOOL_SERVER_ERROR = "{mark} {name} ({transport}): {error}"
TOOLS_ON_OFF = "● offered in this conversation, ○ not. /tools on NAME and /tools off NAME change it."
TOOL_SERVER_ADDED = "{name} is added, and offered in this conversation."
TOOL_SERVER_REMOVED = "{name} is removed."
TOOL_SERVER_USAGE = "Type /tools add NAME COMMAND or /tools add NAME URL; /tools add demo adds the demo."
TOOL_ATTACH_USAGE = (
    "Type /tools attach SERVER to see its resources and prompts, and /tools attach SERVER NAME to attach one."
)
TOOL_NO_RESOURCES = "{name} has no resources or prompts."
TOOL_SIGN_IN = "{name} needs you to sign in. Open this address in a browser on this computer:"
WAITING_FOR_SIGN_IN = "Waiting for the browser"
TOOL_SIGN_IN_REFUSED = "The sign-in to {name} was refused."
TOOL_SIGNED_IN = "You are signed in to {name}."
TOOL_RULES_NONE = "Nothing is remembered: every call is asked about."
TOOL_RULE = "{name}: {rule}{place}"
TOOL_RULE_HERE = ", in this conversation"
TOOL_RULE_ELSEWHERE = ", in another conversation"
TOOL_RULES_FORGET = "/tools forget NAME takes one back, /tools forget all takes back all."
TOOL_RULES_FORGOTTEN = "Taken back: {rules}."
TOOL_RULES = ("rule", "rules")
TOOL_RULE_UNKNOWN = 'Nothing is remembered about "{name}".'
TOOL_SERVER_UNKNOWN = 'No tool server named "{name}".'
APPROVE_CALL = (
    "Run {names}? y yes, n no, a always this tool here, s always this server, v never this tool here, e edit, q stop:"
)
APPROVE_CALLS = (
    "Run {names}? y yes, n no, a always these tools here, s always this server, v never these here, e edit, q stop:"
)
APPROVE_HELP = "Type one of y, n, a, s, v, e or q."
CALL_INTERRUPTED = "It had begun when it was interrupted. It is not known what it did."
CALL_AGAIN = "Run {names} (again)? y yes, n no, q stop:"
EDIT_ARGUMENTS = "Arguments of {name}, as JSON (empty: {arguments}):"
NOT_AN_OBJECT = "The arguments must be a JSON object."
TOOLS_RUN = "Running {names}"
TOOL_SERVER_STARTS = "Starting {name}"
WAITING_FOR_TOOLS = "Connecting to the tool servers"
TOOLS_NOTICE = "{server}: {text}"
TOOLS_MISSING = "The tools of {server} were not offered: it {why}."
TOOLS_STOPPED = "The tool calls are stopped. /continue goes on."
TOOLS_WAIT = "Tool calls wait for approval: continue this conversation at a terminal or on the page."
MORE_LINES = "… {lines} more"
LINES = ("line", "lines")
TOOLS_UNSUPPORTED = "This model can't call tools."
TOOLS_NOT_JSON = "{path} is not valid JSON: {reason}."
TOOLS_EMPTY = "{path} contains no tools."
NO_OPEN_CALL = "No tool call is waiting for a result."
RESULT_USAGE = "Type the result: /result TEXT."
RESULT_TAKEN = "Result saved. Still waiting for {names}."

# --- files ---

SAVED = "Added to {path}."
SAVED_STOPPED = '{line} {replies} stopped early and marked "weight": 0.'
NOTHING_TO_SAVE = "There is no reply on this branch to save yet."
EXPORT_USAGE = "Type /export FORMAT [FILE]. Formats: {formats}."
EXPORTED = "Saved to {path}."
FILE_EXISTS = "{path} already exists. Choose another name."
IMPORTED = "Imported {conversations}: {titles}"
IMPORTED_NONE = "{path} contains no conversations."
NOT_IMPORTED = "Not imported: {item}: {reason}"
MORE_NOT_IMPORTED = "… and {count} more. palaver import FILE lists all."
FILE_NEEDED = "Which file? Type its name after the command."
NO_HOME = "Can't find the home folder that {path} begins with."
NOT_A_FILE = "{path} is a pipe or a device, not a file."
FILE_TOO_LARGE = "{path} is larger than {limit} MB."
ATTACHED = "{name} will be sent with your next message. /attach clear removes it."
NOTHING_ATTACHED = "Nothing is attached."
COPIED = "Copied {characters} ({program})."
COPY_USAGE = "Type /copy, /copy code or /copy thought."
NOTHING_TO_COPY = "There is no reply to copy yet."
NO_CODE_TO_COPY = "The last reply contains no code block."
NO_CLIPBOARD = "No clipboard program found. Install wl-copy, xclip or pbcopy."
CLIPBOARD_TERMINAL = "through the terminal"

# --- the voice ---

VOICE_IS_ON = "Replies are spoken{by}."
VOICE_IS_OFF = "Replies are not spoken. /voice on turns speech on."
VOICE_PLAYED = "Replies are spoken{by}, played by {player}. Ctrl+C or your next message stops the sound."
VOICE_TO_FILES = "Replies are spoken{by}. No audio player was found, so they are saved as WAV files in {folder}."
VOICE_BY = " by {name}"
VOICE_NOT_INSTALLED = "Replies stay text. {reason}"
VOICE_OFF = "Replies are no longer spoken."
VOICE_USAGE = "Type /voice on, /voice on NAME, /voice off or /voice save FILE."
VOICE_NOTHING = "There is no reply to speak yet."
VOICE_SAVED = "Saved the audio to {path}"
VOICE_FAILED = "Can't speak this reply: {reason}"
LISTEN_USAGE = "Type /listen FILE: its words are put into your next message."
LISTENING = "transcribing"
HEARD = "{name} says: {text}"
HEARD_NOTHING = "No words were recognised in {name}."

# --- the model ---

STATUS_MODEL = "model"
STATUS_CONTEXT = "context"
STATUS_DEVICE = "runs on"
STATUS_REUSE = "prompt cache"
STATUS_EXACTNESS = "exact results"
STATUS_LACKS = "can't do"
STATUS_STEPS = "computation"
STATUS_THINKING = "thinking"
STATUS_CONVERSATION = "conversation"
STATUS_BRANCH = "branch"
STATUS_SYSTEM = "system prompt"
STATUS_SET = "settings"
STATUS_ATTACHED = "attached"
STATUS_THOUGHTS = "thoughts"
STATUS_NEW = "new"
STATUS_TITLE = "{title} ({id})"
STATUS_WAYS = "{messages}, {ways} possible"
AND = " and "
NO_TOKENS = "The model in use does not know the tokens of this reply."
MORE_TOKENS = "{count} tokens in all. /tokens {next} shows the next ones."
GIVEN_TOKEN = "given"
FIRST_NUMBER = "first token"

# --- commands: usage and description ---


@dataclass(frozen=True, slots=True)
class CommandText:
    description: str
    usage: str = ""


GROUP_CONVERSATIONS = "Conversations"
GROUP_BRANCHES = "Replies and branches"
GROUP_THINKING = "Thinking"
GROUP_PARAMETERS = "Parameters"
GROUP_TOOLS = "Tools"
GROUP_FILES = "Files"
GROUP_VOICE = "Voice"
GROUP_MODEL = "Model"
GROUP_HELP = "Help"

PARAMETER_USAGE = "[NUMBER | default]"
PARAMETER_USAGE_NULLABLE = "[NUMBER | none | default]"

COMMANDS = {
    "new": CommandText("start a new conversation with the same settings"),
    "open": CommandText("open an earlier conversation", "[WORDS | NUMBER]"),
    "list": CommandText("list the newest conversations, or those with these words in the title", "[WORDS]"),
    "search": CommandText("search all conversations", "WORDS"),
    "title": CommandText("show or change the title", "[TEXT]"),
    "delete": CommandText("delete this conversation; `palaver undelete` brings it back"),
    "retry": CommandText("get another reply to the same message"),
    "continue": CommandText("continue a stopped reply where it stopped"),
    "undo": CommandText("go back to before the last exchange"),
    "redo": CommandText("take the last undo back"),
    "edit": CommandText("rewrite your last message, N or the reply", "[N | reply] [inline]"),
    "branch": CommandText("go back to message N; your next message starts a new branch", "[N]"),
    "branches": CommandText("list the branches of this conversation"),
    "switch": CommandText("go to another branch or another version of a reply", "N | next | prev"),
    "history": CommandText("show this conversation, or its last messages", "[COUNT]"),
    "compare": CommandText("send your messages to several settings at once", "[blind] COLUMN COLUMN... | off"),
    "choose": CommandText("choose one of the compared replies and go on with it", "[NUMBER | none]"),
    "think": CommandText("turn thinking on or off, or limit it", "[on | off | default | budget NUMBER | effort LEVEL]"),
    "expand": CommandText("show the thoughts of the last reply or of message N", "[N]"),
    "collapse": CommandText("collapse thoughts to a few lines, or show them in full", "[on | off]"),
    "set": CommandText("show or change a parameter", "NAME [VALUE]"),
    "params": CommandText("list all parameters"),
    "stop": CommandText("show, add or clear stop strings", '["TEXT" | clear]'),
    "system": CommandText("show or change the system prompt", "[TEXT | clear]"),
    "preset": CommandText("save or load the settings under a name", "save | load | delete NAME"),
    "tools": CommandText(
        "tool servers, and tools of a JSON file",
        "[add NAME COMMAND|URL | remove NAME | on | off | attach SERVER NAME | forget NAME | sign-in NAME | FILE]",
    ),
    "result": CommandText("answer a tool call", "[NAME] TEXT"),
    "save": CommandText("add this branch to a JSONL file for training", "[FILE]"),
    "export": CommandText("save the conversation as a file", "jsonl | md | tree | branches | sharegpt [FILE]"),
    "import": CommandText("import conversations from a file and open the first", "FILE"),
    "attach": CommandText("attach a file to your next message", "FILE | clear"),
    "copy": CommandText("copy the last reply, its last code block or its thoughts", "[code | thought]"),
    "listen": CommandText("put the words of a sound file into your next message", "FILE"),
    "voice": CommandText("have replies read aloud, or save the last one as audio", "[on [NAME] | off | save [FILE]]"),
    "model": CommandText("show the model, or load another one", "[NAME]"),
    "context": CommandText("show how full the context is"),
    "status": CommandText("show the model, the conversation and the settings"),
    "tokens": CommandText(
        "show the tokens of the last reply and how likely each was; with a diffusion model, N limits its replies",
        "[FROM | N]",
    ),
    "help": CommandText("show the essential commands, all of them, or one", "[all | COMMAND]"),
    "quit": CommandText("quit; everything is saved"),
}
ESSENTIAL = ("new", "open", "continue", "retry", "edit", "undo", "think", "system", "model", "quit")
