"""Which requests may wait: identity, size and queue limits. Knows no schedule and no worker."""

from __future__ import annotations

from itertools import count

from runtime.front.errors import DuplicateRequest, InvalidRequest, Overloaded
from runtime.request import MAX_STOP_TOKEN_IDS, Request
from state.pages import num_pages_for, num_reserved_tokens
from workers.plan import WorkerDescription


class Intake:
    """Numbers requests, keeps the names of live ones apart and bounds the queue.

    max_waiting: requests that may wait beyond those that the next step takes.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._uids = count(1)
        self._live_ids: set[str] = set()

    def next_uid(self) -> int:
        return next(self._uids)

    def accept(self, request: Request, description: WorkerDescription, *, num_waiting: int, num_openings: int) -> None:
        """Takes a request in; its name is live until `forget`.

        num_waiting: requests in the queue.
        num_openings: those of them that the next step may take.

        Raises InvalidRequest, DuplicateRequest or Overloaded; nothing is changed then.
        """
        check_servable(request, description)
        if request.request_id in self._live_ids:
            raise DuplicateRequest(f"request_id {request.request_id!r} is live; wait for its end or choose another")
        if num_waiting >= self._max_waiting + num_openings:
            raise Overloaded(f"{num_waiting} requests wait, the queue holds {self._max_waiting}; try again later")
        self._live_ids.add(request.request_id)

    def forget(self, request_id: str) -> None:
        """Frees the name of a request that has ended."""
        self._live_ids.remove(request_id)


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
