"""Which replicas can take an item. Pools differ in the largest item that fits a pack. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import le

from actors.errors import Unavailable

Sizes = tuple[tuple[int, ...] | None, ...]
"""The Replica.largest_item of each of some pools."""


class Pools:
    """The replicas, grouped by the largest item that they can take."""

    def __init__(self, largest_items: Mapping[str, tuple[int, ...] | None]) -> None:
        """`largest_items`: the Replica.largest_item of each replica."""
        self._by_size: dict[tuple[int, ...] | None, list[str]] = {}
        for replica, size in largest_items.items():
            self._by_size.setdefault(size, []).append(replica)
        self._sizes: Sizes = tuple(self._by_size)
        self._size = largest_items

    @property
    def several(self) -> bool:
        return len(self._sizes) > 1

    def taking(self, tokens: tuple[int, ...]) -> Sizes:
        """The pools that can take an item of this many tokens on each path. Empty if none can."""
        return within(self._sizes, tokens)

    def replicas(self, sizes: Sizes) -> list[str]:
        """The replicas of these pools."""
        return [replica for most in sizes for replica in self._by_size[most]]

    def too_large(self, tokens: Sequence[int]) -> Unavailable:
        """The error for an item that no pool can take."""
        most = max(size for size in self._by_size if size)
        has, take = (" and ".join(map(str, each)) for each in (tokens, most))
        return Unavailable(
            f"the item has {has} tokens and the encoders that are ready take {take}: try again "
            "when the pool with the largest graphs.token_budgets is ready, or send a smaller item"
        )

    def waiting_per_sent(
        self,
        replica: str,
        waiting: Iterable[tuple[tuple[int, ...], int]],
        sent: Callable[[str], int],
    ) -> float:
        """Patches that wait for a replica, per patch that was sent to it. Patches that several
        pools can take are divided in proportion to what was sent to each pool.

        `waiting`: tokens and patches of each request; `sent`: patches on a replica.
        """
        if replica not in self._size:
            return 0.0
        on = {size: sum(map(sent, some)) for size, some in self._by_size.items()}
        taking = ((self.taking(tokens), patches) for tokens, patches in waiting)
        return sum(
            patches / (sum(on[size] for size in sizes) or 1)
            for sizes, patches in taking
            if self._size[replica] in sizes
        )


@lru_cache(10_000)  # called for every waiting request, whenever encoders get room
def within(sizes: Sizes, tokens: tuple[int, ...]) -> Sizes:
    """The sizes that hold an item of this many tokens, on every path."""
    return tuple(most for most in sizes if most is None or all(map(le, tokens, most)))
