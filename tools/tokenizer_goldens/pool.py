"""Lists of ids, each stored once: most tokenizers agree on most texts."""


class Pool:
    """Distinct lists in order of first use."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []
        self._index: dict[tuple[int, ...], int] = {}

    def add(self, ids: list[int]) -> int:
        """The place of `ids` in `lists`."""
        key = tuple(ids)
        if key not in self._index:
            self._index[key] = len(self.lists)
            self.lists.append(list(ids))
        return self._index[key]

    def add_all(self, lists: list[list[int]]) -> list[int]:
        return [self.add(ids) for ids in lists]
