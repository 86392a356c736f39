"""What requests bring beside their prompts: predictions, constraints and conversations, with and without, over a real
front and a scripted engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes.bench import PROMPTS, asked_of, session_of
from fakes.engine import DESCRIPTION
from fakes.front import in_loop, serving

from configs.load import SettingsError
from runtime.bench.completion import generate_request
from runtime.bench.errors import BenchError
from runtime.bench.extras import Conversation, Extras, Variant, parse_variants
from runtime.bench.load import Closed, Open, Policy, Share
from runtime.bench.prepare import plan_of, prepare, read_workload
from runtime.bench.report import load_name, load_of, load_text
from runtime.bench.session import Session
from runtime.bench.workload import Prompt, WorkloadError
from runtime.request import Request
from workers.demands import Constraint

WITH, WITHOUT = Variant(brings=True), Variant(brings=False)
LOOKING, LOOKING_ONLY = Variant(brings=True, ngram=True), Variant(brings=False, ngram=True)
TALK = Conversation((("user", "def f("), ("assistant", "self):"), ("user", "go on")))
SCHEMA = '{"type": "integer"}'
FULL = replace(PROMPTS, predictions={0: (66, 67), 1: "import os"}, json_schemas={1: SCHEMA})


def test_variants_are_named_once_each_and_what_is_none_is_refused():
    found = parse_variants(["with, without", "with+ngram,without+ngram", "with"])
    assert found == [WITH, WITHOUT, LOOKING, LOOKING_ONLY]
    assert parse_variants([",".join(map(str, found))]) == found
    for text in ("ngram", "with+", "", "with without"):
        with pytest.raises(SettingsError, match=r"--variant .*: choose of with, without, with\+ngram, without\+ngram"):
            parse_variants([text])


@pytest.mark.parametrize("load", [Closed(4, 0.5, WITH), Open(2.0, None, LOOKING_ONLY), Closed(1, None, WITHOUT)])
def test_a_load_says_its_variant_in_words_and_in_the_report(load):
    assert str(load).endswith(f", {load.variant}")
    name = load_name(load)
    assert name.variant == str(load.variant)
    assert load_of(name) == load
    assert load_text(name) == str(load)
    assert Share(0.5, None, WITH).of(10.0) == Open(5.0, None, WITH)


def test_a_request_brings_what_it_is_given_and_nothing_else():
    plain = generate_request((5,), 3)
    assert not plain.HasField("prediction")
    assert not plain.HasField("constraint")
    assert not plain.HasField("ngram")
    full = generate_request(TALK, 3, extras=Extras(prediction=(1, 2), json_schema=SCHEMA, ngram=True))
    assert [(one.role, one.content) for one in full.chat.messages] == list(TALK.messages)
    assert list(full.prediction.token_ids.ids) == [1, 2]
    assert full.constraint.json_schema == SCHEMA
    assert full.ngram
    assert generate_request("x", 3, extras=Extras(prediction="y")).prediction.text == "y"


@in_loop
async def test_each_variant_sends_its_part_of_what_prompts_bring() -> None:
    variants = (WITHOUT, WITH, LOOKING, LOOKING_ONLY)
    loads = tuple(Closed(1, None, one) for one in variants)
    async with serving(run_length=1) as front:
        asked = asked_of(loads=loads, policies=(Policy(None),), requests=2, warmup=0)
        session = Session(front.client, asked, FULL, note_cell=lambda slot: None, note_request=lambda: None)
        await session.run()
        sent = front.engine.submitted
        imported = tuple(await front.client.tokenize("import os"))
    assert [run.slot.load.variant for run in session.runs] == list(variants)
    # Two that report their rounds, two that are measured.
    assert [len(sent), *(len(run.records) for run in session.runs)] == [16, 2, 2, 2, 2]
    whole = [((66, 67), None), (imported, Constraint(kind="json_schema", text=SCHEMA))]
    for number, variant in enumerate(variants):
        of_cell = sent[4 * number : 4 * number + 4]
        found = [(one.prediction, one.sampling.constraint) for one in of_cell]
        assert found == (whole if variant.brings else [((), None)] * 2) * 2
        assert {one.looks_back for one in of_cell} == {variant.ngram}


@in_loop
async def test_a_load_without_variants_brings_all_that_prompts_have() -> None:
    async with serving(run_length=1) as front:
        asked = asked_of(policies=(Policy(None),), requests=1, warmup=0)
        session = Session(front.client, asked, FULL, note_cell=lambda slot: None, note_request=lambda: None)
        await session.run()
    assert [one.prediction for one in front.engine.submitted] == [(66, 67)] * 2
    assert not front.engine.submitted[0].looks_back


def by_prompt(request: Request) -> list[int]:
    return [request.prompt[0], *range(70, 80)]


@in_loop
async def test_what_is_recorded_is_edited_and_sent_as_the_prediction_where_it_is_not_left_out() -> None:
    async with serving(by_prompt, run_length=1) as front:
        loads = (Closed(2, None, WITHOUT), Closed(2, None, WITH))
        session = session_of(front, loads=loads, policies=(Policy(2),), records=True, edit_every=2, warmup=0)
        await session.run()
        sent = front.engine.submitted
    recorded, without, with_it = sent[:2], sent[2:10], sent[10:18]
    assert len(sent) == 18
    assert not any(one.prediction for one in [*recorded, *without])
    answers = {5: (5, 70, 71, 72, 73, 74), 7: (7, 70, 71, 72)}
    for one in with_it:
        answer = answers[one.prompt[0]]
        assert one.prediction
        assert one.prediction[0] == answer[0]
        assert {*one.prediction} <= {token for each in answers.values() for token in each}
    assert {one.prediction for one in with_it} != {*answers.values()}
    assert len({one.prediction for one in with_it}) == 2
    assert plan_of(session.asked, PROMPTS).predictions == 2
    assert [run.followed for run in session.runs] == [(6, 4, 6, 4)] * 2


@in_loop
async def test_an_edited_output_is_no_longer_than_the_context_allows() -> None:
    async with serving(by_prompt, run_length=1) as front:
        session = session_of(front, policies=(Policy(2),), records=True, edit_every=1, warmup=0, seed=3)
        await session.run()
    longest = {5: 2 + 6, 7: 3 + 4}
    assert all(len(one.prediction) <= longest[one.prompt[0]] for one in front.engine.submitted)


@in_loop
async def test_what_is_recorded_of_a_constrained_prompt_is_what_it_says_under_its_constraint() -> None:
    async with serving(run_length=1) as front:
        asked = asked_of(policies=(Policy(2),), requests=1, warmup=0, records=True)
        session = Session(front.client, asked, FULL, note_cell=lambda slot: None, note_request=lambda: None)
        await session.run()
    recorded = front.engine.submitted[:2]
    assert [one.sampling.constraint for one in recorded] == [None, Constraint(kind="json_schema", text=SCHEMA)]
    assert not any(one.prediction for one in recorded)


@in_loop
async def test_a_constraint_that_cannot_be_followed_ends_the_run_with_the_servers_words() -> None:
    constraint = Constraint(kind="json_schema", text=SCHEMA)
    async with serving(run_length=1) as front:
        front.engine.problems[constraint] = "no output meets it"
        session = Session(front.client, asked_of(), FULL, note_cell=lambda slot: None, note_request=lambda: None)
        with pytest.raises(
            BenchError, match=r"refuses prompt 2 as malformed: .*constraint\.json_schema.*no output meets"
        ):
            await session.run()
        assert session.runs == []


@in_loop
async def test_conversations_are_sent_as_they_are_and_have_the_length_of_what_the_template_makes_of_them() -> None:
    async with serving(run_length=1) as front:
        asked = asked_of(workload="chat", policies=(Policy(None),), requests=2, warmup=0)
        found = (await prepare(front.client, asked, [Prompt(content=TALK), Prompt(content=(9,))])).prompts
        session = Session(front.client, asked, found, note_cell=lambda slot: None, note_request=lambda: None)
        await session.run()
        text = "".join(f"# {role}: {content}\n" for role, content in TALK.messages)
        rendered = tuple(await front.client.tokenize(text))
    assert found.conversations == {0: TALK}
    assert found.ids == (rendered, (9,))
    assert [one.prompt for one in front.engine.submitted] == [rendered, (9,)] * 2


@in_loop
async def test_what_cells_cannot_tell_apart_or_send_is_refused_before_anything_is_measured() -> None:
    both = tuple(Closed(1, None, one) for one in (WITH, WITHOUT))
    async with serving() as front:
        with pytest.raises(WorkloadError, match=r"^--variant: no prompt brings a prediction or a constraint"):
            await prepare(front.client, asked_of(loads=both), [Prompt(content="x")])
        for prompt in (Prompt(content="x", prediction="y"), Prompt(content="x", json_schema=SCHEMA)):
            await prepare(front.client, asked_of(loads=both), [prompt])
        await prepare(front.client, asked_of(loads=both, records=True, edit_every=0), [Prompt(content="x")])
        looking = tuple(Closed(1, None, one) for one in (WITH, LOOKING_ONLY))
        await prepare(front.client, asked_of(loads=looking), [Prompt(content="x")])
        with pytest.raises(WorkloadError, match=r"^a.jsonl:3: a conversation of \d+ tokens, which --prompt-tokens 4"):
            await prepare(front.client, asked_of(prompt_tokens=4), [Prompt(content=TALK, where="a.jsonl:3")])
        assert front.engine.submitted == []


@in_loop
async def test_predictions_do_not_go_with_an_oracles_drafts() -> None:
    async with serving(description=replace(DESCRIPTION, drafter="oracle")) as front:
        asked = asked_of(loads=(Closed(1, 0.5),), records=True)
        with pytest.raises(WorkloadError, match="some bring predictions, which go without an oracle's drafts; give"):
            await prepare(front.client, asked, [Prompt(content="x", prediction="y")])
        await prepare(front.client, asked, [Prompt(content="x", json_schema=SCHEMA)])


def test_each_workload_brings_what_it_is_named_for():
    plain = read_workload(asked_of(workload="code-edit"))
    assert plain == read_workload(asked_of())
    constrained = read_workload(asked_of(workload="json-schema"))
    assert [one.content for one in constrained] == [one.content for one in plain]
    assert len({one.json_schema for one in constrained}) == 5
    assert all(json.loads(one.json_schema)["type"] == "object" for one in constrained)
    chats = read_workload(asked_of(workload="chat"))
    assert len(chats) == len(plain)
    for number, one in enumerate(chats):
        roles = [role for role, _ in one.content.messages]
        assert roles == ["system", *["user", "assistant"] * (number % 3 + 1), "user"]
    assert len({one.content.messages[1] for one in chats}) > 100
    assert read_workload(asked_of(workload="random")) is None
