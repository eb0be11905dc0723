"""The order in which CloudFormation and the command line delete: computed from templates and stack dependencies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from tests.graph import Graph, Key

START, ALL = "<start>", "<all>"
"""Of a stack: nothing in it is made before START, and ALL means that everything in it is there."""


class Plan:
    """Edges lead from what is made later to what it needs, so to what must outlive it."""

    def __init__(self, graph: Graph) -> None:
        self.edges: dict[Key, set[Key]] = {key: set(needed) for key, needed in graph.edges.items()}
        parts = graph.synthesis.stack_dependencies
        for part, earlier in parts.items():
            self.edges[(part, START)] = {(before, ALL) for before in earlier}
            self.edges[(part, ALL)] = {(part, START)}
        for key in graph.edges:
            self.edges[key].add((key[0], START))
            self.edges[(key[0], ALL)].add(key)

    def reach(self, key: Key) -> set[Key]:
        """``key`` and all that it needs, transitively."""
        found, waiting = {key}, [key]
        while waiting:
            for needed in self.edges[waiting.pop()] - found:
                found.add(needed)
                waiting.append(needed)
        return found

    def dependents(self, key: Key) -> set[Key]:
        """All that need ``key``, transitively, without itself."""
        found, waiting = {key}, [key]
        while waiting:
            needed = waiting.pop()
            for other in self.edges:
                if other not in found and needed in self.edges[other]:
                    found.add(other)
                    waiting.append(other)
        return found - {key}

    def cut(self, first: Key, second: Key) -> Plan:
        """A plan in which no path makes ``first`` go before ``second``; all else as it was."""
        before = self.reach(first)
        made = Plan.__new__(Plan)
        made.edges = {key: needed - {second} if key in before else set(needed) for key, needed in self.edges.items()}
        assert second not in made.reach(first)
        return made

    def order(self, keys: Iterable[Key], early: Key | None = None, seed: int = 0) -> list[Key]:
        """A deletion order of ``keys``: each after all that need it; ``early`` as soon as that allows.

        Among equals the order is drawn from ``seed``, as CloudFormation deletes in parallel.
        """
        left = set(keys)
        needed_by: dict[Key, set[Key]] = {key: set() for key in self.edges}
        for key, needed in self.edges.items():
            for other in needed:
                needed_by[other].add(key)
        draw = random.Random(seed)
        rank = {key: (draw.random(), key) for key in sorted(self.edges)}
        hurried = {early} | self.dependents(early) if early else set()
        done: list[Key] = []
        gone: set[Key] = set()
        ready = {key for key in self.edges if not needed_by[key]}
        while ready:
            key = min(ready, key=lambda key: (key not in hurried, rank[key]))
            ready.discard(key)
            gone.add(key)
            if key in left:
                done.append(key)
            ready |= {other for other in self.edges[key] if needed_by[other] <= gone and other not in gone}
        assert set(done) == left, "the dependencies have a cycle"
        return done


def teardown(
    plan: Plan, order: Iterable[Key], delete: Callable[[Key], None], failures: tuple[type[Exception], ...]
) -> list[tuple[Key, Exception]]:
    """Deletes in order, as CloudFormation does: what failed keeps what it needs, the rest of its stack goes on, and
    the command line goes to no further stack. Returns what failed, with the reason."""
    failed: list[tuple[Key, Exception]] = []
    kept: set[Key] = set()
    for key in order:
        if key in kept or (failed and key[0] != failed[0][0][0]):
            continue
        try:
            delete(key)
        except failures as error:
            failed.append((key, error))
            kept |= plan.reach(key)
    return failed
