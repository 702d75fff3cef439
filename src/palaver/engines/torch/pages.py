"""What is kept after a sequence ends: its keys and values in small pages, found again by what led to them.

A page holds the tokens from a multiple of PAGE on; its place in the tree is everything before it. Two sequences that
part within a page have a page each from there on, so sharing is exact to the token and no page ever changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from palaver.engines.torch.users import Users

PAGE = 32

Key = Hashable
"""What stands at a position: a token id, or the hash of the media whose placeholder it is."""


@dataclass(eq=False, slots=True)
class Page:
    keys: tuple[Key, ...]
    data: list[Tensor]
    parent: Page | None
    users: Users = field(default_factory=Users)
    children: dict[Key, list[Page]] = field(default_factory=dict)
    """By their first key."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Those after some of its keys, by their index: where prompts ended."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.data, *self.logits.values()))


@dataclass(frozen=True, slots=True)
class Match:
    """Pages that hold the first `tokens` tokens; of the last one perhaps only the beginning counts."""

    pages: tuple[Page, ...]
    tokens: int


class Pages:
    """A tree for each space. A space keeps apart what may never be shared: owners and adapters."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Page] = {}
        self._recent: OrderedDict[Page, Hashable] = OrderedDict()
        self.nbytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._recent)

    def match(self, space: Hashable, keys: Sequence[Key]) -> Match:
        """The longest beginning of these keys that is kept. Counts as a use of it."""
        found: list[Page] = []
        tokens = 0
        page = self._roots.get(space)
        while page is not None and tokens < len(keys):
            child, common = _best_child(page, tuple(keys[tokens : tokens + PAGE]))
            if child is None:
                break
            found.append(child)
            tokens += common
            page = child if common == PAGE else None
        self._touch(found)
        return Match(tuple(found), tokens)

    def ending(self, space: Hashable, keys: Sequence[Key]) -> Page | None:
        """The page that holds the last of these keys and the logits after it. Counts as a use of it."""
        match = self.match(space, keys)
        if not match.pages or match.tokens < len(keys):
            return None
        *before, last = match.pages
        size = (len(keys) - 1) % PAGE + 1
        assert last.parent is not None
        for page in last.parent.children[last.keys[0]]:
            if page.keys[:size] == last.keys[:size] and size - 1 in page.logits:
                self._touch([*before, page])
                return page
        return None

    def path(self, space: Hashable, keys: Sequence[Key]) -> list[Page]:
        """The root and the whole pages below it that hold the beginning of these keys."""
        pages = self.match(space, keys).pages
        root = self._roots.setdefault(space, Page((), [], None))
        whole = [page for page in pages[: len(keys) // PAGE] if len(page.keys) == PAGE]
        if whole and whole[-1].keys != tuple(keys[(len(whole) - 1) * PAGE : len(whole) * PAGE]):
            whole.pop()
        return [root, *whole]

    def add(self, space: Hashable, path: list[Page], keys: tuple[Key, ...], data: list[Tensor], user: str = "") -> bool:
        """Keeps a page below the path and adds it there. False when the path itself was evicted meanwhile."""
        parent = path[-1]
        if parent.parent is not None and parent not in self._recent:
            return False
        users = Users(user)
        logits: dict[int, Tensor] = {}
        for sibling in list(parent.children.get(keys[0], ())):
            if len(sibling.keys) < len(keys) and keys[: len(sibling.keys)] == sibling.keys:
                users.join(sibling.users)  # the new page holds all of it
                logits |= sibling.logits
                self._forget(sibling)
        page = Page(keys, data, parent, users, logits=logits)
        self._roots[space] = path[0]
        parent.children.setdefault(keys[0], []).append(page)
        self._recent[page] = space
        self.nbytes += page.nbytes
        path.append(page)
        self._touch(path[1:])
        return True

    def attach(self, space: Hashable, keys: Sequence[Key], logits: Tensor) -> None:
        """Keeps the logits after these keys for as long as the page that holds the last of them, if there is one."""
        match = self.match(space, keys)
        if match.pages and match.tokens == len(keys):
            match.pages[-1].logits[(len(keys) - 1) % PAGE] = logits
            self.nbytes += logits.nbytes

    def below(self, path: list[Page], keys: tuple[Key, ...]) -> Page | None:
        """A page below the path that begins with these keys already."""
        children = path[-1].children.get(keys[0], ())
        return next((child for child in children if child.keys[: len(keys)] == keys), None)

    def forget(self, user: str) -> None:
        """Drops what nobody uses but this one."""
        for page in list(self._recent):  # those that others follow come after what follows them
            if page.users.leave(user) and not page.children:
                self._forget(page)

    def evict(self) -> int:
        """Drops the page that was not used for longest; returns its bytes, 0 when there is none.

        A page is used whenever one below it is, so the one that waited longest has none below it.
        """
        if not self._recent:
            return 0
        page = next(iter(self._recent))
        self.evicted += 1
        return self._forget(page)

    def clear(self) -> None:
        while self._recent:
            self._forget(next(iter(self._recent)))

    def _touch(self, path: Sequence[Page]) -> None:
        for page in reversed(path):
            self._recent.move_to_end(page)

    def _forget(self, page: Page) -> int:
        assert not page.children, "a page that others follow is never the oldest"
        space = self._recent.pop(page)
        parent = page.parent
        assert parent is not None
        siblings = parent.children[page.keys[0]]
        siblings.remove(page)
        if not siblings:
            del parent.children[page.keys[0]]
        if parent.parent is None and not parent.children:
            self._roots.pop(space, None)
        self.nbytes -= page.nbytes
        return page.nbytes


def _best_child(page: Page, keys: tuple[Key, ...]) -> tuple[Page | None, int]:
    """The child that shares most of these keys, and how many."""
    best, most = None, 0
    for child in page.children.get(keys[0], ()):
        if child.keys == keys:
            return child, len(keys)
        common = _common(child.keys, keys)
        if common > most:
            best, most = child, common
    return best, most


def _common(a: tuple[Key, ...], b: tuple[Key, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
