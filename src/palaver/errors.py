"""One tree of errors. Each edge (terminal, HTTP, socket) maps it once, by type.

Every error is one sentence for a person: it names the thing and says what to do.
"""


class PalaverError(Exception):
    """The root: whatever Palaver refuses or fails at, and can say why."""


class RequestError(PalaverError):
    """What was asked can't be done as it was asked; asking differently helps."""


class BadParameter(RequestError):
    """A named value is outside of what it may be."""

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name} = {value!r}: {why}")
        self.name = name
        self.value = value
        self.why = why


class EmptyMessage(RequestError):
    def __init__(self) -> None:
        super().__init__("The message is empty: write something to send.")


class NoMessages(RequestError):
    def __init__(self) -> None:
        super().__init__("There are no messages: a turn needs at least one message from the user.")


class UnsupportedContent(RequestError):
    """A part of a message that this model can't take."""


class NothingToContinue(RequestError):
    """The reply is whole, or there is none."""


class QueueFull(RequestError):
    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests are waiting already: try again in a moment.")
        self.waiting = waiting


class CacheFull(RequestError):
    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"The request needs {tokens} tokens of cache but there is room for {limit}: "
            "shorten it, or give the cache more memory with --kv-cache-memory."
        )
        self.tokens = tokens
        self.limit = limit


class ModelError(PalaverError):
    """The model, its files or its template can't do this; another model may."""


class UnknownModel(ModelError):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"No model {name!r}: {why}")
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
        super().__init__(f"The folder {folder!r} holds no weights: expected *.safetensors files beside config.json.")


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
    """Files of the model that can't be read as what they should be."""


class DoesNotFit(ModelError):
    def __init__(self, name: str, needed: int, free: int, device: str) -> None:
        super().__init__(
            f"The model {name!r} needs about {needed / 1e9:.1f} GB of memory "
            f"but {device} has {free / 1e9:.1f} GB free: "
            "use a smaller or a quantised model, or another device."
        )
        self.needed = needed
        self.free = free


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
    """The chat template failed; names the template and, where known, the line."""

    def __init__(self, template: str, line: int | None, why: str) -> None:
        place = f"{template}, line {line}" if line is not None else template
        super().__init__(f"The chat template ({place}) failed: {why}")
        self.template = template
        self.line = line
        self.why = why


class ContextOverflow(ModelError):
    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"The prompt is {tokens} tokens long but the model's context is {limit}: "
            "shorten the conversation or use a model with a longer context."
        )
        self.tokens = tokens
        self.limit = limit


class EngineError(PalaverError):
    """The engine failed at something it should have done."""


class EngineClosed(EngineError):
    def __init__(self) -> None:
        super().__init__("The engine has been closed.")


class ShuttingDown(PalaverError):
    def __init__(self) -> None:
        super().__init__("The server is shutting down: try again in a moment.")
