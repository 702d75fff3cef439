"""The error types. Each edge (terminal, HTTP, socket) maps them once, by type.

Every message is a sentence for the user that names the cause and says what to do.
"""

import difflib
from collections.abc import Sequence


class PalaverError(Exception):
    """The base class of all errors that Palaver raises on purpose."""


class RequestError(PalaverError):
    """The request is invalid: a different request may succeed."""


class BadParameter(RequestError):
    """A parameter has an invalid value."""

    def __init__(self, name: str, value: object, why: str) -> None:
        text = f"{name} {why} (got {value!r})." if why.startswith("must ") else f"{name} {value!r}: {why}"
        super().__init__(text)
        self.name = name
        self.value = value
        self.why = why


class UnknownParameter(BadParameter):
    """There is no parameter of this name; `known` are those that there are."""

    def __init__(self, name: str, value: object, known: Sequence[str] = ()) -> None:
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known parameters: {', '.join(known)}." if known else ""
        super().__init__(name, value, "is not a parameter")
        self.args = (f"Unknown parameter {name!r}.{hint}",)


class EmptyMessage(RequestError):
    def __init__(self) -> None:
        super().__init__("The message is empty.")


class NoMessages(RequestError):
    def __init__(self, why: str = "There are no messages") -> None:
        super().__init__(f"{why}: send at least one message from the user.")


class UnsupportedContent(RequestError):
    """A part of a message that this model does not support."""


class NothingToContinue(RequestError):
    """The reply is complete, or there is none."""


class QueueFull(RequestError):
    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting:,} requests are waiting already: try again in a moment.")
        self.waiting = waiting


class CacheFull(RequestError):
    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"The request needs {tokens:,} tokens of cache but there is room for {limit:,}: "
            "shorten it, or give the cache more memory with --kv-cache-memory."
        )
        self.tokens = tokens
        self.limit = limit


class ModelNotOffered(RequestError):
    """A request names a model that can't be asked for here."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        shown, more = ", ".join(known[:20]) or "none", len(known) - 20
        rest = f" and {more} more" if more > 0 else ""
        super().__init__(f"There is no model {name[:200]!r} on this server. There are: {shown}{rest}.")
        self.name = name[:200]


class ModelError(PalaverError):
    """The model, its files or its template do not support this; another model may."""


class UnknownModel(ModelError):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"Can't find the model {name!r}: {why}")
        self.name = name


class NoModel(ModelError):
    def __init__(self) -> None:
        super().__init__("No model is loaded: load one first.")


class ModelLoading(ModelError):
    def __init__(self, name: str) -> None:
        super().__init__(f"The model {name!r} is still loading: try again in a moment.")
        self.name = name


class NoWeights(ModelError):
    def __init__(self, folder: str) -> None:
        super().__init__(
            f"The folder {folder!r} contains no weights: *.safetensors files are expected beside config.json."
        )


class UnsafeWeights(ModelError):
    def __init__(self, folder: str, names: str) -> None:
        super().__init__(
            f"The weights in {folder!r} are pickle files ({names}), which can run code when loaded: "
            "convert them to safetensors first."
        )


class UnsafeCode(ModelError):
    def __init__(self, folder: str) -> None:
        super().__init__(
            f"The model in {folder!r} asks to run its own Python code (auto_map), which Palaver does not do: "
            "use a model whose architecture the transformers library knows."
        )


class BrokenModel(ModelError):
    """Files of the model are damaged or of an unknown format."""


class DoesNotFit(ModelError):
    def __init__(self, name: str, needed: int, free: int, device: str) -> None:
        super().__init__(
            f"The model {name!r} needs about {needed / 1e9:.1f} GB of memory "
            f"but {device} has {free / 1e9:.1f} GB free: "
            "use a smaller or a quantised model, or another device."
        )
        self.needed = needed
        self.free = free


class ExceedsMemoryLimit(DoesNotFit):
    """A model that takes more memory than all models together may."""

    def __init__(self, name: str, needed: int, limit: int) -> None:
        super().__init__(name, needed, limit, "--memory")
        self.args = (
            f"The model {name!r} needs about {needed / 1e9:.1f} GB of memory with its cache, but --memory allows "
            f"{limit / 1e9:.1f} GB for all models: use a smaller or a quantised model, or allow more.",
        )


class CantCompile(ModelError):
    def __init__(self, why: str) -> None:
        super().__init__(f"Compiled steps can't be used: {why}. Leave out --compile to run without them.")
        self.why = why


class NoTemplate(ModelError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model {name!r} has no chat template, so it can only complete text: "
            "use `palaver ask --raw`, or give a template with --template FILE."
        )


class TemplateError(ModelError):
    """The chat template failed. The message names the template and, if known, the line."""

    def __init__(self, template: str, line: int | None, why: str) -> None:
        place = f"{template}, line {line}" if line is not None else template
        super().__init__(f"The chat template ({place}) failed: {why}")
        self.template = template
        self.line = line
        self.why = why


class ContextOverflow(ModelError):
    """Clients of OpenAI's API recognise it by "this model's maximum context length is"."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"The prompt is {tokens:,} tokens long, but this model's maximum context length is {limit:,} tokens: "
            "shorten the conversation or use a model with a longer context."
        )
        self.tokens = tokens
        self.limit = limit


class EngineError(PalaverError):
    """The engine failed."""


class EngineClosed(EngineError):
    def __init__(self) -> None:
        super().__init__("The engine has been closed.")


class ShuttingDown(PalaverError):
    def __init__(self) -> None:
        super().__init__("The server is shutting down: try again in a moment.")
