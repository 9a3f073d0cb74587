"""Whose turn it is to compute: whoever has had the least so far. Pure.

Jobs wait at the end of a path: peer, then link, then session. Of the peers with something to do,
the one that has used the fewest seconds comes first; of its links the same; of their sessions too.
Someone who was away does not get the past back: he starts level with whoever was served last. So
nobody's flood costs another more than one job's wait, however many links or sessions it comes by.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
Path = tuple[str, ...]


class Turns(Generic[T]):
    """What waits, and what each has used."""

    def __init__(self) -> None:
        self._root = Node[T]()

    def __len__(self) -> int:
        return self._root.waiting

    def push(self, path: Path, job: T) -> None:
        """Lets a job wait."""
        node = self._root
        node.waiting += 1
        for name in path:
            node = node.enter(name)
            node.waiting += 1
        node.jobs.append(job)

    def pop(self) -> T:
        """The job whose turn it is. There must be one."""
        node = self._root
        node.waiting -= 1
        while not node.jobs:
            node = node.next()
            node.waiting -= 1
        return node.jobs.popleft()

    def spend(self, path: Path, seconds: float) -> None:
        """Remembers what a job of this path has used."""
        node: Node[T] | None = self._root
        for name in path:
            node = node.inner.get(name) if node else None
            if node:
                node.used += seconds

    def end(self, path: Path) -> list[T]:
        """Forgets a peer, a link or a session that is gone; returns what still waited for it."""
        *before, last = path
        nodes = [self._root]
        for name in before:
            if name not in nodes[-1].inner:
                return []
            nodes.append(nodes[-1].inner[name])
        gone = nodes[-1].inner.pop(last, None)
        jobs = gone.all_jobs() if gone else []
        for node in nodes:
            node.waiting -= len(jobs)
        return jobs


class Node(Generic[T]):
    """A peer, a link or a session."""

    def __init__(self, used: float = 0.0) -> None:
        self.used = used
        """Seconds."""
        self.level = 0.0
        """What the one served last in here had used before."""
        self.waiting = 0
        """Jobs in here and further in."""
        self.inner: dict[str, Node[T]] = {}
        self.jobs: deque[T] = deque()

    def enter(self, name: str) -> "Node[T]":
        """The node of this name, which has something to do now."""
        node = self.inner.setdefault(name, Node(self.level))
        if not node.waiting:
            node.used = max(node.used, self.level)
        return node

    def all_jobs(self) -> list[T]:
        """What waits in here and further in."""
        return [*self.jobs, *(job for node in self.inner.values() for job in node.all_jobs())]

    def next(self) -> "Node[T]":
        """Whoever waits in here and has used least."""
        node = min((n for n in self.inner.values() if n.waiting), key=lambda n: n.used)
        self.level = max(self.level, node.used)
        return node
