"""Which requests may wait: identity, size and queue limits. Knows no schedule and no worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from runtime.front.errors import DuplicateRequest, InvalidRequest, Overloaded
from runtime.request import MAX_STOP_TOKEN_IDS, Request
from state.pages import num_pages_for, num_pages_together, num_reserved_tokens
from workers.plan import WorkerDescription


class Intake:
    """Numbers requests, keeps the names of live ones apart and bounds the queue.

    max_waiting: tells how many sequences may wait beyond those that the next step takes. A request of several is as
        much to do as so many requests, and counts as they do while it waits; but it is taken in where one more may
        wait, since else a stream of small ones could keep it out for ever. So the queue outgrows its bound by one
        request at most.
    """

    def __init__(self, max_waiting: Callable[[], int]) -> None:
        self._max_waiting = max_waiting
        self._next_uid = 1
        # Live sequences of each request.
        self._live_ids: Counter[str] = Counter()

    def next_uid(self, count: int = 1) -> int:
        """The first of `count` uids in a row that no sequence had before."""
        uid = self._next_uid
        self._next_uid += count
        return uid

    def accept(self, request: Request, description: WorkerDescription, *, num_waiting: int, num_openings: int) -> None:
        """Takes a request in; its name is live until `forget` was called for each of its sequences.

        num_waiting: sequences in the queue.
        num_openings: those of them that the next step may take.

        Raises InvalidRequest, DuplicateRequest or Overloaded; nothing is changed then.
        """
        check_servable(request, description)
        if request.request_id in self._live_ids:
            raise DuplicateRequest(f"request_id {request.request_id!r} is live; wait for its end or choose another")
        max_waiting = self._max_waiting()
        if num_waiting >= max_waiting + num_openings:
            raise Overloaded(f"{num_waiting} requests wait, the queue holds {max_waiting}; try again later")
        self._live_ids[request.request_id] = request.n

    def forget(self, request_id: str) -> None:
        """A sequence of a request has ended; with the last one its name is free."""
        self._live_ids[request_id] -= 1
        if not self._live_ids[request_id]:
            del self._live_ids[request_id]


def check_servable(request: Request, description: WorkerDescription) -> None:
    """Raises InvalidRequest, with the numbers, for what this worker can never run."""
    num_prompt, max_tokens = len(request.prompt), request.stopping.max_tokens
    if num_prompt == 0:
        raise InvalidRequest("input", "the prompt is empty; give at least one token")
    if max_tokens < 1:
        raise InvalidRequest("stopping.max_tokens", f"{max_tokens} is below 1")
    # An id outside the embedding would take the worker down, and everyone's streams with it.
    if not 0 <= min(request.prompt) <= max(request.prompt) < description.vocab_size:
        raise InvalidRequest("input.token_ids", f"ids must lie in 0..{description.vocab_size - 1}")
    if len(request.stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stopping.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} stop token ids are served")
    if num_prompt + max_tokens > description.max_model_len:
        field = "input" if num_prompt >= description.max_model_len else "stopping.max_tokens"
        raise InvalidRequest(
            field,
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, {num_prompt + max_tokens} in all; "
            f"the longest sequence served has {description.max_model_len}",
        )
    num_reserved = num_reserved_tokens(num_prompt + max_tokens, description.gamma_max)
    num_pages = num_pages_for(num_reserved, description.page_size)
    for group, available in zip(description.cache_groups, description.num_pages, strict=True):
        if num_pages > available:
            raise InvalidRequest(
                "stopping.max_tokens",
                f"{num_prompt} prompt tokens + {max_tokens} max_tokens + {description.gamma_max + 1} for drafts need "
                f"{num_pages} pages of {description.page_size} tokens; cache group {group} has {available}",
            )
    _check_family(request, description, num_reserved)


def _check_family(request: Request, description: WorkerDescription, num_reserved: int) -> None:
    """All sequences of a request run at the same time, on one data-parallel rank."""
    n, num_prompt, page_size = request.n, len(request.prompt), description.page_size
    if n > description.num_slots:
        raise InvalidRequest(
            "n", f"{n} sequences run at the same time, and there are slots for {description.num_slots}; ask for fewer"
        )
    num_pages = num_pages_together(num_reserved, page_size, count=n, num_shared=num_prompt - 1)
    for group, available in zip(description.cache_groups, description.num_pages, strict=True):
        if num_pages > available:
            raise InvalidRequest(
                "n",
                f"{n} sequences of {num_reserved} tokens each, drafts among them, that share a prompt of {num_prompt} "
                f"need {num_pages} pages of {page_size} tokens; cache group {group} has {available}; ask for fewer, or "
                "for a smaller max_tokens",
            )
