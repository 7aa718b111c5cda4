"""The next batch, prepared in a thread while the device computes: it is a function of (config, step)."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


def worker_thread(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread that runs already: starting one in a process without free memory may never return."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"scalelong-{name}")
    pool.submit(int).result()
    return pool


class Ahead(Generic[T]):
    """`Ahead(make)(step)` returns make(step) and starts on make(step + 1). An error is raised at its own step."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self.make = make
        self._pool = worker_thread("batch")
        self._next: tuple[int, Future[T]] | None = None

    def __call__(self, step: int, more: bool = True) -> T:
        """`more=False`: no step follows."""
        number, future = self._next or (0, None)
        result = future.result() if future is not None and number == step else self.make(step)
        self._next = (step + 1, self._pool.submit(self.make, step + 1)) if more else None
        return result
