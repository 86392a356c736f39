"""What smg makes of each of our errors: its HTTP status, and how often it asks again. Over the fake engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from fakes.front import in_loop, serving
from gateway.smg_gateway import Smg, open_smg

from runtime.front.errors import (
    AbortedByOperator,
    DuplicateRequest,
    Forbidden,
    InternalError,
    InvalidRequest,
    MissingFeature,
    NotServed,
    OutriderError,
    Overloaded,
    OverQuota,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from runtime.request import Request

TRIES = 5
"""By default."""


class Refusing:
    """Takes the place of an engine's `submit`."""

    def __init__(self, error: OutriderError) -> None:
        self.error = error
        self.num_asked = 0

    def __call__(self, request: Request) -> None:
        self.num_asked += 1
        raise self.error


def ask(smg: Smg, **options: object) -> openai.APIStatusError:
    with smg.client() as client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="demo", prompt="x", max_tokens=3, **options)  # type: ignore[call-overload]
    return caught.value


CASES: list[tuple[OutriderError, int, int]] = [
    (InvalidRequest("stopping.max_tokens", "is wrong"), 400, 1),
    (MissingFeature("something is missing"), 400, 1),
    (Unauthenticated("nobody is known"), 401, 1),
    (Forbidden("it is not allowed"), 403, 1),
    (UnknownModel("another is served"), 404, 1),
    (DuplicateRequest("the id is live"), 409, 1),
    (AbortedByOperator("an operator did"), 409, 1),
    (Overloaded("the queue is full"), 429, TRIES),
    (OverQuota("the limit is reached"), 429, TRIES),
    (InternalError("a defect"), 500, 1),
    (NotServed("not here"), 501, 1),
    (Unavailable("try again"), 503, TRIES),
]


def test_refusals_have_their_status_and_only_some_are_tried_again(tmp_path: Path) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving() as front:

            def check() -> None:
                with open_smg([front.address], tmp_path, "--retry-initial-backoff-ms", "1") as smg:
                    for error, status, tries in CASES:
                        for stream in (False, True):
                            refusing = Refusing(error)
                            front.engine.submit = refusing  # type: ignore[method-assign, assignment]
                            told = ask(smg, stream=stream)
                            assert (told.status_code, refusing.num_asked) == (status, tries), error
                            assert error.args[0].split(": ")[-1] in told.response.text

            await asyncio.to_thread(check)

    scenario()


@in_loop
async def test_an_error_behind_the_first_tokens_ends_the_stream_and_is_not_tried_again(tmp_path: Path) -> None:
    async with serving(steps_by_itself=False) as front:
        loop = asyncio.get_running_loop()

        def check() -> str:
            with open_smg([front.address], tmp_path) as smg, smg.client() as client:
                parts = client.completions.create(model="demo", prompt="x", max_tokens=30, stream=True)
                text = next(parts).choices[0].text
                loop.call_soon_threadsafe(fail)
                with pytest.raises(openai.APIError, match="a worker was lost") as caught:
                    list(parts)
                # The status has been 200 for a while.
                assert not isinstance(caught.value, openai.APIStatusError)
            return text

        def fail() -> None:
            front.engine.fail(front.engine.submitted[0].uid, Unavailable("a worker was lost"))

        checking = asyncio.create_task(asyncio.to_thread(check))
        await front.engine.until(lambda: bool(front.engine.live))
        front.engine.step()
        assert await checking == "abc"
        assert len(front.engine.submitted) == 1
